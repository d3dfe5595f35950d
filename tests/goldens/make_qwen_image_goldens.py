"""Make tests/data/qwen_image.npz: what diffusers' pipeline for Qwen-Image, transformers and PEFT compute.

    pip install diffusers transformers peft
    PYTHONPATH=tests/fixtures python tests/goldens/make_qwen_image_goldens.py

The networks are diffusers' and transformers' own classes in toy_qwen_image's sizes, in float32, with weights that their
keys decide, which are stored with their shapes; with a LoRA it is float64.  Whole runs are diffusers' QwenImagePipeline
from prompts to pixels, without guidance and with it.  One block has the released width; every 48th channel of what it
makes is stored.  That toy_qwen_image spells the autoencoder's keys as Wan 2.1 does, diffusers' converter checks.
"""

import json
import tempfile
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import peft
import torch
import toy
import toy_qwen_image
import toy_z_image
import transformers
from diffusers.loaders.single_file_utils import convert_wan_vae_to_diffusers
from diffusers.models.transformers import transformer_qwenimage
from family_goldens import shapes_of, with_lora
from making import DATA, Arrays, made_with, write
from torch import Tensor, nn

from ldm_lite.models.qwen_image import QWEN_IMAGE

SPEC, QWEN25, VAE = toy_qwen_image.SPEC, toy_qwen_image.QWEN25, toy_qwen_image.VAE
SIZES: dict[str, Any] = {
    "in_channels": 4 * SPEC.in_channels,
    "out_channels": SPEC.out_channels,
    "num_layers": SPEC.depth,
    "attention_head_dim": SPEC.width // SPEC.heads,
    "num_attention_heads": SPEC.heads,
    "joint_attention_dim": SPEC.context_dim,
    "axes_dims_rope": SPEC.axes,
}


def packed(x: Tensor) -> Tensor:
    return nn.functional.pixel_unshuffle(x, 2).flatten(2).transpose(1, 2)


def run(network: Any, dtype: torch.dtype = torch.float32) -> Tensor:
    """What diffusers' transformer makes of toy_qwen_image's inputs, (2,16,6,10)."""
    x, t, context, y = toy_qwen_image.inputs()
    grid = x.shape[2] // 2, x.shape[3] // 2
    out = network(
        packed(x).to(dtype),
        context.to(dtype),
        torch.arange(context.shape[1]) < y,
        t.to(dtype),
        [[(1, *grid)]] * len(x),
        return_dict=False,
    )[0]
    return nn.functional.pixel_shuffle(out.transpose(1, 2).unflatten(2, grid), 2)


def pipeline(folder: Path) -> Any:
    """diffusers' pipeline."""
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(toy_z_image.write_tokenizer(folder)), pad_token="<|endoftext|>"
    )
    text = {
        "vocab_size": QWEN25.vocab_size,
        "hidden_size": QWEN25.width,
        "intermediate_size": QWEN25.mlp_width,
        "num_hidden_layers": QWEN25.layers,
        "num_attention_heads": QWEN25.heads,
        "num_key_value_heads": QWEN25.kv_heads,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_theta": 1e6, "rope_type": "default", "mrope_section": [16, 24, 24]},
    }
    vision = {
        "depth": 2,
        "hidden_size": 32,
        "num_heads": 2,
        "intermediate_size": 48,
        "out_hidden_size": QWEN25.width,
        "fullatt_block_indexes": [1],
    }
    config = transformers.Qwen2_5_VLConfig(text_config=text, vision_config=vision)
    vae = diffusers.AutoencoderKLQwenImage(
        base_dim=VAE.channels, dim_mult=list(VAE.channel_mult), num_res_blocks=VAE.num_res_blocks
    )
    pipe = diffusers.QwenImagePipeline(
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler.from_config(toy_qwen_image.SCHEDULER),
        vae=toy.fill(vae, "vae."),
        text_encoder=toy.fill(transformers.Qwen2_5_VLForConditionalGeneration(config), "text_encoder."),
        tokenizer=tokenizer,
        transformer=toy.fill(diffusers.QwenImageTransformer2DModel(**SIZES), "transformer."),
    )
    before, _ = pipe.prompt_template_encode.split("{}")
    pipe.prompt_template_encode_start_idx = len(tokenizer(before).input_ids)  # this tokenizer's, not Qwen2.5's 34
    return pipe


def autoencoder(vae: Any) -> Arrays:
    """What the autoencoder makes of an image and of latents, which its pipeline normalises."""
    values = dict(vae.state_dict())
    wan = toy_qwen_image.of_wan(values, VAE.num_res_blocks)
    released = diffusers.AutoencoderKLQwenImage(base_dim=32).state_dict()  # whose number of blocks the converter knows
    assert convert_wan_vae_to_diffusers(toy_qwen_image.of_wan(released, 2)).keys() == released.keys()
    assert len(wan) == len(values)
    pixels = torch.from_numpy(toy.photo(32, 48)).permute(2, 0, 1)[None, :, None].float() / 127.5 - 1
    mean, deviation = (torch.tensor(vae.config[name]).view(1, -1, 1, 1, 1) for name in ("latents_mean", "latents_std"))
    latents = toy.normal(1, 1, 16, 4, 6)[:, :, None] * deviation + mean
    encoded = (vae.encode(pixels).latent_dist.mean - mean) / deviation
    return {"encoded": encoded[:, :, 0].contiguous(), "decoded": vae.decode(latents, return_dict=False)[0][:, :, 0]}


def of_diffusers() -> tuple[Arrays, dict[str, Any], Any]:
    """diffusers' networks and whole runs; the shapes by key of its networks; and its pipeline."""
    with tempfile.TemporaryDirectory() as folder:
        pipe = pipeline(Path(folder))
    arrays: Arrays = {"plain": run(pipe.transformer)}
    prompts = list(toy_qwen_image.PROMPTS)
    context, mask = pipe.encode_prompt(prompts)
    arrays["text"] = (context * mask[:, :, None])[..., ::4].contiguous()
    for name, scale, negative in (("plain", 1.0, None), ("guided", toy_qwen_image.GUIDANCE, toy_qwen_image.NEGATIVE)):
        more = {"num_inference_steps": toy_qwen_image.STEPS, "true_cfg_scale": scale, "height": 32, "width": 48}
        more |= {"negative_prompt": negative and [negative] * 2, "latents": packed(toy.normal(1, 2, 16, 4, 6))}
        arrays[f"run.{name}"] = pipe(prompt=prompts, output_type="pt", **more).images
    return arrays | autoencoder(pipe.vae), shapes_of(pipe), pipe


def wide_block() -> Arrays:
    """diffusers' block at the released width."""
    width = QWEN_IMAGE.width
    block: Any = transformer_qwenimage.QwenImageTransformerBlock(width, QWEN_IMAGE.heads, width // QWEN_IMAGE.heads)
    toy.fill(block)
    x, context, vec = toy.normal(1, 1, 8, width), toy.normal(2, 1, 4, width), toy.normal(3, 1, width)
    positions = transformer_qwenimage.QwenEmbedRope(10000, list(QWEN_IMAGE.axes), scale_rope=True)
    text, image = block(x, context, None, vec, positions([(1, 2, 4)], torch.device("cpu"), 4))
    return {"wide": torch.cat([text, image], dim=1)[..., ::48].contiguous()}


def main() -> None:
    """The command line."""
    with torch.no_grad():
        arrays, shapes, pipe = of_diffusers()
        arrays |= with_lora(pipe, shapes, run, rank=4, alpha=2) | wide_block()
    about = made_with((torch, diffusers, peft, transformers))
    write(DATA / "qwen_image.npz", arrays, torch.float32, about, shapes=np.array(json.dumps(shapes)))


if __name__ == "__main__":
    main()
