"""Job: the fully resolved options of a task.  Result: one of its images.

Only resolve() turns options into values; nothing below it sees an options object.
"""

import dataclasses
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from ldm_lite.checkpoint.model import Model, load_model, with_embeddings
from ldm_lite.cli.files import read_text
from ldm_lite.cli.options import LoadOptions
from ldm_lite.cli.task_options import ConditioningOptions, Txt2imgOptions
from ldm_lite.conditioning.inputs import read_image_embedding, read_image_statistics
from ldm_lite.conditioning.prompts import OPTIONAL, PromptOptions, check_used
from ldm_lite.conditioning.regions import Box, read_regions
from ldm_lite.control.control import Control, parse
from ldm_lite.control.loading import LoadedControl, load_controls
from ldm_lite.core.denoise import Conditioning
from ldm_lite.diffusion.guidance import as_conditioning, cfg_plus_plus
from ldm_lite.diffusion.names import make_plan
from ldm_lite.diffusion.names import resolve as resolve_sampler
from ldm_lite.diffusion.noise import NoiseSource
from ldm_lite.diffusion.original import original_plan
from ldm_lite.diffusion.plan import Plan
from ldm_lite.diffusion.schedule import Level
from ldm_lite.image import open_depth, read_image, to_array, to_image, to_rgb
from ldm_lite.runtime.precision import short_name
from ldm_lite.tasks.noise import noise_source_of, source_of
from ldm_lite.tasks.original import check_original
from ldm_lite.tasks.settings import calls_of, check_hires, sampler_of, settings_of, skip_of
from ldm_lite.tasks.tricks import Tricks, tricks_of
from ldm_lite.text.parameters import parameters
from ldm_lite.text.schedule import Calls
from ldm_lite.text.tokenizer import check_length
from ldm_lite.zoo.family import SkipLayers

log = logging.getLogger("ldm_lite")

MOST_BYTES = 2**28  # of a file of prompts


@dataclass(frozen=True, eq=False)
class Result:
    """One image, with its prompt, seed and settings."""

    pixels: Tensor  # (3,H,W) float32 in [-1,1], on the CPU
    prompt: str
    seed: int
    parameters: str  # the text in AUTOMATIC1111's format that its PNG carries
    truncated: bool = False  # 8 bits are cut off, not rounded
    key: str = ""  # by which `skip_existing` finds it: see existing.py

    @property
    def image(self) -> Image.Image:
        """The image as PIL, RGB, with .info["parameters"]."""
        image = Image.fromarray(self.array)
        image.info["parameters"] = self.parameters
        return image

    @property
    def array(self) -> NDArray[np.uint8]:
        """The image as numpy, (H,W,3) in [0,255]."""
        return to_array(self.pixels, self.truncated)


@dataclass(frozen=True)
class Seeds:
    """The seed of every image of a job."""

    first: int
    own: tuple[int, ...] | None  # one for each image, in place of first, first + 1, ...
    fixed: bool  # every batch starts from the seeds of the first
    variation: int | None = None  # the first variation seed: it goes up in place of the seed

    def of(self, image: int, in_batch: int) -> tuple[int, int]:
        """Return the seed and the variation seed of an image, counted from 0 in the job, and in its batch."""
        number = in_batch if self.fixed else image
        if self.own is not None:
            return self.own[number], 0 if self.variation is None else self.variation + number
        return (self.first + number, 0) if self.variation is None else (self.first, self.variation + number)


@dataclass(frozen=True, eq=False)
class Job:
    """Fully resolved options: with ImageInputs, all that batching.run needs."""

    model: Model
    prompts: Sequence[str]  # of one repetition
    negative_prompt: str | None
    cond: Conditioning | None  # ready conditioning in place of the prompts
    uncond: Conditioning | None
    text: PromptOptions
    regions: tuple[Box, ...] | None  # of the parts of each prompt
    calls: Calls  # how prompts that change count the network's calls
    seeds: Seeds
    noise: Tensor | None  # the user's own initial noise (N,C,h,w)
    noise_source: NoiseSource  # of all other noise
    batch_size: int
    repeats: int
    plan: Plan | None  # None: no steps
    guidance: float | Callable[..., Any]
    image_scale: float | None  # three-way guidance, for networks that follow instructions
    rescale: float
    threshold: float | None  # percentile of dynamic thresholding
    start: Level | None  # noise level of the initial latents; None: pure noise
    controls: Sequence[LoadedControl]
    refiner: tuple[Model, int] | None  # takes over from this step
    depth: Image.Image | None
    skip: SkipLayers | None  # skip-layer guidance
    tricks: Tricks  # what saves evaluations
    compat: bool  # noise in the original script's order, and its 8 bits
    settings: Mapping[str, object]  # for the PNG's text

    def result(self, pixels: Tensor, row: int, seed: int, settings: Mapping[str, object]) -> Result:
        """Make a result from finished pixels (3,H,W), the prompt's row, the seed, and further settings for the PNG."""
        _, height, width = pixels.shape
        known = dict(self.settings)
        version = known.pop("Version")
        first = ("Steps", "Sampler", "Schedule type", "CFG scale")
        head = {name: known.pop(name) for name in first if name in known}
        place = {"Seed": self.seeds.first if self.compat else seed, "Size": f"{width}x{height}"}
        text: dict[str, object] = {**head, **place, "Model": known.pop("Model"), **settings, **known}
        if self.compat:
            text["Noise"] = f"original script, image {seed - self.seeds.first}"
        text = {name: value for name, value in text.items() if value is not None} | {"Version": version}
        prompt = self.prompts[row]
        return Result(pixels, prompt, seed, parameters(prompt, self.negative_prompt, text), self.compat)


# ---- options without a model ----------------------------------------------------------------------------------------


def check(options: Txt2imgOptions) -> None:
    """Raises ValueError for options that are wrong whatever the model."""
    if options.from_png is not None:
        raise ValueError("`from_png` is an option of txt2img: give the settings of the picture one by one")
    check_hires(options)
    controls_of(options)
    _check_arguments(options)
    if options.noise_level and options.image_embedding is None:
        raise ValueError("`noise_level` needs an image embedding: give one with `image_embedding=FILE`")
    if options.sampler is not None:
        resolve_sampler(options.sampler)
    tricks_of(options)
    if options.regions is not None:
        read_regions(options.regions)
    check_original(options)


def _check_arguments(options: Txt2imgOptions) -> None:
    """Raises TypeError for objects of another kind than wanted, ValueError for those beside options they replace."""
    if options.plan is not None:
        if not isinstance(options.plan, Plan):
            raise TypeError(f"got {type(options.plan).__name__} as `plan`, wanted a Plan, as Pipeline.plan makes it")
        if replaced := [
            name for name in ("sampler", "spacing", "steps", "eta", "churn") if getattr(options, name) is not None
        ]:
            raise ValueError(f"got `plan` and `{replaced[0]}`, which it replaces: give one of them")
    noise_source_of(options)
    as_conditioning(options.cond)
    as_conditioning(options.uncond)


def read_prompts(options: Txt2imgOptions, model: Model | None = None) -> list[str]:
    """Return the prompts of one repetition, empty ones if none is given.

    Raises ValueError for a file that is not a list of prompts, for a text that is too long, and, with a model, for a
    prompt missing that it needs.
    """
    prompts = _read_prompts(options, model)
    for prompt in (*prompts, options.negative_prompt or ""):
        check_length(prompt)
    return prompts


def _read_prompts(options: Txt2imgOptions, model: Model | None) -> list[str]:
    if (cond := as_conditioning(options.cond)) is not None:
        count = len(next(iter(cond.values())))
        return [options.prompt if isinstance(options.prompt, str) else ""] * count
    if options.from_file is None:
        if options.prompt is None:
            if model is not None and model.family.conditioner not in OPTIONAL:
                raise ValueError('no prompt: give one, for instance "a red apple on a blue background"')
            return [""] * options.images_at_a_time
        if isinstance(options.prompt, str):
            return [options.prompt] * options.images_at_a_time
        if not options.prompt:
            raise ValueError("got an empty list of prompts, wanted one or more")
        return list(options.prompt)
    if options.prompt is not None:
        raise ValueError("got a prompt and `from_file`: give one of them")
    path = Path(options.from_file)
    lines = read_text(path, MOST_BYTES).splitlines()
    # The original script takes a blank line as a prompt.
    prompts = lines if options.compat else [line.strip() for line in lines if line.strip()]
    if not prompts:
        raise ValueError(f"{path}: holds no prompt, wanted one in each line")
    return prompts


# ---- options for a model --------------------------------------------------------------------------------------------

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


def check_task(model: Model, task: str) -> None:
    """Raises ValueError, naming the right command, if a model cannot do a task."""
    able = TASKS[model.family.task]
    if task not in able:
        raise ValueError(
            f"{model.name} is a checkpoint of {model.family.title}, which {task} cannot use: "
            f"take python -m ldm_lite.{' or '.join(able)}"
        )


def plan_of(model: Model, options: Txt2imgOptions, last: int | None = None, steps: int | None = None) -> Plan:
    """Return the plan of the options (default: the family's sampler and steps), or only its `last` steps."""
    if options.plan is not None:
        if last is not None and last != steps:
            raise ValueError("got a `plan` of your own and a `strength` that leaves some of its steps out: take 1")
        plan: Plan = options.plan
        return plan
    steps = (model.family.steps if options.steps is None else options.steps) if steps is None else steps
    sampler, eta = sampler_of(model, options), options.eta
    if options.compat:
        return original_plan(sampler, model.schedule, steps, eta=eta, last=last)
    spacing = _spacing_of(model, options)
    return make_plan(sampler, model.schedule, steps, eta=eta, churn=options.churn, spacing=spacing, last=last)


def _spacing_of(model: Model, options: Txt2imgOptions) -> Any:
    """Return the spacing of the options; "ays" is the table for the model."""
    spacing = resolve_sampler(sampler_of(model, options))[1] if options.spacing is None else options.spacing
    if isinstance(spacing, str) and spacing.split(":")[0] == "ays" and model.family.conditioner == "sdxl":
        return spacing.replace("ays", "ays_sdxl", 1)
    return spacing


def resolve(
    model: Model,
    options: Txt2imgOptions,
    plan: Plan | None,
    *,
    start: Level | None = None,
    skipped: int = 0,
    image_scale: float | None = None,
    num_images: int = 1,
) -> Job:
    """Turn options into a job, for a model and the plan of its steps.

    start is the noise level of the initial latents, skipped the number of steps before it; num_images counts the
    images to start from.  Raises ValueError for options that do not fit.
    """
    if options.embedding:
        model = with_embeddings(model, options.embedding)
    prompts, extra = read_prompts(options, model), read_extra(options)
    if (options.depth is not None) != (model.family.task in ("depth", "control_image")):
        got, wanted = ("no", "one: `depth=FILE`") if options.depth is None else ("a", "none")
        raise ValueError(f"got {got} depth map, but {model.family.title} wants {wanted}")
    seeds = _seeds(options, len(prompts) * options.repeats * num_images)
    refiner = _refiner(model, options, plan, skipped)  # loads a checkpoint: after all that is quickly checked
    models = [model] if refiner is None else [model, refiner[0]]
    check_used(models, extra)
    tricks = tricks_of(options, *models)
    if plan is not None:
        tricks.report(plan)
    scale = model.family.scale if options.scale is None else options.scale
    return Job(
        model=model,
        prompts=prompts,
        negative_prompt=options.negative_prompt,
        cond=as_conditioning(options.cond),
        uncond=as_conditioning(options.uncond),
        text=PromptOptions(options.prompt_syntax, options.clip_skip, extra=extra),
        regions=None if options.regions is None else read_regions(options.regions),
        calls=calls_of(model, options, plan),
        seeds=seeds,
        noise=options.noise if isinstance(options.noise, Tensor) else None,
        noise_source=source_of(model, options, plan),
        batch_size=options.images_at_a_time,
        repeats=options.repeats,
        plan=plan,
        guidance=_guidance(model, options, plan, scale, image_scale),
        image_scale=image_scale,
        rescale=options.guidance_rescale,
        threshold=options.dynamic_threshold,
        start=start,
        controls=_controls(model, options),
        refiner=refiner,
        depth=None if options.depth is None else _depth(options.depth, model.family.task),
        skip=skip_of(model, options),
        tricks=tricks,
        compat=options.compat,
        settings=settings_of(model, options, plan, refiner, image_scale),
    )


def _guidance(
    model: Model, options: Txt2imgOptions, plan: Plan | None, scale: float, image_scale: float | None
) -> float | Callable[..., Any]:
    """Return the guidance of the options; the sampler DDIM CFG++ has its own."""
    if plan is None or options.plan is not None or resolve_sampler(sampler_of(model, options))[0] != "ddim_cfgpp":
        return scale if options.guidance is None else options.guidance
    if options.guidance is not None or image_scale is not None:
        raise ValueError("DDIM CFG++ takes `scale` alone: leave other guidance out, or take another sampler")
    return cfg_plus_plus(plan, scale)


def _seeds(options: Txt2imgOptions, count: int) -> Seeds:
    if options.seed is None:
        raise TypeError("got `seed` None, wanted a whole number or a list of them")
    variation = None if options.variation_strength == 0 else options.variation_seed
    if isinstance(options.seed, int):
        return Seeds(options.seed, None, options.fixed_code, variation)
    seeds = tuple(options.seed)
    if len(seeds) != count:
        raise ValueError(f"got {len(seeds)} seeds for {count} images, wanted one, or one for each")
    if options.compat:
        raise ValueError("`compat` has one seed for all images: give one number")
    return Seeds(seeds[0], seeds, options.fixed_code, variation)


def _refiner(model: Model, options: Txt2imgOptions, plan: Plan | None, skipped: int) -> tuple[Model, int] | None:
    """Return the refiner, loaded if the options name a file, and the step from which it takes over."""
    if options.refiner is None:
        if options.refiner_start is not None:
            raise ValueError("`refiner_start` needs a refiner: give one with `refiner=FILE`")
        return None
    if plan is None:
        return None
    refiner = options.refiner
    if not isinstance(refiner, Model):
        place = LoadOptions(ckpt=refiner, device=str(model.device), dtype=short_name(model.dtype))
        refiner = load_model(place, Model)
    start = 0.8 if options.refiner_start is None else options.refiner_start
    first = max(0, round(start * (skipped + plan.num_steps)) - skipped)
    log.info("%s: runs the last %d of %d steps", refiner.name, plan.num_steps - first, plan.num_steps)
    return with_embeddings(refiner, options.embedding) if options.embedding else refiner, first


def controls_of(options: Txt2imgOptions) -> list[Control]:
    """Return the controls of the options.  Raises ValueError for text that is not a control."""
    if not options.control and options.preprocess is None:
        return []
    return parse(options.control, options.preprocess)


def _controls(model: Model, options: Txt2imgOptions) -> list[LoadedControl]:
    controls = controls_of(options)
    return load_controls(model, controls, options.clip_vision) if controls or options.clip_vision else []


def read_extra(options: ConditioningOptions) -> ConditioningOptions:
    """Return the further conditioning of some families, with its files read."""
    values = {each.name: getattr(options, each.name) for each in dataclasses.fields(ConditioningOptions)}
    if isinstance(values["image_embedding"], (str, os.PathLike)):
        values["image_embedding"] = read_image_embedding(Path(values["image_embedding"]))
    if isinstance(values["image_statistics"], (str, os.PathLike)):
        values["image_statistics"] = read_image_statistics(Path(values["image_statistics"]))
    return ConditioningOptions(**values)


def _depth(source: Any, task: str) -> Image.Image:
    if not isinstance(source, (str, os.PathLike)):
        return to_image(source)
    return open_depth(source) if task == "depth" else read_image(Path(source), to_rgb)
