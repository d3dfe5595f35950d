"""Autoencoders of every kind from their own files, in place of a checkpoint's, and images through them."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import texts
import torch
import toy
from PIL import Image
from random_checkpoint import SMALL, lightning, random_tensor
from safetensors.torch import save_file
from torch import Tensor, nn

import ldm_lite
from ldm_lite import img2img, txt2img
from ldm_lite.checkpoint.parts import load_autoencoder, with_autoencoder
from ldm_lite.image import to_array, to_pixels
from ldm_lite.reconstruct import main
from ldm_lite.tasks.reconstruct import reconstruct

SPECS: dict[str, Any] = {"kl": toy.KL_F16, "vq": toy.VQ_F16, "noattn": toy.VQS["noattn"], "taesd": toy.TINY}


def weights(spec: Any) -> dict[str, Tensor]:
    return dict(toy.network(spec).state_dict())


def half(values: dict[str, Tensor], part: str) -> dict[str, Tensor]:
    """The encoder's or the decoder's weights, as a file of their own has them."""
    return {key.removeprefix(f"{part}."): value for key, value in values.items() if key.startswith(part)}


def diffusers_names(values: dict[str, Tensor]) -> dict[str, Tensor]:
    """TAESD's names as diffusers writes them, whose decoder begins one layer later."""

    def rename(match: re.Match[str]) -> str:
        return f"{match[1]}.layers.{int(match[2]) - (match[1] == 'decoder')}."

    return {re.sub(r"^(encoder|decoder)\.(\d+)\.", rename, key): value for key, value in values.items()}


@pytest.fixture
def picture() -> Image.Image:
    """Of a size that is no multiple of any factor, smooth enough that a reconstruction could be near it."""
    y, x = np.mgrid[0:21, 0:29]
    return Image.fromarray(np.stack([8 * y, 6 * x, 4 * (x + y)], axis=2).astype(np.uint8))


@pytest.mark.parametrize("name", SPECS)
def test_a_first_stage_alone_is_loaded_as_what_it_is(name: str, tmp_path: Path) -> None:
    """With what training left beside it (trap 33), in a Lightning file, and as plain safetensors."""
    state, path = weights(SPECS[name]), tmp_path / "model.ckpt"
    left = {"loss.logvar": torch.zeros(()), "loss.discriminator.main.0.weight": torch.zeros(64, 3, 4, 4)}
    torch.save(lightning({**state, **left}), path)
    save_file(state, tmp_path / "model.safetensors")
    for file in (path, tmp_path / "model.safetensors"):
        network = load_autoencoder(file, device="cpu")
        assert network.spec == SPECS[name]
        assert all(torch.equal(value, state[key]) for key, value in network.state_dict().items())


def test_taesd_is_loaded_under_all_its_names(tmp_path: Path) -> None:
    state = weights(toy.TINY)
    save_file(diffusers_names(state), tmp_path / "diffusers.safetensors")
    network = load_autoencoder(tmp_path / "diffusers.safetensors", device="cpu")
    assert network.spec == toy.TINY
    assert all(torch.equal(value, state[key]) for key, value in network.state_dict().items())
    for part in ("encoder", "decoder"):
        path = tmp_path / f"{part}.pth"
        torch.save(half(state, part), path)
        network = load_autoencoder(path, device="cpu")
        assert network.spec == replace(toy.TINY, encoder=part == "encoder", decoder=part == "decoder")
        assert all(torch.equal(value, state[key]) for key, value in network.state_dict().items())
        path.unlink()  # else it is taken together with the next


@pytest.mark.parametrize("named", ["taesd_encoder.pth", "taesd_decoder.pth"])
def test_taesds_two_files_are_found_beside_each_other(
    named: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Either of them may be named; whose name is of another kind, or which are not TAESD's, are left alone."""
    caplog.set_level("INFO", "ldm_lite")
    state = weights(toy.TINY)
    for part in ("encoder", "decoder"):
        torch.save(half(state, part), tmp_path / f"taesd_{part}.pth")
    network = load_autoencoder(tmp_path / named, device="cpu")
    assert network.spec == toy.TINY
    assert all(torch.equal(value, state[key]) for key, value in network.state_dict().items())
    counterpart = "taesd_decoder.pth" if "encoder" in named else "taesd_encoder.pth"
    assert f"{named}: taken together with {counterpart}" in caplog.messages
    save_file(weights(toy.VQ_F16), tmp_path / counterpart)
    assert load_autoencoder(tmp_path / named, device="cpu").spec != toy.TINY


@pytest.mark.parametrize("name", SPECS)
def test_an_image_of_any_size_goes_through(name: str, picture: Image.Image) -> None:
    network = toy.network(SPECS[name])
    result = reconstruct(network, picture)
    assert result.image.size == picture.size
    factor = SPECS[name].factor
    inner = tuple(side // factor * factor for side in picture.size)
    whole = picture.crop((0, 0, *inner))
    exact = reconstruct(network, whole)
    wanted = to_array(network.decode(network.encode(to_pixels(whole)[None])[0])[0])
    assert np.abs(np.asarray(exact.image, dtype=int) - wanted).max() <= 1  # a half may round either way
    error = np.asarray(exact.image, dtype=float) - np.asarray(whole, dtype=float)
    assert exact.psnr == pytest.approx(20 * np.log10(255) - 10 * np.log10((error**2).mean()))


class Mirror(nn.Module):
    """An autoencoder that loses nothing."""

    spec = SPECS["kl"]

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(()))

    def encode(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x, torch.zeros_like(x)

    def decode(self, z: Tensor) -> Tensor:
        return z


def test_what_is_equal_has_an_infinite_ratio(picture: Image.Image) -> None:
    result = reconstruct(Mirror(), picture)  # type: ignore[arg-type]
    assert result.psnr == float("inf")
    assert np.array_equal(np.asarray(result.image), np.asarray(picture))


def test_the_command(tmp_path: Path, picture: Image.Image, capsys: pytest.CaptureFixture[str]) -> None:
    """On a first stage alone, and on a whole checkpoint's: the bundled model's, if none is named."""
    save_file(weights(toy.VQ_F16), tmp_path / "vq.safetensors")
    picture.save(tmp_path / "in.png")
    for ckpt in (["--ckpt", str(tmp_path / "vq.safetensors")], []):
        out = tmp_path / f"out{len(ckpt)}.png"
        assert main([str(tmp_path / "in.png"), *ckpt, "--out", str(out), "--device", "cpu"]) == 0
        path, psnr = capsys.readouterr().out.splitlines()
        assert path == str(out)
        assert texts.load(out).size == picture.size
        assert re.fullmatch(r"PSNR \d+\.\d\d dB", psnr)
    assert float(psnr.split()[1]) > 15  # the bundled one is trained


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "no image: name one"),
        (["missing.png"], "missing.png: No such file"),
        ([__file__], "is not an image"),
        (["{in}", "--ckpt", "{unet}"], "holds no autoencoder, only unet"),
        (["{in}", "--ckpt", "{decoder}"], "this TAESD has no encoder"),
    ],
)
def test_bad_input_is_one_line(
    arguments: list[str], message: str, tmp_path: Path, picture: Image.Image, capsys: pytest.CaptureFixture[str]
) -> None:
    files = {"in": tmp_path / "in.png", "unet": tmp_path / "unet.safetensors", "decoder": tmp_path / "d.safetensors"}
    picture.save(files["in"])
    save_file(weights(toy.SD1), files["unet"])  # type: ignore[arg-type]
    save_file(weights(replace(toy.TINY, encoder=False)), files["decoder"])
    assert main([argument.format(**files) for argument in arguments] + ["--device", "cpu"]) == 2
    errors = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1
    assert message in errors[0]


# ---- in place of a checkpoint's own ---------------------------------------------------------------------------------


def test_taesd_takes_the_unets_latents_as_they_are(small_path: Path, tmp_path: Path) -> None:
    """Trap 26: no scale factor, and images in [0,1] inside."""
    save_file(half(weights(toy.TINY), "decoder"), tmp_path / "decoder.safetensors")
    pipe = ldm_lite.load(small_path, device="cpu", vae=tmp_path / "decoder.safetensors")
    assert pipe.vae.spec == replace(toy.TINY, encoder=False)
    latents = toy.normal(8, 1, 4, 4, 6)
    wanted = torch.from_numpy(np.load(Path(__file__).parent / "data" / "zoo.npz")["taesd.decode"])
    assert toy.relative_error(pipe.decode(latents, output="tensor")[0], wanted[0].clamp(-1, 1).numpy()) < 1e-5


def test_taesd_takes_the_latents_of_transformers_as_they_are(flow_path: Path, tmp_path: Path) -> None:
    """Their own autoencoders' scale and shift are no part of it, for previews and for images that come in."""
    taesd = toy.network(toy.TINY)
    save_file(dict(taesd.state_dict()), tmp_path / "taesd.safetensors")
    loaded = ldm_lite.load(flow_path, device="cpu")
    assert loaded.family.shift_factor != 0
    latents, pixels = toy.normal(8, 1, 4, 4, 6), toy.normal(9, 1, 3, 32, 48).clamp(-1, 1)
    for pipe in (
        ldm_lite.load(flow_path, device="cpu", vae=tmp_path / "taesd.safetensors"),
        with_autoencoder(loaded, tmp_path / "taesd.safetensors"),
    ):
        assert torch.equal(pipe.decode(latents, output="tensor")[0], taesd.decode(latents)[0].clamp(-1, 1))
        assert torch.equal(pipe.encode_pixels(pixels), taesd.encode(pixels)[0])


def test_img2img_wants_taesds_encoder_too(
    small_path: Path, tmp_path: Path, picture: Image.Image, capsys: pytest.CaptureFixture[str]
) -> None:
    state = weights(toy.TINY)
    for part in ("decoder", "encoder"):
        torch.save(half(state, part), tmp_path / f"taesd_{part}.pth")
        picture.save(tmp_path / "in.png")
        arguments = ["an apple", "--init-img", str(tmp_path / "in.png"), "--ckpt", str(small_path), "--steps", "2"]
        arguments += ["--vae", str(tmp_path / "taesd_decoder.pth"), "--device", "cpu", "--outdir", str(tmp_path)]
        status = img2img.main(arguments)
        errors = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
        if part == "encoder":
            assert (status, errors) == (0, [])
        else:
            assert status == 2
            assert errors == [
                "error: this TAESD has no encoder, which is needed to encode an image: use a file with both, or put "
                "taesd_encoder.pth beside taesd_decoder.pth"
            ]


def test_another_autoencoder_keeps_the_familys_scale_factor(small_path: Path, tmp_path: Path) -> None:
    """Trap 6: the file of an autoencoder does not say what its latents are multiplied by."""
    spec = replace(SMALL.vae, attn_levels=(3,))
    save_file({key: random_tensor(key, tuple(v.shape), 5) for key, v in weights(spec).items()}, tmp_path / "v.pt")
    pipe = ldm_lite.load(small_path, device="cpu", vae=tmp_path / "v.pt")
    assert pipe.vae.spec == spec
    assert pipe.family.scale_factor == 0.18215


def test_an_autoencoder_of_other_latents_does_not_fit(small_path: Path, tmp_path: Path) -> None:
    save_file(weights(toy.VQ_F16), tmp_path / "vq.safetensors")
    with pytest.raises(ValueError, match=r"vq\.safetensors: does not fit: its latents have 4 channels at 1/4 .* 1/8"):
        ldm_lite.load(small_path, device="cpu", vae=tmp_path / "vq.safetensors")


def test_messages_go_through_the_command(small_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert txt2img.main(["a", "--ckpt", str(small_path), "--vae", "no.pth", "--device", "cpu"]) == 2
    assert "no.pth: no such file" in capsys.readouterr().err
