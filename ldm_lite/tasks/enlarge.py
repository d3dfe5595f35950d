"""Enlarge images with an ESRGAN network: without a prompt, noise or steps."""

import os
from collections.abc import Iterator, Sequence

import torch
from PIL import Image
from torch import Tensor

from ldm_lite.checkpoint.parts import load_upscaler
from ldm_lite.cli.version import __version__
from ldm_lite.image import pad, to_pil, to_pixels
from ldm_lite.tasks.image_inputs import Source, open_source, sources
from ldm_lite.text.parameters import parameters

MARGIN = 16  # pixels around a tile that it reads besides
MOST_TIMES = 3  # that the network is applied to an image


def named_results(upscaler: "Upscaler", images: Sequence[Source]) -> Iterator[tuple[Image.Image, str]]:
    """Yield each enlarged image with the text of its PNG.  Raises as Upscaler does, and for images that are missing."""
    for source in sources(images, "init_img"):
        opened = open_source(source)
        image = upscaler(opened.image)
        about = {"Size": f"{image.width}x{image.height}", "Model": upscaler.name, "Init image": opened.name}
        yield image, parameters("", None, {**about, "Version": f"ldm_lite {__version__}"})


class Upscaler:
    """A loaded ESRGAN network (RealESRGAN_x4plus.pth, 4x-UltraSharp.pth, ...) as a function of an image."""

    def __init__(
        self,
        source: str | os.PathLike[str],
        *,
        tile: int = 256,
        device: str | torch.device | None = None,
        dtype: str | torch.dtype | None = None,
    ) -> None:
        """source is a file, or owner/repository/file on the hub; images larger than `tile` pixels a side run in tiles.

        Raises FileNotFoundError or ValueError, one line that says what to do.
        """
        if tile < 2 * MARGIN:
            raise ValueError(f"got `tile` {tile}, expected {2 * MARGIN} or more")
        self.network, self.tile = load_upscaler(source, device=device, dtype=dtype), tile
        self.name = os.path.basename(os.fspath(source))

    @property
    def factor(self) -> int:
        """How many times larger the result is, along each side: 4, 2 or 1."""
        return self.network.spec.factor

    def __call__(self, image: Source) -> Image.Image:
        """Enlarge an image: a path, PIL, numpy (H,W,3) or a tensor (3,H,W) in [-1,1].

        Raises ValueError if the result is not finite.
        """
        return to_pil(self.enlarge(to_pixels(open_source(image).image)))

    def to_size(self, image: Image.Image, size: tuple[int, int], least: int = 0) -> Image.Image:
        """Enlarge an image at least so many times, until it covers a size (width, height); then resize it to that.

        As in A1111: three times at most, and Lanczos.
        """
        for times in range(MOST_TIMES):
            if times >= least and image.width >= size[0] and image.height >= size[1]:
                break
            image = self(image)
        return image if image.size == size else image.resize(size, Image.Resampling.LANCZOS)

    @torch.no_grad()
    def enlarge(self, pixels: Tensor) -> Tensor:
        """Pixels (3,H,W) in [-1,1] -> (3,F*H,F*W) in [-1,1], float32 on the CPU."""
        fold, factor, (_, height, width) = self.network.spec.fold, self.factor, pixels.shape
        pixels = pad(pixels, fold)
        weight = next(self.network.parameters())
        result = torch.empty(3, factor * height, factor * width)
        margin, tile = MARGIN, self.tile // fold * fold
        for top in range(0, height, tile):
            for left in range(0, width, tile):
                rows = slice(max(0, top - margin), min(pixels.shape[1], top + tile + margin))
                columns = slice(max(0, left - margin), min(pixels.shape[2], left + tile + margin))
                part = self.network(pixels[None, :, rows, columns].to(weight.device, weight.dtype))[0].float().cpu()
                tile_pixels = result[:, factor * top : factor * (top + tile), factor * left : factor * (left + tile)]
                y, x = factor * (top - rows.start), factor * (left - columns.start)
                tile_pixels.copy_(part[:, y : y + tile_pixels.shape[1], x : x + tile_pixels.shape[2]])
        if not torch.isfinite(result).all():
            raise ValueError(f"the result is not finite in {weight.dtype}: try `dtype=fp32`")
        return result.clamp(-1, 1)
