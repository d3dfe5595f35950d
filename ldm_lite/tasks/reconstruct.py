"""What an autoencoder keeps of an image."""

import math
from dataclasses import dataclass

import numpy as np
import torch
from PIL import Image

from ldm_lite.checkpoint.parts import load_autoencoder
from ldm_lite.cli.command_options import ReconstructOptions
from ldm_lite.cli.options import SaveOptions
from ldm_lite.cli.output import Saver
from ldm_lite.image import pad, read_rgb, to_array, to_pil, to_pixels, to_rgb
from ldm_lite.zoo.family import Autoencoder


@dataclass(frozen=True, eq=False)
class Reconstruction:
    """An image from an autoencoder."""

    image: Image.Image  # as large as the original
    psnr: float  # in decibels, of 8-bit values against the original's; infinite if they are equal


def reconstruct(vae: Autoencoder, image: Image.Image) -> Reconstruction:
    """Encode an image of any size to the mean latent (or codes), and decode it.

    Sides that are not multiples of the factor are padded with their edges, and cropped again.  Raises ValueError if the
    result is not finite, or the autoencoder is only TAESD's decoder.
    """
    image = to_rgb(image)
    weight = next(vae.parameters())
    pixels = pad(to_pixels(image), vae.spec.factor).to(weight.device, weight.dtype)
    with torch.no_grad():
        mean, _ = vae.encode(pixels[None])
        result = vae.decode(mean)[0, :, : image.height, : image.width].float().cpu()
    if not torch.isfinite(result).all():
        raise ValueError(f"the result is not finite in {weight.dtype}: try `dtype=fp32`")
    error = np.square(to_array(result).astype(np.float64) - np.asarray(image, dtype=np.float64)).mean()
    return Reconstruction(to_pil(result), 10 * math.log10(255**2 / error) if error else math.inf)


def reconstruct_images(options: ReconstructOptions, save: SaveOptions) -> None:
    """Load, reconstruct, save, and print the result's path and PSNR."""
    if save.preview is not None:
        raise ValueError("reconstruct has no steps: leave out `preview`")
    if options.image is None:
        raise ValueError("no image: name one, for instance photo.png")
    image, saver = read_rgb(options.image), Saver(save, "reconstruct")
    result = reconstruct(load_autoencoder(options.ckpt, device=options.device, dtype=options.dtype), image)
    if not save.skip_save:
        print(saver.sample(result.image, f"reconstruction of {options.image}"), flush=True)
    print(f"PSNR {result.psnr:.2f} dB", flush=True)
