"""ControlNet: a copy of the UNet's way down that reads a picture too, and what it tells the UNet.

What is unusual about it:
- it is the UNet's own `Encoder` with three small additions, so whatever speeds that up speeds this up;
- the picture is embedded once a job (`embed`), not once a step;
- `Steered` is the UNet and all that steers it as one network of tensors, so that they compile as one.

Shape letters: B batch, C channels, h w latent size, T text tokens, D context channels.
Source: Zhang et al. 2023, sec. 3; cldm.py of the original repository.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ldm_lite.models.ops import channels_last
from ldm_lite.models.unet import Encoder, UNet, UNetSpec

HINT_CHANNELS = (3, 16, 16, 32, 32, 96, 96, 256)  # of the picture, and after each convolution but the last
HINT_STRIDES = (1, 1, 2, 1, 2, 1, 2, 1)


class ControlNet(Encoder):
    """Noised latents, a timestep, a text and an embedded picture -> what to add to the UNet's skips and middle.

    spec has the widths and residual blocks of the UNet it is for, may have fewer transformers, and no vector where that
    has one; its out_channels is of no use here.
    """

    def __init__(self, spec: UNetSpec) -> None:
        super().__init__(spec)
        layers: list[nn.Module] = []
        channels = (*HINT_CHANNELS, spec.model_channels)
        for i, stride in enumerate(HINT_STRIDES):
            layers += [nn.Conv2d(channels[i], channels[i + 1], 3, stride=stride, padding=1), nn.SiLU()]
        self.input_hint_block = nn.Sequential(*layers[:-1])
        self.zero_convs = nn.ModuleList(nn.Sequential(nn.Conv2d(c, c, 1)) for c in self._skips)
        last = self._skips[-1]
        self.middle_block_out = nn.Sequential(nn.Conv2d(last, last, 1))

    def embed_hint(self, picture: Tensor) -> Tensor:
        """The picture (B,3,8h,8w) in [0,1] -> (B,model_channels,h,w), the same at every step."""
        return self.input_hint_block(picture)

    def forward(
        self, x: Tensor, t: Tensor, context: Tensor | None, hint: Tensor, y: Tensor | None = None
    ) -> tuple[Tensor, ...]:
        """x (B,in_channels,h,w), t (B,), context (B,T,D), hint of embed_hint (B or 1), y (B,vector_dim) -> `control`.

        That is UNet.forward's: one (B,C,h',w') for each input block, and one for the middle.
        """
        x, emb = channels_last(x), self.embed(t, y, x.dtype)
        out = []
        for i, (block, zero_conv) in enumerate(zip(self.input_blocks, self.zero_convs, strict=True)):
            x = block(x, emb, context, None)
            x = x + hint if i == 0 else x
            out.append(zero_conv(x))
        x = self.middle_block(x, emb, context, None)
        return *out, self.middle_block_out(x)


def guess_scales(num: int) -> list[float]:
    """The `num` factors of guess mode, the deeper the larger, to 1 in the middle: the original's 0.825^(12-i)."""
    return [0.825 ** (num - 1 - i) for i in range(num)]


class Hint(NamedTuple):
    """What a ControlNet of Steered reads in a step, beside what the UNet reads."""

    picture: Tensor  # (1,C,h,w) of embed_hint
    scales: Tensor  # (S,) float32, what its S results are multiplied by; all zero = it does not steer now
    share: int  # K: of a batch of K branches, one after the other, the last alone is steered; 1: all of them are
    pool: bool  # its results are averaged over the picture, as the shuffle network wants


class Hints(NamedTuple):
    """What Steered reads in a step, beside what the UNet reads: tensors, so that all steps are one compiled graph."""

    nets: tuple[Hint | None, ...]  # one for each net; None = it is not run
    features: tuple[Tensor | None, ...] | None  # those of T2I-Adapters, as UNet.forward takes them


class Steered(nn.Module):
    """A UNet and the ControlNets that steer it, as one network."""

    def __init__(self, unet: UNet, nets: Sequence[ControlNet]) -> None:
        super().__init__()
        self.unet = unet
        self.nets = nn.ModuleList(nets)

    def forward(self, x: Tensor, t: Tensor, context: Tensor | None, y: Tensor | None, hints: Hints) -> Tensor:
        """As UNet.forward; a ControlNet reads as many of x's channels as it has, and of y's as its vector is wide."""
        control: tuple[Tensor, ...] | None = None
        # What the UNet's layers made of time and text before is of no use to others.
        time, text = t if t.ndim == 1 else t[:, 0], context
        if context is not None:
            text = context[:, :, : self.unet.spec.context_dim]
        for net, hint in zip(self.nets, hints.nets, strict=True):
            assert isinstance(net, ControlNet)
            if hint is not None:
                more = _results(net, hint, x, time, text, y)
                control = more if control is None else tuple(a + b for a, b in zip(control, more, strict=True))
        return self.unet(x, t, context, y, control=control, features=hints.features)


def _results(
    net: ControlNet, hint: Hint, x: Tensor, t: Tensor, context: Tensor | None, y: Tensor | None
) -> tuple[Tensor, ...]:
    """What a net adds to the UNet's skips and middle, for the whole batch."""
    first = 0 if hint.share == 1 else x.shape[0] - x.shape[0] // hint.share
    text = None if context is None else context[first:]
    vector = None if y is None or net.spec.vector_dim is None else y[first:, : net.spec.vector_dim]
    results: tuple[Tensor, ...] = net(x[first:, : net.spec.in_channels], t[first:], text, hint.picture, vector)
    results = tuple(scale * each for scale, each in zip(hint.scales, results, strict=True))
    if hint.pool:
        results = tuple(each.mean(dim=(2, 3), keepdim=True) for each in results)
    if hint.share > 1:
        results = tuple(torch.cat([each.new_zeros(first, *each.shape[1:]), each]) for each in results)
    return results
