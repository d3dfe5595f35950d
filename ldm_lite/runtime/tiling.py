"""An autoencoder strip by strip: large pictures in little memory, and no seams.

Tiles that are decoded each on its own differ where they meet: their borders are padded, and their norms see other
statistics.  Here every convolution goes over horizontal strips, with the rows beside a strip that it reads, and every
norm takes the statistics of the whole picture first: so the result is that of the whole picture, to rounding.  What is
in memory are two or three feature maps, which may rest on another device, and one strip of all the rest.

Attention, at the latents' resolution, is left as it is: it needs the whole picture, and little memory.
"""

import copy
import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ldm_lite.models.vae_kl import Decoder, Encoder, ResnetBlock, Upsample

STRIP = 2**21  # numbers in a strip: 4 MiB in half precision

Network = TypeVar("Network", bound=nn.Module)


def tiled(vae: Network, rest: torch.device | str | None = None) -> Network:
    """The same autoencoder with the same weights, computing strip by strip, for inference; vae stays as it is.

    rest is where feature maps are kept between layers, None for where they are computed.  An autoencoder without large
    feature maps (TAESD) is returned as it is.
    """
    encoder, decoder = getattr(vae, "encoder", None), getattr(vae, "decoder", None)
    if not isinstance(encoder, Encoder) or not isinstance(decoder, Decoder):
        return vae
    result: Any = _shallow(vae)
    result.encoder, result.decoder = _shallow(encoder), _shallow(decoder)
    # Instance attributes in place of the methods; of the copies, so that a deep copy of them computes with its weights.
    result.encoder.descend = functools.partial(_Strips(rest).descend, result.encoder)
    result.decoder.ascend = functools.partial(_Strips(rest).ascend, result.decoder)
    return result


def is_tiled(vae: nn.Module) -> bool:
    """Whether an autoencoder computes strip by strip."""
    return "ascend" in getattr(getattr(vae, "decoder", None), "__dict__", {})


def out_of_memory(error: BaseException) -> bool:
    """Whether this is what PyTorch raises, on any device, when memory has run out."""
    texts = ("out of memory", "alloc_cpu", "ALLOC_FAILED")  # of CUDA, of CPUs, of cuBLAS and cuDNN
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or any(text in str(error) for text in texts)


def _shallow(network: Network) -> Network:
    result = copy.copy(network)
    result._modules = dict(network._modules)
    return result


class _Strips:
    """The layers of an autoencoder, each strip by strip."""

    def __init__(self, rest: torch.device | str | None) -> None:
        self.rest = rest

    def descend(self, encoder: Encoder, x: Tensor) -> Tensor:
        device = x.device
        x = self.run(lambda rows: encoder.conv_in(x[:, :, rows]), x, encoder.conv_in.out_channels)
        for level in encoder.down:
            x = self.level(level, x, device)
        return x.to(device)

    def ascend(self, decoder: Decoder, x: Tensor) -> Tensor:
        device = x.device
        for level in reversed(decoder.up):
            x = self.level(level, x, device)
        activate = self.activation(decoder.norm_out, x, device)
        return self.run(lambda rows: decoder.conv_out(activate(rows)), x, decoder.conv_out.out_channels).to(device)

    def level(self, level: Any, x: Tensor, device: torch.device) -> Tensor:
        for i, block in enumerate(level.block):
            x = self.resnet(block, x, device)
            if level.attn:
                x = level.attn[i](x.to(device)).to(x.device)
        for name in level.resample:
            x = self.resample(getattr(level, name), x, device)
        return x

    def resnet(self, block: ResnetBlock, x: Tensor, device: torch.device) -> Tensor:
        """ResnetBlock.forward."""
        skip = block.nin_shortcut if block.shortcut else nn.Identity()
        first = self.activation(block.norm1, x, device)
        h = self.run(lambda rows: block.conv1(first(rows)), x, block.conv1.out_channels)
        second = self.activation(block.norm2, h, device)
        # Rows that are over are overwritten: of the rows beside a strip only the second convolution needs the values.
        over = x if not block.shortcut and not torch.is_grad_enabled() else None
        return self.run(
            lambda rows: skip(x[:, :, rows].to(device)) + block.conv2(second(rows)), h, h.shape[1], result=over
        )

    def resample(self, layer: nn.Module, x: Tensor, device: torch.device) -> Tensor:
        """Upsample.forward, or Downsample.forward, whose rows begin where the strip's do."""
        if isinstance(layer, Upsample):
            return self.run(lambda rows: layer(x[:, :, rows].to(device)), x, x.shape[1], times=2)
        return self.run(lambda rows: layer(x[:, :, rows].to(device)), x, x.shape[1], over=2, before=0, after=2)

    def activation(self, norm: Any, x: Tensor, device: torch.device) -> Callable[[slice], Tensor]:
        """-> a function: rows -> silu(norm(x)) of these, by the statistics of all of x."""
        shape = (len(x), norm.num_groups, -1)
        strips = [rows for rows, _ in _strips(x)]
        count = x[0].numel() // norm.num_groups

        def total(of: Callable[[Tensor], Tensor]) -> Tensor:
            parts = (of(x[:, :, rows].to(device).float().reshape(shape)).sum(dim=2) for rows in strips)
            return sum(parts, start=torch.zeros((), device=device)) / count

        mean = total(lambda part: part)[:, :, None]  # (B, G, 1)
        inverse = (total(lambda part: (part - mean).square())[:, :, None] + norm.eps).rsqrt()
        size = x.shape[1] // norm.num_groups
        scale = norm.weight.float() * inverse.expand(-1, -1, size).flatten(1)  # (B, C)
        shift = norm.bias.float() - mean.expand(-1, -1, size).flatten(1) * scale
        scale, shift = (value.to(x.dtype)[:, :, None, None] for value in (scale, shift))
        return lambda rows: F.silu(torch.addcmul(shift, x[:, :, rows].to(device), scale))

    def run(
        self,
        layer: Callable[[slice], Tensor],
        x: Tensor,
        channels: int,
        *,
        times: int = 1,
        over: int = 1,
        before: int = 1,
        after: int = 1,
        result: Tensor | None = None,
    ) -> Tensor:
        """layer(rows of x) of all strips with `before` and `after` rows beside them; times / over is their scale."""
        batch, _, height, width = x.shape
        for rows, beside in _strips(x, before, after, over):
            y = layer(beside)
            if result is None:
                size = (batch, channels, height * times // over, width * times // over)
                result = y.new_empty(size, device=y.device if self.rest is None else self.rest)
            first, last = rows.start * times // over, rows.stop * times // over
            skipped = (rows.start - beside.start) * times // over
            result[:, :, first:last] = y[:, :, skipped : skipped + last - first]
        assert result is not None
        return result


def _strips(x: Tensor, before: int = 0, after: int = 0, over: int = 1) -> list[tuple[slice, slice]]:
    """Rows of x (B,C,H,W) in strips of at most about STRIP numbers, each without and with the rows beside it."""
    height = x.shape[2]
    size = max(1, STRIP // (over * x.shape[1] * x.shape[3])) * over
    starts = range(0, height, size)
    ends = [min(start + size, height) for start in starts]
    return [
        (slice(start, end), slice(max(0, start - before), min(end + after, height)))
        for start, end in zip(starts, ends, strict=True)
    ]
