"""What every contender is given to do: a section of the work at a batch size, the same inputs for all.

step is a guided denoising step (UNet on the doubled batch, guidance, update), decode the autoencoder's decoder, text
the text encoder, image all of it: prompts to uint8 pixels, as often as n_iter says.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, ParamSpec, Protocol, TypeVar

import torch
from torch import Tensor

from ldm_lite import generate
from ldm_lite.bench.measure import flops
from ldm_lite.checkpoint.reader import on_meta
from ldm_lite.conditioning.prompts import encode_prompts
from ldm_lite.diffusion.guidance import Conditioning, Kept, classifier_free
from ldm_lite.diffusion.names import make_plan
from ldm_lite.diffusion.plan import H, Plan, X
from ldm_lite.diffusion.schedule import Schedule
from ldm_lite.image import to_array
from ldm_lite.models.clip import CLIPTextSpec
from ldm_lite.pipeline import Pipeline
from ldm_lite.text.tokenizer import CLIPTokenizer
from ldm_lite.zoo.families import Family
from ldm_lite.zoo.networks import build

P = ParamSpec("P")
T = TypeVar("T")

SECTIONS = {"step": "UNet step, guided", "decode": "VAE decode", "text": "text encoder", "image": "prompt to pixels"}
# What a whole image may be made from, by task: sections in place of "image".
WHOLE = {"txt2img": "image", "img2img": "img2img", "inpaint": "inpaint"}
STRENGTH = 0.75  # of img2img
TRAIN = "train"  # a section of its own: see training.py
TITLES = SECTIONS | {"img2img": "picture to picture", "inpaint": "half a picture", TRAIN: "training step of the UNet"}
CHECK_SCALE = 0.5  # guidance for comparisons: the mean of both halves, in which no error is amplified


@dataclass(frozen=True)
class Setting:
    """The work, but for the batch size."""

    height: int  # pixels
    width: int
    prompt: str
    sampler: str
    steps: int
    n_iter: int
    scale: float
    seed: int


@dataclass(frozen=True)
class Cell:
    """One table of the report: a section at a precision and a batch size."""

    section: str
    dtype: str
    batch: int


class Inputs(NamedTuple):
    """What a batch B is made from, on the CPU in float32: the same in every process and framework."""

    noise: Tensor  # (B,C,h,w)
    context: Tensor  # (B,T,D)
    uncond: Tensor  # (B,T,D)
    ids: Tensor  # (B,T) tokens of the prompt
    empty: Tensor  # (B,T) tokens of no prompt
    picture: Tensor  # (B,3,H,W) in [-1,1]


class Job(NamedTuple):
    """Work that can be done and compared."""

    run: Callable[[int], object]  # does it so many times
    check: Callable[[], Tensor]  # does it once -> what it made, to be compared


class Jobs(Protocol):
    """A framework that can do every section."""

    def job(self, section: str, batch: int) -> Job:
        """The work of a section, with its inputs in place."""


def inputs(family: Family, setting: Setting, batch: int) -> Inputs:
    """The inputs of a batch, from the setting's seed alone.  Raises ValueError for a model that reads no CLIP text."""
    distilled = family.unet.guidance_dim is not None
    if family.conditioner != "clip" or distilled or not isinstance(family.text, CLIPTextSpec):
        raise ValueError(f"{family.title} is not measured yet: take a Stable Diffusion 1.x model")
    factor = family.vae.factor
    shape = (family.unet.in_channels, setting.height // factor, setting.width // factor)
    assert family.unet.context_dim is not None
    generator = torch.Generator().manual_seed(setting.seed)
    context, uncond = torch.randn(2, batch, family.text.length, family.unet.context_dim, generator=generator)
    tokenizer = CLIPTokenizer(family.text.length)
    picture = torch.rand(batch, 3, setting.height, setting.width, generator=generator) * 2 - 1
    noise = generate.SeededNoise([setting.seed + k for k in range(batch)], shape)()
    return Inputs(noise, context, uncond, tokenizer([setting.prompt] * batch), tokenizer([""] * batch), picture)


class Work(NamedTuple):
    """How much a cell is."""

    flops: int  # of one call
    items: int  # that it makes: steps of the whole batch, or images


def work(family: Family, setting: Setting, cell: Cell) -> Work:
    """How much a call of a cell is."""
    flops = _flops_of_one(family, setting)
    items = 1 if cell.section == "step" else cell.batch * (setting.n_iter if cell.section in WHOLE.values() else 1)
    return Work(cell.batch * flops[cell.section], items)


@functools.cache
def _flops_of_one(family: Family, setting: Setting) -> dict[str, int]:
    """By section, at a batch size of one."""
    given = inputs(family, setting, 1)
    with on_meta():
        networks: dict[str, Any] = {role: build(spec) for role, spec in family.networks.items()}
    x, context, ids = (each.to("meta") for each in (given.noise, given.context, given.ids))
    step = 2 * flops(lambda: networks["unet"](x, torch.empty(1, device="meta"), context))
    decode, text = flops(lambda: networks["vae"].decode(x)), flops(lambda: networks["text_encoder"](ids))
    schedule = Schedule.from_betas(family.noise.betas, family.prediction)
    num_calls = len(make_plan(setting.sampler, schedule, setting.steps).t)
    image = setting.n_iter * (num_calls * step + decode + 2 * text)
    encode = flops(lambda: networks["vae"].encode(given.picture.to("meta")))
    skipped = (setting.steps - _strong(setting.steps)) * step
    return {
        "step": step,
        "decode": decode,
        "text": text,
        "image": image,
        "img2img": image + setting.n_iter * (encode - skipped),
        "inpaint": image + setting.n_iter * encode,
        TRAIN: 3 * step // 2,
    }


def _strong(steps: int) -> int:
    """The steps that img2img runs."""
    return max(1, round(STRENGTH * steps))


class Ours:
    """Every section by ldm_lite itself: what the commands run."""

    def __init__(self, pipe: Pipeline, setting: Setting, autocast: torch.dtype | None) -> None:
        """autocast is the dtype that torch.autocast is to compute in, None for none."""
        self.pipe, self.setting = pipe, setting
        self._cast = functools.partial(torch.autocast, pipe.device.type, autocast, enabled=autocast is not None)

    def job(self, section: str, batch: int) -> Job:
        """The work of a section, with its inputs in place."""
        given = inputs(self.pipe.family, self.setting, batch)
        run, check = getattr(self, f"_{section}")(given)
        return Job(self._inside(run), self._inside(check))

    def _inside(self, work: Callable[P, T]) -> Callable[P, T]:
        def inside(*args: P.args, **kwargs: P.kwargs) -> T:
            with torch.no_grad(), self._cast():
                return work(*args, **kwargs)

        return inside

    def _step(self, given: Inputs) -> Job:
        pipe = self.pipe
        cond, uncond = (Conditioning(context.to(pipe.device)) for context in (given.context, given.uncond))

        def steps(count: int, scale: float) -> tuple[Plan, Tensor]:
            plan = make_plan("ddim", pipe.schedule, count, spacing="trailing")
            latents = generate.denoise(pipe, given.noise, classifier_free(cond, uncond, scale), plan)
            return plan, latents

        def check() -> Tensor:
            plan, latents = steps(1, CHECK_SCALE)
            if getattr(pipe.step, "failed", False):
                raise ValueError("could not be compiled")
            x = given.noise.to(latents) * plan.initial
            return (latents - float(plan.mix[0, 0] @ X) * x) / float(plan.mix[0, 0] @ H)  # the guided prediction

        return Job(lambda calls: steps(calls, self.setting.scale), check)

    def _decode(self, given: Inputs) -> Job:
        latents = given.noise.to(self.pipe.device) * self.pipe.family.scale_factor

        def decode() -> Tensor:
            return torch.stack(list(generate.decode(self.pipe, latents)))

        return Job(lambda calls: [decode() for _ in range(calls)], decode)

    def _text(self, given: Inputs) -> Job:
        ids, encoder = given.ids.to(self.pipe.device), self.pipe.text_encoder
        assert encoder is not None
        return Job(lambda calls: [encoder(ids) for _ in range(calls)], lambda: encoder(ids))

    def _image(self, given: Inputs) -> Job:
        return self._whole(given, make_plan(self.setting.sampler, self.pipe.schedule, self.setting.steps))

    def _img2img(self, given: Inputs) -> Job:
        steps = self.setting.steps
        plan = make_plan(self.setting.sampler, self.pipe.schedule, steps, last=_strong(steps))
        return self._whole(given, plan, picture=True)

    def _inpaint(self, given: Inputs) -> Job:
        plan = make_plan(self.setting.sampler, self.pipe.schedule, self.setting.steps)
        return self._whole(given, plan, picture=True, masked=True)

    def _whole(self, given: Inputs, plan: Plan, picture: bool = False, masked: bool = False) -> Job:
        """From prompts, and a picture of noise whose left half is to stay, to uint8 pixels."""
        pipe, setting, batch = self.pipe, self.setting, len(given.noise)
        mask = torch.zeros(1, 1, *given.noise.shape[2:], device=pipe.device)
        mask[..., mask.shape[3] // 2 :] = 1

        def images() -> Tensor:
            for repeat in range(setting.n_iter):
                cond, uncond = (encode_prompts(pipe, [text] * batch) for text in (setting.prompt, ""))
                seeds = [setting.seed + repeat * batch + k for k in range(batch)]
                x, kept = generate.SeededNoise(seeds, pipe.latent_shape(setting.height, setting.width))(), None
                if picture:
                    init, _ = generate.encode(pipe, given.picture)
                    a, s = (float(value) for value in plan.level[0])
                    x = (a * init + s * x.to(init)) / plan.initial
                    kept = Kept(init, mask) if masked else None
                branches = classifier_free(cond, uncond, setting.scale)
                latents = generate.denoise(pipe, x, branches, plan, kept=kept)
                pixels = list(generate.decode(pipe, latents))
                arrays = [to_array(each) for each in pixels]
            assert len(arrays) == batch
            return torch.stack(pixels)

        return Job(lambda calls: [images() for _ in range(calls)], images)
