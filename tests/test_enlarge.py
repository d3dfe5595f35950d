"""ESRGAN networks: the original's numbers, both layouts of their files, tiles, the command."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import toy
from esrgan import GOLDENS, old_layout, weights
from PIL import Image
from safetensors.torch import save_file

import ldm_lite
from ldm_lite.upscale import main


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file of the factor 4, wrapped as BasicSR's are."""
    target = tmp_path_factory.mktemp("upscaler") / "small.pth"
    torch.save({"params_ema": weights(4), "iter": 3}, target)
    return target


@pytest.mark.parametrize("scale", [4, 2, 1])
@pytest.mark.parametrize("layout", ["params_ema", "params", "bare", "safetensors", "esrgan"])
def test_equals_the_original(scale: int, layout: str, tmp_path: Path) -> None:
    file, values = tmp_path / "file.pth", weights(scale)
    if layout == "safetensors":
        save_file(values, file)
    else:
        values = old_layout(values) if layout == "esrgan" else values
        torch.save({layout: values} if "params" in layout else values, file)
    upscaler = ldm_lite.Upscaler(file, device="cpu")
    assert upscaler.factor == scale
    x = torch.sigmoid(toy.normal(31, 1, 3, 12, 8))
    with torch.no_grad():
        ours = (upscaler.network(x * 2 - 1) + 1) / 2
    np.testing.assert_allclose(ours.numpy(), GOLDENS[f"x{scale}"], atol=2e-5 * np.abs(GOLDENS[f"x{scale}"]).max())


def test_both_copies_in_a_file_are_the_average(tmp_path: Path) -> None:
    """As Real-ESRGAN's own script takes them."""
    params = {key: value + 1 for key, value in weights(4).items()}
    torch.save({"params": params, "params_ema": weights(4)}, tmp_path / "both.pth")
    network = ldm_lite.Upscaler(tmp_path / "both.pth", device="cpu").network
    assert torch.equal(network.conv_last.bias, weights(4)["conv_last.bias"])


@pytest.mark.parametrize("scale", [4, 2])
def test_tiles_differ_little_from_the_whole(scale: int, tmp_path: Path) -> None:
    torch.save(weights(scale), tmp_path / "a.pth")
    pixels = torch.tanh(toy.normal(5, 3, 101, 75))
    whole = ldm_lite.Upscaler(tmp_path / "a.pth", device="cpu").enlarge(pixels)
    tiled = ldm_lite.Upscaler(tmp_path / "a.pth", device="cpu", tile=33).enlarge(pixels)
    assert whole.shape == (3, scale * 101, scale * 75)
    # two blocks of 15 convolutions read 30 pixels far, almost all of it within the margin of 16
    assert float((whole - tiled).abs().max()) < 1 / 255


def test_images_of_every_kind(path: Path) -> None:
    upscaler, array = ldm_lite.Upscaler(path, device="cpu"), toy.photo(16, 24)
    enlarged = upscaler(array)
    assert enlarged.size == (96, 64)
    assert enlarged.tobytes() == upscaler(Image.fromarray(array)).tobytes()


def test_the_command(path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for i in range(2):
        Image.fromarray(toy.photo(16, 16 + 8 * i)).save(tmp_path / f"{i}.png")
    out = tmp_path / "out"
    inputs = ["--init-img", str(tmp_path / "0.png"), "--init-img", str(tmp_path / "1.png")]
    assert main([*inputs, "--ckpt", str(path), "--device", "cpu", "--out", str(out)]) == 0
    first, second = capsys.readouterr().out.splitlines()
    with Image.open(first) as image:
        assert image.size == (64, 64)
        assert "Size: 64x64, Model: small.pth, Init image: 0.png" in image.info["parameters"]
    with Image.open(second) as image:
        assert image.size == (96, 64)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--steps", "3"], "an ESRGAN network reads the image alone: leave out --steps"),
        (["--tile", "8"], "got --tile 8, expected 32 or more"),
        (["a cat"], "leave out --prompt"),
        (["--lora", "a.safetensors"], "leave out --lora"),
    ],
)
def test_wrong_options_are_one_line(
    arguments: list[str], message: str, path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Image.fromarray(toy.photo(8, 8)).save(tmp_path / "a.png")
    out = str(tmp_path / "out")
    line = [*arguments, "--init-img", str(tmp_path / "a.png"), "--ckpt", str(path), "--device", "cpu", "--out", out]
    assert main(line) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_other_files_and_broken_sizes(path: Path, small_path: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="is not an ESRGAN upscaler"):
        ldm_lite.Upscaler(small_path, device="cpu")
    values: dict[str, Any] = weights(4)
    for change, message in (
        ({"conv_first.weight": torch.zeros(16, 5, 3, 3)}, "reads 5 channels and makes 3"),
        ({"conv_last.weight": torch.zeros(1, 16, 3, 3)}, "makes 1, expected an upscaler of RGB images"),
        ({"body.1.rdb1.conv1.weight": torch.zeros(8, 15, 3, 3)}, "of another shape"),
        ({"body.7.rdb1.conv1.weight": torch.zeros(8, 16, 3, 3)}, "3 such blocks: expected all"),
    ):
        torch.save({**values, **change}, tmp_path / "broken.pth")
        with pytest.raises(ValueError, match=message):
            ldm_lite.Upscaler(tmp_path / "broken.pth", device="cpu")
    torch.save({"params": {}}, tmp_path / "broken.pth")
    with pytest.raises(ValueError, match="holds no"):
        ldm_lite.Upscaler(tmp_path / "broken.pth", device="cpu")
