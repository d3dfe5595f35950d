"""What an autoencoder keeps of an image: `python -m ldm_lite.reconstruct photo.png --ckpt kl-f8.ckpt`.

Encodes and decodes an image with the autoencoder of any checkpoint, or with an autoencoder's own file (KL, VQ, TAESD),
saves the result, and prints its peak signal-to-noise ratio.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass

from ldm_lite.cli import console
from ldm_lite.cli.flags import parse
from ldm_lite.cli.options import CheckedOptions, SaveOptions, option
from ldm_lite.cli.output import Saver


@dataclass(frozen=True)
class Options(CheckedOptions):
    """What to reconstruct, and with what."""

    image: str | None = option(None, "the image", positional=True)
    ckpt: str | None = option(
        None, "a checkpoint, or an autoencoder's file: a path, or owner/repository/file on the hub (default: bundled)"
    )
    device: str | None = option(None, "cuda, cuda:1, mps, cpu (default: the best there is)")
    dtype: str | None = option(None, "fp32, fp16, bf16 (default: fp16 on CUDA, else fp32)")


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns its exit status."""
    (options, save), _ = parse(argv, "reconstruct", __doc__.splitlines()[0], (Options, SaveOptions))
    return console.run(lambda: run(options, save), (options, save))


def run(options: Options, save: SaveOptions) -> None:
    """Load, reconstruct, save, and print the result's path and PSNR."""
    from ldm_lite.checkpoint.parts import load_autoencoder
    from ldm_lite.image import open_image
    from ldm_lite.tasks.reconstruct import reconstruct

    if save.preview is not None:
        raise ValueError("reconstruct has no steps: leave out `preview`")
    if options.image is None:
        raise ValueError("no image: name one, for instance photo.png")
    image, saver = open_image(options.image), Saver(save, "reconstruct")
    vae = load_autoencoder(options.ckpt, device=options.device, dtype=options.dtype)
    result = reconstruct(vae, image)
    if not save.skip_save:
        print(saver.sample(result.image, f"reconstruction of {options.image}"), flush=True)
    print(f"PSNR {result.psnr:.2f} dB", flush=True)


if __name__ == "__main__":
    sys.exit(main())
