"""Pretraining of a text encoder: a small network guesses the latents of an image from its caption.

A diffusion model that starts with this encoder need not learn what each word looks like from noisy latents: its text
embeddings hold that already, learned at a tenth of the cost of an image.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ldm_lite import Pipeline
from ldm_lite.core.vae import AutoencoderKL
from ldm_lite.models.clip import CLIPTextEncoder
from ldm_lite.models.transformer import BasicTransformerBlock
from ldm_lite.train.batches import Batch, Draws
from ldm_lite.train.losses import moments_of, read

PATCH = 2  # positions of latents per side that are guessed at once


class LatentGuess(nn.Module):
    """Context (B,T,D) -> latents (B,C,h,w): each patch of them reads the text twice, and has its own last layer."""

    def __init__(self, width: int, shape: tuple[int, int, int], heads: int = 4, depth: int = 2) -> None:
        """shape is that of an image's latents, whose sides are even."""
        super().__init__()
        self.shape, patches = shape, shape[1] * shape[2] // PATCH**2
        self.places = nn.Parameter(torch.randn(patches, width) * 0.5)
        self.blocks = nn.ModuleList(BasicTransformerBlock(width, width, heads, cross_only=True) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.hidden = nn.Linear(width, 2 * width)
        self.last = nn.Parameter(torch.randn(patches, 2 * width, shape[0] * PATCH**2) * 0.02)

    def forward(self, context: Tensor) -> Tensor:
        """Return the latents guessed from a context (B,T,D)."""
        x = self.places.expand(len(context), -1, -1)  # (B,P,D)
        for block in self.blocks:
            x = block(x, context)
        x = torch.einsum("bph,pho->bop", F.gelu(self.hidden(self.norm(x))), self.last)  # (B,4C,P)
        _, h, w = self.shape
        return F.pixel_shuffle(x.reshape(*x.shape[:2], h // PATCH, w // PATCH), PATCH)


@dataclass
class TextLoss:
    """Mean squared error of the latents guessed from captions, of variance 1."""

    model: Pipeline  # with a KL autoencoder and a CLIP text encoder
    caption_dropout: float = 0.0

    def __post_init__(self) -> None:
        family, text = self.model.family, self.model.text_encoder
        assert isinstance(text, CLIPTextEncoder)
        shape = self.model.latent_shape(family.resolution, family.resolution)
        self.networks: dict[str, nn.Module] = {"text_encoder": text.requires_grad_(True)}
        self.networks["guess"] = LatentGuess(text.spec.width, shape).to(self.model.device)

    def __call__(self, batch: Batch, draws: Draws) -> Tensor:
        """Return the loss of one batch."""
        assert isinstance(self.model.vae, AutoencoderKL)
        mean, _ = moments_of(self.model.vae, batch.pixels, self.model.device)
        text = read(self.model, batch, draws.uniform() < self.caption_dropout)
        return F.mse_loss(self.networks["guess"](text["context"]), self.model.family.scale_factor * mean)
