"""hires: a second pass starts from the enlarged images of the first.

As AUTOMATIC1111's web UI does it (sample_hr_pass of its processing.py): in the latents, in pixels, or by an ESRGAN
network; then image to image with its own steps, strength and sampler, and the same seeds.
"""

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch
from PIL import Image
from torch import Tensor
from torch.nn import functional as F

from ldm_lite.checkpoint.hub import check_there
from ldm_lite.checkpoint.model import CheckpointModel
from ldm_lite.cli.task_options import Txt2imgOptions
from ldm_lite.core.features import Feature, option
from ldm_lite.diffusion.names import resolve
from ldm_lite.diffusion.plan import Plan
from ldm_lite.diffusion.schedule import Level
from ldm_lite.features.edited_texts import EditedTexts
from ldm_lite.image import PIXEL_UPSCALERS, to_array, to_pixels
from ldm_lite.tasks.cost import Cost
from ldm_lite.tasks.enlarge import Upscaler
from ldm_lite.tasks.image_inputs import FromImage
from ldm_lite.tasks.job import TaskJob
from ldm_lite.tasks.plans import plan_of_options

Shape = tuple[int, int, int]  # (C,h,w) of latents
UPSCALERS = {  # of latents: A1111's names -> mode and antialias of torch's interpolate
    "Latent": ("bilinear", False),
    "Latent (antialiased)": ("bilinear", True),
    "Latent (bicubic)": ("bicubic", False),
    "Latent (bicubic antialiased)": ("bicubic", True),
    "Latent (nearest)": ("nearest", False),
    "Latent (nearest-exact)": ("nearest-exact", False),
}


@dataclass(frozen=True)
class Hires(Feature):
    """Adds a second pass to text to image."""

    stage: ClassVar = "again"
    topic: ClassVar = "hires"
    tasks: ClassVar = ("txt2img",)
    excludes: ClassVar = ("compat", "plan", "refiner", "depth")
    part_of: ClassVar = ("hires", "is of a second pass: give `hires=2`, how many times the image is enlarged")
    hires: float | None = option(
        None, "txt2img: enlarge the image by this factor, and denoise it again", within=(1, 16), png="Hires upscale"
    )
    hires_strength: float = option(
        0.7,
        "how much noise the enlarged image gets, at most 1",
        within=(0.001, 1),
        png="Denoising strength",  # of img2img too, which is not made again
        always=True,
    )
    hires_steps: int | None = option(
        None,
        "steps of the enlarged image (default: those of the first)",
        within=(1, 1000),
        png="Hires steps",
    )
    hires_upscaler: str = option(
        "Latent",
        "how it is enlarged, in the latents or (Lanczos, Nearest) in pixels",
        choices=(*UPSCALERS, "Lanczos", "Nearest"),
        png="Hires upscaler",
        always=True,
        from_text=lambda settings, explicit: upscaler_of(settings["Hires upscaler"], explicit),
    )
    hires_esrgan: Any = option(
        None,
        "enlarge it with this ESRGAN network (RealESRGAN_x4plus.pth, ...)",
        metavar="FILE",
    )
    hires_sampler: str | None = option(
        None,
        "sampler of the enlarged image (default: the first's)",
        png="Hires sampler",
        keys=("Hires schedule type",),
        from_text=lambda settings, explicit: sampler_of(settings),
    )
    hires_prompt: str | None = option(
        None,
        "prompt of the enlarged image (default: the first's)",
        png="Hires prompt",
        excludes=("cond",),
    )
    hires_negative_prompt: str | None = option(
        None,
        "negative prompt of the enlarged image (default: the first's)",
        png="Hires negative prompt",
        excludes=("uncond",),
    )

    def check(self, options: Txt2imgOptions) -> Txt2imgOptions:
        """Raises ValueError for an unknown sampler, and for noise given as a tensor."""
        if self.hires_sampler is not None:
            resolve(self.hires_sampler)
        if self.hires_esrgan is not None and self.hires_upscaler != type(self).hires_upscaler:
            raise ValueError("got `hires_upscaler` and `hires_esrgan`, which replaces it: give one of them")
        if isinstance(options.noise, Tensor):
            raise ValueError("`hires` draws the noise of its second pass itself: give `noise` as the name of a program")
        return options

    @property
    def loads(self) -> bool:  # type: ignore[override]  # only with a network
        """Whether it loads a network."""
        return self.hires_esrgan is not None

    def check_files(self) -> None:
        """Raises OSError for a network that is not there."""
        if self.hires_esrgan is not None and not isinstance(self.hires_esrgan, Upscaler):
            check_there(self.hires_esrgan)

    def add_cost(self, cost: Cost) -> Cost:
        """Return a cost with the second pass and its texts."""
        texts = filter(None, (self.hires_prompt, self.hires_negative_prompt))
        second = (self.hires or 1.0, self.hires_steps)
        return dataclasses.replace(cost, texts=(*cost.texts, *texts), passes=(*cost.passes, second))

    def change_job(self, job: TaskJob) -> TaskJob:
        """Let the second pass follow.  Raises ValueError, OSError for options and files that do not fit it."""
        factor = job.model.vae.spec.factor
        assert self.hires is not None
        height, width = (int(side * factor * self.hires) for side in job.shape[1:])
        larger = job.model.latent_shape(height // factor * factor, width // factor * factor)
        second_options, plan = self._second_plan(job, larger)
        start = Level(float(plan.t[0]), float(plan.level[0, 0]), float(plan.level[0, 1]))
        name, enlarge = _enlargement(job, self, (width, height), larger)
        task = dataclasses.replace(job.task, options=second_options, plan=plan)
        texts = task.texts  # whether they have a negative prompt depends on the second pass's guidance
        if self.hires_prompt is not None:
            texts = dataclasses.replace(texts, prompts=[self.hires_prompt] * len(job.texts.prompts))
        if self.hires_negative_prompt is not None:
            texts = dataclasses.replace(texts, negative_prompts=(self.hires_negative_prompt,))
        second = task.job(larger, plan, texts, without=self)
        if isinstance(job.texts, EditedTexts) and isinstance(second.texts, EditedTexts):  # calls count on
            calls = dataclasses.replace(second.texts.calls, before=job.texts.calls.total)
            second = dataclasses.replace(second, texts=dataclasses.replace(second.texts, calls=calls))
        settings = {
            "Variation seed": job.settings["Variation seed"],
            "RNG": job.settings["RNG"],
            "Size": f"{job.shape[2] * factor}x{job.shape[1] * factor}",
            "Denoising strength": self.hires_strength,
            "Hires upscaler": name,
            **job.settings,
        }
        second = dataclasses.replace(second, settings=settings)

        def follow(latents: Tensor) -> TaskJob:
            return dataclasses.replace(second, first_latents=FromImage(enlarge(latents), start))

        return dataclasses.replace(job, follow=follow)

    def _second_plan(self, job: TaskJob, shape: Shape) -> tuple[Txt2imgOptions, Plan]:
        """Return the options of the second pass, and its plan for latents of a shape: the end of a finer schedule.

        So all of its steps run.  Raises ValueError for a schedule that would be too fine.
        """
        options, strength = job.options, self.hires_strength
        options = dataclasses.replace(options, steps=self.hires_steps or options.steps)
        if self.hires_sampler is not None:
            options = dataclasses.replace(options, sampler=self.hires_sampler, spacing=None)
        steps = options.steps or job.model.family.steps
        whole = int(steps / strength)
        if not 1 <= whole <= 1000:
            raise ValueError(
                f"got {steps} steps at `hires_strength` {strength:g}, the last of {whole}, expected at most 1000"
            )
        return options, plan_of_options(job.model.sized(shape), options, last=steps, steps=whole)


def upscaler_of(name: str, explicit: set[str]) -> str:
    """Return the upscaler that a picture's text names.  Raises ValueError for a network that is not given beside it."""
    if name in (*UPSCALERS, *PIXEL_UPSCALERS):
        return name
    if "hires_esrgan" not in explicit:
        raise ValueError(f"was enlarged by {name!r:.60}: give that network, `hires_esrgan=FILE`")
    return "Latent"  # not used beside a network


def sampler_of(settings: Mapping[str, str]) -> str:
    """Return the sampler of the second pass that a picture's text names: by its own name, or as A1111 calls it."""
    if settings.get("Version", "").startswith("ldm_lite"):
        return settings["Hires sampler"]
    return " ".join(["webui", settings["Hires sampler"], settings.get("Hires schedule type", "")]).strip()


def _enlargement(
    job: TaskJob, hires: Hires, size: tuple[int, int], shape: Shape
) -> tuple[str, Callable[[Tensor], Tensor]]:
    """Return a function that enlarges latents of the first pass to a shape, images to (width, height), and its name.

    Raises ValueError, OSError for a file that is not an ESRGAN network.
    """
    upscaler = hires.hires_esrgan
    if upscaler is not None:
        if not isinstance(upscaler, Upscaler):
            upscaler = Upscaler(upscaler, device=job.model.device)
        return Path(upscaler.name).stem, partial(_in_pixels, job.model, upscaler, size, shape)
    name = hires.hires_upscaler
    if name in PIXEL_UPSCALERS:
        return name, partial(_in_pixels, job.model, name, size, shape)
    return name, partial(_in_latents, name, shape)


def _in_latents(name: str, shape: Shape, latents: Tensor) -> Tensor:
    mode, antialias = UPSCALERS[name]
    return F.interpolate(latents, size=shape[1:], mode=mode, antialias=antialias)


def _in_pixels(
    model: CheckpointModel, upscaler: Upscaler | str, size: tuple[int, int], shape: Shape, latents: Tensor
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
