"""What to train on: a folder of captioned images, or a Python file that draws them.

A source is a sequence of (pixels (3,R,R) uint8, caption); a drawn one may have no end.  Which of its examples a step
sees depends on the seed and the step alone, so that a run can be taken up again at any step.
"""

import importlib.util
import json
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from ldm_lite.image import SUFFIXES, list_images, open_image
from ldm_lite.models.vae_kl import AutoencoderKL

T = TypeVar("T")


class Source(Protocol):
    """Captioned images of one size."""

    @property
    def size(self) -> int | None:
        """Number of examples; None = as many as asked for."""

    def example(self, index: int) -> tuple[Tensor, str]:
        """-> pixels (3,R,R) uint8, caption."""


@dataclass(frozen=True)
class Folder:
    """Images of a folder with their captions, cropped to squares around the middle."""

    items: tuple[tuple[Path, str], ...]
    resolution: int

    @property
    def size(self) -> int:
        """Number of images."""
        return len(self.items)

    def example(self, index: int) -> tuple[Tensor, str]:
        """-> pixels (3,R,R) uint8, caption.  Raises ValueError, one line, for a file that is no image; OSError."""
        path, caption = self.items[index]
        image = open_image(path)
        side = min(image.size)
        left, top = (image.width - side) // 2, (image.height - side) // 2
        square = image.resize(
            (self.resolution, self.resolution), Image.Resampling.LANCZOS, (left, top, left + side, top + side)
        )
        return _tensor(square), caption


def open_folder(folder: Path, resolution: int) -> Folder:
    """Images with a .txt of the same name beside each, or named in a .jsonl ({"file_name": ..., "text": ...} a line).

    Raises ValueError, one line, if the folder is none, holds no images, or a caption is missing or empty.
    """
    if not folder.is_dir():
        raise ValueError(f"{folder}: is no folder, wanted one with captioned images")
    lists = sorted(folder.glob("*.jsonl"))
    pairs = _listed(lists[0]) if lists else _beside(folder)
    if not pairs:
        raise ValueError(f"{folder}: holds no images ({', '.join(SUFFIXES)})")
    for path, caption in pairs:
        if not caption:
            raise ValueError(f"{path}: its caption is empty: write one, or remove the image")
    return Folder(tuple(pairs), resolution)


def _beside(folder: Path) -> list[tuple[Path, str]]:
    folders = [folder, *(path for path in folder.rglob("*") if path.is_dir())]
    paths = sorted(path for each in folders for path in list_images(each))
    without = [path for path in paths if not path.with_suffix(".txt").is_file()]
    if without:
        raise ValueError(
            f"{without[0]}: has no caption: wanted {without[0].stem}.txt beside it ({len(without)} lack one)"
        )
    return [(path, _text(path.with_suffix(".txt")).strip()) for path in paths]


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: is not UTF-8 text") from error


def _listed(path: Path) -> list[tuple[Path, str]]:
    pairs = []
    for number, line in enumerate(_text(path).split("\n"), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            name, caption = row["file_name"], row["text"]
            if not isinstance(name, str) or not isinstance(caption, str):
                raise TypeError
        except (json.JSONDecodeError, KeyError, TypeError, RecursionError) as error:
            raise ValueError(f'{path}, line {number}: wanted {{"file_name": ..., "text": ...}}') from error
        image = path.parent / name
        if not image.is_file():
            raise ValueError(f"{path}, line {number}: {name} is not there")
        pairs.append((image, caption.strip()))
    return pairs


@dataclass(frozen=True)
class Drawn:
    """Scenes that a Python file draws: its scenes(resolution, ...) gives a function index -> (PIL image, caption)."""

    draw: Callable[[int], tuple[Image.Image, str]]
    size: int | None = None

    def example(self, index: int) -> tuple[Tensor, str]:
        """-> pixels (3,R,R) uint8, caption.  Raises ValueError, one line, if the file cannot draw it."""
        try:
            image, caption = self.draw(index)
            return _tensor(image), caption
        except Exception as error:  # whatever is wrong in a user's own code
            raise ValueError(f"the renderer fails at scene {index}: {type(error).__name__}: {error}") from error


def open_renderer(path: Path, resolution: int, arguments: dict[str, Any]) -> Drawn:
    """Import a Python file and ask its scenes().  Raises ValueError if there is no file or no such function in it."""
    spec = importlib.util.spec_from_file_location(path.stem, path) if path.is_file() else None
    if spec is None or spec.loader is None:
        raise ValueError(f"{path}: is no Python file, wanted one with a function scenes(resolution, ...)")
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module  # so that worker processes can unpickle what it makes
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise ValueError(f"{path}: cannot be imported: {type(error).__name__}: {error}") from error
    if not hasattr(module, "scenes"):
        raise ValueError(f"{path}: has no function scenes(resolution, ...)")
    try:
        return Drawn(module.scenes(resolution, **arguments))
    except TypeError as error:
        raise ValueError(f"{path}: scenes() does not take these options: {error}") from error


@dataclass(frozen=True)
class Encoded:
    """Another source's examples as the autoencoder's mean and log variance, encoded once: (2C,h,w) float16."""

    moments: Tensor  # (N,2C,h,w)
    captions: tuple[str, ...]

    @property
    def size(self) -> int:
        """Number of examples."""
        return len(self.captions)

    def example(self, index: int) -> tuple[Tensor, str]:
        """-> moments (2C,h,w), caption."""
        return self.moments[index], self.captions[index]

    def write(self, path: Path, key: str) -> None:
        """Keep them in a file under a key that says of what they are."""
        kept = {"key": key, "moments": self.moments, "captions": list(self.captions)}
        write_whole(path, lambda part: torch.save(kept, part))

    @classmethod
    def read(cls, path: Path, key: str) -> "Encoded | None":
        """What was kept in a file under this key; None if it holds another's, or is not there."""
        if not path.exists():
            return None
        kept = torch.load(path, weights_only=True)
        return cls(kept["moments"], tuple(kept["captions"])) if kept["key"] == key else None


@torch.no_grad()
def encode(source: "Folder | Drawn", vae: AutoencoderKL, batch: int, workers: int) -> Encoded:
    """Every example of a source that ends, through the encoder."""
    assert source.size is not None
    device, parts, captions = next(vae.parameters()).device, [], []
    loader = DataLoader(_All(source), batch_size=batch, num_workers=workers, collate_fn=list)
    for items in loader:
        pairs = list(_raised(items))
        pixels = torch.stack([pixels for pixels, _ in pairs])
        parts.append(torch.cat(vae.encode(to_float(pixels, device)), dim=1).half().cpu())
        captions += [caption for _, caption in pairs]
    return Encoded(torch.cat(parts), tuple(captions))


def _tensor(image: Image.Image) -> Tensor:
    return torch.from_numpy(np.array(image.convert("RGB"))).permute(2, 0, 1)


# ---- batches --------------------------------------------------------------------------------------------------------


def order(source: Source, seed: int, first: int, count: int) -> list[int]:
    """Indices of the examples first, ..., first + count - 1 of a run: epochs in shuffled order, or new scenes."""
    if source.size is None:
        return [seed * 2**32 + i for i in range(first, first + count)]
    epochs: dict[int, list[int]] = {}
    indices = []
    for i in range(first, first + count):
        epoch, position = divmod(i, source.size)
        if epoch not in epochs:
            epochs[epoch] = np.random.default_rng([seed, epoch]).permutation(source.size).tolist()
        indices.append(epochs[epoch][position])
    return indices


def _caught(make: Callable[[], T]) -> "T | Exception":
    """What is made, or what is wrong with a file as a value: raised in a worker, it would become a traceback."""
    try:
        return make()
    except (ValueError, OSError) as error:
        return error


def _raised(items: "Iterable[T | Exception]") -> Iterator[T]:
    for item in items:
        if isinstance(item, Exception):
            raise item
        yield item


class _All(Dataset["tuple[Tensor, str] | Exception"]):
    def __init__(self, source: "Folder | Drawn") -> None:
        self.source = source

    def __len__(self) -> int:
        return self.source.size or 0

    def __getitem__(self, index: int) -> "tuple[Tensor, str] | Exception":
        return _caught(lambda: self.source.example(index))


class _Steps(Dataset["tuple[Tensor, list[str]] | Exception"]):
    """Batch k is what step k of the run sees."""

    def __init__(self, source: Source, seed: int, batch: int, steps: int) -> None:
        self.source, self.seed, self.batch, self.steps = source, seed, batch, steps

    def __len__(self) -> int:
        return self.steps

    def __getitem__(self, step: int) -> "tuple[Tensor, list[str]] | Exception":
        if step >= self.steps:
            raise IndexError(step)
        return _caught(lambda: self._batch(step))

    def _batch(self, step: int) -> tuple[Tensor, list[str]]:
        examples = [self.source.example(i) for i in order(self.source, self.seed, step * self.batch, self.batch)]
        return torch.stack([pixels for pixels, _ in examples]), [caption for _, caption in examples]


def batches(source: Source, seed: int, batch: int, steps: range, workers: int) -> Iterator[tuple[Tensor, list[str]]]:
    """(pixels (B,3,R,R) uint8, captions) of these steps, drawn ahead by worker processes."""
    dataset = _Steps(source, seed, batch, steps.stop)
    loader = DataLoader(
        dataset, batch_size=None, sampler=steps, num_workers=workers, prefetch_factor=8 if workers else None
    )
    return _raised(loader)


def write_whole(path: Path, write: Callable[[Path], object]) -> None:
    """Have a file written beside its place and put there at once; what stood there stays if that fails."""
    temporary = path.with_name(f".{path.name}.part")
    try:
        write(temporary)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def to_float(pixels: Tensor, device: torch.device) -> Tensor:
    """Pixels uint8 [0,255] -> float32 in [-1,1] on the device."""
    return pixels.to(device, non_blocking=True).float() / 127.5 - 1
