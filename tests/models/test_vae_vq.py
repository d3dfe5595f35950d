"""The VQ autoencoder against CompVis' (the goldens), and its contract."""

from pathlib import Path

import numpy as np
import pytest
import torch
import toy

from ldm_lite.models import vae_vq
from ldm_lite.models.vae_vq import VectorQuantizer

DATA = Path(__file__).parents[1] / "data"
GOLDEN = np.load(DATA / "zoo.npz")


@pytest.mark.parametrize("name", toy.VQS)
def test_equals_the_original(name: str) -> None:
    """As a first stage decoding quantises and encoding does not; alone, pixels go through the codes."""
    network = toy.network(toy.VQS[name])
    x, z = toy.normal(7, 1, 3, 16, 24), toy.normal(8, 1, 4, 4, 6)
    assert toy.relative_error(network.encode(x)[0], GOLDEN[f"vq.{name}.encode"]) < 1e-5
    assert toy.relative_error(network.decode(z), GOLDEN[f"vq.{name}.decode"]) < 1e-5
    assert toy.relative_error(network.decode(z, quantize=False), GOLDEN[f"vq.{name}.decode_as_is"]) < 1e-5
    assert toy.relative_error(network.decode(network.encode(x)[0]), GOLDEN[f"vq.{name}.alone"]) < 1e-5
    assert toy.relative_error(GOLDEN[f"vq.{name}.decode"], GOLDEN[f"vq.{name}.decode_as_is"]) > 0.1  # it matters


def test_the_nearest_code_is_taken_at_every_position(monkeypatch: pytest.MonkeyPatch) -> None:
    quantize = VectorQuantizer(30, 4)
    z = toy.normal(0, 2, 4, 3, 5)
    codes = quantize.embedding.weight
    distances = torch.cdist(z.permute(0, 2, 3, 1), codes)  # (B, h, w, K)
    assert torch.equal(quantize.indices(z), distances.argmin(dim=3))
    assert torch.equal(quantize(z)[1, :, 2, 3], codes[distances[1, 2, 3].argmin()])
    whole = quantize(z)
    monkeypatch.setattr(vae_vq, "POSITIONS_TIMES_CODES", 100)  # three positions at a time
    assert torch.equal(quantize(z), whole)
    assert torch.equal(quantize(whole), whole)


def test_codes_are_told_apart_in_half_precision() -> None:
    """Distances in bfloat16 would not: these codes and the latent are exact in it, and the square of 8 is not."""
    quantize = VectorQuantizer(2, 3).bfloat16()
    codes = torch.tensor([[8.0, 8.0, 8.0], [8.0, 8.0, 8.0625]], dtype=torch.bfloat16)
    quantize.load_state_dict({"embedding.weight": codes})
    z = torch.tensor([8.0, 8.0, 8.0625], dtype=torch.bfloat16).view(1, 3, 1, 1)
    assert quantize.indices(z).item() == 1
    assert quantize(z).dtype == torch.bfloat16


def test_an_image_has_one_latent() -> None:
    network = toy.network(toy.VQ_F16)
    x = toy.normal(7, 1, 3, 8, 8)
    assert not network.encode(x)[1].any()
