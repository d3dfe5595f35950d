"""What an autoencoder keeps of a picture: `python -m ldm_lite.reconstruct photo.png --ckpt kl-f8.ckpt`.

Encodes and decodes a picture with the first stage of any checkpoint, or a file of a first stage alone (KL, VQ, TAESD),
saves the result, and prints its peak signal-to-noise ratio.
"""

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ldm_lite.cli import console, flags
from ldm_lite.cli.options import Ranged, SaveOptions, option
from ldm_lite.cli.output import Saver

if TYPE_CHECKING:
    from PIL.Image import Image

    from ldm_lite.checkpoint.model import Autoencoder


@dataclass(frozen=True)
class Options(Ranged):
    """What to reconstruct, and with what."""

    image: str | None = option(None, "the picture", positional=True)
    ckpt: str | None = option(
        None, "a checkpoint, or an autoencoder's file: a path, or owner/repository/file on the hub (default: bundled)"
    )
    device: str | None = option(None, "cuda, cuda:1, mps, cpu (default: the best there is)")
    dtype: str | None = option(None, "fp32, fp16, bf16 (default: fp16 on CUDA, else fp32)")


@dataclass(frozen=True, eq=False)
class Reconstruction:
    """A picture out of an autoencoder."""

    image: "Image"  # as large as the original
    psnr: float  # decibels, of 8-bit values against the original's; infinite if they are equal


def reconstruct(vae: "Autoencoder", picture: "Image") -> Reconstruction:
    """A picture of any size, through the autoencoder's mean latent (or codes) and back.

    Sides that are no multiple of the autoencoder's factor are padded with their edges meanwhile.  Raises ValueError if
    the result is not finite, or the autoencoder is TAESD's decoder alone.
    """
    import numpy as np
    import torch

    from ldm_lite.image import pad, to_array, to_pil, to_pixels, to_rgb
    from ldm_lite.runtime.tiling import tiled_on_cpu

    picture = to_rgb(picture)
    weight = next(vae.parameters())
    pixels = pad(to_pixels(picture), vae.spec.factor).to(weight.device, weight.dtype)
    with torch.no_grad():
        result = tiled_on_cpu(vae)(pixels[None])[0, :, : picture.height, : picture.width].float().cpu()
    if not torch.isfinite(result).all():
        raise ValueError(f"the result is not finite in {weight.dtype}: try --dtype fp32")
    error = np.square(to_array(result).astype(np.float64) - np.asarray(picture, dtype=np.float64)).mean()
    return Reconstruction(to_pil(result), 10 * math.log10(255**2 / error) if error else math.inf)


def run(options: Options, save: SaveOptions) -> None:
    """Load, reconstruct, save, and print where the result is and its PSNR."""
    from ldm_lite.checkpoint.model import load_autoencoder
    from ldm_lite.image import open_image

    if save.preview is not None:
        raise ValueError("reconstruct has no steps: leave out --preview")
    if options.image is None:
        raise ValueError("no picture: name one, for instance photo.png")
    picture, saver = open_image(options.image), Saver(save, "reconstruct")
    vae = load_autoencoder(options.ckpt, device=options.device, dtype=options.dtype)
    result = reconstruct(vae, picture)
    if not save.skip_save:
        print(saver.sample(result.image, f"reconstruction of {options.image}"), flush=True)
    print(f"PSNR {result.psnr:.2f} dB", flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    """The command line -> its exit status."""
    groups = (Options, SaveOptions)
    (options, save), _ = flags.parse(argv, "reconstruct", __doc__.splitlines()[0], groups)
    return console.run(lambda: run(options, save), (options, save))


if __name__ == "__main__":
    sys.exit(main())
