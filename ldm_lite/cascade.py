"""DeepFloyd IF: `python -m ldm_lite.cascade "a red apple" --t5 ... --stage-1 ... --stage-2 ...`, or cascade(...).

A prompt goes through T5, a stage that makes 64 pixels of it, one that makes those 256, and Stable Diffusion's upscaler,
which makes those 1024.  Each is loaded when it is its turn, and freed before the next, so that the largest is all that
must fit into memory.
"""

import gc
import logging
import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import ldm_lite
from ldm_lite.cli import console, flags
from ldm_lite.cli.options import MOST, MOST_PX, SEEDS, Ranged, SaveOptions, option
from ldm_lite.cli.output import Saver
from ldm_lite.cli.progress import Progress, memory
from ldm_lite.tasks.job import JobOptions, OnStep
from ldm_lite.tasks.upscale import MOST_NOISE, enlarge

if TYPE_CHECKING:
    from torch import Tensor

    from ldm_lite.checkpoint.model import Pipeline
    from ldm_lite.diffusion.guidance import Conditioning
    from ldm_lite.diffusion.step import Model

log = logging.getLogger("ldm_lite")


@dataclass(frozen=True)
class Options(Ranged):
    """What to make.  None = as the stage has it; an option like "7,4,9" is for each of three stages."""

    prompt: str | None = option(None, "what to make an image of", positional=True)
    negative_prompt: str = option("", "what to keep away from")
    sampler: str | None = option(None, "of the first two stages, or of each")
    steps: str | None = option(None, "denoising steps, of the first two stages or of each")
    scale: str | None = option(None, "classifier-free guidance, of the first two stages or of each")
    noise_level: float = option(
        0.25, "noise added to the small image, below 1: how freely the second stage follows it", within=(0, 0.999)
    )
    noise_level_3: int = option(100, "the same for the third stage, 0 to 350", within=(0, MOST_NOISE))
    tile: int = option(
        256,
        "pixels a side of the tiles in which the third stage takes pictures larger than that",
        within=(8, MOST_PX),
    )
    seed: int = option(42, "seed of the first image; image k has seed + k, whatever the batch size", within=SEEDS)
    height: int = option(64, "pixels of the first stage, a multiple of 8", "--H", within=(8, MOST_PX))
    width: int = option(64, "pixels of the first stage, a multiple of 8", "--W", within=(8, MOST_PX))
    n_samples: int = option(1, "images at a time", "--batch_size", within=(1, 4096))
    n_iter: int = option(1, "times that the job is repeated, with new seeds", within=(1, MOST))


@dataclass(frozen=True)
class StageOptions(Ranged):
    """What to load, and onto what."""

    stage_1: str | None = option(None, "DeepFloyd IF's first stage: a path, or owner/repository/file on the hub")
    stage_2: str | None = option(None, "its second stage; without it images have 64 pixels")
    stage_3: str | None = option(None, "Stable Diffusion's x4 upscaler; without it images have 256 pixels")
    t5: tuple[str, ...] = option((), "T5 v1.1 XXL's encoder; repeatable, for a file in parts")
    t5_vocab: str | None = option(None, "T5's spiece.model or tokenizer.json (default: the one beside --t5)")
    prompt_embeds: str | None = option(
        None, "ready embeddings (T,D) or (N,T,D) in place of a prompt: .npy, .safetensors or .pt"
    )
    negative_embeds: str | None = option(None, "those of the negative prompt")
    device: str | None = option(None, "cuda, cuda:1, mps, cpu (default: the best there is)")
    dtype: str | None = option(None, "fp32, fp16, bf16 (default: fp16 on CUDA, else fp32)")


def cascade(
    stages: "Sequence[Pipeline | Callable[[], Pipeline]]",
    options: Options,
    context: "Tensor",
    uncond: "Tensor",
    *,
    on_step: OnStep | None = None,
) -> "Iterator[tuple[Tensor, int]]":
    """Images (3,H,W) in [-1,1] with their seeds, as the last stage makes them, from embeddings of the prompts.

    stages are the pipelines, the first of which makes images and the others larger ones, and of which the last may be
    the x4 upscaler, which reads options.prompt; a function is called when it is its turn, and what it loads is freed
    then.  context (N,T,D) makes n_samples images each; uncond is (1,T,D).
    Raises ValueError, one line, for options and stages that do not fit.
    """
    _check(options, len(stages))
    count = len(context) * options.n_samples * options.n_iter
    seeds = list(range(options.seed, options.seed + count))
    rows = [row for _ in range(options.n_iter) for row in range(len(context)) for _ in range(options.n_samples)]
    images: list[Tensor] = []
    for number, stage in enumerate(stages):
        pipe = stage() if callable(stage) else stage
        _check_place(pipe, number, len(stages))
        if pipe.family.task == "upscale":
            made = _enlarged(pipe, options, images, on_step)
        else:
            made = _run(pipe, options, number, (context[rows], uncond), seeds, images, on_step)
        if number == len(stages) - 1:
            yield from zip(made, seeds, strict=True)
        else:
            images = list(made)
        del pipe, made
        _free()


def _check_place(pipe: "Pipeline", number: int, num_stages: int) -> None:
    """Raises ValueError for a stage, counted from 0, that cannot be this one."""
    family = pipe.family
    fits = family.task == "cascade" and (family.unet.num_classes is not None) == (number > 0)
    if not fits and not (family.task == "upscale" and 0 < number == num_stages - 1):
        raise ValueError(f"{pipe.name} is {family.title}, which cannot be number {number + 1} of a cascade")


def _check(options: Options, num_stages: int) -> None:
    from ldm_lite.diffusion.names import resolve

    for name in ("sampler", "steps", "scale"):
        value = getattr(options, name)
        parts = [] if value is None else value.split(",")
        if len(parts) > max(2, num_stages):
            raise ValueError(f"got {name} {value!r}, wanted one value, or one for each of {num_stages} stages")
        if name == "sampler":
            for part in parts:
                resolve(part)
            continue
        try:
            numbers = [int(part) if name == "steps" else float(part) for part in parts]
        except ValueError as error:
            raise ValueError(f"got {name} {value!r}, wanted numbers with commas between") from error
        for number in numbers:
            JobOptions(**{name: number})  # type: ignore[arg-type]  # raises what is out of range
    if options.height % 8 or options.width % 8:
        raise ValueError(f"got H {options.height} and W {options.width}, wanted multiples of 8")


def _free() -> None:
    """Give back the memory of what is not used any more."""
    gc.collect()
    if (torch := sys.modules.get("torch")) is not None and torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def _own(value: str | None, number: int) -> str | None:
    """A stage's part of an option "first,second,third"; a single one is the first two's.  None: as the stage has it."""
    parts = [] if value is None else value.split(",")
    parts = 2 * parts if len(parts) == 1 else parts
    return parts[number] if number < len(parts) else None


def _run(
    pipe: "Pipeline",
    options: Options,
    number: int,
    embeddings: "tuple[Tensor, Tensor]",
    seeds: Sequence[int],
    small: "Sequence[Tensor]",
    on_step: OnStep | None,
) -> "Iterator[Tensor]":
    """One stage, batch by batch: the images of the stage before -> its own, (3,H,W) in [-1,1], on the CPU."""
    import torch
    import torch.nn.functional as F

    from ldm_lite import generate
    from ldm_lite.diffusion.guidance import Conditioning, classifier_free
    from ldm_lite.diffusion.names import make_plan, table_steps

    family = pipe.family
    sampler, steps, scale = (_own(each, number) for each in (options.sampler, options.steps, options.scale))
    sampler = family.sampler if sampler is None else sampler
    own_steps = table_steps(sampler) or family.steps
    plan = make_plan(sampler, pipe.schedule, own_steps if steps is None else int(steps))
    shape = (3, 4**number * options.height, 4**number * options.width)
    for first in range(0, len(seeds), options.n_samples):
        some = slice(first, first + options.n_samples)
        draw, steer = generate.seeded_noise(seeds[some], shape), None
        context, uncontext = embeddings
        cond = Conditioning(context[some])
        uncond = Conditioning(uncontext.expand(len(seeds[some]), -1, -1))
        noise = draw()
        if number > 0:
            larger = F.interpolate(torch.stack(list(small[some])), shape[1:], mode="bilinear", align_corners=True)
            level = pipe.schedule.at(int(options.noise_level * 1000))
            y = torch.full((len(noise),), level.t, dtype=torch.float32, device="cpu")
            cond, uncond = (each._replace(y=y, concat=larger) for each in (cond, uncond))
            steer = _renoised(pipe, level.a, level.s, draw)
        branches = classifier_free(cond, uncond, family.scale if scale is None else float(scale))
        latents = noise
        for step, latents in enumerate(
            generate.denoise(pipe, noise, branches, plan, threshold=family.threshold, draw=draw, steer=steer), start=1
        ):
            if on_step is not None:
                on_step(step, plan.num_steps, latents)
        yield from generate.decode(pipe, latents)


def _enlarged(
    pipe: "Pipeline", options: Options, small: "Sequence[Tensor]", on_step: OnStep | None
) -> "Iterator[Tensor]":
    """The third stage: images (3,H,W) in [-1,1] -> those four times as large, on the CPU."""
    sampler, steps, scale = (_own(each, 2) for each in (options.sampler, options.steps, options.scale))
    job = JobOptions(
        prompt=options.prompt,
        negative_prompt=options.negative_prompt,
        sampler=sampler,
        steps=None if steps is None else int(steps),
        scale=None if scale is None else float(scale),
        seed=options.seed,
    )
    pictures = ((None, image) for image in small)
    for result in enlarge(pipe, job, pictures, noise_level=options.noise_level_3, tile=options.tile, on_step=on_step):
        yield result.pixels


def _renoised(
    pipe: "Pipeline", a: float, s: float, draw: "Callable[[], Tensor]"
) -> "Callable[[int, Conditioning], tuple[Model, Conditioning]]":
    """-> denoise's `steer`: each step sees the smaller image under noise drawn anew, as the original does."""

    def steer(step: int, conditioning: "Conditioning") -> "tuple[Model, Conditioning]":
        small, fresh = conditioning.concat, draw()
        assert small is not None
        noise = fresh.to(small).repeat(len(small) // len(fresh), 1, 1, 1)
        return pipe.unet, conditioning._replace(concat=a * small + s * noise)

    return steer


# ---- prompts --------------------------------------------------------------------------------------------------------


def embed(prompts: Sequence[str], options: StageOptions) -> "Tensor":
    """Prompts -> T5's embeddings of them (N,77,D), on the CPU; T5 is loaded for that, and freed.

    Raises FileNotFoundError or ValueError, one line, for files that do not hold it.
    """
    import torch

    from ldm_lite.checkpoint import hub
    from ldm_lite.checkpoint.model import load_t5
    from ldm_lite.runtime.precision import pick_device, pick_dtype
    from ldm_lite.text.caption import clean
    from ldm_lite.text.tokenizer import T5Tokenizer

    if not options.t5:
        raise ValueError("no T5 for the prompt: name its file with --t5, or give --prompt-embeds and --negative-embeds")
    paths, device = [hub.resolve(source) for source in options.t5], pick_device(options.device)
    beside = [paths[0].with_name(name) for name in ("spiece.model", "tokenizer.json")]
    vocab = hub.resolve(options.t5_vocab) if options.t5_vocab else next((p for p in beside if p.exists()), None)
    if vocab is None:
        raise ValueError(f"no spiece.model or tokenizer.json beside {paths[0]}: name it with --t5-vocab")
    tokenizer = T5Tokenizer(77, path=vocab)
    texts = [clean(prompt) for prompt in prompts]
    for text in texts:
        if dropped := tokenizer.dropped(text):
            log.warning("prompt is too long, dropped from it: %s", dropped)
    dtype = pick_dtype(options.dtype, device)
    # In float16 T5's activations overflow.
    encoder = load_t5(paths, device, torch.bfloat16 if dtype == torch.float16 else dtype)
    ids = tokenizer(texts).to(device)
    with torch.no_grad():
        context: Tensor = encoder(ids, ids != tokenizer.pad_id).float().cpu()
    del encoder
    _free()
    return context


def read_embeds(path: str) -> "Tensor":
    """Embeddings (N,T,D) of a .npy, .safetensors or torch file that holds one tensor, (T,D) or (N,T,D).

    Raises ValueError, one line, for other files.
    """
    from ldm_lite.conditioning.inputs import read_tensor

    values = read_tensor(Path(path))
    if values.ndim not in (2, 3):
        raise ValueError(f"{path}: holds a tensor of shape {tuple(values.shape)}, wanted (T, D) or (N, T, D)")
    return values if values.ndim == 3 else values[None]


# ---- the command ----------------------------------------------------------------------------------------------------


def run(options: Options, stages: StageOptions, save: SaveOptions) -> None:
    """Encode, run the stages, save each image when it is ready, and say where it is."""
    from ldm_lite.image import grid, parameters, to_pil

    saver, start = Saver(save, "cascade"), time.perf_counter()
    if stages.stage_1 is None:
        raise ValueError("no first stage: name its file with --stage-1")
    if stages.stage_3 is not None and stages.stage_2 is None:
        raise ValueError("got --stage-3 without --stage-2, whose images it makes larger")
    sources = [source for source in (stages.stage_1, stages.stage_2, stages.stage_3) if source is not None]
    _check(options, len(sources))
    context, uncond = _embeddings(options, stages)
    openers = [_opener(source, stages) for source in sources]
    made = []
    for image, seed in cascade(openers, options, context, uncond, on_step=Progress()):
        about = {"Seed": seed, "Size": f"{image.shape[2]}x{image.shape[1]}", "Model": " + ".join(map(str, sources))}
        about["Version"] = f"ldm_lite {ldm_lite.__version__}"
        text = parameters(options.prompt or "", options.negative_prompt, about)
        made.append(to_pil(image))
        if not save.skip_save:
            print(saver.sample(made[-1], text), flush=True)
    if not save.skip_grid and len(made) > 1:
        print(saver.grid(grid(made, columns=save.n_rows or math.ceil(len(made) ** 0.5)), text), flush=True)
    log.info("%d image%s in %.1f s; %s", len(made), "s" * (len(made) > 1), time.perf_counter() - start, memory())


def _embeddings(options: Options, stages: StageOptions) -> "tuple[Tensor, Tensor]":
    """Those of the prompt and the negative one, ready or by T5."""
    if stages.prompt_embeds is not None:
        if stages.negative_embeds is None:
            raise ValueError(
                "got --prompt-embeds without --negative-embeds, which guidance needs: T5's of an empty text"
            )
        return read_embeds(stages.prompt_embeds), read_embeds(stages.negative_embeds)
    if options.prompt is None:
        raise ValueError('no prompt: give one, for instance "a red apple on a blue background", or --prompt-embeds')
    both = embed([options.prompt, options.negative_prompt], stages)
    return both[:1], both[1:]


def _opener(source: str, stages: StageOptions) -> "Callable[[], Pipeline]":
    return lambda: ldm_lite.load(source, device=stages.device, dtype=stages.dtype)


def main(argv: Sequence[str] | None = None) -> int:
    """The command line -> its exit status."""
    (options, stages, save), _ = flags.parse(
        argv, "cascade", __doc__.splitlines()[0], (Options, StageOptions, SaveOptions)
    )
    return console.run(lambda: run(options, stages, save), (options, stages, save))


if __name__ == "__main__":
    sys.exit(main())
