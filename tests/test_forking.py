"""The diffs of docs/forking.md apply to this checkout, and what they add works."""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import texts
import torch
from PIL import Image
from runs import unet_calls

from ldm_lite.core import features

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "forking.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
DIFFS = re.findall(r"```diff\n(.*?)```", PAGE, re.DOTALL)


@pytest.fixture(scope="module")
def fork(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the package with all diffs applied."""
    folder = tmp_path_factory.mktemp("fork")
    shutil.copytree(ROOT / "ldm_lite", folder / "ldm_lite", ignore=shutil.ignore_patterns("__pycache__"))
    (folder / "weights").symlink_to(ROOT / "weights")
    for diff in DIFFS:
        subprocess.run(["git", "apply", "-"], input=diff, text=True, cwd=folder, check=True)
    return folder


CODE = """
import torch, ldm_lite
from safetensors.torch import save_file
from ldm_lite import __main__, sheet, txt2img
from ldm_lite.adapters.lora import file_names, targets
from ldm_lite.checkpoint.reader import on_meta
from ldm_lite.zoo.families import detect_family
from ldm_lite.zoo.families import FAMILIES
from ldm_lite.zoo.family import build

apple = ["a red apple", "--steps", "2", "--device", "cpu"]
assert txt2img.main([*apple, "--sampler", "Midpoint Karras", "--attention", "top_keys", "--out", "apple.png"]) == 0
assert txt2img.main([*apple, "--sampler", "rk2 karras", "--out", "plain.png"]) == 0
assert txt2img.main([*apple, "--steps", "4", "--guidance-from", "0.5", "--out", "late.png"]) == 0
assert __main__.main(["sheet", *apple, "--batch-size", "4", "--out", "sheet.png"]) == 0

# the adapter: a weight changes by the formula, and back
pipe = ldm_lite.load(device="cpu")
module = next(name for name in targets(pipe.unet) if name.endswith("attn1.to_q"))
name, weight = file_names("unet", pipe.unet)[module][0], pipe.unet.get_submodule(module).weight
factors = torch.rand(len(weight)) + 0.5
save_file({f"{name}.gain": factors}, "gain.safetensors")
before = weight.clone()
with pipe.lora("gain.safetensors", 0.5):
    torch.testing.assert_close(weight, before * (1 + 0.5 * (factors[:, None] - 1)), rtol=1e-5, atol=1e-6)
assert torch.equal(weight, before)

# the family: a file of these shapes is detected
shapes = {}
with on_meta():
    for role, spec in FAMILIES["sd1_wide"].networks.items():
        shapes[role] = {key: tuple(value.shape) for key, value in build(spec).state_dict().items()}
found = detect_family(shapes, {})
assert (found.title, found.prediction, found.resolution) == ("a wider Stable Diffusion 1 with OpenCLIP", "v", 768)
assert "sheet" in __main__.COMMANDS
"""


def test_a_feature_of_the_users_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its option is one of every task; the first steps run on one branch of guidance."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(features, "FEATURES", dict(features.FEATURES))
    names: dict[str, Any] = {}
    exec(BLOCKS[0], names)
    assert texts.load("apple.png").size == (128, 128)
    pipe = names["pipe"]
    tasks: list[tuple[Callable[..., Any], list[Any]]] = [
        (pipe.txt2img, []),
        (pipe.img2img, [texts.load("apple.png")]),
        (pipe.inpaint, [texts.load("apple.png"), Image.new("L", (128, 128), 255)]),
    ]
    for task, images in tasks:
        with unet_calls(pipe) as calls:
            task("a pear", *images, steps=4, guidance_from=0.5, **({"strength": 1.0} if images else {}))
        assert [len(call.x) for call in calls] == [1, 1, 2, 2]
    with pytest.raises(TypeError, match="did you mean `guidance_from`"):
        pipe.txt2img("a pear", guidance_form=0.5)


def test_a_guidance_and_what_a_call_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """CFG-Zero* in the later steps: the latents of the formula, step by step."""
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    exec(BLOCKS[1], names)
    assert texts.load("apple.png").size == (128, 128)
    pipe, cond, uncond, noise = names["pipe"], names["cond"], names["uncond"], names["pipe"].noise(1)

    def formula(cond: torch.Tensor, uncond: torch.Tensor) -> torch.Tensor:
        share = torch.stack([(c * u).sum() / (u * u).sum() for c, u in zip(cond, uncond, strict=True)])
        scaled = share[:, None, None, None] * uncond
        return scaled + 5.0 * (cond - scaled)

    plan = pipe.plan("ddim", 3)  # the first of three steps is without guidance
    wrapped = pipe.denoise(noise, cond, uncond, plan, 5.0, wrap=names["late"])
    with unet_calls(pipe) as calls:
        pipe.denoise(noise, cond, uncond, plan, 5.0, wrap=names["late"])
    assert [len(call.x) for call in calls] == [1, 2, 2]
    always = pipe.denoise(noise, cond, uncond, plan, formula)
    every = lambda source: lambda call: source(call).combined_by(names["zero_star"])  # noqa: E731
    torch.testing.assert_close(pipe.denoise(noise, cond, uncond, plan, 5.0, wrap=every), always, rtol=1e-4, atol=1e-4)
    assert not torch.allclose(wrapped, always, atol=1e-3)


def test_every_diff_is_short() -> None:
    assert len(DIFFS) == 6
    assert all(len(diff.splitlines()) <= 40 for diff in DIFFS)


@pytest.mark.needs("git")
@pytest.mark.slow
def test_what_the_diffs_add_works(fork: Path) -> None:
    """One process for all, since it takes seconds to start."""
    environment = os.environ | {"PYTHONPATH": str(fork)}
    done = subprocess.run([sys.executable, "-c", CODE], cwd=fork, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    apple, plain = texts.load(fork / "apple.png"), texts.load(fork / "plain.png")
    assert "Sampler: Midpoint Karras" in apple.info["parameters"]
    assert apple.tobytes() != plain.tobytes()
    assert "Guidance from: 0.5" in texts.load(fork / "late.png").info["parameters"]
    assert texts.load(fork / "sheet-grid.png").size == (2 * 130 + 2, 2 * 130 + 2)
