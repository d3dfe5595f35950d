"""The options of all tasks, for Python and for the command line; features add their own."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ldm_lite.core.declare import FINITE, check_values, option
from ldm_lite.core.plan import Plan


@dataclass(frozen=True, eq=False)
class Options:
    """What to make, and how; None is the default of the model's family.  Raises ValueError for what is always wrong."""

    prompt: str | Sequence[str] = option("", "what to make, or a list of it")
    negative_prompt: str = option("", "what to avoid")
    sampler: str | None = option(None, "a sampler, perhaps with its spacing: ddim, euler_a, 'DPM++ 2M Karras', ...")
    spacing: str | None = option(None, "timestep spacing: leading, trailing, linspace, karras, ...")
    steps: int | None = option(None, "denoising steps, 1 to 1000", within=(1, 1000))
    eta: float | None = option(None, "noise added at every step, 0 to 1, for samplers that have it", within=(0, 1))
    scale: float | None = option(None, "classifier-free guidance scale; 1 is none, and twice as fast", within=FINITE)
    seed: int | Sequence[int] = option(42, "seed of the first image, the next ones count up; or one for each image")
    batch_size: int = option(1, "images at a time; of a single prompt, so many are made", within=(1, 4096))
    width: int | None = option(None, "pixels, a multiple of 8", within=(1, 65536))
    height: int | None = option(None, "pixels, a multiple of 8", within=(1, 65536))
    image: Any = option(None, "image to start from")
    strength: float | None = option(
        None, "how much noise the image gets, 0 to 1 (default: 0.75; 1 with a mask)", within=(0, 1)
    )
    mask: Any = option(None, "white where the image is repainted")
    plan: Plan | None = option(None, "a table of your own, in place of sampler, spacing, steps and eta")

    def __post_init__(self) -> None:
        check_values(self)
        replaced = (self.sampler, self.spacing, self.steps, self.eta)
        if self.plan is not None and any(value is not None for value in replaced):
            raise ValueError("got a `plan`, which replaces sampler, spacing, steps and eta: leave these out")
        if self.image is None and (self.mask is not None or self.strength is not None):
            raise ValueError(f"got a {'strength' if self.mask is None else 'mask'}, but no image to repaint")
        if not self.prompts:
            raise ValueError("got an empty list of prompts, expected one or more")

    @property
    def prompts(self) -> list[str]:
        """One prompt for each image."""
        prompt: Any = self.prompt
        return list(prompt) if np.ndim(prompt) else [prompt] * self.batch_size

    @property
    def seeds(self) -> list[int]:
        """One seed for each image.  Raises ValueError for a list of another length."""
        seeds: Any = self.seed
        num_images = len(self.prompts)
        if not np.ndim(seeds):
            seeds = [seeds + number for number in range(num_images)]
        if len(seeds) != num_images:
            raise ValueError(f"got {len(seeds)} seeds for {num_images} images, expected one, or one for each")
        return [int(seed) for seed in seeds]
