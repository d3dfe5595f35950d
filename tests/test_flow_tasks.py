"""FLUX.1 and Stable Diffusion 3 in miniature: every task, by the commands, from files."""

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import toy
import toy_flow

import ldm_lite
from ldm_lite.checkpoint.model import Model
from ldm_lite.conditioning.prompts import guided
from ldm_lite.diffusion.guidance import Conditioning, skipping
from ldm_lite.diffusion.names import make_plan
from ldm_lite.generate import denoise
from ldm_lite.pipeline import Pipeline
from ldm_lite.zoo.describe import describe
from ldm_lite.zoo.networks import build

DATA = Path(__file__).parent / "data"
GOLDEN = np.load(DATA / "flow.npz")
NAMES = ("flux_dev", "flux_schnell", "flux_fill", "flux_control", "sd3_medium", "sd35_medium", "sd35_large")
PREFIXES = {"unet": "model.diffusion_model.", "vae": "vae."}
T5 = "text_encoders.t5xxl.transformer."


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A file of each family, all in one."""
    folder = tmp_path_factory.mktemp("flow")
    shutil.copy(DATA / "small_spiece.model", folder / "spiece.model")
    found = {}
    for name in NAMES:
        family, path = toy_flow.small(name), folder / f"{name}.safetensors"
        found[name] = toy_flow.save(path, toy_flow.all_in_one(family, toy_flow.weights(family)), describe(family))
    return found


@pytest.fixture(scope="module")
def pipes(paths: dict[str, Path]) -> dict[str, Pipeline]:
    return {name: ldm_lite.load(path, device="cpu", dtype="fp32") for name, path in paths.items()}


# ---- whole runs -----------------------------------------------------------------------------------------------------


def model_of(name: str) -> Model:
    """A family in miniature, as make_flow_goldens.py has it, without its encoders."""
    family = toy_flow.small(name)
    unet = toy.fill(build(family.unet)).requires_grad_(False)
    schedule = family.noise.schedule(family.prediction)
    vae: Any = SimpleNamespace(spec=family.vae)
    return Model(name, family, schedule, unet, vae, None, None, None, name).sized((4, 6, 10))


@pytest.mark.parametrize("run", [key.removeprefix("run.") for key in GOLDEN.files if key.startswith("run.")])
def test_whole_runs_are_those_of_the_originals(run: str) -> None:
    name, *kind = run.split(".")
    model = model_of(name)
    x, concat, context, y = toy_flow.run_inputs(model.family.unet)
    cond = Conditioning(context, y, concat)
    samplers = {"dpmpp_2m": "dpmpp_2m_sd3"}
    plan = make_plan(samplers.get("".join(kind), "euler"), model.schedule, toy_flow.STEPS)
    if name.startswith("flux"):
        branches = guided(model, cond, None, toy_flow.SCALE if model.family.distilled else 1.0)
    else:
        branches = guided(model, cond, Conditioning(*toy_flow.negative(model.family.unet)), toy_flow.SCALE)
    if kind == ["skip"]:
        skip, (start, end) = toy_flow.SKIP, (toy_flow.SKIP[key] * toy_flow.STEPS for key in ("start", "end"))
        blocks = torch.tensor([block in skip["layers"] for block in range(model.family.unet.depth)])
        branches = skipping(branches, blocks, skip["scale"], (start, end))
    assert toy.relative_error(denoise(model, x, branches, plan), GOLDEN[f"run.{run}"]) < 2e-5
