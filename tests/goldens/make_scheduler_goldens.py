"""Make tests/data/schedulers.json.gz: the noise levels of diffusers' schedulers, each setting changed in turn.

    pip install diffusers transformers scipy
    python tests/goldens/make_scheduler_goldens.py

Every parameter of a class is set to values that are not its default.  Stored are the configuration, and for some
counts of steps the timesteps that the network is told and the noise levels, (1 - alpha_bar) ** 0.5 or a flow's s, with
the last one; or what diffusers raises.  Tables are computed in float64, which diffusers rounds to float32 at the end.
"""

import gzip
import inspect
import json
import sys
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import torch
from diffusers.pipelines.flux.pipeline_flux import calculate_shift
from diffusers.pipelines.flux2.pipeline_flux2_klein import compute_empirical_mu

FILE = Path(__file__).parents[1] / "data" / "schedulers.json.gz"
STEPS = (1, 4, 7, 30)
TOKENS = (1024, 4096)
BASE = {"beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear"}
CLASSES = {
    "DDIMScheduler": BASE,
    "PNDMScheduler": {**BASE, "skip_prk_steps": True},
    "EulerDiscreteScheduler": BASE,
    "EulerAncestralDiscreteScheduler": BASE,
    "DPMSolverMultistepScheduler": BASE,
    "UniPCMultistepScheduler": BASE,
    "LCMScheduler": BASE,
}
PIPELINES = ("Flux", "Flux2Klein", "Chroma", "QwenImage", "ZImage", "StableDiffusion3")
OTHERS: dict[str, list[object]] = {  # values that are not the default; of switches it is the other one
    "num_train_timesteps": [500],
    "beta_start": [0.0015],
    "beta_end": [0.0195],
    "beta_schedule": ["linear", "squaredcos_cap_v2"],
    "trained_betas": [[0.0001 + 2e-5 * i for i in range(1000)]],
    "steps_offset": [1, 3],
    "prediction_type": ["v_prediction", "sample"],
    "dynamic_thresholding_ratio": [0.9],
    "clip_sample_range": [2.0],
    "sample_max_value": [2.0],
    "timestep_spacing": ["leading", "linspace", "trailing"],
    "interpolation_type": ["log_linear"],
    "sigma_min": [0.1],
    "sigma_max": [10.0],
    "timestep_type": ["continuous"],
    "final_sigmas_type": ["sigma_min"],
    "solver_order": [1, 3],
    "algorithm_type": ["sde-dpmsolver++", "dpmsolver"],
    "solver_type": ["heun", "bh1", "midpoint"],
    "flow_shift": [3.0],
    "lambda_min_clipped": [-5.1],
    "variance_type": ["learned"],
    "time_shift_type": ["linear"],
    "disable_corrector": [[0]],
    "solver_p": ["DDIMScheduler"],
    "shift_terminal": [0.1, 0.02],
    "original_inference_steps": [100],
    "timestep_scaling": [5.0],
    "shift": [3.0, 1.7],
    "base_shift": [0.3],
    "max_shift": [1.6],
    "base_image_seq_len": [100],
    "max_image_seq_len": [8192],
}
TOGETHER: list[dict[str, object]] = [  # settings that change what others do
    *({f"use_{curve}_sigmas": True, "timestep_spacing": "trailing"} for curve in ("karras", "exponential", "beta")),
    *({f"use_{curve}_sigmas": True, "timestep_spacing": "leading"} for curve in ("karras", "exponential", "beta")),
    {"rescale_betas_zero_snr": True, "prediction_type": "v_prediction", "timestep_spacing": "trailing"},
    {"timestep_spacing": "leading", "steps_offset": 1},
    {"timestep_spacing": "trailing", "set_alpha_to_one": False},
]
FLOWS: list[dict[str, object]] = [
    {"shift": 3.0, "use_beta_sigmas": True},
    {"shift": 6.0},
    {"use_dynamic_shifting": True, "shift_terminal": 0.02, "max_image_seq_len": 8192, "max_shift": 0.9},
    {"use_dynamic_shifting": True, "use_karras_sigmas": True, "base_image_seq_len": 64},
    {"use_dynamic_shifting": True, "base_shift": 0.2, "max_shift": 2.0},
    {"use_dynamic_shifting": True, "time_shift_type": "linear"},
]


class InFloat64:
    """torch, with another float32."""

    float32 = torch.float64

    def __getattr__(self, name: str) -> object:
        return getattr(torch, name)


def configurations(kind: Any, base: dict[str, object], together: list[dict[str, object]]) -> list[dict[str, object]]:
    """The base, it with each parameter of a class changed, and with several."""
    parameters = {name: p.default for name, p in inspect.signature(kind.__init__).parameters.items() if name != "self"}
    changed: list[dict[str, object]] = [{}]
    for name, default in parameters.items():
        values = [not base.get(name, default)] if isinstance(default, bool) else OTHERS[name]
        changed += [{name: value} for value in values if value != base.get(name, default)]
    changed += [settings for settings in together if settings.keys() <= parameters.keys()]
    return [{**base, **settings} for settings in changed]


def levels(kind: Any, config: dict[str, object], steps: int) -> list[list[float]]:
    """Timesteps and sqrt(1 - alpha_bar) of a scheduler, then of the end."""
    scheduler = kind(**config)
    scheduler.set_timesteps(steps)
    timesteps = [float(t) for t in scheduler.timesteps]
    if hasattr(scheduler, "sigmas"):
        sigmas = scheduler.sigmas.double().numpy()
        noise = sigmas / np.sqrt(1 + sigmas**2)
    else:
        is_lcm = kind is diffusers.LCMScheduler  # whose last step returns x0
        end = 1.0 if is_lcm else float(scheduler.final_alpha_cumprod)
        alphas = [*scheduler.alphas_cumprod[scheduler.timesteps].tolist(), end]
        noise = np.sqrt(1 - np.array(alphas))
    rows = [[t, float(s)] for t, s in zip([*timesteps, 0.0], noise, strict=True)]
    return [row for i, row in enumerate(rows) if not i or row[0] != rows[i - 1][0] or i == len(rows) - 1]


def initial(kind: Any, config: dict[str, object], steps: int) -> float:
    """The deviation of the first latent, in the variance-preserving scale, which Euler's has not."""
    scheduler = kind(**config)
    scheduler.set_timesteps(steps)
    noise = float(scheduler.init_noise_sigma)
    return noise / float(scheduler.sigmas[0] ** 2 + 1) ** 0.5 if "Euler" in kind.__name__ else noise


def flow_levels(config: dict[str, object], pipeline: str, steps: int, tokens: int) -> list[float]:
    """A flow's s, as a pipeline makes them, with the end."""
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler(**config)
    about = scheduler.config
    sizes = [about[key] for key in ("base_image_seq_len", "max_image_seq_len", "base_shift", "max_shift")]
    mu = compute_empirical_mu(tokens, steps) if pipeline == "Flux2Klein" else calculate_shift(tokens, *sizes)
    shift = {"mu": mu} if about.use_dynamic_shifting else {}
    if pipeline == "StableDiffusion3":
        scheduler.set_timesteps(steps, **shift)
    else:
        scheduler.set_timesteps(sigmas=np.linspace(1.0, 1 / steps, steps), **shift)
    return [float(s) for s in scheduler.sigmas]


def attempt(function: Any, *arguments: object) -> object:
    """What a function returns, or the class of what it raises."""
    try:
        return function(*arguments)
    except Exception as error:  # of many kinds
        return type(error).__name__


def main() -> None:
    """Write the file."""
    cases = []
    for name, base in CLASSES.items():
        kind = getattr(diffusers, name)
        module: Any = sys.modules[kind.__module__]
        module.torch = InFloat64()
        for config in configurations(kind, base, TOGETHER):
            attempts = {steps: attempt(levels, kind, config, steps) for steps in STEPS}
            first = {steps: attempt(initial, kind, config, steps) for steps in STEPS}
            first = None if any(isinstance(value, str) for value in first.values()) else first
            about = {"_class_name": name, **config}
            cases.append({"config": about, "pipeline": "StableDiffusionXL", "levels": attempts, "initial": first})
    flow = diffusers.FlowMatchEulerDiscreteScheduler
    for pipeline in PIPELINES:
        for config in configurations(flow, {}, FLOWS):
            attempts = {
                f"{steps} {tokens}": attempt(flow_levels, config, pipeline, steps, tokens)
                for steps in STEPS
                for tokens in TOKENS
            }
            cases.append({"config": {"_class_name": flow.__name__, **config}, "pipeline": pipeline, "levels": attempts})
    text = json.dumps({"diffusers": diffusers.__version__, "cases": cases})
    FILE.write_bytes(gzip.compress(text.encode(), mtime=0))


if __name__ == "__main__":
    main()
