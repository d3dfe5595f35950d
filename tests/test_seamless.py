"""Seamless images: circular convolutions in the UNet and the autoencoder, along both axes or one."""

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import random_checkpoint
import torch
import toy
from PIL import Image
from runs import run_latents
from safetensors.torch import save_file
from torch import nn

from ldm_lite import Control, Pipeline
from ldm_lite.runtime import tiling
from ldm_lite.runtime.seamless import axes_of, seamless

SMALL: dict[str, Any] = {"seed": 3, "steps": 2, "height": 64, "width": 64}


def one_step(pipe: Pipeline, roll: tuple[int, int] = (0, 0), **options: Any) -> list[torch.Tensor]:
    """The latents (1,4,8,16) that one step makes of rolled noise, and their image (1,3,64,128)."""
    noise = pipe.noise(0, height=64, width=128).roll(roll, (2, 3))
    options |= {"noise": noise, "height": 64, "width": 128, "steps": 1, "scale": 1.0}
    [pixels] = pipe.txt2img("a cat", output="tensor", **options)
    return [run_latents(pipe, "a cat", **options), pixels[None]]


def test_both_axes_are_torch_s_own_padding(pipe: Pipeline) -> None:
    """The web UI sets padding_mode of every convolution."""
    circular = {name: copy.deepcopy(network) for name, network in (("unet", pipe.unet), ("vae", pipe.vae))}
    for module in [module for network in circular.values() for module in network.modules()]:
        if type(module) is nn.Conv2d:
            vars(module).pop("forward", None)
            module.padding_mode = "circular"
            module._reversed_padding_repeated_twice = [width for side in module.padding[::-1] for width in (side, side)]
    plain, wrapped, wanted = one_step(pipe), one_step(pipe, seamless="xy"), one_step(pipe.with_networks(**circular))
    for before, mine, right in zip(plain, wrapped, wanted, strict=True):
        torch.testing.assert_close(mine, right, atol=1e-4, rtol=1e-5)
        assert (before - mine).abs().max() > 0.01


@pytest.mark.parametrize("axes", ["x", "y", "xy"])
def test_a_rolled_input_makes_a_rolled_output(pipe: Pipeline, axes: str) -> None:
    """Along these axes, by multiples of what the UNet divides by, and along no other."""
    plain = one_step(pipe, seamless=axes)
    for axis, roll in (("y", (4, 0)), ("x", (0, 8))):
        for before, after, factor in zip(plain, one_step(pipe, roll, seamless=axes), (1, 8), strict=True):
            same = torch.allclose(before.roll((factor * roll[0], factor * roll[1]), (2, 3)), after, atol=1e-3)
            assert same == (axis in axes)


@pytest.mark.parametrize("kind", ["net", "adapter"])
def test_a_control_is_seamless_too_and_loaded_once(pipe: Pipeline, tmp_path: Path, kind: str) -> None:
    save_file(
        toy.control(random_checkpoint.SMALL.unet) if kind == "net" else toy.adapter(), tmp_path / "net.safetensors"
    )
    photo = np.asarray(Image.fromarray(toy.photo()).resize((128, 64)))
    control = Control(tmp_path / "net.safetensors", photo, weight=0.5)
    plain = one_step(pipe, seamless="x", control=[control])[0]
    rolled = one_step(pipe, (0, 8), seamless="x", control=[control.with_image(np.roll(photo, 64, axis=1))])[0]
    torch.testing.assert_close(rolled, plain.roll(8, 3), atol=2e-4, rtol=1e-4)
    assert not torch.allclose(one_step(pipe, seamless="x")[0], plain, atol=1e-3)
    assert list(control.networks) == [pipe.unet]
    assert axes_of(control.networks[pipe.unet][0]) is None


def test_the_model_does_not_change(pipe: Pipeline) -> None:
    """Images without it have the same bits afterwards."""
    [before] = pipe.txt2img("a cat", output="result", **SMALL)
    [result] = pipe.txt2img("a cat", seamless="xy", output="result", **SMALL)
    [after] = pipe.txt2img("a cat", output="result", **SMALL)
    assert torch.equal(before.pixels, after.pixels)
    assert not torch.equal(before.pixels, result.pixels)
    assert "Tiling: True" in result.parameters


def test_the_weights_are_not_copied(pipe: Pipeline) -> None:
    copied = seamless(pipe.unet, "x")
    assert axes_of(pipe.unet) is None
    assert all(a is b for a, b in zip(copied.parameters(), pipe.unet.parameters(), strict=True))


def test_autoencoders_in_strips_compute_whole(pipe: Pipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    """Strip by strip an autoencoder has no other edge; after it, strips are what they were."""
    monkeypatch.setattr(tiling, "STRIP", 2**14)
    strips = tiling.tiled(pipe.vae)
    wrapped, whole = (seamless(vae, "xy") for vae in (strips, pipe.vae))
    assert tiling.is_tiled(strips)
    assert not tiling.is_tiled(wrapped)
    assert tiling.tiled(wrapped) is wrapped
    x = torch.randn(1, 4, 16, 16, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        assert torch.equal(wrapped.decode(x), whole.decode(x))


def test_a_picture_is_made_again(pipe: Pipeline, tmp_path: Path) -> None:
    for axes in ("x", "xy"):
        [image] = pipe.txt2img("a cat", seamless=axes, **SMALL)
        [again] = pipe.txt2img(from_png=image)
        assert np.array_equal(image, again)


@pytest.mark.parametrize(
    "options", [{"seamless": "z"}, {"seamless": "x", "compat": True}, {"seamless": "x", "refiner": "r"}]
)
def test_wrong_options_are_one_line(pipe: Pipeline, options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="`seamless`") as caught:
        pipe.txt2img("a cat", **SMALL, **options)
    assert "\n" not in str(caught.value)


def test_images_to_start_from(pipe: Pipeline) -> None:
    image = torch.zeros(3, 64, 64)
    first, second = (pipe.img2img("a", image, seamless=axes, steps=2, output="tensor")[0] for axes in (None, "y"))
    assert not torch.equal(first, second)
