"""The only denoising step: it runs any row of any Plan.

The row enters as tensors, so one compiled step serves every sampler, step count and guidance scale.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from ldm_lite.diffusion.guidance import classifier_free

Model = Callable[[Tensor, Tensor, Tensor], Tensor]


def denoise_step(
    model: Model,
    registers: Tensor,
    t: Tensor,
    to_prediction: Tensor,
    mix: Tensor,
    noise: Tensor,
    context: Tensor,
    scale: Tensor | None,
) -> Tensor:
    """One row: registers (R,B,C,h,w) float32, of which the first is the latent -> the same after one model call.

    t () is the network's timestep; to_prediction (2,) and mix (R,R+2) are the row; noise (B,C,h,w) is unit noise or
    zeros.  context is (B,T,D) with scale None, or with a scale () (2B,T,D), the unconditional half first.  The model
    is called as model(x, t, context) in the dtype of context; all else is float32.
    """
    x = registers[0]
    batch = x if scale is None else torch.cat([x, x])
    out = model(batch.to(context.dtype), t.expand(batch.shape[0]), context).float()
    if scale is not None:
        out = classifier_free(out, scale)
    prediction = to_prediction[0] * x + to_prediction[1] * out
    # Multiply and add, not matmul: the sampler's arithmetic stays float32 where matmuls are TF32.
    terms = torch.cat([registers, prediction[None], noise[None]])
    return (mix[:, :, None, None, None, None] * terms).sum(dim=1)
