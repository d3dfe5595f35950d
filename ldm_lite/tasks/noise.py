"""From options to where a job's noise comes from."""

import dataclasses
import logging

from torch import Tensor

from ldm_lite.checkpoint.model import Model
from ldm_lite.cli.task_options import Txt2imgOptions
from ldm_lite.diffusion.names import SAMPLERS, resolve
from ldm_lite.diffusion.noise import PROGRAMS, NoiseSource, is_brownian
from ldm_lite.diffusion.plan import Plan
from ldm_lite.tasks.settings import sampler_of

log = logging.getLogger("ldm_lite")


def source_of(model: Model, options: Txt2imgOptions, plan: Plan | None) -> NoiseSource:
    """Return where the noise of a plan comes from: that of stochastic DPM-Solver++ from a Brownian tree, if asked for.

    AUTOMATIC1111's web UI and ComfyUI always draw it so.  Raises ValueError for other samplers, and diffusers' noise.
    """
    source = noise_source_of(options)
    sampler = None if options.plan is not None else resolve(sampler_of(model, options))[0]
    able = sampler is not None and is_brownian(sampler)
    if options.brownian and not able:
        names = ", ".join(filter(is_brownian, SAMPLERS))
        raise ValueError(f"`brownian` is for {names}, not {sampler or 'a plan of your own'}: leave it out")
    if not able or plan is None:
        return source
    theirs = source.program in ("a1111", "comfy")
    if theirs and model.schedule.is_flow:
        log.warning("%s: other programs draw its noise in another way here, so only the first is theirs", sampler)
    return dataclasses.replace(source, brownian=options.brownian or (theirs and not model.schedule.is_flow))


def noise_source_of(options: Txt2imgOptions) -> NoiseSource:
    """Return where the noise comes from.  Raises ValueError or TypeError for options that do not go together."""
    program = options.noise if isinstance(options.noise, str) else "own"
    if program not in PROGRAMS:
        raise ValueError(f"got `noise` {program!r}, wanted one of {', '.join(PROGRAMS)}")
    if options.noise is not None and not isinstance(options.noise, (str, Tensor)):
        raise TypeError(f"got {type(options.noise).__name__} as `noise`, wanted a tensor (N,C,h,w) or a program's name")
    if (options.variation_strength == 0) != (options.variation_seed is None):
        raise ValueError("`variation_seed` and `variation_strength` belong together: give both, or neither")
    variations = options.variation_seed is not None or options.ensd != 0
    if options.compat and (program != "own" or variations):
        raise ValueError("`compat` has the original script's noise: leave other noise out, or `compat`")
    if options.brownian and program == "diffusers":
        raise ValueError("diffusers draws no noise from a Brownian tree: leave out `brownian`, or take other `noise`")
    if variations and program not in ("own", "a1111"):
        raise ValueError(f"{program} has no variation seeds and no ENSD: take `noise=a1111`, or leave them out")
    return NoiseSource(program, options.ensd, options.variation_strength)
