"""The decoder of Stable Diffusion's size on a CPU, the whole picture at once and strip by strip, in turn.

python scripts/time_strips.py [--size 512] [--dtype float32] [--rounds 12]
"""

import argparse
import statistics
import time

import torch
from torch import nn

from ldm_lite.cli.options import RuntimeOptions
from ldm_lite.models.vae_kl import AutoencoderKL
from ldm_lite.runtime.setup import prepare
from ldm_lite.runtime.tiling import tiled
from ldm_lite.zoo.families import FAMILIES


@torch.inference_mode()
def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=int, default=512)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--rounds", type=int, default=12)
    options = parser.parse_args()
    dtype = getattr(torch, options.dtype)
    whole = AutoencoderKL(FAMILIES["sd1"].vae).eval().to(dtype)
    prepare({"vae": whole}, RuntimeOptions(), torch.device("cpu"))
    strips = tiled(whole)
    z = torch.randn(1, 4, options.size // 8, options.size // 8, dtype=dtype)

    def seconds(vae: AutoencoderKL) -> float:
        start = time.perf_counter()
        vae.decode(z)
        return time.perf_counter() - start

    wanted = whole.decode(z)  # the warm-up
    print(f"relative difference {float((strips.decode(z) - wanted).norm() / wanted.norm()):.1e}")
    times: dict[nn.Module, list[float]] = {whole: [], strips: []}
    for i in range(options.rounds):
        for vae in (whole, strips) if i % 2 else (strips, whole):
            times[vae].append(seconds(vae))
    for name, vae in (("whole", whole), ("in strips", strips)):
        low, median, high = statistics.quantiles(times[vae], n=4)
        print(f"{name}: {median:.2f} s, quartiles {low:.2f} to {high:.2f}")
    ratios = (b / a for a, b in zip(times[whole], times[strips], strict=True))
    print(f"ratio {statistics.median(ratios):.3f}")


if __name__ == "__main__":
    main()
