"""Networks loaded on their own: an autoencoder, an ESRGAN upscaler, or a T5 text encoder."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from ldm_lite.checkpoint.model import CheckpointModel
from ldm_lite.checkpoint.reader import (
    T5,
    errors_of,
    joined,
    load_weights,
    on_meta,
    open_checkpoint,
    open_source,
    parts_of,
    places_in,
)
from ldm_lite.cli.options import RuntimeOptions
from ldm_lite.core.files import Tensors, imported
from ldm_lite.core.networks import pick_device
from ldm_lite.runtime.precision import pick_dtype
from ldm_lite.runtime.setup import prepare_networks
from ldm_lite.zoo.families import infer_vae, with_vae
from ldm_lite.zoo.family import Autoencoder, Spec, build_network

if TYPE_CHECKING:
    from ldm_lite.models.rrdb import RRDBNet
    from ldm_lite.models.t5 import T5Encoder

M = TypeVar("M", bound=CheckpointModel)


def load_autoencoder(
    source: str | os.PathLike[str] | None = None,
    *,
    device: str | torch.device | None = None,
    dtype: str | torch.dtype | None = None,
) -> Autoencoder:
    """Load the autoencoder of a checkpoint, or from an autoencoder's own file: KL, VQ or TAESD.

    Raises FileNotFoundError or ValueError, one line that says what to do.
    """
    torch_device, (tensors, spec) = pick_device(device), open_autoencoder(source)
    network: Autoencoder = load_part(spec, tensors, "vae", torch_device, pick_dtype(dtype, torch_device))
    # The matmul precision is set per process: leave it alone.
    prepare_networks({"vae": network}, RuntimeOptions(), torch_device)
    return network


def with_autoencoder(model: M, source: str | os.PathLike[str]) -> M:
    """Return the model with another autoencoder, such as TAESD for previews.

    The networks are shared.  Raises FileNotFoundError, and ValueError if its latents are not the model's.
    """
    vae = load_autoencoder(source, device=model.device, dtype=model.dtype)
    return replace(model.with_networks(vae=vae), family=with_vae(model.family, vae.spec, os.fspath(source)))


def open_autoencoder(source: str | os.PathLike[str] | None) -> tuple[Tensors, Spec]:
    """Open an autoencoder's weights, and read its spec.  Raises as load_autoencoder does."""
    parts = parts_of(open_source(source))
    if "vae" not in parts:
        raise ValueError(f"{parts.file.path}: holds no autoencoder, only {', '.join(parts)}")
    return parts["vae"], autoencoder_spec(parts["vae"])


def autoencoder_spec(tensors: Tensors) -> Spec:
    """Return an autoencoder's spec, from its shapes.  Raises ValueError if they make no sense."""
    with errors_of(f"{tensors.path}: holds an unknown kind of autoencoder"):
        return infer_vae(tensors.shapes)


def load_upscaler(
    source: str | os.PathLike[str], *, device: str | torch.device | None = None, dtype: str | torch.dtype | None = None
) -> RRDBNet:
    """Load an ESRGAN network from its file.  Raises FileNotFoundError or ValueError, one line that says what to do."""
    torch_device, parts = pick_device(device), parts_of(open_source(source))
    tensors, path = parts.get("upscaler"), parts.file.path
    if tensors is None:
        raise ValueError(f"{path}: is not an ESRGAN upscaler, expected RealESRGAN_x4plus.pth or one of its kind")
    with errors_of(path):
        spec = imported("ldm_lite.models.rrdb:RRDBSpec").from_shapes(tensors.shapes)
    network = load_part(spec, tensors, "upscaler", torch_device, pick_dtype(dtype, torch_device))
    upscaler: RRDBNet = network.to(memory_format=torch.channels_last)
    return upscaler


def is_upscaler(source: object) -> bool:
    """Whether a source is a file of an ESRGAN network.  Raises as load_upscaler does for one that cannot be opened."""
    return isinstance(source, (str, os.PathLike)) and "upscaler" in parts_of(open_source(source))


def load_t5(paths: Sequence[Path], device: torch.device, dtype: torch.dtype) -> T5Encoder:
    """Load a T5 v1.1 encoder from one or several files.  Raises ValueError if they do not hold one."""
    files = [open_checkpoint(path) for path in paths]
    whole = joined(paths[0], places_in(files), files[0].metadata)
    if not {T5, "shared.weight"} <= whole.shapes.keys():
        raise ValueError(f"{paths[0]}: holds no T5 encoder; one in several files needs all of them")
    tensors = parts_of(whole)["text_encoder"]
    with errors_of(whole.path):
        spec = imported("ldm_lite.models.t5:T5Spec").from_shapes(tensors.shapes)
    encoder: T5Encoder = load_part(spec, tensors, "T5", device, dtype)
    return encoder


def load_part(spec: Spec, tensors: Tensors, title: str, device: torch.device, dtype: torch.dtype) -> Any:
    """Build the network of a spec, and fill it.  The title names it in errors.  Raises as load_weights does."""
    with errors_of(tensors.path), on_meta():
        network = build_network(spec)
    load_weights(network, tensors, title, device, dtype)
    return network
