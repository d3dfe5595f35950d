"""Which family a checkpoint is of, told from the keys and shapes of its networks alone, never from its name.

fingerprint.py infers the architecture, and it is looked up in the rows of families.py.  What shapes cannot tell (head
counts, prediction type, scale factor) is the row's, or for a network that no row describes its file's metadata's.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace

import torch

from ldm_lite.diffusion.schedule import Prediction
from ldm_lite.families import FAMILIES, SD1, Family
from ldm_lite.fingerprint import Shapes, infer_text, infer_unet, infer_vae
from ldm_lite.models.clip import CLIPTextSpec
from ldm_lite.models.taesd import TAESDSpec
from ldm_lite.models.unet import UNet, UNetSpec
from ldm_lite.networks import UNETS


def identify(shapes: Mapping[str, Shapes], metadata: Mapping[str, str]) -> Family:
    """Shapes of a file's networks by role, keys without prefixes, and the file's metadata -> the family.

    A UNet that no row describes is taken at its metadata's word, if that is complete.  Raises ValueError, one line,
    for a recognised family that is not supported, for an unknown network, and for contradictory metadata.
    """
    if "unet" not in shapes:
        complete(shapes, SD1.networks)
    try:
        spec = infer_unet(shapes["unet"])
        known = next((f for f in FAMILIES.values() if _as_inferred(f.unet) == spec), None)
        name = next((name for name, row in UNETS.items() if _as_inferred(row) == spec), None)
        if known is not None:
            family = known
        elif name is not None:
            raise ValueError(
                f"this is a checkpoint of {name}, which is not supported yet: take a Stable Diffusion 1.x one"
            )
        else:
            family = _described(spec, shapes, metadata)
    except KeyError as error:
        raise ValueError(f"a tensor that every such network has is missing: {error.args[0]}") from error
    stated = metadata.get("prediction", metadata.get("modelspec.prediction_type"))
    return family if stated is None else replace(family, prediction=parse_prediction(stated))


def with_vae(family: Family, shapes: Shapes, name: str) -> Family:
    """The family with an autoencoder of these shapes, out of another file of that name, in place of its own.

    The scale factor stays the family's, which no autoencoder's file tells; but TAESD's latents are the UNet's own.
    Raises ValueError if its latents are not like those of the family's autoencoder.
    """
    own, other = family.vae, infer_vae(shapes)
    if (other.embed_dim, other.factor) != (own.embed_dim, own.factor):
        raise ValueError(
            f"{name}: does not fit: its latents have {other.embed_dim} channels at 1/{other.factor} of the size, but "
            f"{family.title} wants {own.embed_dim} at 1/{own.factor}"
        )
    return replace(family, vae=other, scale_factor=1.0 if isinstance(other, TAESDSpec) else family.scale_factor)


def _as_inferred(spec: UNetSpec) -> UNetSpec:
    """A row as inference returns it: weights do not tell the number of heads."""
    return replace(spec, num_heads=None, head_dim=None)


def parse_prediction(name: str) -> Prediction:
    """A prediction type as people write it ("epsilon", "v_prediction") -> eps, v or x0.  Raises ValueError."""
    short = {"epsilon": "eps", "v_prediction": "v", "sample": "x0"}.get(name, name)
    if short not in ("eps", "v", "x0"):
        raise ValueError(f"unknown prediction type {name!r}: wanted eps, v or x0")
    return short  # type: ignore[return-value]


def complete(got: Collection[str], wanted: Iterable[str]) -> None:
    """Raises ValueError if one of the wanted roles of networks is not among those got."""
    if lacks := [role for role in wanted if role not in got]:
        flags = " and ".join(f"--{role.replace('_', '-')} FILE" for role in lacks)
        raise ValueError(f"holds only {', '.join(got)}: name what is missing with {flags}")


NEEDED = ("unet_num_heads", "text_num_heads", "text_activation", "scale_factor", "beta_start", "beta_end", "resolution")


def _described(unet: UNetSpec, shapes: Mapping[str, Shapes], metadata: Mapping[str, str]) -> Family:
    """The family that a file's own metadata describes; ValueError naming the nearest row if it is incomplete."""
    lacks = [key for key in (*NEEDED, "prediction") if key not in metadata]
    if lacks:
        name, key = nearest(shapes["unet"])
        raise ValueError(
            f"unknown UNet: the nearest is {name}, from which it differs at {key}; to load it as what it is, "
            f"its metadata (or --metadata KEY=VALUE) must say {', '.join(lacks)}"
        )
    if (
        metadata.get("beta_schedule", "scaled_linear") != "scaled_linear"
        or metadata.get("num_timesteps", "1000") != "1000"
    ):
        raise ValueError(
            "the metadata's beta_schedule or num_timesteps is not scaled_linear and 1000, all that is known here"
        )
    complete(shapes, ("vae", "text_encoder"))
    try:
        return Family(
            title=metadata.get("title", "unnamed model"),
            unet=replace(unet, num_heads=int(metadata["unet_num_heads"])),
            vae=infer_vae(shapes["vae"]),
            text=infer_text(
                shapes["text_encoder"],
                heads=int(metadata["text_num_heads"]),
                activation=metadata["text_activation"],
            ),
            text_2=None,
            conditioner="clip",
            task="txt2img",
            prediction=parse_prediction(metadata["prediction"]),
            beta_start=float(metadata["beta_start"]),
            beta_end=float(metadata["beta_end"]),
            scale_factor=float(metadata["scale_factor"]),
            resolution=int(metadata["resolution"]),
            steps=int(metadata.get("steps", SD1.steps)),
            scale=float(metadata.get("guidance", SD1.scale)),
        )
    except ValueError as error:
        raise ValueError(f"the metadata does not describe a model: {error}") from error


def describe(family: Family) -> dict[str, str]:
    """The metadata that identify() needs to know a family again that no row describes."""
    assert isinstance(family.text, CLIPTextSpec)
    about = {
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
        "text_num_heads": family.text.heads,
        "text_activation": family.text.activation,
    }
    return {key: str(value) for key, value in about.items()}


def nearest(shapes: Shapes) -> tuple[str, str]:
    """(name of the known UNet that shares most tensors with these shapes, the first key that differs)."""

    def of(spec: UNetSpec) -> dict[str, tuple[int, ...]]:
        with torch.device("meta"):
            return {key: tuple(value.shape) for key, value in UNet(spec).state_dict().items()}

    known = {name: of(spec) for name, spec in UNETS.items()}
    name = max(known, key=lambda name: len(known[name].items() & shapes.items()))
    differing = (key for key in known[name] if shapes.get(key) != known[name][key])
    return name, next(differing, next((key for key in shapes if key not in known[name]), "nothing"))
