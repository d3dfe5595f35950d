"""compat: the pixels of the original scripts, by their defaults, noise, steps, samplers and 8 bits.

scripts/txt2img.py and scripts/img2img.py of CompVis/stable-diffusion, and for OpenCLIP's encoder those of
Stability-AI/stablediffusion.  Neither has a script to inpaint with an ordinary network, but their samplers take `mask`
and `x0`.
"""

import dataclasses
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch

from ldm_lite.checkpoint.model import CheckpointModel
from ldm_lite.cli.options import changed
from ldm_lite.cli.task_options import Txt2imgOptions
from ldm_lite.core.denoise import Draw
from ldm_lite.core.features import Feature
from ldm_lite.core.job import Item
from ldm_lite.core.samplers import dpmpp_2m
from ldm_lite.core.schedule import Level, Schedule
from ldm_lite.diffusion.names import resolve
from ldm_lite.diffusion.noise import SharedNoise, first_then
from ldm_lite.diffusion.plan import Plan
from ldm_lite.diffusion.spacings import original
from ldm_lite.models.open_clip import OPEN_CLIP_H
from ldm_lite.tasks.image_inputs import FromImage
from ldm_lite.tasks.job import TaskJob

log = logging.getLogger("ldm_lite")

_SIDES = {"height": 512, "width": 512}
FIRST: Mapping[str, Mapping[str, float]] = {
    "txt2img": {"scale": 7.5, "n_iter": 2},
    "img2img": {"scale": 5.0, "n_iter": 1, "strength": 0.75},
    "inpaint": {"strength": 1.0},
}
SECOND: Mapping[str, Mapping[str, float]] = {
    "txt2img": {"scale": 9.0, "n_iter": 3, **_SIDES},
    "img2img": {"scale": 9.0, "n_iter": 1, "strength": 0.8},
    "inpaint": {"strength": 1.0},
}


@dataclass(frozen=True)
class Compat(Feature):
    """Takes the defaults and the noise of the original script: one generator for all images, in the order of calls."""

    stage: ClassVar = "model"
    uses: ClassVar = ("compat",)

    def check(self, options: Txt2imgOptions) -> Txt2imgOptions:
        """Raises ValueError for options that the original script lacks."""
        for name in ("spacing", "churn", "exact_steps", "brownian"):
            if getattr(options, name, None):
                raise ValueError(f"the original script has no `{name}`: leave it out, or `compat`")
        sampler, spacing = resolve("ddim" if options.sampler is None else options.sampler)
        known = options.original_samplers
        if sampler not in known or spacing is not None:
            raise ValueError(
                f"`compat` knows the samplers of the original script, {', '.join(known)}, not {options.sampler}"
            )
        if options.eta and sampler == "dpmpp_2m":
            raise ValueError(f"got eta {options.eta}, but {sampler} has none: leave it out")
        return options

    def change_options(self, model: CheckpointModel, options: Txt2imgOptions) -> tuple[CheckpointModel, Txt2imgOptions]:
        """Set the defaults and the steps of the original script."""
        if model.schedule.is_flow:
            title = model.family.title
            raise ValueError(f"`compat` is for scripts of Stable Diffusion 1 and 2, not {title}: leave it out")
        if not isinstance(options.seed, int):
            raise ValueError("`compat` has one seed for all images: give one number")
        if model.ema and not model.family.original_ema:
            log.warning(
                '%s: has its EMA weights, the original script takes the main ones: load with `ema="no"`', model.name
            )
        is_second = model.family.text == OPEN_CLIP_H  # its scripts are those of Stability-AI/stablediffusion
        command = options.task
        defaults: dict[str, object] = {"sampler": "ddim", **(SECOND if is_second else FIRST)[command]}
        if command == "txt2img" and model.family.conditioner == "bert":
            defaults |= _SIDES  # `laion400m`
        unset = {name: value for name, value in defaults.items() if getattr(options, name) is None}
        options = changed(options, **unset)
        assert options.sampler is not None
        key = resolve(options.sampler)[0]
        return model, changed(options, spacing=dpm_solver if key == "dpmpp_2m" else original)

    def change_job(self, job: TaskJob) -> TaskJob:
        """Draw all noise from one generator; an image's latents are sampled once for all batches."""
        plan = job.plan
        if plan is not None and job.options.plan is None:
            plan = as_original(plan, resolve(job.options.sampler or "ddim")[0], job.model.schedule)
        seed, size, device = job.options.seed, job.options.images_at_a_time, job.model.device
        assert isinstance(seed, int)
        generator = self.once("generator", lambda _: torch.Generator(device).manual_seed(seed))
        code, first_latents = None, job.first_latents
        if isinstance(first_latents, FromImage):
            on_cpu = generator if device.type == "cpu" else torch.Generator("cpu").manual_seed(seed)
            init = first_latents.init.expand(size, -1, -1, -1)
            if first_latents.deviation is not None:
                init = init + first_latents.deviation * SharedNoise(on_cpu, size, job.shape)().to(init.device)
            first_latents = dataclasses.replace(first_latents, init=init, deviation=None, fresh=True)
        elif job.options.fixed_code:
            code = SharedNoise(generator, size, job.shape)()

        def noise_source(job: TaskJob, items: Sequence[Item]) -> Draw:
            draw = SharedNoise(generator, len(items), job.shape)
            return draw if code is None else first_then(lambda: code[: len(items)], draw)

        settings = {
            **job.settings,
            "Seed": seed,
            "RNG": None,
            "Noise": lambda item: f"original script, image {item.seed - seed}",
        }
        job = dataclasses.replace(job, plan=plan, first_latents=first_latents, noise_source=noise_source)
        return dataclasses.replace(job, settings=settings, truncated=True)


def dpm_solver(schedule: Schedule, steps: int) -> list[Level]:
    """The spacing of the original's DPM-Solver++ (2M), time_uniform, from unit noise to timestep 0.

    CompVis ldm/models/diffusion/dpm_solver: log a is linear between timesteps.  Raises ValueError where that fails.
    """
    num = len(schedule.alpha_bar)
    if not 2 <= steps <= num:
        raise ValueError(f"got {steps} steps, expected 2 to {num}: the original's DPM-Solver has no fewer")
    if schedule.alpha_bar[-1] == 0:
        raise ValueError("the original's DPM-Solver is undefined at zero terminal SNR: use ddim")
    timesteps = np.linspace(num - 1, 0, steps + 1)
    alpha_bar = np.exp(np.interp(timesteps, np.arange(num), np.log(schedule.alpha_bar)))
    return [Level(t, a, s) for t, a, s in zip(timesteps, np.sqrt(alpha_bar), np.sqrt(1 - alpha_bar), strict=True)]


dpm_solver.__name__ = original.__name__  # the name that pictures have as their spacing


def as_original(plan: Plan, key: str, schedule: Schedule) -> Plan:
    """Return the plan of a sampler of SAMPLERS, with its spacing here, as the original runs it."""
    if key != "dpmpp_2m":  # noise is drawn at every call, if only to multiply it by zero
        return dataclasses.replace(plan, adds_noise=plan.adds_noise | True)
    mix = plan.mix.copy()
    if plan.num_steps < 15:  # the last step is of first order
        levels = dpm_solver(schedule, plan.num_steps)
        mix[-1] = dpmpp_2m(schedule, 1, lambda *_: levels[-2:]).mix[0]
    return dataclasses.replace(plan, mix=mix, initial=1.0)
