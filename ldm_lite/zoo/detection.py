"""Which family a checkpoint belongs to, told from the keys and shapes of its networks alone, never from its name.

The specs in models/ read the architecture from the shapes, and families.py has a row for it.  What shapes cannot tell
(head counts, prediction type, scale factor) comes from the row, or if no row fits, from the file's metadata.
"""

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace

import torch

from ldm_lite.diffusion.schedule import Prediction
from ldm_lite.models.clip import ACTIVATIONS, CLIPTextSpec
from ldm_lite.models.open_clip import OpenCLIPTextSpec
from ldm_lite.models.shapes import Shapes
from ldm_lite.models.taesd import TAESDSpec
from ldm_lite.models.unet import UNet, UNetSpec
from ldm_lite.models.unet_if import IFSpec
from ldm_lite.zoo.families import FAMILIES, IN_THE_FILE, SD1, Family
from ldm_lite.zoo.networks import UNETS, AutoencoderSpec, EncoderSpec, infer_vae

# What diffusers' folders of them name as their scheduler, and how its timesteps are spaced: their weights do not tell.
TURBOS = {"EulerDiscreteScheduler, trailing": "sd_turbo", "EulerAncestralDiscreteScheduler, trailing": "sdxl_turbo"}


def identify(shapes: Mapping[str, Shapes], metadata: Mapping[str, str], sgm: bool = False) -> Family:
    """Shapes of a file's networks by role, keys without prefixes, and the file's metadata -> the family.

    sgm says whether it names text encoders as generative-models does.  A UNet that no row describes is taken at its
    metadata's word, if that is complete.  Raises ValueError, one line, for an unknown network, for a distilled one, and
    for contradictory metadata.
    """
    if metadata.get("family", "sd1") not in FAMILIES:
        raise ValueError(f"the metadata name the family {metadata['family']!r}, wanted one of {', '.join(FAMILIES)}")
    if "unet" not in shapes:
        complete(shapes, SD1.networks)
    try:
        if "encoder_pooling.1.positional_embedding" in shapes["unet"]:
            stage = IFSpec.from_shapes(shapes["unet"])
            return replace(FAMILIES["if_II" if stage.super_resolution else "if_I"], unet=stage)
        spec = UNetSpec.from_shapes(shapes["unet"])
        rows = [family for family in FAMILIES.values() if _as_inferred(family.unet) == spec]
        named = FAMILIES.get(metadata.get("family", TURBOS.get(metadata.get("scheduler", ""), "")))
        if rows:
            row = next((row for row in rows if row.sgm == sgm), rows[0])
            family = _fitted(named if named in rows else row, shapes)
        elif spec.context_dim is not None and spec.middle_depth == 0:
            raise ValueError(
                "this UNet has no attention in its middle: it is a distilled one (SSD-1B, Segmind-Vega, BK-SDM or the "
                "like), which is not supported"
            )
        else:
            family = _described(spec, shapes, metadata)
    except KeyError as error:
        raise ValueError(f"a tensor that every such network has is missing: {error.args[0]}") from error
    stated = stated_prediction(metadata)
    return family if stated is None else with_prediction(family, stated)


def _fitted(family: Family, shapes: Mapping[str, Shapes]) -> Family:
    """A row, with a text encoder that lacks what the family has no use for, where the file's does."""
    text = shapes.get("text_encoder", {})
    if family.conditioner == "clip" and isinstance(family.text, OpenCLIPTextSpec) and "ln_final.weight" in text:
        fitted = family.text.fitted(text)
        kept = {name: getattr(fitted, name) for name in ("layers", "skip", "projection")}
        if kept["layers"] - kept["skip"] == family.text.layers - family.text.skip:
            return replace(family, text=replace(family.text, **kept))
    return family


def with_vae(family: Family, other: AutoencoderSpec, name: str) -> Family:
    """The family with an autoencoder out of another file, of that name, in place of its own.

    The scale factor stays the family's, which no autoencoder's file tells; but TAESD's latents are the UNet's own.
    Raises ValueError if its latents are not like those of the family's autoencoder.
    """
    own = family.vae
    if (other.embed_dim, other.factor) != (own.embed_dim, own.factor):
        raise ValueError(
            f"{name}: does not fit: its latents have {other.embed_dim} channels at 1/{other.factor} of the size, but "
            f"{family.title} wants {own.embed_dim} at 1/{own.factor}"
        )
    return replace(family, vae=other, scale_factor=1.0 if isinstance(other, TAESDSpec) else family.scale_factor)


def _as_inferred(spec: UNetSpec) -> UNetSpec:
    """A row as inference returns it: weights do not tell the number of heads."""
    return replace(spec, num_heads=None, head_dim=None)


def turbo_of(family: Family) -> str | None:
    """The name of the Turbo model with a family's UNet; None if there is none, or it is that."""
    name = next((name for name in TURBOS.values() if FAMILIES[name].unet == family.unet), None)
    return None if name is None or FAMILIES[name].title == family.title else name


def stated_prediction(metadata: Mapping[str, str]) -> Prediction | None:
    """What a file says that it predicts, if it does.  Raises ValueError if that is unknown."""
    stated = metadata.get("prediction", metadata.get("modelspec.prediction_type"))
    return None if stated is None else parse_prediction(stated)


def with_prediction(family: Family, prediction: Prediction) -> Family:
    """The family's variant with that prediction."""
    if prediction == "v" and family.v_resolution is not None:
        return replace(family, prediction=prediction, resolution=family.v_resolution, v_resolution=None)
    return replace(family, prediction=prediction, v_resolution=None)


V_DEVIATION = 0.09


def read_prediction(family: Family, unet: UNet) -> tuple[Family, str]:
    """A family that predicts eps or v -> the variant that the UNet's weights are of, and why, in words.

    The bias of the last transformer's first norm spreads wider in networks that were trained to predict v: the
    statistic that ComfyUI decides by.
    """
    key = next(key for key in reversed(list(unet.state_dict())) if key.endswith("transformer_blocks.0.norm1.bias"))
    deviation = float(unet.state_dict()[key].float().std(correction=0))
    prediction: Prediction = "v" if deviation > V_DEVIATION else "eps"
    sign = ">" if prediction == "v" else "<="
    return with_prediction(
        family, prediction
    ), f"by its weights: {key} deviates by {deviation:.3f} {sign} {V_DEVIATION}"


def parse_prediction(name: str) -> Prediction:
    """A prediction type as people write it ("epsilon", "v_prediction") -> eps, v or x0.  Raises ValueError."""
    short = {"epsilon": "eps", "v_prediction": "v", "sample": "x0"}.get(name, name)
    if short not in ("eps", "v", "x0"):
        raise ValueError(f"unknown prediction type {name!r}: wanted eps, v or x0")
    return short  # type: ignore[return-value]


def complete(got: Collection[str], wanted: Iterable[str]) -> None:
    """Raises ValueError if one of the wanted roles of networks is not among those got."""
    if set(got) in ({"control"}, {"adapter"}):
        what = "a ControlNet" if "control" in got else "a T2I-Adapter"
        raise ValueError(f"is {what}, to be used with a checkpoint: `control=FILE:IMAGE`")
    if lacks := [role for role in wanted if role not in got]:
        options = " and ".join(dict.fromkeys(f"`{role.removesuffix('_2')}=FILE`" for role in lacks))
        raise ValueError(f"holds only {', '.join(got)}: name what is missing with {options}")


def known(metadata: Mapping[str, str]) -> Mapping[str, str]:
    """Metadata that a user gives, as they are.  Raises ValueError for a name that nothing here reads."""
    if unknown := [name for name in metadata if name not in KNOWN]:
        raise ValueError(f"got `metadata` {unknown[0]}, wanted one of {', '.join(KNOWN)}")
    return metadata


NEEDED = ("unet_num_heads", "text_num_heads", "text_activation", "scale_factor", "beta_start", "beta_end", "resolution")
KNOWN = (
    *NEEDED,
    *("family", "title", "prediction", "modelspec.prediction_type", "beta_schedule", "num_timesteps", "steps"),
    *("guidance", "unet_head_dim", "text_2_num_heads", "text_2_activation"),
)


def _described(unet: UNetSpec, shapes: Mapping[str, Shapes], metadata: Mapping[str, str]) -> Family:
    """The family that a file's own metadata describes; ValueError naming the nearest row if it is incomplete.

    With "family", the name of a row, all that the metadata leave open is as there.
    """
    lacks = [key for key in (*NEEDED, "prediction") if key not in metadata]
    if lacks and "family" not in metadata:
        name, key = nearest(shapes["unet"])
        raise ValueError(
            f"unknown UNet: the nearest is {name}, from which it differs at {key}; to load it as what it is, "
            f"its metadata (or `metadata=KEY=VALUE`) must say {', '.join(lacks)}"
        )
    if (
        metadata.get("beta_schedule", "scaled_linear") != "scaled_linear"
        or metadata.get("num_timesteps", "1000") != "1000"
    ):
        raise ValueError(
            "the metadata's beta_schedule or num_timesteps is not scaled_linear and 1000, all that is known here"
        )
    row = FAMILIES[metadata.get("family", "sd1")]
    complete(shapes, row.networks)
    try:
        family = replace(
            row,
            title=metadata.get("title", row.title if "family" in metadata else "unnamed model"),
            unet=_with_heads(unet, row.unet, metadata),
            vae=infer_vae(shapes["vae"]),
            text=_text(shapes, metadata, "text", row.text),
            text_2=_text(shapes, metadata, "text_2", row.text_2),
            beta_start=float(metadata.get("beta_start", row.beta_start)),
            beta_end=float(metadata.get("beta_end", row.beta_end)),
            scale_factor=float(metadata.get("scale_factor", row.scale_factor)),
            resolution=int(metadata.get("resolution", row.resolution)),
            steps=int(metadata.get("steps", row.steps)),
            scale=float(metadata.get("guidance", row.scale)),
        )
        _check(family)
    except ValueError as error:
        raise ValueError(f"the metadata does not describe a model: {error}") from error
    return family


def _check(family: Family) -> None:
    """Raises ValueError for numbers that no model can have."""
    unet, factor = family.unet, family.vae.factor
    schedule = 0 < family.beta_start <= family.beta_end < 1
    scaled = 0 < family.scale_factor < math.inf or family.scale_factor is IN_THE_FILE
    whole = family.resolution > 0 and family.resolution % factor == 0
    checks: list[tuple[str, object, bool, str]] = [  # name, value, whether it can be, what can be
        ("scale_factor", family.scale_factor, scaled, "more than 0"),
        ("beta_start", family.beta_start, schedule, "0 < beta_start <= beta_end < 1"),
        ("resolution", family.resolution, whole, f"a multiple of {factor}"),
        ("steps", family.steps, 1 <= family.steps <= 1000, "1 to 1000"),
        ("guidance", family.scale, math.isfinite(family.scale), "a finite number"),
    ]
    for name, size in (("unet_num_heads", unet.num_heads), ("unet_head_dim", unet.head_dim)):
        width = unet.model_channels * unet.channel_mult[-1]  # where there is attention in any of them
        checks.append((name, size, size is None or (size > 0 and width % size == 0), f"a divisor of {width}"))
    for name, text in (("text", family.text), ("text_2", family.text_2)):
        if isinstance(text, CLIPTextSpec):
            divides = text.heads > 0 and text.width % text.heads == 0
            checks.append((f"{name}_num_heads", text.heads, divides, f"a divisor of {text.width}"))
            wanted, found = f"one of {', '.join(ACTIVATIONS)}", text.activation
            checks.append((f"{name}_activation", found, found in ACTIVATIONS, wanted))
    for name, value, can_be, wanted in checks:
        if not can_be:
            raise ValueError(f"its {name} cannot be {value}: wanted {wanted}")


def _with_heads(unet: UNetSpec, row: UNetSpec, metadata: Mapping[str, str]) -> UNetSpec:
    if "unet_num_heads" in metadata:
        return replace(unet, num_heads=int(metadata["unet_num_heads"]), head_dim=None)
    if "unet_head_dim" in metadata:
        return replace(unet, num_heads=None, head_dim=int(metadata["unet_head_dim"]))
    return replace(unet, num_heads=row.num_heads, head_dim=row.head_dim)


def _text(
    shapes: Mapping[str, Shapes], metadata: Mapping[str, str], name: str, like: EncoderSpec | None
) -> EncoderSpec | None:
    """The spec of a text encoder, "text" or "text_2", of the same kind as another."""
    if like is None:
        return None
    heads = int(metadata[f"{name}_num_heads"]) if f"{name}_num_heads" in metadata else None
    spec = like.fitted(shapes[name.replace("text", "text_encoder")], heads)
    if isinstance(spec, CLIPTextSpec) and f"{name}_activation" in metadata:
        return replace(spec, activation=metadata[f"{name}_activation"])
    return spec


def describe(family: Family) -> dict[str, str]:
    """The metadata that identify() needs to know a family again that no row describes."""

    def kind(family: Family) -> tuple[object, ...]:
        return family.conditioner, family.task, family.sgm, type(family.text)

    def alike(name: str) -> int:
        return sum(value == getattr(family, key) for key, value in vars(FAMILIES[name]).items())

    row = max((name for name, row in FAMILIES.items() if kind(row) == kind(family)), key=alike)
    about: dict[str, object] = {
        "family": row,
        "title": family.title,
        "prediction": family.prediction,
        "scale_factor": family.scale_factor,
        "beta_start": family.beta_start,
        "beta_end": family.beta_end,
        "beta_schedule": "scaled_linear",
        "num_timesteps": 1000,
        "resolution": family.resolution,
        "steps": family.steps,
        "guidance": family.scale,
        "unet_num_heads": family.unet.num_heads,
        "unet_head_dim": family.unet.head_dim,
    }
    for name, spec in (("text", family.text), ("text_2", family.text_2)):
        if isinstance(spec, (CLIPTextSpec, OpenCLIPTextSpec)):
            about[f"{name}_num_heads"] = spec.heads
        if isinstance(spec, CLIPTextSpec):
            about[f"{name}_activation"] = spec.activation
    return {key: str(value) for key, value in about.items() if value not in (None, IN_THE_FILE)}


def nearest(shapes: Shapes) -> tuple[str, str]:
    """(name of the known UNet that shares most tensors with these shapes, the first key that differs)."""

    def of(spec: UNetSpec) -> dict[str, tuple[int, ...]]:
        with torch.device("meta"):
            return {key: tuple(value.shape) for key, value in UNet(spec).state_dict().items()}

    known = {name: of(spec) for name, spec in UNETS.items()}
    name = max(known, key=lambda name: len(known[name].items() & shapes.items()))
    differing = (key for key in known[name] if shapes.get(key) != known[name][key])
    return name, next(differing, next((key for key in shapes if key not in known[name]), "nothing"))
