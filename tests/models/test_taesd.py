"""TAESD against the original and diffusers (the goldens), and its contract."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import toy

from ldm_lite.models.taesd import TAESD

DATA = Path(__file__).parents[1] / "data"
GOLDENS = [np.load(DATA / "zoo.npz"), np.load(DATA / "families.npz")]  # by the original, by diffusers


@pytest.mark.parametrize("golden", GOLDENS, ids=["original", "diffusers"])
def test_equals_the_original_and_takes_images_from_minus_one_to_one(golden: dict[str, np.ndarray]) -> None:
    """At real size, for it has one size; diffusers' latents with its scaling factor."""
    network = toy.network(toy.TINY)
    assert toy.relative_error(network.encode(toy.normal(7, 1, 3, 16, 24))[0], golden["taesd.encode"]) < 1e-5
    assert toy.relative_error(network.decode(toy.normal(8, 1, 4, 4, 6)), golden["taesd.decode"]) < 1e-5


def test_latents_are_clamped_softly() -> None:
    network = toy.network(toy.TINY)
    far = torch.full((1, 4, 2, 2), 100.0)
    assert torch.allclose(network.decode(far), network.decode(2 * far))
    assert not torch.allclose(network.decode(far / 100), network.decode(far / 50))


def test_one_of_the_networks_may_be_missing() -> None:
    x, z = toy.normal(7, 1, 3, 16, 16), toy.normal(8, 1, 4, 2, 2)
    decoder, encoder = (TAESD(replace(toy.TINY, **{part: False})) for part in ("encoder", "decoder"))
    assert decoder.decode(z).shape == x.shape
    mean, deviation = encoder.encode(x)
    assert mean.shape == z.shape
    assert not deviation.any()
    with pytest.raises(ValueError, match="this TAESD has no encoder"):
        decoder.encode(x)
    with pytest.raises(ValueError, match="this TAESD has no decoder"):
        encoder.decode(z)
