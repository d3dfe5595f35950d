"""Pictures four times as large, by a model that reads them beside the latents: what `upscale` and `cascade` share.

Stable Diffusion's x4 upscaler reads a prompt too and is told how noisy the picture is; latent diffusion's
super-resolution model (bsr_sr) reads the picture alone.
"""

import dataclasses
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from ldm_lite.tasks.job import JobOptions, OnStep, Result, read_prompts, sampler_of

if TYPE_CHECKING:
    from torch import Tensor

    from ldm_lite.checkpoint.model import Pipeline
    from ldm_lite.tasks.batching import Canvas

MOST_NOISE = 350  # the upscaler was trained up to there
OWN_STREAM = 2**63  # added to a picture's seed: the noise on it has a generator of its own


def enlarge(
    pipe: "Pipeline",
    options: JobOptions,
    pictures: "Iterable[tuple[str | None, Tensor]]",
    *,
    noise_level: int,
    tile: int,
    on_step: OnStep | None = None,
) -> Iterator[Result]:
    """Each picture, a name and pixels (3,H,W) in [-1,1], four times as large, as soon as it is decoded.

    Picture k has the seed options.seed + k, whose noise it gets noise_level of, 0 to MOST_NOISE; those larger than
    `tile` go tile by tile.  Raises ValueError for a tile below 8.
    """
    from ldm_lite.diffusion.names import make_plan
    from ldm_lite.runtime.tiled_unet import TiledUNet
    from ldm_lite.tasks.batching import Setup, paint

    one = dataclasses.replace(options, prompt=options.prompt or "", n_samples=1, n_iter=1)
    tiled: Any = TiledUNet(pipe.unet, tile)
    family = pipe.family
    steps = family.steps if options.steps is None else options.steps
    sampler = sampler_of(pipe, options)
    plan = make_plan(sampler, pipe.schedule, steps, eta=options.eta, churn=options.churn, spacing=options.spacing)
    setup = Setup(read_prompts(one, pipe), plan, scale=family.scale if options.scale is None else options.scale)
    # One canvas for each picture: the noise on it is of the picture's seed, too.
    canvases = (
        _canvas(pipe, name, pixels, noise_level, options.seed + number)
        for number, (name, pixels) in enumerate(pictures)
    )
    return paint(dataclasses.replace(pipe, unet=tiled), one, setup, canvases, on_step=on_step)


def _canvas(pipe: "Pipeline", name: str | None, pixels: "Tensor", noise_level: int, seed: int) -> "Canvas":
    import torch

    from ldm_lite.tasks.batching import Canvas

    level = None
    if pipe.family.unet.num_classes is not None:  # it is told how noisy the picture is
        generator = torch.Generator("cpu").manual_seed((seed + OWN_STREAM) % 2**64)
        noise = torch.randn(pixels.shape, generator=generator, dtype=torch.float32, device="cpu")
        pixels = noised(pipe, pixels, noise_level, noise)
        level = torch.tensor([noise_level], device="cpu")
    return Canvas(
        latent_shape=(pipe.vae.spec.embed_dim, *pixels.shape[1:]),
        concat=pixels[None].to(pipe.device),
        y=level,
        settings={"Init image": name, "Noise level": None if level is None else noise_level},
    )


def noised(pipe: "Pipeline", pixels: "Tensor", level: int, noise: "Tensor") -> "Tensor":
    """Pixels in [-1,1] with as much of the noise as belongs to a level: pixels have the latents' schedule."""
    _, a, s = pipe.schedule.at(level)
    return a * pixels + s * noise
