"""Group normalisation where PyTorch's own is not at its best: large maps on a CPU, and compiled steps on a GPU.

PyTorch's CPU kernel for maps whose channels lie last adds a group up in one float32 sum: at 512 x 512 positions its
relative error is 1e-5, a hundred times that of other layers, and it grows with the map.  Here the kernel normalises
strips of the map, each by its own statistics; those of the whole are put together from them in float64, and the strips
corrected, which is one more pass over the map.  So in float32.

For a GPU the compiler writes PyTorch's norm as four kernels, and a fifth that puts the channels last again where sizes
may change.  Written out for maps whose channels lie last it is three: statistics of lines, of groups, and the result.

For inference; everything else takes the plain way.

Shape letters: B batch, C channels, G groups.
"""

from types import MethodType

import torch
from torch import Tensor, nn

LARGE = 256 * 256  # positions of a map above which it pays: below, the plain kernel's error is 1e-6 at most
STRIP = 128 * 128  # positions of a strip at most: its error is 2e-7


def normalise(x: Tensor, norm: nn.GroupNorm) -> Tensor:
    """x (B,C,h,w), channels last -> the same, normalised by groups of channels."""
    (batch, channels, h, w), groups = x.shape, norm.num_groups
    num = next((s for s in range(1, h) if h % s == 0 and h // s * w <= STRIP), h)  # strips of a map
    strips = x.permute(0, 2, 3, 1).view(batch * num, h // num, w, channels).permute(0, 3, 1, 2)
    size = (batch * num, channels, h // num * w)
    out, means, rates = torch.native_group_norm(strips, None, None, *size, groups, norm.eps)  # rate: 1/deviation
    means, rates = (each.double().view(batch, num, groups, 1) for each in (means, rates))

    squares = rates**-2 - norm.eps + means**2  # mean squares
    mean, square = means.mean(dim=1, keepdim=True), squares.mean(dim=1, keepdim=True)  # of the whole map
    rate = (square - mean**2 + norm.eps).rsqrt()
    weight, bias = norm.weight.double().view(groups, -1), norm.bias.double().view(groups, -1)
    scale = (rate / rates * weight).float().view(-1, channels, 1, 1)
    shift = ((means - mean) * rate * weight + bias).float().view(-1, channels, 1, 1)
    torch.addcmul(shift, out, scale, out=out)
    return out.permute(0, 2, 3, 1).view(batch, h, w, channels).permute(0, 3, 1, 2)


def written_out(x: Tensor, norm: nn.GroupNorm) -> Tensor:
    """x (B,C,h,w) -> the same, normalised by groups of channels in float32, in operations that fuse well."""
    (batch, channels, h, _), groups = x.shape, norm.num_groups
    pixels = x.permute(0, 2, 3, 1).float()  # (B, h, w, C)
    variances, means = torch.var_mean(pixels, dim=2, correction=0)  # of lines, (B, h, C)
    variances, means = (each.view(batch, h, groups, -1) for each in (variances, means))
    mean = means.mean((1, 3), keepdim=True)  # (B, 1, G, 1)
    rate = ((variances + (means - mean).square()).mean((1, 3), keepdim=True) + norm.eps).rsqrt()
    scale = rate * norm.weight.float().view(groups, -1)  # (B, 1, G, C/G)
    shift = norm.bias.float().view(groups, -1) - mean * scale
    scale, shift = (each.view(batch, 1, 1, channels) for each in (scale, shift))
    return (pixels * scale + shift).to(x.dtype).permute(0, 3, 1, 2)


def _forward(norm: nn.GroupNorm, x: Tensor) -> Tensor:
    if x.ndim != 4 or torch.is_grad_enabled():
        return nn.GroupNorm.forward(norm, x)
    if torch.compiler.is_compiling():
        return written_out(x, norm) if x.is_cuda else nn.GroupNorm.forward(norm, x)
    large = x.dtype == torch.float32 and x.device.type == "cpu" and x[0, 0].numel() > LARGE
    last = large and x.is_contiguous(memory_format=torch.channels_last)
    return normalise(x, norm) if last else nn.GroupNorm.forward(norm, x)


def use(network: nn.Module) -> None:
    """Let the group norms of a network take these ways where they pay."""
    for module in network.modules():
        if type(module) is nn.GroupNorm:
            module.forward = MethodType(_forward, module)  # type: ignore[method-assign]
