"""Textual inversion: learned vectors that a name in the prompt stands for.

Gal et al. 2022.  Files are those of the original and of AUTOMATIC1111 (`string_to_param`), kohya's (`emb_params`, and
for SDXL `clip_l` and `clip_g`) and diffusers' (one tensor by the name of its token).
Shape letters: n vectors of a name, D width of a text encoder.
"""

import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
from torch import Tensor

from ldm_lite.checkpoint import hub
from ldm_lite.checkpoint.model import Model
from ldm_lite.checkpoint.reader import open_checkpoint
from ldm_lite.checkpoint.unpickle import INVERSION
from ldm_lite.models.clip import CLIPTextEncoder
from ldm_lite.models.open_clip import OpenCLIPTextEncoder

log = logging.getLogger("ldm_lite")

M = TypeVar("M", bound=Model)


@dataclass(frozen=True, eq=False)
class Embedding:
    """The vectors of one file, and its names in a prompt."""

    file: str
    names: tuple[str, ...]  # the file's without its extension, and the one stored in it
    vectors: Mapping[int, Tensor]  # width D -> vectors (n,D), with the same n for all widths


def open_embedding(source: str | os.PathLike[str]) -> Embedding:
    """Open a textual inversion file: a path, or owner/repository/file on the hub.

    Raises FileNotFoundError or ValueError, one line, for any other file.
    """
    file = open_checkpoint(hub.resolve(source))
    several = file.shapes.keys() <= {"clip_l", "clip_g"}
    if not several and (len(file.shapes) > 1 or any(len(shape) not in (1, 2) for shape in file.shapes.values())):
        some = next(iter(file.shapes))
        raise ValueError(
            f"{file.path}: holds {len(file.shapes)} tensors (has {some}), which are not a textual inversion: "
            "wanted string_to_param, emb_params, clip_l and clip_g, or one tensor by the name of its token"
        )
    found = {key: file.read(key).detach().float().reshape(-1, shape[-1]) for key, shape in list(file.shapes.items())}
    if len({len(vectors) for vectors in found.values()}) > 1:
        raise ValueError(f"{file.path}: clip_l and clip_g differ in their number of vectors: the file is damaged")
    stored = next(iter(found)).removeprefix(f"{INVERSION}.")
    own = () if stored in ("emb_params", "clip_l", "clip_g", "*", "") else (stored,)
    names = tuple({name.lower(): name for name in (file.path.stem, *own)}.values())
    return Embedding(file.path.name, names, {vectors.shape[1]: vectors for vectors in found.values()})


def with_embeddings(model: M, sources: Sequence[str | os.PathLike[str]]) -> M:
    """Return the model with textual inversion files loaded, sharing its networks; prompts use them by name.

    The log lists each name with its number of vectors.  Raises ValueError, one line, for vectors of another width
    than the text encoders', and for two files of one name.
    """
    if not sources:
        return model
    encoders = [net for net in (model.text_encoder, model.text_encoder_2) if net is not None]
    specs = [net.spec for net in encoders if isinstance(net, CLIPTextEncoder | OpenCLIPTextEncoder)]
    if model.tokenizer is None or not specs:
        raise ValueError(
            f"{model.family.title} reads no text with CLIP, which embeddings are made for: leave out `embedding`"
        )
    widths, added, learned = [spec.width for spec in specs], dict(model.tokenizer.added), dict(model.learned)
    first = max(spec.vocab_size for spec in specs) + len(next(iter(learned.values()), ()))
    for embedding in map(open_embedding, sources):
        count = _check(embedding, widths, model.tokenizer.room)
        for name in embedding.names:
            if name.lower() in map(str.lower, added):
                raise ValueError(f"{embedding.file}: another embedding has the name {name!r}: rename the file")
            added[name] = tuple(range(first, first + count))
        for width in widths:
            learned[width] = torch.cat([*([learned[width]] if width in learned else []), embedding.vectors[width]])
        first += count
        names = " or ".join(map(repr, embedding.names))
        log.info("%s: in a prompt, %s stands for %d vector%s", embedding.file, names, count, "s" * (count > 1))
    return replace(model, tokenizer=replace(model.tokenizer, added=tuple(added.items())), learned=learned)


def _check(embedding: Embedding, widths: Sequence[int], room: int) -> int:
    """Return the number of an embedding's vectors.  Raises ValueError if they do not have these widths."""
    count = len(next(iter(embedding.vectors.values())))
    if missing := [width for width in widths if width not in embedding.vectors]:
        got = " and ".join(map(str, embedding.vectors))
        wanted = " and ".join(map(str, missing))
        raise ValueError(
            f"{embedding.file}: is for another model: its vectors are {got} wide, wanted {wanted} for its text encoder"
        )
    if not 1 <= count <= room:
        raise ValueError(f"{embedding.file}: holds {count} vectors, wanted 1 to {room}, which fit into a prompt")
    if unread := [width for width in embedding.vectors if width not in widths]:
        log.warning("%s: this model does not use its vectors of width %d", embedding.file, unread[0])
    return count
