"""Small networks for conditioning on something other than text: a class, or a map of labels.

Shape letters: B batch, D width of the context, N number of labels, H W image size.
Source: Rombach et al. 2022, sec. 4.3; CompVis encoders/modules.py (ClassEmbedder, SpatialRescaler).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor, nn
from torch.nn import functional as F

from ldm_lite.core.layers import Shapes, checked_shape
from ldm_lite.models.ops import Fitted


@dataclass(frozen=True)
class ClassSpec(Fitted):
    """Sizes of a class embedder."""

    num_classes: int  # rows of the table, including the unconditional one
    width: int
    guided: bool = False  # trained with an unconditional class, the last one; not known from the weights

    untold: ClassVar[tuple[str, ...]] = ("guided",)

    @staticmethod
    def from_shapes(shapes: Shapes) -> ClassSpec:
        """Return the spec of an embedder with weights of these shapes.  Raises ValueError if they make no sense."""
        num_classes, width = checked_shape(shapes, "embedding.weight", 2)
        return ClassSpec(num_classes, width)

    @property
    def unconditional(self) -> int | None:
        """The class of guidance's unconditional branch, if there is one."""
        return self.num_classes - 1 if self.guided else None


@dataclass(frozen=True)
class LabelMapSpec(Fitted):
    """Sizes of a label map's rescaler."""

    num_labels: int
    channels: int
    halvings: int = 2  # not known from the weights

    untold: ClassVar[tuple[str, ...]] = ("halvings",)

    @staticmethod
    def from_shapes(shapes: Shapes) -> LabelMapSpec:
        """Return the spec of a rescaler with weights of these shapes.  Raises ValueError if they make no sense."""
        channels, num_labels = checked_shape(shapes, "channel_mapper.weight", 4)[:2]
        return LabelMapSpec(num_labels, channels)


class ClassEmbedder(nn.Module):
    """Classes (B,) int64 -> context (B,1,D): each class is a single token."""

    def __init__(self, spec: ClassSpec) -> None:
        super().__init__()
        self.spec = spec
        self.embedding = nn.Embedding(spec.num_classes, spec.width)

    def forward(self, classes: Tensor) -> Tensor:
        return self.embedding(classes[:, None])


class LabelMapRescaler(nn.Module):
    """Labels (B,H,W) int64 -> channels to concatenate with the latents (B,channels,H/2^halvings,W/2^halvings)."""

    def __init__(self, spec: LabelMapSpec) -> None:
        super().__init__()
        self.spec = spec
        self.channel_mapper = nn.Conv2d(spec.num_labels, spec.channels, 1, bias=False)

    def forward(self, labels: Tensor) -> Tensor:
        one_hot = F.one_hot(labels, self.spec.num_labels).permute(0, 3, 1, 2)  # (B, N, H, W)
        # The original halves by bilinear interpolation, which averages 2x2 pixels.
        return self.channel_mapper(F.avg_pool2d(one_hot.to(self.channel_mapper.weight.dtype), 2**self.spec.halvings))
