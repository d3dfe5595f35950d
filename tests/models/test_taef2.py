"""TAEF2, FLUX.2's tiny autoencoder: against its formula, and on photographs with its makers' weights if there are."""

import os
from pathlib import Path

import numpy as np
import pytest
import torch
import toy
from PIL import Image
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional as F

import ldm_lite
from ldm_lite.checkpoint.parts import load_autoencoder
from ldm_lite.families.flux2 import DISTILLED
from ldm_lite.models.taesd import TAESD, TAESDSpec
from ldm_lite.zoo.families import with_vae

REAL = Path(os.environ.get("LDM_LITE_REAL_FILES", Path(__file__).parents[2].parent / "shared" / "data" / "real"))
SPEC = TAESDSpec(embed_dim=128, encoder=True, decoder=True, pooled=True)


def weights() -> dict[str, Tensor]:
    network = TAESD(SPEC)
    toy.fill(network)
    return {key: value.clone() for key, value in network.state_dict().items()}


def block(x: Tensor, values: dict[str, Tensor], name: str) -> Tensor:
    """madebyollin/taesd taesd.py, Block with use_midblock_gn where there are weights for it."""
    if f"{name}.pool.0.weight" in values:
        wide = F.conv2d(x, values[f"{name}.pool.0.weight"])
        normed = F.group_norm(wide, 4, values[f"{name}.pool.1.weight"], values[f"{name}.pool.1.bias"])
        x = x + F.conv2d(F.relu(normed), values[f"{name}.pool.3.weight"])
    y = x
    for i in (0, 2, 4):
        y = F.conv2d(y, values[f"{name}.conv.{i}.weight"], values[f"{name}.conv.{i}.bias"], padding=1)
        y = F.relu(y) if i < 4 else y
    return F.relu(y + x)


def encoded(x: Tensor, values: dict[str, Tensor]) -> Tensor:
    """Images (B,3,H,W) in [0,1] -> latents (B,32,H/8,W/8)."""
    x = block(F.conv2d(x, values["encoder.0.weight"], values["encoder.0.bias"], padding=1), values, "encoder.1")
    for first in (2, 6, 10):
        x = F.conv2d(x, values[f"encoder.{first}.weight"], stride=2, padding=1)
        for i in range(first + 1, first + 4):
            x = block(x, values, f"encoder.{i}")
    return F.conv2d(x, values["encoder.14.weight"], values["encoder.14.bias"], padding=1)


def decoded(z: Tensor, values: dict[str, Tensor]) -> Tensor:
    """Latents (B,32,H/8,W/8) -> images (B,3,H,W), about [0,1]."""
    x = torch.tanh(z / 3) * 3
    x = F.relu(F.conv2d(x, values["decoder.1.weight"], values["decoder.1.bias"], padding=1))
    for first in (3, 8, 13):
        for i in range(first, first + 3):
            x = block(x, values, f"decoder.{i}")
        x = F.conv2d(F.interpolate(x, scale_factor=2), values[f"decoder.{first + 4}.weight"], padding=1)
    return F.conv2d(block(x, values, "decoder.18"), values["decoder.19.weight"], values["decoder.19.bias"], padding=1)


def patches(z: Tensor) -> Tensor:
    """FLUX.2's tokens: channels are (c, row, column) of 2 x 2 latents.  diffusers pipeline_flux2, _patchify_latents."""
    b, c, h, w = z.shape
    return z.view(b, c, h // 2, 2, w // 2, 2).permute(0, 1, 3, 5, 2, 4).reshape(b, 4 * c, h // 2, w // 2)


def test_it_equals_its_formula(tmp_path: Path) -> None:
    values = weights()
    for half in ("encoder", "decoder"):
        part = {key.removeprefix(f"{half}."): value for key, value in values.items() if key.startswith(half)}
        save_file(part, tmp_path / f"taef2_{half}.safetensors")
    network = load_autoencoder(tmp_path / "taef2_decoder.safetensors", device="cpu")
    assert (network.spec, network.spec.factor) == (SPEC, 16)
    x = torch.rand(2, 3, 48, 32)
    z = patches(encoded(x, values))
    assert toy.relative_error(network.encode(2 * x - 1)[0], z.numpy()) < 1e-5
    picture = decoded(encoded(x, values), values)
    assert toy.relative_error(network.decode(z) / 2 + 0.5, picture.numpy()) < 1e-5


def test_it_takes_the_place_of_flux2s_autoencoder_alone() -> None:
    family = with_vae(DISTILLED, SPEC, "taef2")
    assert (family.scale_factor, family.shift_factor) == (1.0, 0.0)
    with pytest.raises(ValueError, match="its latents have 128 channels at 1/16 of the size"):
        with_vae(ldm_lite.zoo.families.FAMILY_ROWS["flux_dev"], SPEC, "taef2")


@pytest.mark.skipif(not REAL.is_dir(), reason="the real files are not here")
@pytest.mark.parametrize(
    ("name", "psnr"), [("photo.png", 33.7), pytest.param("photo_grid.jpg", 33.5, marks=pytest.mark.slow)]
)
def test_photographs_there_and_back(name: str, psnr: float) -> None:
    network = load_autoencoder(REAL / "taef2_decoder.pth", device="cpu", dtype="fp32")
    values = {key: value.float() for key, value in network.state_dict().items()}
    image = Image.open(REAL / name).convert("RGB")
    width, height = (side // 16 * 16 for side in image.size)
    x = torch.from_numpy(np.array(image.crop((0, 0, width, height)))).permute(2, 0, 1)[None].float() / 255
    with torch.no_grad():
        z = network.encode(2 * x - 1)[0]
        back = network.decode(z) / 2 + 0.5
        expected = encoded(x, values)
        assert toy.relative_error(z, patches(expected).numpy()) < 1e-5
        assert toy.relative_error(back, decoded(expected, values).numpy()) < 1e-5
    assert -10 * torch.log10((x - back.clamp(0, 1)).square().mean()) > psnr
