"""noise: the program whose noise a seed gives; variations of a seed; the noise of steps from a Brownian tree."""

import dataclasses
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ldm_lite.cli.task_options import Txt2imgOptions
from ldm_lite.core.denoise import Draw
from ldm_lite.core.features import Feature
from ldm_lite.core.job import Item
from ldm_lite.core.tasks import noise_of
from ldm_lite.diffusion.names import SAMPLERS, resolve
from ldm_lite.diffusion.noise import (
    PROGRAMS,
    BrownianNoise,
    CudaNoise,
    SharedNoise,
    first_then,
    is_brownian,
    slerp,
)
from ldm_lite.diffusion.plan import TimedPlan
from ldm_lite.tasks.job import TaskJob


@dataclass(frozen=True)
class Noise(Feature):
    """Replaces the source of a job's noise."""

    uses: ClassVar = ("noise", "ensd", "variation_seed", "variation_strength", "fixed_code", "brownian")

    def check(self, options: Txt2imgOptions) -> Txt2imgOptions:
        """Raises ValueError or TypeError for options that do not go together."""
        program = options.noise if isinstance(options.noise, str) else "own"
        if program not in PROGRAMS:
            raise ValueError(f"got `noise` {program!r}, expected one of {', '.join(PROGRAMS)}")
        if options.noise is not None and not isinstance(options.noise, (str, Tensor)):
            kind = type(options.noise).__name__
            raise TypeError(f"got {kind} as `noise`, expected a tensor (N,C,h,w) or a program's name")
        if (options.variation_strength == 0) != (options.variation_seed is None):
            raise ValueError("`variation_seed` and `variation_strength` belong together: give both, or neither")
        if options.fixed_code and not isinstance(options.seed, int):
            raise ValueError(
                "got `fixed_code` and a list of seeds: it starts every batch from one seed's noise; give one"
            )
        variations = options.variation_seed is not None or options.ensd != 0
        if options.compat and (program != "own" or variations):
            raise ValueError("`compat` has the original script's noise: leave other noise out, or `compat`")
        if options.brownian and program == "diffusers":
            raise ValueError(
                "diffusers draws no noise from a Brownian tree: leave out `brownian`, or use other `noise`"
            )
        if variations and program not in ("own", "a1111"):
            raise ValueError(f"{program} has no variation seeds and no ENSD: use `noise=a1111`, or leave them out")
        return options

    def change_job(self, job: TaskJob) -> TaskJob:
        """Draw the noise of a program.  Raises ValueError for a Brownian tree and a sampler that has none."""
        options = job.options
        program = options.noise if isinstance(options.noise, str) else "own"
        sampler = None if options.plan is not None else resolve(options.sampler or job.model.family.sampler)[0]
        able = sampler is not None and is_brownian(sampler)
        if options.brownian and not able:
            names = ", ".join(filter(is_brownian, SAMPLERS))
            raise ValueError(f"`brownian` is for {names}, not {sampler or 'a plan of your own'}: leave it out")
        brownian = able and options.brownian
        if able and program in ("a1111", "comfy"):  # these always use Brownian noise
            brownian = brownian or not job.model.schedule.is_flow
            if job.model.schedule.is_flow:
                self.log(
                    logging.WARNING,
                    f"{sampler}: other programs draw its noise differently, so only the first noise is theirs",
                )
        # An image's latents may be sampled after the first noise.
        first_draws = 1 + bool(getattr(options, "samples_posterior", False))
        num_prompts = len(job.task.prompts)

        def variation(item: Item) -> int:
            return int(options.seeds_of(item.number, num_prompts)[1])

        drawn_before = job.noise_source  # the seeds' noise, or compat's

        def noise_source(job: TaskJob, items: Sequence[Item]) -> Draw:
            if program == "own" and not options.variation_strength and not options.ensd:
                draw = drawn_before(job, items)
            else:
                seeds, variations = [item.seed for item in items], [variation(item) for item in items]
                draw = draws(program, options.ensd, options.variation_strength, seeds, variations, job.shape)
            if brownian and job.plan is not None:
                assert isinstance(job.plan, TimedPlan), "is_brownian names samplers whose plans are"
                draw = first_then(
                    draw, brownian_noise(program, [item.seed for item in items], job.shape, job.plan), first_draws
                )
            if not isinstance(options.noise, Tensor):
                return draw

            def given_noise() -> Tensor:
                draw()  # later draws are the same as without it
                return _rows(options.noise, items, job.shape)

            return first_then(given_noise, draw)

        settings: dict[str, object] = {}
        if isinstance(options.noise, Tensor):
            settings = {"RNG": None, "Seed": None}  # none: the image is not made from noise of a seed
        elif not options.compat:
            settings = {"Variation seed": variation if options.variation_strength else None, "RNG": PROGRAMS[program]}
        return dataclasses.replace(job, noise_source=noise_source, settings={**job.settings, **settings})


def draws(
    program: str,
    delta: int,
    strength: float,
    seeds: Sequence[int],
    variations: Sequence[int],
    shape: tuple[int, int, int],
) -> Draw:
    """Return a function that draws the initial noise (B,C,h,w) of a batch first, then later calls' noise.

    delta is added to the seeds after the first noise, AUTOMATIC1111's "eta noise seed delta"; strength is the
    variation seeds' weight, 0 to 1.
    """
    if program == "diffusers":  # one generator for the batch, on the CPU
        return DiffusersNoise(torch.Generator("cpu").manual_seed(seeds[0]), len(seeds), shape)
    if program == "comfy":  # the same, and another on the GPU for the steps
        first = SharedNoise(torch.Generator("cpu").manual_seed(seeds[0]), len(seeds), shape)
        on_gpu = CudaNoise([seeds[0]], (len(seeds), *shape))
        return first_then(first, lambda: on_gpu()[0])
    kind: Callable[..., Draw] = CudaNoise if program == "a1111" else noise_of
    source = kind(seeds, shape)
    initial: Draw = source
    if strength:
        initial = lambda: slerp(source(), kind(variations, shape)(), strength)  # noqa: E731
    return first_then(initial, kind([(seed + delta) % 2**64 for seed in seeds], shape) if delta else source)


class DiffusersNoise(SharedNoise):
    """diffusers' noise, which samples an image's latents first, once for all."""

    def of_image(self) -> Tensor:
        """Return the noise (1,C,h,w) that samples an image's latents."""
        return SharedNoise(self.generator, 1, self.size[1:])()


def brownian_noise(program: str, seeds: Sequence[int], shape: tuple[int, int, int], plan: TimedPlan) -> Draw:
    """Return a source of noise (B,C,h,w) for a plan's calls from Brownian motions, like a program's."""
    if program == "comfy":  # one motion for the batch
        generator = torch.Generator("cpu")
        whole = BrownianNoise(
            [seeds[0]], lambda seed: SharedNoise(generator.manual_seed(seed), len(seeds), shape)(), plan
        )
        return lambda: whole()[0]
    kind: Callable[..., Draw] = CudaNoise if program == "a1111" else noise_of
    return BrownianNoise(seeds, lambda seed: kind([seed], shape)()[0], plan)


def _rows(noise: Tensor, items: Sequence[Item], shape: tuple[int, int, int]) -> Tensor:
    """Return the user's noise for some items, by their numbers.  Raises ValueError for other shapes."""
    count = items[-1].number + 1
    if noise.ndim != 4 or tuple(noise.shape[1:]) != shape or len(noise) < count:
        wanted = f"({count}, {', '.join(map(str, shape))}) or more images"
        raise ValueError(f"got `noise` of shape {tuple(noise.shape)}, expected {wanted}")
    return noise[[item.number for item in items]].float()
