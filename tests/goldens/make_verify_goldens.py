"""Make tests/data/verify.npz: the recipes of ldm_lite.tasks.verify on networks in miniature, by diffusers' pipelines.

    pip install diffusers transformers && pip install --no-deps open_clip_torch
    PYTHONPATH=tests/fixtures:scripts python tests/goldens/make_verify_goldens.py

The schedulers are configured as the released repositories' files are; each recipe differs from the published one in
its networks and the size of its latents alone.  What is stored: the nine values, or the whole image.
"""

import gzip
import tempfile
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import peers
import torch
import transformers
from diffusers.pipelines.latent_diffusion.pipeline_latent_diffusion import LDMBertConfig, LDMBertModel
from make_family_goldens import tokenizers
from making import DATA, made_with
from random_checkpoint import state_dict
from toy_verify import FAMILY_OF, SIDE, toy_vectors

import ldm_lite.text
from ldm_lite.tasks.verify import Vector
from ldm_lite.zoo.family import FamilyRow

BETAS = {"beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear"}
STORED = {**BETAS, "set_alpha_to_one": False, "skip_prk_steps": True, "steps_offset": 1, "clip_sample": False}


def scheduler(vector: Vector) -> Any:
    """The scheduler of a published test, made from the stored one where the test makes it so."""
    stored = diffusers.PNDMScheduler.from_config(STORED)
    if vector.family == "ldm_text2img_large":
        return diffusers.DDIMScheduler(**BETAS, clip_sample=False)
    if vector.family == "lcm":
        return diffusers.LCMScheduler(**BETAS, prediction_type="epsilon")
    if vector.prediction == "v":
        return diffusers.DDIMScheduler.from_config({**STORED, "prediction_type": "v_prediction"})
    kinds = {
        "plms": diffusers.PNDMScheduler,
        "ddim": diffusers.DDIMScheduler,
        "lms": diffusers.LMSDiscreteScheduler,
        "euler": diffusers.EulerDiscreteScheduler,
    }
    return kinds[vector.sampler].from_config(stored.config)


def bert(family: FamilyRow, weights: peers.Weights) -> LDMBertModel:
    """diffusers' BERT with weights of the original layout."""
    spec, prefix = family.text, "cond_stage_model.transformer."
    config = LDMBertConfig(
        vocab_size=spec.vocab_size, encoder_layers=spec.layers, encoder_ffn_dim=4 * spec.width, d_model=spec.width
    )
    config._attn_implementation = "eager"
    model = LDMBertModel(config).eval()
    names = {"token_emb": "embed_tokens", "pos_emb.emb": "embed_positions", "norm": "layer_norm"}
    for i in range(spec.layers):
        attention, forward, to = f"attn_layers.layers.{2 * i}", f"attn_layers.layers.{2 * i + 1}", f"layers.{i}"
        names |= {f"{attention}.0": f"{to}.self_attn_layer_norm", f"{forward}.0": f"{to}.final_layer_norm"}
        names |= {f"{attention}.1.to_{x}": f"{to}.self_attn.{x}_proj" for x in ("q", "k", "v", "out")}
        names |= {f"{forward}.1.net.0.0": f"{to}.fc1", f"{forward}.1.net.2": f"{to}.fc2"}
    state = {
        f"model.{theirs}.{kind}": weights[f"{prefix}{ours}.{kind}"]
        for ours, theirs in names.items()
        for kind in ("weight", "bias")
        if f"{prefix}{ours}.{kind}" in weights
    }
    missing, unknown = model.load_state_dict(state, strict=False)
    assert set(missing) == {"to_logits.weight", "to_logits.bias"}, missing
    assert not unknown, unknown
    return model


def pipeline(vector: Vector) -> Any:
    """diffusers' pipeline for a vector's family in miniature."""
    family = FAMILY_OF[vector.family, vector.prediction]
    weights = dict(state_dict(family))
    parts = {"unet": peers.unet(family, weights), "scheduler": scheduler(vector)}
    vae = peers.vae(family, weights)
    vae.register_to_config(scaling_factor=family.scale_factor, force_upcast=False)
    if vector.family == "ldm_text2img_large":
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "vocab.txt"
            vocab = Path(ldm_lite.text.__file__).with_name("bert_vocab.txt.gz").read_bytes()
            path.write_bytes(gzip.decompress(vocab).partition(b"\n")[2])  # the first line is its licence
            tokenizer = transformers.BertTokenizer(str(path), model_max_length=77)
        return diffusers.LDMTextToImagePipeline(vqvae=vae, bert=bert(family, weights), tokenizer=tokenizer, **parts)
    kind = diffusers.LatentConsistencyModelPipeline if vector.family == "lcm" else diffusers.StableDiffusionPipeline
    return kind(
        vae=vae,
        text_encoder=peers.text_encoder(family, weights),
        tokenizer=tokenizers()[vector.family == "sd2"],
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
        **parts,
    )


def main() -> None:
    """Write the file."""
    arrays = {}
    for vector in toy_vectors():
        pipe = pipeline(vector)
        pipe.set_progress_bar_config(disable=True)
        large = vector.family == "ldm_text2img_large"  # takes 8 pixels for each latent, whatever its decoder makes
        pixels = SIDE * (8 if large else pipe.vae_scale_factor)
        latents = torch.from_numpy(np.random.RandomState(0).standard_normal((1, 4, SIDE, SIDE))).float()
        image = pipe(
            vector.prompt,
            height=pixels,
            width=pixels,
            latents=None if vector.seeded else latents,
            generator=torch.manual_seed(0),
            num_inference_steps=vector.steps,
            guidance_scale=vector.scale,
            output_type="np",
        ).images[0]
        rows = slice(vector.corner, vector.corner + 3 or None)
        arrays[vector.title] = image[rows, rows, -1].ravel() if isinstance(vector.expected, tuple) else image
        print(vector.title, arrays[vector.title].ravel()[:9])
    about = made_with((torch, diffusers, transformers))
    np.savez_compressed(DATA / "verify.npz", made_with=np.array(about), **arrays)


if __name__ == "__main__":
    with torch.no_grad():
        main()
