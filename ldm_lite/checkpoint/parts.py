"""Networks loaded on their own: an autoencoder, an ESRGAN upscaler, or a T5 text encoder."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from ldm_lite.checkpoint.diffusers_folder import open_source
from ldm_lite.checkpoint.reader import Component, errors_of, join, load_weights, on_meta, open_checkpoint, split
from ldm_lite.cli.options import RuntimeOptions
from ldm_lite.core.vae import VAESpec
from ldm_lite.models.rrdb import RRDBNet, RRDBSpec
from ldm_lite.models.t5 import T5Encoder, T5Spec
from ldm_lite.models.taesd import TAESDSpec
from ldm_lite.models.vae_vq import VQSpec
from ldm_lite.runtime.precision import pick_device, pick_dtype
from ldm_lite.runtime.setup import prepare
from ldm_lite.zoo.networks import Autoencoder, build, infer_vae


def load_autoencoder(
    source: str | os.PathLike[str] | None = None,
    *,
    device: str | torch.device | None = None,
    dtype: str | torch.dtype | None = None,
) -> Autoencoder:
    """Load the autoencoder of a checkpoint, or from an autoencoder's own file: KL, VQ or TAESD.

    Raises FileNotFoundError or ValueError, one line that says what to do.
    """
    torch_device, component = pick_device(device), open_autoencoder(source)
    spec = autoencoder_spec(component)
    with errors_of(component.checkpoint.path), on_meta():
        network: Any = build(spec)
    load_weights(network, component, "vae", torch_device, pick_dtype(dtype, torch_device))
    # The matmul precision is set per process: leave it alone.
    prepare({"vae": network}, RuntimeOptions(matmul_precision=torch.get_float32_matmul_precision()), torch_device)
    return network


def open_autoencoder(source: str | os.PathLike[str] | None) -> Component:
    """Open an autoencoder's weights.  Raises as load_autoencoder does."""
    checkpoint = open_source(source)
    components = split(checkpoint)
    if "vae" not in components:
        raise ValueError(f"{checkpoint.path}: holds no autoencoder, only {', '.join(components)}")
    return components["vae"]


def autoencoder_spec(component: Component) -> VAESpec | VQSpec | TAESDSpec:
    """Return an autoencoder's spec, from its shapes.  Raises ValueError if they make no sense."""
    with errors_of(f"{component.checkpoint.path}: holds an unknown kind of autoencoder"):
        return infer_vae(component.shapes)


def load_upscaler(
    source: str | os.PathLike[str],
    *,
    device: str | torch.device | None = None,
    dtype: str | torch.dtype | None = None,
) -> RRDBNet:
    """Load an ESRGAN network from its file.  Raises FileNotFoundError or ValueError, one line that says what to do."""
    torch_device, checkpoint = pick_device(device), open_source(source)
    component = split(checkpoint).get("upscaler")
    if component is None:
        raise ValueError(f"{checkpoint.path}: is no ESRGAN upscaler, wanted RealESRGAN_x4plus.pth or one of its kind")
    with errors_of(checkpoint.path), on_meta():
        network = RRDBNet(RRDBSpec.from_shapes(component.shapes))
    load_weights(network, component, "upscaler", torch_device, pick_dtype(dtype, torch_device))
    network.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return network


def is_upscaler(source: object) -> bool:
    """Whether a source is a file of an ESRGAN network.  Raises as load_upscaler does for one that cannot be opened."""
    return isinstance(source, (str, os.PathLike)) and "upscaler" in split(open_source(source))


def load_t5(paths: Sequence[Path], device: torch.device, dtype: torch.dtype) -> T5Encoder:
    """Load a T5 v1.1 encoder from one or several files.  Raises ValueError if they do not hold one."""
    checkpoint = join([open_checkpoint(path) for path in paths])
    probe = "encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
    if not {probe, "shared.weight"} <= checkpoint.shapes.keys():
        raise ValueError(f"{paths[0]}: holds no T5 encoder; one in several files needs all of them")
    component = split(checkpoint)["text_encoder"]
    with errors_of(checkpoint.path), on_meta():
        encoder = T5Encoder(T5Spec.from_shapes(component.shapes))
    load_weights(encoder, component, "T5", device, dtype)
    return encoder
