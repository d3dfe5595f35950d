"""The names of samplers, as people know them from other programs, and the door to all of them: make_plan."""

import difflib
import inspect

from ldm_lite.diffusion.plan import Plan
from ldm_lite.diffusion.samplers import SAMPLERS
from ldm_lite.diffusion.schedule import SECTIONS, SPACINGS, TABLES, Level, Schedule, Spacing, levels_of

# AUTOMATIC1111's names, which are also what a PNG's parameters say.
LABELS = {
    "ddim": "DDIM",
    "plms": "PLMS",
    "ddpm": "DDPM",
    "euler": "Euler",
    "euler_a": "Euler a",
    "heun": "Heun",
    "dpm2": "DPM2",
    "dpm2_a": "DPM2 a",
    "lms": "LMS",
    "dpmpp_2m": "DPM++ 2M",
    "dpmpp_2m_sde": "DPM++ 2M SDE",
    "dpmpp_3m_sde": "DPM++ 3M SDE",
    "dpmpp_sde": "DPM++ SDE",
    "dpmpp_2s_a": "DPM++ 2S a",
    "unipc": "UniPC",
    "deis": "DEIS",
    "lcm": "LCM",
}
# Other spellings, after _normal: of the original scripts, k-diffusion, ComfyUI, InvokeAI and diffusers' classes.
ALIASES = {
    "pndm": "plms",
    "euler_ancestral": "euler_a",
    "dpm_2": "dpm2",
    "dpm2_ancestral": "dpm2_a",
    "dpm_2_a": "dpm2_a",
    "dpm_2_ancestral": "dpm2_a",
    "dpmpp_2s_ancestral": "dpmpp_2s_a",
    "dpmpp_2s": "dpmpp_2s_a",
    "uni_pc": "unipc",
    "unipc_multistep": "unipc",
    "unipcmultistep": "unipc",
    "deismultistep": "deis",
    "dpmsolver++": "dpmpp_2m",
    "dpmsolvermultistep": "dpmpp_2m",
    "dpm_solver": "dpmpp_2m",
    "dpmsolversde": "dpmpp_sde",
    "lmsdiscrete": "lms",
    "heundiscrete": "heun",
    "eulerdiscrete": "euler",
    "eulerancestraldiscrete": "euler_a",
    "kdpm_2": "dpm2",
    "kdpm_2_a": "dpm2_a",
    "uni_pc_bh2": "unipc",
    "kdpm2discrete": "dpm2",
    "kdpm2ancestraldiscrete": "dpm2_a",
}
_SPACINGS = ("karras", "exponential", "sgm_uniform", "beta", "trailing", "leading", "respaced", *TABLES)
SUFFIXES = {"_" + name: name for name in _SPACINGS}


def resolve(name: str) -> tuple[str, str | None]:
    """A sampler's name as users write it ("DPM++ 2M Karras") -> (key of SAMPLERS, spacing that the name asks for).

    Raises ValueError for an unknown name, with the nearest ones.
    """
    key, spacing = _normal(name), None
    for suffix, meant in SUFFIXES.items():
        if key.endswith(suffix):
            key, spacing = key.removesuffix(suffix), meant
    key = ALIASES.get(key, key)
    if key not in SAMPLERS:
        near = difflib.get_close_matches(key, [*SAMPLERS, *ALIASES], n=3, cutoff=0.4)
        near = list(dict.fromkeys(ALIASES.get(each, each) for each in near))
        hint = f"did you mean {' or '.join(near)}? " if near else ""
        raise ValueError(f"unknown sampler {name!r}: {hint}wanted one of {', '.join(SAMPLERS)}")
    return key, spacing


def _normal(name: str) -> str:
    """Lower case, words joined by _, "++" as pp, without k-diffusion's and diffusers' decorations."""
    key = name.strip().lower().replace(" ", "_").replace("-", "_").replace("dpm++", "dpmpp")
    return key.removeprefix("sample_").removeprefix("k_").removesuffix("scheduler")


def label(name: str) -> str:
    """A sampler's name as AUTOMATIC1111's web UI writes it."""
    key, spacing = resolve(name)
    return LABELS[key] + (f" {spacing.replace('_', ' ').title()}" if spacing else "")


def table_steps(name: str) -> int | None:
    """The number of steps of a sampler whose name asks for a spacing that has one number of them; None for others."""
    _, spacing = resolve(name)
    return None if spacing not in SECTIONS else sum(SECTIONS[spacing])


def make_plan(
    name: str,
    schedule: Schedule,
    steps: int,
    *,
    eta: float | None = None,
    churn: float | None = None,
    spacing: str | None = None,
    last: int | None = None,
) -> Plan:
    """The plan of a sampler by any of its names; eta, churn and spacing None = the sampler's own.

    With `last` it is the plan of the last so many of those steps, begun there: a multistep sampler has no history then.
    Raises ValueError for an unknown name or spacing, steps outside 1..1000, a last outside 1..steps, and for an eta or
    churn that the sampler lacks.
    """
    key, named_spacing = resolve(name)
    spacing = named_spacing if spacing is None else spacing
    if not 1 <= steps <= len(schedule.alpha_bar):
        raise ValueError(f"got {steps} steps, wanted 1 to {len(schedule.alpha_bar)}")
    if spacing is not None and spacing not in SPACINGS | TABLES:
        raise ValueError(f"unknown spacing {spacing!r}: wanted one of {', '.join(SPACINGS | TABLES)}")
    arguments: dict[str, object] = {} if spacing is None else {"spacing": spacing}
    if last is not None:
        whole = inspect.signature(SAMPLERS[key]).parameters["spacing"].default if spacing is None else spacing
        arguments["spacing"] = _last_of(whole, last)
    for option, value, most in (("eta", eta, 1.0), ("churn", churn, float(steps))):
        if value is None:
            continue
        if not 0 <= value <= most:
            raise ValueError(f"got {option} {value}, wanted 0 to {most:g}")
        if has(key, option):
            arguments[option] = value
        elif value != 0:
            able = ", ".join(each for each in SAMPLERS if has(each, option))
            raise ValueError(f"got {option} {value}, but {key} has none: leave it out, or take one of {able}")
    return SAMPLERS[key](schedule, steps, **arguments)


def _last_of(spacing: str, last: int) -> Spacing:
    """The spacing that makes the levels of the last so many steps of another."""

    def levels(schedule: Schedule, steps: int) -> list[Level]:
        whole = levels_of(spacing, schedule, steps)
        if not 1 <= last < len(whole):
            raise ValueError(f"got the last {last} of {len(whole) - 1} steps, wanted 1 to {len(whole) - 1}")
        return whole[-last - 1 :]

    return levels


def has(key: str, option: str) -> bool:
    """Whether a sampler of SAMPLERS takes an option: "eta" or "churn"."""
    return option in inspect.signature(SAMPLERS[key]).parameters
