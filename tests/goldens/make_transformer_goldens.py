"""Make tests/data/transformers.npz: what the original FLUX.1 and Stable Diffusion 3, and diffusers', compute.

    pip install einops diffusers peft
    git clone https://github.com/black-forest-labs/flux && git clone https://github.com/Stability-AI/sd3.5
    PYTHONPATH=tests/fixtures python tests/goldens/make_transformer_goldens.py --originals .

The networks are the originals' own classes, in toy_flow's sizes and filled with toy.fill's weights, in float32.
diffusers' are filled by diffusers' keys, which are stored with their shapes; LoRAs likewise, PEFT's on diffusers'
networks and Black Forest Labs' own for control.  PEFT's are computed in float64, since their random weights make
rounding twenty times as large, and differently on every CPU.
"""

import importlib
import json
import re
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import peft
import torch
import toy
import toy_flow
from making import DATA, Arrays, folder_of_originals, made_with, repository, write
from peft import LoraConfig, get_peft_model_state_dict, set_peft_model_state_dict
from random_checkpoint import random_tensor
from torch import Tensor, nn
from torch.nn import functional as F

from ldm_lite.models.flux import FluxSpec
from ldm_lite.models.mmdit import MMDiTSpec

FLUX = {name: spec for name, spec in toy_flow.TRANSFORMERS.items() if isinstance(spec, FluxSpec)}
SD3 = {name: spec for name, spec in toy_flow.TRANSFORMERS.items() if isinstance(spec, MMDiTSpec)}
AXES = (4, 6, 6)
RANK, LORA_SCALE = 3, 0.85
IN_CONTROL_LORA = re.compile(r"\.lora_[AB]\.|_norm\.scale$")


def pack(x: Tensor) -> Tensor:
    """(B,C,h,w) -> tokens (B,N,4C), as the original's einops pattern "b c (h ph) (w pw) -> b (h w) (c ph pw)"."""
    return F.pixel_unshuffle(x, 2).flatten(2).transpose(1, 2)


def unpack(tokens: Tensor, like: Tensor) -> Tensor:
    """Tokens (B,N,4C) -> (B,C,h,w)."""
    return F.pixel_shuffle(tokens.transpose(1, 2).unflatten(2, [side // 2 for side in like.shape[2:]]), 2)


def ids(x: Tensor, context: Tensor) -> tuple[Tensor, Tensor]:
    """FLUX's positions of the image's tokens (N,3) and of the text's (T,3)."""
    rows, columns = torch.meshgrid(*(torch.arange(side // 2) for side in x.shape[2:]), indexing="ij")
    image = torch.stack([torch.zeros_like(rows), rows, columns], dim=-1).flatten(0, 1).float()
    return image, torch.zeros(context.shape[1], 3)


def flux_params(model: Any, spec: FluxSpec) -> Any:
    """The original's parameters for a spec."""
    parameters: dict[str, Any] = {
        "in_channels": 4 * spec.in_channels,
        "out_channels": 4 * spec.out_channels,
        "vec_in_dim": spec.vector_dim,
        "context_in_dim": spec.context_dim,
        "hidden_size": spec.width,
        "mlp_ratio": spec.mlp_width / spec.width,
        "num_heads": spec.heads,
        "depth": spec.depth,
        "depth_single_blocks": spec.single_depth,
        "axes_dim": list(AXES),
        "theta": 10000,
        "qkv_bias": True,
        "guidance_embed": spec.guidance,
    }
    return model.FluxParams(**parameters)


def flux(originals: Path) -> Arrays:
    """FLUX.1, the original."""
    arrays: Arrays = {}
    with repository(originals / "flux" / "src", ("flux", "flux.modules")):
        model = importlib.import_module("flux.model")
        for name, spec in FLUX.items():
            network = toy.fill(model.Flux(flux_params(model, spec)))
            x, t, context, y = toy_flow.inputs(spec)
            image_ids, text_ids = (coordinates.expand(2, -1, -1) for coordinates in ids(x, context))
            more = toy_flow.more(spec)
            arrays[name] = unpack(network(pack(x), image_ids, context, text_ids, t, y, **more), x)
            if name == "flux_control":
                lora = model.FluxLoraWrapper(RANK, LORA_SCALE, params=flux_params(model, spec))
                dev = toy.fill(model.Flux(flux_params(model, FLUX["flux_dev"])))
                lora.load_state_dict(widened(dev.state_dict()), strict=False)
                shapes = {key: value.shape for key, value in lora.state_dict().items() if IN_CONTROL_LORA.search(key)}
                control = {key: random_tensor(f"lora.{key}", tuple(shape)) for key, shape in shapes.items()}
                lora.load_state_dict(control, strict=False)
                arrays["control_lora"] = unpack(lora(pack(x), image_ids, context, text_ids, t, y, **more), x)
                arrays["control_lora.shapes"] = text({key: list(shape) for key, shape in shapes.items()})
    return arrays


def mmditx_of(mmditx: Any, spec: MMDiTSpec) -> Any:
    """The original's network for a spec."""
    linear = {"target": "torch.nn.Linear", "params": {"in_features": 32, "out_features": spec.width}}
    return mmditx.MMDiTX(
        input_size=None,
        pos_embed_max_size=spec.side,
        num_patches=spec.side**2,
        in_channels=spec.in_channels,
        depth=spec.depth,
        adm_in_channels=spec.vector_dim,
        context_embedder_config=linear,
        qk_norm="rms" if spec.qk_norm else None,
        x_block_self_attn_layers=list(range(spec.dual_depth)),
    )


def widened(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """FLUX.1 dev's weights with inputs of 0 for an image's latents, as load_flow_model makes them."""
    return weights | {"img_in.weight": F.pad(weights["img_in.weight"], (0, weights["img_in.weight"].shape[1]))}


def text(values: dict[str, Any]) -> Tensor:
    """Values as the bytes of JSON, to be stored among arrays of numbers."""
    return torch.tensor(list(json.dumps(values).encode())).float()


def sd3(originals: Path) -> Arrays:
    """Stable Diffusion 3, the original; also with its second block left out."""
    arrays: Arrays = {}
    with repository(originals / "sd3.5", stubs=("mmditx",)):
        mmditx = importlib.import_module("mmditx")
        for name, spec in SD3.items():
            network = mmditx_of(mmditx, spec)
            x, t, context, y = toy_flow.inputs(spec)
            toy.fill(network)
            arrays[name] = network(x, t, y, context)
            arrays[f"{name}.skip"] = network(x, t, y, context, skip_layers=[1])
    return arrays


def flux_of(spec: FluxSpec) -> Any:
    """diffusers' network."""
    return diffusers.FluxTransformer2DModel(
        in_channels=4 * spec.in_channels,
        out_channels=4 * spec.out_channels,
        num_layers=spec.depth,
        num_single_layers=spec.single_depth,
        attention_head_dim=spec.width // spec.heads,
        num_attention_heads=spec.heads,
        joint_attention_dim=spec.context_dim,
        pooled_projection_dim=spec.vector_dim,
        guidance_embeds=spec.guidance,
        axes_dims_rope=AXES,
    )


def flux_pipeline(kind: Any, spec: FluxSpec) -> Any:
    """A pipeline of diffusers' without text encoders, which is given what they would make."""
    blocks = {"down_block_types": ("DownEncoderBlock2D",) * 4, "up_block_types": ("UpDecoderBlock2D",) * 4}
    texts = dict.fromkeys(("text_encoder", "tokenizer", "text_encoder_2", "tokenizer_2"))
    return kind(
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True),
        vae=diffusers.AutoencoderKL(latent_channels=4, block_out_channels=(32,) * 4, **blocks),
        transformer=toy.fill(flux_of(spec)),
        **texts,
    )


def of_diffusers() -> tuple[Arrays, dict[str, Any]]:
    """The same networks of diffusers, filled by diffusers' keys; and the shapes by these keys."""
    arrays: Arrays = {}
    shapes = {}
    for name, spec in FLUX.items():
        network = flux_of(spec)
        x, t, context, y = toy_flow.inputs(spec)
        image_ids, text_ids = ids(x, context)
        arguments = {"img_ids": image_ids, "txt_ids": text_ids, "timestep": t, **toy_flow.more(spec)}
        shapes[name] = filled(network)
        out = network(pack(x), encoder_hidden_states=context, pooled_projections=y, **arguments).sample
        arrays[f"diffusers.{name}"] = unpack(out, x)
        if name == "flux_dev":
            shapes["lora.flux_dev"] = with_lora(network)
            x, context, y = x.double(), context.double(), y.double()
            arguments = {key: value.double() for key, value in arguments.items()}
            out = network(pack(x), encoder_hidden_states=context, pooled_projections=y, **arguments).sample
            arrays["lora.flux_dev"] = unpack(out, x).float()
    for name, spec in SD3.items():
        network = diffusers.SD3Transformer2DModel(
            sample_size=2 * spec.side,
            in_channels=spec.in_channels,
            out_channels=spec.out_channels,
            num_layers=spec.depth,
            attention_head_dim=64,
            num_attention_heads=spec.depth,
            joint_attention_dim=spec.context_dim,
            caption_projection_dim=spec.width,
            pooled_projection_dim=spec.vector_dim,
            pos_embed_max_size=spec.side,
            dual_attention_layers=tuple(range(spec.dual_depth)),
            qk_norm="rms_norm" if spec.qk_norm else None,
        )
        x, t, context, y = toy_flow.inputs(spec)
        shapes[name] = filled(network)
        out = network(x, encoder_hidden_states=context, pooled_projections=y, timestep=t).sample
        arrays[f"diffusers.{name}"] = out
        if name == "sd35_medium":
            shapes["lora.sd35_medium"] = with_lora(network)
            x, t, context, y = x.double(), t.double(), context.double(), y.double()
            out = network(x, encoder_hidden_states=context, pooled_projections=y, timestep=t).sample
            arrays["lora.sd35_medium"] = out.float()
    return arrays, shapes


def filled(network: nn.Module) -> dict[str, list[int]]:
    """Fill a network; return the shapes of its weights by key."""
    return {key: list(value.shape) for key, value in toy.fill(network).state_dict().items()}


def with_lora(network: nn.Module) -> dict[str, list[int]]:
    """Put a LoRA on every linear of diffusers' network, by PEFT, and make it float64; return the shapes of its file."""
    names = [name for name, module in network.named_modules() if isinstance(module, nn.Linear)]
    network.add_adapter(LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules=names))
    keys = get_peft_model_state_dict(network)
    weights = {f"transformer.{key}": random_tensor(f"lora.{key}", tuple(value.shape)) for key, value in keys.items()}
    set_peft_model_state_dict(network, {key.removeprefix("transformer."): value for key, value in weights.items()})
    network.double()
    return {key: list(value.shape) for key, value in weights.items()}


def main() -> None:
    """The command line."""
    originals = folder_of_originals(__doc__)
    with torch.no_grad():
        arrays, shapes = of_diffusers()
        arrays |= flux(originals) | sd3(originals)
    about = made_with((torch, diffusers, peft), originals, ("flux", "sd3.5"))
    write(DATA / "transformers.npz", arrays, torch.float32, about, shapes=np.array(json.dumps(shapes)))


if __name__ == "__main__":
    main()
