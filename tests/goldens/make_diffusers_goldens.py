"""Make tests/data/diffusers.npz and diffusers.json.gz: networks in the format of diffusers, and runs of some.

    pip install diffusers transformers && pip install --no-deps open_clip_torch
    PYTHONPATH=tests/fixtures:scripts python tests/goldens/make_diffusers_goldens.py

The networks are diffusers' and transformers' own, in miniature, with weights that depend on *their* keys (toy.fill): so
the files of the tests can be written without them.  Stored are what they compute, in float32, and the keys and shapes
of these and of the released networks' (on the meta device).
"""

import gzip
import json
from dataclasses import replace

import diffusers
import numpy as np
import peers
import torch
import toy
import transformers
from make_family_goldens import NEGATIVE, NOISE, PROMPT, sd2_pipeline, sdxl_pipeline, tokenizers
from making import DATA, Arrays, made_with, write
from PIL import Image
from random_checkpoint import LCM, SMALL, small, state_dict
from torch import nn

from ldm_lite.checkpoint.reader import on_meta, prefix
from ldm_lite.families.sd1 import SD1
from ldm_lite.families.sd2 import SD2
from ldm_lite.families.sdxl import SDXL
from ldm_lite.models.t2i_adapter import AdapterSpec
from ldm_lite.models.unet import LDMUNet, LDMUNetSpec
from ldm_lite.zoo.families import FAMILY_ROWS, with_prediction
from ldm_lite.zoo.family import FamilyRow, build_network

Shapes = dict[str, list[int]]
PREFIX = "model.diffusion_model."
X4 = {  # of stable-diffusion-x4-upscaler/unet/config.json, as far as it is not diffusers' default
    "in_channels": 7,
    "block_out_channels": (256, 512, 512, 1024),
    "down_block_types": ("DownBlock2D", *("CrossAttnDownBlock2D",) * 3),
    "up_block_types": (*("CrossAttnUpBlock2D",) * 3, "UpBlock2D"),
    "only_cross_attention": (True, True, True, False),
    "cross_attention_dim": 1024,
    "num_class_embeds": 1000,
    "use_linear_projection": True,
}


# Among them diffusers/controlnet-canny-sdxl-1.0, -mid and -small; where the last two have transformers and how many is
# assumed by what is known of their configurations and sizes (5 and 7 times smaller).
CONTROLS = {
    "sd15": SD1.unet,
    "sd21": SD2.unet,
    "sdxl": SDXL.unet,
    "sdxl_mid": replace(SDXL.unet, transformer_depth=(0, 1, 1), middle_depth=1),
    "sdxl_small": replace(SDXL.unet, transformer_depth=(0, 0, 0), middle_depth=1),
}


WIDTHS = tuple(SD1.unet.model_channels * mult for mult in SD1.unet.channel_mult)
ADAPTERS = {
    "sd_rgb": AdapterSpec(3, 8, WIDTHS, 2, light=False),
    "light_color": AdapterSpec(3, 8, WIDTHS, 4, light=True),
    "sdxl": AdapterSpec(1, 16, WIDTHS, 2, light=False),
}
RUN = {  # of whole pipelines
    "negative_prompt": NEGATIVE,
    "num_inference_steps": 4,
    "guidance_scale": 5.0,
    "height": 64,
    "width": 64,
    "latents": NOISE,
    "output_type": "latent",
}


def shapes_of(network: nn.Module) -> Shapes:
    """Keys and shapes of a network's file."""
    return {key: list(value.shape) for key, value in network.state_dict().items()}


def whole(family: FamilyRow) -> peers.Weights:
    """A whole original state dict, without memory."""
    with on_meta():
        networks = {role: build_network(spec).state_dict() for role, spec in family.specs.items()}
    return {
        prefix(role, values, family.sgm) + key: value
        for role, values in networks.items()
        for key, value in values.items()
    }


def released() -> dict[str, Shapes]:
    """Released networks as diffusers has them, by the names of their manifests in the original's layout."""
    with on_meta():
        networks: dict[str, nn.Module] = {"unet_x4": diffusers.UNet2DConditionModel(**X4)}
    rows = {
        name: (FAMILY_ROWS[name], whole(FAMILY_ROWS[name]))
        for name in ("sd1", "sd1_inpaint", "sd2", "sd2_unclip_h", "sdxl_base", "sdxl_refiner", "lcm", "lcm_sdxl")
    }
    networks |= {f"unet_{name}": peers.unet(*row) for name, row in rows.items()}
    with on_meta():
        networks |= {f"control_{name}": controlnet(spec) for name, spec in CONTROLS.items()}
        networks |= {f"t2i_adapter_{name}": adapter(spec) for name, spec in ADAPTERS.items()}
    networks["vae_kl_f8_sd"] = peers.vae(*rows["sd1"])
    networks["text_clip_l"] = peers.text_encoder(*rows["sd1"])
    networks["text_openclip_h14"] = peers.text_encoder(*rows["sd2"])
    networks["text_openclip_bigg14"] = peers.text_encoder_2(*rows["sdxl_base"])
    return {name: shapes_of(network) for name, network in networks.items()}


def unets() -> tuple[Arrays, dict[str, Shapes]]:
    """What the UNets of toy.DIFFUSERS_UNETS compute."""
    arrays, shapes = {}, {}
    for name, spec in toy.DIFFUSERS_UNETS.items():
        row = FAMILY_ROWS[name]
        weights = {PREFIX + key: value for key, value in LDMUNet(spec).state_dict().items()}
        network = toy.fill(peers.unet(replace(row, unet=spec), weights))
        x, context, y = toy.unet_inputs(spec)
        vector, guidance = (None, y) if spec.vector_dim is None else (y[:, : spec.vector_dim], y[:, spec.vector_dim :])
        if row.conditioner == "sdxl":  # the vector as it is, which diffusers would make of a size and an embedding
            network.get_aug_embed = lambda vector=vector, network=network, **_: network.add_embedding(vector)
        arrays[f"unet.{name}"] = network(
            x,
            toy.T,
            context,
            class_labels=vector if row.conditioner == "unclip" else None,
            timestep_cond=None if spec.guidance_dim is None else guidance,
        ).sample
        shapes[f"small.unet_{name}"] = shapes_of(network)
    return arrays, shapes


def controlnet(spec: LDMUNetSpec) -> diffusers.ControlNetModel:
    """diffusers' ControlNet for a UNet, or for one with fewer transformers."""
    widths = [spec.model_channels * mult for mult in spec.channel_mult]
    return diffusers.ControlNetModel(
        in_channels=spec.in_channels,
        block_out_channels=tuple(widths),
        layers_per_block=spec.num_res_blocks[0],
        down_block_types=tuple("CrossAttnDownBlock2D" if depth else "DownBlock2D" for depth in spec.transformer_depth),
        # the last is the middle's too
        transformer_layers_per_block=tuple(depth or spec.middle_depth for depth in spec.transformer_depth),
        cross_attention_dim=spec.context_dim,
        attention_head_dim=tuple(spec.heads(width) for width in widths),  # which is the number of heads
        use_linear_projection=spec.linear_proj,
        addition_embed_type=None if spec.vector_dim is None else "text_time",
        addition_time_embed_dim=256,
        projection_class_embeddings_input_dim=spec.vector_dim,
    )


def controls() -> tuple[Arrays, dict[str, Shapes]]:
    """What the ControlNets of toy.DIFFUSERS_CONTROLS compute, after the last downsampler and in the middle."""
    arrays, shapes = {}, {}
    for name, spec in toy.DIFFUSERS_CONTROLS.items():
        network = toy.fill(controlnet(spec))
        x, context, y = toy.unet_inputs(spec)
        added = None
        if y is not None:  # the vector as it is, which diffusers would make of a size and an embedding
            network.add_time_proj = nn.Identity()
            added = {"text_embeds": y[:, :12], "time_ids": y[:, 12:]}
        both = toy.picture().expand(2, -1, -1, -1)
        down, middle = network(x, toy.T, context, both, added_cond_kwargs=added, return_dict=False)
        arrays |= {f"control.{name}.6": down[6], f"control.{name}.-1": middle}
        shapes[f"small.control_{name}"] = shapes_of(network)
    return arrays, shapes


def adapter(spec: AdapterSpec) -> diffusers.T2IAdapter:
    """diffusers' T2I-Adapter."""
    kind = "light_adapter" if spec.light else "full_adapter_xl" if spec.factor == 16 else "full_adapter"
    channels = list(spec.channels[:-1] if spec.light else spec.channels)
    return diffusers.T2IAdapter(spec.in_channels, channels, spec.num_res_blocks, spec.factor, kind)


def adapters() -> tuple[Arrays, dict[str, Shapes]]:
    """Of toy.ADAPTERS' second and last features, every fourth channel."""
    arrays, shapes = {}, {}
    for name, spec in toy.ADAPTERS.items():
        network = toy.fill(adapter(spec))
        features = network(toy.picture(spec.in_channels))
        arrays |= {f"adapter.{name}.{i}": features[i][:, ::4] for i in (1, -1)}
        shapes[f"small.adapter_{name}"] = shapes_of(network)
    return arrays, shapes


def steered() -> tuple[Arrays, dict[str, Shapes]]:
    """Guided steps of SDXL's pipeline with a ControlNet, and with two, of which one ends early."""
    family = small("sdxl_base")
    base = sdxl_pipeline(family, dict(state_dict(family)), *tokenizers())
    for role in family.specs:
        toy.fill(getattr(base, role))
    lesser = replace(family.unet, transformer_depth=(0, 0), middle_depth=1)
    nets = {"sdxl": toy.fill(controlnet(family.unet)), "sdxl_small": toy.fill(controlnet(lesser))}
    picture, arrays = Image.fromarray(toy.photo()), {}
    for name, (chosen, weights, ends) in toy.STEERED_XL.items():
        pipe = diffusers.StableDiffusionXLControlNetPipeline(
            **base.components, controlnet=[nets[net] for net in chosen], add_watermarker=False
        )
        pipe.set_progress_bar_config(disable=True)
        arrays[f"steered.{name}"] = pipe(
            PROMPT,
            image=[picture] * len(chosen),
            controlnet_conditioning_scale=list(weights),
            control_guidance_end=list(ends),
            **RUN,
        ).images
    return arrays, {f"small.steers.{name}": shapes_of(network) for name, network in nets.items()}


def beside() -> tuple[Arrays, dict[str, Shapes]]:
    """What the autoencoder computes, and the text encoders of Stable Diffusion 2 and SDXL."""
    second, xl = small("sd2"), small("sdxl_base")
    networks = {
        "vae": toy.fill(peers.vae(SMALL, dict(state_dict(SMALL)))),
        "text_openclip_h14": toy.fill(peers.text_encoder(second, dict(state_dict(second)))),
        "text_openclip_bigg14": toy.fill(peers.text_encoder_2(xl, dict(state_dict(xl)))),
    }
    ids = toy.token_ids(second.text.vocab_size, second.text.length)
    pooled = networks["text_openclip_bigg14"](ids, output_hidden_states=True)
    arrays = {
        "vae.mean": networks["vae"].encode(toy.picture() * 2 - 1).latent_dist.mean,
        "vae.pixels": networks["vae"].decode(toy.normal(4, 1, 4, 8, 8)).sample[:, :, ::4, ::4],
        "text_openclip_h14": networks["text_openclip_h14"](ids).last_hidden_state[:, ::8],
        "text_openclip_bigg14": pooled.hidden_states[-2][:, ::8],
        "text_openclip_bigg14.pooled": pooled.text_embeds,
    }
    return arrays, {f"small.{name}": shapes_of(network) for name, network in networks.items()}


def lcm() -> tuple[Arrays, dict[str, Shapes]]:
    """Runs of diffusers' pipeline for Latent Consistency Models: latents, and pixels of one."""
    weights = dict(state_dict(LCM))
    networks = {
        "unet": toy.fill(peers.unet(LCM, weights)),
        "vae": toy.fill(peers.vae(LCM, weights)),
        "text_encoder": toy.fill(peers.text_encoder(LCM, weights)),
    }
    first, _ = tokenizers()
    pipe = diffusers.LatentConsistencyModelPipeline(
        **networks,
        tokenizer=first,
        scheduler=diffusers.LCMScheduler(
            beta_start=LCM.noise.start, beta_end=LCM.noise.end, beta_schedule="scaled_linear", prediction_type="epsilon"
        ),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )
    pipe.set_progress_bar_config(disable=True)
    arrays = {}
    for steps, scale in toy.LCM_RUNS:
        arrays[f"lcm.{steps}.{scale:g}"] = pipe(
            PROMPT,
            num_inference_steps=steps,
            guidance_scale=scale,
            original_inference_steps=50,
            height=64,
            width=64,
            latents=NOISE,
            generator=torch.Generator().manual_seed(toy.LCM_SEED),
            output_type="latent",
        ).images
    return arrays, {f"small.lcm.{name}": shapes_of(network) for name, network in networks.items()}


def folders() -> tuple[Arrays, dict[str, Shapes]]:
    """Four guided steps of whole pipelines, of Stable Diffusion 2 that predicts v, and of SDXL."""
    arrays, shapes = {}, {}
    first, second = tokenizers()
    for name in ("sd2", "sdxl_base"):
        family = small(name)
        weights = dict(state_dict(family))
        if name == "sd2":
            pipe = sd2_pipeline(with_prediction(family, "v"), weights, second)
        else:
            pipe = sdxl_pipeline(family, weights, first, second)
        for role in family.specs:
            shapes[f"small.{name}.{role}"] = shapes_of(toy.fill(pipe.networks[role]))
        arrays[f"folder.{name}"] = pipe(PROMPT, **RUN).images
    return arrays, shapes


def main() -> None:
    """Write both files."""
    arrays, shapes = {}, released()
    versions = made_with((torch, np, diffusers, transformers))
    with torch.no_grad():
        for more_arrays, more_shapes in (unets(), controls(), adapters(), beside(), lcm(), folders(), steered()):
            arrays |= more_arrays
            shapes |= more_shapes
    write(DATA / "diffusers.npz", arrays, torch.float32, versions)
    path = DATA / "diffusers.json.gz"
    content = json.dumps({"made_with": json.loads(versions), **shapes}, separators=(",", ":")).encode("utf-8")
    with open(path, "wb") as file, gzip.GzipFile("", "wb", compresslevel=9, fileobj=file, mtime=0) as zipped:
        zipped.write(content)
    print(f"{path}: {len(shapes)} networks, {path.stat().st_size} bytes")


if __name__ == "__main__":
    main()
