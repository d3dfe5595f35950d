"""For tools that take a model apart: its networks and their files, and what training needs to know about them.

The folders train, batch, serve and bench use this module and toolkit.py, and none of the modules behind them.
Networks go by their roles: "unet", "vae", "text_encoder", "text_encoder_2", ...  A Pipeline has them as `networks`.
"""

import math
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from ldm_lite.checkpoint.digest import digest
from ldm_lite.checkpoint.saving import in_layout
from ldm_lite.conditioning.prompts import PromptOptions, conditioner_of, encode_prompts, guided
from ldm_lite.control.control import Control
from ldm_lite.core.clip import EncoderLayer
from ldm_lite.core.layers import Upsample
from ldm_lite.core.unet import Block, Downsample, ResBlock, SpatialTransformer
from ldm_lite.models.clip import CLIPTextModel
from ldm_lite.models.open_clip import OpenCLIPAttention, OpenCLIPTextEncoder, ResidualAttentionBlock
from ldm_lite.models.ops import TransformerBlock
from ldm_lite.models.unet import LDMUNet
from ldm_lite.pipeline import Pipeline
from ldm_lite.runtime.precision import has_fast_bf16
from ldm_lite.zoo.families import describe

__all__ = [
    "blocks",
    "checkpoint_content",
    "control_with",
    "digest",
    "encode_captions",
    "encode_moments",
    "has_fast_bf16",
    "lora_layers",
    "network_inputs",
    "token_tables",
    "unread_parameters",
]

# ---- models and files -----------------------------------------------------------------------------------------------


def checkpoint_content(
    model: Pipeline, weights: Mapping[str, Mapping[str, Tensor]]
) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return the tensors (float16, on the CPU) and the metadata of a .safetensors file in the original layout.

    weights are state dicts of all of the model's networks, by role.
    """
    tensors = in_layout(model, weights)
    tensors = {key: value.to("cpu", torch.float16).contiguous() for key, value in tensors.items()}
    tensors["betas"] = torch.from_numpy(model.schedule.betas).float()  # the family's, or the first checkpoint's own
    return tensors, describe(model.family)


def control_with(model: Pipeline, network: nn.Module, image: Tensor) -> Control:
    """Return a Control for the model from a ControlNet in memory and its image (3,H,W) in [-1,1]."""
    control = Control("control", image)
    control.networks[model.unet] = network, False  # not pooled
    return control


# ---- images and captions ---------------------------------------------------------------------------------------------


def encode_moments(model: Pipeline, pixels: Tensor) -> Tensor:
    """Encode pixels (B,3,H,W) in [-1,1] to mean and log variance (B,2C,h,w) of the latents, in the autoencoder's scale.

    Both are float32 on the model's device.  Raises ValueError if a side is not a multiple of the autoencoder's factor.
    """
    mean, deviation = model.distribution(pixels)
    return torch.cat([mean, 2 * deviation.clamp(min=math.exp(-15)).log()], dim=1)  # an autoencoder without noise has 0


def encode_captions(model: Pipeline, captions: Sequence[str | None], with_gradients: bool = False) -> dict[str, Tensor]:
    """Return the text encoders' outputs for B captions: "context" (B,T,D) and, for some families, "y" (B,V).

    All captions have the same T, whatever their lengths; None means no caption.  A warning names words that do not fit;
    there is none if gradients will reach the encoders.
    """
    conditioner = conditioner_of(model)
    encode = conditioner.encode if with_gradients else encode_prompts
    text = encode(model, captions, PromptOptions(num_chunks=conditioner.most))
    return {name: text[name] for name in ("context", "y") if name in text}


def network_inputs(model: Pipeline, text: Mapping[str, Tensor], sizes: Tensor | None = None) -> dict[str, Tensor]:
    """Return what the denoising network takes besides x and t, by name, for the encoded captions of B images.

    sizes (B,6) int32 are what SDXL reads of an image: height and width, top and left of its crop, height and width of
    that (default: whole images of the model's resolution).  A network that reads the guidance scale is given 1.
    """
    conditioning: dict[str, Tensor] = {name: text[name] for name in ("context", "y") if name in text}
    conditioner = conditioner_of(model)
    if conditioner.has_mask:  # of what is beyond the longest
        conditioning["context"] = conditioning["context"][:, : int(conditioning["y"].max())]
    if conditioner.with_sizes is not None:
        side, y = model.family.resolution, conditioning["y"]
        sizes = torch.tensor([[side, side, 0, 0, side, side]] * len(y)) if sizes is None else sizes
        conditioning["y"] = conditioner.with_sizes(y, sizes)
    [branch] = guided(model, conditioning, None, 1.0).branches
    return dict(branch.conditioning)


# ---- parts of networks ----------------------------------------------------------------------------------------------


def token_tables(model: Pipeline) -> list[Tensor]:
    """Return the token embeddings (V,D) of the model's CLIP text encoders, which textual inversion adds vectors to."""
    names = {CLIPTextModel: "embeddings.token_embedding.weight", OpenCLIPTextEncoder: "token_embedding.weight"}
    return [encoder.get_parameter(names[type(encoder)]) for encoder in model.text_encoders if type(encoder) in names]


def blocks(network: nn.Module) -> Iterator[nn.Module]:
    """Yield the blocks of a denoising network or text encoder: what can be recomputed, or divided, one by one."""
    kinds = (Block, EncoderLayer, ResidualAttentionBlock, TransformerBlock)
    return (module for module in network.modules() if isinstance(module, kinds))


def unread_parameters(network: nn.Module) -> list[nn.Parameter]:
    """Return the parameters of a text encoder that do not affect what Stable Diffusion 2 or SDXL reads."""
    unread = [parameter for part in _unread_parts(network) for parameter in part.parameters()]
    if isinstance(network, OpenCLIPTextEncoder) and network.spec.norm:
        unread += [network.text_projection] if isinstance(network.text_projection, nn.Parameter) else []  # is pooled
    return unread


def _unread_parts(network: nn.Module) -> list[nn.Module]:
    """Return the last layers of a text encoder, if their output is not read."""
    if isinstance(network, CLIPTextModel) and network.spec.skip:
        return [*network.parts()[1][-network.spec.skip :], *[network.final_layer_norm] * (not network.spec.norm)]
    if isinstance(network, OpenCLIPTextEncoder) and network.spec.skip and network.spec.norm:  # SDXL's is read pooled
        return list(network.parts()[1][-network.spec.skip :])
    return []


def lora_layers(
    networks: Mapping[str, nn.Module], convolutions: bool = False
) -> dict[str, tuple[nn.Module, slice | None]]:
    """Return the layers that a LoRA changes, by their names in kohya's files, of networks by role.

    They are the linear layers and 1x1 convolutions of the transformers in a UNet, of the layers of text encoders, and
    of the blocks of diffusion transformers: the modules of kohya's networks/lora.py.  With convolutions
    also the layers of a UNet's residual blocks, and of its down- and upsamplers.  A slice is the rows of an
    attention's `in_proj_weight` and `in_proj_bias` that are its queries, keys or values.
    """
    from ldm_lite.adapters.lora import file_names

    kinds: tuple[type[nn.Module], ...] = (SpatialTransformer, EncoderLayer, ResidualAttentionBlock, TransformerBlock)
    kinds += (ResBlock, Downsample, Upsample) if convolutions else ()
    layers: dict[str, tuple[nn.Module, slice | None]] = {}
    for role, network in networks.items():
        names, unread = file_names(role, network), _unread_parts(network)
        # Kohya's names are others in SDXL than in Stable Diffusion 1 and 2.
        has_original_names = isinstance(network, LDMUNet) and network.spec.vector_dim is not None
        is_numbered = isinstance(network, CLIPTextModel) and network.spec.skip
        for outer, part in network.named_modules():
            if not isinstance(part, kinds) or part in unread:
                continue
            for inner, layer in part.named_modules():
                if isinstance(layer, (nn.Linear, nn.Conv2d)):
                    name = names[f"{outer}.{inner}"][1 if has_original_names else 0]
                    layers[name.replace("lora_te_", "lora_te1_", 1) if is_numbered else name] = layer, None
                elif isinstance(layer, OpenCLIPAttention):
                    width = len(layer.in_proj_weight) // 3
                    for i, name in enumerate("qkv"):
                        rows = slice(i * width, (i + 1) * width)
                        layers[names[f"{outer}.{inner}.{name}_proj"][0]] = layer, rows
    return layers
