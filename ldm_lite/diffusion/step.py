"""The only denoising step: it runs any row of any Plan.

The row enters as tensors, so one compiled step serves every sampler, step count and guidance scale.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ldm_lite.diffusion.guidance import Conditioning, Guidance, guide
from ldm_lite.diffusion.plan import LearnedVariancePlan, Plan

Network = Callable[..., Tensor]  # (x, t, context, y) -> its prediction; also control=, cache= and inputs if given


class Row(NamedTuple):
    """One row of a Plan as float32 tensors on the device, with the names of the Plan's columns."""

    t: Tensor  # ()
    to_h: Tensor  # (2,)
    to_x0: Tensor  # (2,)
    mix: Tensor  # (R, R+2)
    stretch: Tensor  # ()


def rows(plan: Plan, device: torch.device) -> list[Row]:
    """The rows of a plan on a device, copied there at once."""
    stretch = plan.stretch if isinstance(plan, LearnedVariancePlan) else np.zeros(len(plan.t))
    columns = (plan.t, plan.to_h, plan.to_x0, plan.mix, stretch)
    tensors = [torch.tensor(column, dtype=torch.float32, device=device) for column in columns]
    return [Row(*row) for row in zip(*tensors, strict=True)]


def denoise_step(
    model: Network,
    registers: Tensor,
    row: Row,
    noise: Tensor,
    conditioning: Conditioning,
    guidance: Guidance,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Run one row: return the registers (R,B,C,h,w) float32, the first of which is the latent, after one model call.

    noise (B,C,h,w) is unit noise or zeros.  The conditioning has K*B rows for the K branches of the guidance, branch
    by branch.  The model's input is in dtype; all else is float32.  If the model's output has twice the channels, the
    second half, of the last branch, is the variance: -1 is the plan's, 1 the plan's stretched.
    """
    x = registers[0]
    batch = x if guidance.weights is None else x.repeat(len(guidance.weights), 1, 1, 1)
    if conditioning.concat is not None:
        batch = torch.cat([batch, conditioning.concat], dim=1)
    extra: dict[str, Any] = dict(conditioning.inputs or {})
    if conditioning.control is not None:
        extra["control"] = conditioning.control
    if conditioning.cache is not None:
        extra["cache"] = conditioning.cache
    t = row.t.expand(batch.shape[0])
    out = model(batch.to(dtype), t, conditioning.context, conditioning.y, **extra).float()
    if out.shape[1] == 2 * x.shape[1]:
        out, variance = out.chunk(2, dim=1)
        noise = noise * torch.exp((variance[-len(x) :] + 1) / 2 * row.stretch)
    out = guide(guidance, out, x, row.to_x0)
    prediction = row.to_h[0] * x + row.to_h[1] * out
    # Multiply and add, not matmul: the sampler's arithmetic stays float32 even if matmuls are TF32.
    terms = torch.cat([registers, prediction[None], noise[None]])
    return (row.mix[:, :, None, None, None, None] * terms).sum(dim=1)
