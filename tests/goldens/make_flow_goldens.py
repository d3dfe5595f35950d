"""Make tests/data/flow.npz: rectified flow in diffusers' schedulers; whole runs of the original FLUX.1 and SD3.

    pip install torch numpy scipy diffusers einops
    git clone https://github.com/black-forest-labs/flux && git clone https://github.com/Stability-AI/sd3.5
    PYTHONPATH=tests/fixtures python tests/goldens/make_flow_goldens.py --originals .

For the schedulers the network is the velocity toy.denoiser(x, 1000 s), in float64; they compute in float64 too:
float64 takes the place of float32 in their modules.  Noise comes from toy.noises.  Stored are the sigmas and KEPT
numbers of each latent.
Whole runs are the originals' own loops, guidance and networks, in toy_flow's sizes with toy.fill's weights, in float32.
"""

import functools
import importlib
import sys
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import diffusers
import numpy as np
import torch
import toy
import toy_flow
from make_transformer_goldens import FLUX, SD3, flux_params, ids, mmditx_of, pack, unpack
from making import DATA, folder_of_originals, made_with, repository

KEPT = 5
COUNTS = (1, 2, 3, 10, 30)
RUNS: dict[str, tuple[str, dict[str, Any]]] = {  # by sampler: the scheduler, its settings
    "euler": ("FlowMatchEulerDiscreteScheduler", {"shift": 3.0}),
    "euler_karras": ("FlowMatchEulerDiscreteScheduler", {"shift": 3.0, "use_karras_sigmas": True}),
    "heun": ("FlowMatchHeunDiscreteScheduler", {"shift": 3.0}),
    "lcm": ("FlowMatchLCMScheduler", {"shift": 3.0}),
    "dpmpp_2m": ("DPMSolverMultistepScheduler", {"flow_shift": 3.0}),
    "dpmpp_2m_sde": ("DPMSolverMultistepScheduler", {"flow_shift": 3.0, "algorithm_type": "sde-dpmsolver++"}),
    "unipc": ("UniPCMultistepScheduler", {"flow_shift": 3.0}),
    "deis": ("DEISMultistepScheduler", {"flow_shift": 3.0, "solver_order": 3}),
}


class Double:
    """A module whose float32 is float64."""

    def __init__(self, module: ModuleType) -> None:
        self._module = module

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, {"float32": "float64"}.get(name, name))


def run(scheduler: str, settings: dict[str, Any], steps: int) -> dict[str, Any]:
    """The sigmas of a run, and its latent after every call."""
    kind = getattr(diffusers, scheduler)
    module = importlib.import_module(kind.__module__)
    noises = iter(torch.from_numpy(toy.noises(steps + 1)))
    if not scheduler.startswith("FlowMatch"):
        settings = {"use_flow_sigmas": True, "prediction_type": "flow_prediction", **settings}
    with (
        mock.patch.object(module, "torch", Double(torch)),
        mock.patch.object(module, "np", Double(np)),
        mock.patch.object(module, "randn_tensor", lambda *_, **more: next(noises), create=True),  # noqa: PT008,
    ):
        solver = kind(**settings)
        solver.set_timesteps(steps)
        x = next(noises) * solver.sigmas[0].double()
        kept = [x]
        for i, t in enumerate(solver.timesteps):
            # Schedulers that are not made for flows round the timesteps that they give to the network.
            s = t / 1000 if scheduler.startswith("FlowMatch") else solver.sigmas[i]
            times = torch.full((len(x),), 1000 * float(s), dtype=torch.float64)
            x = solver.step(toy.denoiser(x, times), t, x, return_dict=False)[0]
            kept.append(x)
    return {
        "sigmas": solver.sigmas.double().numpy(),
        "x": np.stack([latent.flatten()[:KEPT].numpy() for latent in kept]),
    }


# ---- whole runs -----------------------------------------------------------------------------------------------------


def flux_runs(originals: Path) -> dict[str, Any]:
    """FLUX.1: flux.sampling.denoise, 4 steps, of latents that are packed."""
    arrays = {}
    packages = ("flux", "flux.modules")
    stubs = ("flux.modules.autoencoder", "flux.modules.conditioner", "flux.modules.image_embedders", "flux.util")
    with (
        repository(originals / "flux" / "src", packages),
        mock.patch.dict(sys.modules, dict.fromkeys(stubs, mock.MagicMock())),
    ):
        model, sampling = (importlib.import_module(f"flux.{name}") for name in ("model", "sampling"))
        for name, spec in FLUX.items():
            network = toy.fill(model.Flux(flux_params(model, spec)))
            x, cond, context, y = toy_flow.run_inputs(spec)
            image_ids, text_ids = (coordinates.expand(2, -1, -1) for coordinates in ids(x, context))
            tokens = x.shape[2] * x.shape[3] // 4
            times = sampling.get_schedule(toy_flow.STEPS, tokens, shift=spec.guidance)
            more = {"img_cond": None if cond is None else pack(cond)}
            out = sampling.denoise(network, pack(x), image_ids, context, text_ids, y, times, toy_flow.SCALE, **more)
            arrays[f"run.{name}"] = unpack(out, x).numpy()
    return arrays


def sd3_runs(originals: Path) -> dict[str, Any]:
    """Stable Diffusion 3: sd3_impls' samplers and guidance; of 3.5 medium also skip-layer guidance."""
    arrays = {}
    with repository(originals / "sd3.5", stubs=("mmditx", "sd3_impls", "dit_embedder", "other_impls")):
        mmditx, impls = (importlib.import_module(name) for name in ("mmditx", "sd3_impls"))
        sampling = impls.ModelSamplingDiscreteFlow(shift=3.0)
        times = torch.linspace(
            sampling.timestep(sampling.sigma_max), sampling.timestep(sampling.sigma_min), toy_flow.STEPS
        )
        sigmas = torch.cat([sampling.sigma(times), torch.zeros(1)])  # sd3_infer.py, get_sigmas
        for name, spec in SD3.items():
            wrapped = mock.Mock(spec=[], model_sampling=sampling, diffusion_model=toy.fill(mmditx_of(mmditx, spec)))
            wrapped.get_dtype = lambda: torch.float32
            wrapped.apply_model = functools.partial(impls.BaseModel.apply_model, wrapped)
            x, _, context, y = toy_flow.run_inputs(spec)
            other_context, other_y = toy_flow.negative(spec)
            branches = {
                "cond": {"c_crossattn": context, "y": y},
                "uncond": {"c_crossattn": other_context, "y": other_y},
            }
            arguments = {**branches, "cond_scale": toy_flow.SCALE}

            def run(sampler: str, denoiser: Any, x: Any = x, arguments: Any = arguments) -> Any:
                denoiser.model = wrapped  # noqa: B023  no module, so not a parameter
                return getattr(impls, f"sample_{sampler}")(denoiser, x, sigmas, extra_args=arguments).numpy()

            for sampler in ("euler", "dpmpp_2m"):
                arrays[f"run.{name}.{sampler}"] = run(sampler, Plain(impls.CFGDenoiser))
            if name == "sd35_medium":
                slg = Plain(impls.SkipLayerCFGDenoiser, toy_flow.STEPS, toy_flow.SKIP)
                arrays[f"run.{name}.skip"] = run("euler", slg)
    return arrays


class Plain:
    """A denoiser of the original whose model need not be a module."""

    def __init__(self, kind: Any, steps: int = 0, skip: Any = None) -> None:
        self._kind, self.model, self.step, self.steps = kind, None, 0, steps
        if skip is not None:
            self.slg, self.skip_start, self.skip_end = skip["scale"], skip["start"], skip["end"]
            self.skip_layers = skip["layers"]

    def __call__(self, *args: Any, **more: Any) -> Any:
        return self._kind.forward(self, *args, **more)


def main() -> None:
    """The command line."""
    originals = folder_of_originals(__doc__)
    with torch.no_grad():
        data = flux_runs(originals) | sd3_runs(originals)
    for name, (scheduler, settings) in RUNS.items():
        for steps in COUNTS:
            if name == "euler_karras" and steps == 1:
                continue
            data |= {f"{name}.{steps}.{key}": value for key, value in run(scheduler, settings, steps).items()}
    about = made_with((torch, diffusers), originals, ("flux", "sd3.5"))
    np.savez_compressed(DATA / "flow.npz", **data, made_with=np.array(about))


if __name__ == "__main__":
    main()
