"""hires: the images of a first pass, enlarged, are what a second one starts from.

As AUTOMATIC1111's web UI does it (sample_hr_pass of its processing.py): in the latents, in pixels, or by an ESRGAN
network; then image to image with steps, strength and sampler of its own, and the same seeds.
"""

import dataclasses
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
from ldm_lite.diffusion.schedule import Level
from ldm_lite.features.edited_texts import EditedTexts
from ldm_lite.image import PIXEL_UPSCALERS, to_array, to_pixels
from ldm_lite.tasks.enlarge import Upscaler
from ldm_lite.tasks.features import Feature
from ldm_lite.tasks.image_inputs import FromImage
from ldm_lite.tasks.job import Job, plan_of


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
        options, model, factor = job.options, job.model, job.model.vae.spec.factor
        assert options.hires is not None
        height, width = (int(side * factor * options.hires) for side in job.shape[1:])
        larger = model.latent_shape(height // factor * factor, width // factor * factor)
        changes: dict[str, Any] = {"steps": options.hires_steps or options.steps}
        if options.hires_sampler is not None:
            changes |= {"sampler": options.hires_sampler, "spacing": None}
        second_options = dataclasses.replace(options, **changes)
        steps, strength = second_options.steps or model.family.steps, options.hires_strength
        whole = int(steps / min(strength, 0.999))  # all steps run, of a finer schedule
        if not 1 <= whole <= 1000:
            raise ValueError(
                f"got {steps} steps at `hires_strength` {strength:g}, the last of {whole}, wanted at most 1000"
            )
        plan = plan_of(model.sized(larger), second_options, last=steps, steps=whole)
        start = Level(float(plan.t[0]), float(plan.level[0, 0]), float(plan.level[0, 1]))
        enlarge, name = partial(_in_latents, options.hires_upscaler, larger), options.hires_upscaler
        if options.hires_esrgan is not None:
            upscaler = options.hires_esrgan
            if not isinstance(upscaler, Upscaler):
                upscaler = Upscaler(upscaler, device=model.device)
            enlarge, name = partial(_in_pixels, model, upscaler, (width, height), larger), Path(upscaler.name).stem
        elif options.hires_upscaler in PIXEL_UPSCALERS:
            enlarge = partial(_in_pixels, model, options.hires_upscaler, (width, height), larger)
        task = dataclasses.replace(job.task, options=second_options, plan=plan)
        texts: dict[str, Any] = {}
        if options.hires_prompt is not None:
            texts["prompts"] = [options.hires_prompt] * len(job.texts.prompts)
        if options.hires_negative_prompt is not None:
            texts["negative_prompt"] = options.hires_negative_prompt
        second = task.job(larger, plan, dataclasses.replace(task.texts, **texts), without=self)
        if isinstance(job.texts, EditedTexts) and isinstance(second.texts, EditedTexts):  # they count on
            calls = dataclasses.replace(second.texts.calls, before=job.texts.calls.total)
            second = dataclasses.replace(second, texts=dataclasses.replace(second.texts, calls=calls))
        settings = {
            "Variation seed": job.settings["Variation seed"],
            "RNG": job.settings["RNG"],
            "Size": f"{job.shape[2] * factor}x{job.shape[1] * factor}",
            "Denoising strength": strength,
            "Hires upscaler": name,
            **job.settings,
        }
        second = dataclasses.replace(second, settings=settings)

        def follow(latents: Tensor) -> Job:
            return dataclasses.replace(second, begin=FromImage(enlarge(latents), start))

        return dataclasses.replace(job, follow=follow)


def _in_latents(name: str, shape: tuple[int, int, int], latents: Tensor) -> Tensor:
    mode, antialias = UPSCALERS[name]
    return F.interpolate(latents, size=shape[1:], mode=mode, antialias=antialias)


def _in_pixels(
    model: Model, upscaler: Upscaler | str, size: tuple[int, int], shape: tuple[int, int, int], latents: Tensor
) -> Tensor:
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
