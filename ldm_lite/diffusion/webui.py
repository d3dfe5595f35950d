"""The samplers of AUTOMATIC1111's web UI ("A1111"): which of ours makes the trajectory of each of its names.

Some of its names mean more than the paper's sampler: other timesteps, a noise level left out, another order.
From version 1.10; older versions are recognised by what the text of a picture lacks.
"""

import re
from collections.abc import Mapping
from typing import NamedTuple


class Offered(NamedTuple):
    """A sampler that A1111 offers."""

    key: str  # of SAMPLERS
    automatic: str = "Uniform"  # the schedule type that "Automatic" means
    discards: bool = False  # makes one level more, and leaves out the last but one
    spacing: str | None = None  # of samplers that no schedule type changes
    calls: int = 1  # of the network in a step, as its prompts count them


OFFERED = {
    "DPM++ 2M": Offered("dpmpp_2m", "Karras"),
    "DPM++ SDE": Offered("dpmpp_sde", "Karras", calls=2),
    "DPM++ 2M SDE": Offered("dpmpp_2m_sde", "Exponential"),
    "DPM++ 2M SDE Heun": Offered("dpmpp_2m_sde_heun", "Exponential"),
    "DPM++ 2S a": Offered("dpmpp_2s_a", "Karras", calls=2),
    "DPM++ 3M SDE": Offered("dpmpp_3m_sde", "Exponential", discards=True),
    "Euler a": Offered("euler_a"),
    "Euler": Offered("euler"),
    "LMS": Offered("lms"),
    "Heun": Offered("heun", calls=2),
    "DPM2": Offered("dpm2", "Karras", discards=True, calls=2),
    "DPM2 a": Offered("dpm2_a", "Karras", discards=True, calls=2),
    "DPM fast": Offered("dpm_fast"),
    "DPM adaptive": Offered("dpm_adaptive"),
    "Restart": Offered("restart", "Karras", calls=2),
    "LCM": Offered("lcm_webui"),
    "DDIM": Offered("ddim", spacing="webui_ddim"),
    "DDIM CFG++": Offered("ddim_cfgpp", spacing="webui_ddim"),
    "PLMS": Offered("plms", spacing="webui_ddim"),
    "UniPC": Offered("unipc_bh1", spacing="webui_unipc"),
}
SCHEDULE_TYPES = {  # schedule type -> spacing; Turbo is Forge's
    "Uniform": "linspace",
    "Karras": "karras",
    "Exponential": "exponential",
    "Polyexponential": "polyexponential",
    "SGM Uniform": "sgm_uniform",
    "KL Optimal": "kl_optimal",
    "Align Your Steps": "ays",
    "Simple": "simple",
    "Normal": "normal",
    "DDIM": "ddim_uniform",
    "Beta": "beta_sigma",
    "Turbo": "turbo",
}
_RANGED = {"karras", "exponential", "polyexponential", "sgm_uniform", "kl_optimal", "normal", "beta_sigma"}
SETTINGS = {  # key in a picture's text -> (setting of a spacing, the spacings that have it)
    "Schedule rho": ("rho", {"karras", "polyexponential"}),
    "Schedule min sigma": ("sigma_min", _RANGED),
    "Schedule max sigma": ("sigma_max", _RANGED),
    "Beta schedule alpha": ("alpha", {"beta_sigma"}),
    "Beta schedule beta": ("beta", {"beta_sigma"}),
}
DISCARD = "Discard penultimate sigma"


def calls_per_step(key: str) -> int | None:
    """The calls that A1111's prompts count in a step of a sampler of SAMPLERS; None for one that it does not offer."""
    return next((offered.calls for offered in OFFERED.values() if offered.key == key), None)


def from_webui(sampler: str, settings: Mapping[str, str]) -> tuple[str, str]:
    """Return the key of SAMPLERS and the spacing of a sampler as a picture's text names it.

    The settings are the text's: "Schedule type" and others.  Before version 1.9 a type could only be part of the name,
    and a name without one meant Uniform.  Raises ValueError for an unknown name.
    """
    names = {name.lower(): name for name in OFFERED}
    types = {name.lower(): name for name in (*SCHEDULE_TYPES, "Automatic")} | {"sgmuniform": "SGM Uniform"}
    words, schedule = sampler.strip().lower(), settings.get("Schedule type", "").strip().lower()
    if words not in names:
        for ending in sorted(types, key=len, reverse=True):
            if words.endswith(" " + ending):
                words, schedule = words.removesuffix(" " + ending), ending
                break
    schedule = schedule.replace("_", " ")
    if words not in names or (schedule and schedule not in types):
        what = f"sampler {sampler!r:.60}" if words not in names else f"schedule type {schedule!r:.60}"
        raise ValueError(
            f"unknown {what}: expected one of {', '.join(OFFERED if words not in names else SCHEDULE_TYPES)}"
        )
    offered = OFFERED[names[words]]
    if offered.spacing is not None:
        return offered.key, offered.spacing
    kind = types[schedule] if schedule else "Automatic" if _version(settings) >= (1, 9) else ""
    kind = offered.automatic if kind == "Automatic" or (not kind and offered.key == "restart") else kind or "Uniform"
    spacing = SCHEDULE_TYPES[kind]
    if (names[words], kind) == ("LCM", "Turbo"):
        raise ValueError("unknown schedule type 'Turbo' of LCM: expected one of the web UI's own")
    numbers = [
        f":{setting}={settings[key]}"
        for key, (setting, able) in SETTINGS.items()
        if key in settings and spacing in able and settings[key] not in ("0", "0.0")
    ]
    discard = offered.discards or settings.get(DISCARD, "") == "True"
    return offered.key, spacing + "".join(numbers) + ":discard" * discard


def _version(settings: Mapping[str, str]) -> tuple[int, int]:
    """The version that wrote a text; before 1.3 it had none."""
    match = re.match(r"v?(\d{1,4})\.(\d{1,4})", settings.get("Version", ""))
    return (int(match[1]), int(match[2])) if match else (0, 0)


def to_webui(key: str, spacing: str) -> tuple[str, dict[str, str]] | None:
    """Return A1111's name and settings for a sampler and a spacing, or None if it cannot make this trajectory."""
    base, *settings = spacing.split(":")
    discard, numbers = "discard" in settings, dict(text.split("=", 1) for text in settings if "=" in text)
    keys = {setting: name for name, (setting, _) in SETTINGS.items()}
    if "quantised" in settings:  # A1111's texts do not show this
        return None
    for name, offered in OFFERED.items():
        if offered.key != key or (offered.discards and not discard):
            continue
        if offered.spacing is not None:
            return (name, {"Schedule type": "Automatic"}) if offered.spacing == spacing else None
        kind = next((kind for kind, name_here in SCHEDULE_TYPES.items() if name_here == base and kind != "Turbo"), None)
        if kind is None or any(base not in SETTINGS[keys[setting]][1] for setting in numbers):
            return None
        extra = {DISCARD: "True"} if discard and not offered.discards else {}
        return name, {"Schedule type": kind} | {keys[setting]: text for setting, text in numbers.items()} | extra
    return None
