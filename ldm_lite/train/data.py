"""Training data: a folder of captioned images, tar files of them (tars.py), or a Python file that draws them."""

import importlib.util
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from PIL import ExifTags, Image

from ldm_lite.cli.files import read_text
from ldm_lite.image import SUFFIXES, list_images, open_image, read_image, to_rgb, upright
from ldm_lite.train.examples import (
    Buckets,
    Example,
    bucket_sizes,
    caption_in,
    check_caption,
    crop,
    nearest,
    sizes_of,
    to_tensor,
)
from ldm_lite.train.tars import TarShards, open_tars

MOST_CAPTION = 2**20  # bytes
BESIDE = (".mask", ".hint")  # NAME.mask.png and NAME.hint.png belong to the image NAME


def open_data(path: Path, resolution: int) -> "ImageFolder | TarShards":
    """Open captioned images: a folder (see open_folder), or WebDataset shards, a .tar file or a folder of them.

    Raises ValueError, one line, if these are none, or a caption is missing; OSError.
    """
    tars = sorted(path.glob("*.tar")) if path.is_dir() else [path] * (path.suffix == ".tar")
    return open_tars(tars, resolution) if tars else open_folder(path, resolution)


# ---- folders --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ImageFolder:
    """Images and their captions.  Each image is scaled to cover `size`, and its middle is taken."""

    items: tuple[tuple[Path, str], ...]
    size: tuple[int, int]  # height, width
    masked: bool = False  # with masks: NAME.mask.png, or an image's alpha, or else all of it
    hinted: bool = False  # with NAME.hint.png, the images that a ControlNet reads

    @property
    def shards(self) -> tuple[int]:
        """The number of images: all in one shard."""
        return (len(self.items),)

    def example(self, index: int) -> Example:
        """Return an example.  Raises ValueError, one line, for a broken image; OSError."""
        path, caption = self.items[index]
        image, alpha = read_image(path, _with_alpha)
        cut, corner = crop(image, self.size)
        mask = to_tensor(crop(_mask(path, image.size) or alpha, self.size)[0]) if self.masked else None
        hint = to_tensor(crop(open_image(beside(path, ".hint")), self.size)[0]) if self.hinted else None
        return Example(to_tensor(cut), caption, sizes=sizes_of(image, corner, self.size), mask=mask, hint=hint)


def _with_alpha(image: Image.Image) -> tuple[Image.Image, Image.Image]:
    """Return an image as RGB, and its opacity (mode L)."""
    image = upright(image)
    clear = image.has_transparency_data
    return to_rgb(image), image.convert("RGBA").getchannel("A") if clear else Image.new("L", image.size, 255)


def _mask(path: Path, size: tuple[int, int]) -> Image.Image | None:
    """Return the mask (mode L) beside an image, if there is one.  Raises ValueError for one of another size."""
    where = beside(path, ".mask")
    if not where.is_file():
        return None
    mask = read_image(where, lambda image: upright(image).convert("L"))
    if mask.size != size:
        raise ValueError(
            f"{where}: is {mask.width} x {mask.height}, wanted the size of its image, {size[0]} x {size[1]}"
        )
    return mask


def beside(path: Path, what: str) -> Path:
    """Return the path of NAME.mask.png (or of another of BESIDE) of an image."""
    return path.with_name(f"{path.stem}{what}.png")


def open_folder(folder: Path, resolution: int, caption: str | None = None) -> ImageFolder:
    """Open images with a .txt of the same name beside each, or listed in .jsonl files.

    A list is metadata.jsonl, as Hugging Face's image folders have one in every folder of images, or the only other
    .jsonl; its lines are {"file_name": ..., "text": ...}, or the caption is under one of CAPTIONS.  `caption` is that
    of images without a .txt.  Raises ValueError, one line, if this is not a folder, has no images, or a caption is
    missing, empty or too long.
    """
    if not folder.is_dir():
        raise ValueError(f"{folder}: is not a folder, wanted one with captioned images, or a .tar file")
    lists = sorted(folder.rglob("metadata.jsonl")) or sorted(folder.glob("*.jsonl"))
    if len(lists) > 1 and lists[0].name != "metadata.jsonl":
        raise ValueError(f"{folder}: holds {len(lists)} lists of captions: name the one to use metadata.jsonl")
    pairs = [pair for path in lists for pair in _from_list(path)] if lists else _from_text_files(folder, caption)
    if not pairs:
        raise ValueError(f"{folder}: holds no images ({', '.join(SUFFIXES)}), and no .tar files")
    for path, text in pairs:
        check_caption(text, path)
    return ImageFolder(tuple(pairs), (resolution, resolution))


def with_hints(images: ImageFolder) -> ImageFolder:
    """Return images with NAME.hint.png beside each.  Raises ValueError if one has none."""
    without = [path for path, _ in images.items if not beside(path, ".hint").is_file()]
    if without:
        raise ValueError(
            f"{without[0]}: has no image for the ControlNet: wanted {beside(without[0], '.hint').name} beside it "
            f"({len(without)} images have none)"
        )
    return replace(images, hinted=True)


def in_buckets(images: ImageFolder, step: int) -> Buckets:
    """Divide images among sizes of about the same area, by their ratio: little of each is cut off.

    Sides are multiples of `step`.  Raises ValueError, one line, for a broken image; OSError.
    """
    sizes, groups = bucket_sizes(images.size[0], step), dict[tuple[int, int], list[tuple[Path, str]]]()
    for path, caption in images.items:
        groups.setdefault(nearest(sizes, *read_image(path, _size)), []).append((path, caption))
    return Buckets(tuple(replace(images, items=tuple(items), size=size) for size, items in sorted(groups.items())))


def _size(image: Image.Image) -> tuple[int, int]:
    """Return height and width of an image as it is shown, without decoding it."""
    turned = image.getexif().get(ExifTags.Base.Orientation, 1) >= 5
    return image.size if turned else image.size[::-1]


def _from_text_files(folder: Path, caption: str | None) -> list[tuple[Path, str]]:
    folders = [folder, *(path for path in folder.rglob("*") if path.is_dir())]
    paths = sorted(path for place in folders for path in list_images(place) if not path.stem.endswith(BESIDE))
    without = [path for path in paths if not path.with_suffix(".txt").is_file()]
    if without and caption is None:
        raise ValueError(
            f"{without[0]}: has no caption: wanted {without[0].stem}.txt beside it ({len(without)} images have none), "
            "or give `caption`"
        )
    lost = set(without)
    return [
        (path, str(caption) if path in lost else read_text(path.with_suffix(".txt"), MOST_CAPTION).strip())
        for path in paths
    ]


def _from_list(path: Path) -> list[tuple[Path, str]]:
    pairs = []
    for number, line in enumerate(read_text(path, 2**30).split("\n"), start=1):
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        try:
            row = json.loads(line)
            name, caption = row["file_name"], caption_in(row, where)
            if not isinstance(name, str):
                raise TypeError
        except (json.JSONDecodeError, KeyError, TypeError, RecursionError) as error:
            raise ValueError(f'{where}: wanted {{"file_name": ..., "text": ...}}') from error
        image = path.parent / name
        if not image.is_file():
            raise ValueError(f"{where}: there is no file {name}")
        pairs.append((image, caption))
    return pairs


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
            return Example(to_tensor(image.convert("RGB")), caption)
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
