"""Small models to train from scratch, as families."""

from dataclasses import replace

from torch import nn

from ldm_lite.models.clip import CLIPTextEncoder
from ldm_lite.models.transformer import AttentionBlock, SpatialTransformer
from ldm_lite.models.unet import ResBlock, UNet
from ldm_lite.zoo.families import SD1
from ldm_lite.zoo.networks import CLIP_L, KL_F8, SD1_UNET

EMOJI_64 = replace(
    SD1,
    title="emoji, 64 px",
    unet=replace(
        SD1_UNET,
        in_channels=16,
        out_channels=16,
        model_channels=64,
        channel_mult=(1, 3),
        num_res_blocks=(1, 1),
        transformer_depth=(1, 1),
        num_heads=4,
        context_dim=128,
        cross_only=(False, False),
    ),
    vae=replace(KL_F8, channels=32, num_res_blocks=1, z_channels=16, embed_dim=16),
    prediction="v",  # at t = T, where x is pure noise, the target is still the image
    text_encoders=(replace(CLIP_L, length=32, width=128, mlp_width=512, layers=3, heads=4),),
    resolution=64,
    scale=2.5,
    steps=20,
)
PRESETS = {
    "emoji64": EMOJI_64,
    "emoji128": replace(
        EMOJI_64,
        title="emoji, 128 px",
        unet=replace(
            EMOJI_64.unet,
            channel_mult=(1, 1, 3),  # of 20 M parameters in all, a file of 40 MB
            num_res_blocks=(1, 1, 1),
            transformer_depth=(0, 1, 1),
            cross_only=(False, False, False),
        ),
        resolution=128,
    ),
}


def initialise(unet: UNet) -> None:
    """Zero the last layer of each residual branch, as the original does: every block starts as the identity."""
    lasts: list[nn.Module] = [unet.out[2]]
    for module in unet.modules():
        if isinstance(module, ResBlock):
            lasts.append(module.out_layers[3])
        elif isinstance(module, (SpatialTransformer, AttentionBlock)):
            lasts.append(module.proj_out)
    for last in lasts:
        for parameter in last.parameters():
            nn.init.zeros_(parameter)


def initialise_text(text_encoder: CLIPTextEncoder) -> None:
    """Initialise the embeddings as the code of CLIP does, with small values.  Radford et al. 2021."""
    nn.init.normal_(text_encoder.embeddings.token_embedding.weight, std=0.02)
    nn.init.normal_(text_encoder.embeddings.position_embedding.weight, std=0.01)
