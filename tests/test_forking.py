"""The diffs of docs/forking.md apply to this checkout, and what they add works."""

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import texts
import torch
from PIL import Image
from runs import unet_calls

import ldm_lite
from ldm_lite import img2img, txt2img, verify
from ldm_lite.batch import __main__ as batch
from ldm_lite.core import features
from ldm_lite.core.features import import_file

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
from ldm_lite.zoo.families import FAMILY_ROWS
from ldm_lite.zoo.family import build_network

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
    for role, spec in FAMILY_ROWS["sd1_wide"].specs.items():
        shapes[role] = {key: tuple(value.shape) for key, value in build_network(spec).state_dict().items()}
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


@pytest.fixture
def pag(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file of the page that adds perturbed-attention guidance, registered until the test ends."""
    monkeypatch.setattr(features, "FEATURES", dict(features.FEATURES))
    path = tmp_path / "pag.py"
    path.write_text(next(block for block in BLOCKS if "class PAG" in block), encoding="utf-8")
    assert len(path.read_text().splitlines()) <= 40
    return path


@pytest.mark.parametrize("scale", [2.5, 1.0])
def test_pag_is_that_of_diffusers(pag: Path, bundled: ldm_lite.Pipeline, scale: float) -> None:
    import_file(pag)
    arguments: dict[str, Any] = {"steps": 10, "seed": 3, "scale": scale, "sampler": "ddim", "pag_scale": 3.0}
    *_, state = bundled.stream("a red apple", **arguments)
    theirs = torch.from_numpy(np.load(ROOT / "tests" / "data" / "pag.npz")[f"scale {scale:g}"])
    assert (state.latents - theirs).abs().max() < 1e-4
    del arguments["pag_scale"]
    *_, plain = bundled.stream("a red apple", **arguments)
    assert (plain.latents - theirs).abs().max() > 0.1


def test_a_file_of_features_has_flags_in_every_command(
    pag: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "apple.png"
    argv = ["a red apple", "--steps", "2", "--device", "cpu", "--feature", str(pag)]
    assert txt2img.main([*argv, "--pag-scale", "3", "--out", str(out)]) == 0
    image = texts.load(out)
    assert "PAG scale: 3.0" in image.info["parameters"]
    assert txt2img.main([*argv[1:], "--from-png", str(out), "--out", str(tmp_path / "again.png")]) == 0
    assert texts.load(tmp_path / "again.png").tobytes() == image.tobytes()
    for scale in ("0", "3"):
        plot = tmp_path / f"plot{scale}.png"
        assert txt2img.main([*argv, "--x", f"pag_scale={scale},4", "--out", str(plot), "--skip-save"]) == 0
        assert f'X Type: pag_scale, X Values: "{scale}, 4"' in next(
            texts.load(path).info["parameters"] for path in tmp_path.glob(f"plot{scale}*.png")
        )
    capsys.readouterr()
    for words, message in (
        (["--pag-scale", "300"], "--pag-scale 300.0, expected 0 to 100"),
        (["--pag-layers", "x"], "--pag-layers is of --pag-scale: give it, too"),
        (["--pag-scal", "3"], "--pag-scale"),
        (["--feature", "missing.py"], "missing.py: "),
    ):
        with contextlib.suppress(SystemExit):
            assert txt2img.main([*argv, *words, "--out", str(out)]) == 2
        error = capsys.readouterr().err
        assert message in error
        assert "Traceback" not in error
    with pytest.raises(SystemExit):
        img2img.main(["--feature", str(pag), "--help", "pag"])
    assert "--pag-layers NAME" in capsys.readouterr().out


OWN = """
from typing import Any, ClassVar
from ldm_lite.core.features import Feature, option, register_feature

DEVICES = []


@register_feature
class Glow(Feature):
    \"\"\"Remembers where its model was.\"\"\"

    excludes = ("compat",)
    part_of = ("glow", "is of `glow`")
    glow: float = option(0.0, "how much", within=(0, 9), png="Glow")
    halo: int = option(1, "how wide", png="Glow halo")

    def check(self, options):
        assert not options.compat
        return options

    def change_options(self, model, options):
        DEVICES.append(self.once("device", lambda _: str(model.device)))
        return model, options
"""


@pytest.fixture
def glow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(features, "FEATURES", dict(features.FEATURES))
    path = tmp_path / "glow.py"
    path.write_text(OWN, encoding="utf-8")
    return path


def test_a_feature_remembers_one_run(glow: Path, small_path: Path, tmp_path: Path) -> None:
    """Neither the outline before weights are read nor another cell of a plot."""
    argv = ["a", "--ckpt", str(small_path), "--device", "cpu", "--steps", "1", "--feature", str(glow), "--glow", "1"]
    assert txt2img.main([*argv, "--x", "seed=1,2", "--out", str(tmp_path / "plot.png")]) == 0
    assert sys.modules["file_glow"].DEVICES == ["meta", "meta", "cpu", "cpu"]


def test_options_of_a_feature_beside_the_others(glow: Path, small: ldm_lite.Pipeline, tmp_path: Path) -> None:
    import_file(glow)
    with pytest.raises(ValueError, match="`glow` does not go with `compat`"):
        small.txt2img("a", glow=1.0, compat=True)
    with pytest.raises(ValueError, match="`halo` is of `glow`"):
        small.txt2img("a", halo=2)
    [result] = small.txt2img("a", glow=1.0, halo=3, steps=1, output="result")
    result.save(tmp_path / "a.png")
    [again] = small.txt2img(from_png=tmp_path / "a.png", glow=2.0, output="result")
    assert "Glow: 2.0, Glow halo: 3" in again.parameters
    # an option that is given overrules a picture's text, at its default too, in Python and as a flag
    [again] = small.txt2img(from_png=tmp_path / "a.png", halo=1, output="result")
    assert "Glow: 1.0" in again.parameters
    assert "halo" not in again.parameters


def test_a_flag_of_a_feature_at_its_default_overrules_a_picture(
    glow: Path, small: ldm_lite.Pipeline, small_path: Path, tmp_path: Path
) -> None:
    import_file(glow)
    small.txt2img("a", glow=1.0, halo=3, steps=1, output="result")[0].save(tmp_path / "a.png")
    argv = ["--ckpt", str(small_path), "--device", "cpu", "--feature", str(glow), "--halo", "1"]
    assert txt2img.main([*argv, "--from-png", str(tmp_path / "a.png"), "--out", str(tmp_path / "b.png")]) == 0
    with Image.open(tmp_path / "b.png") as image:
        text = image.info["parameters"]
    assert "Glow: 1.0" in text
    assert "halo" not in text


def test_options_of_a_feature_are_columns_of_batch(
    glow: Path, small_path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table, out = tmp_path / "rows.csv", tmp_path / "out"
    table.write_text("id,prompt,glow,halo\na,x,1.5,\nb,x,2,4\nc,x,ten,\nd,x,99,\n", encoding="utf-8")
    argv = [str(table), "--ckpt", str(small_path), "--device", "cpu", "--steps", "1", "--manifest", "jsonl"]
    assert batch.main([*argv, "--format", "folder", "--feature", str(glow), "--out", str(out)]) == 0
    rows = {row["row"]: row for row in map(json.loads, (out / "manifest.jsonl").read_text().splitlines())}
    written = {number: json.loads(next(out.rglob(f"{number:09}.json")).read_text())["parameters"] for number in (0, 1)}
    assert "Glow: 1.5" in written[0]
    assert "Glow: 2.0, Glow halo: 4" in written[1]
    assert "glow 'ten'" in rows[2]["error"]
    assert "got glow 99" in rows[3]["error"].replace("`", "")
    glow.write_text(OWN + "\n# changed\n", encoding="utf-8")  # then it is another job
    assert batch.main([*argv, "--format", "folder", "--feature", str(glow), "--out", str(out)]) == 2
    assert "feature" in capsys.readouterr().err


def test_names_that_clash_and_commands_without_images(
    glow: Path, small: ldm_lite.Pipeline, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        verify.main(["--feature", str(glow), "--glow", "1"])
    assert "unknown flag" in capsys.readouterr().err
    glow.write_text(OWN.replace("halo: int", "freeu: int"), encoding="utf-8")
    assert txt2img.main(["a", "--feature", str(glow)]) == 2
    assert "the option --freeu of Glow is one of ldm_lite's: give it another name" in capsys.readouterr().err
    with pytest.raises(ValueError, match="the option `freeu` of Glow is one of ldm_lite's"):
        small.txt2img("a", glow=1.0)


def test_a_guidance_and_what_a_call_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """CFG-Zero* in the later steps: the latents of the formula, step by step."""
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    exec(next(block for block in BLOCKS if "zero_star" in block), names)
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
    always = pipe.denoise(noise, cond, uncond, plan, guidance=formula)
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
