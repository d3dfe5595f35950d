"""A guided step with and without the text's cached keys and values: `python scripts/time_reading_ahead.py`.

In turn, A B, B A, on the bundled model or --ckpt; a hook on the UNet turns the cache off.
"""

import argparse
import statistics
import time

import torch

import ldm_lite
from ldm_lite import generate
from ldm_lite.diffusion.guidance import Conditioning, classifier_free
from ldm_lite.diffusion.names import make_plan

STEPS = 20


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ckpt")
    parser.add_argument("--rounds", type=int, default=40)
    options = parser.parse_args()
    pipe = ldm_lite.load(options.ckpt)
    spec, side = pipe.family.unet, pipe.family.resolution
    assert spec.context_dim is not None
    noise = torch.randn(1, *pipe.latent_shape(side, side))
    cond, uncond = (Conditioning(torch.randn(1, 77, spec.context_dim)) for _ in range(2))
    plan, branches = make_plan("ddim", pipe.schedule, STEPS), classifier_free(cond, uncond, 5.0)

    def step_ms(cached: bool) -> float:
        hook = None if cached else pipe.unet.register_forward_pre_hook(lambda module, args: None)
        start = time.perf_counter()
        latents = generate.denoise(pipe, noise, branches, plan)
        latents.cpu()
        if hook is not None:
            hook.remove()
        return (time.perf_counter() - start) * 1e3 / STEPS

    times: dict[bool, list[float]] = {False: [], True: []}
    for i in range(options.rounds + 1):
        for cached in (False, True) if i % 2 else (True, False):
            times[cached].append(step_ms(cached))
    for cached, name in ((False, "made at every step"), (True, "cached")):
        low, median, high = statistics.quantiles(times[cached][1:], n=4)  # the first is the warm-up
        print(f"{name}: {median:.2f} ms a step, quartiles {low:.2f} to {high:.2f}")
    print(f"ratio {statistics.median(times[True][1:]) / statistics.median(times[False][1:]):.3f}")


if __name__ == "__main__":
    main()
