"""Training data: a folder of captioned images, or a Python file that draws them.

A dataset is a sequence of (pixels (3,R,R) uint8, caption), of finite or infinite length.  The examples of a step depend
only on the seed and the step, so a run can be resumed at any step.
"""

import contextlib
import importlib.util
import json
import logging
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils import data as torch_data

from ldm_lite.cli.files import open_file, read_text
from ldm_lite.cli.signals import ignore_signals
from ldm_lite.image import SUFFIXES, list_images, open_image
from ldm_lite.models.vae_kl import AutoencoderKL
from ldm_lite.text.tokenizer import MOST_CHARACTERS

log = logging.getLogger("ldm_lite")

T = TypeVar("T")


class Dataset(Protocol):
    """Captioned images of one size."""

    @property
    def size(self) -> int | None:
        """Number of examples; None: infinitely many."""

    def example(self, index: int) -> tuple[Tensor, str]:
        """Return pixels (3,R,R) uint8 and the caption."""


@dataclass(frozen=True)
class ImageFolder:
    """Images and their captions.  Each image is cropped to the square in its middle."""

    items: tuple[tuple[Path, str], ...]
    resolution: int

    @property
    def size(self) -> int:
        """Number of images."""
        return len(self.items)

    def example(self, index: int) -> tuple[Tensor, str]:
        """Return pixels (3,R,R) uint8 and the caption.  Raises ValueError, one line, for a broken image; OSError."""
        path, caption = self.items[index]
        image = open_image(path)
        side = min(image.size)
        left, top = (image.width - side) // 2, (image.height - side) // 2
        square = image.resize(
            (self.resolution, self.resolution), Image.Resampling.LANCZOS, (left, top, left + side, top + side)
        )
        return _to_tensor(square), caption


def open_folder(folder: Path, resolution: int) -> ImageFolder:
    """Open images with a .txt of the same name beside each, or a .jsonl with {"file_name": ..., "text": ...} lines.

    Raises ValueError, one line, if this is not a folder, has no images, or a caption is missing, empty or
    too long.
    """
    if not folder.is_dir():
        raise ValueError(f"{folder}: is not a folder, wanted one with captioned images")
    lists = sorted(folder.glob("*.jsonl"))
    pairs = _from_list(lists[0]) if lists else _from_text_files(folder)
    if not pairs:
        raise ValueError(f"{folder}: holds no images ({', '.join(SUFFIXES)})")
    for path, caption in pairs:
        if not caption:
            raise ValueError(f"{path}: its caption is empty: write one, or remove the image")
        if len(caption) > MOST_CHARACTERS:
            raise ValueError(f"{path}: its caption has {len(caption):,} characters, wanted at most {MOST_CHARACTERS:,}")
    return ImageFolder(tuple(pairs), resolution)


def _from_text_files(folder: Path) -> list[tuple[Path, str]]:
    folders = [folder, *(path for path in folder.rglob("*") if path.is_dir())]
    paths = sorted(path for each in folders for path in list_images(each))
    without = [path for path in paths if not path.with_suffix(".txt").is_file()]
    if without:
        raise ValueError(
            f"{without[0]}: has no caption: wanted {without[0].stem}.txt beside it ({len(without)} images have none)"
        )
    return [(path, read_text(path.with_suffix(".txt"), 2**20).strip()) for path in paths]


def _from_list(path: Path) -> list[tuple[Path, str]]:
    pairs = []
    for number, line in enumerate(read_text(path, 2**30).split("\n"), start=1):
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
            raise ValueError(f"{path}, line {number}: there is no file {name}")
        pairs.append((image, caption.strip()))
    return pairs


@dataclass(frozen=True)
class RenderedScenes:
    """Scenes that a Python file draws: its scenes(resolution, ...) returns a function index -> (PIL image, caption)."""

    draw: Callable[[int], tuple[Image.Image, str]]
    size: int | None = None

    def example(self, index: int) -> tuple[Tensor, str]:
        """Return pixels (3,R,R) uint8 and the caption.  Raises ValueError, one line, if the file cannot draw it."""
        try:
            image, caption = self.draw(index)
            return _to_tensor(image), caption
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


@dataclass(frozen=True)
class LatentDataset:
    """Examples of another dataset, encoded once: the mean and log variance of their latents, (2C,h,w) float16."""

    moments: Tensor  # (N,2C,h,w)
    captions: tuple[str, ...]

    @property
    def size(self) -> int:
        """Number of examples."""
        return len(self.captions)

    def example(self, index: int) -> tuple[Tensor, str]:
        """Return moments (2C,h,w) and the caption."""
        return self.moments[index], self.captions[index]

    def write(self, path: Path, key: str) -> None:
        """Write a file.  The key identifies the images and the autoencoder."""
        content = {"key": key, "moments": self.moments, "captions": list(self.captions)}
        write_atomically(path, lambda part: torch.save(content, part))

    @classmethod
    def read(cls, path: Path, key: str) -> "LatentDataset | None":
        """Read a file; None if there is none, if it has another key, or, with a message, if it is damaged."""
        if not path.exists():
            return None
        with open_file(path) as file:
            try:
                content = torch.load(file, weights_only=True)
                if content["key"] != key:
                    return None
                moments, captions = content["moments"], tuple(content["captions"])
                if len(moments) != len(captions) or moments.ndim != 4 or not bool(torch.isfinite(moments).all()):
                    raise ValueError
            except Exception:  # torch raises nearly anything for a damaged file
                log.warning("%s: is damaged: the images are encoded again", path)
                return None
        return cls(moments, captions)


@torch.no_grad()
def encode_dataset(dataset: Dataset, vae: AutoencoderKL, batch: int, workers: int) -> LatentDataset:
    """Encode every example of a finite dataset.  Raises what `example` raises."""
    device, parts, captions = next(vae.parameters()).device, [], []
    loader = torch_data.DataLoader(
        _Examples(dataset), batch_size=batch, num_workers=workers, collate_fn=list, worker_init_fn=ignore_signals
    )
    with reported_workers():
        for items in loader:
            pairs = list(_reraised(items))
            pixels = torch.stack([pixels for pixels, _ in pairs])
            parts.append(torch.cat(vae.encode(to_float(pixels, device)), dim=1).half().cpu())
            captions += [caption for _, caption in pairs]
    return LatentDataset(torch.cat(parts), tuple(captions))


# ---- batches --------------------------------------------------------------------------------------------------------


def example_indices(dataset: Dataset, seed: int, first: int, count: int) -> list[int]:
    """Return the dataset indices of a run's examples first, ..., first + count - 1: shuffled epochs, or new scenes."""
    if dataset.size is None:
        return [seed * 2**32 + i for i in range(first, first + count)]
    epochs: dict[int, list[int]] = {}
    indices = []
    for i in range(first, first + count):
        epoch, position = divmod(i, dataset.size)
        if epoch not in epochs:
            epochs[epoch] = np.random.default_rng([seed, epoch]).permutation(dataset.size).tolist()
        indices.append(epochs[epoch][position])
    return indices


def batches(dataset: Dataset, seed: int, batch: int, steps: range, workers: int) -> Iterator[tuple[Tensor, list[str]]]:
    """Yield (pixels (B,3,R,R) uint8, captions) of these steps, prefetched by worker processes."""
    loader = torch_data.DataLoader(
        _Batches(dataset, seed, batch, steps.stop),
        batch_size=None,
        sampler=steps,
        num_workers=workers,
        prefetch_factor=8 if workers else None,
        worker_init_fn=ignore_signals,
    )
    return _reraised(loader)


class _Examples(torch_data.Dataset["tuple[Tensor, str] | Exception"]):
    """The examples of a finite dataset, for torch's DataLoader."""

    def __init__(self, dataset: Dataset) -> None:
        assert dataset.size is not None
        self.dataset, self.size = dataset, dataset.size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> tuple[Tensor, str] | Exception:
        return _caught(lambda: self.dataset.example(index))


class _Batches(torch_data.Dataset["tuple[Tensor, list[str]] | Exception"]):
    """Batch k is the batch of step k, for torch's DataLoader."""

    def __init__(self, dataset: Dataset, seed: int, batch: int, steps: int) -> None:
        self.dataset, self.seed, self.batch, self.steps = dataset, seed, batch, steps

    def __len__(self) -> int:
        return self.steps

    def __getitem__(self, step: int) -> tuple[Tensor, list[str]] | Exception:
        if step >= self.steps:
            raise IndexError(step)
        return _caught(lambda: self._batch(step))

    def _batch(self, step: int) -> tuple[Tensor, list[str]]:
        indices = example_indices(self.dataset, self.seed, step * self.batch, self.batch)
        examples = [self.dataset.example(i) for i in indices]
        return torch.stack([pixels for pixels, _ in examples]), [caption for _, caption in examples]


def _caught(make: Callable[[], T]) -> T | Exception:
    """Return the result, or the error of a bad file as a value: a worker would turn it into a traceback."""
    try:
        return make()
    except (ValueError, OSError) as error:
        return error


def _reraised(items: Iterable[T | Exception]) -> Iterator[T]:
    for item in items:
        if isinstance(item, Exception):
            raise item
        yield item


@contextlib.contextmanager
def reported_workers() -> Iterator[None]:
    """Turn torch's error for a worker that died, which comes at any place, into a ChildProcessError of one line."""
    try:
        yield
    except RuntimeError as error:
        if "DataLoader worker" not in str(error):
            raise
        raise ChildProcessError(
            "a process that reads images was ended from outside, usually because memory ran out: use fewer "
            "`workers`, or a smaller `batch`; the state of the last save is kept, `resume=True` continues"
        ) from error


# ---- files and tensors ----------------------------------------------------------------------------------------------


def write_atomically(path: Path, write: Callable[[Path], object]) -> None:
    """Write a temporary file and rename it to `path`; an earlier file stays as it is if writing fails."""
    temporary = path.with_name(f".{path.name}.part")
    try:
        write(temporary)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def to_float(pixels: Tensor, device: torch.device) -> Tensor:
    """Convert pixels uint8 [0,255] to float32 [-1,1] on the device."""
    return pixels.to(device, non_blocking=True).float() / 127.5 - 1


def _to_tensor(image: Image.Image) -> Tensor:
    return torch.from_numpy(np.array(image.convert("RGB"))).permute(2, 0, 1)
