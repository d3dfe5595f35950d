"""Compile the UNet ahead of time, into a package for given sizes."""

import copy
import logging
import os
import time
from pathlib import Path

import torch

from ldm_lite.checkpoint.loading import load_model
from ldm_lite.checkpoint.model import CheckpointModel
from ldm_lite.cli.command_options import ExportOptions
from ldm_lite.cli.options import LoadOptions
from ldm_lite.conditioning.prompts import PromptOptions, encode_prompts, guided
from ldm_lite.runtime import aot
from ldm_lite.runtime.aot import ExportInputs

log = logging.getLogger("ldm_lite")


def _example(model: CheckpointModel, width: int, height: int, batch: int, chunks: int) -> ExportInputs:
    """Inputs of the UNet as the denoising loop gives them: latents, timesteps, context, vectors or classes."""
    channels, h, w = model.latent_shape(height, width)
    prompts = encode_prompts(model, [""] * batch, PromptOptions(num_chunks=chunks))
    text = guided(model, prompts, None, 1.0).branches[0].conditioning
    whole = torch.randn(batch, model.family.unet.in_channels, h, w, device=model.device, dtype=model.dtype)
    x, concat = whole.tensor_split([channels], dim=1)
    t = torch.full((batch,), 500.0, device=model.device)
    inputs = (x, t, text.get("context"), text.get("y"), concat if concat.shape[1] else None)
    return inputs[: 1 + max(i for i, part in enumerate(inputs) if part is not None)]


def export_unet(options: ExportOptions, load: LoadOptions) -> None:
    """Load, compile, and compare the package with the network it was made from.

    Raises ValueError for sizes that the model cannot generate, and if this machine cannot compile.
    """
    path = Path(os.path.expanduser(options.out))
    if path.is_dir() or not os.access(path.parent, os.W_OK):  # checked before minutes of compiling
        raise ValueError(f"cannot write to {path}: use another `out`, a file in a folder that exists")
    if path.exists() and path.suffix != ".pt2":
        raise ValueError(f"{path}: exists, and is not a package of ldm_lite.export: use an `out` that ends in .pt2")
    listed = [] if options.sizes is None else options.sizes.split(",")
    try:
        told = [(int(width), int(height)) for width, height in (size.split("x") for size in listed)]
    except ValueError as error:
        raise ValueError(
            f"got `sizes` {options.sizes}, expected WIDTHxHEIGHT separated by commas, as 512x512,768x512"
        ) from error

    def check(model: CheckpointModel) -> None:
        for width, height in told:
            model.latent_shape(height, width)

    model = load_model(load, CheckpointModel, check)
    start = time.perf_counter()
    sizes = told or [(model.family.resolution, model.family.resolution)]
    rows = [batch * options.branches for batch in options.batches]
    examples = [_example(model, *size, batch, options.chunks) for size in sizes for batch in rows]
    aot.export(model.unet, examples, path)
    log.info("compiled in %.0f s", time.perf_counter() - start)
    unet = copy.copy(model.unet)
    aot.use(unet, path)
    for inputs in examples:
        with torch.no_grad():
            ours, plain = unet(*inputs).float(), model.unet(*inputs).float()
        difference = float((ours - plain).norm() / plain.norm())
        shape = "x".join(map(str, inputs[0].shape if inputs[0] is not None else ()))
        print(f"latents {shape}: differs from the network by {difference:.1e}, relative")
    print(f"{path}  {path.stat().st_size / 2**20:.1f} MiB")
