"""Conditioning from prompts that are not text: classes, boxes, label maps, embeddings, or none.

Each function takes B prompts as strings ("207", the name of a file).  None or "" is the unconditional prompt of models
trained with one.
"""

import dataclasses
import json
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor
from torch.nn import functional as F

from ldm_lite.checkpoint.model import CheckpointModel
from ldm_lite.checkpoint.reader import open_checkpoint, read_weight
from ldm_lite.cli.files import open_file, read_text
from ldm_lite.conditioning.prompts import PromptOptions, Prompts, image_size
from ldm_lite.core.denoise import Conditioning
from ldm_lite.image import read_image
from ldm_lite.models.bert import BERTTextEncoder
from ldm_lite.models.embedders import ClassEmbedder, LabelMapRescaler

MOST_BYTES = 2**30  # of a file of embeddings


def nothing(model: CheckpointModel, prompts: Prompts, options: PromptOptions) -> Conditioning:
    """Unconditional models.  Raises ValueError for a prompt."""
    for prompt in prompts:
        if prompt:
            raise ValueError(f"{model.family.title} reads no prompt: got {prompt!r}, leave it out")
    return {}


def classes(model: CheckpointModel, prompts: Prompts, options: PromptOptions) -> Conditioning:
    """Embed class numbers as context (B,1,D).  Raises ValueError for anything else."""
    assert isinstance(model.text_encoder, ClassEmbedder)
    spec = model.text_encoder.spec
    most = spec.num_classes - 1 if spec.unconditional is None else spec.unconditional - 1

    def number(prompt: str | None) -> int:
        if not prompt and spec.unconditional is not None:
            return spec.unconditional
        if not prompt or not prompt.strip().isdecimal() or len(prompt) > 99 or int(prompt) > most:
            raise _not(model, prompt, f"a class, 0 to {most}", guided=spec.unconditional is not None)
        return int(prompt)

    numbers = torch.tensor([number(prompt) for prompt in prompts], device=model.device)
    return {"context": model.text_encoder(numbers)}


def layouts(model: CheckpointModel, prompts: Prompts, options: PromptOptions) -> Conditioning:
    """Embed JSON files of boxes (see read_boxes) as context (B,92,D).  Raises ValueError for other files."""
    assert isinstance(model.text_encoder, BERTTextEncoder)
    paths = [_file(model, prompt, 'a JSON file, [{"class": 12, "box": [x, y, x, y]}]') for prompt in prompts]
    rows = [box_tokens(read_boxes(path)) for path in paths]
    return {"context": model.text_encoder(torch.tensor(rows, device=model.device))}


def label_maps(model: CheckpointModel, prompts: Prompts, options: PromptOptions) -> Conditioning:
    """Encode images of labels as concat (B,C',h,w), for results of options.size.

    A map of another size is scaled by nearest neighbour.  Raises ValueError for images that are not label maps.
    """
    assert isinstance(model.text_encoder, LabelMapRescaler)
    num_labels, (height, width) = model.text_encoder.spec.num_labels, image_size(model, options)

    def labels_of(image: Image.Image) -> NDArray[np.int64]:
        if image.mode not in ("L", "P", "I;16", "I"):
            raise ValueError(f"is not a label map: its mode is {image.mode}, expected one channel (L or P) of labels")
        return np.asarray(image.resize((width, height), Image.Resampling.NEAREST)).astype(np.int64)

    maps = []
    for prompt in prompts:
        path = _file(model, prompt, f"an image of one channel, whose values are labels from 0 to {num_labels - 1}")
        labels = read_image(path, labels_of)
        if labels.max() >= num_labels or labels.min() < 0:
            raise ValueError(
                f"{path}: is not a label map: it holds the label {labels.max()}, expected 0 to {num_labels - 1}"
            )
        maps.append(torch.from_numpy(labels))
    return {"concat": model.text_encoder(torch.stack(maps).to(model.device))}


def embeddings(model: CheckpointModel, prompts: Prompts, options: PromptOptions) -> Conditioning:
    """Read files of normalised CLIP embeddings, (D,) or (T,D), as context (B,T,D); no prompt gives zeros.

    Embeddings are padded with zeros to options.num_chunks.  Raises ValueError for other files.
    """
    none = torch.zeros(1, model.family.unet.context_dim or 0, dtype=torch.float32, device="cpu")
    tokens = [read_embeddings(model, prompt) if prompt else none for prompt in prompts]
    rows = [F.pad(values, (0, 0, 0, max(0, options.num_chunks - len(values)))) for values in tokens]
    return {"context": torch.stack(rows).to(model.device)}


def read_embeddings(model: CheckpointModel, prompt: str) -> Tensor:
    """Read embeddings (T,D), float32, from a .npy file; D is the width of the context.  Raises ValueError."""
    width = model.family.unet.context_dim
    path = _file(model, prompt, f"a .npy file of CLIP embeddings, ({width},) or (T, {width})")
    values = _npy(path)
    values = values[None] if values.ndim == 1 else values
    if values.ndim != 2 or values.shape[1] != width:
        raise ValueError(f"{path}: holds floats of shape {tuple(values.shape)}, expected ({width},) or (T, {width})")
    return values


def read_image_embedding(path: Path) -> Tensor:
    """Read a single vector (1,D), float32, from a .npy or .safetensors file.  Raises ValueError for other files."""
    values = read_tensor(path)
    if values.ndim > 2 or values.shape[:-1] not in ((), (1,)):
        raise ValueError(f"{path}: holds a tensor of shape {tuple(values.shape)}, expected (1, D)")
    return values.reshape(1, -1)


def read_tensor(path: Path) -> Tensor:
    """Read a single tensor, as float32, from a .npy, .safetensors or torch file.  Raises ValueError, one line."""
    if path.suffix == ".npy":
        return _npy(path)
    file = open_checkpoint(path)
    if len(file.shapes) != 1:
        raise ValueError(f"{path}: holds {len(file.shapes)} tensors, expected one, the embedding")
    [name] = file.shapes
    return read_weight(file, name).float()


def _npy(path: Path) -> Tensor:
    """Read the floats of a .npy file as float32."""
    with open_file(path, MOST_BYTES) as file:
        try:
            values = np.load(file, allow_pickle=False)
        except Exception as error:
            raise ValueError(f"{path}: is not a .npy file of numbers, or is truncated") from error
    if not isinstance(values, np.ndarray) or values.dtype.kind != "f":
        raise ValueError(f"{path}: holds {getattr(values, 'dtype', 'several arrays')}, expected floats")
    return torch.from_numpy(values.astype(np.float32))


def read_image_statistics(path: Path) -> Tensor:
    """Read mean and standard deviation of image embeddings, (2,D) float32: karlo's .th, or diffusers' `mean` and `std`.

    Raises ValueError for other files.
    """
    file = open_checkpoint(path)
    names = ("mean", "std") if "mean" in file.shapes else ("0", "1")  # karlo's two have no names
    sizes = {math.prod(file.shapes.get(name, ())) for name in names}
    if not file.shapes.keys() >= set(names) or len(sizes) > 1:
        raise ValueError(f"{path}: holds no mean and standard deviation of embeddings")
    return torch.stack([read_weight(file, name).float().reshape(-1) for name in names])


def _file(model: CheckpointModel, prompt: str | None, wanted: str) -> Path:
    if not prompt:
        raise _not(model, prompt, wanted, guided=False)
    path = Path(os.path.expanduser(prompt))
    if not path.is_file():
        raise ValueError(f"{os.fspath(prompt)}: no such file: {model.family.title} reads {wanted}")
    return path


def _not(model: CheckpointModel, prompt: str | None, wanted: str, guided: bool) -> ValueError:
    unguided = "" if guided else ", without a negative prompt (leave out `scale`)"
    return ValueError(f"{model.family.title} reads {wanted}{unguided}: got {prompt or 'none'!r}")


def with_files(options: Any) -> Any:
    """Return ConditioningOptions with the contents of their files.  Raises ValueError, OSError for other files."""
    read = {"image_embedding": read_image_embedding, "image_statistics": read_image_statistics}
    names = [name for name in read if isinstance(getattr(options, name), (str, os.PathLike))]
    values = {name: read[name](Path(getattr(options, name))) for name in names}
    return dataclasses.replace(options, **values) if values else options


# ---- boxes ----------------------------------------------------------------------------------------------------------

NUM_TOKENS = 8192
MOST_OBJECTS = 30
SECTIONS = 90  # a corner is one of 90 x 90 places: the square root of NUM_TOKENS
NONE = NUM_TOKENS - 1  # stands in for a missing object


class LabelledBox(NamedTuple):
    """An object: its class token, and its corners in [0,1], the origin being the upper left of the image."""

    label: int
    left: float
    top: float
    right: float
    bottom: float


def box_tokens(boxes: Sequence[LabelledBox]) -> list[int]:
    """Convert up to 30 boxes to 92 token ids in [0,8192), for an image that is not cropped.

    An object has three, its class, its upper left and its lower right corner; at the end are the corners of the crop.
    Raises ValueError for more boxes, labels that are not tokens, and corners outside [0,1] or in the wrong order.
    Source: taming-transformers' conditional_builder/objects_bbox.py, from which latent diffusion's layout model
    learned.
    """
    if len(boxes) > MOST_OBJECTS:
        raise ValueError(f"got {len(boxes)} boxes, expected {MOST_OBJECTS} or fewer")

    def place(x: float, y: float) -> int:
        return round(y * (SECTIONS - 1)) * SECTIONS + round(x * (SECTIONS - 1))

    ids: list[int] = []
    for label, left, top, right, bottom in boxes:
        if not 0 <= label < NONE:
            raise ValueError(f"got the class {label} of a box, expected 0 to {NONE - 1}")
        if not (0 <= left < right <= 1 and 0 <= top < bottom <= 1):
            corners = [left, top, right, bottom]
            raise ValueError(f"got the box {corners}, expected left < right and top < bottom in 0 to 1")
        ids += [label, place(left, top), place(right, bottom)]
    return [*ids, *[NONE] * (3 * (MOST_OBJECTS - len(boxes))), place(0, 0), place(1, 1)]


def read_boxes(path: str | os.PathLike[str]) -> list[LabelledBox]:
    """Read the boxes of a JSON file, [{"class": 12, "box": [left, top, right, bottom]}, ...].

    Raises ValueError, one line, for any other file.
    """
    try:
        entries = json.loads(read_text(path, 2**20))
        return [LabelledBox(int(entry["class"]), *map(float, entry["box"])) for entry in entries]
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError) as error:
        wanted = '[{"class": 12, "box": [left, top, right, bottom]}, ...]'
        raise ValueError(f"{os.fspath(path)}: is not a list of boxes ({error}), expected {wanted}") from error
