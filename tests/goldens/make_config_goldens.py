"""Make tests/data/configs.npz: runs of diffusers' pipelines with configurations that are not the family's.

    pip install diffusers transformers && pip install --no-deps open_clip_torch
    PYTHONPATH=tests/fixtures:scripts python tests/goldens/make_config_goldens.py [FOLDER]

The pipeline is Stable Diffusion 1.x in miniature (toy.CONFIGS has the differences), with weights that depend on
diffusers' keys (toy.fill).  Stored are the latents after four guided steps, part of the pixels, and the configuration
files, as far as they differ from the first pipeline's.  With FOLDER, the pipelines are saved there too.
"""

import json
import sys
import tempfile
from pathlib import Path

import diffusers
import numpy as np
import peers
import torch
import toy
import transformers
from make_family_goldens import NEGATIVE, NOISE, PROMPT, tokenizers
from making import DATA, Arrays, made_with, write
from random_checkpoint import SMALL, state_dict

SCHEDULER = {
    "beta_start": 0.00085,
    "beta_end": 0.012,
    "beta_schedule": "scaled_linear",
    "steps_offset": 1,
    "clip_sample": False,
    "set_alpha_to_one": False,
}


def pipeline(case: toy.ConfigCase) -> diffusers.StableDiffusionPipeline:
    """diffusers' pipeline, as configured."""
    weights = dict(state_dict(SMALL))
    text = peers.text_encoder(SMALL, weights)
    text = transformers.CLIPTextModel(transformers.CLIPTextConfig(**{**text.config.to_dict(), **case.text}))
    unet, vae = peers.unet(SMALL, weights), peers.vae(SMALL, weights)
    settings = {key: value for key, value in unet.config.items() if key != "_use_default_values"}
    unet = diffusers.UNet2DConditionModel.from_config({**settings, "sample_size": 16, **case.unet})
    vae.register_to_config(**case.vae)
    for network in (unet, vae, text):
        toy.fill(network)
    kind = getattr(diffusers, case.scheduler.get("_class_name", "DDIMScheduler"))
    settings = {key: value for key, value in {**SCHEDULER, **case.scheduler}.items() if key != "_class_name"}
    pipe = diffusers.StableDiffusionPipeline(
        unet=unet,
        vae=vae,
        text_encoder=text,
        tokenizer=tokenizers()[0],
        scheduler=kind.from_config(settings),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )
    pipe.set_progress_bar_config(disable=True)
    return pipe


def main() -> None:
    """Write the file."""
    arrays: Arrays = {}
    files: dict[str, dict[str, object]] = {}
    with tempfile.TemporaryDirectory() as temporary, torch.no_grad():
        root = Path(sys.argv[1] if len(sys.argv) > 1 else temporary)
        for name, case in toy.CONFIGS.items():
            pipe = pipeline(case)
            latents = pipe(
                PROMPT,
                negative_prompt=NEGATIVE,
                num_inference_steps=4,
                guidance_scale=5.0,
                height=64,
                width=64,
                latents=NOISE,
                generator=torch.Generator().manual_seed(toy.LCM_SEED),
                output_type="latent",
            ).images
            arrays[f"{name}.latents"] = latents
            arrays[f"{name}.pixels"] = pipe.vae.decode(latents / pipe.vae.config.scaling_factor).sample[:, :, ::4, ::4]
            pipe.save_pretrained(root / name)
            paths = [*sorted((root / name).rglob("*config.json")), root / name / "model_index.json"]
            configs = {str(path.relative_to(root / name)): json.loads(path.read_text()) for path in paths}
            first = files.get("plain", {})
            files[name] = {path: config for path, config in configs.items() if config != first.get(path)}
    versions = json.loads(made_with((torch, np, diffusers, transformers)))
    write(DATA / "configs.npz", arrays, torch.float32, json.dumps({**versions, "files": files}))


if __name__ == "__main__":
    main()
