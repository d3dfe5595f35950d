"""Compare one call of a DeepFloyd IF stage of full size, with random weights, with the original's own code.

    git clone https://github.com/deep-floyd/IF
    python scripts/check_if_size.py --originals . --stage I-L

Writes the stage's file, loads it as `ldm_lite.cascade` does, and prints seconds, peak memory and the relative error
|ours - theirs| / |theirs| in float32; exits 1 if that exceeds 1e-5.
"""

import argparse
import importlib
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import torch
from make_goldens import repository
from random_checkpoint import random_tensor

import ldm_lite
from ldm_lite.checkpoint.reader import on_meta
from ldm_lite.cli.progress import memory
from ldm_lite.models.ops import timestep_embedding
from ldm_lite.models.unet_if import IFSpec, UNetIF
from ldm_lite.zoo.networks import IF_I_XL, IF_II_L

STAGES = {
    "I-M": replace(IF_I_XL, model_channels=192),
    "I-L": replace(IF_I_XL, model_channels=320),
    "I-XL": IF_I_XL,
    "II-M": replace(IF_II_L, model_channels=96),
    "II-L": IF_II_L,
}


def original(spec: IFSpec, originals: Path) -> torch.nn.Module:
    """The original's network of the same size, on the meta device."""
    size = 256 if spec.super_resolution else 64
    resolutions = [size >> level for level, depth in enumerate(spec.transformer_depth) if depth]
    with repository(originals / "IF", ("deepfloyd_if", "deepfloyd_if.model")), torch.device("meta"):
        model = importlib.import_module("deepfloyd_if.model.unet")
        return (model.SuperResUNetModel if spec.super_resolution else model.UNetModel)(
            **({"low_res_diffusion": None} if spec.super_resolution else {}),
            in_channels=spec.in_channels,
            model_channels=spec.model_channels,
            out_channels=spec.out_channels,
            num_res_blocks=list(spec.num_res_blocks),
            attention_resolutions=",".join(map(str, resolutions)),
            activation="gelu",
            encoder_dim=spec.context_dim,
            att_pool_heads=spec.pool_heads,
            encoder_channels=spec.emb_channels,
            image_size=size,
            channel_mult=",".join(map(str, spec.channel_mult)),
            num_head_channels=spec.head_dim,
            use_scale_shift_norm=True,
            resblock_updown=True,
            efficient_activation=spec.super_resolution,
            scale_skip_connection=spec.super_resolution,
        )


@torch.no_grad()
def main() -> int:
    """The command line -> exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--originals", type=Path, required=True, help="the folder of the cloned repository")
    parser.add_argument("--stage", choices=STAGES, default="I-L")
    parser.add_argument("--size", type=int, default=64, help="pixels a side")
    args = parser.parse_args()
    spec = STAGES[args.stage]
    with on_meta():
        shapes = {key: tuple(value.shape) for key, value in UNetIF(spec).state_dict().items()}
    noise = torch.Generator().manual_seed(0)
    x = torch.randn(1, spec.in_channels, args.size, args.size, generator=noise)
    t, context = torch.tensor([501.0]), torch.randn(1, 77, 4096, generator=noise)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"IF-{args.stage}.bin"
        torch.save({key: random_tensor(key, shape) for key, shape in shapes.items()}, path)
        pipe = ldm_lite.load(path, device="cpu", dtype="fp32")
        print(f"{pipe.description}; {memory()}", flush=True)
        start = time.perf_counter()
        ours = pipe.unet(x, t, context, torch.tensor([250.0]) if spec.super_resolution else None)
        print(f"one call at {args.size} px: {time.perf_counter() - start:.1f} s; {memory()}", flush=True)
        theirs = original(spec, args.originals.resolve())
        theirs.load_state_dict(pipe.unet.state_dict(), strict=True, assign=True)
        theirs.eval()
        start, level, forward = time.perf_counter(), {}, type(theirs).forward
        if spec.super_resolution:  # its forward draws noise: what that calls does not
            level = {"aug_emb": theirs.aug_proj(timestep_embedding(torch.tensor([250.0]), spec.model_channels))}
            forward = type(theirs).__base__.forward
        out = forward(theirs, x, t, context, **level)
        print(f"the original: {time.perf_counter() - start:.1f} s")
    error = float((ours - out).norm() / out.norm())
    print(f"relative error {error:.1e}  (limit 1e-05)")
    return int(error > 1e-5)


if __name__ == "__main__":
    sys.exit(main())
