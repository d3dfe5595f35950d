"""Make tests/data/webui.npz: what AUTOMATIC1111's web UI computes for every sampler and schedule type; diffusers' TCD.

    pip install torch numpy scipy tqdm packaging diffusers
    git clone https://github.com/crowsonkb/k-diffusion && git -C k-diffusion checkout ab527a9a6d
    git clone https://github.com/lllyasviel/stable-diffusion-webui-forge webui && git -C webui checkout e26abf87
    PYTHONPATH=tests/fixtures python tests/goldens/make_webui_goldens.py --originals .

That commit holds the samplers and schedulers of the web UI 1.10, and Turbo besides; k-diffusion's is the one that the
web UI installs.  Its own sampler objects run on toy.denoiser in float64: with float64 as torch's default, and torch's
FloatTensor replaced by DoubleTensor (the web UI rounds some sigmas to float32).  Modules that have no part in the
arithmetic (interface, devices, guidance, the model's management) are replaced by empty ones, and noise comes from
toy.noises, for the SDE samplers as the increments of one motion.  Results are of KEPT numbers of the final latent.
"""

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import diffusers
import numpy as np
import torch
import toy
from diffusers.schedulers import scheduling_tcd
from making import DATA, folder_of_originals
from torch import Tensor

KEPT = 5
COUNTS = (4, 13, 20, 40)
ETA = ("Euler a", "DPM++ 2M SDE", "DPM fast", "DDIM")  # stored with eta 0.5, too
STUBS = (
    "torchdiffeq torchsde torchsde._brownian torchsde._brownian.brownian_interval torchvision torchvision.transforms "
    "modules.devices modules.images modules.shared modules.script_callbacks modules.sd_models modules.prompt_parser "
    "modules.sd_samplers modules.sd_vae_approx modules.sd_vae_taesd modules.extra_networks modules.sd_samplers_compvis "
    "modules.sd_samplers_cfg_denoiser modules_forge modules_forge.forge_sampler backend"
)
OPTIONS = {
    "eta_ancestral": 1.0,
    "eta_ddim": 0.0,
    "s_churn": 0.0,
    "s_tmin": 0.0,
    "s_tmax": 0.0,
    "s_noise": 1.0,
    "sigma_min": 0.0,
    "sigma_max": 0.0,
    "rho": 0.0,
    "beta_dist_alpha": 0.6,
    "beta_dist_beta": 0.6,
    "uni_pc_variant": "bh1",
    "uni_pc_skip_type": "time_uniform",
    "uni_pc_order": 3,
    "uni_pc_lower_order_final": True,
    "always_discard_next_to_last_sigma": False,
    "use_old_karras_scheduler_sigmas": False,
    "sgm_noise_multiplier": False,
}


class Unet:
    """toy.denoiser as the web UI's model; all but the call is not used."""

    forge_objects = mock.MagicMock()
    device = "cpu"
    parameterization = "eps"

    def __init__(self, alpha_bar: Tensor) -> None:
        self.alphas_cumprod = alpha_bar
        sigma = ((1 - alpha_bar) / alpha_bar) ** 0.5
        self.forge_objects.unet.model.model_sampling.sigma = lambda t: sigma[t]

    def apply_model(self, x: Tensor, t: Tensor, **_: Any) -> Tensor:
        """The noise in x."""
        return toy.denoiser(x, t)

    __call__ = apply_model


class Denoiser:
    """The web UI's CFGDenoiser without guidance: calls what it wraps, and keeps the noise levels that it saw."""

    def __init__(self, wrapped: Any, inner: Any) -> None:
        self.wrapped, self.inner_model, self.seen = wrapped, inner, []

    def __call__(self, x: Tensor, level: Tensor, **_: Any) -> Tensor:
        """One call of the network."""
        self.seen.append(float(level.flatten()[0]))
        return self.wrapped(x, level)

    def __getattr__(self, name: str) -> Any:
        return False


def load(originals: Path) -> Any:
    """Import the web UI's sampler modules; return a namespace of them."""
    sys.path[:0] = [str(originals / "k-diffusion"), str(originals / "webui")]
    for name, folder in (("k_diffusion", "k-diffusion/k_diffusion"), ("modules", "webui/modules")):
        sys.modules[name] = package = ModuleType(name)
        package.__path__ = [str(originals / folder)]
    for name in STUBS.split():
        sys.modules[name] = mock.MagicMock()
    options = SimpleNamespace(**OPTIONS)
    shared: Any = SimpleNamespace(
        opts=options, sd_model=SimpleNamespace(is_sdxl=False), device="cpu", state=mock.MagicMock()
    )
    sys.modules["modules.shared"] = sys.modules["modules"].shared = shared  # type: ignore[attr-defined]
    for holder in (sys.modules["modules"], sys.modules["modules.devices"]):
        holder.devices, holder.cpu, holder.device = sys.modules["modules.devices"], "cpu", "cpu"  # type: ignore[attr-defined]
    sys.modules["modules.sd_samplers_cfg_denoiser"].CFGDenoiser = object  # type: ignore[attr-defined]
    for name in ("external", "sampling", "utils"):
        __import__(f"k_diffusion.{name}")
    sys.modules["k_diffusion"].utils = sys.modules["k_diffusion.utils"]  # type: ignore[attr-defined]
    names = ("kdiffusion", "timesteps", "lcm")
    modules = {name: __import__(f"modules.sd_samplers_{name}", fromlist=["x"]) for name in names}
    schedulers = __import__("modules.sd_schedulers", fromlist=["x"])
    return SimpleNamespace(
        **modules, schedulers=schedulers, sampling=sys.modules["k_diffusion.sampling"], shared=shared
    )


def run(
    webui: Any, name: str, schedule: str, steps: int, alpha_bar: Tensor, eta: float | None = None
) -> dict[str, Any]:
    """The levels that the network sees (sigmas, or timesteps), and some numbers of the result."""
    kinds = {
        webui.kdiffusion.KDiffusionSampler: webui.kdiffusion.samplers_k_diffusion,
        webui.timesteps.CompVisSampler: webui.timesteps.samplers_timesteps,
        webui.lcm.LCMSampler: webui.lcm.samplers_lcm,
    }
    kind, row = next((kind, row) for kind, rows in kinds.items() for row in rows if row[0] == name)
    unet = Unet(alpha_bar)
    sampler = object.__new__(kind)
    sampler.__dict__ |= {"extra_params": [], "options": row[3], "funcname": row[1], "eta": None, "s_churn": 0.0}
    sampler.func = row[1] if callable(row[1]) else getattr(webui.sampling, row[1])
    sampler.config = SimpleNamespace(options=row[3], total_steps=lambda count: count)
    sampler.eta_option_field = sampler.eta_infotext_field = "eta_ancestral"
    sampler.eta_default = 1.0
    if kind is webui.timesteps.CompVisSampler:
        sampler.eta_option_field, sampler.eta_default = "eta_ddim", 0.0
        sampler.model_wrap = SimpleNamespace(inner_model=unet)
        sampler.model_wrap_cfg = Denoiser(unet, sampler.model_wrap)
    else:
        eps = sys.modules["k_diffusion.external"].DiscreteEpsDDPMDenoiser
        wrap = (
            webui.lcm.LCMCompVisDenoiser(unet) if kind is webui.lcm.LCMSampler else eps(unet, alpha_bar, quantize=False)
        )
        sampler.model_wrap = wrap
        sampler.model_wrap_cfg = Denoiser(wrap, wrap)
    sampler.model_wrap_cfg.model_wrap = None
    fresh = iter(torch.from_numpy(toy.noises(400)))
    start = next(fresh)
    motion = toy.brownian(fresh)
    independent = lambda *_: next(fresh)  # noqa: E731
    sampler.create_noise_sampler = lambda *_: motion if name == "DPM++ SDE" else independent
    p = SimpleNamespace(
        steps=steps,
        scheduler=schedule,
        is_hr_pass=False,
        sampler_noise_scheduler_override=None,
        eta=eta,
        cfg_scale=1.0,
        rng=SimpleNamespace(next=lambda: next(fresh)),
        extra_generation_params={},
    )
    sampler.callback_state = lambda *_: None
    sampler.add_infotext = lambda *_: None
    result = sampler.sample(p, start, None, None)
    flat = result.flatten()
    return {"result": flat[:: len(flat) // KEPT][:KEPT], "levels": torch.tensor(sampler.model_wrap_cfg.seen)}


def tcd(alpha_bar: Tensor, steps: int, eta: float) -> tuple[Any, Any]:
    """Some numbers of the result of diffusers' TCD, and its timesteps."""
    scheduler = diffusers.TCDScheduler()
    scheduler.alphas_cumprod = alpha_bar
    scheduler.set_timesteps(steps)
    fresh = iter(torch.from_numpy(toy.noises(400)))
    x = next(fresh)
    with mock.patch.object(scheduling_tcd, "randn_tensor", side_effect=lambda *_, **__: next(fresh)):
        for t in scheduler.timesteps:
            x = scheduler.step(toy.denoiser(x, t.expand(len(x))), t, x, eta=eta).prev_sample
    flat = x.flatten()
    return flat[:: len(flat) // KEPT][:KEPT].numpy(), scheduler.timesteps.double().numpy()


def main() -> None:
    """The command line."""
    webui = load(folder_of_originals(__doc__))
    torch.set_default_dtype(torch.float64)
    torch.FloatTensor = torch.DoubleTensor  # type: ignore[misc]
    torch.float32 = torch.float64  # type: ignore[misc]  # LCM's table of alpha_bar
    torch.Tensor.float = torch.Tensor.double  # type: ignore[method-assign]
    betas = torch.linspace(0.00085**0.5, 0.012**0.5, 1000) ** 2
    alpha_bar = torch.cumprod(1 - betas, dim=0)
    types = [scheduler.label for scheduler in webui.schedulers.schedulers]
    arrays, levels = {}, {}
    with torch.no_grad():
        for rows in (webui.kdiffusion.samplers_k_diffusion, webui.lcm.samplers_lcm, webui.timesteps.samplers_timesteps):
            for name, *_ in rows:
                if name == "DDIM CFG++":
                    continue  # needs guidance: test_webui.py has its formula
                for schedule in types:
                    for steps in COUNTS:
                        for eta in (None, 0.5) if name in ETA and schedule == "Karras" else (None,):
                            outcome = run(webui, name, schedule, steps, alpha_bar, eta)
                            key = f"{name}|{schedule}|{steps}" + ("" if eta is None else f"|eta {eta}")
                            arrays[key] = outcome["result"].numpy()
                            levels[key] = outcome["levels"].numpy()
        for steps in (1, 4, 8, 50):
            for eta in (0.0, 0.3, 1.0):
                arrays[key := f"TCD||{steps}|eta {eta}"], levels[key] = tcd(alpha_bar, steps, eta)
    keys = list(arrays)
    np.savez_compressed(
        DATA / "webui.npz",
        keys=np.array(keys),
        results=np.stack([arrays[key] for key in keys]),
        lengths=np.array([len(levels[key]) for key in keys]),
        levels=np.concatenate([levels[key] for key in keys]),
        types=np.array(types),
    )
    path = DATA / "webui.npz"
    print(f"{path}: {len(keys)} runs, {path.stat().st_size} bytes")


if __name__ == "__main__":
    main()
