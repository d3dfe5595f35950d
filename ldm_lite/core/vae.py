"""The KL autoencoder of latent diffusion: pixels <-> latents, in Stable Diffusion at an eighth of the size.

Attribute names are the checkpoint's keys; decoder.up.0 is the highest resolution and runs last.  A downsampler pads
only right and bottom, unlike the UNet's.  Latents are unscaled: the caller applies the family's scale factor.

Shape letters: B batch, C channels, H W image size, h w = H/f, W/f latent size, f = 2^(levels-1).
Source: Rombach et al. 2022, sec. 3.1; CompVis autoencoder.py and diffusionmodules/model.py.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn
from torch.nn import functional as F

from ldm_lite.core.layers import (
    AttentionFn,
    Conv1x1,
    Shapes,
    Upsample,
    channels_last,
    checked_shape,
    count_blocks,
    sdpa,
)


@dataclass(frozen=True)
class VAESpec:
    """Sizes of an autoencoder.  Levels are counted from the highest resolution."""

    channels: int
    channel_mult: tuple[int, ...]
    num_res_blocks: int
    z_channels: int  # channels of the encoder's output and the decoder's input
    embed_dim: int  # channels of a latent, after quant_conv
    attn_levels: tuple[int, ...] = ()  # with attention after each residual block
    mid_attn: bool = True
    quant: bool = True  # has quant_conv and post_quant_conv

    @staticmethod
    def from_shapes(shapes: Shapes) -> VAESpec:
        """Return the spec of an autoencoder with weights of these shapes.  Raises ValueError if they make no sense."""
        channels = checked_shape(shapes, "encoder.conv_in.weight", 4)[0]
        levels = range(count_blocks(shapes, r"encoder\.down\.(\d+)\."))
        widths = [checked_shape(shapes, f"encoder.down.{i}.block.0.conv1.weight", 4)[0] for i in levels]
        quant = bool({"quant_conv.weight", "post_quant_conv.weight"} & shapes.keys())
        latent_key = "post_quant_conv.weight" if quant else "decoder.conv_in.weight"
        return VAESpec(
            channels=channels,
            channel_mult=tuple(width // channels for width in widths),
            num_res_blocks=count_blocks(shapes, r"encoder\.down\.0\.block\.(\d+)\."),
            z_channels=checked_shape(shapes, "decoder.conv_in.weight", 4)[1],
            embed_dim=checked_shape(shapes, latent_key, 4)[1],
            attn_levels=tuple(i for i in levels if f"encoder.down.{i}.attn.0.norm.weight" in shapes),
            mid_attn="encoder.mid.attn_1.norm.weight" in shapes,
            quant=quant,
        )

    @property
    def factor(self) -> int:
        """Pixels per latent position, along each side."""
        return 2 ** (len(self.channel_mult) - 1)


def _norm(channels: int) -> nn.GroupNorm:
    return nn.GroupNorm(32, channels, eps=1e-6)


class ResnetBlock(nn.Module):
    """Two 3x3 convolutions with a residual connection, without a timestep."""

    def __init__(self, in_channels: int, out_channels: int) -> None:
        super().__init__()
        self.norm1 = _norm(in_channels)
        self.conv1 = nn.Conv2d(in_channels, out_channels, 3, padding=1)
        self.norm2 = _norm(out_channels)
        self.conv2 = nn.Conv2d(out_channels, out_channels, 3, padding=1)
        is_same = in_channels == out_channels
        self.nin_shortcut = nn.Identity() if is_same else Conv1x1(in_channels, out_channels)

    def forward(self, x: Tensor) -> Tensor:
        h = self.conv1(F.silu(self.norm1(x), inplace=True))
        h = self.conv2(F.silu(self.norm2(h), inplace=True))
        return self.nin_shortcut(x) + h


class AttnBlock(nn.Module):
    """Single-head self-attention over all positions with a residual connection (B,C,h,w) -> (B,C,h,w)."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.attention: AttentionFn = sdpa
        self.norm = _norm(channels)
        self.q = Conv1x1(channels, channels)
        self.k = Conv1x1(channels, channels)
        self.v = Conv1x1(channels, channels)
        self.proj_out = Conv1x1(channels, channels)

    def forward(self, x: Tensor) -> Tensor:
        normed = self.norm(x)
        q, k, v = (self._tokens(conv(normed)) for conv in (self.q, self.k, self.v))
        out = self.attention(q, k, v)[:, 0].transpose(1, 2).view_as(x)  # (B, C, h, w)
        return x + self.proj_out(out)

    @staticmethod
    def _tokens(x: Tensor) -> Tensor:
        """(B,C,h,w) -> (B,1,h*w,C): one head."""
        return x.flatten(2).transpose(1, 2)[:, None]


class Downsample(nn.Module):
    """(B,C,h,w) -> (B,C,h/2,w/2) by a strided convolution, padded at the right and the bottom."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, stride=2)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(F.pad(x, (0, 1, 0, 1)))


class Stage(nn.Module):
    """The residual blocks of one resolution, with attention or without; then a resampler, if it is set."""

    def __init__(self, in_channels: int, channels: int, num_blocks: int, attn: bool) -> None:
        super().__init__()
        self.block, self.attn = nn.ModuleList(), nn.ModuleList()
        for i in range(num_blocks):
            self.block.append(ResnetBlock(channels if i else in_channels, channels))
            self.attn.append(AttnBlock(channels) if attn else nn.Identity())
        self.downsample: nn.Module = nn.Identity()  # the encoder's
        self.upsample: nn.Module = nn.Identity()  # the decoder's

    def forward(self, x: Tensor) -> Tensor:
        for block, attn in zip(self.block, self.attn, strict=True):
            x = attn(block(x))
        return self.upsample(self.downsample(x))


class Middle(nn.Module):
    """Residual block, attention, residual block."""

    def __init__(self, channels: int, attn: bool) -> None:
        super().__init__()
        self.block_1 = ResnetBlock(channels, channels)
        self.attn_1 = AttnBlock(channels) if attn else nn.Identity()
        self.block_2 = ResnetBlock(channels, channels)

    def forward(self, x: Tensor) -> Tensor:
        return self.block_2(self.attn_1(self.block_1(x)))


class Encoder(nn.Module):
    """Pixels (B,3,H,W) -> features (B,2*z_channels,h,w)."""

    def __init__(self, spec: VAESpec) -> None:
        super().__init__()
        widths = [spec.channels * mult for mult in spec.channel_mult]
        self.conv_in = nn.Conv2d(3, spec.channels, 3, padding=1)
        self.down = nn.ModuleList()
        before = spec.channels
        for level, width in enumerate(widths):
            stage = Stage(before, width, spec.num_res_blocks, attn=level in spec.attn_levels)
            if level + 1 < len(widths):
                stage.downsample = Downsample(width)
            self.down.append(stage)
            before = width
        self.mid = Middle(widths[-1], spec.mid_attn)
        self.norm_out = _norm(widths[-1])
        self.conv_out = nn.Conv2d(widths[-1], 2 * spec.z_channels, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv_in(channels_last(x))
        for level in self.down:
            x = level(x)
        return self.conv_out(F.silu(self.norm_out(self.mid(x)), inplace=True))


class Decoder(nn.Module):
    """Features (B,z_channels,h,w) -> pixels (B,3,H,W), about [-1,1], unclamped."""

    def __init__(self, spec: VAESpec) -> None:
        super().__init__()
        widths = [spec.channels * mult for mult in spec.channel_mult]
        self.conv_in = nn.Conv2d(spec.z_channels, widths[-1], 3, padding=1)
        self.mid = Middle(widths[-1], spec.mid_attn)
        self.up = nn.ModuleList()
        for level, width in enumerate(widths):  # built from the highest resolution, run from the lowest
            before = widths[min(level + 1, len(widths) - 1)]
            stage = Stage(before, width, spec.num_res_blocks + 1, attn=level in spec.attn_levels)
            if level > 0:
                stage.upsample = Upsample(width)
            self.up.append(stage)
        self.norm_out = _norm(widths[0])
        self.conv_out = nn.Conv2d(widths[0], 3, 3, padding=1)

    def forward(self, z: Tensor) -> Tensor:
        x = self.mid(self.conv_in(channels_last(z)))
        for level in reversed(self.up):
            x = level(x)
        return self.conv_out(F.silu(self.norm_out(x), inplace=True))


class AutoencoderKL(nn.Module):
    """Pixels <-> latents, with a diagonal Gaussian over the latents.  Rombach et al. 2022, sec. 3.1."""

    def __init__(self, spec: VAESpec) -> None:
        super().__init__()
        self.spec = spec
        self.encoder = Encoder(spec)
        self.decoder = Decoder(spec)
        self.quant_conv: nn.Module = nn.Identity()
        self.post_quant_conv: nn.Module = nn.Identity()
        if spec.quant:
            self.quant_conv = nn.Conv2d(2 * spec.z_channels, 2 * spec.embed_dim, 1)
            self.post_quant_conv = nn.Conv2d(spec.embed_dim, spec.z_channels, 1)

    def encode(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Pixels (B,3,H,W) in [-1,1] -> mean and standard deviation of the latents, (B,embed_dim,h,w), unscaled."""
        mean, logvar = self.quant_conv(self.encoder(x)).chunk(2, dim=1)
        return mean, (logvar.clamp(-30.0, 20.0) / 2).exp()

    def decode(self, z: Tensor) -> Tensor:
        """Latents (B,embed_dim,h,w), divided by the scale factor -> pixels (B,3,H,W) in [-1,1], unclamped."""
        return self.decoder(self.post_quant_conv(z))
