"""DeepCache, T-GATE and FreeU: runs of a UNet against those of the authors' and diffusers' code."""

from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import random_checkpoint
import torch
import toy
from runs import run_latents

import ldm_lite
from ldm_lite import Pipeline
from ldm_lite.core.denoise import Call, Inputs
from ldm_lite.core.features import Feature, register_feature
from ldm_lite.core.job import Job

GOLDENS = np.load(Path(__file__).parents[1] / "data" / "tricks.npz")


@pytest.fixture(scope="module")
def pipe(tmp_path_factory: pytest.TempPathFactory) -> Pipeline:
    path = tmp_path_factory.mktemp("tricks") / "tricks.safetensors"
    random_checkpoint.write(path, toy.TRICKS)
    return ldm_lite.load(path, device="cpu")


def run(pipe: Pipeline, **options: Any) -> np.ndarray:
    """The latents that make_trick_goldens.py begins with, after five steps."""
    cond, uncond = (toy.normal(seed, 2, 7, 64) for seed in (2, 3))
    arguments = {"cond": cond, "uncond": uncond, "noise": toy.normal(1, 2, 4, 8, 8), "batch_size": 2, "scale": 4.0}
    with toy.in_float64(pipe.unet):
        return run_latents(pipe, sampler="ddim", steps=5, **arguments, **options).numpy()


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("plain", {}),
        ("plain", {"deep_cache": "1:2"}),
        ("free", {"freeu": "1.5,1.6,0.9,0.2"}),
        ("deep.3.0", {"deep_cache": "3"}),
        ("deep.2.1", {"deep_cache": "2:1"}),
        ("deep.2.3", {"deep_cache": "2:3"}),
        ("deep.3.5", {"deep_cache": "3:5"}),
        ("gate.2", {"gate_step": 2}),
        ("gate.3", {"gate_step": 3}),
    ],
)
def test_runs_equal_the_authors(pipe: Pipeline, name: str, options: dict[str, Any]) -> None:
    latents = run(pipe, **options)
    assert toy.relative_error(latents, GOLDENS[name]) < 1e-5
    if name != "plain":
        assert toy.relative_error(latents, GOLDENS["plain"]) > 1e-3


@mock.patch.dict("ldm_lite.core.features.FEATURES")
def test_a_feature_that_changes_what_the_network_predicts(pipe: Pipeline) -> None:
    """DeepCache's network gives what it keeps too, which others do not see: which 1 leaves as it is."""

    @register_feature
    class Fraction(Feature):
        fraction: float = 1.0

        def change_job(self, job: Job) -> Job:
            def change(inputs: Inputs, call: Call, job: Job) -> Inputs:
                def network(*args: Any, **named: Any) -> torch.Tensor:
                    return self.fraction * inputs.network(*args, **named)

                return inputs._replace(network=network)

            return job.changing_inputs(change)

    plain, whole, half = (
        run_latents(pipe, "a", sampler="ddim", steps=4, deep_cache="2", height=32, width=32, **options)
        for options in ({}, {"fraction": 1.0}, {"fraction": 0.5})
    )
    assert torch.equal(plain, whole)
    assert not torch.equal(plain, half)
