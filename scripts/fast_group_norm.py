"""Group normalisation whose backward pass is fast on a CPU in bfloat16 and channels_last.

torch's backward pass is scalar code there, and with few channels a group, as the bundled model's autoencoder has them,
it takes 60 % of a training step.
"""

from typing import Any

import torch
from torch import Tensor, nn

from ldm_lite.runtime.patching import kernel, patch


class _GroupNorm(torch.autograd.Function):
    """torch's forward pass; a backward pass of two sums over positions and a linear combination of x and the gradient.

    Wu and He 2018; the gradient is that of batch normalisation over the values of a group.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, groups: int, eps: float) -> Tensor:
        y, mean, rstd = torch.native_group_norm(x, weight, bias, x.shape[0], x.shape[1], x[0, 0].numel(), groups, eps)
        ctx.save_for_backward(x, weight, mean, rstd)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, mean, rstd = ctx.saved_tensors
        g = grads[0].to(x.dtype)
        size, groups, n = x.shape[:2], mean.shape[1], x[0, 0].numel()
        channels = size[1] // groups

        def spread(values: Tensor) -> Tensor:  # (B, groups) -> (B, C)
            return values.float().repeat_interleave(channels, dim=1)

        mean, rstd = spread(mean), spread(rstd)
        sum_g, sum_gx = (values.sum((2, 3)).float() for values in (g, g * x))  # (B, C)
        sum_gx = rstd * (sum_gx - mean * sum_g)  # the sum over positions of the gradient times the normalised x
        mean_g, mean_gx = (
            spread((weight * total).view(size[0], groups, channels).mean(2)) / n for total in (sum_g, sum_gx)
        )
        of_g, of_x, constant = (
            (values.to(x.dtype))[:, :, None, None]
            for values in (rstd * weight, -rstd.square() * mean_gx, rstd * (rstd * mean * mean_gx - mean_g))
        )
        return torch.addcmul(constant, g, of_g).addcmul_(x, of_x), sum_gx.sum(0), sum_g.sum(0), None, None


@kernel
def _forward(norm: nn.GroupNorm, x: Tensor) -> Tensor:
    if x.dtype != torch.bfloat16 or x.ndim != 4:
        return nn.GroupNorm.forward(norm, x)
    return _GroupNorm.apply(x, norm.weight, norm.bias, norm.num_groups, norm.eps)  # type: ignore[no-untyped-call]


def use_fast_backward(network: nn.Module) -> None:
    """Give the GroupNorms of a network this backward pass, for bfloat16 inputs (B,C,h,w); changes it in place."""
    for module in network.modules():
        if isinstance(module, nn.GroupNorm):
            patch(module, _forward)
