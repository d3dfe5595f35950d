"""Networks by their specs, and the autoencoders that several families share.

NETWORKS names the network of each spec class; build() makes one, importing its module then.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from torch import nn

from ldm_lite.core.files import imported
from ldm_lite.core.layers import Shapes
from ldm_lite.core.vae import VAESpec

if TYPE_CHECKING:
    from ldm_lite.core.vae import AutoencoderKL
    from ldm_lite.models.pixels import Pixels
    from ldm_lite.models.taesd import TAESD
    from ldm_lite.models.vae_vq import VQModel

    Autoencoder = AutoencoderKL | VQModel | TAESD | Pixels
else:
    Autoencoder = Any
Spec = Any  # a frozen dataclass of sizes, of one of these classes

NETWORKS = {  # the class of a spec -> its network's
    "UNetSpec": "ldm_lite.models.unet:UNet",
    "IFSpec": "ldm_lite.models.unet_if:UNetIF",
    "FluxSpec": "ldm_lite.models.flux:Flux",
    "MMDiTSpec": "ldm_lite.models.mmdit:MMDiT",
    "ZImageSpec": "ldm_lite.models.z_image:ZImage",
    "VAESpec": "ldm_lite.core.vae:AutoencoderKL",
    "VQSpec": "ldm_lite.models.vae_vq:VQModel",
    "TAESDSpec": "ldm_lite.models.taesd:TAESD",
    "PixelSpec": "ldm_lite.models.pixels:Pixels",
    "CLIPTextSpec": "ldm_lite.models.clip:CLIPTextEncoder",
    "OpenCLIPTextSpec": "ldm_lite.models.open_clip:OpenCLIPTextEncoder",
    "T5Spec": "ldm_lite.models.t5:T5Encoder",
    "Qwen3Spec": "ldm_lite.models.qwen3:Qwen3",
    "BERTSpec": "ldm_lite.models.bert:BERTTextEncoder",
    "ClassSpec": "ldm_lite.models.embedders:ClassEmbedder",
    "LabelMapSpec": "ldm_lite.models.embedders:LabelMapRescaler",
    "RRDBSpec": "ldm_lite.models.rrdb:RRDBNet",
}
AUTOENCODERS = {  # a key of an autoencoder that is not KL -> the class of its spec
    "encoder.1.conv.0.weight": "ldm_lite.models.taesd:TAESDSpec",
    "decoder.1.weight": "ldm_lite.models.taesd:TAESDSpec",
    "quantize.embedding.weight": "ldm_lite.models.vae_vq:VQSpec",
}
KL_F8 = VAESpec(channels=128, channel_mult=(1, 2, 4, 4), num_res_blocks=2, z_channels=4, embed_dim=4)
KL_F8_16 = replace(KL_F8, z_channels=16, embed_dim=16, quant=False)  # of FLUX.1, Stable Diffusion 3 and Z-Image


def build(spec: Spec) -> nn.Module:
    """Build the network that a spec describes, on the default device."""
    network: nn.Module = imported(NETWORKS[type(spec).__name__])(spec)
    return network


def infer_vae(shapes: Shapes) -> Spec:
    """Return the spec of an autoencoder whose weights have these shapes.  Raises ValueError if they make no sense."""
    kind: Any = next((kind for key, kind in AUTOENCODERS.items() if key in shapes), VAESpec)
    return imported(kind).from_shapes(shapes)
