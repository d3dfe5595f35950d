"""ControlNet and T2I-Adapter against the originals and diffusers (the goldens), and their contract."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import toy

from ldm_lite.models.controlnet import ControlNet, guess_scales
from ldm_lite.models.t2i_adapter import T2IAdapter
from ldm_lite.models.unet import LDMUNet

DATA = Path(__file__).parents[1] / "data"
GOLDEN = np.load(DATA / "control.npz")
PREFIX = "model.diffusion_model."


def controlled(name: str, variant: str) -> torch.Tensor:
    """The UNet's output with a ControlNet's results, changed as the original changes them."""
    spec = toy.UNETS[name]
    x, context, _ = toy.unet_inputs(spec)
    net = toy.fill(ControlNet(spec))
    control = net(x, toy.T, context, net.embed_hint(toy.picture()))
    if variant == "half":
        control = tuple(0.5 * c for c in control)
    elif variant == "guess":
        control = tuple(scale * c for scale, c in zip(guess_scales(len(control)), control, strict=True))
    elif variant == "pool":
        control = tuple(c.mean(dim=(2, 3), keepdim=True) for c in control)
    return toy.network(spec)(x, toy.T, context, residuals=control)


@pytest.mark.parametrize("variant", ["plain", "half", "guess", "pool"])
@pytest.mark.parametrize("name", ["sd1", "sd2"])
def test_equals_the_original(name: str, variant: str) -> None:
    assert toy.relative_error(controlled(name, variant), GOLDEN[f"controlled.{name}.{variant}"]) < 1e-5


def test_equals_diffusers_at_an_odd_latent_size() -> None:
    x, context, _ = toy.unet_inputs(toy.SD1, h=9, w=7)
    net = toy.fill(ControlNet(toy.SD1))
    control = net(x, toy.T, context, net.embed_hint(toy.picture(h=72, w=56)))
    for i in (6, -1):
        assert toy.relative_error(control[i], GOLDEN[f"control.diffusers.{i}"]) < 1e-5


def test_the_unet_takes_its_results_at_any_size_and_zeros_change_nothing() -> None:
    x, context, _ = toy.unet_inputs(toy.SD1, h=9, w=7)
    net, unet = toy.fill(ControlNet(toy.SD1)), toy.network(toy.SD1)
    control = net(x, toy.T, context, net.embed_hint(toy.picture(h=72, w=56)))
    plain = unet(x, toy.T, context)
    assert toy.relative_error(unet(x, toy.T, context, residuals=control), plain.numpy()) > 0.1
    torch.testing.assert_close(unet(x, toy.T, context, residuals=tuple(0 * c for c in control)), plain)


def test_guess_scales_are_the_originals() -> None:
    scales = guess_scales(13)
    assert scales[-1] == 1
    assert scales[0] == pytest.approx(0.825**12)
    assert scales == sorted(scales)


@pytest.mark.parametrize("name", ["rgb", "gray", "light"])
def test_an_adapter_and_its_unet_equal_the_original(name: str) -> None:
    x, context, _ = toy.unet_inputs(toy.SD1)
    adapter = toy.fill(T2IAdapter(toy.ADAPTERS[name]))
    features = adapter.place(adapter(toy.picture(adapter.spec.in_channels)), toy.SD1.num_res_blocks)
    out = toy.network(toy.SD1)(x, toy.T, context, features=features)
    assert toy.relative_error(out, GOLDEN[f"adapted.{name}"]) < 1e-5


def test_an_xl_adapter_and_its_unet_equal_diffusers() -> None:
    spec = toy.UNETS["sdxl_base"]
    x, context, y = toy.unet_inputs(spec)
    adapter = toy.fill(T2IAdapter(toy.ADAPTERS["xl"]))
    features = adapter.place(adapter(toy.picture(1)), spec.num_res_blocks)
    out = toy.fill(LDMUNet(spec), PREFIX)(x, toy.T, context, y, features=features)
    assert toy.relative_error(out, GOLDEN["adapted.xl"]) < 1e-5


@pytest.mark.parametrize("name", ["rgb", "light"])
def test_an_adapter_fits_odd_latent_sizes(name: str) -> None:
    x, context, _ = toy.unet_inputs(toy.SD1, h=9, w=7)
    adapter = toy.fill(T2IAdapter(toy.ADAPTERS[name]))
    features = adapter.place(adapter(toy.picture(h=72, w=56)), toy.SD1.num_res_blocks)
    assert toy.network(toy.SD1)(x, toy.T, context, features=features).shape == x.shape


def test_an_adapter_for_another_unet_is_refused() -> None:
    adapter = toy.fill(T2IAdapter(replace(toy.ADAPTERS["rgb"], channels=(32, 64))))
    with pytest.raises(ValueError, match="2 levels, the UNet takes 3"):
        adapter.place(adapter(toy.picture()), toy.SD1.num_res_blocks)
