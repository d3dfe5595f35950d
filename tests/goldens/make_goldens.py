"""Make tests/data/networks.npz and tests/data/samplers.npz: what independent implementations compute.

    pip install diffusers transformers einops omegaconf scipy
    git clone https://github.com/CompVis/stable-diffusion && git clone https://github.com/crowsonkb/k-diffusion
    git clone https://github.com/Stability-AI/stablediffusion && git clone https://github.com/Stability-AI/generative-models
    PYTHONPATH=tests/fixtures:scripts python tests/goldens/make_goldens.py --originals .

The folder holds the repositories under these names, a checkout each; nothing of them is copied.
The networks are the originals' own classes, and diffusers' and transformers', filled with toy.fill's weights, in
float32.  The samplers are CompVis' DDIMSampler and PLMSSampler, k-diffusion's functions and diffusers' schedulers, on
toy.denoiser in float64: with float64 as torch's default dtype, and alphas_cumprod (and UniPC's and DEIS' sigmas) in
float64, all their arithmetic is in it (their float32 buffers are not used in sampling).  What is changed in them: the
samplers of CompVis keep their tables on the CPU, noise comes from toy.noises, and imports that are not needed are
replaced by empty modules.  Spacings are k-diffusion's, diffusers' (trailing) and scipy's quantiles (beta).
"""

import contextlib
import importlib
import itertools
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import diffusers
import numpy as np
import peers
import scipy.stats
import torch
import toy
import transformers
from making import DATA, Arrays, folder_of_originals, made_with, repository, write
from random_checkpoint import SMALL, random_tensor, state_dict
from torch import Tensor, nn

# ---- networks -------------------------------------------------------------------------------------------------------

# The arguments of the originals' UNetModel, as its configuration files give them, in toy.UNETS' sizes.
COMPVIS = {
    "image_size": 8,
    "in_channels": 4,
    "out_channels": 4,
    "model_channels": 32,
    "channel_mult": [1, 2, 2],
    "num_res_blocks": 2,
    "attention_resolutions": [1, 2],
    "num_heads": 4,
    "use_spatial_transformer": True,
    "transformer_depth": 1,
    "context_dim": 48,
    "use_checkpoint": False,
    "legacy": False,
}
LDM = {
    "image_size": 8,
    "in_channels": 3,
    "out_channels": 3,
    "model_channels": 32,
    "channel_mult": [1, 2, 3],
    "num_res_blocks": 1,
    "attention_resolutions": [4, 2],
    "num_head_channels": 16,
    "use_spatial_transformer": True,
    "context_dim": 40,
}
UNCONDITIONAL = {k: v for k, v in LDM.items() if k not in ("use_spatial_transformer", "context_dim")}
QKV = {k: v for k, v in UNCONDITIONAL.items() if k != "num_head_channels"} | {"num_heads": 4, "resblock_updown": True}
STABILITY = {k: v for k, v in COMPVIS.items() if k != "num_heads"} | {
    "num_head_channels": 16,
    "use_linear_in_transformer": True,
}
SGM = {k: v for k, v in STABILITY.items() if k not in ("image_size", "use_spatial_transformer", "legacy")}
ORIGINAL_UNETS: dict[str, dict[str, dict[str, Any]]] = {
    "stable-diffusion": {
        "sd1": COMPVIS,
        "sd1_inpaint": COMPVIS | {"in_channels": 9},
        "ldm_text2img256": LDM,
        "ldm_layout2img": LDM | {"channel_mult": [1, 2], "attention_resolutions": [2], "transformer_depth": 3},
        "ldm_celeba_ffhq_beds256": UNCONDITIONAL,
        "ldm_lsun_churches256": QKV
        | {
            "in_channels": 4,
            "out_channels": 4,
            "num_res_blocks": 2,
            "attention_resolutions": [1, 2],
            "use_scale_shift_norm": True,
        },
        "ldm_inpainting_big": QKV | {"in_channels": 7},
    },
    "stablediffusion": {
        "sd2": STABILITY,
        "sd2_unclip_h": STABILITY | {"num_classes": "sequential", "adm_in_channels": 24},
        "x4": {k: v for k, v in STABILITY.items() if k != "num_head_channels"}
        | {
            "in_channels": 7,
            "num_heads": 4,
            "attention_resolutions": [2, 4],
            "num_classes": 50,
            "disable_self_attentions": [True, True, False],
        },
    },
    "generative-models": {
        "sdxl_base": SGM
        | {
            "attention_resolutions": [4, 2],
            "transformer_depth": [0, 1, 2],
            "num_classes": "sequential",
            "adm_in_channels": 24,
        },
    },
}


def unets(originals: Path) -> Arrays:
    """Every miniature UNet by its original, and one at an odd size (which the originals cannot) by diffusers."""
    arrays: Arrays = {}
    for name, variants in ORIGINAL_UNETS.items():
        package, packages = ("ldm", ())
        if name == "generative-models":
            package, packages = ("sgm", ("sgm", "sgm.modules", "sgm.modules.diffusionmodules"))
        with repository(originals / name, packages):
            model = importlib.import_module(f"{package}.modules.diffusionmodules.openaimodel").UNetModel
            for variant, arguments in variants.items():
                network = toy.fill(model(**arguments))
                x, context, y = toy.unet_inputs(toy.UNETS[variant])
                label = {} if y is None else {"y": y}
                arrays[f"unet.{variant}"] = network(x, toy.T, context=context, **label)
                if variant == "sd1":
                    arrays["unet_fractional.sd1"] = network(x, toy.T_FRACTIONAL, context=context)
    assert {f"unet.{variant}" for variant in toy.UNETS} <= set(arrays)

    prefix = "model.diffusion_model."
    with repository(originals / "stable-diffusion"):
        model = importlib.import_module("ldm.modules.diffusionmodules.openaimodel").UNetModel(**COMPVIS)
    shapes = {prefix + key: tuple(value.shape) for key, value in model.state_dict().items()}
    weights = {key: random_tensor(key, shape) for key, shape in shapes.items()}
    x, context, _ = toy.unet_inputs(toy.SD1, h=9, w=7)
    network = peers.unet(replace(SMALL, unet=toy.SD1), weights)
    arrays["unet_odd.sd1"] = network(x, toy.T, encoder_hidden_states=context).sample
    return arrays


class OriginalKL(nn.Module):
    """CompVis' encoder, decoder and distribution, put together as in its autoencoder.py (which needs Lightning)."""

    def __init__(self) -> None:
        super().__init__()
        blocks = importlib.import_module("ldm.modules.diffusionmodules.model")
        self._distribution = importlib.import_module("ldm.modules.distributions.distributions")
        config = {
            "double_z": True,
            "z_channels": 8,
            "resolution": 64,
            "in_channels": 3,
            "out_ch": 3,
            "ch": 32,
            "ch_mult": [1, 1, 2],
            "num_res_blocks": 1,
            "attn_resolutions": [16],
        }
        self.encoder, self.decoder = blocks.Encoder(**config), blocks.Decoder(**config)
        self.quant_conv, self.post_quant_conv = nn.Conv2d(16, 12, 1), nn.Conv2d(6, 8, 1)

    def encode(self, x: Tensor) -> Any:
        """Pixels -> the distribution of latents."""
        return self._distribution.DiagonalGaussianDistribution(self.quant_conv(self.encoder(x)))

    def decode(self, z: Tensor) -> Tensor:
        """Latents -> pixels."""
        return self.decoder(self.post_quant_conv(z))


def autoencoders_and_text(originals: Path) -> Arrays:
    """The original autoencoder with attention levels; diffusers' and transformers' networks of the small SD1."""
    arrays: Arrays = {}
    with repository(originals / "stable-diffusion"):
        original = toy.fill(OriginalKL())
        moments = original.encode(toy.normal(7, 2, 3, 16, 24))
        arrays |= {"vae_f16.mean": moments.mean, "vae_f16.logvar": moments.logvar}
        arrays["vae_f16.decode"] = original.decode(toy.normal(8, 2, 6, 4, 6))

    weights = dict(state_dict(SMALL))
    x, context, _ = toy.unet_inputs(SMALL.unet)
    arrays["small.unet"] = peers.unet(SMALL, weights)(x, toy.T, encoder_hidden_states=context).sample
    vae = peers.vae(SMALL, weights)
    posterior = vae.encode(toy.normal(7, 2, 3, 32, 48)).latent_dist
    arrays |= {"small.vae.mean": posterior.mean, "small.vae.logvar": posterior.logvar}
    arrays["small.vae.decode"] = vae.decode(toy.normal(8, 1, 4, 4, 6)).sample
    ids = toy.token_ids(SMALL.text.vocab_size, SMALL.text.length)
    for activation in ("quick_gelu", "gelu"):
        text = peers.text_encoder(replace(SMALL, text_encoders=(replace(SMALL.text, activation=activation),)), weights)
        arrays[f"small.clip.{activation}"] = text(ids).last_hidden_state
    return arrays


# ---- samplers -------------------------------------------------------------------------------------------------------


def compvis_sampler(module: ModuleType, name: str, alpha_bar: Tensor, run: toy.Run) -> Arrays:
    """DDIMSampler or PLMSSampler: the latents (N+1, B,C,h,w), the first of which is noise."""
    fresh = iter(torch.from_numpy(toy.noises(40)))
    start = next(fresh)
    module.noise_like = lambda *_: next(fresh)
    model = SimpleNamespace(
        num_timesteps=len(alpha_bar),
        device=torch.device("cpu"),
        alphas_cumprod=alpha_bar,
        alphas_cumprod_prev=torch.cat([torch.ones(1), alpha_bar[:-1]]),
        betas=torch.zeros(len(alpha_bar)),  # only its device is used
        apply_model=toy.denoiser,
        parameterization="eps",
    )
    sampler = getattr(module, name)(model)
    sampler.register_buffer = lambda name, value: setattr(sampler, name, value)  # not on CUDA
    uncond, cond = map(torch.from_numpy, toy.contexts())
    guidance = {"unconditional_guidance_scale": run.scale, "unconditional_conditioning": uncond} if run.scale else {}
    _, seen = sampler.sample(
        run.steps,
        batch_size=toy.SHAPE[0],
        shape=toy.SHAPE[1:],
        conditioning=cond if run.scale else None,
        x_T=start,
        eta=run.eta or 0.0,
        log_every_t=1,
        verbose=False,
        **guidance,
    )
    return {"x": torch.stack(seen["x_inter"])}


def k_sampler(sampling: ModuleType, external: ModuleType, alpha_bar: Tensor, run: toy.Run) -> Arrays:
    """A sampler of k-diffusion: y = x0 + sigma eps (N+1, B,C,h,w), the first of which is noise, and sigma (N+1,)."""
    wrapper = {"eps": external.DiscreteEpsDDPMDenoiser, "v": external.DiscreteVDDPMDenoiser}[run.prediction]
    model = wrapper(toy.denoiser, alpha_bar, quantize=False)
    sigmas = k_sigmas(sampling, model, run.spacing, run.steps)
    fresh = iter(torch.from_numpy(toy.noises(40)))
    start = next(fresh) * sigmas[0]
    options: dict[str, Any] = {} if run.eta is None else {"eta": run.eta}
    if run.sampler == "dpmpp_sde":
        options["noise_sampler"] = toy.brownian(fresh)
    elif run.sampler.endswith(("_a", "_sde")):
        options["noise_sampler"] = lambda *_: next(fresh)
    churning: Any = contextlib.nullcontext()
    if run.churn is not None:
        # There, the noise that raises the first sigma is apart from the start's; here the two are one.
        options["s_churn"], start = run.churn, start * (1 + min(run.churn / run.steps, 2**0.5 - 1))
        extra = itertools.chain([torch.zeros(toy.SHAPE)], fresh)
        churning = mock.patch.object(torch, "randn_like", side_effect=extra)
    name = {"dpm2": "dpm_2", "dpm2_a": "dpm_2_ancestral"}.get(run.sampler, run.sampler.replace("_a", "_ancestral"))
    calls: list[dict[str, Tensor]] = []
    with churning:
        last = getattr(sampling, f"sample_{name}")(model, start, sigmas, callback=calls.append, **options)
    y, sigma = (torch.stack([call[key] for call in calls]) for key in ("x", "sigma_hat"))
    return {"y": torch.cat([y, last[None]]), "sigma": torch.cat([sigma, sigmas[-1:]])}


def k_sigmas(sampling: ModuleType, model: Any, spacing: str, steps: int) -> Tensor:
    """k-diffusion's sigmas (N+1,), the last of which is 0."""
    if spacing == "linspace":
        return model.get_sigmas(steps)
    if spacing == "sgm_uniform":
        return sampling.append_zero(model.t_to_sigma(torch.linspace(999, 0, steps + 1)[:-1]))
    make = {"karras": sampling.get_sigmas_karras, "exponential": sampling.get_sigmas_exponential}[spacing]
    return make(steps, float(model.sigma_min), float(model.sigma_max))


DIFFUSERS: dict[str, tuple[str, dict[str, Any]]] = {
    "ddim": ("ddim", {"clip_sample": False, "set_alpha_to_one": True}),
    "ddpm": ("ddpm", {"clip_sample": False, "variance_type": "fixed_small"}),
    "lcm": ("lcm", {}),
    "unipc": ("unipc_multistep", {"solver_order": 2, "solver_type": "bh2", "final_sigmas_type": "zero"}),
    "deis": ("deis_multistep", {"solver_order": 3, "lower_order_final": False}),
}


def diffusers_sampler(alpha_bar: Tensor, run: toy.Run, sigmas: Tensor | None, t: Tensor | None) -> Arrays:
    """A scheduler of diffusers: the latents (N+1, B,C,h,w), the first of which is noise, and timesteps (N,).

    UniPC and DEIS take sigmas (N+1,) and t (N,) from outside, others make their own.
    """
    name, options = DIFFUSERS[run.sampler]
    module = importlib.import_module(f"diffusers.schedulers.scheduling_{name}")
    scheduler_class = next(
        value for key, value in vars(module).items() if key.lower() == f"{name}scheduler".replace("_", "")
    )
    prediction = {"eps": "epsilon", "v": "v_prediction"}[run.prediction]
    scheduler = scheduler_class(prediction_type=prediction, **options)
    spacing = {"timestep_spacing": run.spacing} if run.spacing in ("leading", "trailing") else {}
    scheduler.register_to_config(steps_offset=1, **spacing)
    scheduler.set_timesteps(run.steps)
    scheduler.alphas_cumprod = alpha_bar
    noises = torch.from_numpy(toy.noises(40))
    start, num_calls = noises[0], run.steps
    if sigmas is not None:
        scheduler.sigmas, scheduler.timesteps = sigmas, t
        start = start * sigmas[0] / (1 + sigmas[0] ** 2).sqrt()
        num_calls -= not run.clean
    elif run.sampler == "ddpm" and run.spacing == "leading":
        scheduler.timesteps = torch.cat([scheduler.timesteps, torch.tensor([0])])  # where the last step leads
    elif run.sampler == "ddpm":
        noises[run.steps] = 0  # it adds 1e-10 of noise to the result
    xs = [start]
    with mock.patch.object(module, "randn_tensor", side_effect=noises[1:], create=True):
        for now in scheduler.timesteps[:num_calls]:
            out = toy.denoiser(xs[-1], now.double().expand(toy.SHAPE[0]))
            eta = {} if run.eta is None else {"eta": run.eta}
            xs.append(scheduler.step(out, now, xs[-1], **eta).prev_sample)
    return {"x": torch.stack(xs), "t": scheduler.timesteps[:num_calls].double()}


def spacings(sampling: ModuleType, model: Any) -> Arrays:
    """The levels of toy.SPACINGS: sigmas, or timesteps for trailing and beta."""
    arrays: Arrays = {}
    for spacing, counts in toy.SPACINGS.items():
        for steps in counts:
            if spacing == "trailing":
                scheduler = diffusers.DDIMScheduler(timestep_spacing="trailing")
                scheduler.set_timesteps(steps)
                levels = scheduler.timesteps.double()
            elif spacing == "beta":
                quantiles = scipy.stats.beta.ppf(1 - np.linspace(0, 1, steps, endpoint=False), 0.6, 0.6)
                levels = torch.from_numpy(quantiles * 999)
            else:
                levels = k_sigmas(sampling, model, spacing, steps)
            arrays[f"spacing.{spacing}.{steps}"] = levels
    return arrays


def samplers(originals: Path) -> Arrays:
    """The trajectory of every run of toy.RUNS, and the levels of toy.SPACINGS."""
    arrays: Arrays = {}

    def keep(name: str, results: Arrays) -> None:
        arrays.update({f"{name}.{key}": value for key, value in results.items()})

    with repository(originals / "stable-diffusion"):
        util = importlib.import_module("ldm.modules.diffusionmodules.util")
        betas = torch.from_numpy(util.make_beta_schedule("linear", 1000, 0.00085, 0.012))
        alpha_bar = torch.cumprod(1 - betas, dim=0)
        for name, run in toy.RUNS.items():
            if run.sampler in ("ddim", "plms") and run.spacing != "trailing":
                module = importlib.import_module(f"ldm.models.diffusion.{run.sampler}")
                keep(name, compvis_sampler(module, f"{run.sampler.upper()}Sampler", alpha_bar, run))
    stubs = ("torchdiffeq", "torchsde", "torchvision.transforms", "torchvision")
    with repository(originals / "k-diffusion", ("k_diffusion",), stubs):
        sampling, external = (importlib.import_module(f"k_diffusion.{name}") for name in ("sampling", "external"))
        model = external.DiscreteEpsDDPMDenoiser(toy.denoiser, alpha_bar, quantize=False)
        for name, run in toy.RUNS.items():
            if run.sampler in ("unipc", "deis"):
                if run.spacing == "leading":
                    t = torch.arange(run.steps).flip(0) * (1000.0 // run.steps) + 1
                    sigmas = torch.cat([model.t_to_sigma(t), model.sigmas[:1]])
                else:
                    sigmas = k_sigmas(sampling, model, run.spacing, run.steps)
                    t = model.sigma_to_t(sigmas[:-1])
                keep(name, diffusers_sampler(alpha_bar, run, sigmas, t))
            elif run.sampler in ("ddpm", "lcm") or run.spacing == "trailing":
                rescaled = diffusers.schedulers.scheduling_ddim.rescale_zero_terminal_snr(betas)
                used = torch.cumprod(1 - rescaled, dim=0) if run.zero_snr else alpha_bar
                keep(name, diffusers_sampler(used, run, None, None))
            elif run.sampler not in ("ddim", "plms"):
                keep(name, k_sampler(sampling, external, alpha_bar, run))
        arrays |= spacings(sampling, model)
    return arrays


# ---- files ----------------------------------------------------------------------------------------------------------


def main() -> None:
    """The command line."""
    originals = folder_of_originals(__doc__)
    about = made_with((torch, np, scipy, diffusers, transformers), originals, (*ORIGINAL_UNETS, "k-diffusion"))
    with torch.no_grad():
        networks = unets(originals) | autoencoders_and_text(originals)
        write(DATA / "networks.npz", networks, torch.float32, about)
        torch.set_default_dtype(torch.float64)
        write(DATA / "samplers.npz", samplers(originals), torch.float64, about)


if __name__ == "__main__":
    main()
