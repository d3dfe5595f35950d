"""ControlNet: a copy of the UNet's encoder that also reads an image; and a UNet with ControlNets.

The image is embedded once per job (`embed_hint`), not once per step.  `ControlledUNet` is the UNet and its ControlNets
as one network of tensors, so that they compile as one.

Shape letters: B batch, C channels, h w latent size, T text tokens, D context channels.
Source: Zhang et al. 2023, sec. 3; cldm.py of the original repository.
"""

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from ldm_lite.core.layers import Shapes, checked_shape
from ldm_lite.models.unet import LDMUNet, LDMUNetSpec

HINT_CHANNELS = (3, 16, 16, 32, 32, 96, 96, 256)  # of the image, and after each convolution but the last
HINT_STRIDES = (1, 1, 2, 1, 2, 1, 2, 1)


class ControlNet(LDMUNet):
    """Noised latents, a timestep, a text and an embedded image -> tensors to add to the UNet's skips and middle.

    spec has the widths and residual blocks of its UNet, but may have fewer transformers and no vector; out_channels is
    not used.
    """

    def __init__(self, spec: LDMUNetSpec) -> None:
        super().__init__(spec)
        del self.output_blocks, self.out
        layers: list[nn.Module] = []
        channels = (*HINT_CHANNELS, spec.model_channels)
        for i, stride in enumerate(HINT_STRIDES):
            layers += [nn.Conv2d(channels[i], channels[i + 1], 3, stride=stride, padding=1), nn.SiLU()]
        self.input_hint_block = nn.Sequential(*layers[:-1])
        self.zero_convs = nn.ModuleList(nn.Sequential(nn.Conv2d(c, c, 1)) for c in self.skip_channels)
        last = self.skip_channels[-1]
        self.middle_block_out = nn.Sequential(nn.Conv2d(last, last, 1))

    def embed_hint(self, image: Tensor) -> Tensor:
        """Embed the image (B,3,8h,8w) in [0,1]: (B,model_channels,h,w), the same for all steps."""
        return self.input_hint_block(image)

    def forward(  # type: ignore[override]
        self, x: Tensor, t: Tensor, context: Tensor | None, hint: Tensor, y: Tensor | None = None
    ) -> tuple[Tensor, ...]:
        """Return `residuals` of UNet.forward: one (B,C,h',w') for each input block, and one for the middle.

        x (B,in_channels,h,w), t (B,), context (B,T,D), y (B,vector_dim); hint is the output of embed_hint (B or 1).
        """
        emb = self.embed(t, y)
        context = cast(Tensor, context if context is None else context.to(emb.dtype))
        outputs = self.down(x, emb, context, [hint, *[None] * len(self.input_blocks)])
        convs = [*self.zero_convs, self.middle_block_out]
        return tuple(conv(output) for conv, output in zip(convs, outputs, strict=True))


def infer_spec(shapes: Shapes) -> LDMUNetSpec:
    """Return the spec of a ControlNet whose weights have these shapes, without heads, as LDMUNetSpec.from_shapes.

    Raises ValueError if a tensor that every ControlNet has is missing or makes no sense.
    """
    return LDMUNetSpec.from_shapes(
        {**shapes, "out.2.weight": checked_shape(shapes, "input_blocks.0.0.weight", 4)[1:2] * 4}
    )


def guess_scales(num: int) -> list[float]:
    """Return the `num` factors of guess mode, growing with depth to 1 in the middle: 0.825^(12-i) in the original."""
    return [0.825 ** (num - 1 - i) for i in range(num)]


class ControlInput(NamedTuple):
    """Input of one ControlNet in a step, in addition to the UNet's."""

    hint: Tensor  # (1,C,h,w) of embed_hint
    scales: Tensor  # (S,) float32, the factors of its S results; all zero = no effect
    num_branches: int  # the last `positive`-th part of the batch is controlled; 1: all of it
    pool: bool  # average its results over all positions, for the shuffle network
    positive: int = 1


class ControlInputs(NamedTuple):
    """Further inputs of a ControlledUNet in a step: tensors, so that all steps are one compiled graph."""

    nets: tuple[ControlInput | None, ...]  # one for each ControlNet; None = it does not run
    features: tuple[Tensor | None, ...] | None  # of T2I-Adapters, as UNet.forward takes them


class ControlledUNet(nn.Module):
    """A UNet and its ControlNets, as one network."""

    def __init__(self, unet: nn.Module, nets: Iterable[nn.Module]) -> None:
        super().__init__()
        self.unet = unet
        self.nets = nn.ModuleList(nets)

    def forward(self, x: Tensor, t: Tensor, control: ControlInputs, **inputs: Any) -> Tensor:
        """Run as UNet.forward; a ControlNet reads as many of the first channels of x and y as its spec has."""
        residuals: tuple[Tensor, ...] | None = None
        for net, control_input in zip(self.nets, control.nets, strict=True):
            assert isinstance(net, ControlNet)
            if control_input is not None:
                more = _residuals(net, control_input, x, t, inputs)
                residuals = more if residuals is None else tuple(a + b for a, b in zip(residuals, more, strict=True))
        return self.unet(x, t, residuals=residuals, features=control.features, **inputs)


def _residuals(
    net: ControlNet, control: ControlInput, x: Tensor, t: Tensor, inputs: Mapping[str, Tensor]
) -> tuple[Tensor, ...]:
    """Return the tensors that a ControlNet adds to the UNet's skips and middle, for the whole batch."""
    first = x.shape[0] // control.num_branches * (control.num_branches - control.positive)
    if "concat" in inputs and net.spec.in_channels > x.shape[1]:
        x = torch.cat([x, inputs["concat"].to(x.dtype)], dim=1)
    context = inputs["context"][first:] if "context" in inputs else None
    vector = inputs["y"][first:, : net.spec.vector_dim] if "y" in inputs and net.spec.vector_dim is not None else None
    results: tuple[Tensor, ...] = net(x[first:, : net.spec.in_channels], t[first:], context, control.hint, vector)
    results = tuple(scale * result for scale, result in zip(control.scales, results, strict=True))
    if control.pool:
        results = tuple(result.mean(dim=(2, 3), keepdim=True) for result in results)
    if first > 0:
        results = tuple(torch.cat([result.new_zeros(first, *result.shape[1:]), result]) for result in results)
    return results
