"""hires: the images of a first pass, enlarged, are what a second one starts from.

As AUTOMATIC1111's web UI does it (sample_hr_pass of its processing.py): in the latents, in pixels, or by an ESRGAN
network; then image to image with steps, strength and sampler of its own, and the same seeds.
"""

import dataclasses
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor
from torch.nn import functional as F

from ldm_lite.checkpoint.model import Model
from ldm_lite.cli.task_options import UPSCALERS, HiresOptions, Txt2imgOptions
from ldm_lite.diffusion.names import resolve
from ldm_lite.diffusion.plan import Plan
from ldm_lite.diffusion.schedule import Level
from ldm_lite.features.edited_texts import EditedTexts
from ldm_lite.image import PIXEL_UPSCALERS, to_array, to_pixels
from ldm_lite.tasks.enlarge import Upscaler
from ldm_lite.tasks.features import Feature
from ldm_lite.tasks.image_inputs import FromImage
from ldm_lite.tasks.job import Job, plan_of

Shape = tuple[int, int, int]  # (C,h,w) of latents


class Hires(Feature):
    """Adds a second pass to text to image."""

    is_last = True

    def check(self, options: Any) -> Any:
        """Raises ValueError for a second pass in other tasks than txt2img, and for its options without it."""
        if options.hires is not None and type(options) is not Txt2imgOptions:
            raise ValueError("`hires` is an option of txt2img: leave it out")
        if options.hires is None:
            names = [field.name for field in dataclasses.fields(HiresOptions)]
            changed = [name for name in names if getattr(options, name) != getattr(HiresOptions, name)]
            raise ValueError(
                f"`{changed[0]}` is of a second pass: give `hires=2`, how many times the image is enlarged"
            )
        if options.hires_sampler is not None:
            resolve(options.hires_sampler)
        for name in ("compat", "plan", "refiner", "depth"):
            value = getattr(options, name)
            if value is not None and value is not False:
                raise ValueError(f"`hires` does not go with `{name}`: leave one of them out")
        if options.hires_esrgan is not None and options.hires_upscaler != HiresOptions.hires_upscaler:
            raise ValueError("got `hires_upscaler` and `hires_esrgan`, which replaces it: give one of them")
        if isinstance(options.noise, Tensor):
            raise ValueError("`hires` draws the noise of its second pass itself: give `noise` as the name of a program")
        if options.hires_prompt is not None and options.cond is not None:
            raise ValueError("got `cond`, which is for both passes, and `hires_prompt`: leave one of them out")
        if options.hires_negative_prompt is not None and options.uncond is not None:
            raise ValueError(
                "got `uncond`, which is for both passes, and `hires_negative_prompt`: leave one of them out"
            )
        return options

    def change_job(self, job: Job) -> Job:
        """Let the second pass follow.  Raises ValueError, OSError for what does not fit it."""
        options, factor = job.options, job.model.vae.spec.factor
        assert options.hires is not None
        height, width = (int(side * factor * options.hires) for side in job.shape[1:])
        larger = job.model.latent_shape(height // factor * factor, width // factor * factor)
        second_options, plan = _second_plan(job, larger)
        start = Level(float(plan.t[0]), float(plan.level[0, 0]), float(plan.level[0, 1]))
        name, enlarge = _enlargement(job, (width, height), larger)
        task = dataclasses.replace(job.task, options=second_options, plan=plan)
        texts = task.texts  # whether they have a negative prompt depends on the second pass's guidance
        if options.hires_prompt is not None:
            texts = dataclasses.replace(texts, prompts=[options.hires_prompt] * len(job.texts.prompts))
        if options.hires_negative_prompt is not None:
            texts = dataclasses.replace(texts, negative_prompts=(options.hires_negative_prompt,))
        second = task.job(larger, plan, texts, without=self)
        if isinstance(job.texts, EditedTexts) and isinstance(second.texts, EditedTexts):  # they count on
            calls = dataclasses.replace(second.texts.calls, before=job.texts.calls.total)
            second = dataclasses.replace(second, texts=dataclasses.replace(second.texts, calls=calls))
        settings = {
            "Variation seed": job.settings["Variation seed"],
            "RNG": job.settings["RNG"],
            "Size": f"{job.shape[2] * factor}x{job.shape[1] * factor}",
            "Denoising strength": options.hires_strength,
            "Hires upscaler": name,
            **job.settings,
        }
        second = dataclasses.replace(second, settings=settings)

        def follow(latents: Tensor) -> Job:
            return dataclasses.replace(second, begin=FromImage(enlarge(latents), start))

        return dataclasses.replace(job, follow=follow)


def _second_plan(job: Job, shape: Shape) -> tuple[Any, Plan]:
    """Return the options of the second pass, and its plan for latents of a shape: the last steps of a finer schedule.

    So all of its steps run.  Raises ValueError for a schedule that would be too fine.
    """
    options, strength = job.options, job.options.hires_strength
    changes: dict[str, Any] = {"steps": options.hires_steps or options.steps}
    if options.hires_sampler is not None:
        changes |= {"sampler": options.hires_sampler, "spacing": None}
    options = dataclasses.replace(options, **changes)
    steps = options.steps or job.model.family.steps
    whole = int(steps / min(strength, 0.999))
    if not 1 <= whole <= 1000:
        raise ValueError(
            f"got {steps} steps at `hires_strength` {strength:g}, the last of {whole}, expected at most 1000"
        )
    return options, plan_of(job.model.sized(shape), options, last=steps, steps=whole)


def _enlargement(job: Job, size: tuple[int, int], shape: Shape) -> tuple[str, Callable[[Tensor], Tensor]]:
    """Return what enlarges the latents of the first pass to a shape, images to a size (width, height), and its name.

    Raises ValueError, OSError for a file that is no ESRGAN network.
    """
    options, upscaler = job.options, job.options.hires_esrgan
    if upscaler is not None:
        if not isinstance(upscaler, Upscaler):
            upscaler = Upscaler(upscaler, device=job.model.device)
        return Path(upscaler.name).stem, partial(_in_pixels, job.model, upscaler, size, shape)
    name = options.hires_upscaler
    if name in PIXEL_UPSCALERS:
        return name, partial(_in_pixels, job.model, name, size, shape)
    return name, partial(_in_latents, name, shape)


def _in_latents(name: str, shape: Shape, latents: Tensor) -> Tensor:
    mode, antialias = UPSCALERS[name]
    return F.interpolate(latents, size=shape[1:], mode=mode, antialias=antialias)


def _in_pixels(model: Model, upscaler: Upscaler | str, size: tuple[int, int], shape: Shape, latents: Tensor) -> Tensor:
    factor = model.vae.spec.factor
    encoded = []
    for pixels in model.decode_pixels(latents):
        image = Image.fromarray(to_array(pixels, truncate=True))
        image = (
            image.resize(size, PIXEL_UPSCALERS[upscaler])
            if isinstance(upscaler, str)
            else upscaler.to_size(image, size)
        )
        whole = to_pixels(image)[:, : shape[1] * factor, : shape[2] * factor]
        encoded.append(model.encode_pixels(whole[None]))
    return torch.cat(encoded)
