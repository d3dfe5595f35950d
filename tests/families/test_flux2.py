"""FLUX.2 [klein] in miniature: what it alone has, beside test_shared.py: references, and its autoencoder."""

import gzip
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import toy
import toy_flux2
from PIL import Image
from toy_families import load, pixels, run
from toy_flow import save, weights

import ldm_lite
from ldm_lite import Pipeline, txt2img
from ldm_lite.checkpoint.reader import on_meta, parts_of
from ldm_lite.core.files import Tensors
from ldm_lite.diffusion.schedule import spaced_levels
from ldm_lite.families.flux2 import MOST, fitted
from ldm_lite.models.flux2 import KL_F16_128, Flux2VAESpec
from ldm_lite.runtime.tiling import tiled
from ldm_lite.zoo.families import FAMILY_ROWS, infer_vae
from ldm_lite.zoo.family import build_network

TOYS = toy_flux2
MANIFESTS = Path(__file__).parents[1] / "data" / "manifests.json.gz"
VAE_SHAPES = json.loads(gzip.decompress(MANIFESTS.read_bytes()))["vae_flux2"]


# ---- networks -------------------------------------------------------------------------------------------------------


def test_equals_the_original_with_references(pipe: Pipeline, golden: Any) -> None:
    both = run(toy_flux2, pipe.unet, **toy_flux2.references())
    for name in ("original", "diffusers"):
        assert toy.relative_error(both, golden[f"{name}.references"]) < 1e-5


def test_the_autoencoder_has_the_keys_and_shapes_of_the_original() -> None:
    """Its convolutions beside the latents stand inside encoder and decoder there."""
    shapes = {key: tuple(shape) for key, shape in VAE_SHAPES["shapes"].items()}
    [(role, part)] = parts_of(Tensors(Path("ae.safetensors"), shapes, lambda key: torch.zeros(shapes[key]))).items()
    with on_meta():
        ours = {key: tuple(value.shape) for key, value in build_network(KL_F16_128).state_dict().items()}
    assert role == "vae"
    assert {key: shape for key, shape in part.shapes.items() if key != "bn.num_batches_tracked"} == ours
    assert infer_vae(part.shapes) == KL_F16_128
    assert isinstance(infer_vae(part.shapes), Flux2VAESpec)
    statistics = math.prod(shapes["bn.running_mean"]) + math.prod(shapes["bn.running_var"])
    assert sum(map(math.prod, ours.values())) == VAE_SHAPES["params"] + statistics


def test_the_autoencoder_equals_the_original(pipe: Pipeline, golden: Any) -> None:
    image = torch.from_numpy(toy.photo(32, 48)).permute(2, 0, 1)[None].float() / 127.5 - 1
    latents = toy.normal(1, 1, 16, 2, 3)
    for vae in (pipe.vae, tiled(pipe.vae)):
        assert toy.relative_error(vae.encode(image)[0], golden["encoded"]) < 1e-5
        assert toy.relative_error(vae.decode(latents), golden["decoded"]) < 1e-5


def test_the_text_equals_transformers_with_its_mask(pipe: Pipeline, golden: Any) -> None:
    """Padding, which the network reads, sees the text alone."""
    context = pipe.encode_prompt(list(toy_flux2.PROMPTS)).context
    assert context is not None
    assert context.shape == (2, 512, 96)
    assert toy.relative_error(context[:, ::16], golden["text"]) < 1e-5


# ---- whole runs -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("steps", "tokens", "wanted"),
    [  # of the original's get_schedule
        (4, 4096, [0.967384, 0.908144, 0.7672]),
        (50, 4096, [0.997309, 0.994521, 0.991632]),
        (3, 6, [0.933708, 0.778821, 0.0]),
        (4, 5000, [0.916951, 0.786342, 0.550924]),
    ],
)
def test_the_shift_depends_on_size_and_steps(steps: int, tokens: int, wanted: list[float]) -> None:
    schedule = FAMILY_ROWS["flux2_klein"].noise.schedule("flow").sized(tokens)  # type: ignore[attr-defined]
    levels = spaced_levels("flow_by_steps", schedule, steps)
    assert [level.s for level in levels[1:4]] == pytest.approx(wanted, abs=1e-6)
    assert (levels[0].s, levels[-1].s) == (1, 0)


def test_references_change_an_image_that_begins_with_another(pipe: Pipeline) -> None:
    image = Image.fromarray(toy.photo(32, 48))
    plain, changed = (
        pixels(pipe.img2img("a cat", image, strength=0.5, steps=2, scale=1.0, reference=reference))
        for reference in ((), toy_flux2.pictures())
    )
    assert not np.array_equal(plain, changed)


def test_references_in_half_precision(files: dict[str, Any]) -> None:
    weights, asked = files["ckpt"], {"steps": 2, "reference": toy_flux2.pictures(), "height": 32, "width": 32}
    others = {name: value for name, value in files.items() if name != "ckpt"}
    exact, half = (
        pixels(ldm_lite.load(weights, dtype=dtype, **others).txt2img("a cat", **asked)) for dtype in ("fp32", "bf16")
    )
    assert np.abs(exact - half).mean() < 5  # of 255


@pytest.mark.slow
def test_references_on_the_command_line(files: dict[str, Any], tmp_path: Path) -> None:
    """The first one's size is the result's; both change it, and their order does."""
    paths = [str(tmp_path / f"{i}.png") for i in range(2)]
    for path, picture in zip(paths, toy_flux2.pictures(), strict=True):
        picture.save(path)
    flags = ["--ckpt", str(files["ckpt"]), "--text-encoder", files["text_encoder"], "--vae", files["vae"]]
    flags += ["--device", "cpu", "--steps", "1", "--out", str(tmp_path / "out.png")]
    assert txt2img.main(["a cat", "--reference", paths[0], "--reference", paths[1], *flags]) == 0
    image = Image.open(tmp_path / "out.png")
    assert image.size == (80, 64)
    pipe = load(files)
    same = pipe.txt2img("a cat", reference=toy_flux2.pictures(), steps=1)
    assert np.array_equal(pixels(same), pixels([image]))
    size = {"width": 80, "height": 64, "steps": 1}
    others = [(), toy_flux2.pictures()[:1], toy_flux2.pictures()[::-1]]
    for reference in others:
        assert not np.array_equal(pixels(pipe.txt2img("a cat", reference=reference, **size)), pixels(same))


@pytest.mark.slow
def test_images_of_a_folder_of_references_are_made_again_if_one_of_them_changes(
    files: dict[str, Any], tmp_path: Path
) -> None:
    folder, out = tmp_path / "references", tmp_path / "out"
    folder.mkdir()
    for i, picture in enumerate(toy_flux2.pictures()):
        picture.save(folder / f"{i}.png")
    flags = ["--ckpt", str(files["ckpt"]), "--text-encoder", files["text_encoder"], "--vae", files["vae"]]
    flags += ["--device", "cpu", "--steps", "1", "--height", "32", "--width", "32", "--out", str(out)]

    def count() -> int:
        assert txt2img.main(["a cat", "--reference", str(folder), "--skip-existing", *flags]) == 0
        return len(list((out / "samples").glob("*.png")))

    assert [count(), count()] == [1, 1]
    (folder / "0.png").rename(folder / "0 with another name.png")
    assert count() == 1, "names do not matter"
    toy_flux2.pictures()[0].transpose(Image.Transpose.FLIP_LEFT_RIGHT).save(folder / "1.png")
    assert count() == 2
    (folder / "1.png").unlink()
    assert count() == 3


def test_references_are_reduced_and_cut() -> None:
    assert fitted(Image.new("RGB", (90, 47)), 16).size == (80, 32)
    large = fitted(Image.new("RGB", (3000, 1500)), 16)
    assert large.size == (1440, 720)
    assert large.width * large.height <= MOST
    with pytest.raises(ValueError, match="got a reference of 90 x 9 pixels, expected 16 or more a side"):
        fitted(Image.new("RGB", (90, 9)), 16)


# ---- files ----------------------------------------------------------------------------------------------------------


def test_the_base_is_told_by_the_folder_a_name_and_the_metadata(
    pipe: Pipeline, shapes: Any, files: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert (pipe.family.steps, pipe.family.scale) == (50, 4.0)
    distilled = ldm_lite.load(toy_flux2.write_diffusers(tmp_path / "d", shapes, is_distilled=True), device="cpu")
    assert (distilled.family.steps, distilled.family.scale) == (4, 1.0)
    caplog.clear()
    unet = save(tmp_path / "flux-2-klein-base-4b.safetensors", weights(toy_flux2.small())["unet"])
    assert load(files, ckpt=unet).family.steps == 50
    assert "by its name, as black-forest-labs/FLUX.2-klein-base-4B: 50 steps of euler at scale 4" in caplog.text
    assert load(files, ckpt=unet, metadata={"family": "flux2_klein_base"}).family.steps == 50


def test_what_does_not_fit_is_named(files: dict[str, Any], folder: Path, tmp_path: Path) -> None:
    few = toy.network(toy_flux2.replace(toy_flux2.QWEN3, layers=20, states=(-2,))).state_dict()
    plain = tmp_path / "tokenizer.json"
    toy_flux2.toy_z_image.tokenizer().save(str(plain))
    for changes, message in (
        ({"text_encoder": str(save(folder / "few.safetensors", few))}, "has 20 layers, expected more than 27"),
        ({"tokenizer": str(plain)}, "lacks <think>: expected Qwen3's tokenizer.json"),
    ):
        with pytest.raises(ValueError, match=message):
            load(files, **changes)


def test_other_families_read_no_references(small_path: Path) -> None:
    with pytest.raises(ValueError, match="reads no reference images: leave out `reference`"):
        ldm_lite.load(small_path, device="cpu").txt2img("a", reference=toy_flux2.pictures())
