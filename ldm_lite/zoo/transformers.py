"""The diffusion transformers: the row of one by its shapes, the places of its text encoders, its blocks."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ldm_lite.core.layers import Shapes
from ldm_lite.models import clip, flux, mmdit, open_clip, qwen3, t5, z_image
from ldm_lite.models.clip import CLIPTextSpec
from ldm_lite.models.flux import DoubleStreamBlock, FluxSpec, SingleStreamBlock
from ldm_lite.models.mmdit import JointBlock, MMDiTSpec
from ldm_lite.models.open_clip import OpenCLIPTextSpec
from ldm_lite.models.qwen3 import Qwen3Spec
from ldm_lite.models.t5 import T5Spec
from ldm_lite.models.z_image import Block, ZImageSpec
from ldm_lite.zoo.families import FAMILIES, Family
from ldm_lite.zoo.networks import EncoderSpec, TextSpec, infer_vae

MASK = 64  # channels of FLUX fill's mask: the 8x8 pixels of a latent position
TRANSFORMERS: dict[str, type[FluxSpec] | type[MMDiTSpec] | type[ZImageSpec]] = {
    flux.PROBE: FluxSpec,
    mmdit.PROBE: MMDiTSpec,
    z_image.PROBE: ZImageSpec,
}
BLOCKS = (DoubleStreamBlock, SingleStreamBlock, JointBlock, Block)  # what LoRAs change, and training may recompute
TEXTS: dict[str, type[EncoderSpec]] = {
    clip.PROBE: CLIPTextSpec,
    open_clip.PROBE: OpenCLIPTextSpec,
    t5.PROBE: T5Spec,
    qwen3.PROBE: Qwen3Spec,
}


def text_kind(shapes: Shapes) -> type[EncoderSpec] | None:
    """Return the kind of a text encoder with weights of these shapes, of those that transformers read."""
    return next((kind for key, kind in TEXTS.items() if key in shapes), None)


def transformer_row(unet: Shapes, metadata: Mapping[str, str]) -> Family | None:
    """Return the row of a diffusion transformer, with the spec of this file's; None for any other network.

    Several rows may have the same network (FLUX.1 dev, Krea and Kontext; 3.5 large and its Turbo): the metadata's
    "family" chooses, else it is the first.  Raises ValueError for shapes that make no sense or that no row has.
    """
    kind = next((kind for key, kind in TRANSFORMERS.items() if key in unet), None)
    if kind is None:
        return None
    spec = kind.from_shapes(unet)
    rows = {name: row for name, row in FAMILIES.items() if _variant(row.unet) == _variant(spec)}
    if not rows:
        raise ValueError(f"unknown transformer: {spec.in_channels} channels in, {spec.out_channels} out")
    name = metadata.get("family", "")
    row: Any = rows[name if name in rows else next(iter(rows))]
    return replace(row, unet=spec)


def _variant(spec: object) -> tuple[object, ...] | None:
    """Return what tells a kind of transformer from others of the same class, whatever its size."""
    if isinstance(spec, FluxSpec):
        condition = spec.in_channels - spec.out_channels
        return (
            FluxSpec,
            spec.guidance,
            {0: "", spec.out_channels: "image", spec.out_channels + MASK: "mask"}.get(condition),
        )
    if isinstance(spec, ZImageSpec):
        return ZImageSpec, spec.in_channels - spec.out_channels
    if isinstance(spec, MMDiTSpec):
        return MMDiTSpec, spec.qk_norm, spec.dual_depth > 0, spec.in_channels - spec.out_channels
    return None


def fitted(row: Family, texts: Mapping[str, EncoderSpec], shapes: Mapping[str, Shapes]) -> Family:
    """Return a transformer's row with the specs of this file's autoencoder and text encoders, by role.

    Stable Diffusion 3 may lack T5.  Raises ValueError for networks that do not fit together.
    """
    kinds = {type(spec) for spec in texts.values()}
    needed = [spec for spec in row.text_encoders if not (isinstance(spec, T5Spec) and isinstance(row.unet, MMDiTSpec))]
    if missing := [_title(spec) for spec in needed if type(spec) not in kinds]:
        raise ValueError(
            f"is {row.title}, which reads text with {' and '.join(map(_title, row.text_encoders))}: name the file of "
            f"{' and '.join(missing)} with `text_encoder=FILE`, which may be repeated"
        )
    if "vae" not in shapes:
        raise ValueError(f"is {row.title} without its autoencoder: name its file with `vae=FILE`")
    vae = infer_vae(shapes["vae"])
    if vae.embed_dim != row.unet.out_channels:
        raise ValueError(
            f"is {row.title}, whose latents have {row.unet.out_channels} channels, but those of the autoencoder "
            f"{vae.embed_dim}: name another with `vae=FILE`"
        )
    widths = {type(spec): spec.width for spec in texts.values() if isinstance(spec, TextSpec)}
    pooled = widths[CLIPTextSpec] + widths.get(OpenCLIPTextSpec, 0) if CLIPTextSpec in widths else None
    for what, found, wanted in (
        ("T5's output is", widths.get(T5Spec), row.unet.context_dim),
        ("Qwen3's output is", widths.get(Qwen3Spec), row.unet.context_dim),
        ("the pooled text is", pooled, row.unet.vector_dim),
    ):
        if found not in (None, wanted):
            raise ValueError(
                f"is {row.title}, but {what} {found} wide, wanted {wanted}: take another `text_encoder=FILE`"
            )
    return replace(row, vae=vae, text_encoders=tuple(texts.values()))


TITLES: dict[type, str] = {
    CLIPTextSpec: "CLIP-L",
    OpenCLIPTextSpec: "OpenCLIP bigG",
    T5Spec: "T5 XXL",
    Qwen3Spec: "Qwen3 4B",
}


def _title(spec: EncoderSpec) -> str:
    return TITLES[type(spec)]


def check_texts(row: Family, texts: Mapping[str, Shapes]) -> None:
    """Raise ValueError for a text encoder that a transformer's row does not read, by the name of its file."""
    for path, shapes in texts.items():
        kind = text_kind(shapes)
        if kind not in [type(spec) for spec in row.text_encoders]:
            what = "another text encoder" if kind is None else TITLES[kind]
            raise ValueError(
                f"{path}: is {what}, but {row.title} reads text with {' and '.join(map(_title, row.text_encoders))}"
            )
