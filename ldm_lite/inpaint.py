"""Inpainting: `python -m ldm_lite.inpaint "a red apple" --init-img photo.png --mask mask.png` repaints what is white.

Takes checkpoints made for it, which look at the masked picture, and ordinary ones, which are led to keep the rest.
`--extend left=128,top=64` paints beyond the picture's edges; `--indir` is that of the original scripts/inpaint.py.
"""

import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from ldm_lite.cli import console, flags
from ldm_lite.cli.options import MOST_PX, LoadOptions, SaveOptions, option
from ldm_lite.cli.output import Saver
from ldm_lite.tasks.image_inputs import ImageOptions, begin, open_source, padded, size_of, sources
from ldm_lite.tasks.job import OnStep, Result, check_command, hand_over, original_flags, read_prompts, serve
from ldm_lite.tasks.job import check as check_job

if TYPE_CHECKING:
    from PIL.Image import Image
    from torch import Tensor

    from ldm_lite.checkpoint.model import Pipeline
    from ldm_lite.tasks.batching import Canvas

log = logging.getLogger("ldm_lite")


@dataclass(frozen=True)
class Options(ImageOptions):
    """What to repaint.  None = what the checkpoint's family has as its default."""

    original_counts: ClassVar[tuple[int, int]] = (1, 1)

    mask: tuple[str, ...] = option(
        (), "white is repainted; one for all pictures or, repeated, one for each", metavar="PATH"
    )
    invert_mask: bool = option(False, "black is repainted")
    extend: str | None = option(None, "paint beyond the edges: left=128,top=64, and right, bottom", metavar="PIXELS")
    indir: str | None = option(None, "folder of pictures NAME.png, each with its NAME_mask.png", metavar="PATH")
    feather: float = option(
        0.0, "pixels around the mask over which the new picture goes over into the old", within=(0, 1000)
    )
    no_paste: bool = option(False, "leave the rest as the autoencoder has it: else it is the picture's, bit for bit")
    strength: float | None = option(
        None,
        "how much of what is repainted is noise at first: less than 1 goes on from what is there (default: 1)",
        within=(0, 1),
    )


Pair = tuple["Path | Image", "Path | Image | None"]  # a picture and its mask, which --extend may do without


def inpaint(
    pipe: "Pipeline",
    options: Options,
    *,
    pictures: "Sequence[Image] | None" = None,
    masks: "Sequence[Image] | None" = None,
    context: "Tensor | None" = None,
    uncond: "Tensor | None" = None,
    refiner: "Pipeline | None" = None,
    on_step: OnStep | None = None,
) -> Iterator[Result]:
    """All prompts of the options on each picture: images, each as soon as it is decoded; stop by leaving the loop.

    pictures and masks (white, above middle grey, is repainted) are PIL images in place of options.init_img and
    options.mask; context, uncond, refiner (which need not be made for it) and on_step as in txt2img.  Raises
    ValueError, one line, for options that do not fit.
    """
    from ldm_lite.tasks.batching import Setup, paint

    check(options)
    check_command(pipe, "inpaint")
    inputs = pairs(options) if pictures is None else _paired(options, pictures, masks or ())
    prompts = read_prompts(options, pipe) if context is None else [options.prompt or ""] * len(context)
    strength = 1.0 if options.strength is None else options.strength
    plan, start, skipped = begin(pipe, options, strength)
    scale = pipe.family.scale if options.scale is None else options.scale
    canvases = (_canvas(pipe, options, picture, mask, strength) for picture, mask in inputs)
    setup = Setup(prompts, plan, scale, start=start, refiner=hand_over(pipe, options, plan, refiner, skipped))
    return paint(pipe, options, setup, canvases, context=context, uncond=uncond, on_step=on_step)


def check(options: Options) -> None:
    """Raises ValueError for options that are wrong whatever the checkpoint."""
    check_job(options)
    _sides(options)


def pairs(options: Options) -> list[Pair]:
    """The pictures of a job, each with its mask.  Raises ValueError if one lacks one, OSError for no such file."""
    from ldm_lite.image import list_images

    if options.indir is None:
        return _paired(options, sources(options.init_img, "init-img"), sources(options.mask, "mask", least=0))
    if options.init_img or options.mask:
        raise ValueError("got --indir beside --init-img or --mask: give one of them")
    masks = [path for path in list_images(Path(options.indir)) if path.name.endswith("_mask.png")]
    if not masks:
        raise ValueError(f"{options.indir}: holds no NAME_mask.png beside a NAME.png")
    names = [str(mask.with_name(mask.name.replace("_mask.png", ".png"))) for mask in masks]
    return list(zip(sources(names, "indir"), masks, strict=True))


def _paired(options: Options, pictures: "Sequence[Path | Image]", masks: "Sequence[Path | Image]") -> list[Pair]:
    if not masks and options.extend is None:
        raise ValueError("no mask: give one with --mask FILE, white where to repaint, or --extend left=128")
    if len(masks) not in (0, 1, len(pictures)):
        raise ValueError(f"got {len(masks)} masks for {len(pictures)} pictures, wanted one, or one for each")
    all_masks: Sequence[Path | Image | None] = masks if len(masks) > 1 else [*masks, None][:1] * len(pictures)
    return list(zip(pictures, all_masks, strict=True))


def _sides(options: Options) -> dict[str, int]:
    """--extend as pixels by side."""
    sides = {}
    for item in options.extend.split(",") if options.extend is not None else ():
        side, _, pixels = item.strip().partition("=")
        known = side in ("left", "top", "right", "bottom") and side not in sides and pixels.strip().isdecimal()
        if not known or not 1 <= int(pixels) <= MOST_PX:
            raise ValueError(f"got extend {options.extend!r}, wanted left=128,top=64, or right, bottom")
        sides[side] = int(pixels)
    return sides


def _grey_hole(pipe: "Pipeline", pixels: "Tensor", hole: "Tensor", latent_mask: "Tensor") -> "Tensor":
    """Stable Diffusion's: the mask, 1 where to repaint, and the latents of the picture with a hole of 0, grey."""
    import torch

    from ldm_lite.generate import encode

    return torch.cat([latent_mask, encode(pipe, (pixels * (1 - hole))[None])[0]], dim=1)


def _black_hole(pipe: "Pipeline", pixels: "Tensor", hole: "Tensor", latent_mask: "Tensor") -> "Tensor":
    """Latent diffusion's: the latents of the picture with a hole of -1, black, then the mask, 1 or -1."""
    import torch

    from ldm_lite.generate import encode

    return torch.cat([encode(pipe, (pixels * (1 - hole) - hole)[None])[0], 2 * latent_mask - 1], dim=1)


# What a network that is made for it reads beside the latents, by its family's task: pixels (3,H,W) and a hole (1,H,W)
# of 1 in them, the mask (1,1,h,w) -> (1,C',h,w).
LOOKS: "dict[str, Callable[[Pipeline, Tensor, Tensor, Tensor], Tensor]]" = {
    "inpaint": _grey_hole,
    "inpaint_ldm": _black_hole,
}


def _canvas(
    pipe: "Pipeline", options: Options, source: "Path | Image", mask_source: "Path | Image | None", strength: float
) -> "Canvas":
    from ldm_lite.generate import encode
    from ldm_lite.image import mask_latent, mask_weights, pad
    from ldm_lite.tasks.batching import Canvas

    name, image, mask = _resized(pipe, options, source, mask_source)
    weights = mask_weights(mask)  # (1, H, W)
    log.info("%s: %.3g %% of it is repainted", name, 100 * float(weights.mean()))
    pixels, hole = padded(pipe, image), pad(weights, pipe.vae.spec.factor)
    latent_mask = mask_latent(hole, pipe.vae.spec.factor)
    init = deviation = concat = None
    looks = LOOKS.get(pipe.family.task)
    if looks is not None:
        concat = looks(pipe, pixels, hole, latent_mask.to(pipe.device))
    if looks is None or strength < 1:
        init, deviation = encode(pipe, pixels[None])
    return Canvas(
        latent_shape=pipe.latent_shape(*pixels.shape[1:]),
        init=init,
        deviation=deviation if options.sample_posterior or options.compat else None,
        mask=latent_mask if looks is None else None,
        concat=concat,
        finish=lambda painted: _pasted(options, painted, pixels, mask_weights(mask, options.feather)),
        settings={"Denoising strength": strength, "Init image": name, "Mask blur": options.feather or None},
    )


def _pasted(options: Options, painted: "Tensor", pixels: "Tensor", weights: "Tensor") -> "Tensor":
    """What was painted (3,H',W'), with the padding taken off and the picture (3,H',W') pasted where weights are 0."""
    _, height, width = weights.shape
    painted, pixels = painted[:, :height, :width], pixels[:, :height, :width]
    return painted if options.no_paste else weights * painted + (1 - weights) * pixels


def _resized(
    pipe: "Pipeline", options: Options, source: "Path | Image", mask_source: "Path | Image | None"
) -> "tuple[str, Image, Image]":
    """A picture's name, the picture and its mask, extended and of their final size.  Raises ValueError."""
    from PIL import Image, ImageChops, ImageOps

    from ldm_lite.image import extend, open_mask, resize, to_mask

    picture = open_source(source)
    name, image = picture
    mask = Image.new("L", image.size)
    if mask_source is not None:
        given = open_mask(mask_source) if isinstance(mask_source, Path) else to_mask(mask_source)
        if abs(given.width / given.height * image.height / image.width - 1) > 0.01:
            raise ValueError(
                f"{name} has {image.width} x {image.height} pixels, but its mask {given.width} x {given.height}: "
                "make a mask of the picture's proportions"
            )
        given = resize(given, image.size, "stretch")
        mask = ImageOps.invert(given) if options.invert_mask else given
    if sides := _sides(options):
        image, new = extend(image, sides)
        old = Image.new("L", image.size)
        old.paste(mask, (sides.get("left", 0), sides.get("top", 0)))
        mask = ImageChops.lighter(new, old)
    size = size_of(pipe, options, picture._replace(image=image))
    image, mask = resize(image, size, options.resize), resize(mask, size, options.resize)
    if mask.getbbox() is None:
        raise ValueError(f"{name}: nothing to repaint, its mask is black: white is what is repainted (--invert-mask)")
    return name, image, mask


# ---- the command ----------------------------------------------------------------------------------------------------


def run(options: Options, load: LoadOptions, save: SaveOptions, original: dict[str, Any]) -> None:
    """Load, make the images, save each when it is ready, and say where it is."""
    check(options)
    count = len(pairs(options)) * len(read_prompts(options)) * options.repeats
    saver = Saver(save, "inpaint")
    serve(
        lambda pipe, on_step: inpaint(pipe, options, on_step=on_step), count, options.batch_size, load, saver, original
    )


def main(argv: Sequence[str] | None = None) -> int:
    """The command line -> its exit status."""
    groups = (Options, LoadOptions, SaveOptions)
    (options, load, save), original = flags.parse(argv, "inpaint", __doc__.splitlines()[0], groups, original_flags)
    return console.run(lambda: run(options, load, save, original), (options, load, save))


if __name__ == "__main__":
    sys.exit(main())
