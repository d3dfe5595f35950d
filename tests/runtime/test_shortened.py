"""DeepCache, T-GATE and FreeU: runs of a UNet against those of the authors' and diffusers' code."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import random_checkpoint
import toy
from runs import run_latents

import ldm_lite
from ldm_lite import Pipeline

GOLDENS = np.load(Path(__file__).parents[1] / "data" / "tricks.npz")


@pytest.fixture(scope="module")
def pipe(tmp_path_factory: pytest.TempPathFactory) -> Pipeline:
    path = tmp_path_factory.mktemp("tricks") / "tricks.safetensors"
    random_checkpoint.write(path, toy.TRICKS)
    return ldm_lite.load(path, device="cpu")


def run(pipe: Pipeline, **options: Any) -> np.ndarray:
    """The latents that make_trick_goldens.py begins with, after five steps."""
    cond, uncond = (toy.normal(seed, 2, 7, 64) for seed in (2, 3))
    given = {"cond": cond, "uncond": uncond, "noise": toy.normal(1, 2, 4, 8, 8), "batch_size": 2, "scale": 4.0}
    with toy.in_float64(pipe.unet):
        return run_latents(pipe, sampler="ddim", steps=5, **given, **options).numpy()


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
