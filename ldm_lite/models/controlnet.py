"""ControlNet: a copy of the UNet's way down that reads a picture too, and what it tells the UNet.

What is unusual about it:
- it is the UNet's own `Encoder` with three small additions, so whatever speeds that up speeds this up;
- the picture is embedded once a job (`embed`), not once a step;
- its results go into UNet.forward as `control`: tensors, so that both compile.

Shape letters: B batch, C channels, h w latent size, T text tokens, D context channels.
Source: Zhang et al. 2023, sec. 3; cldm.py of the original repository.
"""

from torch import Tensor, nn

from ldm_lite.models.unet import Encoder, UNetSpec

HINT_CHANNELS = (3, 16, 16, 32, 32, 96, 96, 256)  # of the picture, and after each convolution but the last
HINT_STRIDES = (1, 1, 2, 1, 2, 1, 2, 1)


class ControlNet(Encoder):
    """Noised latents, a timestep, a text and an embedded picture -> what to add to the UNet's skips and middle.

    spec is that of the UNet it is for; its out_channels is of no use here.
    """

    def __init__(self, spec: UNetSpec) -> None:
        super().__init__(spec)
        layers: list[nn.Module] = []
        channels = (*HINT_CHANNELS, spec.model_channels)
        for i, stride in enumerate(HINT_STRIDES):
            layers += [nn.Conv2d(channels[i], channels[i + 1], 3, stride=stride, padding=1), nn.SiLU()]
        self.input_hint_block = nn.Sequential(*layers[:-1])
        self.zero_convs = nn.ModuleList(nn.Sequential(nn.Conv2d(c, c, 1)) for c in self._skips)
        last = self._skips[-1]
        self.middle_block_out = nn.Sequential(nn.Conv2d(last, last, 1))

    def embed_hint(self, picture: Tensor) -> Tensor:
        """The picture (B,3,8h,8w) in [0,1] -> (B,model_channels,h,w), the same at every step."""
        return self.input_hint_block(picture)

    def forward(self, x: Tensor, t: Tensor, context: Tensor | None, hint: Tensor) -> tuple[Tensor, ...]:
        """x (B,in_channels,h,w), t (B,), context (B,T,D), hint from embed_hint (B or 1) -> UNet.forward's `control`.

        That is one (B,C,h',w') for each input block, and one for the middle.
        """
        emb = self.embed(t, None, x.dtype)
        out = []
        for i, (block, zero_conv) in enumerate(zip(self.input_blocks, self.zero_convs, strict=True)):
            x = block(x, emb, context, None)
            x = x + hint if i == 0 else x
            out.append(zero_conv(x))
        x = self.middle_block(x, emb, context, None)
        return *out, self.middle_block_out(x)


def guess_scales(num: int) -> list[float]:
    """The `num` factors of guess mode, the deeper the larger, to 1 in the middle: the original's 0.825^(12-i)."""
    return [0.825 ** (num - 1 - i) for i in range(num)]
