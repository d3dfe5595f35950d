"""Hires fix: the images of a first pass, enlarged, are what a second one starts from.

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
from ldm_lite.cli.task_options import UPSCALERS, Txt2imgOptions
from ldm_lite.diffusion.schedule import Level
from ldm_lite.generate import decode, encode
from ldm_lite.image import PIXEL_UPSCALERS, to_array, to_pixels
from ldm_lite.tasks.batching import Second
from ldm_lite.tasks.enlarge import Upscaler
from ldm_lite.tasks.job import Job, plan_of
from ldm_lite.tasks.settings import calls_of


def second_pass(model: Model, options: Txt2imgOptions, job: Job, shape: tuple[int, int, int]) -> Second | None:
    """Return what follows a first pass at a latent shape; None without `hires`.  Raises ValueError, OSError."""
    if options.hires is None:
        return None
    for name in ("compat", "plan", "refiner", "depth"):
        if getattr(options, name):
            raise ValueError(f"`hires` does not go with `{name}`: leave one of them out")
    if isinstance(options.noise, Tensor):
        raise ValueError("`hires` draws the noise of its second pass itself: give `noise` as the name of a program")
    factor = model.vae.spec.factor
    height, width = (int(side * factor * options.hires) for side in shape[1:])
    larger = model.latent_shape(height // factor * factor, width // factor * factor)
    own: dict[str, Any] = {"steps": options.hires_steps or options.steps}
    if options.hires_sampler is not None:
        own |= {"sampler": options.hires_sampler, "spacing": None}
    options, given = dataclasses.replace(options, **own), options
    steps, strength = options.steps or model.family.steps, given.hires_strength
    whole = int(steps / min(strength, 0.999))  # all steps run, of a finer schedule
    if not 1 <= whole <= 1000:
        raise ValueError(
            f"got {steps} steps at `hires_strength` {strength:g}, the last of {whole}, wanted at most 1000"
        )
    plan = plan_of(model.sized(larger), options, last=steps, steps=whole)
    job.tricks.report(plan)
    start = Level(float(plan.t[0]), float(plan.level[0, 0]), float(plan.level[0, 1]))
    calls = dataclasses.replace(calls_of(model, options, plan), before=job.calls.total)
    enlarge, name = partial(_in_latents, given.hires_upscaler, larger), given.hires_upscaler
    if given.hires_esrgan is not None:
        upscaler = given.hires_esrgan
        if not isinstance(upscaler, Upscaler):
            upscaler = Upscaler(upscaler, device=model.device)
        enlarge, name = partial(_in_pixels, model, upscaler, (width, height), larger), Path(upscaler.name).stem
    elif given.hires_upscaler in PIXEL_UPSCALERS:
        enlarge = partial(_in_pixels, model, given.hires_upscaler, (width, height), larger)
    settings = {"Size": f"{shape[2] * factor}x{shape[1] * factor}", "Denoising strength": strength}
    settings |= {"Hires upscaler": name}
    texts: dict[str, Any] = {}
    if given.hires_prompt is not None:
        if job.cond is not None:
            raise ValueError("got `cond`, which is for both passes, and `hires_prompt`: leave one of them out")
        texts["prompts"] = [given.hires_prompt] * len(job.prompts)
    if given.hires_negative_prompt is not None:
        if job.uncond is not None:
            raise ValueError(
                "got `uncond`, which is for both passes, and `hires_negative_prompt`: leave one of them out"
            )
        texts["negative_prompt"] = given.hires_negative_prompt
    return Second(dataclasses.replace(job, plan=plan, start=start, calls=calls, **texts), enlarge, settings)


def _in_latents(name: str, shape: tuple[int, int, int], latents: Tensor) -> Tensor:
    mode, antialias = UPSCALERS[name]
    return F.interpolate(latents, size=shape[1:], mode=mode, antialias=antialias)


def _in_pixels(
    model: Model, upscaler: Upscaler | str, size: tuple[int, int], shape: tuple[int, int, int], latents: Tensor
) -> Tensor:
    factor = model.vae.spec.factor
    made = []
    for pixels in decode(model, latents):
        image = Image.fromarray(to_array(pixels, truncate=True))
        image = (
            image.resize(size, PIXEL_UPSCALERS[upscaler])
            if isinstance(upscaler, str)
            else upscaler.to_size(image, size)
        )
        whole = to_pixels(image)[:, : shape[1] * factor, : shape[2] * factor]
        made.append(encode(model, whole[None])[0])
    return torch.cat(made)
