"""Training data in WebDataset shards: tar files of images and their captions."""

import functools
import io
import json
import os
import tarfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from ldm_lite.cli.files import open_file
from ldm_lite.image import MOST_BYTES, SUFFIXES, decode_image, to_rgb
from ldm_lite.train.examples import Example, caption_in, check_caption, crop, sizes_of, to_tensor

OPEN_SHARDS = 64  # whose lists of files are in memory: more than batches.MIXED


@dataclass(frozen=True)
class TarShards:
    """WebDataset shards: images in .tar files, each with its caption in a .txt or .json file of the same name.

    Only the shards in use have their lists of files in memory.
    """

    tars: tuple[tuple[Path, tuple[int, int]], ...]  # with their size and the time of their last change, in ns
    shards: tuple[int, ...]
    resolution: int

    @functools.cached_property
    def _ends(self) -> NDArray[np.int64]:
        return np.cumsum(self.shards)

    def example(self, index: int) -> Example:
        """Return pixels (3,R,R) uint8 and the caption.  Raises ValueError, one line, for a broken image; OSError."""
        shard = int(np.searchsorted(self._ends, index, side="right"))
        path, state = self.tars[shard]
        name, image, text, is_json = _members(path, state)[index - int(self._ends[shard])]
        where = f"{path}, {name}"
        with open_file(path) as file:
            caption = _read(file, text, where).decode("utf-8-sig", errors="replace")
            pixels = decode_image(io.BytesIO(_read(file, image, where)), where, to_rgb)
        if is_json:
            try:
                caption = caption_in(json.loads(caption), where)
            except (json.JSONDecodeError, RecursionError) as error:
                raise ValueError(f"{where}: its .json cannot be read ({error})") from error
        check_caption(caption.strip(), where)
        size = (self.resolution, self.resolution)
        cut, corner = crop(pixels, size)
        return Example(to_tensor(cut), caption.strip(), sizes=sizes_of(pixels, corner, size))


def open_tars(paths: Sequence[Path], resolution: int) -> TarShards:
    """Open WebDataset shards.  Raises ValueError, one line, if one cannot be read, or a caption is missing."""
    stats = [path.stat() for path in paths]
    tars = tuple((path, (stat.st_size, stat.st_mtime_ns)) for path, stat in zip(paths, stats, strict=True))
    counts = tuple(len(_members(*tar)) for tar in tars)
    if not sum(counts):
        raise ValueError(f"{paths[0]}: holds no images ({', '.join(SUFFIXES)})")
    return TarShards(tars, counts, resolution)


_Place = tuple[int, int]  # offset and size of a file in a tar


@functools.lru_cache(maxsize=OPEN_SHARDS)
def _members(path: Path, state: tuple[int, int]) -> list[tuple[str, _Place, _Place, bool]]:
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
