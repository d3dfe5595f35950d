"""The work of every backend: a section at a batch size, with the same inputs for all.

Sections: step is a guided denoising step (UNet on the doubled batch, guidance, update), decode the autoencoder's
decoder, text the text encoder, image everything from prompts to uint8 pixels, n_iter times.
"""

import functools
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from ldm_lite.bench.measure import flops
from ldm_lite.checkpoint.reader import on_meta
from ldm_lite.diffusion.names import make_plan
from ldm_lite.diffusion.noise import SeededNoise
from ldm_lite.models.clip import CLIPTextSpec
from ldm_lite.text.tokenizer import CLIPTokenizer
from ldm_lite.zoo.families import Family
from ldm_lite.zoo.networks import build

SECTIONS = {"step": "UNet step, guided", "decode": "VAE decode", "text": "text encoder", "image": "prompt to pixels"}
IMAGE_SECTIONS = {"txt2img": "image", "img2img": "img2img", "inpaint": "inpaint"}  # by task, instead of "image"
STRENGTH = 0.75  # of img2img
TRAIN = "train"  # see training.py
TITLES = SECTIONS | {"img2img": "image to image", "inpaint": "inpainting half", TRAIN: "training step of the UNet"}
CHECK_SCALE = 0.5  # guidance scale for comparisons: the mean of both predictions, which amplifies no error


@dataclass(frozen=True)
class Setting:
    """The work, apart from the batch size."""

    height: int  # pixels
    width: int
    prompt: str
    sampler: str
    steps: int
    n_iter: int
    scale: float
    seed: int


@dataclass(frozen=True)
class Target:
    """The model to measure, where it runs, and its work."""

    size: str  # "bundled" or a name of FAMILIES
    ckpt: str | None  # a file, instead of size
    device: str
    threads: int | None  # of the CPU; None leaves them to torch
    setting: Setting

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "Target":
        """Make a Target from the result of dataclasses.asdict."""
        return cls(**{**values, "setting": Setting(**values["setting"])})


@dataclass(frozen=True)
class Cell:
    """One table of the report: a section at a precision and a batch size."""

    section: str
    dtype: str
    batch: int

    @property
    def is_image(self) -> bool:
        """Whether it makes whole images."""
        return self.section in IMAGE_SECTIONS.values()


class Inputs(NamedTuple):
    """The inputs of a batch B, float32 on the CPU, the same in every process and framework."""

    noise: Tensor  # (B,C,h,w)
    context: Tensor  # (B,T,D)
    uncond: Tensor  # (B,T,D)
    ids: Tensor  # (B,T) tokens of the prompt
    empty: Tensor  # (B,T) tokens of the empty prompt
    image: Tensor  # (B,3,H,W) in [-1,1]


class Job(ABC):
    """One backend's work in one cell, with its inputs in place."""

    @abstractmethod
    def check(self) -> Tensor:
        """Run the work once and return a result to compare."""

    def run(self, calls: int) -> None:
        """Run the work `calls` times."""
        for _ in range(calls):
            self.check()


class Workload(Protocol):
    """A framework, with its networks in one precision, that runs the sections."""

    def job(self, section: str, batch: int) -> Job:
        """Prepare a section's work."""


def inputs(family: Family, setting: Setting, batch: int) -> Inputs:
    """Make the inputs of a batch from the setting's seed.  Raises ValueError unless the model is like SD 1.x."""
    distilled = family.unet.guidance_dim is not None
    if family.conditioner != "clip" or distilled or not isinstance(family.text, CLIPTextSpec):
        raise ValueError(f"{family.title} cannot be benchmarked yet: take a Stable Diffusion 1.x model")
    factor = family.vae.factor
    shape = (family.unet.in_channels, setting.height // factor, setting.width // factor)
    assert family.unet.context_dim is not None
    generator = torch.Generator().manual_seed(setting.seed)
    context, uncond = torch.randn(2, batch, family.text.length, family.unet.context_dim, generator=generator)
    tokenizer = CLIPTokenizer(family.text.length)
    image = torch.rand(batch, 3, setting.height, setting.width, generator=generator) * 2 - 1
    noise = SeededNoise([setting.seed + k for k in range(batch)], shape)()
    return Inputs(noise, context, uncond, tokenizer([setting.prompt] * batch), tokenizer([""] * batch), image)


class Cost(NamedTuple):
    """Return the amount of work in one call of a cell."""

    flops: int
    items: int  # steps of the whole batch, or images


def cost(family: Family, setting: Setting, cell: Cell) -> Cost:
    """The amount of work in one call of a cell."""
    items = 1 if cell.section == "step" else cell.batch * (setting.n_iter if cell.is_image else 1)
    return Cost(cell.batch * _flops_at_batch_1(family, setting)[cell.section], items)


@functools.cache
def _flops_at_batch_1(family: Family, setting: Setting) -> dict[str, int]:
    given = inputs(family, setting, 1)
    with on_meta():
        networks: dict[str, Any] = {role: build(spec) for role, spec in family.networks.items()}
    x, context, ids = (each.to("meta") for each in (given.noise, given.context, given.ids))
    step = 2 * flops(lambda: networks["unet"](x, torch.empty(1, device="meta"), context))
    decode, text = flops(lambda: networks["vae"].decode(x)), flops(lambda: networks["text_encoder"](ids))
    schedule = family.noise.schedule(family.prediction)
    num_calls = len(make_plan(setting.sampler, schedule, setting.steps).t)
    image = setting.n_iter * (num_calls * step + decode + 2 * text)
    encode = flops(lambda: networks["vae"].encode(given.image.to("meta")))
    skipped = (setting.steps - img2img_steps(setting.steps)) * step
    return {
        "step": step,
        "decode": decode,
        "text": text,
        "image": image,
        "img2img": image + setting.n_iter * (encode - skipped),
        "inpaint": image + setting.n_iter * encode,
        TRAIN: 3 * step // 2,
    }


def img2img_steps(steps: int) -> int:
    """Return the number of steps that img2img runs."""
    return max(1, round(STRENGTH * steps))
