"""The x4 upscaler and bsr_sr in miniature: runs against the original's (the goldens), and the command."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import random_checkpoint
import torch
import toy
import toy_zoo
from PIL import Image
from runs import unet_calls

import ldm_lite
from ldm_lite import Pipeline, generate
from ldm_lite.diffusion.guidance import Conditioning, classifier_free
from ldm_lite.runtime.tiled_unet import TiledUNet
from ldm_lite.upscale import main

GOLDEN = np.load(Path(__file__).parent / "data" / "zoo.npz")


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The files of the miniatures."""
    folder, paths = tmp_path_factory.mktemp("upscale"), {}
    for name in ("x4", "ldm_bsr_sr"):
        paths[name] = folder / f"{name}.safetensors"
        random_checkpoint.write(paths[name], toy_zoo.small(name))
    return paths


@pytest.fixture(scope="module")
def pipes(paths: dict[str, Path]) -> dict[str, Pipeline]:
    """The miniatures."""
    return {name: ldm_lite.load(path, device="cpu") for name, path in paths.items()}


def picture(width: int = 7, height: int = 5) -> Image.Image:
    y, x = np.mgrid[0:height, 0:width]
    return Image.fromarray(np.stack([30 * y % 256, 20 * x % 256, 10 * (x + y) % 256], axis=2).astype(np.uint8))


def test_the_upscaler_equals_the_original(pipes: dict[str, Pipeline]) -> None:
    """Trap 20: noise on the image, its level as a class, attn1 that reads the text, v, and another scale factor."""
    pipe, run = pipes["x4"], toy_zoo.RUNS["x4"]
    _, a, s = pipe.schedule.at(toy_zoo.NOISE_LEVEL)
    read = {"y": torch.tensor([toy_zoo.NOISE_LEVEL]), "concat": a * toy_zoo.picture("x4") + s * toy_zoo.upscale_noise()}
    cond, uncond = (Conditioning(context[None], **read) for context in toy_zoo.upscale_contexts())
    plan = pipe.plan("ddim", run.steps, spacing="original")
    with toy.in_float64(*pipe.networks.values()):
        latents = pipe.denoise(toy_zoo.noise("x4"), cond, uncond, plan, run.scale)
        pixels = pipe.decode(latents, output="tensor")[0]
    assert toy.relative_error(latents, GOLDEN["run.x4.latents"]) < 1e-5
    assert toy.relative_error(pixels, GOLDEN["run.x4.pixels"][0].clip(-1, 1)) < 1e-5


def test_the_image_is_read_with_the_noise_of_its_level(pipes: dict[str, Pipeline]) -> None:
    pipe, image = pipes["x4"], Image.fromarray(toy.waves(32))
    with unet_calls(pipe) as calls:
        pipe.upscale(image, steps=1, scale=1.0, noise_level=30)
    assert calls[0].inputs["y"].tolist() == [30]
    _, a, s = pipe.schedule.at(30)
    noise = (calls[0].x[0, 4:] - a * (torch.from_numpy(toy.waves(32)).permute(2, 0, 1) / 127.5 - 1)) / s
    assert float(noise.mean()) == pytest.approx(0, abs=0.05)
    assert float(noise.std()) == pytest.approx(1, abs=0.05)


def test_super_resolution_in_tiles_equals_the_original(pipes: dict[str, Pipeline]) -> None:
    """Trap 34: as the original notebook denoises large images; the tiles matter."""
    pipe, run = pipes["ldm_bsr_sr"], toy_zoo.RUNS["ldm_bsr_sr"]
    assert run.tile is not None
    branches = classifier_free(Conditioning(concat=toy_zoo.picture("ldm_bsr_sr")), None, 1.0)
    plan = pipe.plan("ddim", run.steps, spacing="original")
    tiled = pipe.with_networks(unet=TiledUNet(pipe.unet, run.tile))
    with toy.in_float64(pipe.unet):
        results = [generate.denoise(p, toy_zoo.noise("ldm_bsr_sr"), branches, plan) for p in (tiled, pipe)]
    assert toy.relative_error(results[0], GOLDEN["run.ldm_bsr_sr.latents"]) < 1e-5
    assert toy.relative_error(results[1], GOLDEN["run.ldm_bsr_sr.latents"]) > 1e-3


@pytest.mark.parametrize("name", ["x4", "ldm_bsr_sr"])
def test_any_size_becomes_four_times_as_large(name: str, pipes: dict[str, Pipeline]) -> None:
    images = [picture(), picture(6, 9), picture(11, 9)]
    results = pipes[name].upscale(images, steps=1, tile=8, output="result")
    assert [result.image.size for result in results] == [(28, 20), (24, 36), (44, 36)]
    assert [result.seed for result in results] == [42, 43, 44]


def test_an_image_depends_on_its_own_seed_alone(pipes: dict[str, Pipeline]) -> None:
    """The noise on the image as well; a batch of three may add up in another order than one image."""
    three = pipes["x4"].upscale([picture()], steps=1, batch_size=3, output="result")
    alone = pipes["x4"].upscale([picture()], steps=1, seed=44, output="result")[0]
    torch.testing.assert_close(three[2].pixels, alone.pixels, rtol=1e-4, atol=1e-4)
    assert (three[1].pixels - alone.pixels).abs().max() > 1e-2


def test_prompt_and_noise_level_matter(pipes: dict[str, Pipeline]) -> None:
    def upscaled(prompt: str | None = None, **changes: Any) -> np.ndarray:
        return pipes["x4"].upscale(picture(), prompt, steps=2, output="numpy", **changes)[0]

    plain = upscaled()
    assert np.array_equal(upscaled(""), plain)
    for prompt, changes in (("a cat", {}), (None, {"noise_level": 0}), ("a cat", {"scale": 1.0})):
        assert not np.array_equal(upscaled(prompt, **changes), plain)


Make = Callable[[list[str]], int]


@pytest.mark.parametrize("name", ["x4", "ldm_bsr_sr"])
def test_the_command(name: str, paths: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture().save(tmp_path / "in.png")
    arguments = ["--init-img", str(tmp_path / "in.png"), "--ckpt", str(paths[name]), "--device", "cpu", "--steps", "2"]
    assert main([*arguments, "--out", str(tmp_path / "out.png")]) == 0
    assert capsys.readouterr().out.strip() == str(tmp_path / "out.png")
    image = Image.open(tmp_path / "out.png")
    assert image.size == (28, 20)
    assert "Init image: in.png" in image.text["parameters"]  # type: ignore[attr-defined]
    assert ("Noise level: 20" in image.text["parameters"]) == (name == "x4")  # type: ignore[attr-defined]


def test_seeds_continue_from_the_largest(pipes: dict[str, Pipeline]) -> None:
    assert len(pipes["x4"].upscale([picture(), picture()], steps=1, seed=2**63 - 1)) == 2


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"noise_level": 351}, "got `noise_level` 351, expected 0 to 350"),
        ({"tile": 4}, "got `tile` 4, expected 8 to 65536"),
    ],
)
def test_numbers_out_of_range(pipes: dict[str, Pipeline], changes: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        pipes["x4"].upscale(picture(), **changes)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "no image: give one with --init-img FILE"),
        (["--init-img", "{in}", "--H", "64"], "leave out --height and --width"),
        (["--init-img", "{in}", "--compat"], "upscale has no --compat"),
        (["--init-img", "{in}", "--ckpt", "{other}"], "which upscale cannot use: run python -m ldm_lite.txt2img"),
    ],
)
def test_bad_input_is_one_line(
    arguments: list[str],
    message: str,
    paths: dict[str, Path],
    small_path: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    picture().save(tmp_path / "in.png")
    files = {"in": tmp_path / "in.png", "other": small_path}
    filled = [argument.format(**files) for argument in arguments]
    assert main(["--ckpt", str(paths["x4"]), *filled, "--device", "cpu", "--out", str(tmp_path)]) == 2
    *_, last = capsys.readouterr().err.splitlines()
    assert message in last


def test_one_prompt_and_a_noise_level_that_the_network_knows(pipes: dict[str, Pipeline]) -> None:
    levels = pipes["x4"].unet.spec.num_classes
    assert levels is not None
    with pytest.raises(ValueError, match=f"got `noise_level` {levels}, expected 0 to {levels - 1}"):
        pipes["x4"].upscale(picture(), noise_level=levels)
    with pytest.raises(ValueError, match="upscale takes one prompt for all images"):
        pipes["x4"].upscale(picture(), ["a cat", "a dog"])  # type: ignore[arg-type]
