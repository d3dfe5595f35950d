"""Group normalisation of large feature maps on a CPU, as exact as that of small ones.

For channels-last maps PyTorch's CPU kernel sums each group in one float32 accumulator: at 512 x 512 positions the
relative error is 1e-5, a hundred times that of other layers, and it grows with the map.  Here the kernel normalises
strips of the map, each by its own statistics; the statistics of the whole map are then computed from theirs in
float64, and one more pass corrects the strips.

For inference in float32; everything else runs PyTorch's kernel.

Shape letters: B batch, C channels, G groups.
"""

import torch
from torch import Tensor, nn

from ldm_lite.runtime.patching import kernel, patch

LARGE = 256 * 256  # positions of a map above which strips are used: below, the plain kernel's error is 1e-6 at most
STRIP = 128 * 128  # positions of a strip at most: its error is 2e-7


def normalise(x: Tensor, norm: nn.GroupNorm) -> Tensor:
    """Normalise x (B,C,h,w), channels last, by groups of channels."""
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


@kernel
def _forward(norm: nn.GroupNorm, x: Tensor) -> Tensor:
    if torch.is_grad_enabled() or torch.compiler.is_compiling():
        return nn.GroupNorm.forward(norm, x)
    large = x.ndim == 4 and x.dtype == torch.float32 and x.device.type == "cpu" and x[0, 0].numel() > LARGE
    last = large and x.is_contiguous(memory_format=torch.channels_last)
    return normalise(x, norm) if last else nn.GroupNorm.forward(norm, x)


def use(network: nn.Module) -> None:
    """Make the group norms of a network normalise large maps in strips."""
    for module in network.modules():
        if type(module) is nn.GroupNorm:
            patch(module, _forward)
