"""Textual inversion: learned vectors, used in prompts by a name.

Gal et al. 2022.  Files are those of the original and of AUTOMATIC1111 (`string_to_param`), kohya's (`emb_params`, and
for SDXL `clip_l` and `clip_g`) and diffusers' (one tensor by the name of its token), and LoRAs that bundle them.
The name is the file's, without its extension, or the user's: NAME=FILE.  As in AUTOMATIC1111, the name stored in a file
does not count: nobody sees it, and many files have the same.  Bundled vectors have no other name.
Shape letters: n vectors of a name, D width of a text encoder.
"""

import logging
import os
import re
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from ldm_lite.adapters.positional import named
from ldm_lite.checkpoint import hub
from ldm_lite.checkpoint.model import CheckpointModel
from ldm_lite.checkpoint.reader import open_checkpoint
from ldm_lite.core.files import Tensors
from ldm_lite.models.clip import CLIPTextModel, num_known
from ldm_lite.models.open_clip import OpenCLIPTextEncoder

log = logging.getLogger("ldm_lite")

INVERSION = "string_to_param"  # key of the vectors in files of the original
UNNAMED = ("emb_params", "clip_l", "clip_g", "*", "")  # keys that are not names of tokens
BUNDLED = re.compile(rf"^bundle_emb\.(.+?)\.(emb_params|clip_[lg]|{INVERSION}\..*)$", re.DOTALL)
PICTURES = (".png", ".webp", ".jxl", ".avif")

CLIP = (CLIPTextModel, OpenCLIPTextEncoder)  # the text encoders that embeddings are made for
M = TypeVar("M", bound=CheckpointModel)


@dataclass(frozen=True, eq=False)
class Embedding:
    """The vectors of one file, and its name in a prompt."""

    file: str
    name: str
    vectors: Mapping[int, Tensor]  # width D -> vectors (n,D), with the same n for all widths
    stored: str | None = None  # the name in the file, if it is another


def open_embeddings(source: str | os.PathLike[str]) -> list[Embedding]:
    """Open a textual inversion, or all in a LoRA: a path, or owner/repository/file on the hub, or NAME=FILE of these.

    Raises FileNotFoundError or ValueError, one line, for any other file.
    """
    text = os.fspath(source)
    name, equals, text = text.partition("=") if "=" in text and not Path(text).exists() else ("", "", text)
    path = hub.resolve(text)
    if path.suffix.lower() in PICTURES:
        raise ValueError(f"{path}: is a picture: an embedding inside one is not read: use its .pt or .safetensors")
    if path.is_dir():
        raise ValueError(f"{path}: is a folder, expected a textual inversion: name its files, one by one")
    file = named(open_checkpoint(path))
    if embeddings := bundled_embeddings(file):
        if equals and len(embeddings) > 1:
            names = ", ".join(embedding.name for embedding in embeddings)
            count = len(embeddings)
            raise ValueError(f"{path}: holds {count} textual inversions ({names}), expected one for NAME=FILE")
        return [replace(embedding, name=_name(name)) if equals else embedding for embedding in embeddings]
    several = file.shapes.keys() <= {"clip_l", "clip_g"}
    if not several and len(file.shapes) > 1:
        some = next(iter(file.shapes))
        raise ValueError(
            f"{path}: holds {len(file.shapes)} tensors (has {some}), which are not a textual inversion: expected "
            "string_to_param, emb_params, clip_l and clip_g, or one tensor by the name of its token"
        )
    vectors, stored = _vectors(file, list(file.shapes)), next(iter(file.shapes)).removeprefix(f"{INVERSION}.")
    name = _name(name if equals else path.stem)
    differs = stored not in UNNAMED and stored.lower() != name.lower()
    return [Embedding(path.name, name, vectors, stored if differs else None)]


def bundled_embeddings(file: Tensors) -> list[Embedding]:
    """Return the textual inversions in a LoRA file.  Raises ValueError for a kind that is not known."""
    keys: dict[str, list[str]] = {}
    for key in file.shapes:
        if match := BUNDLED.match(key):
            keys.setdefault(match[1], []).append(key)
        elif key.startswith("bundle_emb."):
            raise ValueError(f"{file.path}: holds {key}, expected emb_params, string_to_param, clip_l or clip_g in it")
    return [Embedding(file.path.name, _name(name), _vectors(file, its_keys)) for name, its_keys in keys.items()]


def _name(text: str) -> str:
    """Return a name in the form that prompts use, composed (NFC).  Raises ValueError if it is empty."""
    if not text.strip():
        raise ValueError(f"got {text!r} as the name of an embedding, expected one that a prompt can hold: NAME=FILE")
    return unicodedata.normalize("NFC", text.strip())


def _vectors(file: Tensors, keys: Sequence[str]) -> dict[int, Tensor]:
    """Read the tensors of one textual inversion.  Raises ValueError if they are not vectors of numbers."""
    for key in keys:
        if len(file.shapes[key]) not in (1, 2) or 0 in file.shapes[key]:
            size = " x ".join(map(str, file.shapes[key])) or "a single number"
            raise ValueError(f"{file.path}: {key} is {size}, which are not a textual inversion: expected n x D")
    vectors: dict[int, Tensor] = {}
    for key in keys:
        tensor = file.read(key).detach()
        if not tensor.is_floating_point() or not torch.isfinite(tensor.float()).all():
            raise ValueError(f"{file.path}: {key} holds NaN, infinity or no floating point: the file is damaged")
        if tensor.shape[-1] in vectors:
            raise ValueError(f"{file.path}: two of its tensors are {tensor.shape[-1]} wide: the file is damaged")
        vectors[tensor.shape[-1]] = tensor.float().reshape(-1, tensor.shape[-1])
    if len({len(rows) for rows in vectors.values()}) > 1:
        raise ValueError(f"{file.path}: clip_l and clip_g differ in their number of vectors: the file is damaged")
    return vectors


def with_embeddings(model: M, sources: Sequence[str | os.PathLike[str]]) -> M:
    """Return the model with textual inversions loaded, FILE or NAME=FILE; prompts use them by name.

    The networks are shared.  Raises FileNotFoundError, and ValueError for other files, and as learn does.
    """
    return learn(model, [embedding for source in sources for embedding in open_embeddings(source)], "`embedding`")


def learn(model: M, embeddings: Iterable[Embedding], option: str) -> M:
    """Return the model with the names of embeddings in its tokenizer, and their vectors.

    The log lists each name with its number of vectors.  Raises ValueError, one line, for vectors of another width than
    the text encoders', for two embeddings of one name, unless they are equal, and for a model without CLIP.
    """
    specs, tokenizer = [net.spec for net in model.text_encoders if isinstance(net, CLIP)], model.tokenizer
    if tokenizer is None or not specs:
        raise ValueError(
            f"{model.family.title} reads no text with CLIP, which embeddings are made for: leave out {option}"
        )
    widths, added, learned = [spec.width for spec in specs], dict(tokenizer.added), dict(model.learned)
    known = num_known(max(spec.vocab_size for spec in specs))
    for embedding in embeddings:
        count = len(next(iter(embedding.vectors.values())))
        if missing := [width for width in widths if width not in embedding.vectors]:
            got, wanted = (" and ".join(map(str, sizes)) for sizes in (embedding.vectors, missing))
            raise ValueError(
                f"{embedding.file}: is for another model: its vectors are {got} wide, expected {wanted} for its text "
                "encoder"
            )
        if not 1 <= count <= tokenizer.room:
            raise ValueError(
                f"{embedding.file}: holds {count} vectors, expected 1 to {tokenizer.room}, which fit into a prompt"
            )
        if unread := [width for width in embedding.vectors if width not in widths]:
            log.warning("%s: this model does not use its vectors of width %d", embedding.file, unread[0])
        first = known + len(next(iter(learned.values()), ()))
        if same := next((name for name in added if name.lower() == embedding.name.lower()), None):
            ids = torch.tensor(added[same]) - known
            if all(torch.equal(learned[width][ids], embedding.vectors[width]) for width in widths):
                continue
            raise ValueError(
                f"{embedding.file}: another embedding has the name {embedding.name!r}: give one of them another, "
                '`embedding="NAME=FILE"`'
            )
        for width in widths:
            learned[width] = torch.cat([*([learned[width]] if width in learned else []), embedding.vectors[width]])
        added[embedding.name] = tuple(range(first, first + count))
        is_word = len(replace(tokenizer, added=()).encode(embedding.name)) == 1
        word = ", no longer for the word" * is_word
        remark = "" if embedding.stored is None else f"; the name stored in it, {embedding.stored!r}, is not used"
        vectors = f"{count} vector{'s' * (count > 1)}"
        log.info("%s: in a prompt, %r stands for %s%s%s", embedding.file, embedding.name, vectors, word, remark)
    return replace(model, tokenizer=replace(tokenizer, added=tuple(added.items())), learned=learned)
