"""The KL autoencoder of latent diffusion: kl-f4, f8 (Stable Diffusion, FLUX), f16 and f32, from a frozen spec.

What is unusual about it:
- attribute names are the checkpoint's keys; decoder.up.0 is the highest resolution and runs last;
- a downsampler pads only right and bottom, unlike the UNet's;
- latents are unscaled: the caller multiplies and divides by the family's scale factor.

Shape letters: B batch, C channels, H W image size, h w = H/f, W/f latent size, f = 2^(levels-1).
Source: Rombach et al. 2022, sec. 3.1; CompVis autoencoder.py and diffusionmodules/model.py.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn
from torch.nn import functional as F

from ldm_lite.core.layers import AttentionFn, Conv1x1, Shapes, channels_last, count, sdpa, size
from ldm_lite.models.ops import multiple


@dataclass(frozen=True)
class VAESpec:
    """Sizes in which autoencoders differ.  Levels are counted from the highest resolution."""

    channels: int
    channel_mult: tuple[int, ...]
    num_res_blocks: int
    z_channels: int  # channels of the encoder's output and the decoder's input
    embed_dim: int  # channels of a latent, after quant_conv
    attn_levels: tuple[int, ...]
    mid_attn: bool
    quant: bool  # has quant_conv and post_quant_conv: not in FLUX and Stable Diffusion 3

    @staticmethod
    def from_shapes(shapes: Shapes) -> VAESpec:
        """Return the spec of an autoencoder with weights of these shapes.  Raises ValueError if they make no sense."""
        channels = size(shapes, "encoder.conv_in.weight", 4)[0]
        levels = range(count(shapes, r"encoder\.down\.(\d+)\."))
        quant = any("quant_conv." in key for key in shapes)
        z_channels = size(shapes, "decoder.conv_in.weight", 4)[1]
        widths = [size(shapes, f"encoder.down.{i}.block.0.conv1.weight", 4)[0] for i in levels]
        return VAESpec(
            channels=channels,
            channel_mult=tuple(multiple(width, channels, "the width of a level") for width in widths),
            num_res_blocks=count(shapes, r"encoder\.down\.0\.block\.(\d+)\."),
            z_channels=z_channels,
            embed_dim=size(shapes, "post_quant_conv.weight", 4)[1] if quant else z_channels,
            attn_levels=tuple(i for i in levels if f"encoder.down.{i}.attn.0.norm.weight" in shapes),
            mid_attn="encoder.mid.attn_1.norm.weight" in shapes,
            quant=quant,
        )

    @property
    def factor(self) -> int:
        """Pixels per latent position, along each side."""
        return int(2 ** (len(self.channel_mult) - 1))


def check_pixels(x: Tensor, spec: VAESpec) -> None:
    """Raise ValueError if x is not (B,3,H,W) with sides that are multiples of the factor."""
    if x.shape[1] != 3 or x.shape[2] % spec.factor or x.shape[3] % spec.factor:
        raise ValueError(f"got pixels {tuple(x.shape)}, wanted (B, 3, H, W) with H and W multiples of {spec.factor}")


def check_latents(z: Tensor, spec: VAESpec) -> None:
    """Raise ValueError if z is not (B,embed_dim,h,w)."""
    if z.shape[1] != spec.embed_dim:
        raise ValueError(f"got latents with {z.shape[1]} channels, wanted {spec.embed_dim}")


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
        if in_channels != out_channels:
            self.nin_shortcut = Conv1x1(in_channels, out_channels)
        self.shortcut = in_channels != out_channels

    def forward(self, x: Tensor) -> Tensor:
        h = self.conv1(F.silu(self.norm1(x), inplace=True))
        h = self.conv2(F.silu(self.norm2(h), inplace=True))
        return (self.nin_shortcut(x) if self.shortcut else x) + h


class AttnBlock(nn.Module):
    """Single-head self-attention over all positions with a residual connection (B,C,h,w) -> (B,C,h,w)."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.head_dim = channels
        self.attention: AttentionFn = sdpa
        self.norm = _norm(channels)
        self.q = Conv1x1(channels, channels)
        self.k = Conv1x1(channels, channels)
        self.v = Conv1x1(channels, channels)
        self.proj_out = Conv1x1(channels, channels)

    def forward(self, x: Tensor) -> Tensor:
        normed = self.norm(x)
        q, k, v = (conv(normed).flatten(2).transpose(1, 2)[:, None] for conv in (self.q, self.k, self.v))  # (B,1,hw,C)
        out = self.attention(q, k, v)[:, 0].transpose(1, 2).view_as(x)  # (B, C, h, w)
        return x + self.proj_out(out)


class Downsample(nn.Module):
    """(B,C,h,w) -> (B,C,h/2,w/2) by a strided convolution, padded at the right and the bottom."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, stride=2)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(F.pad(x, (0, 1, 0, 1)))


class Upsample(nn.Module):
    """(B,C,h,w) -> (B,C,2h,2w) by nearest neighbour, then a convolution."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(F.interpolate(x, scale_factor=2.0, mode="nearest"))


class Level(nn.Module):
    """The blocks of one resolution, each with attention if `attn`, then an optional resampler."""

    def __init__(self, in_channels: int, channels: int, num_blocks: int, attn: bool, **resample: nn.Module) -> None:
        super().__init__()
        self.block = nn.ModuleList(ResnetBlock(channels if i else in_channels, channels) for i in range(num_blocks))
        self.attn = nn.ModuleList(AttnBlock(channels) for _ in range(num_blocks * attn))
        self.resample = tuple(resample)  # "downsample", "upsample" or nothing: attributes are the checkpoint's keys
        for name, module in resample.items():
            self.add_module(name, module)

    def forward(self, x: Tensor) -> Tensor:
        for i, block in enumerate(self.block):
            x = block(x)
            if self.attn:
                x = self.attn[i](x)
        for name in self.resample:
            x = getattr(self, name)(x)
        return x


class Middle(nn.Module):
    """Residual block, attention, residual block."""

    def __init__(self, channels: int, attn: bool) -> None:
        super().__init__()
        self.block_1 = ResnetBlock(channels, channels)
        self.attn_1: nn.Module = AttnBlock(channels) if attn else nn.Identity()
        self.block_2 = ResnetBlock(channels, channels)

    def forward(self, x: Tensor) -> Tensor:
        return self.block_2(self.attn_1(self.block_1(x)))


class Encoder(nn.Module):
    """Pixels (B,3,H,W) -> features (B,out_channels,h,w)."""

    def __init__(self, spec: VAESpec, out_channels: int) -> None:
        super().__init__()
        widths = [spec.channels * mult for mult in spec.channel_mult]
        last = len(widths) - 1
        self.conv_in = nn.Conv2d(3, spec.channels, 3, padding=1)
        self.down = nn.ModuleList()
        for level, width in enumerate(widths):
            resample = {} if level == last else {"downsample": Downsample(width)}
            before = widths[level - 1] if level else spec.channels
            self.down.append(Level(before, width, spec.num_res_blocks, level in spec.attn_levels, **resample))
        self.mid = Middle(widths[-1], spec.mid_attn)
        self.norm_out = _norm(widths[-1])
        self.conv_out = nn.Conv2d(widths[-1], out_channels, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv_out(F.silu(self.norm_out(self.mid(self.descend(channels_last(x)))), inplace=True))

    def descend(self, x: Tensor) -> Tensor:
        """Pixels (B,3,H,W) -> features (B,C,h,w): the part before the middle, which needs most of the memory."""
        x = self.conv_in(x)
        for level in self.down:
            x = level(x)
        return x


class Decoder(nn.Module):
    """Features (B,z_channels,h,w) -> pixels (B,3,H,W), about [-1,1], unclamped."""

    def __init__(self, spec: VAESpec) -> None:
        super().__init__()
        widths = [spec.channels * mult for mult in spec.channel_mult]
        self.conv_in = nn.Conv2d(spec.z_channels, widths[-1], 3, padding=1)
        self.mid = Middle(widths[-1], spec.mid_attn)
        self.up = nn.ModuleList()
        for level, width in enumerate(widths):
            resample = {"upsample": Upsample(width)} if level else {}
            before = widths[min(level + 1, len(widths) - 1)]
            self.up.append(Level(before, width, spec.num_res_blocks + 1, level in spec.attn_levels, **resample))
        self.norm_out = _norm(widths[0])
        self.conv_out = nn.Conv2d(widths[0], 3, 3, padding=1)

    def forward(self, z: Tensor) -> Tensor:
        return self.ascend(self.mid(self.conv_in(channels_last(z))))

    def ascend(self, x: Tensor) -> Tensor:
        """Features (B,C,h,w) -> pixels (B,3,H,W): the part after the middle, which needs most of the memory."""
        for level in reversed(self.up):
            x = level(x)
        return self.conv_out(F.silu(self.norm_out(x), inplace=True))


class AutoencoderKL(nn.Module):
    """Pixels <-> latents, with a diagonal Gaussian over the latents.  Rombach et al. 2022, sec. 3.1."""

    def __init__(self, spec: VAESpec) -> None:
        super().__init__()
        self.spec = spec
        self.encoder = Encoder(spec, out_channels=2 * spec.z_channels)
        self.decoder = Decoder(spec)
        convs = nn.Conv2d(2 * spec.z_channels, 2 * spec.embed_dim, 1), nn.Conv2d(spec.embed_dim, spec.z_channels, 1)
        self.quant_conv, self.post_quant_conv = (conv if spec.quant else nn.Identity() for conv in convs)

    def encode(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Pixels (B,3,H,W) in [-1,1] -> mean and log variance of the latents, (B,embed_dim,h,w) each, unscaled.

        Raises ValueError if x does not have 3 channels or a side is not a multiple of the factor.
        """
        check_pixels(x, self.spec)
        mean, logvar = self.quant_conv(self.encoder(x)).chunk(2, dim=1)
        return mean, logvar.clamp(-30.0, 20.0)

    def distribution(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Pixels (B,3,H,W) in [-1,1] -> mean and standard deviation of the latents (B,embed_dim,h,w), unscaled."""
        mean, logvar = self.encode(x)
        return mean, (logvar / 2).exp()

    def decode(self, z: Tensor) -> Tensor:
        """Latents (B,embed_dim,h,w), already divided by the scale factor -> pixels (B,3,H,W) in [-1,1], unclamped.

        Raises ValueError if z does not have embed_dim channels.
        """
        check_latents(z, self.spec)
        return self.decoder(self.post_quant_conv(z))

    def forward(self, x: Tensor) -> Tensor:
        """Pixels (B,3,H,W) -> their reconstruction from the mean latent (B,3,H,W)."""
        return self.decode(self.encode(x)[0])
