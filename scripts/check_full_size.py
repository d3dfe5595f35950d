"""Compare every network, and whole DDIM and PLMS runs, with diffusers and transformers at full Stable Diffusion size.

    python tests/fixtures/random_checkpoint.py sd1.safetensors
    python scripts/check_full_size.py sd1.safetensors            # --size 256 --steps 50 for the runs

Prints relative errors |ours - theirs| / |theirs| in float32; exits 1 if one exceeds its limit (1e-5 for a network,
1e-4 for a run).  `pip install diffusers transformers`; 12 GB of memory.
"""

import argparse
import sys
import time
from pathlib import Path

import diffusers
import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor

import ldm_lite
from ldm_lite.bench import peers
from ldm_lite.conditioning.prompts import encode_prompts
from ldm_lite.diffusion.guidance import Conditioning, classifier_free
from ldm_lite.diffusion.names import make_plan
from ldm_lite.generate import denoise

PROMPTS = ["a photo of an astronaut riding a horse on mars"]
failures = []


def report(name: str, ours: Tensor, theirs: Tensor, limit: float, start: float) -> None:
    """One line; remembers a failure."""
    error = float((ours - theirs).norm() / theirs.norm())
    print(f"{name:28} {error:.2e}  (limit {limit:.0e})  {time.perf_counter() - start:.0f} s", flush=True)
    if not error <= limit:
        failures.append(name)


@torch.no_grad()
def main() -> int:
    """The command line -> exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", type=Path, help="a .safetensors checkpoint of Stable Diffusion 1.x")
    parser.add_argument("--size", type=int, default=512, help="pixels a side, of the networks' comparison")
    parser.add_argument("--run-size", type=int, default=256, help="pixels a side, of the runs")
    parser.add_argument("--steps", type=int, default=50)
    args = parser.parse_args()
    print(f"torch {torch.__version__}, diffusers {diffusers.__version__}, transformers {transformers.__version__}")
    pipe, weights = ldm_lite.load(args.path, device="cpu", dtype="fp32"), load_file(args.path)
    print(pipe.description, flush=True)
    noise = torch.Generator().manual_seed(0)
    side = args.size // pipe.vae.spec.factor

    start = time.perf_counter()
    text = peers.text_encoder(pipe.family, weights)
    tokens = pipe.tokenizer([*PROMPTS, ""])
    context, uncond = encode_prompts(pipe, [*PROMPTS, ""]).context.chunk(2)
    report("text encoder", torch.cat([context, uncond]), text(tokens).last_hidden_state, 1e-5, start)

    start = time.perf_counter()
    vae = peers.vae(pipe.family, weights)
    image = torch.rand(1, 3, args.size, args.size, generator=noise) * 2 - 1
    moments = vae.encode(image).latent_dist
    report(
        "autoencoder, encode", torch.cat(pipe.vae.encode(image)), torch.cat([moments.mean, moments.logvar]), 1e-5, start
    )
    z = torch.randn(1, 4, side, side, generator=noise)
    start = time.perf_counter()
    report("autoencoder, decode", pipe.vae.decode(z), vae.decode(z).sample, 1e-5, start)
    del vae, text

    unet = peers.unet(pipe.family, weights)
    x = torch.randn(2, pipe.family.unet.in_channels, side, side, generator=noise)
    both = torch.cat([uncond, context])
    for t in (981, 501, 1):
        start = time.perf_counter()
        theirs = unet(x, t, encoder_hidden_states=both).sample
        report(f"UNet at t = {t}", pipe.unet(x, torch.tensor([t, t]), both), theirs, 1e-5, start)

    side = args.run_size // pipe.vae.spec.factor
    first = torch.randn(1, 4, side, side, generator=noise)
    for name in ("ddim", "plms"):
        start, scheduler = time.perf_counter(), peers.schedulers(pipe.family)[name]
        theirs = peers.sample(unet, scheduler(), first, context, uncond, args.steps, scale=7.5)
        branches = classifier_free(Conditioning(context), Conditioning(uncond), 7.5)
        ours = denoise(pipe, first, branches, make_plan(name, pipe.schedule, args.steps))
        report(f"{args.steps} steps of {name}", ours, theirs, 1e-4, start)
    if failures:
        print("too far: " + ", ".join(failures))
    return bool(failures)


if __name__ == "__main__":
    sys.exit(main())
