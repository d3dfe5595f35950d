"""An autoencoder strip by strip: large pictures in little memory, and no seams.

Tiles that are decoded each on its own differ where they meet: their borders are padded, and their norms see other
statistics.  Here every convolution goes over horizontal strips, with the rows beside a strip that it reads, and every
norm takes the statistics of the whole picture first: so the result is that of the whole picture, to rounding.  What is
in memory are one or two feature maps, which may rest on another device, and one strip of all the rest.

Attention, at the latents' resolution, is left as it is, and so are pictures that are one strip.

Shape letters: B batch, C channels, H W a feature map's size, G groups of channels, S strips.
"""

import copy
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ldm_lite.models.vae_kl import Decoder, Downsample, Encoder, ResnetBlock, Upsample
from ldm_lite.runtime.tuning import unchanged

STRIP = 2**22  # numbers in a strip: 8 MiB in half precision
TILE = 4  # rows of a strip and beside it are a multiple of this: of Winograd's tiles none is cut

Network = TypeVar("Network", bound=nn.Module)


def tiled(vae: Network, rest: torch.device | str | None = None) -> Network:
    """The same autoencoder with the same weights, computing strip by strip, for inference; vae stays as it is.

    rest is where feature maps are kept between layers, None for where they are computed.  An autoencoder of other parts
    than KL's (TAESD, a subclass's) is returned as it is.
    """
    encoder, decoder = getattr(vae, "encoder", None), getattr(vae, "decoder", None)
    if type(encoder) is not Encoder or type(decoder) is not Decoder:
        return vae
    result: Any = _shallow(vae)
    result.encoder, result.decoder = _shallow(encoder), _shallow(decoder)
    # Instance attributes in place of the methods; of the copies, so that a deep copy of them computes with its weights.
    result.encoder.descend = functools.partial(_Strips(rest).descend, result.encoder)
    result.decoder.ascend = functools.partial(_Strips(rest).ascend, result.decoder)
    return result


def tiled_on_cpu(vae: Network) -> Network:
    """In float32 on a CPU the autoencoder strip by strip, for half the memory and a tenth more time; else as it is.

    It stays as it is, too, where it does not run as it is written: who replaced or hooked a part counts on its calls.
    """
    weight = next(vae.parameters())
    on_cpu = weight.device.type == "cpu" and weight.dtype == torch.float32
    return tiled(vae) if on_cpu and unchanged(vae) and not is_tiled(vae) else vae


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


def _layers(levels: Iterable[Any]) -> Iterator[nn.Module]:
    """All layers of levels, as Level.forward takes them: one by one, so that nothing holds on to an earlier map."""
    for level in levels:
        for i, block in enumerate(level.block):
            yield block
            if level.attn:
                yield level.attn[i]
        for name in level.resample:
            yield getattr(level, name)


class _Strips:
    """The layers of an autoencoder, each strip by strip."""

    def __init__(self, rest: torch.device | str | None) -> None:
        self.rest = rest

    def descend(self, encoder: Encoder, x: Tensor) -> Tensor:
        device = x.device
        if x[:, 0].numel() * encoder.conv_in.out_channels <= STRIP:
            return Encoder.descend(encoder, x)
        x = self.run(lambda rows: encoder.conv_in(x[:, :, rows]), x, encoder.conv_in.out_channels)
        for layer in _layers(encoder.down):
            x = self.layer(layer, x, device)
        return x.to(device)

    def ascend(self, decoder: Decoder, x: Tensor) -> Tensor:
        device = x.device
        if x[:, 0].numel() * 4 ** (len(decoder.up) - 1) * decoder.conv_out.in_channels <= STRIP:
            return Decoder.ascend(decoder, x)
        for layer in _layers(reversed(decoder.up)):
            x = self.layer(layer, x, device)
        activate = self.activation(decoder.norm_out, x, device)
        return self.run(lambda rows: decoder.conv_out(activate(rows)), x, decoder.conv_out.out_channels).to(device)

    def layer(self, layer: Any, x: Tensor, device: torch.device) -> Tensor:
        """layer.forward."""
        if type(layer) is ResnetBlock:
            return self.resnet(layer, x, device)
        if type(layer) is Upsample:
            return self.run(lambda rows: layer.conv(_upsampled(x, rows).to(device)), x, x.shape[1], times=2)
        if type(layer) is Downsample:  # whose rows begin where the strip's do
            return self.run(lambda rows: layer(x[:, :, rows].to(device)), x, x.shape[1], over=2, before=0, after=2)
        return layer(x.to(device)).to(x.device)  # attention

    def resnet(self, block: ResnetBlock, x: Tensor, device: torch.device) -> Tensor:
        """ResnetBlock.forward; the result takes the place of what is between the convolutions."""
        skip = block.nin_shortcut if block.shortcut else nn.Identity()
        first = self.activation(block.norm1, x, device)
        h = self.run(lambda rows: block.conv1(first(rows)), x, block.conv1.out_channels)
        second = self.activation(block.norm2, h, device)

        def both(rows: slice) -> Tensor:
            return skip(x[:, :, rows].to(device)) + block.conv2(second(rows))

        return self.run(both, h, h.shape[1], result=None if torch.is_grad_enabled() else h)

    def activation(self, norm: Any, x: Tensor, device: torch.device) -> Callable[[slice], Tensor]:
        """-> a function: rows -> silu(norm(x)) of these, by the statistics of all of x."""
        mean, variance = _statistics(x, norm.num_groups, device)
        scale = (variance + norm.eps).rsqrt() * norm.weight.float().view(norm.num_groups, -1)  # (B, G, C/G)
        shift = norm.bias.float().view(norm.num_groups, -1) - mean * scale
        scale, shift = (value.flatten(1).to(x.dtype)[:, :, None, None] for value in (scale, shift))
        return lambda rows: F.silu(torch.addcmul(shift, x[:, :, rows].to(device), scale), inplace=True)

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
        """layer(rows) of all strips, with `before` and `after` rows beside them, of x made `times` as high and wide.

        `over` is how much smaller the result is, which may be written to what the layer reads.
        """
        batch, _, height, width = x.shape
        height, width = height * times, width * times
        if result is None:
            rest = x.device if self.rest is None else self.rest
            size = (batch, channels, height // over, width // over)
            result = torch.empty(size, dtype=x.dtype, device=rest, memory_format=torch.channels_last)
        ready: tuple[Tensor, Tensor] | None = None  # rows, and where they go once the next strip has been read
        for rows, beside in _strips((batch, x.shape[1], height, width), before, after, over):
            y = layer(beside)
            if ready is not None:
                ready[1].copy_(ready[0])
            first, last = rows.start // over, rows.stop // over
            skipped = (rows.start - beside.start) // over
            ready = y[:, :, skipped : skipped + last - first], result[:, :, first:last]
        assert ready is not None
        ready[1].copy_(ready[0])
        return result


def _strips(shape: Sequence[int], before: int = 0, after: int = 0, over: int = 1) -> list[tuple[slice, slice]]:
    """Rows of a map (B,C,H,W) in strips of at most about STRIP numbers, each without and with the rows beside it."""
    _, channels, height, width = shape
    size = STRIP // (channels * width) // TILE * TILE - before - after
    starts = range(0, height, max(over, size))
    ends = [*starts[1:], height]
    return [
        (slice(start, end), slice(max(0, start - before), min(end + after, height)))
        for start, end in zip(starts, ends, strict=True)
    ]


def _upsampled(x: Tensor, rows: slice) -> Tensor:
    """Rows of x (B,C,H,W) made twice as high and wide, by nearest neighbour."""
    y = F.interpolate(x[:, :, rows.start // 2 : (rows.stop + 1) // 2], scale_factor=2.0, mode="nearest")
    return y[:, :, rows.start % 2 :][:, :, : rows.stop - rows.start]


def _statistics(x: Tensor, groups: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Mean and variance (B,G,1) in float32 of groups of channels of x (B,C,H,W).

    Those of strips are put together, which is more exact than one sum over a large map.
    """
    parts, means, variances = [], [], []
    for rows, _ in _strips(x.shape):
        part = x[:, :, rows].to(device).float().permute(0, 2, 3, 1).flatten(1, 2)  # (B, positions, C)
        mean = part.mean(dim=1)
        parts.append((rows.stop - rows.start) / x.shape[2])
        means.append(mean.view(len(x), groups, -1))
        variances.append((part - mean[:, None]).square_().mean(dim=1).view(len(x), groups, -1))
    share = torch.tensor(parts, dtype=torch.float32, device=device).view(-1, 1, 1, 1)
    each = torch.stack(means)  # (S, B, G, C/G)
    mean = (share * each).sum(dim=0).mean(dim=-1, keepdim=True)
    variance = share * (torch.stack(variances) + (each - mean).square())
    return mean, variance.sum(dim=0).mean(dim=-1, keepdim=True)
