"""Compile ahead of time: `python -m ldm_lite.export --out unet.pt2` writes the UNet as a package for given sizes.

`ldm_lite.load(..., tuning={"compiled": "unet.pt2"})` and `--compiled unet.pt2` then run it without compiling anything.
The package has no weights: it runs on those of the checkpoint that is loaded.
"""

import logging
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import ldm_lite
from ldm_lite.cli import console, flags
from ldm_lite.cli.options import LoadOptions, Ranged, numbers, option

if TYPE_CHECKING:
    from ldm_lite.checkpoint.model import Pipeline
    from ldm_lite.runtime.aot import Inputs

log = logging.getLogger("ldm_lite")


@dataclass(frozen=True)
class Options(Ranged):
    """For what to compile."""

    sizes: str | None = option(None, "comma-separated sizes in pixels, WIDTHxHEIGHT (default: the model's)")
    batches: str = option("1", "comma-separated numbers of images at a time")
    branches: int = option(
        2, "runs of the UNet in a step: 2 with guidance, 1 without, 3 for InstructPix2Pix", within=(1, 3)
    )
    chunks: int = option(1, "chunks of 77 tokens that prompts have", within=(1, 1000))
    out: str = option("unet.pt2", "the package")
    debug: bool = option(False, "show the traceback of an error")


def export(pipe: "Pipeline", options: Options) -> "list[Inputs]":
    """Write the package -> the inputs that it was compiled with.

    Raises ValueError for sizes that the model cannot make, and if this machine cannot compile.
    """
    from ldm_lite.runtime import aot

    batches = numbers(options.batches, "--batches")
    examples = [
        _example(pipe, width, height, batch * options.branches, options.chunks)
        for width, height in _sizes(pipe, options.sizes)
        for batch in batches
    ]
    aot.export(pipe.unet, examples, Path(os.path.expanduser(options.out)))
    return examples


def _sizes(pipe: "Pipeline", text: str | None) -> list[tuple[int, int]]:
    """Widths and heights in pixels.  Raises ValueError for what is none."""
    if text is None:
        return [(pipe.family.resolution, pipe.family.resolution)]
    try:
        return [(int(width), int(height)) for width, height in (size.split("x") for size in text.split(","))]
    except ValueError as error:
        raise ValueError(f"got --sizes {text}, wanted WIDTHxHEIGHT with commas between, as 512x512,768x512") from error


def _example(pipe: "Pipeline", width: int, height: int, batch: int, chunks: int) -> "Inputs":
    """Inputs of the UNet as the denoising loop gives them: latents, timesteps, context, vectors or classes."""
    import torch

    from ldm_lite.conditioning.prompts import Reading, encode_prompts, guided

    _, h, w = pipe.latent_shape(height, width)
    text = guided(pipe, encode_prompts(pipe, [""] * batch, Reading(num_chunks=chunks)), None, 1.0).conditionings[0]
    x = torch.randn(batch, pipe.family.unet.in_channels, h, w, device=pipe.device, dtype=pipe.dtype)
    t = torch.full((batch,), 500.0, device=pipe.device)
    return (x, t, text.context) if text.y is None else (x, t, text.context, text.y)


def run(options: Options, load: LoadOptions) -> None:
    """Load, compile, and compare the package with the network it was made from."""
    import copy

    import torch

    from ldm_lite.runtime import aot

    path = Path(os.path.expanduser(options.out))
    if path.is_dir() or not os.access(path.parent, os.W_OK):  # known before the minutes of compiling
        raise ValueError(f"cannot write to {path}: take another --out, a file in a folder that is there")
    pipe = ldm_lite.load(**load.arguments())
    start = time.perf_counter()
    examples = export(pipe, options)
    log.info("compiled in %.0f s", time.perf_counter() - start)
    unet = copy.copy(pipe.unet)
    aot.use(unet, path)
    for inputs in examples:
        with torch.no_grad():
            ours, plain = unet(*inputs).float(), pipe.unet(*inputs).float()
        error = float((ours - plain).norm() / plain.norm())
        shape = "x".join(map(str, inputs[0].shape if inputs[0] is not None else ()))
        print(f"latents {shape}: differs from the network by {error:.1e}, relative")
    print(f"{path}  {path.stat().st_size / 2**20:.1f} MiB")


def main(argv: Sequence[str] | None = None) -> int:
    """The command line -> its exit status."""
    (options, load), _ = flags.parse(argv, "export", __doc__.splitlines()[0], (Options, LoadOptions))
    return console.run(lambda: run(options, load), (options,))


if __name__ == "__main__":
    sys.exit(main())
