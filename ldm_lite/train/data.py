"""Training data: a folder of captioned images, tar files of them, or a Python file that draws them.

A dataset is a sequence of (pixels (3,R,R) uint8, caption), of finite or infinite length.
"""

import contextlib
import errno
import functools
import importlib.util
import io
import json
import os
import shutil
import sys
import tarfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from safetensors import SafetensorError
from torch import Tensor

from ldm_lite.cli.files import open_file, read_text
from ldm_lite.image import MOST_BYTES, SUFFIXES, decode_image, list_images, open_image, to_rgb
from ldm_lite.text.tokenizer import MOST_CHARACTERS

CAPTIONS = ("text", "caption", "prompt")  # what others call it in JSON
MOST_CAPTION = 2**20  # bytes
OPEN_SHARDS = 64  # whose lists of files are in memory: more than batches.MIXED


class Example(NamedTuple):
    """A captioned image."""

    pixels: Tensor  # (3,R,R) uint8; or the moments (2C,h,w) of its latents, encoded beforehand
    caption: str
    context: Tensor | None = None  # (T,D): the caption, encoded beforehand


class Dataset(Protocol):
    """Captioned images of one size."""

    @property
    def shards(self) -> Sequence[int] | None:
        """Number of examples in each file, which are best read together; None: infinitely many examples."""

    def example(self, index: int) -> Example:
        """Return an example, of a finite dataset 0 <= index < sum(shards)."""


def open_data(path: Path, resolution: int) -> Dataset:
    """Open captioned images: a folder (see open_folder), or WebDataset shards, a .tar file or a folder of them.

    Raises ValueError, one line, if these are none, or a caption is missing; OSError.
    """
    tars = sorted(path.glob("*.tar")) if path.is_dir() else [path] * (path.suffix == ".tar")
    return open_tars(tars, resolution) if tars else open_folder(path, resolution)


# ---- folders --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ImageFolder:
    """Images and their captions.  Each image is cropped to the square in its middle."""

    items: tuple[tuple[Path, str], ...]
    resolution: int

    @property
    def shards(self) -> tuple[int]:
        """The number of images: all in one shard."""
        return (len(self.items),)

    def example(self, index: int) -> Example:
        """Return pixels (3,R,R) uint8 and the caption.  Raises ValueError, one line, for a broken image; OSError."""
        path, caption = self.items[index]
        return Example(_square(open_image(path), self.resolution), caption)


def open_folder(folder: Path, resolution: int) -> ImageFolder:
    """Open images with a .txt of the same name beside each, or listed in .jsonl files.

    A list is metadata.jsonl, as Hugging Face's image folders have one in every folder of images, or the only other
    .jsonl; its lines are {"file_name": ..., "text": ...}, or the caption is under one of CAPTIONS.  Raises ValueError,
    one line, if this is not a folder, has no images, or a caption is missing, empty or too long.
    """
    if not folder.is_dir():
        raise ValueError(f"{folder}: is not a folder, wanted one with captioned images, or a .tar file")
    lists = sorted(folder.rglob("metadata.jsonl")) or sorted(folder.glob("*.jsonl"))
    if len(lists) > 1 and lists[0].name != "metadata.jsonl":
        raise ValueError(f"{folder}: holds {len(lists)} lists of captions: name the one to use metadata.jsonl")
    pairs = [pair for path in lists for pair in _from_list(path)] if lists else _from_text_files(folder)
    if not pairs:
        raise ValueError(f"{folder}: holds no images ({', '.join(SUFFIXES)}), and no .tar files")
    for path, caption in pairs:
        _check_caption(caption, path)
    return ImageFolder(tuple(pairs), resolution)


def _check_caption(caption: str, path: object) -> None:
    if not caption:
        raise ValueError(f"{path}: its caption is empty: write one, or remove the image")
    if len(caption) > MOST_CHARACTERS:
        raise ValueError(f"{path}: its caption has {len(caption):,} characters, wanted at most {MOST_CHARACTERS:,}")


def _from_text_files(folder: Path) -> list[tuple[Path, str]]:
    folders = [folder, *(path for path in folder.rglob("*") if path.is_dir())]
    paths = sorted(path for each in folders for path in list_images(each))
    without = [path for path in paths if not path.with_suffix(".txt").is_file()]
    if without:
        raise ValueError(
            f"{without[0]}: has no caption: wanted {without[0].stem}.txt beside it ({len(without)} images have none)"
        )
    return [(path, read_text(path.with_suffix(".txt"), MOST_CAPTION).strip()) for path in paths]


def _from_list(path: Path) -> list[tuple[Path, str]]:
    pairs = []
    for number, line in enumerate(read_text(path, 2**30).split("\n"), start=1):
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        try:
            row = json.loads(line)
            name, caption = row["file_name"], _caption(row, where)
            if not isinstance(name, str):
                raise TypeError
        except (json.JSONDecodeError, KeyError, TypeError, RecursionError) as error:
            raise ValueError(f'{where}: wanted {{"file_name": ..., "text": ...}}') from error
        image = path.parent / name
        if not image.is_file():
            raise ValueError(f"{where}: there is no file {name}")
        pairs.append((image, caption))
    return pairs


def _caption(row: object, where: object) -> str:
    """Return the caption in a JSON object.  Raises ValueError if there is none."""
    found = row if isinstance(row, dict) else {}
    for name in CAPTIONS:
        if isinstance(text := found.get(name), str):
            return text.strip()
    raise ValueError(f"{where}: wanted a JSON object with a caption called {' or '.join(CAPTIONS)}")


# ---- WebDataset -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TarShards:
    """WebDataset shards: images in .tar files, each with its caption in a .txt or .json file of the same name.

    Only the shards in use have their lists of files in memory.
    """

    tars: tuple[tuple[Path, int], ...]  # with the time of their last change, in ns
    shards: tuple[int, ...]
    resolution: int

    @functools.cached_property
    def _ends(self) -> NDArray[np.int64]:
        return np.cumsum(self.shards)

    def example(self, index: int) -> Example:
        """Return pixels (3,R,R) uint8 and the caption.  Raises ValueError, one line, for a broken image; OSError."""
        shard = int(np.searchsorted(self._ends, index, side="right"))
        path, changed = self.tars[shard]
        name, image, text, is_json = _members(path, changed)[index - int(self._ends[shard])]
        where = f"{path}, {name}"
        with open_file(path) as file:
            caption = _read(file, text, where).decode("utf-8-sig", errors="replace")
            pixels = decode_image(io.BytesIO(_read(file, image, where)), where, to_rgb)
        if is_json:
            try:
                caption = _caption(json.loads(caption), where)
            except (json.JSONDecodeError, RecursionError) as error:
                raise ValueError(f"{where}: its .json cannot be read ({error})") from error
        _check_caption(caption.strip(), where)
        return Example(_square(pixels, self.resolution), caption.strip())


def open_tars(paths: Sequence[Path], resolution: int) -> TarShards:
    """Open WebDataset shards.  Raises ValueError, one line, if one cannot be read, or a caption is missing."""
    tars = tuple((path, path.stat().st_mtime_ns) for path in paths)
    counts = tuple(len(_members(*tar)) for tar in tars)
    if not sum(counts):
        raise ValueError(f"{paths[0]}: holds no images ({', '.join(SUFFIXES)})")
    return TarShards(tars, counts, resolution)


_Place = tuple[int, int]  # offset and size of a file in a tar


@functools.lru_cache(maxsize=OPEN_SHARDS)
def _members(path: Path, changed: int) -> list[tuple[str, _Place, _Place, bool]]:
    """Return the examples of a tar: name, image, caption, and whether that is JSON."""
    images: dict[str, _Place] = {}
    texts: dict[str, _Place] = {}
    rows: dict[str, _Place] = {}
    try:
        with open_file(path) as file, tarfile.open(fileobj=file, mode="r:") as tar:
            for member in tar:
                tar.members = []  # type: ignore[attr-defined]  # it would keep them all
                folder, name = os.path.split(member.name)
                stem, _, suffix = name.partition(".")
                kind = {"txt": texts, "json": rows}.get(suffix.lower(), images)
                if member.isfile() and stem and (kind is not images or f".{suffix.lower()}" in SUFFIXES):
                    if (key := os.path.join(folder, stem)) in kind:
                        raise ValueError(f"{path}, {member.name}: is the second file of {key} of its kind")
                    kind[key] = (member.offset_data, member.size)
    except (tarfile.TarError, EOFError) as error:
        raise ValueError(f"{path}: is not an uncompressed tar file, or damaged ({error})") from error
    without = [key for key in images if key not in texts and key not in rows]
    if without:
        raise ValueError(
            f"{path}, {without[0]}: has no caption: wanted a .txt or .json of its name ({len(without)} have none)"
        )
    return [(key, place, texts.get(key) or rows[key], key not in texts) for key, place in images.items()]


def _read(file: BinaryIO, place: _Place, where: str) -> bytes:
    offset, size = place
    if size > MOST_BYTES:
        raise ValueError(f"{where}: is too large, wanted at most {MOST_BYTES / 2**20:,.0f} MiB")
    file.seek(offset)
    if len(content := file.read(size)) < size:
        raise ValueError(f"{where}: ends too early")
    return content


# ---- renderers ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RenderedScenes:
    """Scenes that a Python file draws: its scenes(resolution, ...) returns a function index -> (PIL image, caption)."""

    draw: Callable[[int], tuple[Image.Image, str]]
    size: int | None = None  # of them; None: a new one each time

    @property
    def shards(self) -> tuple[int] | None:
        """Number of scenes."""
        return None if self.size is None else (self.size,)

    def example(self, index: int) -> Example:
        """Return pixels (3,R,R) uint8 and the caption.  Raises ValueError, one line, if the file cannot draw it."""
        try:
            image, caption = self.draw(index)
            return Example(_to_tensor(image), caption)
        except Exception as error:  # the user's code may raise anything
            raise ValueError(f"the renderer fails at scene {index}: {type(error).__name__}: {error}") from error


def open_renderer(path: Path, resolution: int, arguments: dict[str, Any], size: int | None = None) -> RenderedScenes:
    """Import a Python file and call its scenes().  Raises ValueError if there is no such file or function."""
    spec = importlib.util.spec_from_file_location(path.stem, path) if path.is_file() else None
    if spec is None or spec.loader is None:
        raise ValueError(f"{path}: is not a Python file, wanted one with a function scenes(resolution, ...)")
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module  # so that worker processes can unpickle its objects
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise ValueError(f"{path}: cannot be imported: {type(error).__name__}: {error}") from error
    if not hasattr(module, "scenes"):
        raise ValueError(f"{path}: has no function scenes(resolution, ...)")
    try:
        return RenderedScenes(module.scenes(resolution, **arguments), size)
    except TypeError as error:
        raise ValueError(f"{path}: scenes() does not take these options: {error}") from error


# ---- files and tensors ----------------------------------------------------------------------------------------------


def write_atomically(path: Path, write: Callable[[Path], object]) -> None:
    """Write a temporary file and rename it to `path`; an earlier file stays as it is if writing fails.

    Raises OSError, also for the errors of torch and safetensors when a disk is full.
    """
    temporary = path.with_name(f".{path.name}.part")
    try:
        try:
            write(temporary)
            with open(temporary, "rb+") as file:
                os.fsync(file.fileno())  # a machine that loses power must not keep the name without the content
        except (RuntimeError, SafetensorError) as error:
            full = shutil.disk_usage(path.parent).free < 2**20  # they do not tell
            why = os.strerror(errno.ENOSPC) if full else f"cannot be written ({str(error).splitlines()[0]:.200})"
            raise OSError(errno.ENOSPC if full else errno.EIO, why, os.fspath(path)) from error
        temporary.replace(path)
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)


def to_float(pixels: Tensor, device: torch.device) -> Tensor:
    """Convert pixels uint8 [0,255] to float32 [-1,1] on the device."""
    return pixels.to(device, non_blocking=True).float() / 127.5 - 1


def _square(image: Image.Image, side: int) -> Tensor:
    """Crop an image to the square in its middle and resize it.  Return pixels (3,side,side) uint8."""
    least = min(image.size)
    left, top = (image.width - least) // 2, (image.height - least) // 2
    return _to_tensor(image.resize((side, side), Image.Resampling.LANCZOS, (left, top, left + least, top + least)))


def _to_tensor(image: Image.Image) -> Tensor:
    return torch.from_numpy(np.array(image.convert("RGB"))).permute(2, 0, 1)
