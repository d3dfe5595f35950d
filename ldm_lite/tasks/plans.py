"""What a task's options say about its steps: the plan of a sampler, and the strength of guidance."""

from __future__ import annotations

from ldm_lite.checkpoint.model import CheckpointModel
from ldm_lite.cli.task_options import Txt2imgOptions
from ldm_lite.diffusion.guidance import ScaleOrFunction, cfg_plus_plus
from ldm_lite.diffusion.names import named_plan, resolve
from ldm_lite.diffusion.plan import Plan


def plan_of_options(
    model: CheckpointModel, options: Txt2imgOptions, last: int | None = None, steps: int | None = None
) -> Plan:
    """Return the plan of the options (default: the family's sampler and steps), or only its `last` steps."""
    if options.plan is not None:
        if last is not None and last != steps:
            raise ValueError("got a `plan` of your own and a `strength` that leaves some of its steps out: use 1")
        model.check_plan(options.plan)
        return options.plan
    steps = steps or options.steps or model.family.steps
    sampler = options.sampler or model.family.sampler
    spacing = resolve(sampler)[1] if options.spacing is None else options.spacing
    if isinstance(spacing, str) and spacing.split(":")[0] == "ays":
        spacing = spacing.replace("ays", model.family.ays, 1)
    return named_plan(sampler, model.schedule, steps, eta=options.eta, churn=options.churn, spacing=spacing, last=last)


def guidance_of(
    model: CheckpointModel, options: Txt2imgOptions, plan: Plan | None, image_scale: float | None
) -> ScaleOrFunction:
    """Return the guidance of the options, a scale or a function; the sampler DDIM CFG++ has its own, by the plan."""
    family = model.family
    scale = family.scale if options.scale is None else options.scale
    if plan is None or options.plan is not None or resolve(options.sampler or family.sampler)[0] != "ddim_cfgpp":
        return scale if options.guidance is None else options.guidance
    if options.guidance is not None or image_scale is not None:
        raise ValueError("DDIM CFG++ takes `scale` alone: leave other guidance out, or use another sampler")
    return cfg_plus_plus(plan, scale)
