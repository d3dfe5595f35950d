"""Make tests/data/zoo.npz: what the original code of the LDM zoo, the x4 upscaler and TAESD computes.

    pip install einops omegaconf
    git clone https://github.com/CompVis/latent-diffusion && git clone https://github.com/CompVis/taming-transformers
    git clone https://github.com/madebyollin/taesd && git clone https://github.com/Stability-AI/stablediffusion
    PYTHONPATH=tests/fixtures:scripts python tests/goldens/make_zoo_goldens.py --originals .

The folder holds the repositories under these names, a checkout each; nothing of them is copied.  Networks are the
originals' own classes with toy.fill's weights, in float32.  Only what they need of Lightning is replaced, by torch.nn.
"""

import importlib
import sys
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import numpy as np
import torch
import toy
import toy_zoo
from make_goldens import COMPVIS, LDM, ORIGINAL_UNETS, UNCONDITIONAL
from making import DATA, Arrays, folder_of_originals, made_with, repository, write
from random_checkpoint import SCALE_FACTOR, random_tensor
from torch import nn

from ldm_lite.conditioning.boxes import Box, tokens
from ldm_lite.models.vae_vq import VQSpec
from ldm_lite.text.bert import BERTTokenizer

REPOSITORIES = ("latent-diffusion", "taming-transformers", "stablediffusion", "taesd")

# ddconfig and the other arguments of the originals' VQModelInterface, in the sizes of toy.VQS.
VQ = {
    "double_z": False,
    "z_channels": 6,
    "resolution": 64,
    "in_channels": 3,
    "out_ch": 3,
    "ch": 32,
    "ch_mult": [1, 1, 2],
    "num_res_blocks": 1,
    "attn_resolutions": [16],
}
VQS: dict[str, dict[str, Any]] = {
    "attn": {"ddconfig": VQ, "embed_dim": 4, "n_embed": 40},
    "noattn": {"ddconfig": VQ | {"attn_resolutions": [], "attn_type": "none"}, "embed_dim": 4, "n_embed": 40},
}
NO_LOSS = {"target": "torch.nn.Identity"}


def lightning() -> dict[str, ModuleType]:
    """Stand-ins for the modules that the originals' classes import and do not need."""
    module, distributed = (
        ModuleType(name) for name in ("pytorch_lightning", "pytorch_lightning.utilities.distributed")
    )
    module.LightningModule = nn.Module  # type: ignore[attr-defined]
    distributed.rank_zero_only = lambda function: function  # type: ignore[attr-defined]
    parent = ModuleType("pytorch_lightning.utilities")
    return {stub.__name__: stub for stub in (module, parent, distributed)}


def autoencoders(originals: Path) -> Arrays:
    """VQ: latents, what is decoded from them with and without quantising, and the model alone; TAESD: both ways."""
    arrays: Arrays = {}
    x, z = toy.normal(7, 1, 3, 16, 24), toy.normal(8, 1, 4, 4, 6)
    with mock.patch.dict(sys.modules, lightning()), repository(originals / "latent-diffusion"):
        module = importlib.import_module("ldm.models.autoencoder")
        for name, arguments in VQS.items():
            interface = toy.fill(module.VQModelInterface(lossconfig=NO_LOSS, **arguments))
            alone = toy.fill(module.VQModel(lossconfig=NO_LOSS, **arguments))
            arrays[f"vq.{name}.encode"] = interface.encode(x)
            arrays[f"vq.{name}.decode"] = interface.decode(z)
            arrays[f"vq.{name}.decode_as_is"] = interface.decode(z, force_not_quantize=True)
            arrays[f"vq.{name}.alone"] = alone(x)[0]
    with repository(originals / "taesd"):
        module = importlib.import_module("taesd")
        encoder, decoder = toy.fill(module.Encoder(), "encoder."), toy.fill(module.Decoder(), "decoder.")
        # The original's images are in [0,1].
        arrays["taesd.encode"] = encoder((x + 1) / 2)
        arrays["taesd.decode"] = decoder(z) * 2 - 1
    return arrays


def embedders(originals: Path) -> Arrays:
    """A class, a map of labels and boxes, as the original conditioners give them on."""
    arrays: Arrays = {}
    stubs = ("clip", "kornia", "more_itertools", "more_itertools.recipes", "taming.data.image_transforms")
    with repository(originals / "latent-diffusion", stubs=stubs):
        module = importlib.import_module("ldm.modules.encoders.modules")
        embedder = toy.fill(module.ClassEmbedder(toy.CLASSES.width, toy.CLASSES.num_classes))
        arrays["classes"] = embedder({"class": torch.tensor([0, 10])})
        spec = toy.LABEL_MAP
        rescaler = toy.fill(module.SpatialRescaler(spec.halvings, in_channels=spec.num_labels, out_channels=3))
        one_hot = nn.functional.one_hot(toy.label_map(), spec.num_labels).permute(0, 3, 1, 2).float()
        arrays["label_map"] = rescaler(one_hot)
    with repository(originals / "taming-transformers", stubs=stubs):
        module = importlib.import_module("taming.data.conditional_builder.objects_bbox")
        annotation = importlib.import_module("taming.data.helper_types").Annotation
        builder = module.ObjectsBoundingBoxConditionalBuilder(
            no_object_classes=8191,
            no_max_objects=30,
            no_tokens=8192,
            encode_crop=True,
            use_group_parameter=False,
            use_additional_parameters=False,
        )
        with mock.patch("random.shuffle"):
            for number, boxes in enumerate(toy.layouts()):
                objects = [
                    annotation(*[None] * 6)._replace(category_no=label, bbox=(x, y, right - x, bottom - y))
                    for label, x, y, right, bottom in boxes
                ]
                arrays[f"layout.{number}"] = builder.build(objects).float()
    return arrays


# ---- runs -----------------------------------------------------------------------------------------------------------

UNETS: dict[str, dict[str, Any]] = {
    "ldm_celeba_ffhq_beds256": UNCONDITIONAL,
    "ldm_lsun_churches256": ORIGINAL_UNETS["stable-diffusion"]["ldm_lsun_churches256"],
    "ldm_text2img_large": COMPVIS | {"context_dim": 40},
    "ldm_text2img256": LDM,
    "ldm_cin256": LDM | {"in_channels": 4, "out_channels": 4, "attention_resolutions": [1, 2, 4]},
    "ldm_cin256_v2": {k: v for k, v in LDM.items() if k != "num_head_channels"} | {"num_heads": 1},
    "ldm_layout2img": ORIGINAL_UNETS["stable-diffusion"]["ldm_layout2img"],
    "ldm_semantic_synthesis": {k: v for k, v in UNCONDITIONAL.items() if k != "num_head_channels"}
    | {"in_channels": 6, "num_heads": 4, "attention_resolutions": [32]},
    "rdm768": LDM | {"in_channels": 4, "out_channels": 4},
    "ldm_inpainting_big": ORIGINAL_UNETS["stable-diffusion"]["ldm_inpainting_big"],
    "ldm_bsr_sr": UNCONDITIONAL | {"in_channels": 6},
    "x4": ORIGINAL_UNETS["stablediffusion"]["x4"],
}
# cond_stage_config, and which of the others the original's configuration has.
CONDITIONS: dict[str, dict[str, Any]] = {
    "ldm_celeba_ffhq_beds256": {"cond_stage_config": "__is_unconditional__"},
    "ldm_lsun_churches256": {"cond_stage_config": "__is_unconditional__", "scale_by_std": True},
    "ldm_text2img_large": {
        "cond_stage_config": {
            "target": "ldm.modules.encoders.modules.BERTEmbedder",
            "params": {"n_embed": 40, "n_layer": 2, "use_tokenizer": False},
        },
        "conditioning_key": "crossattn",
    },
    "ldm_text2img256": {
        "cond_stage_config": {
            "target": "ldm.modules.encoders.modules.BERTEmbedder",
            "params": {"n_embed": 40, "n_layer": 2, "use_tokenizer": False},
        },
        "conditioning_key": "crossattn",
    },
    "ldm_cin256": {
        "cond_stage_config": {
            "target": "ldm.modules.encoders.modules.ClassEmbedder",
            "params": {"embed_dim": 40, "n_classes": 10},
        },
        "conditioning_key": "crossattn",
    },
    "ldm_cin256_v2": {
        "cond_stage_config": {
            "target": "ldm.modules.encoders.modules.ClassEmbedder",
            "params": {"embed_dim": 40, "n_classes": 11},
        },
        "conditioning_key": "crossattn",
    },
    "ldm_layout2img": {
        "cond_stage_config": {
            "target": "ldm.modules.encoders.modules.BERTEmbedder",
            "params": {"n_embed": 40, "n_layer": 2, "vocab_size": 8192, "max_seq_len": 92, "use_tokenizer": False},
        },
        "conditioning_key": "crossattn",
    },
    "ldm_semantic_synthesis": {
        "cond_stage_config": {
            "target": "ldm.modules.encoders.modules.SpatialRescaler",
            "params": {"n_stages": 2, "in_channels": 6, "out_channels": 3},
        },
    },
    "rdm768": {"cond_stage_config": {"target": "torch.nn.Identity"}, "conditioning_key": "crossattn"},
    "ldm_inpainting_big": {"cond_stage_config": "__is_first_stage__"},
    "ldm_bsr_sr": {"cond_stage_config": {"target": "torch.nn.Identity"}, "cond_stage_key": "LR_image"},
    "x4": {
        "cond_stage_config": {"target": "torch.nn.Identity"},
        "conditioning_key": "hybrid-adm",
        "parameterization": "v",
        "low_scale_config": {
            "target": "ldm.modules.diffusionmodules.upscaling.ImageConcatWithNoiseAugmentation",
            "params": {
                "noise_schedule_config": {"linear_start": 0.0001, "linear_end": 0.02},
                "max_noise_level": 350,
            },
        },
    },
}


def first_stage(name: str) -> dict[str, Any]:
    """The original's first_stage_config."""
    spec = toy_zoo.small(name).vae
    ddconfig = VQ | {
        "double_z": not isinstance(spec, VQSpec),
        "z_channels": spec.z_channels,
        "attn_resolutions": [VQ["resolution"] >> level for level in spec.attn_levels],
        "attn_type": "vanilla" if spec.mid_attn else "none",
    }
    params = {"ddconfig": ddconfig, "lossconfig": NO_LOSS, "embed_dim": spec.embed_dim}
    if isinstance(spec, VQSpec):
        return {
            "target": "ldm.models.autoencoder.VQModelInterface",
            "params": params | {"n_embed": spec.num_codes},
        }
    return {"target": "ldm.models.autoencoder.AutoencoderKL", "params": params}


def original(name: str) -> Any:
    """The original's LatentDiffusion (or upscaler) for a miniature, with the weights of its file."""
    module = importlib.import_module("ldm.models.diffusion.ddpm")
    family = toy_zoo.small(name)
    kind = module.LatentUpscaleDiffusion if name == "x4" else module.LatentDiffusion
    model = kind(
        unet_config={"target": "ldm.modules.diffusionmodules.openaimodel.UNetModel", "params": UNETS[name]},
        first_stage_config=first_stage(name),
        timesteps=1000,
        linear_start=family.noise.start,
        linear_end=family.noise.end,
        use_ema=False,
        scale_factor=SCALE_FACTOR if name == "ldm_lsun_churches256" else family.scale_factor,
        **CONDITIONS[name],
    )
    model.device = torch.device("cpu")
    parameters = {key: random_tensor(key, tuple(value.shape)) for key, value in model.named_parameters()}
    model.load_state_dict(parameters, strict=False)
    return model.eval()


def conditioning(name: str, model: Any) -> tuple[Any, Any]:
    """What the original's scripts and notebooks give its sampler: the conditioning, and the unconditional one."""
    learn = model.get_learned_conditioning
    if name.startswith("ldm_text2img"):
        ids = BERTTokenizer(77)(toy_zoo.PROMPTS)
        return learn(ids[:1]), learn(ids[1:])
    if name == "ldm_cin256_v2":
        return tuple(learn({"class": torch.tensor([number])}) for number in (toy_zoo.CLASS, 10))
    if name == "ldm_cin256":
        return learn({"class": torch.tensor([toy_zoo.CLASS])}), None
    if name == "ldm_layout2img":
        boxes = [Box(*box) for box in toy.layouts()[0]]
        return learn(torch.tensor([tokens(boxes)])), None
    if name == "ldm_semantic_synthesis":
        return learn(nn.functional.one_hot(toy_zoo.labels(), 6).permute(0, 3, 1, 2).float()), None
    if name == "rdm768":
        return toy_zoo.neighbours(), torch.zeros_like(toy_zoo.neighbours())
    if name == "ldm_bsr_sr":
        return toy_zoo.picture(name), None
    if name == "ldm_inpainting_big":  # make_batch and what follows, of scripts/inpaint.py
        image, mask = (toy_zoo.picture(name) + 1) / 2, toy_zoo.hole()
        masked, mask = (1 - mask) * image * 2 - 1, mask * 2 - 1
        c = model.cond_stage_model.encode(masked)
        return torch.cat([c, nn.functional.interpolate(mask, size=c.shape[-2:])], dim=1), None
    if name == "x4":
        level = torch.tensor([toy_zoo.NOISE_LEVEL])
        noised = model.low_scale_model.q_sample(toy_zoo.picture(name), level, toy_zoo.upscale_noise())
        return tuple(
            {"c_concat": [noised], "c_crossattn": [context[None]], "c_adm": level}
            for context in toy_zoo.upscale_contexts()
        )
    return None, None


def run(name: str) -> Arrays:
    """The last latents of DDIM (1,C,h,w), and what is decoded from them."""
    model, settings = original(name), toy_zoo.RUNS[name]
    if settings.tile is not None:
        model.split_input_params = {
            "ks": (settings.tile,) * 2,
            "stride": (settings.tile // 2,) * 2,
            "vqf": 4,
            "patch_distributed_vq": True,
            "tie_braker": False,
            "clip_max_weight": 0.5,
            "clip_min_weight": 0.01,
        }
    sampler = importlib.import_module("ldm.models.diffusion.ddim").DDIMSampler(model)
    sampler.register_buffer = lambda name, value: setattr(sampler, name, value)  # not on CUDA
    cond, uncond = conditioning(name, model)
    start = toy_zoo.noise(name)
    guidance = {} if uncond is None else {"unconditional_conditioning": uncond}
    latents, _ = sampler.sample(
        settings.steps,
        batch_size=1,
        shape=start.shape[1:],
        conditioning=cond,
        x_T=start,
        verbose=False,
        unconditional_guidance_scale=settings.scale,
        **guidance,
    )
    arrays = {f"run.{name}.latents": latents}
    if settings.decoded:
        arrays[f"run.{name}.pixels"] = model.decode_first_stage(latents)
    return arrays


def runs(originals: Path) -> Arrays:
    """All of toy_zoo.RUNS."""
    arrays: Arrays = {}
    stubs = ("clip", "kornia", "torchvision.utils", "torchvision", "omegaconf", "taming.modules.vqvae.quantize")
    for repo, names in (("latent-diffusion", [n for n in toy_zoo.RUNS if n != "x4"]), ("stablediffusion", ["x4"])):
        with mock.patch.dict(sys.modules, lightning()), repository(originals / repo, stubs=stubs):
            for name in names:
                arrays |= run(name)
    return arrays


def main() -> None:
    """The command line."""
    originals = folder_of_originals(__doc__)
    sys.path.insert(0, str(originals / "taming-transformers"))  # latent-diffusion imports it
    with torch.no_grad():
        arrays = autoencoders(originals) | embedders(originals) | runs(originals)
        write(DATA / "zoo.npz", arrays, torch.float32, made_with((torch, np), originals, REPOSITORIES))


if __name__ == "__main__":
    main()
