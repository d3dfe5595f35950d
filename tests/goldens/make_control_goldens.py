"""Make tests/data/control.npz and if.npz: what the original ControlNet, T2I-Adapter and DeepFloyd IF compute.

    pip install diffusers einops omegaconf opencv-python-headless ftfy beautifulsoup4
    git clone https://github.com/lllyasviel/ControlNet && git clone https://github.com/deep-floyd/IF
    git clone https://github.com/TencentARC/T2I-Adapter && git -C T2I-Adapter worktree add ../T2I-Adapter-SD origin/SD
    PYTHONPATH=tests/fixtures:scripts python tests/goldens/make_control_goldens.py --originals .

The networks are the originals' own classes, filled with toy.fill's weights, in float32; modules needed only for
importing them are replaced by empty ones.
"""

import importlib
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import cv2
import diffusers
import numpy as np
import peers
import torch
import toy
from diffusers import ControlNetModel
from diffusers.loaders.single_file_utils import convert_controlnet_checkpoint
from make_goldens import COMPVIS, STABILITY
from making import DATA, Arrays, folder_of_originals, made_with, repository, write
from random_checkpoint import SMALL, random_tensor, state_dict
from torch import Tensor

from ldm_lite.diffusion.spacings import SECTIONS
from ldm_lite.models.controlnet import ControlNet
from ldm_lite.models.unet import LDMUNet

PREFIX = "model.diffusion_model."

CONTROL_STUBS = ("torchvision.utils", "torchvision", "ldm.models.diffusion.ddpm", "ldm.models.diffusion.ddim")
KEPT = (6, -1)  # of a ControlNet's results: of the last downsampler and of the middle


def controlnets(originals: Path) -> Arrays:
    """A ControlNet's results and those of the UNet that it steers: plain, in guess mode, averaged over the image."""
    arrays: Arrays = {}
    with repository(originals / "ControlNet", ("cldm",), CONTROL_STUBS):
        cldm = importlib.import_module("cldm.cldm")
        for name, config in (("sd1", COMPVIS), ("sd2", STABILITY)):
            network = toy.fill(
                cldm.ControlNet(**{k: v for k, v in config.items() if k != "out_channels"}, hint_channels=3)
            )
            unet = toy.fill(cldm.ControlledUnetModel(**config))
            x, context, _ = toy.unet_inputs(toy.UNETS[name])
            control = network(x=x, hint=toy.picture(), timesteps=toy.T, context=context)
            arrays |= {f"control.{name}.{i}": control[i] for i in KEPT}
            last = len(control) - 1
            variants = {
                "plain": control,
                "half": [0.5 * c for c in control],
                "guess": [0.825 ** (last - i) * c for i, c in enumerate(control)],
                "pool": [c.mean(dim=(2, 3), keepdim=True) for c in control],
            }
            for variant, residuals in variants.items():
                # The original adds in place: it is given copies.
                out = unet(x, toy.T, context=context, control=[c.clone() for c in residuals])
                arrays[f"controlled.{name}.{variant}"] = out
    arrays |= {f"control.diffusers.{i}": value for i, value in diffusers_control().items()}
    return arrays


def diffusers_control() -> dict[int, Tensor]:
    """The same network by diffusers, at an odd size."""
    spec = toy.SD1
    config: dict[str, Any] = {
        "block_out_channels": tuple(spec.model_channels * mult for mult in spec.channel_mult),
        "layers_per_block": 2,
        "down_block_types": ("CrossAttnDownBlock2D", "CrossAttnDownBlock2D", "DownBlock2D"),
        "cross_attention_dim": spec.context_dim,
        "attention_head_dim": 4,
        "conditioning_embedding_out_channels": (16, 32, 96, 256),
    }
    weights = toy.fill(ControlNet(spec)).state_dict()
    network = ControlNetModel(**config)
    network.load_state_dict(convert_controlnet_checkpoint(dict(weights), config), strict=True)
    x, context, _ = toy.unet_inputs(spec, h=9, w=7)
    down, middle = network.eval()(x, toy.T, context, toy.picture(h=72, w=56).expand(2, -1, -1, -1), return_dict=False)
    results = [*down, middle]
    return {i: results[i] for i in KEPT}


def steered() -> Arrays:
    """Ten guided steps on the small Stable Diffusion 1 by diffusers, steered by OpenCV's edges of an image."""
    weights = {f"control_model.{key}": value for key, value in toy.control(SMALL.unet).items()}
    config: dict[str, Any] = {
        "block_out_channels": (32, 64),
        "layers_per_block": 1,
        "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
        "cross_attention_dim": 64,
        "attention_head_dim": 4,
        "conditioning_embedding_out_channels": (16, 32, 96, 256),
    }
    network = ControlNetModel(**config)
    network.load_state_dict(convert_controlnet_checkpoint(weights, config), strict=True)
    unet = peers.unet(SMALL, dict(state_dict(SMALL)))
    context = torch.cat([toy.normal(12, 1, 5, 64), toy.normal(13, 1, 5, 64)])
    edges = torch.from_numpy(cv2.Canny(toy.photo(), 100, 200))[None, None].expand(2, 3, -1, -1) / 255
    arrays = {}
    for name, (weight, last, guess) in toy.STEERED.items():
        x, scheduler = toy.normal(11, 1, 4, 8, 8), peers.schedulers(SMALL)["ddim"]()
        scheduler.set_timesteps(10)
        for step, t in enumerate(scheduler.timesteps):
            both = torch.cat([x, x])
            down, middle = network(both, t, context, edges, conditioning_scale=weight, return_dict=False)
            if step >= last:
                down, middle = [0 * residual for residual in down], 0 * middle
            if guess:
                factors = [0.825 ** (len(down) - i) for i in range(len(down))]
                down = [factor * residual for factor, residual in zip(factors, down, strict=True)]
                for residual in (*down, middle):
                    residual[0] = 0
            out = unet(both, t, context, down_block_additional_residuals=down, mid_block_additional_residual=middle)
            uncond, cond = out.sample.chunk(2)
            x = scheduler.step(uncond + 7.5 * (cond - uncond), t, x).prev_sample
        arrays[f"steered.{name}"] = x
    for low, high in toy.THRESHOLDS:
        arrays[f"canny.{low}"] = torch.from_numpy(cv2.Canny(toy.photo(45, 70), low, high)).float()
    return arrays


def adapters(originals: Path) -> Arrays:
    """Features of every kind of adapter, and the output of the UNet that they go into (for SDXL's, by diffusers)."""
    arrays: Arrays = {}
    sd = originals / "T2I-Adapter-SD"
    with repository(sd, ("ldm.modules.extra_condition",), ("ldm.modules.extra_condition.api", "pytorch_lightning")):
        module = importlib.import_module("ldm.modules.encoders.adapter")
        model = importlib.import_module("ldm.modules.diffusionmodules.openaimodel").UNetModel
        x, context, _ = toy.unet_inputs(toy.SD1)
        for name in ("rgb", "gray", "light"):
            spec = toy.ADAPTERS[name]
            arguments: dict[str, Any] = {"cin": 64 * spec.in_channels, "channels": list(spec.channels), "nums_rb": 2}
            if spec.light:
                network = module.Adapter_light(**arguments)
            else:
                network = module.Adapter(**arguments, ksize=1, sk=True, use_conv=False)
            features = toy.fill(network)(toy.picture(spec.in_channels))
            arrays[f"adapted.{name}"] = toy.fill(model(**COMPVIS))(x, toy.T, context=context, features_adapter=features)
    with repository(originals / "T2I-Adapter", ("Adapter", "Adapter.models")):
        module = importlib.import_module("Adapter.models.adapters")
        spec = toy.ADAPTERS["xl"]
        network = module.Adapter_XL(cin=256, channels=list(spec.channels), nums_rb=2, ksize=1, sk=True, use_conv=False)
        features = toy.fill(network)(toy.picture(1))
    spec = toy.UNETS["sdxl_base"]
    shapes = {PREFIX + key: tuple(value.shape) for key, value in LDMUNet(spec).state_dict().items()}
    unet = peers.unet(
        replace(SMALL, unet=spec, conditioner="unclip"),
        {key: random_tensor(key, shape) for key, shape in shapes.items()},
    )
    x, context, y = toy.unet_inputs(spec)
    both = [feature.expand(2, -1, -1, -1).clone() for feature in features]
    out = unet(x, toy.T, context, class_labels=y, down_intrablock_additional_residuals=both)
    arrays["adapted.xl"] = out.sample
    return arrays


IF: dict[str, dict[str, Any]] = {
    "if_I": {
        "in_channels": 3,
        "model_channels": 32,
        "out_channels": 6,
        "num_res_blocks": [2, 2, 2],
        "attention_resolutions": "8,4",
        "activation": "gelu",
        "encoder_dim": 48,
        "att_pool_heads": 4,
        "encoder_channels": 96,
        "image_size": 16,
        "channel_mult": "1,2,3",
        "num_head_channels": 16,
        "use_scale_shift_norm": True,
        "resblock_updown": True,
    },
}
IF["if_II"] = IF["if_I"] | {
    "in_channels": 6,
    "num_res_blocks": [1, 2, 3],
    "attention_resolutions": "4",
    "efficient_activation": True,
    "scale_skip_connection": True,
}


def deepfloyd(originals: Path) -> Arrays:
    """Both stages' UNets."""
    arrays: Arrays = {}
    with repository(originals / "IF", ("deepfloyd_if", "deepfloyd_if.model")):
        module = importlib.import_module("deepfloyd_if.model.unet")
        nn = importlib.import_module("deepfloyd_if.model.nn")
        for name, arguments in IF.items():
            x, context, y = toy.if_inputs(toy.IF_STAGES[name])
            if y is None:
                arrays[name] = toy.fill(module.UNetModel(**arguments))(x, toy.T, context)
                continue
            network = toy.fill(module.SuperResUNetModel(low_res_diffusion=None, **arguments))
            noise_level = network.aug_proj(nn.timestep_embedding(y, 32))
            arrays[name] = module.UNetModel.forward(network, x, toy.T, context, aug_emb=noise_level)
    return arrays


def deepfloyd_sampling(originals: Path) -> Arrays:
    """Every table of timesteps, and the trajectories of toy.IF_RUNS; all in float64, which the original's tables are.

    What is changed in it: its tables are read as they are, not as float32, and noise comes from toy.noises.
    """
    arrays: Arrays = {}
    with repository(originals / "IF", ("deepfloyd_if", "deepfloyd_if.model")):
        respace = importlib.import_module("deepfloyd_if.model.respace")
        diffusion = importlib.import_module("deepfloyd_if.model.gaussian_diffusion")
        diffusion._extract_into_tensor = lambda table, t, shape: torch.from_numpy(table)[t][:, None, None, None]
        for name in (*SECTIONS, *map(str, toy.IF_STEPS)):
            ts = sorted(respace.space_timesteps(1000, TABLES.get(name, name)), reverse=True)
            arrays[f"timesteps.{name}"] = torch.tensor(ts).double()
        for name, (respacing, percentile, limit, scale) in toy.IF_RUNS.items():
            process = respace.create_gaussian_diffusion(
                learn_sigma=True,
                noise_schedule="cosine",
                rescale_timesteps=True,
                rescale_learned_sigmas=True,
                timestep_respacing=TABLES.get(respacing, respacing),
            )
            fresh = iter(torch.from_numpy(toy.noises(60)))
            start = next(fresh)
            with mock.patch.object(torch, "randn_like", noise_like(fresh)):
                samples = process.p_sample_loop_progressive(
                    if_model(scale),
                    start.shape if scale is None else (4, *start.shape[1:]),
                    noise=start if scale is None else torch.cat([start, start]),
                    dynamic_thresholding_p=percentile,
                    dynamic_thresholding_c=limit,
                    device="cpu",
                )
                states = [sample["sample"][: len(start)] for sample in samples]
            arrays[f"run.{name}"] = torch.stack(states)
    return arrays


def deepfloyd_cascade(originals: Path) -> Arrays:
    """Both stages in miniature, one after the other, guided, in float64; noise is drawn as ldm_lite.cascade draws it.

    What is changed in it, beside deepfloyd_sampling's changes: both halves of the batch have the same noise.
    """
    small = {"model_channels": 64, "num_res_blocks": 1, "attention_resolutions": "8", "channel_mult": "1,2"}
    small |= {"encoder_dim": 192, "att_pool_heads": 3, "encoder_channels": 128, "num_head_channels": 64}
    context, uncond = toy.normal(21, 1, 7, 192).double(), toy.normal(22, 1, 7, 192).double()
    arrays: Arrays = {}
    image = torch.zeros(())
    with repository(originals / "IF", ("deepfloyd_if", "deepfloyd_if.model")):
        module = importlib.import_module("deepfloyd_if.model.unet")
        respace = importlib.import_module("deepfloyd_if.model.respace")
        diffusion = importlib.import_module("deepfloyd_if.model.gaussian_diffusion")
        diffusion._extract_into_tensor = lambda table, t, shape: torch.from_numpy(table)[t][:, None, None, None]
        common = {"learn_sigma": True, "noise_schedule": "cosine", "rescale_timesteps": True}
        common |= {"rescale_learned_sigmas": True}
        for name, size, respacing, scale, limit in (("if_I", 8, "4", 7.0, 1.5), ("if_II", 32, "3", 4.0, 1.0)):
            arguments = IF[name] | small
            extra: dict[str, Any] = {}
            if name == "if_II":
                arguments["low_res_diffusion"] = respace.create_gaussian_diffusion(**common)
                extra = {"low_res": image.repeat(2, 1, 1, 1), "aug_level": 0.25}
            kind = module.SuperResUNetModel if extra else module.UNetModel
            network = toy.fill(kind(**arguments).float()).double()
            network.dtype = torch.float64
            process = respace.create_gaussian_diffusion(**common, timestep_respacing=respacing)
            noise = cascade_noise(size, int(respacing), again=bool(extra))
            start = next(noise)
            exactly = mock.patch.object(torch, "float32", torch.float64)  # of the timesteps' embedding
            with mock.patch.object(torch, "randn_like", noise_like(noise)), exactly:
                image = process.p_sample_loop(
                    guided_if(network, scale),
                    (2, 3, size, size),
                    noise=start.repeat(2, 1, 1, 1),
                    dynamic_thresholding_p=0.95,
                    dynamic_thresholding_c=limit,
                    model_kwargs={"text_emb": torch.cat([context, uncond]), **extra},
                    device="cpu",
                )[:1]
            arrays[f"cascade.{name}"] = image
    return arrays


def guided_if(network: Callable[..., Tensor], scale: float) -> Callable[..., Tensor]:
    """A network on [cond, uncond], as the original's embeddings_to_image calls it."""

    def model(x: Tensor, t: Tensor, **arguments: Any) -> Tensor:
        half = x[: len(x) // 2]
        out = network(torch.cat([half, half]), t, **arguments)
        cond, uncond = out[:, :3].chunk(2)
        mixed = uncond + scale * (cond - uncond)
        return torch.cat([torch.cat([mixed, mixed]), out[:, 3:]], dim=1)

    return model


single = torch.float32  # also where that name means another


def cascade_noise(size: int, steps: int, again: bool) -> Iterator[Tensor]:
    """One image's noise in the original's order: the first, then for each step the small image's and its own."""
    generator = torch.Generator().manual_seed(42)

    def draw() -> Tensor:
        return torch.randn(3, size, size, generator=generator, dtype=single).double()[None]

    yield draw()
    for step in range(steps):
        step_noise = draw() if step < steps - 1 else torch.zeros(1, 3, size, size)
        if again:
            yield draw()
        yield step_noise


def captions(originals: Path) -> list[str]:
    """toy.CAPTIONS as the original cleans them."""
    with repository(originals / "IF", ("deepfloyd_if", "deepfloyd_if.modules")):
        embedder = importlib.import_module("deepfloyd_if.modules.t5").T5Embedder
    cleaner = embedder.__new__(embedder)
    cleaner.use_text_preprocessing = True
    return [cleaner.text_preprocessing(text) for text in toy.CAPTIONS]


TABLES = {"fast27": "fast27", **{k: ",".join(map(str, v)) for k, v in SECTIONS.items() if k != "fast27"}}


def noise_like(fresh: Iterator[Tensor]) -> Callable[[Tensor], Tensor]:
    """Stands for torch.randn_like: the same noise for both halves of a guided batch."""

    def noise(x: Tensor) -> Tensor:
        half = next(fresh)
        return half.repeat(len(x) // len(half), 1, 1, 1)

    return noise


def if_model(scale: float | None) -> Callable[..., Tensor]:
    """The network as the original's embeddings_to_image calls it: cond, which keeps its variance, then uncond."""
    uncond, cond = (torch.from_numpy(value) for value in toy.contexts())

    def plain(x: Tensor, t: Tensor) -> Tensor:
        return toy.denoiser_with_variance(x, t)

    def guided(x: Tensor, t: Tensor) -> Tensor:
        half = x[: len(x) // 2]
        out = toy.denoiser_with_variance(torch.cat([half, half]), t, torch.cat([cond, uncond]))
        eps, variance = out.chunk(2, dim=1)
        with_text, without = eps.chunk(2)
        mixed = without + scale * (with_text - without)
        return torch.cat([torch.cat([mixed, mixed]), variance], dim=1)

    return plain if scale is None else guided


def main() -> None:
    """The command line."""
    originals = folder_of_originals(__doc__)
    repositories = ("ControlNet", "IF", "T2I-Adapter", "T2I-Adapter-SD")
    about = made_with((torch, np, diffusers, cv2), originals, repositories)
    cleaned = json.dumps(captions(originals), ensure_ascii=False, indent=1)
    (DATA / "captions.json").write_text(cleaned + "\n", encoding="utf-8")
    with torch.no_grad():
        arrays = controlnets(originals) | steered() | adapters(originals) | deepfloyd(originals)
        write(DATA / "control.npz", arrays, torch.float32, about)
        torch.set_default_dtype(torch.float64)
        write(DATA / "if.npz", deepfloyd_sampling(originals) | deepfloyd_cascade(originals), torch.float64, about)


if __name__ == "__main__":
    main()
