"""Write a checkpoint in the original layout with random weights: `python scripts/random_checkpoint.py sd1.safetensors`.

No released weights are needed to check loading, parity and speed at full size.  Values depend on the seed and the key
alone, are scaled like trained weights, and are the same on every machine (numpy's PCG64).
"""

import argparse
import math
import sys
import types
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

from ldm_lite.bench.checkpoints import random_tensor
from ldm_lite.checkpoint.reader import EMA, on_meta, prefix
from ldm_lite.diffusion.schedule import linear_betas
from ldm_lite.models.clip import CLIPTextSpec
from ldm_lite.models.open_clip import OpenCLIPTextSpec
from ldm_lite.zoo.detection import describe as metadata
from ldm_lite.zoo.families import FAMILIES, SD1, Family
from ldm_lite.zoo.networks import CLIP_L, KL_F8, SD1_UNET, build

# SD 1.x in miniature: every kind of layer, a few hundred thousand parameters.
SMALL = replace(
    SD1,
    title="small SD1",
    unet=replace(
        SD1_UNET,
        model_channels=32,
        channel_mult=(1, 2),
        num_res_blocks=(1, 1),
        transformer_depth=(1, 0),
        cross_only=(False, False),
        num_heads=4,
        context_dim=64,
    ),
    vae=replace(KL_F8, channels=32, channel_mult=(1, 1, 2, 2), num_res_blocks=1),
    text=replace(CLIP_L, width=64, mlp_width=256, layers=2, heads=4),
    resolution=64,
)


LCM = replace(
    SMALL,
    title="small LCM",
    unet=replace(SMALL.unet, guidance_dim=256),
    **{name: getattr(FAMILIES["lcm"], name) for name in ("sampler", "steps", "scale")},
)

SCALE_FACTOR = 1.7  # in the files of families that do not know it


def small(name: str) -> Family:
    """A family of Stable Diffusion 2 or XL in miniature, by its name in FAMILIES."""
    row = FAMILIES[name]
    large = row.conditioner in ("sdxl", "refiner")
    narrow = {"width": 64, "mlp_width": 256, "layers": 3, "heads": 4}
    wide = {**narrow, "width": 96, "mlp_width": 384}
    text = replace(row.text, **(wide if row.conditioner == "refiner" else narrow))
    text_2 = None if row.text_2 is None else replace(row.text_2, **wide)
    numbers = {"sdxl": 6 * 256, "refiner": 5 * 256}
    return replace(
        row,
        title=f"small {row.title}",
        unet=replace(
            row.unet,
            model_channels=32,
            channel_mult=(1, 2),
            num_res_blocks=(1, 1),
            transformer_depth=(0, 2) if large else (1, 0),
            middle_depth=2 if large else 1,
            head_dim=16,
            cross_only=(False, False),
            context_dim=text.width + (0 if text_2 is None else text_2.width),
            vector_dim=96 + numbers[row.conditioner] if large else 48 if row.unet.vector_dim else None,
        ),
        vae=SMALL.vae,
        text=text,
        text_2=text_2,
        resolution=64,
    )


def state_dict(family: Family, seed: int = 0) -> Iterator[tuple[str, Tensor]]:
    """(key, tensor) of every weight of a whole file in the original layout, and of its schedule buffers."""
    with on_meta():
        weights = {role: build(spec).state_dict() for role, spec in family.networks.items()}
    for role, values in weights.items():
        for key, value in values.items():
            name = prefix(role, values, family.sgm) + key
            yield name, random_tensor(name, tuple(value.shape), seed)
    if isinstance(family.text, OpenCLIPTextSpec):
        yield prefix("text_encoder", weights["text_encoder"], family.sgm) + "logit_scale", torch.tensor(4.6)
    betas = linear_betas(family.beta_start, family.beta_end)
    yield "betas", torch.from_numpy(betas).float()
    yield "alphas_cumprod", torch.from_numpy(np.cumprod(1 - betas)).float()
    if math.isnan(family.scale_factor):
        yield "scale_factor", torch.tensor(SCALE_FACTOR)
    if isinstance(family.text, CLIPTextSpec):
        ids = torch.arange(family.text.length)[None]
        yield prefix("text_encoder", weights["text_encoder"], family.sgm) + "embeddings.position_ids", ids


def lightning(weights: dict[str, Tensor]) -> dict[str, object]:
    """Weights as PyTorch Lightning 1.4 left them: wrapped, beside a callback class and numpy scalars.

    The class is a stand-in of the same name, made here so that Lightning is not needed.
    """
    name = "pytorch_lightning.callbacks.model_checkpoint"
    module = sys.modules.setdefault(name, types.ModuleType(name))
    callback = type("ModelCheckpoint", (), {"__module__": name, "__qualname__": "ModelCheckpoint"})
    module.ModelCheckpoint = callback  # type: ignore[attr-defined]
    for parent in ("pytorch_lightning", "pytorch_lightning.callbacks"):
        sys.modules.setdefault(parent, types.ModuleType(parent))
    return {
        "epoch": 6,
        "global_step": 470000,
        "pytorch-lightning_version": "1.4.2",
        "state_dict": weights,
        "callbacks": {callback: {"monitor": "val/loss", "best_model_score": np.float64(0.1), "history": np.zeros(3)}},
        "optimizer_states": [],
    }


def write(
    path: Path,
    family: Family,
    *,
    container: str = "safetensors",
    dtype: torch.dtype = torch.float32,
    ema: bool = False,
    wrapped: bool = True,
    text_model: bool = True,
    seed: int = 0,
) -> None:
    """Write a file as "safetensors", "zip" or "legacy" (torch); with ema the main UNet is that of another seed."""
    main = dict(state_dict(family, seed + 1 if ema else seed))
    if ema:
        unet = "model.diffusion_model."
        true = dict(state_dict(family, seed))
        copies = {
            EMA + "diffusion_model" + k.removeprefix(unet).replace(".", ""): v for k, v in true.items() if unet in k
        }
        main = {**{k: main[k] if unet in k else v for k, v in true.items()}, **copies}
        main |= {EMA + "decay": torch.tensor(0.9999), EMA + "num_updates": torch.tensor(470000)}
    if not text_model:
        main = {key.replace("transformer.text_model.", "transformer."): value for key, value in main.items()}
    main = {key: value.to(dtype) if value.is_floating_point() else value for key, value in main.items()}
    if container == "safetensors":
        save_file(
            main, path, metadata=metadata(family) if family.title not in {f.title for f in FAMILIES.values()} else None
        )
    else:
        content = lightning(main) if wrapped else main
        torch.save(content, path, _use_new_zipfile_serialization=container == "zip")


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", type=Path)
    parser.add_argument("--family", choices=["small", *FAMILIES], default="sd1")
    parser.add_argument("--container", choices=["safetensors", "zip", "legacy"], default="safetensors")
    parser.add_argument("--fp16", action="store_true")
    parser.add_argument("--ema", action="store_true", help="add an EMA copy; the main UNet is then another")
    parser.add_argument("--flat", action="store_true", help="no Lightning wrapper around a torch file")
    parser.add_argument("--no-text-model", action="store_true", help="old exports' keys, without text_model.")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    write(
        args.path,
        SMALL if args.family == "small" else FAMILIES[args.family],
        container=args.container,
        dtype=torch.float16 if args.fp16 else torch.float32,
        ema=args.ema,
        wrapped=not args.flat,
        text_model=not args.no_text_model,
        seed=args.seed,
    )


if __name__ == "__main__":
    main()
