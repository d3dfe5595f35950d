"""Detect a checkpoint's family from the keys and shapes of its networks, never from its file name.

The specs in models/ read the architecture from the shapes; families.py has one row for each.  What shapes cannot tell
(head counts, prediction type, scale factor) comes from the row, or from the file's metadata if no row matches.
"""

import json
import math
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import replace

import torch

from ldm_lite.core.layers import Shapes
from ldm_lite.core.vae import VAESpec
from ldm_lite.diffusion.schedule import Prediction, Schedule
from ldm_lite.models.clip import ACTIVATIONS, CLIPTextSpec
from ldm_lite.models.open_clip import OpenCLIPTextSpec
from ldm_lite.models.taesd import TAESDSpec
from ldm_lite.models.unet import UNet, UNetSpec
from ldm_lite.models.unet_if import IFSpec
from ldm_lite.zoo.families import (
    FAMILIES,
    IN_THE_FILE,
    SD1,
    Betas,
    Cosine,
    Family,
    Linear,
    Noise,
    ScaledLinear,
    text_roles,
)
from ldm_lite.zoo.networks import UNETS, AutoencoderSpec, EncoderSpec, infer_vae
from ldm_lite.zoo.transformers import fitted, transformer_row

# Scheduler and timestep spacing of the Turbo models' diffusers folders: shapes do not tell them apart.
TURBOS = {"EulerDiscreteScheduler, trailing": "sd_turbo", "EulerAncestralDiscreteScheduler, trailing": "sdxl_turbo"}


def detect_family(shapes: Mapping[str, Shapes], metadata: Mapping[str, str], sgm: bool = False) -> Family:
    """Return the family of a file, from the shapes of its networks by role (keys without prefixes) and its metadata.

    `sgm` = the file's text encoders have the key names of generative-models.  If a UNet matches no row, complete
    metadata describe it instead.  Raises ValueError, one line, for an unknown or distilled network and for
    contradictory metadata.
    """
    if metadata.get("family", "sd1") not in FAMILIES:
        raise ValueError(f"the metadata name the family {metadata['family']!r}, wanted one of {', '.join(FAMILIES)}")
    if "unet" not in shapes:
        check_complete(shapes, SD1.networks)
    if "encoder_pooling.1.positional_embedding" in shapes["unet"]:
        stage = IFSpec.from_shapes(shapes["unet"])
        return replace(FAMILIES["if_II" if stage.super_resolution else "if_I"], unet=stage)
    if (transformer := transformer_row(shapes["unet"], metadata)) is not None:
        found = [(name, spec) for name, spec in texts_of(transformer) if name.replace("text", "text_encoder") in shapes]
        texts = {name: _infer_text(shapes, metadata, name, like) for name, like in found}
        return _numbered(fitted(transformer, texts, shapes), metadata)
    spec = UNetSpec.from_shapes(shapes["unet"])
    unets = [family for family in FAMILIES.values() if isinstance(family.unet, UNetSpec)]
    rows = [family for family in unets if _as_inferred(family.unet) == spec]
    named = FAMILIES.get(metadata.get("family", TURBOS.get(metadata.get("scheduler", ""), "")))
    if rows:
        row = next((row for row in rows if row.sgm == sgm), rows[0])
        family = _heeding(_fit_text(named if named in rows else row, shapes), metadata)
    elif spec.context_dim is not None and spec.middle_depth == 0:
        raise ValueError(
            "this UNet has no attention in its middle block: it is distilled (SSD-1B, Segmind-Vega, BK-SDM or the "
            "like), which is not supported"
        )
    else:
        family = _from_metadata(spec, shapes, metadata)
    stated = family.resolution if "resolution" in metadata else None
    prediction = metadata_prediction(metadata)
    family = family if prediction is None else with_prediction(family, prediction)
    if stated is not None and family.title == metadata.get("title"):  # not a row's, which a v model has another of
        family = replace(family, resolution=stated)
    if "sample_size" in metadata and "resolution" not in metadata:
        size = int(metadata["sample_size"]) * family.vae.factor
        family = replace(family, resolution=size, v_resolution=None if family.v_resolution is None else size)
    if metadata.get("sampler", family.sampler) != family.sampler:  # distilled, and merged into another's weights
        family = replace(family, sampler=metadata["sampler"], steps=FAMILIES["lcm"].steps, scale=1.5)
    return family


def _numbered(row: Family, metadata: Mapping[str, str]) -> Family:
    """Return a transformer's row with the numbers that the metadata give.  Raises ValueError for nonsense."""
    try:
        family = replace(
            row,
            title=metadata.get("title", row.title),
            scale_factor=_scale_factor(row, metadata),
            resolution=int(metadata.get("resolution", row.resolution)),
            steps=int(metadata.get("steps", row.steps)),
            scale=float(metadata.get("guidance", row.scale)),
        )
        _check_numbers(_number_checks(family))
    except ValueError as error:
        raise ValueError(f"the metadata does not describe a model: {error}") from error
    return family


def _heeding(row: Family, metadata: Mapping[str, str]) -> Family:
    """Return a row with what the metadata say of its networks and noise process.  Raises ValueError for nonsense."""
    try:
        texts = tuple(_with_text(spec, metadata, name) for name, spec in texts_of(row))
        family = replace(
            row,
            unet=_with_heads(row.unet, row.unet, metadata),
            text_encoders=texts,
            noise=_noise(row, metadata),
            scale_factor=_scale_factor(row, metadata),
        )
        _check(family)
    except ValueError as error:
        raise ValueError(f"the metadata does not describe a model: {error}") from error
    return family


def _fit_text(family: Family, shapes: Mapping[str, Shapes]) -> Family:
    """Fit a row to a file whose OpenCLIP lacks the layers and the projection that the family does not use."""
    text = shapes.get("text_encoder", {})
    if family.conditioner == "clip" and isinstance(family.text, OpenCLIPTextSpec) and "ln_final.weight" in text:
        found = family.text.fitted(text)
        if found.layers - found.skip == family.text.layers - family.text.skip:
            fitted = replace(family.text, layers=found.layers, skip=found.skip, projection=found.projection)
            return replace(family, text_encoders=(fitted, *family.text_encoders[1:]))
    return family


def with_vae(family: Family, other: AutoencoderSpec, name: str) -> Family:
    """Return the family with another autoencoder, from the file `name`.

    The scale factor stays, since autoencoder files do not store it, but is 1 for TAESD, whose latents are the UNet's.
    Raises ValueError if the latents have other channels or another size, or only one of both has quant_conv.
    """
    own = family.vae
    if (other.embed_dim, other.factor) != (own.embed_dim, own.factor):
        raise ValueError(
            f"{name}: does not fit: its latents have {other.embed_dim} channels at 1/{other.factor} of the size, but "
            f"{family.title} wants {own.embed_dim} at 1/{own.factor}"
        )
    if isinstance(own, VAESpec) and isinstance(other, VAESpec) and own.quant != other.quant:
        found, wanted = ("no", "one") if own.quant else ("a", "none")
        raise ValueError(f"{name}: does not fit: it has {found} quant_conv, but {family.title}'s autoencoder {wanted}")
    return replace(family, vae=other, scale_factor=1.0 if isinstance(other, TAESDSpec) else family.scale_factor)


def _as_inferred(spec: UNetSpec) -> UNetSpec:
    """Return a row's spec without the number of heads, as inferred from shapes, which do not tell it."""
    return replace(spec, num_heads=None, head_dim=None)


def turbo_variant(family: Family) -> str | None:
    """Return the name of the Turbo variant of the family; None if there is none, or the family is Turbo itself."""
    turbos = (name for name in FAMILIES if name.endswith("_turbo"))
    name = next((name for name in turbos if FAMILIES[name].unet == family.unet), None)
    return None if name is None or FAMILIES[name].title == family.title else name


def metadata_prediction(metadata: Mapping[str, str]) -> Prediction | None:
    """Return the prediction type that the metadata give; None if they do not.  Raises ValueError if it is unknown."""
    name = metadata.get("prediction", metadata.get("modelspec.prediction_type"))
    return None if name is None else parse_prediction(name)


def with_prediction(family: Family, prediction: Prediction) -> Family:
    """Return the family's variant with this prediction type."""
    if prediction == "v" and family.v_resolution is not None:
        return replace(family, prediction=prediction, resolution=family.v_resolution, v_resolution=None)
    return replace(family, prediction=prediction, v_resolution=None)


V_DEVIATION = 0.09


def detect_prediction(family: Family, unet: UNet) -> tuple[Family, str]:
    """Decide between eps and v prediction by the UNet's weights; return the family's variant and the reason, in words.

    The bias of the last transformer's first norm spreads wider in networks trained with v prediction.  ComfyUI decides
    by the same statistic.
    """
    key = next(key for key in reversed(list(unet.state_dict())) if key.endswith("transformer_blocks.0.norm1.bias"))
    deviation = float(unet.state_dict()[key].float().std(correction=0))
    prediction: Prediction = "v" if deviation > V_DEVIATION else "eps"
    sign = ">" if prediction == "v" else "<="
    reason = f"by its weights: {key} deviates by {deviation:.3f} {sign} {V_DEVIATION}"
    return with_prediction(family, prediction), reason


def parse_prediction(name: str) -> Prediction:
    """Parse a prediction type: eps, v, x0, or diffusers' names for them.  Raises ValueError."""
    short = {"epsilon": "eps", "v_prediction": "v", "sample": "x0"}.get(str(name), name)
    if short not in ("eps", "v", "x0"):
        raise ValueError(f"unknown prediction type {name!r}: wanted eps, v or x0")
    return short  # type: ignore[return-value]


CONTROLS = {  # roles of what needs a checkpoint beside it
    "control": "a ControlNet",
    "adapter": "a T2I-Adapter",
    "style": "a style adapter",
    "ip_adapter": "an IP-Adapter",
    "redux": "FLUX.1 Redux",
}


def check_complete(found: Collection[str], required: Iterable[str]) -> None:
    """Raise ValueError if one of the required roles of networks was not found."""
    if len(found) == 1 and (what := CONTROLS.get(next(iter(found)))):
        raise ValueError(f"is {what}, to be used with a checkpoint: `control=FILE:IMAGE`")
    if missing := [role for role in required if role not in found]:
        options = " and ".join(dict.fromkeys(f"`{re.sub('_[0-9]+$', '', role)}=FILE`" for role in missing))
        raise ValueError(f"holds only {', '.join(found)}: name what is missing with {options}")


def check_metadata(metadata: Mapping[str, str]) -> Mapping[str, str]:
    """Check and return metadata from the user.  Raises ValueError for an unknown key."""
    if unknown := [name for name in metadata if name not in METADATA_KEYS]:
        raise ValueError(f"got `metadata` {unknown[0]}, wanted one of {', '.join(METADATA_KEYS)}")
    return metadata


BETA_SCHEDULES = {"scaled_linear": ScaledLinear, "linear": Linear}
TEXT_KEYS = ("text_num_heads", "text_activation")
REQUIRED = ("unet_num_heads", *TEXT_KEYS, "scale_factor", "beta_start", "beta_end", "resolution")
METADATA_KEYS = (
    *REQUIRED,
    *("family", "title", "prediction", "modelspec.prediction_type", "beta_schedule", "num_timesteps", "steps"),
    *("guidance", "unet_head_dim", "text_2_num_heads", "text_2_activation", "trained_betas", "text_skip"),
)
# What a diffusers folder tells in place of a required key.
CURVES = {"trained_betas"}
INSTEAD = {"unet_num_heads": {"unet_head_dim"}, "scale_factor": {"scaling_factor"}, "resolution": {"sample_size"}}
INSTEAD |= {"beta_start": CURVES, "beta_end": CURVES}


def _from_metadata(unet: UNetSpec, shapes: Mapping[str, Shapes], metadata: Mapping[str, str]) -> Family:
    """Return the family that a file's metadata describe.  Raises ValueError naming the nearest UNet if they do not.

    If the metadata name a row as "family", it supplies the missing values.
    """
    told = metadata.keys() | {key for key, others in INSTEAD.items() if others & metadata.keys()}
    missing = [key for key in (*REQUIRED, "prediction") if key not in told]
    if missing and "family" not in metadata:
        name, key = nearest_unet(unet, shapes["unet"])
        raise ValueError(
            f"unknown UNet: the nearest is {name}, from which it differs at {key}; to load it, its metadata (or "
            f"`metadata=KEY=VALUE`) must give {', '.join(missing)}"
        )
    row = FAMILIES[metadata.get("family", "sd1")]
    check_complete(shapes, row.networks)
    try:
        family = replace(
            row,
            title=metadata.get("title", row.title if "family" in metadata else "unnamed model"),
            unet=_with_heads(unet, row.unet, metadata),
            vae=infer_vae(shapes["vae"]),
            text_encoders=tuple(_infer_text(shapes, metadata, name, like) for name, like in texts_of(row)),
            noise=_noise(row, metadata),
            scale_factor=_scale_factor(row, metadata),
            resolution=int(metadata.get("resolution", row.resolution)),
            steps=int(metadata.get("steps", row.steps)),
            scale=float(metadata.get("guidance", row.scale)),
        )
        _check(family)
    except ValueError as error:
        raise ValueError(f"the metadata does not describe a model: {error}") from error
    return family


def _scale_factor(row: Family, metadata: Mapping[str, str]) -> float:
    return float(metadata.get("scale_factor", metadata.get("scaling_factor", row.scale_factor)))


def _noise(row: Family, metadata: Mapping[str, str]) -> Noise:
    """Return the noise process of a row, as far as the metadata do not give another."""
    if (steps := metadata.get("num_timesteps", "1000")) != "1000":
        raise ValueError(f"its num_timesteps cannot be {steps}: wanted 1000")
    if "trained_betas" in metadata:
        values = json.loads(metadata["trained_betas"])
        numbers = isinstance(values, list) and all(type(each) in (int, float) for each in values)
        if not numbers or len(values) != 1000:
            raise ValueError("its trained_betas are not 1000 numbers")
        return Betas(tuple(map(float, values)))
    own = {Cosine: "squaredcos_cap_v2", Linear: "linear"}.get(type(row.noise), "scaled_linear")
    kind = metadata.get("beta_schedule", own)
    if kind == "squaredcos_cap_v2":
        return Cosine()
    if kind not in BETA_SCHEDULES:
        raise ValueError(f"its beta_schedule cannot be {kind}: wanted {', '.join(BETA_SCHEDULES)} or squaredcos_cap_v2")
    like = row.noise if isinstance(row.noise, ScaledLinear) else SD1.noise
    assert isinstance(like, ScaledLinear)
    start, end = metadata.get("beta_start", like.start), metadata.get("beta_end", like.end)
    return BETA_SCHEDULES[kind](float(start), float(end))


Check = tuple[str, object, bool, str]  # name, value, whether it is valid, valid values


def _check(family: Family) -> None:
    """Raise ValueError for numbers that no model can have."""
    unet, checks = family.unet, list(_number_checks(family))
    if isinstance(family.noise, Betas):
        Schedule.from_betas(family.noise.betas, family.prediction)
    if isinstance(family.noise, ScaledLinear):
        increasing = 0 < family.noise.start <= family.noise.end < 1
        checks.append(("beta_start", family.noise.start, increasing, "0 < beta_start <= beta_end < 1"))
    depths = (*unet.transformer_depth, unet.middle_depth)
    widths = [unet.model_channels * mult for mult in (*unet.channel_mult, unet.channel_mult[-1])]
    for name, size in (("unet_num_heads", unet.num_heads), ("unet_head_dim", unet.head_dim)):
        for width in (width for width, depth in zip(widths, depths, strict=True) if depth):
            checks.append((name, size, size is None or (size > 0 and width % size == 0), f"a divisor of {width}"))
    _check_numbers(checks)


def _number_checks(family: Family) -> Iterator[Check]:
    """Yield what any family is checked for."""
    factor = family.vae.factor * family.unet.patch
    scaled = 0 < family.scale_factor < math.inf or family.scale_factor is IN_THE_FILE
    whole = family.resolution > 0 and family.resolution % factor == 0
    yield "scale_factor", family.scale_factor, scaled, "more than 0"
    yield "resolution", family.resolution, whole, f"a multiple of {factor}"
    yield "steps", family.steps, 1 <= family.steps <= 1000, "1 to 1000"
    yield "guidance", family.scale, math.isfinite(family.scale), "a finite number"
    for name, text in texts_of(family):
        if isinstance(text, (CLIPTextSpec, OpenCLIPTextSpec)):
            divides = text.heads > 0 and text.width % text.heads == 0
            yield f"{name}_num_heads", text.heads, divides, f"a divisor of {text.width}"
            yield f"{name}_skip", text.skip, 0 <= text.skip < text.layers, f"0 to {text.layers - 1}"
        if isinstance(text, CLIPTextSpec):
            wanted, found = f"one of {', '.join(ACTIVATIONS)}", text.activation
            yield f"{name}_activation", found, found in ACTIVATIONS, wanted


def _check_numbers(checks: Iterable[Check]) -> None:
    for name, value, is_valid, wanted in checks:
        if not is_valid:
            raise ValueError(f"its {name} cannot be {value}: wanted {wanted}")


def texts_of(family: Family) -> Iterator[tuple[str, EncoderSpec]]:
    """Yield (name in the metadata, spec) of each text encoder: "text", "text_2", ..."""
    for role, spec in zip(text_roles(family.text_encoders), family.text_encoders, strict=True):
        yield role.replace("text_encoder", "text"), spec


def _with_heads(unet: UNetSpec, row: UNetSpec, metadata: Mapping[str, str]) -> UNetSpec:
    if "unet_num_heads" in metadata:
        return replace(unet, num_heads=int(metadata["unet_num_heads"]), head_dim=None)
    if "unet_head_dim" in metadata:
        return replace(unet, num_heads=None, head_dim=int(metadata["unet_head_dim"]))
    return replace(unet, num_heads=row.num_heads, head_dim=row.head_dim)


def _infer_text(shapes: Mapping[str, Shapes], metadata: Mapping[str, str], name: str, like: EncoderSpec) -> EncoderSpec:
    """Infer the spec of a text encoder, "text" or "text_2", of the same kind as `like`."""
    found = shapes[name.replace("text", "text_encoder")]
    spec: EncoderSpec = like.fitted(found)
    return _with_text(spec, metadata, name)


def _with_text(spec: EncoderSpec, metadata: Mapping[str, str], name: str) -> EncoderSpec:
    """Return the spec of a text encoder, "text" or "text_2", with its heads and activation from the metadata."""
    if isinstance(spec, (CLIPTextSpec, OpenCLIPTextSpec)) and f"{name}_num_heads" in metadata:
        spec = replace(spec, heads=int(metadata[f"{name}_num_heads"]))
    if isinstance(spec, OpenCLIPTextSpec) and f"{name}_skip" in metadata:
        return replace(spec, skip=int(metadata[f"{name}_skip"]))
    if isinstance(spec, CLIPTextSpec) and f"{name}_activation" in metadata:
        return replace(spec, activation=metadata[f"{name}_activation"])
    return spec


def nearest_unet(spec: UNetSpec, shapes: Shapes) -> tuple[str, str]:
    """Return the name of the known UNet with most values of `spec`, and the first key whose shape differs from it."""
    own = vars(spec)
    name = max(UNETS, key=lambda name: sum(own[key] == value for key, value in vars(_as_inferred(UNETS[name])).items()))
    with torch.device("meta"):
        known = {key: tuple(value.shape) for key, value in UNet(UNETS[name]).state_dict().items()}
    differing = (key for key in known if shapes.get(key) != known[key])
    return name, next(differing, next((key for key in shapes if key not in known), "nothing"))
