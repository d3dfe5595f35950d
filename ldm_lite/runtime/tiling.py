"""Run an autoencoder strip by strip: large images in little memory, without seams.

Tiles that are decoded separately differ where they meet: their borders are padded, and their norms see other
statistics.  Here every convolution runs over horizontal strips, with the neighbouring rows that it reads, and every
norm first takes the statistics of the whole image, so the result is the same up to rounding.  Memory holds
one or two feature maps, which may be kept on another device, and one strip of everything else.

Attention runs whole, at the latents' resolution, and so do images of a single strip, and whatever needs gradients, for
which all maps are kept anyway.

Shape letters: B batch, C channels, H W a feature map's size, G groups of channels, S strips.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ldm_lite.core.layers import Upsample, channels_last
from ldm_lite.core.vae import Decoder, Downsample, Encoder, ResnetBlock
from ldm_lite.runtime.patching import patch, patch_of, twin
from ldm_lite.runtime.seamless import axes_of

STRIP = 2**22  # numbers in a strip: 8 MiB in half precision
NORM_STRIP = 128 * 128  # positions of a strip whose statistics are taken, at most: their error is 2e-7
TILE = 4  # strips with their neighbouring rows are multiples of this, so that no Winograd tile is cut

AnyNetwork = TypeVar("AnyNetwork", bound=nn.Module)


def tile(vae: Any, storage_device: torch.device | str | None = None) -> None:
    """Make an autoencoder compute strip by strip, for inference.

    storage_device keeps feature maps between layers, None for the computing one.  Only KL autoencoders change:
    TAESD, seamless ones, and forks with an encoder or decoder class of their own, stay as they are.
    """
    if _is_kl(vae):
        strips = Strips(storage_device)
        patch(vae.encoder, strips.encode)
        patch(vae.decoder, strips.decode)


def tiled(vae: AnyNetwork, storage_device: torch.device | str | None = None) -> AnyNetwork:
    """Return a strip-by-strip version of the autoencoder with the same weights; the given one does not change.

    See tile, which may leave it as it is.
    """
    if not _is_kl(vae):
        return vae
    result: AnyNetwork = twin(vae)
    tile(result, storage_device)
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
    return known and axes_of(vae) is None  # seamless: the first strip would need rows of the last


def _needs_gradients(network: nn.Module, x: Tensor) -> bool:
    return torch.is_grad_enabled() and (x.requires_grad or any(value.requires_grad for value in network.parameters()))


def _layers(levels: Iterable[Any]) -> Iterator[nn.Module]:
    """Yield the layers of levels in the order of Level.forward, one by one, so that no earlier map is kept alive."""
    for level in levels:
        for pair in zip(level.block, level.attn, strict=True):
            yield from (layer for layer in pair if type(layer) is not nn.Identity)
        yield from (layer for name, layer in level.named_children() if name not in ("block", "attn"))


class Strips:
    """The layers of an autoencoder, each strip by strip."""

    def __init__(self, storage_device: torch.device | str | None = None, share: int = 1) -> None:
        """share: a strip has STRIP / share numbers."""
        self.storage_device, self.size = storage_device, STRIP // share

    def encode(self, encoder: Encoder, x: Tensor) -> Tensor:
        """Compute Encoder.forward."""
        device = x.device
        if _needs_gradients(encoder, x) or x[:, 0].numel() * encoder.conv_in.out_channels <= self.size:
            return Encoder.forward(encoder, x)
        x = channels_last(x)
        x = self.by_strips(lambda rows: encoder.conv_in(x[:, :, rows]), x)
        for layer in _layers(encoder.down):
            x = self.layer(layer, x, device)
        x = encoder.mid(x.to(device))
        return encoder.conv_out(F.silu(encoder.norm_out(x), inplace=True))

    def decode(self, decoder: Decoder, z: Tensor) -> Tensor:
        """Compute Decoder.forward."""
        device = z.device
        last_map = z[:, 0].numel() * 4 ** (len(decoder.up) - 1) * decoder.conv_out.in_channels
        if _needs_gradients(decoder, z) or last_map <= self.size:
            return Decoder.forward(decoder, z)
        x = decoder.mid(decoder.conv_in(channels_last(z)))
        for layer in _layers(reversed(decoder.up)):
            x = self.layer(layer, x, device)
        norm = normalised(decoder.norm_out, x, device)
        return self.by_strips(lambda rows: decoder.conv_out(F.silu(norm(rows), inplace=True)), x).to(device)

    def layer(self, layer: Any, x: Tensor, device: torch.device) -> Tensor:
        """Compute layer.forward."""
        if type(layer) is ResnetBlock:
            return self.resnet(layer, x, device)
        if type(layer) is Upsample:
            return self.by_strips(lambda rows: layer.conv(_upsampled(x, rows).to(device)), x, times=2)
        if type(layer) is Downsample:  # it pads below and on the right only
            return self.by_strips(lambda rows: layer(x[:, :, rows].to(device)), x, before=0, after=2)
        return layer(x.to(device)).to(x.device)  # attention

    def resnet(self, block: ResnetBlock, x: Tensor, device: torch.device) -> Tensor:
        """Compute ResnetBlock.forward; the result overwrites the map between the convolutions."""
        first = normalised(block.norm1, x, device)
        h = self.by_strips(lambda rows: block.conv1(F.silu(first(rows), inplace=True)), x)
        second = normalised(block.norm2, h, device)

        def both(rows: slice) -> Tensor:
            return block.nin_shortcut(x[:, :, rows].to(device)) + block.conv2(F.silu(second(rows), inplace=True))

        return self.by_strips(both, h, result=h)

    def by_strips(
        self,
        layer: Callable[[slice], Tensor],
        x: Tensor,
        *,
        times: int = 1,
        before: int = 1,
        after: int = 1,
        result: Tensor | None = None,
    ) -> Tensor:
        """Compute layer(rows) for all strips, each with the `before` rows above it and the `after` rows below.

        The strips, of about `size` numbers, are of x enlarged `times` in both directions; the output may be
        smaller.  `result` is the output tensor, which may be one that the layer reads.
        """
        batch, channels, height, width = x.shape
        height, width = height * times, width * times
        size = max(2, self.size // (channels * width) // TILE * TILE - before - after)
        ready: tuple[Tensor, Tensor] | None = None  # rows, and their place, written once the next strip has been read
        for start in range(0, height, size):
            stop, top = min(start + size, height), max(0, start - before)
            y = layer(slice(top, min(stop + after, height)))
            over = width // y.shape[3]
            if result is None:
                shape = batch, y.shape[1], height // over, y.shape[3]
                storage_device = x.device if self.storage_device is None else self.storage_device
                result = torch.empty(shape, dtype=x.dtype, device=storage_device, memory_format=torch.channels_last)
            if ready is not None:
                ready[1].copy_(ready[0])
            skipped, first, last = (start - top) // over, start // over, stop // over
            ready = y[:, :, skipped : skipped + last - first], result[:, :, first:last]
        assert ready is not None
        assert result is not None
        ready[1].copy_(ready[0])
        return result


def normalised(norm: Any, x: Tensor, device: torch.device) -> Callable[[slice], Tensor]:
    """Return a function of rows of a map x (B,C,H,W): their norm, on the device, by the whole map's statistics.

    PyTorch's kernel on a CPU sums each group of a map with channels last in one float32 accumulator: at 512 x 512
    positions the relative error is 1e-5, a hundred times that of other layers, and it grows with the map.  Here the
    statistics of strips are combined.
    """
    if not isinstance(norm, nn.GroupNorm):  # each position is normalised alone
        return lambda rows: norm(x[:, :, rows].to(device))
    (batch, channels, height, width), groups = x.shape, norm.num_groups
    lines, fractions, of_strips = max(1, NORM_STRIP // width), [], []
    # The kernel of a CPU reads either layout, those of other devices refuse channels last.
    layout = torch.channels_last if device.type == "cpu" else torch.contiguous_format
    for start in range(0, height, lines):
        part = x[:, :, start : start + lines].to(device).float().contiguous(memory_format=layout)
        size = batch, channels, part[0, 0].numel()
        # A CPU's variance is the difference of two sums, and inexact where the mean is larger than the deviation.  So
        # what the kernel has normalised is measured once more.
        out, mean, rate = torch.native_group_norm(part, None, None, *size, groups, norm.eps)  # rate: 1/deviation
        _, left, factor = torch.native_group_norm(out, None, None, *size, groups, 0.0)
        of_strips.append((mean + left / rate, rate * factor))
        fractions.append(part.shape[2] / height)
    fraction = torch.tensor(fractions, device=device).view(-1, 1, 1)
    means, rates = (torch.stack(values) for values in zip(*of_strips, strict=True))  # (S, B, G)
    mean = (fraction * means).sum(dim=0)
    variance = (fraction * (rates**-2 + (means - mean).square())).sum(dim=0)
    scale = (variance + norm.eps).rsqrt()[..., None] * norm.weight.float().view(groups, -1)  # (B, G, C/G)
    shift = norm.bias.float().view(groups, -1) - mean[..., None] * scale
    scale, shift = (value.flatten(1).to(x.dtype)[:, :, None, None] for value in (scale, shift))
    return lambda rows: torch.addcmul(shift, x[:, :, rows].to(device), scale)


def _upsampled(x: Tensor, rows: slice) -> Tensor:
    """Return rows of x (B,C,H,W) enlarged twice in both directions, by nearest neighbour."""
    y = F.interpolate(x[:, :, rows.start // 2 : (rows.stop + 1) // 2], scale_factor=2.0, mode="nearest")
    return y[:, :, rows.start % 2 :][:, :, : rows.stop - rows.start]
