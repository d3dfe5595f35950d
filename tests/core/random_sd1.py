"""Writes a miniature Stable Diffusion 1.x with random weights, in all the ways in which such files are found."""

import hashlib
import sys
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from ldm_lite.core.clip import CLIPSpec, CLIPTextEncoder
from ldm_lite.core.unet import UNet, UNetSpec
from ldm_lite.core.vae import AutoencoderKL, VAESpec

# Every kind of layer that the released model has.
UNET = UNetSpec(
    in_channels=4,
    out_channels=4,
    model_channels=32,
    channel_mult=(1, 2),
    num_res_blocks=(1, 1),
    transformer_depth=(1, 0),
    middle_depth=1,
    context_dim=64,
    heads=4,
)
VAE = VAESpec(channels=32, channel_mult=(1, 1, 2, 2), num_res_blocks=1, z_channels=4, embed_dim=4)
CLIP = CLIPSpec(vocab_size=49408, length=77, width=64, mlp_width=256, layers=2, heads=4)
# What the weights do not tell: as a file's metadata, and as `metadata=` for files that have none.
FACTS = {"family": "sd1", "unet_num_heads": "4", "text_num_heads": "4", "scale_factor": "0.18215", "resolution": "64"}
METADATA = {f"ldm_lite.{name}": value for name, value in FACTS.items()}

UNET_PREFIX, VAE_PREFIX = "model.diffusion_model.", "first_stage_model."
CLIP_PREFIX = "cond_stage_model.transformer.text_model."


def normal(seed: int, *shape: int) -> Tensor:
    """Unit noise, float32, the same on every machine."""
    return torch.from_numpy(np.random.Generator(np.random.PCG64(seed)).standard_normal(shape, dtype=np.float32))


def random_tensor(key: str, shape: tuple[int, ...], seed: int = 0) -> Tensor:
    """Values that depend on the seed and the key alone, scaled like trained weights."""
    digest = hashlib.sha256(f"{seed} {key}".encode()).digest()
    noise = normal(int.from_bytes(digest[:8], "little"), *shape)
    if len(shape) == 1:
        return noise.mul_(0.05).add_(1.0 if key.endswith("weight") else 0.0)
    return noise.mul_(0.02 if "embedding" in key else float(np.prod(shape[1:])) ** -0.5)


def fill(network: nn.Module, prefix: str = "", seed: int = 0) -> nn.Module:
    """The network with random weights, by its keys after the prefix."""
    shapes = {key: tuple(value.shape) for key, value in network.state_dict().items()}
    network.load_state_dict({key: random_tensor(prefix + key, shape, seed) for key, shape in shapes.items()})
    return network.eval().requires_grad_(False)


def shapes() -> dict[str, tuple[int, ...]]:
    """The shapes of all weights, by their keys in a file."""
    networks = {UNET_PREFIX: UNet(UNET), VAE_PREFIX: AutoencoderKL(VAE), CLIP_PREFIX: CLIPTextEncoder(CLIP)}
    return {
        prefix + key: tuple(value.shape)
        for prefix, network in networks.items()
        for key, value in network.state_dict().items()
    }


def weights(seed: int = 0) -> dict[str, Tensor]:
    """All weights, and buffers that original files hold too."""
    betas = torch.linspace(0.00085**0.5, 0.012**0.5, 1000, dtype=torch.float64) ** 2
    return {
        **{key: random_tensor(key, shape, seed) for key, shape in shapes().items()},
        "betas": betas.float(),
        "alphas_cumprod": torch.cumprod(1 - betas, dim=0).float(),
        CLIP_PREFIX + "embeddings.position_ids": torch.arange(77)[None],
    }


def with_ema(main: Mapping[str, Tensor], average: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A file's weights with the UNet of another as its moving average, whose keys have lost their dots."""
    copies = {
        "model_ema." + key.removeprefix("model.").replace(".", ""): value
        for key, value in average.items()
        if key.startswith(UNET_PREFIX)
    }
    return {**main, **copies, "model_ema.decay": torch.tensor(0.9999), "model_ema.num_updates": torch.tensor(470000)}


def lightning(content: Mapping[str, Tensor]) -> dict[str, Any]:
    """Weights as PyTorch Lightning 1.4 left them: beside a class of its own, numpy numbers and what it was set to.

    The class is a stand-in of the same name, so that Lightning is not needed.
    """
    name = "pytorch_lightning.callbacks.model_checkpoint"
    for module in ("pytorch_lightning", "pytorch_lightning.callbacks", name):
        sys.modules.setdefault(module, types.ModuleType(module))
    callback = type("ModelCheckpoint", (), {"__module__": name, "__qualname__": "ModelCheckpoint"})
    sys.modules[name].ModelCheckpoint = callback  # type: ignore[attr-defined]
    return {
        "epoch": 6,
        "global_step": 470000,
        "pytorch-lightning_version": "1.4.2",
        "state_dict": dict(content),
        "callbacks": {callback: {"monitor": "val/loss", "best_model_score": np.float64(0.1), "history": np.zeros(3)}},
        "optimizer_states": [],
        "hyper_parameters": callback(),
    }


def write(path: Path, content: Mapping[str, Any], container: str = "safetensors") -> Path:
    """Write weights, or what holds them, as "safetensors" with METADATA, or as PyTorch's "zip" or "legacy" format."""
    if container == "safetensors":
        save_file(dict(content), path, METADATA)
    else:
        torch.save(content, path, _use_new_zipfile_serialization=container == "zip")
    return path
