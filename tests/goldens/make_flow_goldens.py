"""Make tests/data/flow.npz: what diffusers' schedulers compute for rectified flow.

    pip install torch numpy scipy diffusers
    PYTHONPATH=tests/fixtures python tests/goldens/make_flow_goldens.py

The network is the velocity toy.denoiser(x, 1000 s), in float64; schedulers compute in float64 too: float64 takes the
place of float32 in their modules.  Noise comes from toy.noises.  Stored are the sigmas and KEPT numbers of each latent.
"""

import importlib
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import diffusers
import numpy as np
import torch
import toy

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
        made = kind(**settings)
        made.set_timesteps(steps)
        x = next(noises) * made.sigmas[0].double()
        kept = [x]
        for i, t in enumerate(made.timesteps):
            # Schedulers that are not made for flows round the timesteps that they give to the network.
            s = t / 1000 if scheduler.startswith("FlowMatch") else made.sigmas[i]
            times = torch.full((len(x),), 1000 * float(s), dtype=torch.float64)
            x = made.step(toy.denoiser(x, times), t, x, return_dict=False)[0]
            kept.append(x)
    return {"sigmas": made.sigmas.double().numpy(), "x": np.stack([each.flatten()[:KEPT].numpy() for each in kept])}


def main() -> None:
    """Write the file."""
    data = {}
    for name, (scheduler, settings) in RUNS.items():
        for steps in COUNTS:
            if name == "euler_karras" and steps == 1:
                continue
            data |= {f"{name}.{steps}.{key}": value for key, value in run(scheduler, settings, steps).items()}
    versions = {"diffusers": diffusers.__version__, "torch": torch.__version__}
    path = Path(__file__).resolve().parents[1] / "data" / "flow.npz"
    np.savez_compressed(path, **data, versions=str(versions))


if __name__ == "__main__":
    main()
