"""Make tests/data/pictures.npz: results of diffusers' pipelines and the original img2img script for an image.

    pip install diffusers transformers einops omegaconf
    git clone https://github.com/CompVis/stable-diffusion
    PYTHONPATH=tests/fixtures:scripts python tests/goldens/make_picture_goldens.py --originals .

The folder holds the repository, a checkout; nothing of it is copied.  Networks are diffusers', with the weights of
random_checkpoint.py in the families of toy.PICTURE_FAMILIES; what is stored is the last latents of toy.PICTURE_RUNS.
"""

import importlib
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import diffusers
import numpy as np
import peers
import torch
import toy
from diffusers.pipelines.stable_diffusion import (
    pipeline_stable_diffusion_img2img,
    pipeline_stable_diffusion_inpaint,
)
from making import DATA, Arrays, folder_of_originals, made_with, repository, write
from numpy.typing import NDArray
from PIL import Image
from random_checkpoint import state_dict
from torch import Tensor

from ldm_lite.zoo.family import FamilyRow

Pixels = NDArray[np.uint8]

PIPELINES = {
    ("txt2img", "img2img"): diffusers.StableDiffusionImg2ImgPipeline,
    ("txt2img", "inpaint"): diffusers.StableDiffusionInpaintPipeline,
    ("inpaint", "inpaint"): diffusers.StableDiffusionInpaintPipeline,
    ("instruct", "img2img"): diffusers.StableDiffusionInstructPix2PixPipeline,
}


def schedulers(family: FamilyRow) -> dict[str, Callable[[], Any]]:
    """diffusers' schedulers by our names."""
    known = peers.schedulers(family)
    ancestral = diffusers.EulerAncestralDiscreteScheduler
    return known | {"euler_a": lambda: ancestral.from_config(known["euler"]().config)}


def pipeline(family: FamilyRow, weights: peers.Weights, run: toy.PictureRun) -> diffusers.DiffusionPipeline:
    """diffusers' pipeline of a run with original weights, without a text encoder."""
    vae, unet = peers.vae(family, weights), peers.unet(family, weights)
    vae.register_to_config(scaling_factor=family.scale_factor)
    unet.register_to_config(sample_size=family.resolution)
    parts = {
        "vae": vae,
        "unet": unet,
        "scheduler": schedulers(family)[run.sampler](),
        "text_encoder": None,
        "tokenizer": None,
        "safety_checker": None,
        "feature_extractor": None,
    }
    pipe = PIPELINES[run.task, run.command](**parts, requires_safety_checker=False)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def from_diffusers(run: toy.PictureRun, family: FamilyRow, weights: peers.Weights, size: int = 64) -> Tensor:
    """The last latents (1,4,size/8,size/8) of diffusers' pipeline.

    It takes the mean of the autoencoder's distribution, so that its generator's first noise is that of the first step.
    """

    def mean(output: SimpleNamespace, *args: object, **kwargs: object) -> Tensor:
        return output.latent_dist.mode()

    context, uncond = toy.embeddings(family.unet.context_dim)
    arguments = {
        "prompt_embeds": context,
        "negative_prompt_embeds": uncond,
        "image": Image.fromarray(toy.waves(size)),
        "num_inference_steps": run.steps,
        "guidance_scale": 5.0,
        "generator": torch.Generator().manual_seed(42),
        "output_type": "latent",
    }
    if run.task == "instruct":
        arguments |= {"image_guidance_scale": 1.5}
    else:
        arguments |= {"strength": run.strength}
    if run.command == "inpaint":
        image, mask = extended(toy.waves(size), dict(run.extend)) if run.extend else (toy.waves(size), toy.mask(size))
        arguments |= {"image": Image.fromarray(image), "mask_image": Image.fromarray(mask)}
        arguments |= {"height": mask.shape[0], "width": mask.shape[1]}
    with (
        mock.patch.object(pipeline_stable_diffusion_img2img, "retrieve_latents", mean),
        mock.patch.object(pipeline_stable_diffusion_inpaint, "retrieve_latents", mean),
    ):
        return pipeline(family, weights, run)(**arguments).images


def extended(image: Pixels, sides: Mapping[str, int]) -> tuple[Pixels, Pixels]:
    """An image (H,W,3) with its edges repeated at the sides, and the mask of what is new: what a user prepares."""
    height, width, _ = image.shape
    rows = np.arange(-sides.get("top", 0), height + sides.get("bottom", 0))
    columns = np.arange(-sides.get("left", 0), width + sides.get("right", 0))
    new = ((rows < 0) | (rows >= height))[:, None] | (columns < 0) | (columns >= width)
    return image[rows.clip(0, height - 1)[:, None], columns.clip(0, width - 1)], np.uint8(255) * new


def from_the_original(originals: Path, run: toy.PictureRun) -> Tensor:
    """The last latents (2,4,8,8) of two samples, by the original sampler in the order of scripts/img2img.py.

    To inpaint, the sampler gets `mask` and `x0`, for which the repository has no script of Stable Diffusion.
    """
    family = toy.PICTURE_FAMILIES[run.task]
    weights = dict(state_dict(family))
    vae, unet = peers.vae(family, weights), peers.unet(family, weights)
    context, uncond = (value.expand(2, -1, -1) for value in toy.embeddings())
    alpha_bar = weights["alphas_cumprod"]
    model = SimpleNamespace(
        num_timesteps=1000,
        device=torch.device("cpu"),
        betas=weights["betas"],
        alphas_cumprod=alpha_bar,
        alphas_cumprod_prev=torch.cat([torch.ones(1), alpha_bar[:-1]]),
        apply_model=lambda x, t, c: unet(x, t, encoder_hidden_states=c).sample,
        # Ho et al. 2020, eq. 4; the original's is in a module that needs pytorch-lightning.
        q_sample=lambda x, t: alpha_bar[t[0]] ** 0.5 * x + (1 - alpha_bar[t[0]]) ** 0.5 * torch.randn_like(x),
    )
    with repository(originals / "stable-diffusion"):
        module = importlib.import_module(f"ldm.models.diffusion.{run.sampler}")
        sampler = getattr(module, f"{run.sampler.upper()}Sampler")(model)
        sampler.register_buffer = lambda name, value: setattr(sampler, name, value)  # which moves them to CUDA
        torch.manual_seed(42)
        image = torch.from_numpy(toy.waves()).float() / 255
        image = (2 * image - 1).permute(2, 0, 1).expand(2, -1, -1, -1)
        # Contiguous: randn_like fills latents in the order of their memory, which differs between autoencoders.
        init = family.scale_factor * vae.encode(image).latent_dist.sample().contiguous()
        if run.command == "inpaint":
            keep = torch.from_numpy(toy.mask()[4::8, 4::8] == 0).float()[None, None]
            guidance = {"unconditional_guidance_scale": 5.0, "unconditional_conditioning": uncond}
            return sampler.sample(run.steps, 2, (4, 8, 8), context, mask=keep, x0=init, verbose=False, **guidance)[0]
        sampler.make_schedule(run.steps, ddim_eta=0.0, verbose=False)
        t_enc = int(run.strength * run.steps)
        begun = sampler.stochastic_encode(init, torch.tensor([t_enc] * 2))
        return sampler.decode(
            begun, context, t_enc, unconditional_guidance_scale=5.0, unconditional_conditioning=uncond
        )


def main() -> None:
    """The command line."""
    originals = folder_of_originals(__doc__)
    about = made_with((torch, np, diffusers), originals, ["stable-diffusion"])
    with torch.no_grad():
        arrays: Arrays = {
            name: from_the_original(originals, run)
            if run.spacing == "original"
            else from_diffusers(run, family := toy.PICTURE_FAMILIES[run.task], dict(state_dict(family)))
            for name, run in toy.PICTURE_RUNS.items()
        }
    write(DATA / "pictures.npz", arrays, torch.float32, about)


if __name__ == "__main__":
    main()
