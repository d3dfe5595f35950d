"""Transformers, and the text encoders that they read: in the same file, or in separate ones."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ldm_lite.checkpoint.reader import NETWORK_KINDS, errors_of
from ldm_lite.core.files import Tensors, imported
from ldm_lite.core.layers import Shapes
from ldm_lite.models.qwen3 import VISION
from ldm_lite.zoo.families import DENOISERS, infer_vae
from ldm_lite.zoo.family import FamilyRow, scale_of

CLIPS = ("CLIPTextSpec", "OpenCLIPTextSpec")  # encoders whose pooled outputs form the network's vector
TITLES = {  # of released text encoders, by the class of their spec
    "CLIPTextSpec": "CLIP-L",
    "OpenCLIPTextSpec": "OpenCLIP bigG",
    "T5Spec": "T5 XXL",
    "Qwen3Spec": "Qwen3 4B",
    "Qwen25Spec": "Qwen2.5-VL 7B",
}


def placed(
    networks: Mapping[str, Tensors], replaced: Mapping[str, Tensors], metadata: Mapping[str, str]
) -> dict[str, Tensors]:
    """Return the networks of all files by role, of which each text encoder has the role that its kind has in the row.

    Raises ValueError for a text encoder from another file that the transformer does not read.
    """
    parts = {**networks, **replaced}
    with errors_of(next(iter(parts.values())).path):
        row = _row(parts["unet"].shapes, metadata)
    if row is None or not row.text_encoders:
        return parts
    kinds = [type(spec).__name__ for spec in row.text_encoders]
    texts = {}
    for role, part in [*networks.items(), *replaced.items()]:
        if role.startswith("text_encoder"):
            kind = next((kind.spec for kind in NETWORK_KINDS if kind.spec and kind.probe in part), None)
            if kind not in kinds and part is replaced.get(role):
                what = "another text encoder" if kind is None else TITLES[kind]
                raise ValueError(f"{part.path}: is {what}, but {row.title} reads text with {_titles(kinds)}")
            texts[kind] = part
    others = {role: part for role, part in parts.items() if not role.startswith("text_encoder")}
    return others | {role: texts[kind] for role, kind in zip(row.texts, kinds, strict=True) if kind in texts}


def extra_channels(spec: Any) -> int:
    """Return how many more channels a network reads than it predicts."""
    extra: int = spec.in_channels - spec.out_channels
    return extra


def chosen(
    rows: Mapping[str, FamilyRow],
    spec_of: Callable[[Shapes], Any],
    unet: Shapes,
    metadata: Mapping[str, str],
    variant: Callable[[Any], object] = extra_channels,
) -> FamilyRow:
    """Return the row of a network's variant, with the spec that the network's shapes show.

    Several rows may have the same variant (FLUX.1 dev and Kontext; 3.5 large and its Turbo): the metadata's "family"
    decides, otherwise the first is used.  Raises ValueError if there is none.
    """
    spec = spec_of(unet)
    alike = {name: row for name, row in rows.items() if variant(row.unet) == variant(spec)}
    if not alike:
        raise ValueError(f"unknown transformer: {spec.in_channels} channels in, {spec.out_channels} out")
    return replace(alike.get(metadata.get("family", "")) or next(iter(alike.values())), unet=spec)


def _row(unet: Shapes, metadata: Mapping[str, str]) -> FamilyRow | None:
    """Return the row of a network, with its spec; None for a UNet of latent diffusion.

    Raises ValueError for shapes that make no sense or that no row has.
    """
    name = next((name for key, name in DENOISERS.items() if key in unet), None)
    return None if name is None else imported(name)(unet, metadata)


def fitted(shapes: Mapping[str, Shapes], metadata: Mapping[str, str]) -> FamilyRow:
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
                f"is {row.title}, which shows images to {TITLES[kind]}, but this one lacks the part that reads "
                f"them, {VISION}*: name a whole file with `text_encoder=FILE`{_instead(row, [kind])}"
            )
    texts = {type(like).__name__: like.fitted(shapes[role]) for role, like in row.texts.items() if role in shapes}
    optional = {type(spec).__name__ for spec in row.optional}
    if missing := [kind for kind in kinds if kind not in texts.keys() | optional]:
        raise ValueError(
            f"is {row.title}, which reads text with {_titles(kinds)}: name the file of {_titles(missing)} with "
            f"`text_encoder=FILE`, which may be repeated{_instead(row, missing)}"
        )
    clip, open_clip = (texts.get(kind) for kind in CLIPS)
    if clip and open_clip and shapes["text_encoder"].get("text_projection.weight", (0,))[0] == clip.width:
        texts[CLIPS[0]] = replace(clip, projection=True)  # alone its pooled output is read as it is
    if "vae" not in shapes:
        raise ValueError(f"is {row.title} without its autoencoder: name its file with `vae=FILE`{_instead(row)}")
    vae = infer_vae(shapes["vae"])
    if vae.embed_dim != row.unet.out_channels:
        raise ValueError(
            f"is {row.title}, whose latents have {row.unet.out_channels} channels, but those of the autoencoder "
            f"{vae.embed_dim}: name another with `vae=FILE`"
        )
    widths = {kind: getattr(spec, "output_width", spec.width) for kind, spec in texts.items()}
    context = {f"{TITLES[kind].split()[0]}'s output is": widths[kind] for kind in widths if kind not in CLIPS}
    checks = [(what, width, row.unet.context_dim) for what, width in context.items()]
    if pooled := sum(widths[kind] for kind in CLIPS if kind in widths):
        checks.append(("the pooled text is", pooled, getattr(row.unet, "vector_dim", None)))
    for what, width, wanted in checks:
        if width != wanted:
            raise ValueError(
                f"is {row.title}, but {what} {width} wide, expected {wanted}: use another `text_encoder=FILE`"
            )
    return replace(row, vae=vae, text_encoders=tuple(texts.values()), **scale_of(vae))


def _instead(row: FamilyRow, kinds: Iterable[str] = ()) -> str:
    """Return the files that supply text encoders, or else the autoencoder; '' if the released ones do not fit."""
    widths = {type(spec).__name__: getattr(spec, "output_width", spec.width) for spec in row.text_encoders}
    kinds = list(kinds)
    fits = all(width == row.unet.context_dim for kind, width in widths.items() if kind not in CLIPS)
    if not fits or (not kinds and row.vae_file == "FILE"):
        return ""
    files = dict(zip((type(spec).__name__ for spec in row.text_encoders), row.text_files, strict=True))
    return _released([f"`text_encoder={files[kind]}`" for kind in kinds] or [f"`vae={row.vae_file}`"])


def suppliers(row: FamilyRow, roles: Iterable[str]) -> str:
    """Return the files that supply networks of a UNet's row; '' for one of which nobody has such files.

    All text encoders are named if one of them is missing: they are given in order.
    """
    files = [f"`vae={row.vae_file}`"] * ("vae" in roles)
    if any(role.startswith("text_encoder") for role in roles):
        files += [f"`text_encoder={file}`" for file in row.text_files or ("FILE",)]
    return "" if any("=FILE" in file for file in files) else _released(files)


def _released(files: Sequence[str]) -> str:
    return f": {' and '.join(files)} fit" if len(files) > 1 else f": {files[0]} fits"


def _titles(kinds: Iterable[str]) -> str:
    return " and ".join(TITLES[kind] for kind in kinds)
