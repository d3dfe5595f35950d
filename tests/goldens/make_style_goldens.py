"""Make tests/data/style.npz: results of T2I-Adapter's style network and the original's sampler for an image.

    pip install diffusers transformers
    git clone -b SD https://github.com/TencentARC/T2I-Adapter
    PYTHONPATH=tests/fixtures:scripts python tests/goldens/make_style_goldens.py --originals T2I-Adapter

The image encoder is transformers' CLIPVisionModel, its image prepared by CLIPImageProcessor; the adapter and the
sampler are the original's, the UNet diffusers', all with toy's weights, in float32; nothing of it is copied.
"""

import importlib
from pathlib import Path
from types import SimpleNamespace

import diffusers
import numpy as np
import peers
import torch
import toy
import transformers
from making import DATA, Arrays, folder_of_originals, made_with, repository, write
from PIL import Image
from random_checkpoint import SMALL, state_dict
from torch import Tensor
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

STEPS, SCALE, WEIGHT, END = 4, 5.0, 0.8, 0.5


def seen() -> Tensor:
    """The hidden states (1,17,128) of the image's patches."""
    size = {"height": toy.VISION.size, "width": toy.VISION.size}
    processor = CLIPImageProcessorPil(size={"shortest_edge": toy.VISION.size}, crop_size=size)
    spec = toy.VISION
    config = transformers.CLIPVisionConfig(
        hidden_size=spec.width,
        intermediate_size=spec.mlp_width,
        num_hidden_layers=spec.layers,
        num_attention_heads=spec.heads,
        image_size=spec.size,
        patch_size=spec.patch,
        hidden_act=spec.activation,
    )
    network = transformers.CLIPVisionModel(config)
    keys = {key.removeprefix("vision_model."): key for key in network.state_dict() if "position_ids" not in key}
    network.load_state_dict({keys[key]: value for key, value in toy.vision().items()}, strict=False)
    assert keys.keys() == toy.vision().keys()
    pixels = processor(Image.fromarray(toy.photo()), return_tensors="pt")["pixel_values"]
    return network.eval()(pixels).last_hidden_state


def run(original: Path) -> Arrays:
    """The tokens, and the last latents of a run that they steer in the first half of its steps."""
    weights = dict(state_dict(SMALL))
    unet = peers.unet(SMALL, weights)
    context, uncond = toy.embeddings()
    alpha_bar = weights["alphas_cumprod"]
    model = SimpleNamespace(
        num_timesteps=1000,
        device=torch.device("cpu"),
        parameterization="eps",
        betas=weights["betas"],
        alphas_cumprod=alpha_bar,
        alphas_cumprod_prev=torch.cat([torch.ones(1), alpha_bar[:-1]]),
        apply_model=lambda x, t, c, **_: unet(x, t, encoder_hidden_states=c).sample,
    )
    hidden = seen()
    stubs = ("ldm.modules.extra_condition.api", "pytorch_lightning")
    with repository(original, ("ldm.modules.extra_condition",), stubs):
        adapter = importlib.import_module("ldm.modules.encoders.adapter").StyleAdapter(
            toy.STYLE.width, toy.STYLE.context_dim, toy.STYLE.heads, toy.STYLE.layers, toy.STYLE.num_tokens
        )
        adapter.load_state_dict(toy.style())
        tokens = adapter.eval()(hidden)
        sampler = importlib.import_module("ldm.models.diffusion.ddim").DDIMSampler(model)
        sampler.register_buffer = lambda name, value: setattr(sampler, name, value)  # which moves them to CUDA
        sampler.make_schedule(STEPS, ddim_eta=0.0, verbose=False)
        latents, _ = sampler.ddim_sampling(
            context,
            (1, 4, 8, 8),
            x_T=toy.normal(9, 1, 4, 8, 8),
            unconditional_guidance_scale=SCALE,
            unconditional_conditioning=uncond,
            append_to_context=WEIGHT * tokens,
            style_cond_tau=END,
        )
    return {"seen": hidden[:, ::4], "tokens": tokens, "latents": latents}


def main() -> None:
    """The command line."""
    original = folder_of_originals(__doc__)
    with torch.no_grad():
        write(DATA / "style.npz", run(original), torch.float32, made_with((torch, np, diffusers, transformers)))


if __name__ == "__main__":
    main()
