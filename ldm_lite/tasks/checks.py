"""Which models a task can use, and checks of its prompts and of what its images have."""

from __future__ import annotations

from collections.abc import Sequence

from ldm_lite.checkpoint.model import CheckpointModel
from ldm_lite.cli.task_options import Txt2imgOptions
from ldm_lite.conditioning.prompts import conditioner_of
from ldm_lite.text.prompt import parse
from ldm_lite.text.tokenizer import check_length

TASKS = {  # a family's task -> the functions that can do it
    "cascade": ("cascade",),
    "txt2img": ("txt2img", "img2img", "inpaint"),
    "inpaint": ("inpaint",),
    "instruct": ("img2img",),
    "edit": ("img2img", "txt2img"),
    "depth": ("txt2img", "img2img"),
    "control_image": ("txt2img", "img2img"),
    "upscale": ("upscale",),
    "inpaint_ldm": ("inpaint",),
    "inpaint_flux": ("inpaint",),
}


def check_counts(options: Txt2imgOptions, prompts: Sequence[str], num_images: int = 1) -> None:
    """Raises ValueError for a wrong number of seeds or negative prompts; num_images are those to start from.

    Seeds are one for each image, negative prompts one for each image or prompt.
    """
    count = len(prompts) * options.repeats * num_images
    if (texts := len(options.negative_prompts)) not in (1, len(prompts), count):
        raise ValueError(
            f"got {texts} negative prompts for {len(prompts)} prompt{'s' * (len(prompts) != 1)} and {count} "
            f"image{'s' * (count != 1)}, expected one, or one for each"
        )
    if not isinstance(options.seed, int) and len(options.seed) != count:
        raise ValueError(f"got {len(options.seed)} seeds for {count} images, expected one, or one for each")


def read_prompts(options: Txt2imgOptions, model: CheckpointModel | None = None) -> list[str]:
    """Return the prompts of one repetition, empty ones if none is given.

    Raises ValueError for a text that is too long and, with a model, if it needs a prompt and there is none.
    """
    prompt, count = options.prompt, options.images_at_a_time
    if options.cond is not None:
        prompts = [prompt if isinstance(prompt, str) else ""] * len(next(iter(options.cond.values())))
    elif isinstance(prompt, str):
        prompts = [prompt] * count
    elif prompt is not None:
        if not (prompts := list(prompt)):
            raise ValueError("got an empty list of prompts, expected one or more")
    elif model is None or conditioner_of(model).reads == "none":
        prompts = [""] * count
    else:
        raise ValueError('no prompt: give one, for instance "a red apple on a blue background"')
    if not options.negative_prompts:
        raise ValueError("got an empty list of negative prompts, expected one or more")
    for text in (*prompts, *options.negative_prompts):
        check_length(text or "")
        if text is not None and options.prompt_syntax == "a1111":
            parse(text)  # refuses too large weights
    return prompts
