"""Describe a family by metadata, with which detection.py recognises it again."""

import json

from ldm_lite.models.unet import UNetSpec
from ldm_lite.zoo.detection import texts_of
from ldm_lite.zoo.families import FAMILIES
from ldm_lite.zoo.family import IN_THE_FILE, Betas, Family, Linear, Noise, ScaledLinear


def describe(family: Family) -> dict[str, str]:
    """Return the metadata with which detect_family() recognises a family that matches no row."""
    rows = [name for name, row in FAMILIES.items() if _kind(row) == _kind(family)]
    own = vars(family)
    about: dict[str, object] = {
        "family": max(rows, key=lambda name: sum(value == own[key] for key, value in vars(FAMILIES[name]).items())),
        "title": family.title,
        "prediction": family.prediction,
        "scale_factor": family.scale_factor,
        "resolution": family.resolution,
        "steps": family.steps,
        "guidance": family.scale,
    }
    if isinstance(family.unet, UNetSpec):
        about |= {"unet_num_heads": family.unet.num_heads, "unet_head_dim": family.unet.head_dim} | _curve(family.noise)
    for role, spec in texts_of(family):
        name = role.replace("_encoder", "")
        if hasattr(spec, "skip"):  # CLIP's and OpenCLIP's
            about[f"{name}_num_heads"] = spec.heads
        if hasattr(spec, "activation"):
            about[f"{name}_activation"] = spec.activation
        elif getattr(spec, "skip", None) == 0:  # otherwise the number of layers tells
            about[f"{name}_skip"] = 0
    return {key: str(value) for key, value in about.items() if value not in (None, IN_THE_FILE)}


def _curve(noise: Noise) -> dict[str, object]:
    """Return the metadata of a variance-preserving noise process."""
    about: dict[str, object] = {"num_timesteps": 1000}
    if isinstance(noise, ScaledLinear):
        kind = "linear" if isinstance(noise, Linear) else "scaled_linear"
        return about | {"beta_start": noise.start, "beta_end": noise.end, "beta_schedule": kind}
    if isinstance(noise, Betas):
        return about | {"trained_betas": json.dumps(noise.values)}
    return about | {"beta_schedule": "squaredcos_cap_v2"}


def _kind(family: Family) -> tuple[object, ...]:
    return family.conditioner, family.task, family.sgm, type(family.text)
