"""Group normalisation that the compiler fuses well on a GPU.

Inductor compiles PyTorch's group norm to four kernels, and to a fifth that restores channels last if sizes may change.
Written out for channels-last maps it takes three: statistics of lines, statistics of groups, and the result.

For compiled inference on a GPU; everything else runs PyTorch's norm.

Shape letters: B batch, C channels, G groups.
"""

import torch
from torch import Tensor, nn

from ldm_lite.runtime.patching import kernel, patch


def written_out(x: Tensor, norm: nn.GroupNorm) -> Tensor:
    """Normalise x (B,C,h,w) by groups of channels in float32, in operations that fuse well."""
    (batch, channels, h, _), groups = x.shape, norm.num_groups
    pixels = x.permute(0, 2, 3, 1).float()  # (B, h, w, C)
    variances, means = torch.var_mean(pixels, dim=2, correction=0)  # of lines, (B, h, C)
    variances, means = variances.view(batch, h, groups, -1), means.view(batch, h, groups, -1)
    mean = means.mean((1, 3), keepdim=True)  # (B, 1, G, 1)
    rate = ((variances + (means - mean).square()).mean((1, 3), keepdim=True) + norm.eps).rsqrt()
    scale = rate * norm.weight.float().view(groups, -1)  # (B, 1, G, C/G)
    shift = norm.bias.float().view(groups, -1) - mean * scale
    scale, shift = scale.view(batch, 1, 1, channels), shift.view(batch, 1, 1, channels)
    return (pixels * scale + shift).to(x.dtype).permute(0, 3, 1, 2)


@kernel
def _forward(norm: nn.GroupNorm, x: Tensor) -> Tensor:
    fuses = x.ndim == 4 and x.is_cuda and torch.compiler.is_compiling() and not torch.is_grad_enabled()
    return written_out(x, norm) if fuses else nn.GroupNorm.forward(norm, x)


def use(network: nn.Module) -> None:
    """Use this form for the group norms of a network in compiled steps."""
    for module in network.modules():
        if type(module) is nn.GroupNorm:
            patch(module, _forward)
