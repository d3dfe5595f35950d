"""The options of all tasks, for Python and for the command line; features add their own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ldm_lite.core.plan import Plan


def option(default: Any, help: str) -> Any:
    """A field with a line of help for the command line."""
    return field(default=default, metadata={"help": help})


@dataclass(frozen=True, eq=False)
class Options:
    """What to make, and how.  None means the default of the model's family.

    Raises ValueError, one line, for values that are wrong whatever the model.
    """

    prompt: str | Sequence[str] = option("", "what to make, or a list of it")
    negative_prompt: str = option("", "what to avoid")
    sampler: str | None = option(None, "a sampler, perhaps with its spacing: ddim, euler_a, 'DPM++ 2M Karras', ...")
    spacing: str | None = option(None, "timestep spacing: leading, trailing, linspace, karras, ...")
    steps: int | None = option(None, "denoising steps, 1 to 1000")
    eta: float | None = option(None, "noise added at every step, 0 to 1, for samplers that have it")
    scale: float | None = option(None, "classifier-free guidance scale; 1 is none, and twice as fast")
    seed: int | Sequence[int] = option(42, "seed of the first image, the next ones count up; or one for each image")
    batch_size: int = option(1, "images at a time; of a single prompt, so many are made")
    width: int | None = option(None, "pixels, a multiple of 8")
    height: int | None = option(None, "pixels, a multiple of 8")
    image: Any = option(None, "image to start from")
    strength: float | None = option(None, "how much noise the image gets, 0 to 1 (default: 0.75; 1 with a mask)")
    mask: Any = option(None, "white where the image is repainted")
    plan: Plan | None = option(None, "a table of your own, in place of sampler, spacing, steps and eta")

    def __post_init__(self) -> None:
        if self.plan is not None and (self.sampler, self.spacing, self.steps, self.eta) != (None,) * 4:
            raise ValueError("got a `plan`, which replaces sampler, spacing, steps and eta: leave these out")
        if self.batch_size < 1:
            raise ValueError(f"got a batch size of {self.batch_size}, wanted 1 or more")
        if self.strength is not None and not 0 <= self.strength <= 1:
            raise ValueError(f"got strength {self.strength}, wanted 0 to 1")
        if self.mask is not None and self.image is None:
            raise ValueError("got a mask, but no image to repaint")
        if not isinstance(self.prompt, str) and not self.prompt:
            raise ValueError("got an empty list of prompts, wanted one or more")

    @property
    def prompts(self) -> list[str]:
        """One prompt for each image."""
        return [self.prompt] * self.batch_size if isinstance(self.prompt, str) else list(self.prompt)

    @property
    def seeds(self) -> list[int]:
        """One seed for each image.  Raises ValueError for a list of another length."""
        count = len(self.prompts)
        if isinstance(self.seed, int):
            return [self.seed + i for i in range(count)]
        if len(self.seed) != count:
            raise ValueError(f"got {len(self.seed)} seeds for {count} images, wanted one, or one for each")
        return list(self.seed)
