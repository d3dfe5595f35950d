"""DeepFloyd IF: text to image in stages.

T5 encodes the prompt, the first stage makes images of 64 pixels, the second enlarges them to 256, and Stable
Diffusion's upscaler to 1024.  Each is loaded in turn and freed before the next, so only the largest must fit into
memory.
"""

import dataclasses
import gc
import logging
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from ldm_lite import generate
from ldm_lite.checkpoint import hub
from ldm_lite.checkpoint.loading import load_model
from ldm_lite.checkpoint.model import CheckpointModel
from ldm_lite.checkpoint.parts import load_t5
from ldm_lite.cli.command_options import CascadeOptions, StageOptions
from ldm_lite.cli.options import LoadOptions
from ldm_lite.cli.task_options import UpscaleOptions
from ldm_lite.conditioning.inputs import read_tensor
from ldm_lite.core.denoise import Call, Conditioning, Draw, Inputs, InputSource
from ldm_lite.core.networks import pick_device
from ldm_lite.core.tasks import noise_of
from ldm_lite.diffusion.adjustments import thresholding
from ldm_lite.diffusion.guidance import classifier_free
from ldm_lite.diffusion.names import named_plan, resolve, table_steps
from ldm_lite.diffusion.schedule import Level
from ldm_lite.runtime.precision import pick_dtype
from ldm_lite.tasks.job import OnStep, results
from ldm_lite.tasks.upscale import enlarge
from ldm_lite.text.caption import clean
from ldm_lite.text.t5 import T5Tokenizer

log = logging.getLogger("ldm_lite")
T = TypeVar("T")


class CascadeImage(NamedTuple):
    """An image of the last stage, with its seed."""

    pixels: Tensor  # (3,H,W) in [-1,1], on the CPU
    seed: int


def cascade(
    stages: Sequence[CheckpointModel | LoadOptions],
    options: CascadeOptions,
    context: Tensor,
    uncond: Tensor,
    on_step: OnStep = lambda state: None,
) -> Iterator[CascadeImage]:
    """Yield the last stage's images, from T5's embeddings of the prompts.

    stages are models, or LoadOptions to load each in turn (and free it after): the first makes images, the others
    enlarge them, and the last may be the x4 upscaler, which reads options.prompt.  Each row of context (N,T,D) gives
    batch_size images; uncond is (1,T,D).  Raises ValueError, one line, for options and stages that do not fit.
    """
    check(options, len(stages))
    count = len(context) * options.batch_size * options.n_iter
    seeds = [(options.seed + number) % 2**64 for number in range(count)]
    rows = [row for _ in range(options.n_iter) for row in range(len(context)) for _ in range(options.batch_size)]
    images: list[Tensor] = []
    for number, stage in enumerate(stages):
        model = load_model(stage, CheckpointModel) if isinstance(stage, LoadOptions) else stage
        family, is_last = model.family, number == len(stages) - 1
        fits = family.task == "cascade" and (family.unet.num_classes is not None) == (number > 0)
        if not fits and not (family.task == "upscale" and number > 0 and is_last):
            raise ValueError(f"{model.name} is {family.title}, which cannot be stage {number + 1} of a cascade")
        if family.task == "upscale":
            outputs = _enlarged(model, options, images, on_step)
        else:
            outputs = _run(model, options, number, context[rows], uncond, seeds, images, on_step)
        if is_last:
            yield from map(CascadeImage, outputs, seeds)
        else:
            images = list(outputs)
        del model, outputs
        _free()


def check(options: CascadeOptions, num_stages: int) -> None:
    """Raises ValueError for options that are wrong whatever the models."""
    for name in ("sampler", "steps", "scale"):
        if len(values := getattr(options, name)) > max(2, num_stages):
            text = ",".join(map(str, values))
            raise ValueError(f"got `{name}` {text!r}, expected one value, or one for each of {num_stages} stages")
    for sampler in options.sampler:
        resolve(sampler)
    if options.height % 8 or options.width % 8:
        raise ValueError(f"got `height={options.height}` and `width={options.width}`, expected multiples of 8")


def _free() -> None:
    """Give back the memory of networks that are no longer used."""
    gc.collect()
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.empty_cache()


def _of_stage(values: Sequence[T], number: int) -> T | None:
    """Return a stage's value of an option; a single one is for the first two.  None: the default."""
    values = [*values, *values] if len(values) == 1 else values
    return values[number] if number < len(values) else None


def _run(
    model: CheckpointModel,
    options: CascadeOptions,
    number: int,
    context: Tensor,
    uncond: Tensor,
    seeds: Sequence[int],
    small: Sequence[Tensor],
    on_step: OnStep,
) -> Iterator[Tensor]:
    """Run a stage of DeepFloyd IF, 0 or 1, batch by batch on the images before; yield (3,H,W) in [-1,1], on the CPU."""
    family = model.family
    sampler = _of_stage(options.sampler, number) or family.sampler
    steps = _of_stage(options.steps, number) or table_steps(sampler) or family.steps
    scale = _of_stage(options.scale, number)
    plan = named_plan(sampler, model.schedule, steps)
    shape = (3, 4**number * options.height, 4**number * options.width)
    for first in range(0, len(seeds), options.batch_size):
        some = slice(first, first + options.batch_size)
        draw, count = noise_of(seeds[some], shape), len(seeds[some])
        noise = draw()
        wrap: Callable[[InputSource], InputSource] = lambda source: source  # noqa: E731  # no noise on other channels
        cond: dict[str, Tensor] = {"context": context[some]}
        negative: dict[str, Tensor] = {"context": uncond.expand(count, -1, -1)}
        if number > 0:
            larger = F.interpolate(torch.stack(list(small[some])), shape[1:], mode="bilinear", align_corners=True)
            level = model.schedule.at(int(options.noise_level * 1000))
            y = torch.full((count,), level.t, dtype=torch.float32, device="cpu")
            cond, negative = ({**text, "y": y, "concat": larger} for text in (cond, negative))
            wrap = partial(_with_fresh_noise, level, draw)
        guidance = classifier_free(cond, negative, family.scale if scale is None else scale)
        if family.threshold is not None:
            guidance = dataclasses.replace(guidance, adjust=(thresholding(*family.threshold, model.device),))
        latents = generate.denoise(model, noise, guidance, plan, draw=draw, wrap=wrap, on_step=on_step)
        yield from model.decode_pixels(latents)


def _with_fresh_noise(level: Level, draw: Draw, source: InputSource) -> InputSource:
    """Return inputs with noise on their `concat` channels, drawn anew in each step, as in the original."""

    def noised(conditioning: Conditioning, noise: Tensor) -> Conditioning:
        small = conditioning["concat"]
        return {**conditioning, "concat": level.a * small + level.s * noise.to(small)}

    def inputs_of(call: Call) -> Inputs:
        inputs, noise = source(call), draw()
        branches = (b._replace(conditioning=noised(b.conditioning, noise)) for b in inputs.branches)
        return inputs._replace(branches=tuple(branches))

    return inputs_of


def _enlarged(
    model: CheckpointModel, options: CascadeOptions, small: Sequence[Tensor], on_step: OnStep
) -> Iterator[Tensor]:
    """Run the third stage: return images (3,H,W) in [-1,1] four times as large, on the CPU."""
    upscale = UpscaleOptions(
        prompt=options.prompt,
        negative_prompt=options.negative_prompt,
        sampler=_of_stage(options.sampler, 2),
        steps=_of_stage(options.steps, 2),
        scale=_of_stage(options.scale, 2),
        seed=options.seed,
        noise_level=options.noise_level_3,
        tile=options.tile,
    )
    for result in results(enlarge(model, upscale, small), on_step):
        yield result.pixels


# ---- prompts --------------------------------------------------------------------------------------------------------


def encode_t5(prompts: Sequence[str], options: StageOptions) -> Tensor:
    """Return T5's embeddings of the prompts (N,77,D), on the CPU; T5 is loaded for this call and freed.

    Raises FileNotFoundError or ValueError, one line, for files that do not hold T5.
    """
    if not options.t5:
        raise ValueError(
            "no T5 for the prompt: name its file with `t5=FILE`, or give `prompt_embeds` and `negative_embeds`"
        )
    paths, device = [hub.resolve(source) for source in options.t5], pick_device(options.device)
    beside = [paths[0].with_name(name) for name in ("spiece.model", "tokenizer.json")]
    vocab = hub.resolve(options.t5_vocab) if options.t5_vocab else next((p for p in beside if p.exists()), None)
    if vocab is None:
        raise ValueError(f"no spiece.model or tokenizer.json beside {paths[0]}: name it with `t5_vocab=FILE`")
    tokenizer = T5Tokenizer(77, path=vocab)
    texts = [clean(prompt) for prompt in prompts]
    for text in texts:
        if line := tokenizer.too_long(text):
            log.warning("%s", line)
    dtype = pick_dtype(options.dtype, device)
    # In float16 T5's activations overflow.
    encoder = load_t5(paths, device, torch.bfloat16 if dtype == torch.float16 else dtype)
    ids = tokenizer(texts).to(device)
    with torch.no_grad():
        context: Tensor = encoder(ids, ids != tokenizer.pad_id).float().cpu()
    del encoder
    _free()
    return context


def embeddings(options: CascadeOptions, stages: StageOptions) -> tuple[Tensor, Tensor]:
    """Return the embeddings (N,T,D) of prompt and negative prompt, from files or by T5.

    Raises ValueError, one line, if one is missing, or a file does not hold one tensor, (T,D) or (N,T,D).
    """
    if stages.prompt_embeds is not None:
        if stages.negative_embeds is None:
            raise ValueError(
                "got `prompt_embeds` without `negative_embeds`, which guidance needs: T5's of an empty text"
            )
        context, uncond = (read_tensor(Path(path)) for path in (stages.prompt_embeds, stages.negative_embeds))
        for path, values in ((stages.prompt_embeds, context), (stages.negative_embeds, uncond)):
            if values.ndim not in (2, 3):
                raise ValueError(f"{path}: holds a tensor of shape {tuple(values.shape)}, expected (T, D) or (N, T, D)")
        return context.view(-1, *context.shape[-2:]), uncond.view(-1, *uncond.shape[-2:])
    if options.prompt is None:
        raise ValueError('no prompt: give one, for instance "a red apple on a blue background", or `prompt_embeds`')
    both = encode_t5([options.prompt, options.negative_prompt], stages)
    return both[:1], both[1:]


def stages_of(options: StageOptions) -> list[LoadOptions]:
    """Return how to load each stage.  Raises ValueError if one is missing."""
    if options.stage_1 is None:
        raise ValueError("no first stage: name its file with `stage_1=FILE`")
    if options.stage_3 is not None and options.stage_2 is None:
        raise ValueError("got `stage_3` without `stage_2`, whose images it enlarges")
    return [
        LoadOptions(ckpt=source, device=options.device, dtype=options.dtype, attention=options.attention)
        for source in (options.stage_1, options.stage_2, options.stage_3)
        if source is not None
    ]
