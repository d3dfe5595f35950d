"""Make tests/data/noise.npz: runs of diffusers' pipelines from a seed, which say in which order they draw their noise.

    pip install diffusers transformers && pip install --no-deps open_clip_torch
    PYTHONPATH=tests/fixtures:scripts python tests/goldens/make_noise_goldens.py

A miniature Stable Diffusion 1.x and a batch of two images: 4 steps of Euler ancestral, from text and from an image.
What is stored: every fourth pixel of the images.
"""

import diffusers
import numpy as np
import peers
import torch
import transformers
from make_family_goldens import NEGATIVE, PROMPT, tokenizers
from making import DATA, made_with
from random_checkpoint import SMALL, state_dict

SCHEDULE = {"beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear", "timestep_spacing": "linspace"}


def main() -> None:
    """Write the file."""
    weights = dict(state_dict(SMALL))
    vae = peers.vae(SMALL, weights)
    vae.register_to_config(scaling_factor=SMALL.scale_factor, force_upcast=False)
    unet = peers.unet(SMALL, weights)
    unet.register_to_config(sample_size=64)
    parts = {
        "unet": unet,
        "vae": vae,
        "text_encoder": peers.text_encoder(SMALL, weights),
        "tokenizer": tokenizers()[0],
        "scheduler": diffusers.EulerAncestralDiscreteScheduler(**SCHEDULE),
        "safety_checker": None,
        "feature_extractor": None,
        "requires_safety_checker": False,
    }
    run = {"negative_prompt": NEGATIVE, "num_images_per_prompt": 2, "guidance_scale": 5.0, "output_type": "np"}
    text = diffusers.StableDiffusionPipeline(**parts)
    images = text(
        PROMPT, num_inference_steps=4, height=64, width=64, generator=torch.Generator().manual_seed(7), **run
    ).images
    image = (images[0] * 255).round().astype(np.uint8)
    # strength 0.5 of 8 steps: the last four
    again = diffusers.StableDiffusionImg2ImgPipeline(**parts)(
        PROMPT,
        image=torch.from_numpy(image).permute(2, 0, 1)[None] / 255,
        strength=0.5,
        num_inference_steps=8,
        generator=torch.Generator().manual_seed(7),
        **run,
    ).images
    arrays = {"image": image, "txt2img": images[:, ::4, ::4], "img2img": again[:, ::4, ::4]}
    about = made_with((torch, diffusers, transformers))
    np.savez_compressed(DATA / "noise.npz", made_with=np.array(about), **arrays)


if __name__ == "__main__":
    with torch.no_grad():
        main()
