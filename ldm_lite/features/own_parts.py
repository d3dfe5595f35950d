"""plan, guidance, cond, uncond: objects of the user's own, in place of names, numbers and prompts."""

import dataclasses
from dataclasses import dataclass
from typing import ClassVar

from ldm_lite.cli.options import changed
from ldm_lite.cli.task_options import Txt2imgOptions
from ldm_lite.core.features import Feature
from ldm_lite.diffusion.guidance import as_conditioning, checked_scale
from ldm_lite.diffusion.plan import Plan


@dataclass(frozen=True)
class OwnParts(Feature):
    """Checks them; what a run is made of reads them in the places of what they replace."""

    uses: ClassVar = ("plan", "guidance", "cond", "uncond")

    def check(self, options: Txt2imgOptions) -> Txt2imgOptions:
        """Return options with conditionings as mappings.  Raises ValueError, TypeError for objects that do not fit."""
        if options.plan is not None:
            if not isinstance(options.plan, Plan):
                kind = type(options.plan).__name__
                raise TypeError(f"got {kind} as `plan`, expected a Plan, as Pipeline.plan makes it")
            names = ("sampler", "spacing", "steps", "eta", "churn")
            if replaced := [name for name in names if getattr(options, name) is not None]:
                raise ValueError(f"got `plan` and `{replaced[0]}`, which it replaces: give one of them")
        if options.guidance is not None and options.scale is not None:
            raise ValueError("got `guidance` and `scale`, which it replaces: give one of them")
        if options.guidance is not None and not callable(options.guidance):
            options = dataclasses.replace(options, guidance=checked_scale(options.guidance))
        ready = {"cond": as_conditioning(options.cond), "uncond": as_conditioning(options.uncond)}
        for conditioning in ready.values():
            if conditioning is not None and any(part.ndim == 0 for part in conditioning.values()):
                raise ValueError("got conditioning of shape (), expected one row for each prompt: (N,T,D)")
        return changed(options, **ready)
