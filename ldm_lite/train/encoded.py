"""Examples encoded beforehand, in memory-mapped shards: latents, and on request text embeddings.

`python -m ldm_lite.batch DATA --encode --out FOLDER` writes a folder of them, with the text; a run writes the latents
of its own data.  A folder holds, for example i in row i % shard of folder i // shard:

    index.json               what there is; written last, so a folder with it is complete
    00000/moments.npy        (n,2C,h,w) float16, mean and log variance of the latents, unscaled
    00000/context.npy        (n,T,D) float16, if the text is encoded
    00000/y.npy              (n,V) float32, what some families read of it besides
    00000/sizes.npy          (n,6) int32, of the whole images and their crops: in a run's own folder
    00000/mask.npy           (n,1,H,W) uint8, if the loss is masked
    00000/hint.npy           (n,3,H,W) uint8, what a ControlNet reads
    00000/captions.jsonl     n JSON strings
    empty/context.npy        (1,T,D) float16, the empty caption, if the text is encoded; and y.npy
"""

import contextlib
import functools
import hashlib
import itertools
import json
import logging
import math
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from ldm_lite import Pipeline
from ldm_lite.cli.files import open_file, read_json, read_object, read_text
from ldm_lite.cli.writing import flush, replacing, write_whole
from ldm_lite.core.vae import AutoencoderKL
from ldm_lite.networks import digest
from ldm_lite.train import distributed
from ldm_lite.train.batches import Batch, divided_into, in_order, reported_workers
from ldm_lite.train.data import (
    BESIDE,
    OPEN_SHARDS,
    Buckets,
    Dataset,
    Example,
    ImageFolder,
    Part,
    RenderedScenes,
    TarShards,
    beside,
    check_named,
    divided,
    in_buckets,
    open_data,
    open_folder,
    open_renderer,
    with_hints,
)
from ldm_lite.train.losses import moments_of
from ldm_lite.train.options import TrainOptions

log = logging.getLogger("ldm_lite")

INDEX = "index.json"
FORMAT = "ldm_lite encoded 1"
SHARD = 1000  # examples
ENCODED = 16  # of them at once
_KINDS = {  # of arrays: their types, and numbers of dimensions of an example
    "moments": ("<f2", 3), "context": ("<f2", 2), "y": ("<f4", 1), "sizes": ("<i4", 1), "mask": ("|u1", 3),
    "hint": ("|u1", 3),
}  # fmt: skip
_ORIGIN = "origin"  # the inputs of a run's own latents
MOST_LEFT_OUT = 10  # broken images of a shard, or a tenth of them
LEFT_OUT = "left-out.json"  # the images of a shard that could not be read, and why


@dataclass(frozen=True)
class EncodedDataset:
    """A folder of encoded examples."""

    folder: Path
    about: dict[str, Any]  # index.json
    written: int  # when, in ns

    @functools.cached_property
    def shards(self) -> tuple[int, ...]:
        """Number of examples in each shard: the same in all but the last, less those that could not be encoded."""
        whole, rest = divmod(self.about["examples"], self.about["shard"])
        return tuple(self.about.get("counts") or (self.about["shard"],) * whole + (rest,) * (rest > 0))

    @functools.cached_property
    def _ends(self) -> NDArray[np.int64]:
        return np.cumsum(self.shards)

    def example(self, index: int) -> Example:
        """Return moments (2C,h,w), the caption and, if there are, its embeddings (T,D).

        Raises ValueError, one line, if a file is damaged, or not finite there; OSError.
        """
        shard = int(np.searchsorted(self._ends, index, side="right"))
        row = index - int(self._ends[shard]) + self.shards[shard]
        path = self.folder / f"{shard:05}" / "captions.jsonl"
        captions = _captions(path, self.written)
        if len(captions) != self.shards[shard]:
            raise ValueError(f"{path}: has {len(captions)} lines, not a shard's")
        arrays = {name: self._tensor(f"{shard:05}", name, row) for name in _KINDS if self.about.get(name) is not None}
        return Example(arrays.pop("moments"), captions[row], **arrays)

    def empty(self, name: str) -> Tensor | None:
        """Return the "context" (T,D) or "y" (V,) of the empty caption, if it is encoded.  Raises as example does."""
        return None if self.about.get(name) is None else self._tensor("empty", name, 0)

    def _tensor(self, shard: str, name: str, row: int) -> Tensor:
        path, count = self.folder / shard / f"{name}.npy", 1 if shard == "empty" else self.shards[int(shard)]
        values = _mapped(path, self.written, (count, *self.about[name]), _KINDS[name][0])
        tensor = torch.from_numpy(values[row].copy())
        if not bool(torch.isfinite(tensor).all()):
            raise ValueError(f"{path}: row {row} is not finite: encode it again")
        return tensor


def open_encoded(folder: Path) -> EncodedDataset:
    """Open a folder of encoded examples.  Raises ValueError, one line, if it is none or damaged; OSError."""
    path = folder / INDEX
    about = read_json(path)
    if not isinstance(about, dict) or about.get("format") != FORMAT:
        raise ValueError(f"{path}: expected an index of encoded examples with the format {FORMAT!r}: encode them again")
    bad = [name for name in ("examples", "shard") if type(about.get(name)) is not int or about[name] < 1]
    bad += [
        name
        for name, (_, count) in _KINDS.items()
        if not (name != "moments" and about.get(name) is None)
        and not (isinstance(about.get(name), list) and len(about[name]) == count and _whole(about[name]))
    ]
    counts = about.get("counts", [about.get("examples")])
    is_list = isinstance(counts, list) and all(type(count) is int and count >= 0 for count in counts)
    if not bad and not (is_list and sum(counts) == about["examples"]):
        bad.append("counts")
    if bad:
        raise ValueError(f"{path}: its {bad[0]} cannot be {about.get(bad[0])!r:.50}: encode the examples again")
    return EncodedDataset(folder, about, path.stat().st_mtime_ns)


ShardRow = tuple[dict[str, NDArray[Any]], str]  # the arrays of an example by name, and its caption


def rows(captions: Sequence[str], tensors: Mapping[str, Tensor | None]) -> Iterator[ShardRow]:
    """Yield the examples of a batch, from its tensors (B,...) of some _KINDS."""
    arrays = {
        name: values.numpy().astype(_KINDS[name][0], copy=False)
        for name, values in tensors.items()
        if values is not None
    }
    for i, caption in enumerate(captions):
        yield {name: values[i] for name, values in arrays.items()}, caption


def write_shard(folder: Path, examples: Iterable[ShardRow], count: int) -> None:
    """Write the files of up to `count` examples, one value after the other: a full disk is an OSError then."""

    def begin(file: BinaryIO, name: str, shape: tuple[int, ...]) -> None:
        file.seek(0)  # numpy leaves room for any number of examples
        header = {"descr": _KINDS[name][0], "fortran_order": False, "shape": shape}
        np.lib.format.write_array_header_1_0(file, header)

    captions = list[str]()
    with contextlib.ExitStack() as stack:
        files: dict[str, BinaryIO] = {}
        shapes: dict[str, tuple[int, ...]] = {}
        for arrays, caption in examples:
            for name, value in arrays.items():
                if name not in files:
                    files[name] = stack.enter_context(open(folder / f"{name}.npy", "wb"))
                    shapes[name] = value.shape
                    begin(files[name], name, (count, *value.shape))
                files[name].write(value.tobytes())
            captions.append(json.dumps(caption) + "\n")
        for name in files if len(captions) < count else ():
            begin(files[name], name, (len(captions), *shapes[name]))
    (folder / "captions.jsonl").write_text("".join(captions), encoding="utf-8")
    for path in folder.iterdir():
        flush(path)


def write_index(folder: Path, counts: Sequence[int], shard: int, about: Mapping[str, Any]) -> None:
    """Write the index of a folder whose shards are there.

    counts: examples of each shard: `shard`, fewer in the last one, less those left out.  Raises OSError.
    """
    first = next(number for number, count in enumerate(counts) if count)
    paths = {name: folder / f"{first:05}" / f"{name}.npy" for name in _KINDS}
    shapes = {
        name: list(np.load(path, mmap_mode="r").shape[1:]) if path.is_file() else None for name, path in paths.items()
    }
    index = {"format": FORMAT, "examples": sum(counts), "shard": shard, **shapes, **about}
    index |= {"counts": list(counts)} if set(counts[:-1]) - {shard} else {}
    write_whole(folder / INDEX, json.dumps(index, indent=1), unique=True)


def encoder_digest(vae: nn.Module) -> str:
    """Digest the weights that an autoencoder's latents depend on."""
    return digest(*(part for name, part in vae.named_children() if name in ("encoder", "quant_conv")))


def _whole(sizes: list[object]) -> bool:
    return all(type(size) is int and 0 < size < 2**31 for size in sizes) and math.prod(sizes) < 2**40  # type: ignore[arg-type]


@functools.lru_cache(maxsize=len(_KINDS) * OPEN_SHARDS)
def _mapped(path: Path, written: int, shape: tuple[int, ...], kind: str) -> NDArray[Any]:
    """Map a file of arrays into memory.  Raises ValueError, one line, for a damaged one or another shape; OSError."""
    open_file(path).close()  # a pipe would wait
    try:
        values = np.load(path, mmap_mode="r", allow_pickle=False)
    except (ValueError, EOFError) as error:
        raise ValueError(f"{path}: is damaged ({str(error)!r:.100}): encode the examples again") from error
    if not isinstance(values, np.ndarray) or values.shape != shape or values.dtype != np.dtype(kind):
        raise ValueError(f"{path}: expected {np.dtype(kind).name} of shape {shape}: encode the examples again")
    return values


def close_files() -> None:
    """Unmap the files, up to 64 shards of several each: a process may have few open."""
    _mapped.cache_clear()


@functools.lru_cache(maxsize=OPEN_SHARDS)
def _captions(path: Path, written: int) -> list[str]:
    """Read the captions of a shard.  Raises ValueError, one line, for anything but a JSON string in a line; OSError."""
    try:
        captions = [json.loads(line) for line in read_text(path, 2**30).split("\n") if line]
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: cannot be read ({error}): encode the examples again") from error
    if not all(isinstance(caption, str) for caption in captions):
        raise ValueError(f"{path}: expected a JSON string in each line: encode the examples again")
    return captions


# ---- the data of a run ----------------------------------------------------------------------------------------------


class Data(NamedTuple):
    """The data of a run, as latents if there are finitely many."""

    train: Dataset
    prior: Dataset | None  # images of the class
    validation: Dataset | None
    encoded: bool  # beforehand: no step uses the autoencoder
    empty: Mapping[str, Tensor] | None  # no caption, encoded, if the captions are
    digest: str  # of all of them, wherever they are


def open_all(
    options: TrainOptions, model: Pipeline, reads_text: bool, check: Callable[[str], None] = lambda digest: None
) -> Data:
    """Open the data of a run, and encode finite data; reads_text: text encoders do not change.

    check gets their digest before anything is encoded.  Raises ValueError, one line, for unusable options or data, and
    the errors of check; OSError.
    """

    def opened(path: str | None) -> Dataset:
        dataset = open_dataset(options, model, path)
        if isinstance(dataset, EncodedDataset):
            check_encoded(options, model, dataset, reads_text)
        return dataset

    def latents(dataset: Dataset, name: str) -> tuple[Dataset, Dataset]:
        if isinstance(dataset, EncodedDataset) or dataset.shards is None:
            return dataset, dataset
        with model.phase("vae"):
            result = encoded(options, dataset, model.vae, name)
        if not sum(result[0].shards or ()):
            raise ValueError(f"{Path(options.out) / name}: none of the images can be read: the warnings say why")
        return result

    folder = None if options.held_out_fraction is not None else options.validation
    dataset = opened(options.data)
    of_class = None if options.class_data is None else opened(options.class_data)
    for_validation = None if folder is None else opened(folder)
    if for_validation is not None and for_validation.shards is None:
        raise ValueError("`validation` needs finite data: give a folder of images")
    datasets = [data for data in (dataset, of_class, for_validation) if data is not None]
    identities = [identity(options, data, lambda path: (path.name, path.stat().st_size)) for data in datasets]
    digest = hashlib.sha256(repr(identities).encode()).hexdigest()[:32]
    check(digest)
    if options.held_out_fraction is not None and dataset.shards is not None:
        divided(dataset, dataset, options.held_out_fraction, options.seed)  # raises for too few before encoding

    train, validation = divided(*latents(dataset, "latents"), options.held_out_fraction, options.seed)
    prior = empty = None
    if of_class is not None:
        prior, _ = divided(*latents(of_class, "latents-class"), None, options.seed)
    if for_validation is not None:
        validation, _ = latents(for_validation, "latents-validation")
    has_other_text = any((options.class_data, options.class_prompt, folder))
    is_encoded = isinstance(dataset, EncodedDataset)
    if isinstance(dataset, EncodedDataset) and reads_text and not has_other_text:
        empty = _no_caption(model, dataset)
    return Data(train, prior, validation, is_encoded, empty, digest)


def identity(options: TrainOptions, dataset: Dataset, of_file: Callable[[Path], object]) -> list[object]:
    """Return what identifies data: what of_file says about each file, captions, the renderer.  Raises OSError."""
    if isinstance(dataset, Buckets):
        return [identity(options, part, of_file) for part in dataset.parts]
    if isinstance(dataset, EncodedDataset):
        ends = [dataset.example(index) for index in (0, dataset.about["examples"] - 1)]
        return [dataset.about, *((example.caption, example.pixels.numpy().tobytes()) for example in ends)]
    if isinstance(dataset, TarShards):
        return [of_file(path) for path, _ in dataset.tars]
    if not isinstance(dataset, ImageFolder):
        return [Path(str(options.renderer)).read_bytes(), options.renderer_options, options.scenes]
    files = [(of_file(path), caption) for path, caption in dataset.items]
    places = (beside(path, what) for path, _ in dataset.items for what in BESIDE)
    return [*files, *(of_file(path) for path in places if path.is_file())]


def open_dataset(options: TrainOptions, model: Pipeline, path: str | None) -> Dataset:
    """Open a folder of data, or the options' renderer.  Raises ValueError, one line, if they are not usable."""
    resolution = model.family.resolution
    if path is None:
        return open_scenes(options, resolution)
    folder = Path(path)
    if (folder / INDEX).exists():
        dataset: Dataset = open_encoded(folder)
    elif folder.is_dir() and not any(folder.glob("*.tar")):
        caption = options.class_prompt if path == options.class_data else options.caption
        images = replace(open_folder(folder, resolution, caption), masked=options.masked, flip=options.flip)
        images = with_hints(images) if options.stage == "control" else images
        if options.token is not None and path == options.data:  # not of images of the class, or for validation
            check_named(images, options.token)
        factor = model.vae.spec.factor * getattr(model.family.unet, "patch", 1)
        step = factor * max(1, round(resolution / 8 / factor))
        return in_buckets(images, step, options.bucket_no_upscale) if options.buckets else images
    else:
        for is_first in (True, False):  # one process counts the images of tars
            if (distributed.rank() == 0) is is_first:
                dataset = open_data(folder, resolution, Path(options.out) / "tars.json")
            distributed.barrier()
    if options.stage == "control":
        raise ValueError(f"{path}: is not a folder of images, each with a NAME.hint.png, which `stage=control` needs")
    for name in ("caption", "buckets", "masked", "flip"):
        if getattr(options, name):
            raise ValueError(f"{path}: is not a folder of images, which `{name}` is for: leave it out")
    return dataset


def open_scenes(options: TrainOptions, resolution: int) -> RenderedScenes:
    """Open the options' renderer.  Raises ValueError, one line, if it is not usable."""
    try:
        arguments = json.loads(options.renderer_options)
    except (json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"got `renderer_options` {options.renderer_options!r:.100}, expected JSON: {error}") from error
    return open_renderer(Path(str(options.renderer)), resolution, arguments, options.scenes)


def encoded(options: TrainOptions, images: Dataset, vae: nn.Module, name: str = "latents") -> tuple[Dataset, Dataset]:
    """Encode finite data's latents into the run's folder, or use those there if data and autoencoder are the same.

    Returns the latents, and their images: broken ones are named and left out, as are those with a broken
    mask or hint, and tar members without a caption.  A shard is written beside its name and renamed, and a resumed run
    makes the missing ones.  Raises ValueError if more than a tenth of a shard is broken, or all; OSError.
    """
    if isinstance(images, Buckets):
        names = [f"{name}/{'x'.join(map(str, part.size))}" for part in images.parts if isinstance(part, ImageFolder)]
        parts = [encoded(options, part, vae, name) for part, name in zip(images.parts, names, strict=True)]
        parts = [(latents, of) for latents, of in parts if sum(latents.shards or ())]
        return Buckets(tuple(latents for latents, _ in parts)), Buckets(tuple(of for _, of in parts))
    assert isinstance(vae, AutoencoderKL)
    assert images.shards is not None

    def of_file(path: Path) -> object:
        return str(path), path.stat().st_size, path.stat().st_mtime_ns

    how = [getattr(images, name, None) for name in ("size", "resolution", "masked", "hinted", "flip")]
    code = hashlib.sha256(repr((identity(options, images, of_file), how)).encode()).hexdigest()[:32]
    about = {"data": code, "vae": encoder_digest(vae)}
    folder, count, device = Path(options.out) / name, sum(images.shards), next(vae.parameters()).device
    num_shards, origin, key = -(-count // SHARD), folder / _ORIGIN, json.dumps(about, sort_keys=True)
    if distributed.rank() == 0 and not (origin.is_file() and read_text(origin) == key):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        write_whole(origin, key)
    missing = distributed.broadcast([number for number in range(num_shards) if not (folder / f"{number:05}").is_dir()])
    if missing:
        log.info("encoding %d images", min(count, len(missing) * SHARD))

    # Each process makes its share, so that none waits long for another.
    share = missing[distributed.rank() :: distributed.world_size()]
    shards = {number: range(number * SHARD, min((number + 1) * SHARD, count)) for number in share}
    # Batches are small enough that all workers have some of a shard.
    batches_of = {number: divided_into(shard, min(options.batch_size, ENCODED)) for number, shard in shards.items()}
    left_out = None if isinstance(images, RenderedScenes) else dict[int, str]()  # only its Python file can be at fault
    all_parts = [part for of_shard in batches_of.values() for part in of_shard]
    read = contextlib.closing(in_order(images, all_parts, options.data_workers, left_out))

    @torch.no_grad()
    def encode(number: int, batches: Iterator[Batch | None]) -> Iterator[ShardRow]:
        for batch in itertools.islice(batches, len(batches_of[number])):
            errors = errors_of(number)
            if len(errors) > max(MOST_LEFT_OUT, len(shards[number]) / 10):
                example = next(reversed(errors.values()))
                raise ValueError(f"{len(errors)} images are broken, which is too many, for example {example}")
            if batch is not None:
                moments = torch.cat(moments_of(vae, batch.pixels, device), dim=1).cpu()
                tensors = {name: getattr(batch, name) for name in _KINDS if name != "moments"}
                yield from rows(batch.captions, {"moments": moments, **tensors})

    def errors_of(number: int) -> dict[int, str]:
        return {index: error for index, error in (left_out or {}).items() if index in shards[number]}

    with reported_workers(), read as batches:
        for number, shard in shards.items():
            with replacing(folder / f"{number:05}") as part:
                part.mkdir()
                write_shard(part, encode(number, batches), len(shard))
                if errors := errors_of(number):
                    write_whole(part / LEFT_OUT, json.dumps(errors))
    distributed.barrier()
    lists = [folder / f"{number:05}" / LEFT_OUT for number in range(num_shards)]
    broken = [read_object(path) if path.is_file() else {} for path in lists]
    all_errors = {int(index): str(error) for of_shard in broken for index, error in of_shard.items()}
    if all_errors:
        example = next(iter(all_errors.values()))
        log.warning("%d of %d images are left out, for example: %s", len(all_errors), count, example)
    if isinstance(images, ImageFolder):  # with a mirrored image its original is left out too
        num_images = len(images.items)
        rows_left = {index % num_images for index in all_errors}
        images = replace(images, items=tuple(item for i, item in enumerate(images.items) if i not in rows_left))
    if len(all_errors) == count:
        return Part(images, ()), Part(images, ())
    if distributed.rank() == 0:
        sizes = [min(SHARD, count - number * SHARD) - len(of_shard) for number, of_shard in enumerate(broken)]
        write_index(folder, sizes, SHARD, about)
    distributed.barrier()
    return open_encoded(folder), images


def check_encoded(options: TrainOptions, model: Pipeline, dataset: EncodedDataset, reads_text: bool) -> None:
    """Raise ValueError, one line, if data were encoded for another model; its text counts only if that is read."""
    about, where = dataset.about, dataset.folder / INDEX
    if about.get("vae") != encoder_digest(model.vae):
        raise ValueError(f"{where}: was encoded by another autoencoder than this model's: encode the data again")
    if not reads_text:
        return
    for name in ("tokens", "shuffle_caption"):
        if getattr(options, name):
            raise ValueError(f"`{name}` has no effect on text that was encoded beforehand: leave it out")
    if about["context"] is None or model.text_encoder is None:
        raise ValueError(f"{where}: holds no text embeddings: encode the data again, or train the text encoder too")
    if model.offloader is not None and model.offloader.storage is not None:
        log.info("%s: a text encoder in 8 bits cannot be compared: use the one that encoded the data", where)
    elif about.get("text_encoder") != digest(*model.text_encoders):
        raise ValueError(f"{where}: was encoded by another text encoder than this model's: encode the data again")
    reads_y = model.schedule.is_flow or model.family.unet.vector_dim is not None
    if reads_y and about.get("y") is None:
        raise ValueError(f"{where}: holds no y.npy, which {model.family.title} reads too: encode the data again")


def _no_caption(model: Pipeline, dataset: EncodedDataset) -> dict[str, Tensor]:
    """Return the network's inputs for no caption, as in inference: SDXL reads zeros, others the empty text."""
    texts = {name: dataset.empty(name) for name in ("context", "y")}
    empty = {name: text[None].float() for name, text in texts.items() if text is not None}
    if dataset.about.get("y") is not None and not model.schedule.is_flow:
        return {"context": torch.zeros_like(empty["context"]), "y": torch.zeros(1, *dataset.about["y"])}
    return empty
