"""What to train on: a folder of captioned images, or a Python file that draws them.

A source is a sequence of (pixels (3,R,R) uint8, caption); a drawn one may have no end.  Which of its examples a step
sees depends on the seed and the step alone, so that a run can be taken up again at any step.
"""

import importlib.util
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from ldm_lite.models.vae_kl import AutoencoderKL

IMAGES = (".png", ".jpg", ".jpeg", ".webp", ".bmp")


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
        """-> pixels (3,R,R) uint8, caption.  Raises ValueError, one line, for a file that is no image."""
        path, caption = self.items[index]
        try:
            with Image.open(path) as image:
                side = min(image.size)
                left, top = (image.width - side) // 2, (image.height - side) // 2
                square = image.convert("RGB").resize(
                    (self.resolution, self.resolution), Image.Resampling.LANCZOS, (left, top, left + side, top + side)
                )
        except OSError as error:
            raise ValueError(f"{path}: cannot be read as an image ({error})") from error
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
        raise ValueError(f"{folder}: holds no images ({', '.join(IMAGES)})")
    for path, caption in pairs:
        if not caption:
            raise ValueError(f"{path}: its caption is empty: write one, or remove the image")
    return Folder(tuple(pairs), resolution)


def _beside(folder: Path) -> list[tuple[Path, str]]:
    paths = sorted(path for path in folder.rglob("*") if path.suffix.lower() in IMAGES)
    without = [path for path in paths if not path.with_suffix(".txt").is_file()]
    if without:
        raise ValueError(
            f"{without[0]}: has no caption: wanted {without[0].stem}.txt beside it ({len(without)} lack one)"
        )
    return [(path, path.with_suffix(".txt").read_text(encoding="utf-8").strip()) for path in paths]


def _listed(path: Path) -> list[tuple[Path, str]]:
    pairs = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            image, caption = path.parent / row["file_name"], str(row["text"]).strip()
        except (json.JSONDecodeError, KeyError, TypeError) as error:
            raise ValueError(f'{path}, line {number}: wanted {{"file_name": ..., "text": ...}}') from error
        if not image.is_file():
            raise ValueError(f"{path}, line {number}: {image.name} is not there")
        pairs.append((image, caption))
    return pairs


@dataclass(frozen=True)
class Drawn:
    """Scenes that a Python file draws: its scenes(resolution, ...) gives a function index -> (PIL image, caption)."""

    draw: Callable[[int], tuple[Image.Image, str]]
    size: int | None = None

    def example(self, index: int) -> tuple[Tensor, str]:
        """-> pixels (3,R,R) uint8, caption."""
        image, caption = self.draw(index)
        return _tensor(image), caption


def open_renderer(path: Path, resolution: int, arguments: dict[str, Any]) -> Drawn:
    """Import a Python file and ask its scenes().  Raises ValueError if there is no file or no such function in it."""
    spec = importlib.util.spec_from_file_location(path.stem, path) if path.is_file() else None
    if spec is None or spec.loader is None:
        raise ValueError(f"{path}: is no Python file, wanted one with a function scenes(resolution, ...)")
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module  # so that worker processes can unpickle what it makes
    spec.loader.exec_module(module)
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
    for pairs in loader:
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


class _All(Dataset[tuple[Tensor, str]]):
    def __init__(self, source: "Folder | Drawn") -> None:
        self.source = source

    def __len__(self) -> int:
        return self.source.size or 0

    def __getitem__(self, index: int) -> tuple[Tensor, str]:
        return self.source.example(index)


class _Steps(Dataset[tuple[Tensor, list[str]]]):
    """Batch k is what step k of the run sees."""

    def __init__(self, source: Source, seed: int, batch: int, steps: int) -> None:
        self.source, self.seed, self.batch, self.steps = source, seed, batch, steps

    def __len__(self) -> int:
        return self.steps

    def __getitem__(self, step: int) -> tuple[Tensor, list[str]]:
        if step >= self.steps:
            raise IndexError(step)
        examples = [self.source.example(i) for i in order(self.source, self.seed, step * self.batch, self.batch)]
        return torch.stack([pixels for pixels, _ in examples]), [caption for _, caption in examples]


def batches(source: Source, seed: int, batch: int, steps: range, workers: int) -> Iterator[tuple[Tensor, list[str]]]:
    """(pixels (B,3,R,R) uint8, captions) of these steps, drawn ahead by worker processes."""
    dataset = _Steps(source, seed, batch, steps.stop)
    loader = DataLoader(
        dataset, batch_size=None, sampler=steps, num_workers=workers, prefetch_factor=8 if workers else None
    )
    return iter(loader)


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
