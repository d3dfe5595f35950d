"""Enlarge images four times: `python -m ldm_lite.upscale "a white cat" --init-img cat.png --ckpt x4-upscaler.ckpt`.

Takes Stable Diffusion's x4 upscaler, which reads a prompt and the noise level of the image, latent diffusion's
super-resolution model (bsr_sr), which reads the image alone, and ESRGAN's networks (RealESRGAN_x4plus.pth), which take
no steps.  Large images go tile by tile.
"""

import sys
from collections.abc import Sequence
from typing import Any

from ldm_lite.cli import console
from ldm_lite.cli.flags import original_flags, parse
from ldm_lite.cli.options import LoadOptions, SaveOptions, given
from ldm_lite.cli.output import Saver
from ldm_lite.cli.task_options import UpscaleOptions


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns its exit status."""
    groups = (UpscaleOptions, LoadOptions, SaveOptions)
    (options, load, save), original = parse(argv, "upscale", __doc__.splitlines()[0], groups, original_flags)
    return console.run(lambda: run(options, load, save, original), (options, load, save))


def run(options: UpscaleOptions, load: LoadOptions, save: SaveOptions, original: dict[str, Any]) -> None:
    """Load the checkpoint, make the images and save them."""
    from ldm_lite.checkpoint.parts import is_upscaler
    from ldm_lite.tasks.command import make
    from ldm_lite.tasks.upscale import count, prepare

    number, saver = count(options), Saver(save, "upscale")
    if is_upscaler(load.ckpt):
        enlarge(options, load, saver)
    else:
        make(prepare, options, number, load, saver, original)


def enlarge(options: UpscaleOptions, load: LoadOptions, saver: Saver) -> None:
    """Enlarge the images with an ESRGAN network, and print the path of each result."""
    from ldm_lite.tasks.enlarge import Upscaler, named_results

    upscaler = Upscaler(load.ckpt, device=load.device, dtype=load.dtype, **tile_of(options, load, saver.options))
    for image, text in named_results(upscaler, options.init_img):
        if not saver.options.skip_save:
            print(saver.sample(image, text), flush=True)


def tile_of(options: UpscaleOptions, load: LoadOptions, save: SaveOptions) -> dict[str, int]:
    """Return the tile if one is given.  Raises ValueError for an option that an ESRGAN network does not use."""
    used = {"init_img", "tile", "ckpt", "device", "dtype", "out", "skip_save", "skip_grid", "debug"}
    if unused := sorted((given(options) | given(load) | given(save)) - used):
        raise ValueError(f"an ESRGAN network reads the image alone: leave out `{unused[0]}`")
    return {"tile": options.tile} if "tile" in given(options) else {}


if __name__ == "__main__":
    sys.exit(main())
