"""Run an autoencoder strip by strip: large images in little memory, without seams.

Tiles that are decoded separately differ where they meet: their borders are padded, and their norms see other
statistics.  Here every convolution runs over horizontal strips, with the neighbouring rows that it reads, and every
norm first takes the statistics of the whole image, so the result is the same up to rounding.  Memory holds
one or two feature maps, which may be kept on another device, and one strip of everything else.

Attention runs whole, at the latents' resolution, and so do images of a single strip.

Shape letters: B batch, C channels, H W a feature map's size, G groups of channels, S strips.
"""

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ldm_lite.core.layers import Upsample, channels_last
from ldm_lite.core.vae import Decoder, Downsample, Encoder, ResnetBlock
from ldm_lite.runtime.patching import patch, patch_of
from ldm_lite.runtime.seamless import is_seamless

STRIP = 2**22  # numbers in a strip: 8 MiB in half precision
TILE = 4  # strips with their neighbouring rows are multiples of this, so that none of Winograd's tiles is cut

Network = TypeVar("Network", bound=nn.Module)


def tile(vae: Any, rest: torch.device | str | None = None) -> None:
    """Make an autoencoder compute strip by strip, for inference.

    rest is the device that keeps feature maps between layers, None for the computing one.  Only KL autoencoders change:
    TAESD, seamless ones, and forks with an encoder or decoder class of their own, stay as they are.
    """
    if _is_kl(vae):
        strips = Strips(rest)
        patch(vae.encoder, strips.encode)
        patch(vae.decoder, strips.decode)


def tiled(vae: Network, rest: torch.device | str | None = None) -> Network:
    """Return a strip-by-strip version of the autoencoder with the same weights; the given one does not change.

    See tile, which may leave it as it is.
    """
    if not _is_kl(vae):
        return vae
    result: Any = copy.copy(vae)
    result._modules = dict(vae._modules)
    result.encoder, result.decoder = copy.copy(result.encoder), copy.copy(result.decoder)
    tile(result, rest)
    return result


def is_tiled(vae: nn.Module) -> bool:
    """Whether an autoencoder computes strip by strip, whatever an image's size."""
    decoder = getattr(vae, "decoder", None)
    return decoder is not None and isinstance(getattr(patch_of(decoder), "__self__", None), Strips)


def out_of_memory(error: BaseException) -> bool:
    """Whether this is an error that PyTorch raises on some device when memory runs out."""
    texts = ("out of memory", "alloc_cpu", "ALLOC_FAILED")  # of CUDA, of CPUs, of cuBLAS and cuDNN
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or any(text in str(error) for text in texts)


def _is_kl(vae: nn.Module) -> bool:
    known = type(getattr(vae, "encoder", None)) is Encoder and type(getattr(vae, "decoder", None)) is Decoder
    return known and not is_seamless(vae)  # whose first strip would need rows of the last


def _layers(levels: Iterable[Any]) -> Iterator[nn.Module]:
    """Yield the layers of levels in the order of Level.forward, one by one, so that no earlier map is kept alive."""
    for level in levels:
        for pair in zip(level.block, level.attn, strict=True):
            yield from (layer for layer in pair if type(layer) is not nn.Identity)
        yield from (layer for name, layer in level.named_children() if name not in ("block", "attn"))


class Strips:
    """The layers of an autoencoder, each strip by strip."""

    def __init__(self, rest: torch.device | str | None = None) -> None:
        self.rest = rest

    def encode(self, encoder: Encoder, x: Tensor) -> Tensor:
        """Compute Encoder.forward."""
        device = x.device
        if x[:, 0].numel() * encoder.conv_in.out_channels <= STRIP:
            return Encoder.forward(encoder, x)
        x = channels_last(x)
        x = self.run(lambda rows: encoder.conv_in(x[:, :, rows]), x, encoder.conv_in.out_channels)
        for layer in _layers(encoder.down):
            x = self.layer(layer, x, device)
        x = encoder.mid(x.to(device))
        return encoder.conv_out(F.silu(encoder.norm_out(x), inplace=True))

    def decode(self, decoder: Decoder, z: Tensor) -> Tensor:
        """Compute Decoder.forward."""
        device = z.device
        if z[:, 0].numel() * 4 ** (len(decoder.up) - 1) * decoder.conv_out.in_channels <= STRIP:
            return Decoder.forward(decoder, z)
        x = decoder.mid(decoder.conv_in(channels_last(z)))
        for layer in _layers(reversed(decoder.up)):
            x = self.layer(layer, x, device)
        activate = _activation(decoder.norm_out, x, device)
        return self.run(lambda rows: decoder.conv_out(activate(rows)), x, decoder.conv_out.out_channels).to(device)

    def layer(self, layer: Any, x: Tensor, device: torch.device) -> Tensor:
        """Compute layer.forward."""
        if type(layer) is ResnetBlock:
            return self.resnet(layer, x, device)
        if type(layer) is Upsample:
            channels = layer.conv.out_channels
            return self.run(lambda rows: layer.conv(_upsampled(x, rows).to(device)), x, channels, times=2)
        if type(layer) is Downsample:  # it pads below and on the right only
            return self.run(lambda rows: layer(x[:, :, rows].to(device)), x, x.shape[1], over=2, before=0, after=2)
        return layer(x.to(device)).to(x.device)  # attention

    def resnet(self, block: ResnetBlock, x: Tensor, device: torch.device) -> Tensor:
        """Compute ResnetBlock.forward; in inference the result overwrites the map between the convolutions."""
        first = _activation(block.norm1, x, device)
        h = self.run(lambda rows: block.conv1(first(rows)), x, block.conv1.out_channels)
        second = _activation(block.norm2, h, device)

        def both(rows: slice) -> Tensor:
            return block.nin_shortcut(x[:, :, rows].to(device)) + block.conv2(second(rows))

        return self.run(both, h, h.shape[1], result=None if torch.is_grad_enabled() else h)

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
        """Compute layer(rows) for all strips, each with the `before` rows above it and the `after` rows below.

        The strips are those of x enlarged `times` in both directions; the output is smaller by `over`.  `result` is
        the output tensor, which may be one that the layer reads.
        """
        batch, _, height, width = x.shape
        height, width = height * times, width * times
        if result is None:
            rest = x.device if self.rest is None else self.rest
            size = (batch, channels, height // over, width // over)
            result = torch.empty(size, dtype=x.dtype, device=rest, memory_format=torch.channels_last)
        ready: tuple[Tensor, Tensor] | None = None  # rows, and their place, written once the next strip has been read
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


def _activation(norm: Any, x: Tensor, device: torch.device) -> Callable[[slice], Tensor]:
    """Return a function of rows of a map x (B,C,H,W): silu(norm(x)) of these, on the device, by statistics of all."""
    if not isinstance(norm, nn.GroupNorm):  # each position is normalised alone
        return lambda rows: F.silu(norm(x[:, :, rows].to(device)), inplace=True)
    mean, variance = _statistics(x, norm.num_groups, device)
    scale = (variance + norm.eps).rsqrt() * norm.weight.float().view(norm.num_groups, -1)  # (B, G, C/G)
    shift = norm.bias.float().view(norm.num_groups, -1) - mean * scale
    scale, shift = (value.flatten(1).to(x.dtype)[:, :, None, None] for value in (scale, shift))
    return lambda rows: F.silu(torch.addcmul(shift, x[:, :, rows].to(device), scale), inplace=True)


def _strips(shape: Sequence[int], before: int = 0, after: int = 0, over: int = 1) -> list[tuple[slice, slice]]:
    """Divide the rows of a map (B,C,H,W) into strips of about STRIP numbers, without and with neighbouring rows."""
    _, channels, height, width = shape
    size = STRIP // (channels * width) // TILE * TILE - before - after
    starts = range(0, height, max(over, size))
    ends = [*starts[1:], height]
    return [
        (slice(start, end), slice(max(0, start - before), min(end + after, height)))
        for start, end in zip(starts, ends, strict=True)
    ]


def _upsampled(x: Tensor, rows: slice) -> Tensor:
    """Return rows of x (B,C,H,W) enlarged twice in both directions, by nearest neighbour."""
    y = F.interpolate(x[:, :, rows.start // 2 : (rows.stop + 1) // 2], scale_factor=2.0, mode="nearest")
    return y[:, :, rows.start % 2 :][:, :, : rows.stop - rows.start]


def _statistics(x: Tensor, groups: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return mean and variance (B,G,1), in float32, of groups of channels of x (B,C,H,W).

    They are combined from those of strips, which is more exact than one sum over a large map.
    """
    parts, means, variances = [], [], []
    for rows, _ in _strips(x.shape):
        part = x[:, :, rows].to(device).float().permute(0, 2, 3, 1).flatten(1, 2)  # (B, positions, C)
        mean = part.mean(dim=1)
        parts.append((rows.stop - rows.start) / x.shape[2])
        means.append(mean.view(len(x), groups, -1))
        variances.append((part - mean[:, None]).square_().mean(dim=1).view(len(x), groups, -1))
    share = torch.tensor(parts, dtype=torch.float32, device=device).view(-1, 1, 1, 1)
    of_strips = torch.stack(means)  # (S, B, G, C/G)
    mean = (share * of_strips).sum(dim=0).mean(dim=-1, keepdim=True)
    variance = share * (torch.stack(variances) + (of_strips - mean).square())
    return mean, variance.sum(dim=0).mean(dim=-1, keepdim=True)
