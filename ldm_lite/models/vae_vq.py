"""The VQ autoencoder of latent diffusion: vq-f4, f8 and f16, and taming-transformers' VQGAN, from a frozen spec.

What is unusual about it:
- it is the KL autoencoder of core/vae.py with a codebook in place of the distribution;
- as in the first stage of a diffusion model, encoding does not quantise and decoding does: it replaces each latent by
  the nearest code;
- the nearest code is searched in float32, a slice of the positions at a time.

Shape letters: B batch, C channels of a latent, H W image size, h w = H/f, W/f latent size, K codes.
Source: Esser et al. 2021, sec. 3.1; CompVis autoencoder.py, taming-transformers' quantize.py (VectorQuantizer2).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ldm_lite.core.layers import Shapes, checked_shape
from ldm_lite.core.vae import Decoder, Encoder, VAESpec

PROBE = "quantize.embedding.weight"  # a key that only these autoencoders have
POSITIONS_TIMES_CODES = 2**24  # distances in memory at a time: 64 MiB


@dataclass(frozen=True, kw_only=True)
class VQSpec(VAESpec):
    """Sizes in which VQ autoencoders differ: those of a KL autoencoder, and of the codebook."""

    num_codes: int

    @staticmethod
    def from_shapes(shapes: Shapes) -> VQSpec:
        """Return the spec of an autoencoder with weights of these shapes.  Raises ValueError if they make no sense."""
        num_codes = checked_shape(shapes, PROBE, 2)[0]
        return VQSpec(**vars(VAESpec.from_shapes(shapes)), num_codes=num_codes)


class VectorQuantizer(nn.Module):
    """The codebook: latents (B,C,h,w) -> the nearest code at every position."""

    def __init__(self, num_codes: int, dim: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(num_codes, dim)

    def indices(self, z: Tensor) -> Tensor:
        """Latents (B,C,h,w) -> indices of the nearest codes (B,h,w), by Euclidean distance."""
        codes = self.embedding.weight.float()  # (K, C)
        positions = z.float().permute(0, 2, 3, 1).flatten(0, 2)  # (B*h*w, C)
        norms = (codes**2).sum(dim=1)
        # |z - e|^2 = |z|^2 - 2 z.e + |e|^2; the first term is the same for all codes
        nearest = [
            torch.addmm(norms, part, codes.T, alpha=-2).argmin(dim=1)
            for part in torch.split(positions, max(1, POSITIONS_TIMES_CODES // len(codes)))
        ]
        return torch.cat(nearest).view(z.shape[0], *z.shape[2:])

    def forward(self, z: Tensor) -> Tensor:
        return self.embedding(self.indices(z)).permute(0, 3, 1, 2)  # (B, C, h, w)


class VQModel(nn.Module):
    """Pixels <-> latents, and latents <-> codes.  Esser et al. 2021, eq. 2."""

    def __init__(self, spec: VQSpec) -> None:
        super().__init__()
        self.spec = spec
        self.encoder = Encoder(spec)
        self.encoder.conv_out = nn.Conv2d(self.encoder.conv_out.in_channels, spec.z_channels, 3, padding=1)
        self.decoder = Decoder(spec)
        self.quantize = VectorQuantizer(spec.num_codes, spec.embed_dim)
        self.quant_conv = nn.Conv2d(spec.z_channels, spec.embed_dim, 1)
        self.post_quant_conv = nn.Conv2d(spec.embed_dim, spec.z_channels, 1)

    def encode(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Pixels (B,3,H,W) in [-1,1] -> latents (B,embed_dim,h,w), unscaled and not quantised, and their deviation, 0.

        H and W are multiples of the factor.
        """
        z = self.quant_conv(self.encoder(x))
        return z, torch.zeros_like(z)

    def decode(self, z: Tensor, quantize: bool = True) -> Tensor:
        """Latents (B,embed_dim,h,w), divided by the scale factor -> pixels (B,3,H,W) in [-1,1], unclamped.

        Without quantize, z is decoded unchanged (force_not_quantize in the original).
        """
        return self.decoder(self.post_quant_conv(self.quantize(z) if quantize else z))
