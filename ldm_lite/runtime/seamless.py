"""Images whose opposite edges fit together: convolutions that read the opposite edge beyond an edge.

On both axes this is `padding_mode="circular"` of every convolution, AUTOMATIC1111's "Tiling"; on one axis the other
keeps its zeros.  A network is copied for it, with the same weights: the given one does not change.
"""

from dataclasses import dataclass
from typing import Any, TypeVar

from torch import Tensor, nn
from torch.nn import functional as F

from ldm_lite.core.layers import shared_copy
from ldm_lite.runtime.patching import patch, patch_of, unpatch

AXES = ("x", "y", "xy")  # along which images fit together: x is left to right

AnyNetwork = TypeVar("AnyNetwork", bound=nn.Module)


def seamless(network: AnyNetwork, axes: str) -> AnyNetwork:
    """Return a network of the same weights, whose convolutions are circular along the axes, one of AXES.

    It computes whole feature maps, not strips.  Raises ValueError for a network without convolutions that are padded.
    """
    result: Any = shared_copy(network)
    convolutions = [layer for layer in result.modules() if isinstance(layer, nn.Conv2d) and any(layer.padding)]
    if not convolutions:
        raise ValueError(f"{type(network).__name__} has no padded convolutions: it makes no seamless images")
    for name in ("encoder", "decoder"):  # tiling.py may have patched these
        if hasattr(result, name):
            unpatch(getattr(result, name))
    for conv in convolutions:
        patch(conv, _Circular(axes))
    return result


def axes_of(network: nn.Module) -> str | None:
    """Return the axes along which a network's convolutions are circular; None for an ordinary network."""
    patches = (patch_of(module) for module in network.modules())
    return next((patch.axes for patch in patches if isinstance(patch, _Circular)), None)


@dataclass(frozen=True)
class _Circular:
    """A convolution's forward, circular along the axes."""

    axes: str

    def __call__(self, conv: nn.Conv2d, x: Tensor) -> Tensor:
        assert not isinstance(conv.padding, str)
        down, across = conv.padding
        if "x" in self.axes:
            x, across = F.pad(x, (across, across, 0, 0), "circular"), 0
        if "y" in self.axes:
            x, down = F.pad(x, (0, 0, down, down), "circular"), 0
        return F.conv2d(x, conv.weight, conv.bias, conv.stride, (down, across), conv.dilation, conv.groups)
