"""Model: the networks and noise schedule of one checkpoint, loaded."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor, nn

from ldm_lite.core.denoise import Conditioning, run_row
from ldm_lite.core.family import Family
from ldm_lite.core.image import MOST_PIXELS
from ldm_lite.core.layers import AttentionFn, shared_copy, use_attention
from ldm_lite.core.plan import Plan
from ldm_lite.core.schedule import Level, Schedule
from ldm_lite.core.words import unknown_words

log = logging.getLogger("ldm_lite")


@dataclass(frozen=True, eq=False)
class Model:
    """A loaded checkpoint, which threads may share.  Latents are in the UNet's scale: times family.scale_factor."""

    name: str  # of the file, without its extension
    family: Family = field(repr=False)
    schedule: Schedule = field(repr=False)
    networks: Mapping[str, Any] = field(repr=False)  # modules by kind
    run_row: Callable[..., Tensor] = field(default=run_row, repr=False)  # perhaps compiled

    @property
    def unet(self) -> Any:
        """The network that denoises."""
        return self.networks["unet"]

    @property
    def vae(self) -> Any:
        """The autoencoder."""
        return self.networks["vae"]

    @property
    def device(self) -> torch.device:
        """The device that the networks compute on."""
        return next(self.unet.parameters()).device

    def with_networks(self, **networks: nn.Module) -> Self:
        """Return the model with other networks, by kind: unet=, ...  layers.shared_copy makes one to change."""
        return replace(self, networks={**self.networks, **networks})

    def with_attention(self, attention: str | AttentionFn, where: str = "*") -> Self:
        """Return a model whose UNet attends by a function of q, k, v (B,H,N,D), in the layers that match `where`.

        "*attn1" are the self-attentions, "*attn2" those to the text.  The batch is that of denoise.Guided: with
        guidance the first half of B is the negative prompt's.  A fourth parameter named `place` has the layer, the
        size and the call: see layers.Place.  Weights are shared.
        """
        unet = shared_copy(self.unet)
        use_attention(unet, attention, where)
        return self.with_networks(unet=unet)

    def latent_shape(self, height: int, width: int) -> tuple[int, int, int]:
        """Return the latent shape (C,h,w) of an image.  Raises ValueError unless its sides are multiples of 8 px."""
        factor = self.vae.spec.factor
        fits = height > 0 and width > 0 and height % factor == 0 and width % factor == 0
        if not fits or height * width > MOST_PIXELS:
            expected = f"multiples of {factor}, at most {MOST_PIXELS} px"
            raise ValueError(f"got height {height} and width {width}, expected {expected}")
        return self.vae.spec.embed_dim, height // factor, width // factor

    def check_latents(self, latents: Tensor, name: str) -> None:
        """Raise ValueError unless this is a tensor (B,C,h,w) with as many channels as latents have."""
        channels = self.vae.spec.embed_dim
        if not isinstance(latents, Tensor):
            reason = f"of the type {type(latents).__name__}"
        elif latents.ndim != 4 or latents.shape[1] != channels:
            reason = f"of shape {tuple(latents.shape)}"
        else:
            return
        raise ValueError(f"got {name} {reason}, expected a tensor (B, {channels}, h, w)")

    def check_plan(self, plan: Plan) -> None:
        """Raise ValueError for a plan that was made for a network with another prediction."""
        if not isinstance(plan, Plan):
            raise ValueError(f"got {type(plan).__name__} as a plan, expected what pipe.plan() makes")
        levels = [Level(0, a, s) for a, s in plan.level]  # what x0 is does not depend on the timestep
        expected = [self.schedule.coefficients("x0", level) for level in levels]
        if not np.allclose(plan.x0_of_out, expected, equal_nan=True):
            which = f"{self.name}, which predicts {self.schedule.prediction}"
            raise ValueError(f"this plan is for another network: make one with the schedule of {which}")

    @torch.no_grad()
    def encode_prompt(self, prompt: str | Sequence[str]) -> Conditioning:
        """Return the UNet's inputs for one prompt or B: {"context": (B,T,D)}.  Words that do not fit are logged."""
        prompts: list[Any] = list(prompt) if np.ndim(prompt) else [prompt]
        if not prompts or not all(isinstance(text, str) for text in prompts):
            raise ValueError(f"got prompt={prompt!r}, expected a text, or a list of texts")
        for text in dict.fromkeys(prompts):
            if dropped := self.family.tokenizer.dropped(text):
                log.warning("the prompt is too long, dropped: %s", dropped[:100] + "..." * (len(dropped) > 100))
            if unknown := unknown_words(text, self.family.words):
                log.warning("%s %s", self.name, unknown)
        return self.family.condition(self, prompts)

    @torch.no_grad()
    def encode_pixels(self, pixels: Tensor) -> Tensor:
        """Encode pixels (B,3,H,W) in [-1,1] to the mean of their latents (B,C,h,w), float32 on the model's device.

        For a sample, as in training, take mean + deviation * noise of vae.encode, times family.scale_factor.
        """
        mean, _ = self.vae.encode(pixels.to(self.device, next(self.vae.parameters()).dtype))
        return mean.float() * self.family.scale_factor

    @torch.no_grad()
    def decode_pixels(self, latents: Tensor) -> Iterator[Tensor]:
        """Decode latents (B,C,h,w) to pixels (3,H,W) in [-1,1], float32 on the CPU, image by image.

        An autoencoder that overflows in half precision runs again in float32, with a warning: no black images.
        Raises ValueError for latents or pixels that are still not finite.
        """
        if not torch.isfinite(latents).all():
            raise ValueError(
                "the latents are not finite: the weights are damaged, or too coarse (try fp32), or it is your code"
            )
        vae = self.vae
        for z in latents.to(self.device) / self.family.scale_factor:
            dtype = next(vae.parameters()).dtype
            pixels = vae.decode(z[None].to(dtype))[0].float()
            if not torch.isfinite(pixels).all() and dtype != torch.float32:
                log.warning("the autoencoder overflows in %s: decoding in float32", str(dtype).removeprefix("torch."))
                vae = copy.deepcopy(vae).float()  # a copy: other threads may be decoding
                pixels = vae.decode(z[None].float())[0]
            if not torch.isfinite(pixels).all():
                raise ValueError("the image is not finite: the weights of the autoencoder are damaged")
            yield pixels.clamp(-1, 1).cpu()
