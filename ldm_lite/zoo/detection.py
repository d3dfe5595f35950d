"""Detect a checkpoint's family from the keys and shapes of its networks, never from its file name.

The specs in models/ read the architecture from the shapes; families/ has one row for each.  What shapes cannot tell
(head counts, prediction type, scale factor) comes from the row, or from the file's metadata if no row matches.
"""

import json
import math
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch

from ldm_lite.core.files import imported
from ldm_lite.core.layers import Shapes
from ldm_lite.core.networks import WithoutInit
from ldm_lite.diffusion.schedule import Prediction, Schedule
from ldm_lite.models.clip import ACTIVATIONS
from ldm_lite.models.unet import UNetSpec
from ldm_lite.zoo.families import DENOISERS, FAMILIES
from ldm_lite.zoo.family import IN_THE_FILE, Betas, Cosine, Family, Linear, Noise, ScaledLinear, text_roles
from ldm_lite.zoo.networks import Spec, build, infer_vae


def detect_family(shapes: Mapping[str, Shapes], metadata: Mapping[str, str], sgm: bool = False) -> Family:
    """Return the family of a file, from the shapes of its networks by role (keys without prefixes) and its metadata.

    `sgm` = the file's text encoders have the key names of generative-models.  If a UNet matches no row, complete
    metadata describe it instead.  Raises ValueError, one line, for an unknown or distilled network and for
    contradictory metadata.
    """
    if metadata.get("family", "sd1") not in FAMILIES:
        raise ValueError(f"the metadata name the family {metadata['family']!r}, wanted one of {', '.join(FAMILIES)}")
    if "unet" not in shapes:
        check_complete(shapes, FAMILIES["sd1"].networks)
    if (row := row_of(shapes["unet"], metadata)) is None:
        return _of_unet(shapes, metadata, sgm)
    return _with_facts(fitted(row, shapes), metadata) if row.text_encoders else row


def row_of(unet: Shapes, metadata: Mapping[str, str]) -> Family | None:
    """Return the row of a network that is no UNet of latent diffusion, with this file's spec; None for a UNet.

    Raises ValueError for shapes that make no sense or that no row has.
    """
    name = next((name for key, name in DENOISERS.items() if key in unet), None)
    row: Family | None = None if name is None else imported(name)(unet, metadata)
    return row


def chosen(
    rows: Mapping[str, Family], spec: Any, variant: Callable[[Any], object], metadata: Mapping[str, str]
) -> Family:
    """Return the row of a network, with its spec: one whose network is of the same variant, whatever its size.

    Several rows may have the same one (FLUX.1 dev and Kontext; 3.5 large and its Turbo): the metadata's "family"
    chooses, else it is the first.  Raises ValueError if there is none.
    """
    alike = {name: row for name, row in rows.items() if variant(row.unet) == variant(spec)}
    if not alike:
        raise ValueError(f"unknown transformer: {spec.in_channels} channels in, {spec.out_channels} out")
    return replace(alike.get(metadata.get("family", "")) or next(iter(alike.values())), unet=spec)


# ---- UNets ----------------------------------------------------------------------------------------------------------

MERGED: dict[str, Any] = {"steps": 4, "scale": 1.5}  # of a model into which a distilled one is merged


def _of_unet(shapes: Mapping[str, Shapes], metadata: Mapping[str, str], sgm: bool) -> Family:
    """Return the family of a file with a UNet of latent diffusion."""
    spec = UNetSpec.from_shapes(shapes["unet"])
    rows = _rows_of(spec)
    if rows:
        row = next((row for row in rows.values() if row.sgm == sgm), next(iter(rows.values())))
        if "scheduler" in metadata:
            row = next((row for row in rows.values() if row.scheduler == metadata["scheduler"]), row)
        row = rows.get(metadata.get("family", ""), row)
        family = _with_facts(_fit_text(row, shapes), metadata, FACTS.keys() & {"scale_factor", "scaling_factor"})
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
    if metadata.get("sampler", family.sampler) != family.sampler:
        family = replace(family, sampler=metadata["sampler"], **MERGED)
    return family


def _rows_of(spec: UNetSpec) -> dict[str, Family]:
    """Return the rows of a UNet, all of one module.  Modules whose UNets read another context are not imported."""
    for name, module in FAMILIES.modules.items():
        if spec.context_dim in module.contexts:
            rows = {name: row for name, row in FAMILIES.rows(name).items() if _as_inferred(row.unet) == spec}
            if rows:
                return rows
    return {}


def _fit_text(family: Family, shapes: Mapping[str, Shapes]) -> Family:
    """Fit a row to a file whose OpenCLIP lacks the layers and the projection that the family does not use."""
    text, row = shapes.get("text_encoder", {}), family.text
    if row is not None and "ln_final.weight" in text and family.conditioner == "clip" and hasattr(row, "projection"):
        spec = row.fitted(text)
        if spec.layers - spec.skip == row.layers - row.skip:
            fitting = replace(row, layers=spec.layers, skip=spec.skip, projection=spec.projection)
            return replace(family, text_encoders=(fitting, *family.text_encoders[1:]))
    return family


def with_vae(family: Family, other: Spec, name: str) -> Family:
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
    if hasattr(own, "quant") and hasattr(other, "quant") and own.quant != other.quant:
        found, wanted = ("no", "one") if own.quant else ("a", "none")
        raise ValueError(f"{name}: does not fit: it has {found} quant_conv, but {family.title}'s autoencoder {wanted}")
    return replace(family, vae=other, scale_factor=1.0 if type(other).__name__ == "TAESDSpec" else family.scale_factor)


def _as_inferred(spec: Spec) -> Spec:
    """Return a row's spec without the number of heads, as inferred from shapes, which do not tell it."""
    return replace(spec, num_heads=None, head_dim=None) if type(spec) is UNetSpec else spec


def metadata_prediction(metadata: Mapping[str, str]) -> Prediction | None:
    """Return the prediction type that the metadata give; None if they do not.  Raises ValueError if it is unknown."""
    name = metadata.get("prediction", metadata.get("modelspec.prediction_type"))
    return None if name is None else parse_prediction(name)


def with_prediction(family: Family, prediction: Prediction) -> Family:
    """Return the family's variant with this prediction type."""
    if prediction == "v" and family.v_resolution is not None:
        return replace(family, prediction=prediction, resolution=family.v_resolution, v_resolution=None)
    return replace(family, prediction=prediction, v_resolution=None)


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


# What metadata tell -> a field of Family, and its type; the first two are one, and the last one counts.
FACTS: dict[str, tuple[str, Callable[[str], object]]] = {
    "scaling_factor": ("scale_factor", float),
    "scale_factor": ("scale_factor", float),
    "title": ("title", str),
    "resolution": ("resolution", int),
    "steps": ("steps", int),
    "guidance": ("scale", float),
}
BETA_SCHEDULES = {"scaled_linear": ScaledLinear, "linear": Linear}
REQUIRED = (
    "unet_num_heads",
    "text_num_heads",
    "text_activation",
    "scale_factor",
    "beta_start",
    "beta_end",
    "resolution",
)
METADATA_KEYS = (
    *REQUIRED,
    *("family", "title", "prediction", "modelspec.prediction_type", "beta_schedule", "num_timesteps", "steps"),
    *("guidance", "unet_head_dim", "text_2_num_heads", "text_2_activation", "trained_betas", "text_skip"),
)
# What a diffusers folder tells -> the required keys that it is in place of.
INSTEAD = {
    "unet_head_dim": ("unet_num_heads",),
    "scaling_factor": ("scale_factor",),
    "sample_size": ("resolution",),
    "trained_betas": ("beta_start", "beta_end"),
}


def _from_metadata(unet: UNetSpec, shapes: Mapping[str, Shapes], metadata: Mapping[str, str]) -> Family:
    """Return the family that a file's metadata describe.  Raises ValueError naming the nearest UNet if they do not.

    If the metadata name a row as "family", it supplies the missing values.
    """
    told = {*metadata, *(key for other in INSTEAD.keys() & metadata.keys() for key in INSTEAD[other])}
    missing = [key for key in (*REQUIRED, "prediction") if key not in told]
    if missing and "family" not in metadata:
        name, key = nearest_unet(unet, shapes["unet"])
        raise ValueError(
            f"unknown UNet: the nearest is {name}, from which it differs at {key}; to load it, its metadata (or "
            f"`metadata=KEY=VALUE`) must give {', '.join(missing)}"
        )
    row = FAMILIES[metadata.get("family", "sd1")]
    check_complete(shapes, row.networks)
    family = replace(
        row,
        title=row.title if "family" in metadata else "unnamed model",
        unet=replace(unet, num_heads=row.unet.num_heads, head_dim=row.unet.head_dim),
        vae=infer_vae(shapes["vae"]),
        text_encoders=tuple(like.fitted(shapes[role]) for role, like in texts_of(row)),
    )
    return _with_facts(family, metadata)


def _with_facts(row: Family, metadata: Mapping[str, str], names: Collection[str] = FACTS) -> Family:
    """Return a row with what the metadata say, of FACTS only these names.  Raises ValueError for nonsense."""
    try:
        values: dict[str, Any] = {
            field: kind(metadata[name]) for name, (field, kind) in FACTS.items() if name in metadata and name in names
        }
        values["text_encoders"] = tuple(_with_text(spec, metadata, role) for role, spec in texts_of(row))
        if isinstance(row.unet, UNetSpec):
            values |= {"noise": _noise(row, metadata), "unet": row.unet}
            for name, other in (("unet_head_dim", "num_heads"), ("unet_num_heads", "head_dim")):
                if name in metadata:
                    heads: dict[str, Any] = {name.removeprefix("unet_"): int(metadata[name]), other: None}
                    values["unet"] = replace(row.unet, **heads)
        family = replace(row, **values)
        _check(family)
    except ValueError as error:
        raise ValueError(f"the metadata does not describe a model: {error}") from error
    return family


def _with_text(spec: Spec, metadata: Mapping[str, str], role: str) -> Spec:
    """Return the spec of a text encoder with what the metadata say of CLIP and OpenCLIP."""
    if not hasattr(spec, "skip"):
        return spec
    name = role.replace("_encoder", "")  # "text", "text_2", ...
    values: dict[str, Any] = {"heads": int(metadata.get(f"{name}_num_heads", spec.heads))}
    if hasattr(spec, "activation"):
        values["activation"] = metadata.get(f"{name}_activation", spec.activation)
    else:
        values["skip"] = int(metadata.get(f"{name}_skip", spec.skip))
    return replace(spec, **values)


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
    like = row.noise if isinstance(row.noise, ScaledLinear) else FAMILIES["sd1"].noise
    assert isinstance(like, ScaledLinear)
    start, end = metadata.get("beta_start", like.start), metadata.get("beta_end", like.end)
    return BETA_SCHEDULES[kind](float(start), float(end))


def _check(family: Family) -> None:
    """Raise ValueError for numbers that no model can have."""
    unet, noise, factor = family.unet, family.noise, family.vae.factor * family.unet.patch
    is_scale = 0 < family.scale_factor < math.inf or family.scale_factor is IN_THE_FILE
    is_whole = family.resolution > 0 and family.resolution % factor == 0
    checks: list[tuple[str, object, bool, str]] = [  # name, value, whether it is valid, valid values
        ("scale_factor", family.scale_factor, is_scale, "more than 0"),
        ("resolution", family.resolution, is_whole, f"a multiple of {factor}"),
        ("steps", family.steps, 1 <= family.steps <= 1000, "1 to 1000"),
        ("guidance", family.scale, math.isfinite(family.scale), "a finite number"),
    ]
    for role, text in texts_of(family):
        name = role.replace("_encoder", "")
        if hasattr(text, "skip"):  # CLIP's and OpenCLIP's
            divides = text.heads > 0 and text.width % text.heads == 0
            checks.append((f"{name}_num_heads", text.heads, divides, f"a divisor of {text.width}"))
            checks.append((f"{name}_skip", text.skip, 0 <= text.skip < text.layers, f"0 to {text.layers - 1}"))
        if hasattr(text, "activation"):
            is_known, known = text.activation in ACTIVATIONS, ", ".join(ACTIVATIONS)
            checks.append((f"{name}_activation", text.activation, is_known, f"one of {known}"))
    if isinstance(noise, Betas):
        Schedule.from_betas(noise.betas, family.prediction)
    if isinstance(noise, ScaledLinear):
        checks.append(("beta_start", noise.start, 0 < noise.start <= noise.end < 1, "0 < beta_start <= beta_end < 1"))
    if isinstance(unet, UNetSpec):
        depths = (*unet.transformer_depth, unet.middle_depth)
        widths = [unet.model_channels * mult for mult in (*unet.channel_mult, unet.channel_mult[-1])]
        for name, heads in (("unet_num_heads", unet.num_heads), ("unet_head_dim", unet.head_dim)):
            for width in (width for width, depth in zip(widths, depths, strict=True) if depth):
                divides = heads is None or (heads > 0 and width % heads == 0)
                checks.append((name, heads, divides, f"a divisor of {width}"))
    for name, value, is_valid, wanted in checks:
        if not is_valid:
            raise ValueError(f"its {name} cannot be {value}: wanted {wanted}")


def texts_of(family: Family) -> list[tuple[str, Spec]]:
    """Return (role, spec) of each text encoder."""
    return list(zip(text_roles(family.text_encoders), family.text_encoders, strict=True))


def nearest_unet(spec: UNetSpec, shapes: Shapes) -> tuple[str, str]:
    """Return the name of the known UNet with most values of `spec`, and the first key whose shape differs from it."""
    unets = {name: row.unet for name, row in FAMILIES.items() if type(row.unet) is UNetSpec}
    alike = {
        name: sum(vars(spec)[key] == value for key, value in vars(_as_inferred(unet)).items())
        for name, unet in unets.items()
    }
    name = max(alike, key=lambda name: alike[name])
    with torch.device("meta"), WithoutInit():
        known = {key: tuple(value.shape) for key, value in build(unets[name]).state_dict().items()}
    differing = (key for key in known if shapes.get(key) != known[key])
    return name, next(differing, next((key for key in shapes if key not in known), "nothing"))


# ---- networks whose text encoders lie in files of their own ---------------------------------------------------------

TEXTS = {  # a key of a text encoder -> the class of its spec
    "embeddings.token_embedding.weight": "CLIPTextSpec",
    "ln_final.weight": "OpenCLIPTextSpec",
    "encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight": "T5Spec",
    "layers.0.self_attn.q_norm.weight": "Qwen3Spec",
}
TITLES = {"CLIPTextSpec": "CLIP-L", "OpenCLIPTextSpec": "OpenCLIP bigG", "T5Spec": "T5 XXL", "Qwen3Spec": "Qwen3 4B"}


def text_kind(shapes: Shapes) -> str | None:
    """Return the class of the spec of a text encoder with weights of these shapes, of those in TEXTS."""
    return next((kind for key, kind in TEXTS.items() if key in shapes), None)


def kinds_of(row: Family) -> list[str]:
    """Return the classes of the specs of a row's text encoders."""
    return [type(spec).__name__ for spec in row.text_encoders]


def check_texts(row: Family, texts: Mapping[str, Shapes]) -> None:
    """Raise ValueError for a text encoder that a row does not read, by the name of its file."""
    for path, shapes in texts.items():
        kind = text_kind(shapes)
        if kind not in kinds_of(row):
            what = "another text encoder" if kind is None else TITLES[kind]
            raise ValueError(f"{path}: is {what}, but {row.title} reads text with {_titles(kinds_of(row))}")


def fitted(row: Family, shapes: Mapping[str, Shapes]) -> Family:
    """Return a row with the specs of this file's autoencoder and text encoders.

    Raises ValueError for networks that are missing or do not fit together.
    """
    texts = {type(like).__name__: like.fitted(shapes[role]) for role, like in texts_of(row) if role in shapes}
    optional = {type(spec).__name__ for spec in row.optional}
    if missing := [kind for kind in kinds_of(row) if kind not in texts.keys() | optional]:
        raise ValueError(
            f"is {row.title}, which reads text with {_titles(kinds_of(row))}: name the file of {_titles(missing)} with "
            "`text_encoder=FILE`, which may be repeated"
        )
    if "vae" not in shapes:
        raise ValueError(f"is {row.title} without its autoencoder: name its file with `vae=FILE`")
    vae = infer_vae(shapes["vae"])
    if vae.embed_dim != row.unet.out_channels:
        raise ValueError(
            f"is {row.title}, whose latents have {row.unet.out_channels} channels, but those of the autoencoder "
            f"{vae.embed_dim}: name another with `vae=FILE`"
        )
    widths = {kind: spec.width for kind, spec in texts.items()}
    clips = [widths[kind] for kind in ("CLIPTextSpec", "OpenCLIPTextSpec") if kind in widths]
    for what, width, wanted in (
        ("T5's output is", widths.get("T5Spec"), row.unet.context_dim),
        ("Qwen3's output is", widths.get("Qwen3Spec"), row.unet.context_dim),
        ("the pooled text is", sum(clips) or None, getattr(row.unet, "vector_dim", None)),
    ):
        if width not in (None, wanted):
            raise ValueError(
                f"is {row.title}, but {what} {width} wide, wanted {wanted}: take another `text_encoder=FILE`"
            )
    return replace(row, vae=vae, text_encoders=tuple(texts.values()))


def _titles(kinds: Iterable[str]) -> str:
    return " and ".join(TITLES[kind] for kind in kinds)
