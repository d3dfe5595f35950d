"""The KL autoencoder against CompVis' and diffusers' (the goldens), and its contract."""

from pathlib import Path

import numpy as np
import pytest
import torch
import toy
from random_checkpoint import SMALL

from ldm_lite.core.vae import AutoencoderKL

DATA = Path(__file__).parents[1] / "data"
GOLDEN = np.load(DATA / "networks.npz")


@pytest.fixture(scope="module")
def small() -> AutoencoderKL:
    return toy.fill(AutoencoderKL(SMALL.vae), "first_stage_model.")


def test_with_attention_levels_equals_the_original() -> None:
    network = toy.network(toy.KL_F16)
    mean, deviation = network.encode(toy.normal(7, 2, 3, 16, 24))
    assert toy.relative_error(mean, GOLDEN["vae_f16.mean"]) < 1e-5
    assert toy.relative_error(2 * deviation.log(), GOLDEN["vae_f16.logvar"]) < 1e-5
    assert toy.relative_error(network.decode(toy.normal(8, 2, 6, 4, 6)), GOLDEN["vae_f16.decode"]) < 1e-5


def test_log_variance_is_clamped(small: AutoencoderKL) -> None:
    network = AutoencoderKL(SMALL.vae)
    weights = dict(small.state_dict())
    weights["quant_conv.bias"] = torch.tensor([0.0] * 4 + [1000.0, 1000.0, -1000.0, -1000.0])
    network.load_state_dict(weights)
    _, deviation = network.encode(torch.zeros(1, 3, 8, 8))
    assert deviation.log().flatten().tolist() == pytest.approx([10, 10, -15, -15])


@pytest.mark.parametrize(("h", "w"), [(1, 1), (3, 5), (7, 2)])
def test_any_latent_size(small: AutoencoderKL, h: int, w: int) -> None:
    pixels = small.decode(toy.normal(0, 1, 4, h, w))
    assert pixels.shape == (1, 3, 8 * h, 8 * w)
    mean, deviation = small.encode(pixels)
    assert mean.shape == deviation.shape == (1, 4, h, w)
