"""Seamless images: circular convolutions in the UNet and the autoencoder, along both axes or one."""

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import ldm_lite
from ldm_lite.cli.task_options import Img2imgOptions
from ldm_lite.cli.task_options import Txt2imgOptions as Options
from ldm_lite.pipeline import Pipeline
from ldm_lite.runtime import tiling
from ldm_lite.runtime.seamless import is_seamless, seamless
from ldm_lite.tasks.img2img import img2img
from ldm_lite.tasks.txt2img import txt2img

SMALL: dict[str, Any] = {"seed": 3, "steps": 2, "height": 64, "width": 64}


@pytest.fixture(scope="module")
def pipe(small_path: Path) -> Pipeline:
    return ldm_lite.load(small_path, device="cpu")


def runs(pipe: Pipeline, unet: Any, vae: Any, roll: tuple[int, int] = (0, 0)) -> list[torch.Tensor]:
    """What the UNet and the decoder make of latents (1,4,8,16), rolled by some positions."""
    torch.manual_seed(0)
    x, context = torch.randn(1, 4, 8, 16).roll(roll, (2, 3)), torch.randn(1, 77, pipe.family.unet.context_dim)
    with torch.no_grad():
        return [unet(x, torch.tensor([500.0]), context, None), vae.decode(x)]


def test_both_axes_are_torch_s_own_padding(pipe: Pipeline) -> None:
    """The web UI sets padding_mode of every convolution."""
    circular = [copy.deepcopy(network) for network in (pipe.unet, pipe.vae)]
    for module in [module for network in circular for module in network.modules() if type(module) is nn.Conv2d]:
        vars(module).pop("forward", None)
        module.padding_mode = "circular"
        module._reversed_padding_repeated_twice = [each for side in module.padding[::-1] for each in (side, side)]
    made = runs(pipe, seamless(pipe.unet, "xy"), seamless(pipe.vae, "xy"))
    for mine, right in zip(made, runs(pipe, *circular), strict=True):
        torch.testing.assert_close(mine, right, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("axes", ["x", "y", "xy"])
def test_a_rolled_input_makes_a_rolled_output(pipe: Pipeline, axes: str) -> None:
    """Along these axes, by multiples of what the UNet divides by, and along no other."""
    networks = seamless(pipe.unet, axes), seamless(pipe.vae, axes)
    plain = runs(pipe, *networks)
    for axis, roll in (("y", (4, 0)), ("x", (0, 8))):
        for before, after, factor in zip(plain, runs(pipe, *networks, roll), (1, 8), strict=True):
            same = torch.allclose(before.roll((factor * roll[0], factor * roll[1]), (2, 3)), after, atol=1e-3)
            assert same == (axis in axes)


def test_the_model_does_not_change(pipe: Pipeline) -> None:
    """Images without it have the same bits afterwards; the weights are not copied."""
    [before] = txt2img(pipe, Options("a cat", **SMALL))
    [made] = txt2img(pipe, Options("a cat", seamless="xy", **SMALL))
    [after] = txt2img(pipe, Options("a cat", **SMALL))
    assert torch.equal(before.pixels, after.pixels)
    assert not torch.equal(before.pixels, made.pixels)
    assert "Tiling: True" in made.parameters
    assert not is_seamless(pipe.unet)
    copied = seamless(pipe.unet, "x")
    assert all(a is b for a, b in zip(copied.parameters(), pipe.unet.parameters(), strict=True))


def test_autoencoders_in_strips_compute_whole(pipe: Pipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    """Strip by strip an autoencoder has no other edge; after it, strips are what they were."""
    monkeypatch.setattr(tiling, "STRIP", 2**14)
    strips = tiling.tiled(pipe.vae)
    made, whole = (seamless(vae, "xy") for vae in (strips, pipe.vae))
    assert tiling.is_tiled(strips)
    assert not tiling.is_tiled(made)
    assert tiling.tiled(made) is made
    x = torch.randn(1, 4, 16, 16, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        assert torch.equal(made.decode(x), whole.decode(x))


def test_a_picture_is_made_again(pipe: Pipeline, tmp_path: Path) -> None:
    for axes in ("x", "xy"):
        [image] = pipe.txt2img("a cat", seamless=axes, **SMALL)
        [again] = pipe.txt2img(from_png=image)
        assert np.array_equal(image, again)


@pytest.mark.parametrize(
    "given", [{"seamless": "z"}, {"seamless": "x", "compat": True}, {"seamless": "x", "refiner": "r"}]
)
def test_wrong_options_are_one_line(pipe: Pipeline, given: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="`seamless`") as caught:
        list(txt2img(pipe, Options("a cat", **SMALL, **given)))
    assert "\n" not in str(caught.value)


def test_images_to_start_from(pipe: Pipeline) -> None:
    given: dict[str, Any] = {"init_img": (torch.zeros(3, 64, 64),), "steps": 2}
    one, other = (next(img2img(pipe, Img2imgOptions("a", seamless=axes, **given))) for axes in (None, "y"))
    assert not torch.equal(one.pixels, other.pixels)
