"""scheduler_config.json of diffusers: which noise levels and which sampler a folder asks for.

read_scheduler() turns it into metadata, which zoo/families.py reads.  CHECKED lists settings that cannot be changed,
with the values that are computed; any other value is refused by name.  All remaining settings change no noise level.
"""

import json
import logging
import math
from collections.abc import Collection, Mapping
from typing import NamedTuple

from ldm_lite.diffusion.names import resolve
from ldm_lite.formats.diffusers_config import Config, Values, check, short

log = logging.getLogger("ldm_lite")


class Solver(NamedTuple):
    """A scheduler whose levels are known: its sampler here, and the defaults of its settings."""

    sampler: str
    timesteps: str = "leading"  # its default timestep_spacing
    end: str = "clean"
    multistep: bool = False
    whole: bool = True  # whether the timesteps of linspace are rounded


# Our samplers for diffusers' schedulers.  For other names it is the family's own.
SOLVERS = {
    "DDIMScheduler": Solver("ddim"),
    "DDIMParallelScheduler": Solver("ddim"),
    "PNDMScheduler": Solver("plms", end="first"),
    "EulerDiscreteScheduler": Solver("euler", "linspace", whole=False),
    "EulerAncestralDiscreteScheduler": Solver("euler_a", "linspace", whole=False),
    "DPMSolverMultistepScheduler": Solver("dpmpp_2m", "linspace", multistep=True),
    "UniPCMultistepScheduler": Solver("unipc", "linspace", multistep=True),
    "LCMScheduler": Solver("lcm"),
    "TCDScheduler": Solver("tcd"),
}
NOT_HERE = ("DDPMParallelScheduler", "DPMSolverSinglestepScheduler", "SASolverScheduler")
DISTILLED = ("lcm", "tcd")  # samplers with timesteps of their own

OF_ALL: dict[str, Values] = {
    "num_train_timesteps": (1000,),
    "prediction_type": ("epsilon", "v_prediction", "sample"),
    "thresholding": (False,),
    "timestep_spacing": ("leading", "linspace", "trailing"),
    "timestep_type": ("discrete",),
    "sigma_max": (None,),
    "sigma_min": (None,),
    "use_flow_sigmas": (False,),
}
CHECKED: dict[str, dict[str, Values]] = {
    "PNDMScheduler": {"skip_prk_steps": (True,)},
    "EulerDiscreteScheduler": {
        "interpolation_type": ("linear",),
        "final_sigmas_type": ("zero", "sigma_min"),
    },
    "DPMSolverMultistepScheduler": {
        "algorithm_type": ("dpmsolver++", "sde-dpmsolver++"),
        "solver_order": (2,),
        "solver_type": ("midpoint",),
        "use_lu_lambdas": (False,),
        "final_sigmas_type": ("zero",),
        "lambda_min_clipped": (-math.inf, None),
        "variance_type": (None,),
    },
    "UniPCMultistepScheduler": {
        "solver_order": (2,),
        "solver_type": ("bh2", "midpoint", "heun", "logrho"),  # the others' names mean bh2
        "predict_x0": (True,),
        "lower_order_final": (True,),
        "disable_corrector": ([],),
        "solver_p": (None,),
        "final_sigmas_type": ("zero",),
    },
    "LCMScheduler": {"original_inference_steps": (50,), "timestep_scaling": (10,), "clip_sample": (False,)},
    "TCDScheduler": {"original_inference_steps": (50,), "timestep_scaling": (10,), "clip_sample": (False,)},
}
OF_FLOWS: dict[str, Values] = {
    "num_train_timesteps": (1000,),
    "invert_sigmas": (False,),
    "time_shift_type": ("exponential",),
    "stochastic_sampling": (False, True),
    "use_dynamic_shifting": (False, True),
    "use_flow_sigmas": (True,),
}


def read_scheduler(place: str, config: Config, roles: Collection[str]) -> dict[str, str]:
    """Return the metadata in a scheduler_config.json: prediction, noise schedule, sampler with its spacing.

    `roles` are those of the pipeline's networks: a transformer is a rectified flow.  Raises ValueError for another
    noise process and settings not supported.
    """
    if not config:
        return {}
    name = str(config.get("_class_name"))
    if "transformer" in roles:
        return _read_flow(place, config, name)
    solver = SOLVERS.get(name)
    if name.startswith("FlowMatch") or (solver is None and not _is_known(name)):
        raise ValueError(
            f"{place}: {short(name)} is not supported: expected a scheduler of a variance-preserving process, such "
            "as DDIMScheduler, EulerDiscreteScheduler or LCMScheduler"
        )
    check(place, config, OF_ALL | CHECKED.get(name, {}))
    metadata = {key: config.get(key) for key in ("beta_start", "beta_end", "beta_schedule")}
    metadata["prediction"] = config.get("prediction_type")
    spacing = config.get("timestep_spacing")
    if metadata["prediction"] in (None, "epsilon") and not config.get("rescale_betas_zero_snr"):
        metadata["scheduler"] = f"{name}, {spacing}"  # of distilled models that are released
    if config.get("trained_betas") is not None:
        metadata["trained_betas"] = json.dumps(config["trained_betas"])
    if config.get("rescale_betas_zero_snr"):
        metadata["zero_snr"] = "yes"
    if solver is None:
        log.info("%s: its solver %s is not read: the sampler is the family's own", place, name)
    else:
        metadata["sampler"] = _sampler(place, config, "text_encoder_2" in roles, solver)
    if spacing == "trailing" and (solver is None or solver.sampler not in DISTILLED):  # for other samplers too
        to_first = solver is not None and solver.sampler in ("ddim", "plms") and config.get("set_alpha_to_one") is False
        metadata["spacing"] = "trailing_to_0" if to_first else "trailing"
    return {key: str(value) for key, value in metadata.items() if value is not None}


def _is_known(name: str) -> bool:
    """Whether a scheduler is one of a variance-preserving process, or the configuration names none."""
    if name in (*NOT_HERE, "None"):
        return True
    try:
        resolve(name)
    except ValueError:
        return False
    return True


def _sampler(place: str, config: Config, keeps_offset: bool, solver: Solver) -> str:
    """Return the name of a scheduler's sampler, with its spacing; most pipelines override its offset."""
    if solver.sampler in DISTILLED:
        return solver.sampler
    offset, end = config.get("steps_offset", 0), solver.end
    if isinstance(offset, bool) or not isinstance(offset, int) or not 0 <= offset < 1000:
        raise ValueError(f"{place}: its steps_offset cannot be {short(offset)}: expected a whole number from 0 to 999")
    if solver.sampler in ("ddim", "plms"):
        clean = config.get("set_alpha_to_one", end == "clean")
        end = "clean" if clean else "first"
        if not keeps_offset:
            offset = 1
        elif config.get("clip_sample") is True and solver.sampler == "ddim":
            log.warning("%s: ignored clip_sample true: latents are not clipped here", place)
    elif config.get("final_sigmas_type") == "sigma_min":
        end = "first"
    timesteps = config.get("timestep_spacing", solver.timesteps)
    curve = _curve(place, config)
    settings: dict[str, object] = {
        "timesteps": timesteps if timesteps != "leading" else None,
        "offset": offset if offset and timesteps == "leading" else None,
        "multistep": 1 if solver.multistep else None,
        "whole": 0 if not solver.whole and timesteps == "linspace" else None,
        "curve": curve,
        "end": end if end != "clean" else None,
    }
    # Those of DPM-Solver and UniPC begin with unit noise; Euler's too, but for timesteps that begin at the last.
    unit = ":unit" if solver.multistep or (not solver.whole and timesteps == "leading") else ""
    sde = "_sde" if config.get("algorithm_type") == "sde-dpmsolver++" else ""
    return " ".join([solver.sampler + sde, _with_settings("diffusers", settings) + unit])


def _with_settings(name: str, settings: Mapping[str, object]) -> str:
    return ":".join([name, *(f"{key}={value}" for key, value in settings.items() if value is not None)])


def _curve(place: str, config: Config) -> str | None:
    curves = [curve for curve in ("karras", "exponential", "beta") if config.get(f"use_{curve}_sigmas")]
    if len(curves) > 1:
        raise ValueError(f"{place}: has use_{curves[0]}_sigmas and use_{curves[1]}_sigmas: expected one of them")
    return curves[0] if curves else None


# ---- rectified flows ------------------------------------------------------------------------------------------------


def _read_flow(place: str, config: Config, name: str) -> dict[str, str]:
    """Return the metadata of a rectified flow's scheduler: its shift, constant or by the image's size, and spacing."""
    if name != "FlowMatchEulerDiscreteScheduler":
        raise ValueError(f"{place}: {short(name)} is not supported: expected FlowMatchEulerDiscreteScheduler")
    check(place, config, OF_FLOWS)
    last = _number(place, config, "shift_terminal", 0.0)
    if not 0 <= last < 1:
        raise ValueError(f"{place}: its shift_terminal cannot be {last:g}: expected a number from 0 to 1")
    settings = {"last": last or None, "curve": _curve(place, config)}
    metadata = {"flow_settings": _with_settings("", settings)}
    metadata["sampler"] = "lcm" if config.get("stochastic_sampling") else "euler"
    if config.get("use_dynamic_shifting"):  # the logarithm of the shift is linear in the number of tokens
        defaults = {"base_image_seq_len": 256, "max_image_seq_len": 4096, "base_shift": 0.5, "max_shift": 1.15}
        few, many, low, high = (_number(place, config, key, value) for key, value in defaults.items())
        if not 0 < few < many:
            raise ValueError(f"{place}: has base_image_seq_len {few:g}, expected one below max_image_seq_len {many:g}")
        rise = (high - low) / (many - few)
        metadata["flow_shifts"] = json.dumps([low + rise * (tokens - few) for tokens in (256, 4096)])
    else:
        shift = _number(place, config, "shift", 1.0)
        if not shift > 0:
            raise ValueError(f"{place}: its shift cannot be {shift:g}: expected a number above 0")
        metadata["flow_shifts"] = json.dumps([shift])
    return metadata


def _number(place: str, config: Config, key: str, default: float) -> float:
    value = config.get(key)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise ValueError(f"{place}: its {key} cannot be {short(value)}: expected a number")
    return float(value)
