"""Each setting of diffusers' schedulers changes the levels as it does there (the goldens), or is refused by name."""

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ldm_lite.checkpoint.loading import schedule_in_file
from ldm_lite.core.files import Tensors
from ldm_lite.core.plan import Plan
from ldm_lite.diffusion.names import named_plan
from ldm_lite.formats.diffusers_schedulers import read_scheduler
from ldm_lite.zoo.families import FAMILY_ROWS, with_metadata

GOLDEN = json.loads(gzip.decompress((Path(__file__).parents[1] / "data" / "schedulers.json.gz").read_bytes()))
ROWS = {
    "StableDiffusionXL": "sdxl_base",
    "Flux": "flux_dev",
    "Flux2Klein": "flux2_klein",
    "Chroma": "chroma",
    "QwenImage": "qwen_image",
    "ZImage": "z_image_turbo",
    "StableDiffusion3": "sd3_medium",
}
REFUSED = {  # what is not here; with anything else a configuration runs
    *("num_train_timesteps", "skip_prk_steps", "interpolation_type", "timestep_type", "sigma_min", "sigma_max"),
    *("thresholding", "algorithm_type", "solver_order", "solver_type", "use_lu_lambdas", "final_sigmas_type"),
    *("lambda_min_clipped", "variance_type", "predict_x0", "lower_order_final", "disable_corrector", "solver_p"),
    *("original_inference_steps", "timestep_scaling", "clip_sample", "use_flow_sigmas", "invert_sigmas"),
    *("time_shift_type", "eps prediction"),
}


def plan(config: dict[str, Any], pipeline: str, steps: int, tokens: int) -> Plan:
    """The plan of a folder's default sampler."""
    roles = ["unet", "text_encoder_2"] if pipeline.endswith("XL") else ["transformer"]
    metadata = read_scheduler("s", config, roles)
    family = with_metadata(FAMILY_ROWS[ROWS[pipeline]], metadata)
    schedule = schedule_in_file(family, Tensors(Path("s"), {}, lambda key: pytest.fail(key)), metadata, False)
    return named_plan(family.sampler, schedule.sized(tokens), steps)


def compared(case: dict[str, Any]) -> list[str]:
    """What differs in a case, and by how much."""
    wrong = []
    for name, expected in case["levels"].items():
        steps, _, tokens = name.partition(" ")
        planned = plan(case["config"], case["pipeline"], int(steps), int(tokens or 4096))
        if isinstance(expected, str) or not np.isfinite(np.array(expected)).all():
            continue  # diffusers fails
        s = np.append(planned.level[:, 1], planned.end.s)
        if not tokens and case["initial"] is not None:  # of the first latent, in the scale of the network
            assert planned.initial == pytest.approx(case["initial"][steps], abs=1e-6), case["config"]
        if tokens:
            errors = [abs(s - np.array(expected)).max()] if len(s) == len(expected) else [np.inf]
        else:
            _, first = np.unique(planned.t, return_index=True)  # PLMS calls the network twice at the second one
            first = np.sort(first)
            t, theirs = planned.t[first], np.array(expected)
            if len(t) != len(theirs) - 1:
                errors = [np.inf]
            else:
                errors = [abs(t - theirs[:-1, 0]).max() / 1000, abs(s[[*first, -1]] - theirs[:, 1]).max()]
        if max(errors) > 1e-6:
            wrong.append(f"{name}: {max(errors):.2g}")
    return wrong


def test_every_setting_changes_the_levels_as_in_diffusers_or_is_refused_by_name() -> None:
    wrong, refused = [], set()
    for case in GOLDEN["cases"]:
        try:
            errors = compared(case)
        except ValueError as error:
            names = {name for name in REFUSED if name in str(error)}
            if not names:
                raise
            refused |= names
            continue
        if errors:
            changed = {key: str(value)[:20] for key, value in case["config"].items() if not key.startswith("beta_")}
            wrong.append((changed, case["pipeline"], errors))
    assert not wrong, "\n".join(map(str, wrong))
    assert refused == REFUSED


def test_settings_differ() -> None:
    """The comparison would notice a setting that is not read."""
    levels = {json.dumps(case["levels"]) for case in GOLDEN["cases"]}
    assert len(levels) > 60
