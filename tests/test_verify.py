"""`verify`: every published recipe, on networks in miniature, beside diffusers running the same recipe."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import toy_verify
from random_checkpoint import write

import ldm_lite
from ldm_lite.tasks import verify
from ldm_lite.tasks.verify import VECTORS, Vector
from ldm_lite.verify import main
from ldm_lite.zoo.families import FAMILY_ROWS

GOLDENS = np.load(Path(__file__).parent / "data" / "verify.npz")
TOY = toy_verify.toy_vectors()
OFF = 2e-5  # of values in [0,1], in float32


def known(vector: Vector) -> Vector:
    """The vector in miniature with what diffusers makes of it, and its family's title."""
    golden = GOLDENS[vector.title]
    return replace(vector, expected=tuple(golden) if golden.ndim == 1 else vector.expected)


@pytest.fixture(scope="session")
def path_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Vector], Path]:
    folder = tmp_path_factory.mktemp("verify")

    def path(vector: Vector) -> Path:
        target = folder / f"{vector.family}-{vector.prediction}.safetensors"
        if not target.exists():
            write(target, toy_verify.FAMILY_OF[vector.family, vector.prediction])
        return target

    return path


@pytest.fixture
def toys(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command knows the miniature vectors in place of the published ones."""
    monkeypatch.setattr(verify, "VECTORS", tuple(map(known, TOY)))
    small = {name: family for (name, _), family in toy_verify.FAMILY_OF.items()}
    monkeypatch.setattr(verify, "FAMILY_ROWS", dict(FAMILY_ROWS) | small)


@pytest.mark.parametrize(
    "vector", [pytest.param(recipe, id=recipe.title, marks=[pytest.mark.slow] * (recipe.steps > 20)) for recipe in TOY]
)
def test_each_recipe_equals_diffusers(vector: Vector, path_of: Callable[[Vector], Path]) -> None:
    model = ldm_lite.load(path_of(vector), device="cpu")
    comparison = verify.check(model, known(vector), lambda name: GOLDENS[vector.title].astype(np.float64))
    assert comparison.difference < OFF
    assert comparison.passes
    assert np.ptp(comparison.expected) > 0.05  # no plain grey


def test_the_latents_are_those_of_the_published_tests(small_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = ldm_lite.load(small_path, device="cpu")
    seen = []
    monkeypatch.setattr(verify, "txt2img", lambda model, options: seen.append(options) or ())
    for vector in VECTORS[0], next(recipe for recipe in VECTORS if recipe.seeded):
        with pytest.raises(ValueError, match="not enough values"):
            verify.check(model, vector, read=lambda name: np.zeros(9))
    first, seeded = seen
    # the first numbers of RandomState(0), as numpy's users know them
    assert first.noise.shape == (1, 4, 64, 64)
    assert first.noise.flatten()[:2].tolist() == pytest.approx([1.76405235, 0.40015721])
    assert torch.equal(seeded.noise[0], model.noise(0, 96 * model.vae.spec.factor, 96 * model.vae.spec.factor)[0])
    assert (first.height, first.prompt, first.seed) == (64 * model.vae.spec.factor, verify.HORSE, 0)


@pytest.mark.usefixtures("toys")
def test_the_command_names_the_checkpoint(
    path_of: Callable[[Vector], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    path = str(path_of(TOY[0]))
    assert main(["--ckpt", path, "--device", "cpu"]) == 0
    out = capsys.readouterr().out
    assert out.count(": pass\n") == 4
    assert "expected  0." in out
    assert out.endswith("sd1-eps is Stable Diffusion 1.4: all 3 published test vectors agree\n")


@pytest.mark.usefixtures("toys")
def test_other_weights_differ(
    path_of: Callable[[Vector], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other_path = tmp_path / "other.safetensors"
    write(other_path, toy_verify.FAMILY_OF["sd1", "eps"], seed=1)
    assert main(["--ckpt", str(other_path), "--device", "cpu", "--only", "1.4"]) == 2
    shown = capsys.readouterr()
    assert shown.out.count("DIFFERS") == 3
    assert "other agrees with the published test vectors of none of these: Stable Diffusion 1.4" in shown.err


@pytest.mark.slow
@pytest.mark.usefixtures("toys")
def test_whole_images_come_from_a_folder(
    path_of: Callable[[Vector], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--ckpt", str(path_of(TOY[0])), "--device", "cpu", "--whole", str(tmp_path), "--only", "1.5"]
    assert main(arguments) == 2
    assert "stable_diffusion_1_5_pndm.npy: no such file: it is in the data set" in capsys.readouterr().err
    (vector,) = (recipe for recipe in TOY if recipe.checkpoint == "Stable Diffusion 1.5")
    file = tmp_path / "stable_diffusion_1_5_pndm.npy"
    for content, message in (
        (b"no array", "not an array in numpy's format"),
        (np.zeros((3, 3)), "expected an image (H,W,3)"),
        (np.zeros((8, 8, 3)), "agrees with the published test vectors of none"),
    ):
        file.write_bytes(content) if isinstance(content, bytes) else np.save(file, content)
        assert main(arguments) == 2
        assert message in capsys.readouterr().err
    np.save(file, GOLDENS[vector.title])
    assert main(arguments) == 0
    assert "is Stable Diffusion 1.5: all 1 published test vectors agree" in capsys.readouterr().out


def test_an_array_that_is_no_image_is_one_line(tmp_path: Path) -> None:
    for array in (np.zeros((3, 3)), np.zeros((8, 8, 4)), np.zeros((8, 8, 3), dtype=int), np.zeros((1, 8, 8, 3))):
        np.save(tmp_path / "a.npy", array)
        with pytest.raises(ValueError, match=r"a.npy: holds .*, expected an image \(H,W,3\) of floats"):
            verify.stored_image(str(tmp_path), "a.npy")


def test_a_family_without_vectors_and_an_unknown_checkpoint(
    path_of: Callable[[Vector], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--device", "cpu"]) == 2
    assert "no test vectors are published for emoji" in capsys.readouterr().err


@pytest.mark.usefixtures("toys")
def test_only_wants_a_known_name(path_of: Callable[[Vector], Path], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--ckpt", str(path_of(TOY[0])), "--device", "cpu", "--only", "9"]) == 2
    assert (
        "got --only '9', expected a part of one of: Stable Diffusion 1.4, Stable Diffusion 1.1"
        in capsys.readouterr().err
    )
