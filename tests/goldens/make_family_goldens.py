"""Make tests/data/families.npz: prompts and runs of Stable Diffusion 2 and XL in miniature, by diffusers' pipelines.

    pip install diffusers transformers && pip install --no-deps open_clip_torch
    PYTHONPATH=tests/fixtures:scripts python tests/goldens/make_family_goldens.py

The checkpoints are random_checkpoint.small's, in the original layout, renamed by diffusers' own converters; the
tokenizers are transformers'; 4 steps of DDIM from toy.normal's noise, in float32.  What is stored: the embeddings of
PROMPT, the last latents, and every fourth pixel of the image.
"""

import copy
import re
import tempfile
from pathlib import Path
from unittest import mock

import diffusers
import numpy as np
import peers
import torch
import toy
import transformers
from diffusers.pipelines.stable_diffusion.stable_unclip_image_normalizer import StableUnCLIPImageNormalizer
from diffusers.pipelines.stable_diffusion_xl import pipeline_stable_diffusion_xl_img2img
from make_tokenizer_goldens import reference
from make_vocab import read_merges, source
from making import DATA, Arrays, made_with, write
from PIL import Image
from random_checkpoint import small, state_dict
from toy import NEGATIVE, NOISE, PROMPT

from ldm_lite.models.taesd import TAESD
from ldm_lite.zoo.families import with_prediction
from ldm_lite.zoo.family import FamilyRow


def scheduler(family: FamilyRow) -> object:
    """diffusers' DDIM as the released pipelines configure it."""
    return peers.schedulers(family)["ddim"]()


def common(family: FamilyRow, weights: peers.Weights) -> dict[str, object]:
    """The components that all pipelines have."""
    network = {"unet": peers.unet(family, weights), "vae": peers.vae(family, weights)}
    network["vae"].register_to_config(scaling_factor=family.scale_factor, force_upcast=False)
    network["unet"].register_to_config(sample_size=64)
    return {**network, "scheduler": scheduler(family)}


def sd2_pipeline(
    family: FamilyRow, weights: peers.Weights, tokenizer: transformers.CLIPTokenizer
) -> diffusers.StableDiffusionPipeline:
    """diffusers' pipeline for a whole original state dict of Stable Diffusion 2."""
    pipe = diffusers.StableDiffusionPipeline(
        **common(family, weights),
        text_encoder=peers.text_encoder(family, weights),
        tokenizer=tokenizer,
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )
    pipe.set_progress_bar_config(disable=True)
    return pipe


def sdxl_pipeline(
    family: FamilyRow,
    weights: peers.Weights,
    first: transformers.CLIPTokenizer,
    second: transformers.CLIPTokenizer,
) -> diffusers.StableDiffusionXLPipeline:
    """The same of SDXL base."""
    pipe = diffusers.StableDiffusionXLPipeline(
        **common(family, weights),
        text_encoder=peers.text_encoder(family, weights),
        text_encoder_2=peers.text_encoder_2(family, weights),
        tokenizer=first,
        tokenizer_2=second,
        add_watermarker=False,
    )
    pipe.set_progress_bar_config(disable=True)
    return pipe


def tokenizers() -> tuple[transformers.CLIPTokenizer, transformers.CLIPTokenizer]:
    """Those of CLIP-L and of OpenCLIP, which differ in what they pad with."""
    with tempfile.TemporaryDirectory() as folder:
        first, second = (reference(read_merges(source()), Path(folder)) for _ in range(2))
    first.model_max_length = second.model_max_length = 77
    second.pad_token = "!"
    return first, second


def stable_diffusion_2(tokenizer: transformers.CLIPTokenizer) -> Arrays:
    """Both kinds of prediction."""
    arrays: Arrays = {}
    for prediction in ("eps", "v"):
        family = with_prediction(small("sd2"), prediction)
        weights = dict(state_dict(family))
        pipe = sd2_pipeline(family, weights, tokenizer)
        arguments = {"num_inference_steps": 4, "guidance_scale": 9.0, "height": 64, "width": 64, "latents": NOISE}
        run = pipe(PROMPT, negative_prompt=NEGATIVE, output_type="latent", **arguments).images
        arrays[f"sd2.{prediction}.latents"] = run
        if prediction == "eps":
            arrays["sd2.context"] = pipe.encode_prompt(PROMPT, "cpu", 1, False)[0]
            arrays["sd2.pixels"] = pipe.vae.decode(run / family.scale_factor).sample[:, :, ::4, ::4]
    return arrays


def depth(tokenizer: transformers.CLIPTokenizer) -> Arrays:
    """A run of the depth model from pure noise, with a map of another size than the latents."""
    family = small("sd2_depth")
    weights = dict(state_dict(family))
    pipe = diffusers.StableDiffusionDepth2ImgPipeline(
        **common(family, weights),
        text_encoder=peers.text_encoder(family, weights),
        tokenizer=tokenizer,
        depth_estimator=None,
        feature_extractor=None,
    )
    pipe.set_progress_bar_config(disable=True)
    pipe.prepare_latents = lambda *args, **kwargs: NOISE
    run = pipe(
        PROMPT,
        image=torch.zeros(1, 3, 64, 64),
        depth_map=torch.from_numpy(toy.depth_map()).float()[None],
        strength=1.0,
        negative_prompt=NEGATIVE,
        num_inference_steps=4,
        guidance_scale=9.0,
        output_type="latent",
    )
    return {"depth.latents": run.images}


def sdxl(first: transformers.CLIPTokenizer, second: transformers.CLIPTokenizer) -> Arrays:
    """Without a negative prompt, with an empty one, with sizes; handed over to the refiner, from an image too."""
    family, refiner = small("sdxl_base"), small("sdxl_refiner")
    weights, refining = dict(state_dict(family)), dict(state_dict(refiner))
    base = sdxl_pipeline(family, weights, first, second)
    last = diffusers.StableDiffusionXLImg2ImgPipeline(
        **common(refiner, refining),
        text_encoder=None,
        text_encoder_2=peers.text_encoder(refiner, refining),
        tokenizer=None,
        tokenizer_2=second,
        requires_aesthetics_score=True,
        force_zeros_for_empty_prompt=False,  # as in the released refiner's configuration
        add_watermarker=False,
    )
    last.set_progress_bar_config(disable=True)
    arguments = {"num_inference_steps": 4, "guidance_scale": 5.0, "output_type": "latent"}
    image = {"height": 64, "width": 64, "latents": NOISE, **arguments}
    arrays: Arrays = {}
    arrays["sdxl.context"], _, arrays["sdxl.pooled"], _ = base.encode_prompt(PROMPT, do_classifier_free_guidance=False)
    arrays["sdxl.none.latents"] = base(PROMPT, **image).images
    arrays["sdxl.empty.latents"] = base(PROMPT, negative_prompt="", **image).images
    sizes = {"original_size": (96, 80), "crops_coords_top_left": (8, 4)}
    negative = {f"negative_{key}": value for key, value in {**sizes, "target_size": (64, 64)}.items()}
    arrays["sdxl.sizes.latents"] = base(PROMPT, **image, **sizes, **negative).images
    run = arrays["sdxl.none.latents"]
    arrays["sdxl.pixels"] = base.vae.decode(run / family.scale_factor).sample[:, :, ::4, ::4]
    half = base(PROMPT, **image, denoising_end=0.5).images
    arrays["sdxl.refined.latents"] = last(PROMPT, image=half, denoising_start=0.5, **arguments).images
    scores = {"aesthetic_score": 8.0, "negative_aesthetic_score": 1.5}
    arrays["sdxl.scored.latents"] = last(PROMPT, image=half, denoising_start=0.5, **arguments, **scores).images
    arguments["num_inference_steps"] = 8
    parts = {name: part for name, part in base.components.items() if name != "scheduler"}
    begin = diffusers.StableDiffusionXLImg2ImgPipeline(**parts, scheduler=scheduler(family), add_watermarker=False)
    begin.set_progress_bar_config(disable=True)
    with mock.patch.object(
        pipeline_stable_diffusion_xl_img2img, "retrieve_latents", lambda out, **_: out.latent_dist.mode()
    ):
        half = begin(
            PROMPT,
            image=Image.fromarray(toy.waves()),
            strength=0.75,
            denoising_end=0.5,
            generator=torch.Generator().manual_seed(42),
            **arguments,
        ).images
    arrays["sdxl.img2img.latents"] = last(PROMPT, image=half, denoising_start=0.5, **arguments).images
    return arrays


def learned(first: transformers.CLIPTokenizer, second: transformers.CLIPTokenizer) -> Arrays:
    """toy.embedding's vectors of textual inversion in prompts of Stable Diffusion 2 and of SDXL."""
    family = small("sd2")
    pipe = sd2_pipeline(family, dict(state_dict(family)), copy.deepcopy(second))
    with tempfile.TemporaryDirectory() as folder:
        torch.save({"string_to_param": {"*": toy.embedding(64)}, "name": toy.NAME}, Path(folder) / "a.pt")
        pipe.load_textual_inversion(folder, weight_name="a.pt")
    arrays: Arrays = {"learned.sd2.context": pipe.encode_prompt(toy.NAMING, "cpu", 1, False)[0][:, ::5]}
    family = small("sdxl_base")
    base = sdxl_pipeline(family, dict(state_dict(family)), copy.deepcopy(first), copy.deepcopy(second))
    for width, part in ((64, ""), (96, "_2")):
        text, tokenizer = getattr(base, f"text_encoder{part}"), getattr(base, f"tokenizer{part}")
        base.load_textual_inversion({toy.NAME: toy.embedding(width)}, text_encoder=text, tokenizer=tokenizer)
    context, _, arrays["learned.sdxl.pooled"], _ = base.encode_prompt(toy.NAMING, do_classifier_free_guidance=False)
    return {**arrays, "learned.sdxl.context": context[:, ::7]}


def unclip() -> Arrays:
    """The vector of an image's embedding, noised at level 300 (unCLIP), by diffusers' parts of that pipeline.

    Of H's, as it is; of L's, by statistics: a mean, and deviations about 1.
    """
    noising = diffusers.DDPMScheduler(beta_schedule="squaredcos_cap_v2")
    level, noise = torch.tensor([300]), torch.randn(1, 24, generator=torch.Generator().manual_seed(0))
    sinusoid = diffusers.models.embeddings.get_timestep_embedding(
        level, 24, flip_sin_to_cos=True, downscale_freq_shift=0
    )
    arrays = {}
    for name, mean, deviation in (("unclip", 0, 1), ("unclip_l", toy.normal(11, 1, 24), toy.normal(12, 1, 24).exp())):
        normalizer = StableUnCLIPImageNormalizer(embedding_dim=24)
        normalizer.load_state_dict({"mean": torch.zeros(1, 24) + mean, "std": torch.zeros(1, 24) + deviation})
        noised = normalizer.unscale(noising.add_noise(normalizer.scale(toy.normal(10, 1, 24)), noise, level))
        arrays[f"{name}.y"] = torch.cat([noised, sinusoid], dim=1)
    return arrays


def tiny() -> Arrays:
    """TAESD both ways, by diffusers' AutoencoderTiny, with its scaling factor, whose decoder begins one layer later."""
    vae = diffusers.AutoencoderTiny().eval()
    values = toy.fill(TAESD(toy.TINY)).state_dict()
    names = {key: re.sub(r"^(\w+)\.(\d+)", _layer, key) for key in values}
    vae.load_state_dict({names[key]: value for key, value in values.items()}, strict=True)
    latents = vae.encode(toy.normal(7, 1, 3, 16, 24)).latents * vae.config.scaling_factor
    pixels = vae.decode(toy.normal(8, 1, 4, 4, 6) / vae.config.scaling_factor).sample
    return {"taesd.encode": latents, "taesd.decode": pixels}


def _layer(match: re.Match[str]) -> str:
    return f"{match[1]}.layers.{int(match[2]) - (match[1] == 'decoder')}"


def main() -> None:
    """Write the goldens."""
    first, second = tokenizers()
    with torch.no_grad():
        arrays = stable_diffusion_2(second) | depth(second) | sdxl(first, second) | learned(first, second)
        arrays |= unclip() | tiny()
    write(DATA / "families.npz", arrays, torch.float32, made_with((torch, np, diffusers, transformers)))


if __name__ == "__main__":
    main()
