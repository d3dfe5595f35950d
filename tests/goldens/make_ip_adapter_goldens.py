"""Make tests/data/ip_adapter.npz: results of IP-Adapter's original networks, and of diffusers' UNet with an adapter.

    pip install diffusers transformers einops
    git clone https://github.com/tencent-ailab/IP-Adapter
    PYTHONPATH=tests/fixtures:. python tests/goldens/make_ip_adapter_goldens.py --originals IP-Adapter

The image encoder is transformers' CLIPVisionModelWithProjection, its image prepared by CLIPImageProcessor; the
projections and the attention are the original's; UNets are diffusers', and read the adapter once as the original loads
it (an nn.ModuleList of the attention processors), and once as diffusers' load_ip_adapter does, which must agree.
"""

import importlib
import sys
from typing import Any

import diffusers
import diffusers.pipelines.controlnet
import numpy as np
import peers
import torch
import toy
import transformers
from making import DATA, Arrays, folder_of_originals, made_with, write
from PIL import Image
from random_checkpoint import SMALL, small, state_dict
from torch import Tensor, nn
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

from ldm_lite.zoo.family import FamilyRow

STEPS, SCALE, WEIGHT = 4, 5.0, 0.6


def seen() -> dict[str, tuple[Tensor, Tensor]]:
    """What the image encoder makes of the photo, and of zeros: pooled outputs, and hidden states before the last."""
    spec = toy.SEER
    processor = CLIPImageProcessorPil(
        size={"shortest_edge": spec.size}, crop_size={"height": spec.size, "width": spec.size}
    )
    config = transformers.CLIPVisionConfig(
        hidden_size=spec.width,
        intermediate_size=spec.mlp_width,
        num_hidden_layers=spec.layers,
        num_attention_heads=spec.heads,
        image_size=spec.size,
        patch_size=spec.patch,
        hidden_act=spec.activation,
        projection_dim=spec.projection,
    )
    network = transformers.CLIPVisionModelWithProjection(config)
    keys = {key for key in network.state_dict() if "position_ids" not in key}
    assert keys == set(toy.seer()), keys ^ set(toy.seer())
    network.load_state_dict(toy.seer(), strict=False)
    pixels = processor(Image.fromarray(toy.photo()), return_tensors="pt")["pixel_values"]
    runs = [network.eval()(image, output_hidden_states=True) for image in (pixels, torch.zeros_like(pixels))]
    pooled, states = runs[0].image_embeds, [run.hidden_states[-2] for run in runs]
    return {"linear": (pooled, torch.zeros_like(pooled)), "mlp": tuple(states), "resampler": tuple(states)}


def projection(kind: str, weights: dict[str, Tensor]) -> nn.Module:
    """The original's network of a kind, with toy's weights."""
    spec = toy.IP_ADAPTERS[kind]
    original = importlib.import_module("ip_adapter.ip_adapter")
    if kind == "linear":
        network = original.ImageProjModel(spec.context_dim, spec.image_width, spec.num_tokens)
    elif kind == "mlp":
        network = original.MLPProjModel(spec.context_dim, spec.image_width)
    else:
        network = original.Resampler(
            dim=spec.width,
            depth=spec.depth,
            dim_head=64,
            heads=spec.heads,
            num_queries=spec.num_tokens,
            embedding_dim=spec.image_width,
            output_dim=spec.context_dim,
            ff_mult=4,
        )
    network.load_state_dict(
        {key.removeprefix("image_proj."): value for key, value in weights.items() if key.startswith("image_proj.")}
    )
    return network.eval()


def with_adapter(family: FamilyRow, weights: dict[str, Tensor], num_tokens: int) -> Any:
    """diffusers' UNet with the original's attention, whose context ends with the tokens of the image."""
    unet: Any = peers.unet(family, dict(state_dict(family)))
    original = importlib.import_module("ip_adapter.attention_processor")
    processors: dict[str, nn.Module] = {}
    for name in unet.attn_processors:
        layer = unet.get_submodule(name.removesuffix(".processor"))
        processors[name] = (
            original.AttnProcessor2_0()
            if name.endswith("attn1.processor")
            else original.IPAttnProcessor2_0(layer.to_q.out_features, layer.to_k.in_features, WEIGHT, num_tokens)
        )
    unet.set_attn_processor(processors)
    layers = nn.ModuleList(unet.attn_processors.values())
    layers.load_state_dict(
        {key.removeprefix("ip_adapter."): value for key, value in weights.items() if key.startswith("ip_adapter.")}
    )
    return unet


def loaded_by_diffusers(family: FamilyRow, weights: dict[str, Tensor], pooled: Tensor, inputs: Any) -> Tensor:
    """The output of diffusers' UNet with its own way to load the same adapter."""
    unet: Any = peers.unet(family, dict(state_dict(family)))
    parts: dict[str, dict[str, Tensor]] = {"image_proj": {}, "ip_adapter": {}}
    for key, value in weights.items():
        part, _, name = key.partition(".")
        parts[part][name] = value
    unet._load_ip_adapter_weights([parts])
    for processor in unet.attn_processors.values():
        if hasattr(processor, "scale"):
            processor.scale = [WEIGHT]
    x, t, context, more = inputs
    more = {**(more or {}), "image_embeds": [pooled[:, None]]}
    return unet(x, t, encoder_hidden_states=context, added_cond_kwargs=more).sample


def run(unet: Any, tokens: Tensor, never: Tensor) -> Tensor:
    """The last latents of DDIM with guidance."""
    context, uncond = toy.embeddings()
    both = torch.cat([torch.cat([uncond, never], dim=1), torch.cat([context, tokens], dim=1)])
    scheduler = peers.schedulers(SMALL)["ddim"]()
    scheduler.set_timesteps(STEPS)
    x = toy.normal(9, 1, 4, 8, 8)
    for t in scheduler.timesteps:
        away, toward = unet(torch.cat([x, x]), t, encoder_hidden_states=both).sample.chunk(2)
        x = scheduler.step(away + SCALE * (toward - away), t, x).prev_sample
    return x


def results() -> Arrays:
    """Everything that is stored."""
    arrays: Arrays = {}
    for kind, (image, nothing) in seen().items():
        weights = toy.ip_adapter(toy.IP_ADAPTERS[kind], SMALL.unet)
        network = projection(kind, weights)
        tokens = network(image), network(nothing)
        arrays[f"{kind}_seen"], arrays[f"{kind}_tokens"], arrays[f"{kind}_never"] = image[:, ..., ::4], *tokens
        arrays[f"{kind}_latents"] = run(with_adapter(SMALL, weights, tokens[0].shape[1]), *tokens)
        if kind != "linear":
            continue
        xl = small("sdxl_base")  # two blocks in each transformer: the order of the numbers matters
        spec = toy.for_context(toy.IP_ADAPTERS[kind], xl.unet)
        x, context, y = toy.unet_inputs(xl.unet)
        t, weights = torch.tensor(500), toy.ip_adapter(spec, xl.unet)
        linear = importlib.import_module("ip_adapter.ip_adapter").ImageProjModel(
            spec.context_dim, spec.image_width, spec.num_tokens
        )
        linear.load_state_dict(
            {key.removeprefix("image_proj."): value for key, value in weights.items() if "image_proj." in key}
        )
        sizes = 6
        more = {"text_embeds": y[:, : -sizes * 256], "time_ids": torch.zeros(len(x), sizes)}
        y[:, -sizes * 256 :] = diffusers.models.embeddings.get_timestep_embedding(
            torch.zeros(sizes), 256, flip_sin_to_cos=True, downscale_freq_shift=0
        ).flatten()
        longer = torch.cat([context, linear(image).expand(len(x), -1, -1)], dim=1)
        out = with_adapter(xl, weights, spec.num_tokens)(x, t, encoder_hidden_states=longer, added_cond_kwargs=more)
        theirs = loaded_by_diffusers(xl, weights, image.expand(len(x), -1), (x, t, context, more))
        assert torch.allclose(out.sample, theirs, atol=1e-5), (out.sample - theirs).abs().max()
        arrays["xl"] = out.sample
    return arrays


def main() -> None:
    """The command line."""
    sys.path.insert(0, str(folder_of_originals(__doc__)))
    sys.modules["diffusers.pipelines.controlnet"].MultiControlNetModel = object  # moved since, and not used here
    with torch.no_grad():
        write(DATA / "ip_adapter.npz", results(), torch.float32, made_with((torch, np, diffusers, transformers)))


if __name__ == "__main__":
    main()
