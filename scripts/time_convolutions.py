"""Time 3x3 convolutions at Stable Diffusion's sizes, plain and Winograd: `python scripts/time_convolutions.py`.

One thread, and its CPU time rather than the clock's, so that other processes disturb it less; the fastest of --rounds.
"""

import argparse
import time

import torch
from torch.nn import functional as F

from ldm_lite.bench.subjects import random_checkpoint
from ldm_lite.checkpoint.reader import load_weights, on_meta, split
from ldm_lite.runtime.cpu import winograd
from ldm_lite.runtime.setup import keep_freed_memory
from ldm_lite.zoo.families import FAMILIES
from ldm_lite.zoo.networks import build

# (B, C, K, side): of a guided step at 512 px, then of the decoder
SHAPES = [
    (2, 320, 320, 64),
    (2, 960, 320, 64),
    (2, 640, 640, 32),
    (2, 1920, 640, 32),
    (2, 1280, 1280, 32),
    (2, 1280, 1280, 16),
    (1, 512, 512, 64),
    (1, 512, 512, 128),
    (1, 256, 256, 256),
    (1, 128, 128, 512),
]


@torch.no_grad()
def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    time_decoder(rounds)  # first: what it begins with ends with keep_freed_memory
    time_convolutions(rounds)


def time_decoder(rounds: int) -> None:
    """Stable Diffusion 1.x's decoder with random weights at 256 px: as it stands, memory kept, Winograd too."""
    family = FAMILIES["sd1"]
    with on_meta():
        vae = build(family.networks["vae"])
    load_weights(vae, split(random_checkpoint("sd1", family))["vae"], "vae", torch.device("cpu"), torch.float32)
    latents = torch.randn(1, 4, 32, 32)
    ways = {
        "as it stands": lambda: None,
        "memory kept": keep_freed_memory,
        "and Winograd": lambda: winograd.use(vae),
    }
    for name, begin in ways.items():
        begin()
        times = []
        for _ in range(1 + rounds):
            start = time.process_time()
            vae.decode(latents)
            times.append(time.process_time() - start)
        print(f"decoder at 256 px, {name}: {min(times[1:]):.2f} s", flush=True)


def time_convolutions(rounds: int) -> None:
    """Each of SHAPES, both ways."""
    keep_freed_memory()
    print("shape, tile, plain ms, Winograd ms, ratio, relative difference")
    for batch, channels, num_out, side in SHAPES:
        x = torch.randn(batch, channels, side, side).to(memory_format=torch.channels_last)
        weight, bias = torch.randn(num_out, channels, 3, 3) / (9 * channels) ** 0.5, torch.randn(num_out)
        m = winograd.tile(x, weight)
        assert m is not None
        times = {"plain": float("inf"), "winograd": float("inf")}
        for _ in range(rounds):
            start = time.process_time()
            wanted = F.conv2d(x, weight, bias, padding=1)
            between = time.process_time()
            found = winograd.convolve(x, weight, bias, m)
            end = time.process_time()
            times = {"plain": min(times["plain"], between - start), "winograd": min(times["winograd"], end - between)}
        plain, fast = (1e3 * value for value in times.values())
        difference = (found - wanted).norm() / wanted.norm()
        shape = f"{batch} x {channels} -> {num_out}, {side} x {side}"
        print(f"{shape}, F({m}), {plain:.1f}, {fast:.1f}, {fast / plain:.2f}, {difference:.1e}", flush=True)


if __name__ == "__main__":
    main()
