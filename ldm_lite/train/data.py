"""Training data: a folder of captioned images, tar files of them (WebDataset), or a Python file that draws them."""

import functools
import importlib.util
import io
import json
import logging
import math
import os
import re
import sys
import tarfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import ExifTags, Image
from torch import Tensor

from ldm_lite.cli.files import open_file, read_json, read_text
from ldm_lite.cli.writing import write_whole
from ldm_lite.core.declare import MOST_CHARACTERS
from ldm_lite.core.denoise import to_device
from ldm_lite.image import MOST_BYTES, SUFFIXES, decode_image, list_images, read_image, read_rgb, to_rgb, upright

log = logging.getLogger("ldm_lite")

MOST_CAPTION = 2**20  # bytes
BESIDE = (".mask", ".hint")  # NAME.mask.png and NAME.hint.png belong to the image NAME
CAPTIONS = ("text", "caption", "prompt")  # other names for it in JSON
OPEN_SHARDS = 64  # .tar files whose lists of files are in memory: more than batches.MIXED


class Example(NamedTuple):
    """A captioned image, H x W pixels."""

    pixels: Tensor  # (3,H,W) uint8; or the moments (2C,h,w) of its latents, encoded beforehand
    caption: str
    context: Tensor | None = None  # (T,D): the caption, encoded beforehand
    y: Tensor | None = None  # (V,): the vector that SDXL reads besides
    sizes: Tensor | None = None  # (6,) int32: height, width of the image; top, left of its crop; H, W: what SDXL reads
    mask: Tensor | None = None  # (1,H,W) or (1,h,w) uint8: 255 where the image is learned
    hint: Tensor | None = None  # (3,H,W) uint8: the image that a ControlNet reads


class Dataset(Protocol):
    """Captioned images of one size."""

    @property
    def shards(self) -> Sequence[int] | None:
        """Number of examples in each file, which are best read together; None: infinitely many examples."""

    def example(self, index: int) -> Example:
        """Return an example, of a finite dataset 0 <= index < sum(shards)."""


@dataclass(frozen=True)
class Buckets:
    """One dataset of several finite ones, each of one image size; a batch comes from one of them."""

    parts: tuple[Dataset, ...]

    @property
    def counts(self) -> tuple[int, ...]:
        """Number of examples in each part."""
        return tuple(sum(part.shards or ()) for part in self.parts)

    @property
    def shards(self) -> tuple[int, ...]:
        """The shards of all parts."""
        return tuple(count for part in self.parts for count in part.shards or ())

    @cached_property
    def ends(self) -> NDArray[np.int64]:
        """Where the examples of each part end."""
        return np.cumsum(self.counts)

    def example(self, index: int) -> Example:
        """Return an example, in the order of the parts."""
        part = int(np.searchsorted(self.ends, index, side="right"))
        return self.parts[part].example(index - int(self.ends[part]) + self.counts[part])


@dataclass(frozen=True)
class Part:
    """Some examples of a dataset, for instance those that are held out for validation."""

    whole: Dataset
    indices: tuple[int, ...]

    @property
    def shards(self) -> tuple[int]:
        """Their number: all in one shard."""
        return (len(self.indices),)

    def example(self, index: int) -> Example:
        """Return an example of the whole."""
        return self.whole.example(self.indices[index])


def first_captions(dataset: Dataset, most: int = 4) -> list[str]:
    """Return different captions of a dataset's first examples.  Raises as its examples do."""
    count = min(16, sum(dataset.shards or (16,)))
    return list(dict.fromkeys(dataset.example(i).caption for i in range(count)))[:most]


def divided(dataset: Dataset, images: Dataset, fraction: float | None, seed: int) -> tuple[Dataset, Dataset | None]:
    """Divide a dataset into training data, with repeated and mirrored images, and validation data.

    The dataset was made from `images`, which know about repeated and mirrored ones.  The fraction, if there is one, is
    held out: at least one image, and one is left.  Raises ValueError if there are too few.
    """
    pairs = [(dataset, images)]
    if isinstance(dataset, Buckets) and isinstance(images, Buckets):
        pairs = list(zip(dataset.parts, images.parts, strict=True))
    counts = [
        len(source.items) if isinstance(source, ImageFolder) else sum(part.shards or ()) for part, source in pairs
    ]
    held = set[int]()
    if fraction is not None:
        if (count := sum(counts)) < 2:
            raise ValueError(f"got `validation` {fraction:g} of {count} images: expected two or more")
        order = np.random.default_rng([5, seed]).permutation(count)
        held = {int(index) for index in order[: min(count - 1, max(1, round(fraction * count)))]}
    learned, measured, first = list[Part](), list[Part](), 0
    is_as_it_is = not held
    for (part, source), count in zip(pairs, counts, strict=True):
        rows = [row for row in range(count) if first + row not in held]
        others = [row for row in range(count) if first + row in held]
        first += count
        if isinstance(source, ImageFolder):
            times = [source.repeats(row) for row in rows]
            is_as_it_is &= set(times) <= {1} and not source.flip
            sides = (0, count) if source.flip else (0,)
            rows = [row + side for row, n in zip(rows, times, strict=True) for side in sides for _ in range(n)]
        learned += [Part(part, tuple(rows))] if rows else []
        measured += [Part(part, tuple(others))] if others else []
    if is_as_it_is:
        return dataset, None
    if not isinstance(dataset, Buckets):
        return learned[0], measured[0] if measured else None
    return Buckets(tuple(learned)), Buckets(tuple(measured)) if measured else None


# ---- images and captions --------------------------------------------------------------------------------------------


def bucket_sizes(resolution: int, step: int) -> list[tuple[int, int]]:
    """Return (height, width) of buckets: multiples of `step`, about resolution^2 pixels, a ratio of up to 4.

    Podell et al. 2023, appendix I.
    """
    most, sizes = 2 * resolution, set()
    for long in range(resolution // step * step, most + 1, step):
        short = resolution**2 // long // step * step
        if short >= resolution // 2:
            sizes |= {(long, short), (short, long)}
    return sorted(sizes)


def nearest(sizes: Sequence[tuple[int, int]], height: int, width: int) -> tuple[int, int]:
    """Return the size whose ratio is nearest to an image's, of equal ones the largest."""
    wanted = math.log(height / width)
    return min(sizes, key=lambda size: (abs(math.log(size[0] / size[1]) - wanted), -size[0] * size[1]))


def crop(image: Image.Image, size: tuple[int, int]) -> tuple[Image.Image, tuple[int, int]]:
    """Scale an image to cover `size` = (height, width) and cut out its middle.

    Returns it, with the top and left of the cut in the scaled image.
    """
    (height, width), (w, h) = size, image.size
    box = (w, w * height / width) if w * height <= h * width else (h * width / height, h)
    left, top = (w - box[0]) // 2, (h - box[1]) // 2
    cut = image.resize((width, height), Image.Resampling.LANCZOS, (left, top, left + box[0], top + box[1]))
    return cut, (round(top * height / box[1]), round(left * width / box[0]))


def sizes_of(image: Image.Image, corner: tuple[int, int], size: tuple[int, int]) -> Tensor:
    """Return Example.sizes of a whole image and its crop."""
    return torch.tensor([image.height, image.width, *corner, *size], dtype=torch.int32)


def to_tensor(image: Image.Image) -> Tensor:
    """Return an RGB or grey image as a tensor (3,H,W) or (1,H,W) uint8."""
    values = torch.from_numpy(np.array(image))
    return values[None] if values.ndim == 2 else values.permute(2, 0, 1)


def to_float(pixels: Tensor, device: torch.device) -> Tensor:
    """Convert pixels uint8 [0,255] to float32 [-1,1] on the device."""
    return to_device(pixels, device).float() / 127.5 - 1


def check_caption(caption: str, path: object) -> None:
    """Raise ValueError, one line, for a caption that is empty or too long."""
    if not caption:
        raise ValueError(f"{path}: its caption is empty: write one, or remove the image")
    if len(caption) > MOST_CHARACTERS:
        raise ValueError(f"{path}: its caption has {len(caption):,} characters, expected at most {MOST_CHARACTERS:,}")


def caption_in(row: object, where: object) -> str:
    """Return the caption in a JSON object.  Raises ValueError if there is none."""
    values = row if isinstance(row, dict) else {}
    for name in CAPTIONS:
        if isinstance(text := values.get(name), str):
            return text.strip()
    raise ValueError(f"{where}: expected a JSON object with a caption called {' or '.join(CAPTIONS)}")


# ---- folders --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ImageFolder:
    """Images and their captions.  Each image is scaled to cover `size`, and its middle is taken."""

    items: tuple[tuple[Path, str], ...]
    size: tuple[int, int]  # height, width
    masked: bool = False  # with masks: NAME.mask.png, or an image's alpha, or else all of it
    hinted: bool = False  # with NAME.hint.png, the images that a ControlNet reads
    flip: bool = False  # all of them, and then all mirrored
    root: Path = Path()  # its folders 10_NAME hold images that are repeated 10 times

    @property
    def shards(self) -> tuple[int]:
        """The number of images: all in one shard."""
        return (len(self.items) * (1 + self.flip),)

    def repeats(self, index: int) -> int:
        """How often an image is learned in an epoch."""
        folder = self.items[index][0].parent
        match = re.match(r"(\d{1,4})_", folder.name) if folder.parent == self.root else None
        return int(match[1]) if match else 1

    def example(self, index: int) -> Example:
        """Return an example.  Raises ValueError, one line, for a broken image; OSError."""
        is_mirrored, row = divmod(index, len(self.items))
        path, caption = self.items[row]
        image, alpha = read_image(path, _with_alpha)

        def tensor(image: Image.Image) -> Tensor:
            values = to_tensor(crop(image, self.size)[0])
            return values.flip(-1) if is_mirrored else values

        mask = tensor(_mask(path, image.size) or alpha) if self.masked else None
        hint = tensor(read_rgb(beside(path, ".hint"))) if self.hinted else None
        sizes = sizes_of(image, crop(image, self.size)[1], self.size)
        return Example(tensor(image), caption, sizes=sizes, mask=mask, hint=hint)


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
            f"{where}: is {mask.width} x {mask.height}, expected the size of its image, {size[0]} x {size[1]}"
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
        raise ValueError(f"{folder}: is not a folder, expected one with captioned images, or a .tar file")
    lists = [path for place in _visible(folder) if (path := place / "metadata.jsonl").is_file()]
    lists = lists or sorted(folder.glob("*.jsonl"))
    if len(lists) > 1 and lists[0].name != "metadata.jsonl":
        raise ValueError(f"{folder}: holds {len(lists)} lists of captions: name the one to use metadata.jsonl")
    pairs = [pair for path in lists for pair in _from_list(path)] if lists else _from_text_files(folder, caption)
    listed = {os.path.normpath(path) for path, _ in pairs}
    if unlisted := [path for path in _images_in(folder) if lists and os.path.normpath(path) not in listed]:
        log.warning("%s: is in no list of captions, so it is not learned (%d images)", unlisted[0], len(unlisted))
    if not pairs:
        raise ValueError(f"{folder}: holds no images ({', '.join(SUFFIXES)}), and no .tar files")
    for path, text in pairs:
        check_caption(text, path)
    return ImageFolder(tuple(pairs), (resolution, resolution), root=folder)


def check_named(images: ImageFolder, name: str) -> None:
    """Raise ValueError, one line, if no caption has the name to learn; warn if some do not have it."""
    without = [path for path, caption in images.items if name not in caption]
    if len(without) == len(images.items):
        raise ValueError(f"{without[0]}: its caption lacks `token` {name!r}, as all captions do: write it into them")
    if without:
        log.warning("%s: its caption lacks %r, as %d of %d do", without[0], name, len(without), len(images.items))


def with_hints(images: ImageFolder) -> ImageFolder:
    """Return images with NAME.hint.png beside each.  Raises ValueError if one has none."""
    without = [path for path, _ in images.items if not beside(path, ".hint").is_file()]
    if without:
        raise ValueError(
            f"{without[0]}: has no image for the ControlNet: expected {beside(without[0], '.hint').name} beside it "
            f"({len(without)} images have none)"
        )
    return replace(images, hinted=True)


def in_buckets(images: ImageFolder, step: int, no_upscale: bool = False) -> Buckets:
    """Divide images among sizes of about the same area, by their ratio: little of each is cut off.

    With no_upscale, smaller images about keep their size.  Sides are multiples of `step`.  Broken images stay,
    in the first size: the reader leaves them out.  Raises OSError.
    """
    sizes, groups = bucket_sizes(images.size[0], step), dict[tuple[int, int], list[tuple[Path, str]]]()
    for path, caption in images.items:
        try:
            height, width = read_image(path, _size)
        except ValueError:
            height, width = sizes[0]
        size = nearest(sizes, height, width)
        if no_upscale and (height < size[0] or width < size[1]):
            size = max(height // step, 1) * step, max(width // step, 1) * step
            size = min(size, nearest(sizes, *size), key=lambda sides: sides[0] * sides[1])
        groups.setdefault(size, []).append((path, caption))
    return Buckets(tuple(replace(images, items=tuple(items), size=size) for size, items in sorted(groups.items())))


def _size(image: Image.Image) -> tuple[int, int]:
    """Return height and width of an image as it is shown, without decoding it."""
    turned = image.getexif().get(ExifTags.Base.Orientation, 1) >= 5
    return image.size if turned else image.size[::-1]


def _visible(folder: Path) -> list[Path]:
    """Return a folder, and the folders within it except hidden ones."""
    within = sorted(path for path in folder.rglob("*") if path.is_dir())
    return [folder, *(path for path in within if not any(n.startswith(".") for n in path.relative_to(folder).parts))]


def _images_in(folder: Path) -> list[Path]:
    """Return the images of a folder and the folders within it, except masks and hints."""
    return sorted(path for place in _visible(folder) for path in list_images(place) if not path.stem.endswith(BESIDE))


def _from_text_files(folder: Path, caption: str | None) -> list[tuple[Path, str]]:
    pairs, without = list[tuple[Path, str]](), list[Path]()
    for path in _images_in(folder):
        files = (path.with_suffix(suffix) for suffix in (".txt", ".caption"))
        text = next((read_text(file, MOST_CAPTION).strip() for file in files if file.is_file()), caption)
        if text is None and (match := re.match(r"\d{1,4}_(.+)", path.parent.name)) and path.parent.parent == folder:
            text = match[1]  # 10_sks dog
        without += [path] * (text is None)
        pairs.append((path, str(text)))
    if without:
        raise ValueError(
            f"{without[0]}: has no caption: expected {without[0].stem}.txt beside it ({len(without)} images have "
            "none), or give `caption`"
        )
    return pairs


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
            raise ValueError(f'{where}: expected {{"file_name": ..., "text": ...}}') from error
        image = path.parent / name
        if not image.is_file():
            raise ValueError(f"{where}: there is no file {name}")
        pairs.append((image, caption))
    return pairs


# ---- tar files ------------------------------------------------------------------------------------------------------


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
        where, content, text, is_json = self.content(index)
        caption = text.decode("utf-8-sig", errors="replace")
        if is_json:
            try:
                caption = caption_in(json.loads(caption), where)
            except (json.JSONDecodeError, RecursionError) as error:
                raise ValueError(f"{where}: its .json cannot be read ({error})") from error
        check_caption(caption.strip(), where)
        pixels, size = decode_image(io.BytesIO(content), where, to_rgb), (self.resolution, self.resolution)
        cut, corner = crop(pixels, size)
        return Example(to_tensor(cut), caption.strip(), sizes=sizes_of(pixels, corner, size))

    def content(self, index: int) -> tuple[str, bytes, bytes, bool]:
        """Return an example's name, image, caption, and whether that is JSON.  Raises ValueError, OSError."""
        shard = int(np.searchsorted(self._ends, index, side="right"))
        path, state = self.tars[shard]
        name, image, text, is_json = _members(path, state)[index - int(self._ends[shard])]
        where = f"{path}, {name}"
        with open_file(path) as file:
            return where, _read(file, image, where), _read(file, text, where), is_json


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
    for key in images.keys() - texts.keys() - rows.keys():
        texts[key] = (0, 0)  # an empty caption, which `example` refuses
    return [(key, place, texts.get(key) or rows[key], key not in texts) for key, place in images.items()]


def _read(file: BinaryIO, place: _Place, where: str) -> bytes:
    offset, size = place
    if size > MOST_BYTES:
        raise ValueError(f"{where}: is too large, expected at most {MOST_BYTES / 2**20:,.0f} MiB")
    file.seek(offset)
    if len(content := file.read(size)) < size:
        raise ValueError(f"{where}: ends too early")
    return content


def open_data(path: Path, resolution: int, counts: Path | None = None) -> ImageFolder | TarShards:
    """Open captioned images: a folder (see open_folder), or WebDataset shards, a .tar file or a folder of them.

    `counts` is a file with the tars' numbers of images, so that only one process counts.  Raises
    ValueError, one line, if there are none, or a caption is missing; OSError.
    """
    paths = sorted(path.glob("*.tar")) if path.is_dir() else [path] * (path.suffix == ".tar")
    if not paths:
        return open_folder(path, resolution)
    stats = [tar.stat() for tar in paths]
    tars = tuple((tar, (stat.st_size, stat.st_mtime_ns)) for tar, stat in zip(paths, stats, strict=True))
    known = read_json(counts, 2**30) if counts is not None and counts.exists() else {}
    keys = [f"{tar.absolute()} {state}" for tar, state in tars]
    shards = {key: known[key] if key in known else len(_members(*tar)) for key, tar in zip(keys, tars, strict=True)}
    if not sum(shards.values()):
        raise ValueError(f"{paths[0]}: holds no images ({', '.join(SUFFIXES)})")
    if counts is not None and shards != known:
        write_whole(counts, json.dumps(shards), unique=True)
    return TarShards(tars, tuple(shards.values()), resolution)


# ---- renderers ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RenderedScenes:
    """Scenes that a Python file draws: its scenes(resolution, ...) returns a function index -> (PIL image, caption)."""

    draw: Callable[[int], tuple[Image.Image, str]]
    source: tuple[Path, int, dict[str, Any], int | None]  # arguments of open_renderer
    size: int | None = None  # of them; None: a new one each time

    def __reduce__(self) -> Any:
        """Other processes get the file, and import it: nested functions cannot be pickled."""
        return open_renderer, self.source

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
    name = f"ldm_lite renderer {path.stem}"  # a name that no other module has
    spec = importlib.util.spec_from_file_location(name, path) if path.is_file() else None
    if spec is None or spec.loader is None:
        raise ValueError(f"{path}: is not a Python file, expected one with a function scenes(resolution, ...)")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # where its dataclasses look for it
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise ValueError(f"{path}: cannot be imported: {type(error).__name__}: {error}") from error
    if not hasattr(module, "scenes"):
        raise ValueError(f"{path}: has no function scenes(resolution, ...)")
    try:
        return RenderedScenes(module.scenes(resolution, **arguments), (path, resolution, arguments, size), size)
    except TypeError as error:
        raise ValueError(f"{path}: scenes() does not take these options: {error}") from error
