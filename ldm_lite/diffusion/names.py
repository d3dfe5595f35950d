"""register, which adds a sampler with its names in other programs, and named_plan, which takes any of them."""

import dataclasses
import difflib
import functools
import itertools
import math
from collections.abc import Callable, Iterable
from typing import Any, TypeVar, overload

import numpy as np

from ldm_lite.core.plan import Plan
from ldm_lite.core.samplers import SAMPLERS as SAMPLERS
from ldm_lite.core.samplers import Sampler, parameters_of
from ldm_lite.core.schedule import SPACINGS, Level, Schedule, Spacing
from ldm_lite.diffusion.flow import FlowSchedule
from ldm_lite.diffusion.schedule import spacing_of
from ldm_lite.diffusion.spacings import SECTIONS
from ldm_lite.diffusion.webui import OFFERED, from_webui, to_webui

AnySampler = TypeVar("AnySampler", bound=Sampler)
LABELS: dict[str, str] = {}  # key of SAMPLERS -> AUTOMATIC1111's name, which PNG text uses
ALIASES: dict[str, str] = {}  # another spelling, after _normal -> key of SAMPLERS
OURS = " (ldm_lite)"  # marks a name in PNG text that A1111 would take for another trajectory


@overload
def register(
    function: AnySampler, *, label: str | None = None, aliases: Iterable[str] = (), replace: bool = False
) -> AnySampler:
    """Add a sampler, and return it: `@register` above its function, or a call with it."""


@overload
def register(
    *, label: str | None = None, aliases: Iterable[str] = (), replace: bool = False
) -> Callable[[AnySampler], AnySampler]:
    """Return a decorator that adds a sampler: `@register(label="Midpoint")` above its function."""


def register(
    function: Sampler | None = None, *, label: str | None = None, aliases: Iterable[str] = (), replace: bool = False
) -> Callable[..., object]:
    """Add a sampler to SAMPLERS under its function's name, and return it: a function or a decorator.

    label is its name in PNG text (default: from the function's name).  Users may also write the label or an alias.
    Raises ValueError if a name is taken (replace=True replaces the sampler of that name), and for a function
    that cannot be called as function(schedule, steps, spacing=...).
    """
    if function is None:
        return functools.partial(register, label=label, aliases=aliases, replace=replace)
    key = getattr(function, "__name__", "")
    if not key.isidentifier():
        raise ValueError('this sampler has no name: write it with def, or set SAMPLERS["name"] to it')
    parameters_of(function)
    name, taken = _normal(key), _spellings()
    further = {_normal(spelling) for spelling in (label or key, *aliases)} - {name}
    for spelling in (name, *further):
        holder = taken.get(spelling)
        if holder is not None and not (replace and (spelling == name or holder == key)):
            advice = "replace=True replaces it" if spelling == name else "choose another"
            raise ValueError(f"cannot register {key}: the name {spelling!r} is taken by {holder}; {advice}")
    ALIASES.pop(name, None)
    ALIASES.update(dict.fromkeys(further, key))
    if label is not None:
        LABELS[key] = label
    SAMPLERS[key] = function
    return function


def has(key: str, option: str) -> bool:
    """Whether a sampler of SAMPLERS takes an option: "eta" or "churn"."""
    return option in parameters_of(SAMPLERS[key])


def resolve(name: str) -> tuple[str, str | None]:
    """Split a name as users write it ("DPM++ 2M Karras") into a key of SAMPLERS and a spacing, or None.

    A spacing may have settings, as in spaced_levels.  "webui DPM2 Karras" is what A1111 calls "DPM2 Karras".  Raises
    ValueError for an unknown name, with the nearest ones.
    """
    if name in SAMPLERS:
        return name, None
    if _normal(name).startswith("webui_"):
        return from_webui(name.strip()[len("webui ") :].replace("_", " "), {"Schedule type": "Automatic"})
    whole, colon, settings = name.removesuffix(OURS).partition(":")
    words, known = _normal(whole), _spellings()
    if words in known:  # settings are those of its own spacing
        default = parameters_of(SAMPLERS[known[words]])["spacing"].default
        return known[words], f"{default}:{settings}" if colon else None
    for key in sorted(SPACINGS, key=len, reverse=True):
        if words.endswith("_" + _normal(key)) and words.removesuffix("_" + _normal(key)) in known:
            return known[words.removesuffix("_" + _normal(key))], key + colon + settings
    both = itertools.product(SAMPLERS, SPACINGS)
    names = {_normal(f"{key}_{spacing}"): label(f"{key}_{spacing}") for key, spacing in both} | known
    near = dict.fromkeys(names[spelling] for spelling in difflib.get_close_matches(words, names, n=3, cutoff=0.6))
    hint = f"did you mean {' or '.join(near)}? " if near else ""
    raise ValueError(f"unknown sampler {name!r:.100}: {hint}expected one of {', '.join(SAMPLERS)}")


def _spellings() -> dict[str, str]:
    """Return a table of every name, as _normal spells it -> key of SAMPLERS."""
    return ALIASES | {_normal(key): key for key in SAMPLERS}


def _normal(name: str) -> str:
    """Lower case, words joined by _, "++" as pp, without k-diffusion's prefixes, diffusers' suffix and ComfyUI's."""
    words = name.strip().lower().replace(" ", "_").replace("-", "_").replace("dpm++", "dpmpp")
    return words.removeprefix("sample_").removeprefix("k_").removesuffix("scheduler").removesuffix("_gpu")


def label(name: str) -> str:
    """Return a sampler's usual name, with the spacing that it names."""
    key, spacing = resolve(name)
    words = key.replace("_", " ")
    text = LABELS.get(key, words[:1].upper() + words[1:])
    schedule, colon, settings = (spacing or "").partition(":")  # settings are read as they are
    return text if spacing is None else f"{text} {schedule.replace('_', ' ').title()}{colon}{settings}"


def written(name: str, spacing: str | Spacing | None, theirs_too: bool = True) -> dict[str, str]:
    """Return the entries of a PNG's text for a sampler by any of its names, and a spacing (None: the sampler's own).

    If A1111 can make this trajectory, they are its names for it; otherwise, or without `theirs_too` (of rectified
    flows), none that A1111 would take for its own.
    """
    key, named = resolve(name)
    used = spacing or named or parameters_of(SAMPLERS[key])["spacing"].default
    if theirs_too and isinstance(used, str) and (theirs := to_webui(key, used)) is not None:
        return {"Sampler": theirs[0], **theirs[1]}
    used = used if isinstance(used, str) else getattr(used, "__name__", "a function")
    if LABELS.get(key, "").lower() in {offered.lower() for offered in OFFERED}:
        return {"Sampler": LABELS[key] + OURS, "Schedule type": used}
    return {"Sampler": label(name)} | ({} if spacing is None else {"Schedule type": used})


def table_steps(name: str) -> int | None:
    """Return the number of steps if the name has a spacing with a fixed number ("ddpm smart27"), else None."""
    _, spacing = resolve(name)
    return sum(SECTIONS[spacing]) if spacing in SECTIONS else None


def named_plan(
    name: str,
    schedule: Schedule,
    steps: int,
    *,
    eta: float | None = None,
    churn: float | None = None,
    spacing: str | Spacing | None = None,
    last: int | None = None,
) -> Plan:
    """Make the plan of a sampler by any of its names; eta, churn and spacing default to the sampler's own.

    spacing is a key of SPACINGS or a function of your own; ":quantised" after its name rounds timesteps, ":unit" begins
    with unit noise instead of noise of the first level.  With `last`,
    only that many final steps run; a multistep sampler starts them without a history.

    Raises ValueError for an unknown name or spacing, steps outside 1..1000, last outside 1..steps, and an eta or churn
    that the sampler does not take.
    """
    key, named_spacing = resolve(name)
    parameters = parameters_of(SAMPLERS[key])
    if last is not None and not hasattr(last, "__index__"):
        raise TypeError(f"got last {last!r:.60}, expected a whole number of steps")
    if not 1 <= steps <= len(schedule.alpha_bar):
        raise ValueError(f"got {steps} steps, expected 1 to {len(schedule.alpha_bar)}")
    if spacing is None:
        spacing = parameters["spacing"].default if named_spacing is None else named_spacing
        general = isinstance(schedule, FlowSchedule) or spacing in ("leading", "linspace")
        if named_spacing is None and general:
            spacing = getattr(schedule, "spacing", None) or spacing  # the core's schedules have none
    if not isinstance(spacing, str):
        sigmas = [level.sigma if isinstance(level, Level) else math.nan for level in spacing(schedule, steps)]
        if len(sigmas) < 2 or not all(now >= after for now, after in itertools.pairwise(sigmas)):
            raise ValueError("got a spacing of your own, expected it to return two or more Levels, the noisiest first")
    quantised, unit = (isinstance(spacing, str) and word in spacing.split(":") for word in ("quantised", "unit"))
    if isinstance(spacing, str):
        spacing = ":".join(word for word in spacing.split(":") if word not in ("quantised", "unit"))
    levels = spacing_of(spacing)
    arguments: dict[str, Any] = {"spacing": levels if last is None else functools.partial(_last_levels, levels, last)}
    for option, value, most in (("eta", eta, 1.0), ("churn", churn, float(steps))):
        if value is None:
            continue
        if not 0 <= value <= most:
            raise ValueError(f"got {option} {value}, expected 0 to {most:g}")
        if option in parameters:
            arguments[option] = value
        elif value != 0:
            able = ", ".join(sampler for sampler in SAMPLERS if has(sampler, option))
            raise ValueError(f"got {option} {value}, but {key} has none: leave it out, or use one of {able}")
    plan = SAMPLERS[key](schedule, steps, **arguments)
    plan = dataclasses.replace(plan, initial=1.0) if unit else plan
    return _at_whole_timesteps(plan, schedule) if quantised else plan


def _last_levels(spacing: Spacing, last: int, schedule: Schedule, steps: int) -> list[Level]:
    """Return the levels of a spacing's last `last` steps."""
    levels = spacing(schedule, steps)
    if not 1 <= last < len(levels):
        raise ValueError(f"got the last {last} of {len(levels) - 1} steps, expected 1 to {len(levels) - 1}")
    return levels[-last - 1 :]


def _at_whole_timesteps(plan: Plan, schedule: Schedule) -> Plan:
    """Return the plan for a network that is given the trained timestep whose log sigma is nearest.

    k-diffusion's `quantize`, A1111's "quantization in K samplers".  Raises ValueError for a rectified flow.
    """
    if isinstance(schedule, FlowSchedule) or hasattr(plan, "adaptive"):
        raise ValueError("`:quantised` is for schedules with 1000 timesteps and samplers with fixed steps")
    a, s = plan.level.T
    log_sigmas = np.log(s / np.maximum(a, 2.0**-24))
    nearest = abs(np.log(schedule.sigmas) - log_sigmas[:, None]).argmin(axis=1)
    return dataclasses.replace(plan, t=nearest.astype(np.float64))
