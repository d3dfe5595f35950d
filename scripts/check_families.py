"""Load Stable Diffusion 2 or XL at full size with random weights, run two guided steps, and compare with diffusers.

    pip install diffusers transformers && pip install --no-deps open_clip_torch
    python scripts/check_families.py sd2 --dtype fp32
    python scripts/check_families.py sdxl_base --dtype bf16

Each side runs in a process of its own, one after the other, and makes its weights as it reads them, so that no file is
written.  Prints how long loading and two steps of DDIM took, the peak of the process's memory, and how far apart the
latents are; exits 1 if that is more than 1e-4 (float32) or 5e-2 (bfloat16).
"""

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from torch import Tensor

import ldm_lite
from ldm_lite.bench.subjects import random_checkpoint
from ldm_lite.runtime.precision import DTYPES
from ldm_lite.zoo.families import FAMILIES

PROMPT, NEGATIVE, SCALE, STEPS = "a photo of an astronaut riding a horse on mars", "blurry", 5.0, 2
LIMITS = {"fp32": 1e-4, "bf16": 5e-2, "fp16": 5e-2}


def ours(name: str, dtype: str, noise: Tensor) -> tuple[float, float, Tensor]:
    """Seconds to load, seconds for the steps, the latents."""
    from ldm_lite.conditioning.prompts import PromptOptions, encode_prompts
    from ldm_lite.diffusion.guidance import classifier_free
    from ldm_lite.diffusion.names import make_plan
    from ldm_lite.generate import denoise

    start = time.perf_counter()
    pipe = ldm_lite.load(random_checkpoint(name, FAMILIES[name]), device="cpu", dtype=dtype, prediction="eps")
    loaded = time.perf_counter()
    size = (noise.shape[2] * 8, noise.shape[3] * 8)
    cond, uncond = (encode_prompts(pipe, [prompt], PromptOptions(size=size)) for prompt in (PROMPT, NEGATIVE))
    latents = denoise(pipe, noise, classifier_free(cond, uncond, SCALE), make_plan("ddim", pipe.schedule, STEPS))
    return loaded - start, time.perf_counter() - loaded, latents


def theirs(name: str, dtype: str, noise: Tensor) -> tuple[float, float, Tensor]:
    """The same by diffusers' pipeline."""
    from make_family_goldens import sd2_pipeline, sdxl_pipeline, tokenizers

    start = time.perf_counter()
    checkpoint = random_checkpoint(name, FAMILIES[name])
    weights = {key: checkpoint.read(key).to(DTYPES[dtype]) for key in checkpoint.shapes}
    first, second = tokenizers()
    family = FAMILIES[name]
    if len(family.text_encoders) == 1:
        pipe = sd2_pipeline(family, weights, second)
    else:
        pipe = sdxl_pipeline(family, weights, first, second)
    del weights
    loaded = time.perf_counter()
    latents = pipe(
        PROMPT,
        negative_prompt=NEGATIVE,
        num_inference_steps=STEPS,
        guidance_scale=SCALE,
        height=noise.shape[2] * 8,
        width=noise.shape[3] * 8,
        latents=noise.to(DTYPES[dtype]),
        output_type="latent",
    ).images
    return loaded - start, time.perf_counter() - loaded, latents


def main() -> int:
    """The command line -> exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("family", choices=["sd2", "sdxl_base"])
    parser.add_argument("--dtype", choices=LIMITS, default="fp32")
    parser.add_argument("--size", type=int, default=256, help="pixels a side")
    parser.add_argument("--side", help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.side is not None:
        noise = torch.randn(1, 4, args.size // 8, args.size // 8, generator=torch.Generator().manual_seed(0))
        with torch.no_grad():
            load, steps, latents = (ours if args.side == "ldm_lite" else theirs)(args.family, args.dtype, noise)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
        torch.save(latents.float(), args.out)
        print(json.dumps({"load": load, "steps": steps, "peak": peak}))
        return 0

    print(f"{FAMILIES[args.family].title}, {args.dtype}, {args.size} px, torch {torch.__version__}")
    latents = {}
    with tempfile.TemporaryDirectory() as folder:
        for side in ("ldm_lite", "diffusers"):
            out = Path(folder) / f"{side}.pt"
            command = [sys.executable, __file__, args.family, "--dtype", args.dtype, "--size", str(args.size)]
            done = subprocess.run(
                [*command, "--side", side, "--out", str(out)], stdout=subprocess.PIPE, text=True, check=True
            )
            took = json.loads(done.stdout.splitlines()[-1])
            print(
                f"{side:10} load {took['load']:.0f} s, {STEPS} steps {took['steps']:.1f} s, "
                f"peak {took['peak']:.2f} GiB",
                flush=True,
            )
            latents[side] = torch.load(out, weights_only=True)
    error = float((latents["ldm_lite"] - latents["diffusers"]).norm() / latents["diffusers"].norm())
    print(f"latents    {error:.2e} apart (limit {LIMITS[args.dtype]:.0e})")
    return int(not error <= LIMITS[args.dtype])


if __name__ == "__main__":
    sys.exit(main())
