"""Make tests/data/tricks.npz: what the authors' or diffusers' code makes of runs that save evaluations.

    pip install diffusers k-diffusion && pip install --no-deps DeepCache==0.1.1 tgate==1.0.0
    git clone https://github.com/mcmonkeyprojects/sd-dynamic-thresholding
    PYTHONPATH=tests/fixtures:scripts:sd-dynamic-thresholding python tests/goldens/make_trick_goldens.py

A miniature Stable Diffusion 1.x with three levels, in float64; five steps of DDIM with guidance.  DeepCache's helper
and T-GATE's attention, as the authors publish them, and diffusers' FreeU run diffusers' UNet; APG is diffusers'
normalized_guidance of x0; the mimic scale is that of the web UI's extension; Brownian noise is torchsde's, through
k-diffusion, whose samplers run x0 = tanh(y / (1 + sigma^2)).
"""

import types
from collections.abc import Callable
from pathlib import Path

import diffusers
import k_diffusion.external
import k_diffusion.sampling
import numpy as np
import peers
import tgate.tgate_utils as gate
import torch
import toy
from DeepCache import DeepCacheSDHelper
from diffusers.guiders.adaptive_projected_guidance import MomentumBuffer, normalized_guidance
from dynthres_core import DynThresh
from numpy.typing import NDArray
from random_checkpoint import state_dict
from torch import Tensor

PLACE = Path(__file__).parents[1] / "data" / "tricks.npz"
BETAS = {"beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear"}
BRANCHES = ((3, 0), (2, 1), (2, 3), (3, 5))  # DeepCache's interval and branch
FACTORS = (1.5, 1.6, 0.9, 0.2)  # FreeU's
SIGMAS = np.append(np.geomspace(14.6, 0.03, 8), 0.0)


def network() -> torch.nn.Module:
    """diffusers' UNet with the weights of toy.TRICKS."""
    unet = peers.unet(toy.TRICKS, dict(state_dict(toy.TRICKS))).double()
    unet.register_to_config(sample_size=8)
    return unet


def run(unet: Callable[..., object], gate_step: int | None = None) -> NDArray[np.float64]:
    """Five steps of DDIM with guidance 4, and without it after a gate."""
    scheduler = diffusers.DDIMScheduler(**BETAS, clip_sample=False, set_alpha_to_one=False, steps_offset=1)
    scheduler.set_timesteps(5)
    unet.pipe.scheduler = scheduler
    x, cond, uncond = (
        tensor.double() for tensor in (toy.normal(1, 2, 4, 8, 8), toy.normal(2, 2, 7, 64), toy.normal(3, 2, 7, 64))
    )
    for i, t in enumerate(scheduler.timesteps):
        guided = gate_step is None or i < gate_step
        if gate_step is not None:
            # sp_interval 1: self-attention is never reused
            cross, self_kwargs, keep_shape = gate.tgate_scheduler(i, gate_step, 1, 1, 0)
            gate.register_forward(unet, "Attention", ca_kward=cross, sa_kward=self_kwargs, keep_shape=keep_shape)
        text = torch.cat([uncond, cond]) if guided else cond
        out = unet(torch.cat([x, x]) if guided else x, t, encoder_hidden_states=text, return_dict=False)[0]
        if guided:
            without, with_text = out.chunk(2)
            out = without + 4.0 * (with_text - without)
        x = scheduler.step(out, t, x).prev_sample
    return x.numpy()


def brownian(arrays: dict[str, NDArray[np.float64]]) -> None:
    """Increments of two motions, and the samplers that use them."""
    sigmas, seeds = torch.tensor(SIGMAS, dtype=torch.float32), [5, 123456789012]
    x = torch.zeros(2, 4, 8, 8)  # float32, as programs have it
    arrays["sigmas"] = sigmas.numpy()
    source = k_diffusion.sampling.BrownianTreeNoiseSampler(x, sigmas[:-1].min(), sigmas.max(), seed=seeds)
    arrays["increments"] = torch.stack([source(sigmas[i], sigmas[i + 1]) for i in (0, 3, 6)]).numpy()

    def denoise(y: Tensor, sigma: Tensor) -> Tensor:
        return torch.tanh(y / (1 + sigma[0] ** 2))

    start = toy.normal(4, 2, 4, 8, 8).double() * sigmas[0].double()
    for name in ("dpmpp_sde", "dpmpp_2m_sde", "dpmpp_3m_sde"):
        source = k_diffusion.sampling.BrownianTreeNoiseSampler(x, sigmas[:-1].min(), sigmas.max(), seed=seeds)
        sampler = getattr(k_diffusion.sampling, f"sample_{name}")
        arrays[name] = sampler(denoise, start, sigmas.double(), noise_sampler=source, disable=True).numpy()
    # in float32, at k-diffusion's own sigmas
    betas = torch.linspace(BETAS["beta_start"] ** 0.5, BETAS["beta_end"] ** 0.5, 1000, dtype=torch.float64) ** 2
    alpha_bar = (1 - betas).cumprod(0).float()
    schedule = k_diffusion.external.DiscreteSchedule(((1 - alpha_bar) / alpha_bar) ** 0.5, quantize=False)
    ends = schedule.sigma_min.item(), schedule.sigma_max.item()
    for name, spacing, sigmas in (
        ("dpmpp_2m_sde", "linspace", schedule.get_sigmas(30)),
        ("dpmpp_3m_sde", "karras", k_diffusion.sampling.get_sigmas_karras(20, *ends)),
        ("dpmpp_sde", "exponential", k_diffusion.sampling.get_sigmas_exponential(10, *ends)),
    ):
        source = k_diffusion.sampling.BrownianTreeNoiseSampler(x, sigmas[:-1].min(), sigmas.max(), seed=seeds)
        sampler = getattr(k_diffusion.sampling, f"sample_{name}")
        start = toy.normal(4, 2, 4, 8, 8) * sigmas[0]
        arrays[f"{name}.{spacing}"] = sampler(denoise, start, sigmas, noise_sampler=source, disable=True).numpy()


def main() -> None:
    """Write the file."""
    arrays: dict[str, NDArray[np.float64]] = {}
    unet = network()
    unet.__dict__["pipe"] = types.SimpleNamespace(unet=unet)
    arrays["plain"] = run(unet)
    unet.enable_freeu(s1=FACTORS[2], s2=FACTORS[3], b1=FACTORS[0], b2=FACTORS[1])
    arrays["free"] = run(unet)
    unet.disable_freeu()
    for every, branch in BRANCHES:
        helper = DeepCacheSDHelper(pipe=unet.pipe)
        helper.set_params(cache_interval=every, cache_branch_id=branch)
        helper.enable()
        arrays[f"deep.{every}.{branch}"] = run(unet)
        helper.disable()
    for step in (2, 3):
        unet = network()
        unet.__dict__["pipe"] = types.SimpleNamespace(unet=unet)
        arrays[f"gate.{step}"] = run(unet, step)
    average = MomentumBuffer(-0.5)
    for k in range(3):
        cond, uncond = toy.normal(10 + k, 2, 4, 8, 8).double(), toy.normal(20 + k, 2, 4, 8, 8).double()
        arrays[f"apg.{k}"] = normalized_guidance(cond, uncond, 6.5, average, 0.25, 15.0, True).numpy()
    cond, uncond = toy.normal(10, 2, 4, 8, 8).double(), toy.normal(20, 2, 4, 8, 8).double()
    for percentile in (1.0, 0.9):
        settings = 4.0, percentile, "Constant", 0.0, "Constant", 0.0, 4.0, 0, 20, True, "MEAN", "AD", 1.0
        extension = DynThresh(*settings)
        extension.step = 0
        arrays[f"mimic.{percentile}"] = extension.dynthresh(cond, uncond, 12.0, None).numpy()
    brownian(arrays)
    versions = str(
        {library.__name__: library.__version__ for library in (torch, diffusers)}
        | {"DeepCache": "0.1.1", "tgate": "1.0.0"}
    )
    np.savez_compressed(PLACE, made_with=np.array(versions), **arrays)


if __name__ == "__main__":
    with torch.no_grad():
        main()
