"""The KL autoencoder against CompVis' and diffusers' (the goldens), the keys of the released ones, and its contract."""

import gzip
import json
import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import toy
from random_checkpoint import SMALL
from released import AUTOENCODERS

from ldm_lite.core.vae import AutoencoderKL, Downsample, VAESpec
from ldm_lite.zoo.families import infer_vae

DATA = Path(__file__).parents[1] / "data"
GOLDEN = np.load(DATA / "networks.npz")
MANIFESTS = json.loads(gzip.decompress((DATA / "manifests.json.gz").read_bytes()))
RELEASED = {f"vae_{name}": spec for name, spec in AUTOENCODERS.items() if name.startswith("kl_")}


@pytest.fixture(scope="module")
def small() -> AutoencoderKL:
    return toy.fill(AutoencoderKL(SMALL.vae), "first_stage_model.")


def test_equals_diffusers(small: AutoencoderKL) -> None:
    mean, deviation = small.encode(toy.normal(7, 2, 3, 32, 48))
    assert toy.relative_error(mean, GOLDEN["small.vae.mean"]) < 1e-5
    assert toy.relative_error(2 * deviation.log(), GOLDEN["small.vae.logvar"]) < 1e-5
    assert toy.relative_error(small.decode(toy.normal(8, 1, 4, 4, 6)), GOLDEN["small.vae.decode"]) < 1e-5


def test_with_attention_levels_equals_the_original() -> None:
    network = toy.network(toy.KL_F16)
    mean, deviation = network.encode(toy.normal(7, 2, 3, 16, 24))
    assert toy.relative_error(mean, GOLDEN["vae_f16.mean"]) < 1e-5
    assert toy.relative_error(2 * deviation.log(), GOLDEN["vae_f16.logvar"]) < 1e-5
    assert toy.relative_error(network.decode(toy.normal(8, 2, 6, 4, 6)), GOLDEN["vae_f16.decode"]) < 1e-5


def test_every_released_autoencoder_is_known() -> None:
    assert set(RELEASED) == {name for name in MANIFESTS if name.startswith("vae_kl_")}


@pytest.mark.parametrize("name", RELEASED)
def test_keys_shapes_and_parameters_are_those_of_the_originals(name: str) -> None:
    with torch.device("meta"):
        network = AutoencoderKL(RELEASED[name])
    shapes = {key: list(value.shape) for key, value in network.state_dict().items()}
    assert shapes == MANIFESTS[name]["shapes"]
    assert sum(p.numel() for p in network.parameters()) == MANIFESTS[name]["params"]
    assert RELEASED[name].factor == int(name.split("_")[2].removeprefix("f"))


@pytest.mark.parametrize("name", RELEASED)
def test_is_inferred_from_its_shapes_in_any_order(name: str) -> None:
    items = [(key, tuple(shape)) for key, shape in MANIFESTS[name]["shapes"].items()]
    random.Random(0).shuffle(items)
    assert infer_vae(dict(items)) == RELEASED[name]


@pytest.mark.parametrize("spec", [toy.KL_F16, SMALL.vae, replace(SMALL.vae, mid_attn=False)])
def test_miniatures_are_inferred_too(spec: VAESpec) -> None:
    with torch.device("meta"):
        network = AutoencoderKL(spec)
    assert infer_vae({key: tuple(value.shape) for key, value in network.state_dict().items()}) == spec


@pytest.mark.parametrize("row", range(4))
@pytest.mark.parametrize("column", range(4))
def test_downsampling_pads_only_right_and_bottom(row: int, column: int) -> None:
    """An impulse at (row, column) reaches output (i, j) through the kernel's entry (row - 2i, column - 2j)."""
    layer = Downsample(1)
    kernel = torch.arange(1.0, 10.0).reshape(3, 3)
    layer.load_state_dict({"conv.weight": kernel[None, None], "conv.bias": torch.zeros(1)})
    impulse = torch.zeros(1, 1, 4, 4)
    impulse[0, 0, row, column] = 1
    wanted = torch.zeros(2, 2)
    for i in range(2):
        for j in range(2):
            if 0 <= row - 2 * i < 3 and 0 <= column - 2 * j < 3:
                wanted[i, j] = kernel[row - 2 * i, column - 2 * j]
    assert torch.equal(layer(impulse)[0, 0], wanted)


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
