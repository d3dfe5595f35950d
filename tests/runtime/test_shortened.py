"""DeepCache, T-GATE and FreeU: runs of a UNet against those of the authors' and diffusers' code."""

from pathlib import Path

import numpy as np
import pytest
import random_checkpoint
import toy

import ldm_lite
from ldm_lite.diffusion.guidance import Branches, Conditioning, classifier_free
from ldm_lite.diffusion.guidance_steps import within
from ldm_lite.diffusion.names import make_plan
from ldm_lite.generate import NO_EXTRAS, denoise
from ldm_lite.pipeline import Pipeline
from ldm_lite.runtime.shortened import Shortcuts

GOLDENS = np.load(Path(__file__).parents[1] / "data" / "tricks.npz")


@pytest.fixture(scope="module")
def pipe(tmp_path_factory: pytest.TempPathFactory) -> Pipeline:
    path = tmp_path_factory.mktemp("tricks") / "tricks.safetensors"
    random_checkpoint.write(path, toy.TRICKS)
    return ldm_lite.load(path, device="cpu")


def branches() -> Branches:
    """Those of make_trick_goldens.py."""
    cond, uncond = (Conditioning(toy.normal(seed, 2, 7, 64)) for seed in (2, 3))
    return classifier_free(cond, uncond, 4.0)


def run(pipe: Pipeline, shortcuts: Shortcuts | None, guided: Branches | None = None) -> np.ndarray:
    plan, extras = make_plan("ddim", pipe.schedule, 5), NO_EXTRAS._replace(shortcuts=shortcuts)
    with toy.in_float64(pipe.unet):
        return denoise(pipe, toy.normal(1, 2, 4, 8, 8), guided or branches(), plan, extras=extras).numpy()


@pytest.mark.parametrize(
    ("name", "shortcuts"),
    [
        ("plain", None),
        ("plain", Shortcuts(every=1, branch=2)),
        ("free", Shortcuts(free=(1.5, 1.6, 0.9, 0.2))),
        ("deep.3.0", Shortcuts(every=3)),
        ("deep.2.1", Shortcuts(every=2, branch=1)),
        ("deep.2.3", Shortcuts(every=2, branch=3)),
        ("deep.3.5", Shortcuts(every=3, branch=5)),
        ("gate.2", Shortcuts(gate=2)),
        ("gate.3", Shortcuts(gate=3)),
    ],
)
def test_runs_equal_the_authors(pipe: Pipeline, name: str, shortcuts: Shortcuts | None) -> None:
    guided = branches()
    if shortcuts is not None and shortcuts.gate is not None:
        guided = within(guided, tuple(step < shortcuts.gate for step in range(5)))
    made = run(pipe, shortcuts, guided)
    assert toy.relative_error(made, GOLDENS[name]) < 1e-5
    if name != "plain":
        assert toy.relative_error(made, GOLDENS["plain"]) > 1e-3
