"""Qwen-Image-Edit in miniature: what it has beside Qwen-Image's, against transformers and diffusers (the goldens)."""

import gzip
import json
import logging
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import toy
import toy_qwen_image
from PIL import Image
from runs import run_latents
from safetensors.torch import load_file
from toy_families import pixels
from toy_flow import save, under

import ldm_lite
from ldm_lite import Pipeline
from ldm_lite.checkpoint.reader import on_meta, parts_of
from ldm_lite.core.files import Tensors
from ldm_lite.families import qwen_image
from ldm_lite.families.qwen_image import fitted
from ldm_lite.models.qwen25_vl import QWEN25_VL_7B, VISION, Vision, VisionBlock, VisionSpec, places
from ldm_lite.models.qwen_image import REFERENCES_AT_ZERO
from ldm_lite.runtime.offload import Offloader
from ldm_lite.zoo.family import build_network

DATA = Path(__file__).parents[1] / "data"
GOLDEN = np.load(DATA / "qwen_image_edit.npz")
SHAPES = json.loads(str(GOLDEN["shapes"]))
MANIFESTS = json.loads(gzip.decompress((DATA / "manifests.json.gz").read_bytes()))
KINDS = {"first": "qwen_image_edit", "2509": "qwen_image_edit_2509", "2511": "qwen_image_edit_2511"}
PICTURES = toy_qwen_image.pictures()


def shown(kind: str) -> list[Image.Image]:
    return PICTURES[:1] if kind == "first" else PICTURES


def load(files: dict[str, Any], kind: str, **changes: Any) -> Pipeline:
    options = {**files, "metadata": {"family": KINDS[kind]}, **changes}
    return ldm_lite.load(options.pop("ckpt"), **options)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Files of their own, as ComfyUI has them, with the goldens' weights: the arguments of load."""
    return toy_qwen_image.write(tmp_path_factory.mktemp("files"), SHAPES)


@pytest.fixture(scope="module")
def pipes(files: dict[str, Any]) -> dict[str, Pipeline]:
    return {kind: load(files, kind) for kind in KINDS}


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """References of fewer pixels."""
    for name in ("AREA", "SEEN_AREA"):
        monkeypatch.setattr(qwen_image, name, getattr(qwen_image, name) // toy_qwen_image.LESS)


# ---- networks -------------------------------------------------------------------------------------------------------


def test_what_sees_equals_transformers(pipes: dict[str, Pipeline]) -> None:
    """With windows that are cut at both edges, and a layer of the whole image."""
    image = torch.from_numpy(toy.photo(140, 252)).permute(2, 0, 1) / 255
    assert toy.relative_error(pipes["first"].text_encoder.visual(image), GOLDEN["vision"]) < 1e-5


def test_a_block_of_the_released_width_equals_transformers() -> None:
    with torch.device("meta"):
        block = VisionBlock(VISION, full_attention=False)
    toy.fill(block.to_empty(device="cpu"))
    x = toy.normal(1, 1, 120, VISION.width)
    assert toy.relative_error(block(x, places(VISION, 10, 12, x))[0][..., ::48], GOLDEN["wide"]) < 1e-5


def test_what_sees_has_the_keys_and_shapes_of_the_original() -> None:
    manifest = MANIFESTS["vision_qwen25_vl"]
    shapes = {key: tuple(shape) for key, shape in manifest["shapes"].items()}
    with on_meta():
        ours = {key: tuple(value.shape) for key, value in Vision(VISION).state_dict().items()}
    assert ours == shapes
    assert sum(map(math.prod, ours.values())) == manifest["params"]
    assert VisionSpec.from_shapes(shapes) == VISION


@pytest.mark.parametrize("prefix", ["visual.", "model.visual.", "text_encoders.qwen25_7b.transformer.visual."])
def test_it_is_found_beside_the_language_model(prefix: str) -> None:
    """As ComfyUI's files, transformers' and whole checkpoints have both."""
    with on_meta():
        shapes = {key: tuple(value.shape) for key, value in build_network(QWEN25_VL_7B).state_dict().items()}
    beside = "model.language_model." if prefix == "model.visual." else prefix.replace("visual.", "model.")
    stored = {
        prefix + key.removeprefix("visual.") if key.startswith("visual.") else beside + key: shape
        for key, shape in shapes.items()
    }
    file = Tensors(Path("qwen.safetensors"), stored, lambda key: torch.empty(0))
    [(role, part)] = parts_of(file).items()
    assert (role, dict(part.shapes)) == ("text_encoder", shapes)


def test_offloads_and_stores_in_8_bits(pipes: dict[str, Pipeline]) -> None:
    spec = pipes["first"].text_encoder.spec
    image = torch.from_numpy(toy.photo(56, 84)).permute(2, 0, 1) / 255
    ids = torch.arange(12)[None]
    exact = pipes["first"].text_encoder(ids, images=[(3, image)])
    for kind in ("model", "sequential"):
        for storage, limit in ((None, 1e-6), ("int8", 0.1)):
            network = build_network(spec)
            network.load_state_dict(pipes["first"].text_encoder.state_dict())
            network.requires_grad_(False)
            offloader = Offloader({"text_encoder": network}, torch.device("cpu"), offload=kind, storage=storage)
            with offloader.phase("text_encoder"):
                assert toy.relative_error(network(ids, images=[(3, image)]), exact.numpy()) < limit


# ---- texts and runs -------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("kind", ["first", "2509"])
def test_the_text_with_images_equals_transformers(kind: str, pipes: dict[str, Pipeline]) -> None:
    """From the images on, whose tokens have a row and a column; texts follow the longer side."""
    options = {"reference": shown(kind), "height": 32, "width": 48, "steps": 1, "scale": 1.0}
    seen: list[torch.Tensor] = []
    hook = pipes[kind].text_encoder.register_forward_hook(lambda *call: seen.append(call[2]))
    pipes[kind].txt2img(toy_qwen_image.PROMPTS[0], **options)
    hook.remove()
    wanted = GOLDEN[f"text.{kind}"]
    assert toy.relative_error(seen[0][:, -wanted.shape[1] :, ::4], wanted) < 1e-5


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("kind", KINDS)
def test_a_whole_run_equals_diffusers_pipeline(kind: str, pipes: dict[str, Pipeline]) -> None:
    """From a prompt and one image or two to pixels, with guidance that keeps norms."""
    options: dict[str, Any] = {"noise": toy.normal(1, 1, 16, 4, 6), "height": 32, "width": 48}
    options |= {"negative_prompt": toy_qwen_image.NEGATIVE, "scale": toy_qwen_image.GUIDANCE}
    options |= {"reference": shown(kind), "steps": toy_qwen_image.STEPS}
    latents = run_latents(pipes[kind], [toy_qwen_image.PROMPTS[0]], **options)
    images = torch.stack(pipes[kind].decode(latents, output="tensor"))
    assert toy.relative_error((images + 1) / 2, GOLDEN[f"run.{kind}"]) < 1e-4


@pytest.mark.usefixtures("small")
def test_the_size_is_that_of_the_last_image(pipes: dict[str, Pipeline]) -> None:
    for kind, size in (("first", toy_qwen_image.SIZES[0]), ("2509", toy_qwen_image.SIZES[1])):
        [image] = pipes[kind].txt2img("a cat", reference=shown(kind), steps=1, scale=1.0)
        assert image.size == size


def test_references_have_1024_x_1024_pixels() -> None:
    """Sizes of diffusers' calculate_dimensions."""
    for size, wanted in (((48, 96), (736, 1440)), ((4000, 3000), (1184, 896)), ((100, 100), (1024, 1024))):
        assert fitted(Image.new("RGB", size), 16).size == wanted
    with pytest.raises(ValueError, match="got a reference of 9000 x 1 pixels, expected a side at most 100 times"):
        fitted(Image.new("RGB", (9000, 1)), 16)


@pytest.mark.usefixtures("small")
def test_images_do_not_depend_on_their_batch(pipes: dict[str, Pipeline]) -> None:
    """Nor on other prompts; line ends before a text are tokens of their own after an image."""
    options: dict[str, Any] = {"reference": PICTURES, "height": 32, "width": 48, "steps": 1, "negative_prompt": "\n\na"}
    prompts = ["\n a cat", "two trees under a cat"]
    both = pixels(pipes["2509"].txt2img(prompts, batch_size=2, **options))
    for i, prompt in enumerate(prompts):
        assert np.abs(both[i] - pixels(pipes["2509"].txt2img(prompt, seed=42 + i, **options))[0]).max() <= 2


@pytest.mark.usefixtures("small")
def test_without_a_reference_it_reads_text_as_qwen_image(pipes: dict[str, Pipeline], files: dict[str, Any]) -> None:
    plain = {key: value for key, value in files.items() if key != "ckpt"}
    size = {"height": 32, "width": 48, "steps": 1}
    same = ldm_lite.load(files["ckpt"], **plain).txt2img("a cat", **size)
    assert np.array_equal(pixels(pipes["2509"].txt2img("a cat", **size)), pixels(same))


@pytest.mark.usefixtures("small")
def test_references_change_an_image_that_begins_with_another(pipes: dict[str, Pipeline]) -> None:
    image = Image.fromarray(toy.photo(32, 48))
    plain, changed = (
        pixels(pipes["first"].img2img("a cat", image, strength=0.5, steps=2, scale=1.0, reference=reference))
        for reference in ((), PICTURES[:1])
    )
    assert not np.array_equal(plain, changed)


def test_large_images_leave_room_for_a_text(pipes: dict[str, Pipeline]) -> None:
    """Whose own tokens of images, which a user may write, are no images."""
    plain, reader = (qwen_image.tokenizer(pipes["2509"], images=images) for images in ((), [("Picture: ", 1369)] * 9))
    said = len(plain.encode("Picture: ")) - len(plain.encode(""))
    assert reader.num_before - plain.num_before == 9 * (1369 + 2 + said)
    assert len(reader.image_starts) == 9
    text = "<|image_pad|>" + 500 * "apple "
    assert len(reader.encode(text)) - reader.num_before == len(plain.encode(text)) - plain.num_before


def test_the_first_edit_reads_one_image(pipes: dict[str, Pipeline]) -> None:
    with pytest.raises(ValueError, match=r"got 2 reference images, but Qwen-Image-Edit reads 1: leave some out"):
        pipes["first"].txt2img("a cat", reference=PICTURES)


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("options", [{}, {"offload": "model"}, {"storage": "int8"}])
def test_half_precision(pipes: dict[str, Pipeline], files: dict[str, Any], options: dict[str, Any]) -> None:
    asked = {"reference": PICTURES, "steps": 2, "height": 32, "width": 32}
    exact, half = (
        pipe.txt2img("a cat", **asked) for pipe in (pipes["2509"], load(files, "2509", dtype="bf16", **options))
    )
    assert np.abs(pixels(exact) - pixels(half)).mean() < 5  # of 255


@pytest.mark.usefixtures("small")
def test_text_that_is_ready_has_not_seen_the_references(pipes: dict[str, Pipeline]) -> None:
    cond = pipes["2509"].encode_prompt("a cat")
    with pytest.raises(ValueError, match="got `reference`, and `cond` or `uncond`, whose text has not seen it"):
        pipes["2509"].txt2img(cond=cond, reference=PICTURES)


# ---- files ----------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("kind", KINDS)
def test_a_folder_of_diffusers_tells_which_it_is(
    kind: str, pipes: dict[str, Pipeline], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    name = "QwenImageEditPipeline" if kind == "first" else "QwenImageEditPlusPipeline"
    folder = toy_qwen_image.write_diffusers(tmp_path / "d", SHAPES, pipeline=name)
    (folder / "transformer" / "config.json").write_text(json.dumps({"zero_cond_t": kind == "2511"}))
    loaded = ldm_lite.load(folder, device="cpu")
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert loaded.family.title == pipes[kind].family.title
    options: dict[str, Any] = {"reference": shown(kind), "height": 32, "width": 48, "steps": 1}
    assert np.array_equal(pixels(loaded.txt2img("a", **options)), pixels(pipes[kind].txt2img("a", **options)))


@pytest.mark.parametrize(
    ("name", "family"),
    [
        ("qwen_image_edit_fp8", "qwen_image_edit"),
        ("Qwen-Image-Edit-2509-Q4", "qwen_image_edit_2509"),
        ("qwen_image_edit_2511", "qwen_image_edit_2511"),
    ],
)
def test_a_name_is_a_hint(
    name: str, family: str, files: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ckpt = tmp_path / f"{name}.safetensors"
    ckpt.write_bytes(files["ckpt"].read_bytes())
    options = {key: value for key, value in files.items() if key != "ckpt"}
    assert ldm_lite.load(ckpt, **options).family.title == "Qwen-Image"
    [warning] = [record.message for record in caplog.records if record.levelno >= logging.WARNING]
    assert warning.endswith(f"have the same shapes; if it is that, add `metadata=family={family}`")
    caplog.clear()
    ldm_lite.load(ckpt, metadata={"family": family}, **options)
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_comfyuis_mark_tells_2511(files: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    options = {key: value for key, value in files.items() if key != "ckpt"}
    marked = load_file(files["ckpt"]) | {REFERENCES_AT_ZERO: torch.zeros(0)}
    pipe = ldm_lite.load(save(tmp_path / "qwen_image_edit_2511.safetensors", marked), **options)
    assert pipe.family.title == "Qwen-Image-Edit 2511"
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_all_in_one(pipes: dict[str, Pipeline], files: dict[str, Any], tmp_path: Path) -> None:
    """As ComfyUI saves checkpoints, where the autoencoder's kernels in time are cut and those of what sees are not."""
    whole = under("model.diffusion_model.", load_file(files["ckpt"])) | under("vae.", load_file(files["vae"]))
    whole |= under("text_encoders.qwen25_7b.transformer.", load_file(files["text_encoder"]))
    toy_qwen_image.write_tokenizer(tmp_path)
    path = save(tmp_path / "whole.safetensors", whole)
    same = ldm_lite.load(path, metadata={"family": KINDS["first"]}, device="cpu")
    for role, network in pipes["first"].networks.items():
        for key, value in network.state_dict().items():
            assert torch.equal(value, same.networks[role].state_dict()[key]), key


@pytest.mark.slow
def test_what_does_not_fit_is_named(files: dict[str, Any], tmp_path: Path) -> None:
    text = {key: value for key, value in load_file(files["text_encoder"]).items() if not key.startswith("visual.")}
    folder = Path(files["vae"]).parent
    toy_qwen_image.toy_z_image.write_tokenizer(tmp_path)
    blind = load(files, "first", tokenizer=str(tmp_path / "tokenizer.json"))
    with pytest.raises(ValueError, match=r"lacks <\|image_pad\|>: expected the tokenizer.json of Qwen2.5-VL"):
        blind.txt2img("a", reference=PICTURES[:1], steps=1, height=32, width=48)
    with pytest.raises(ValueError, match=r"this one lacks the part that reads them, visual\.\*: name a whole file"):
        load(files, "first", text_encoder=str(save(folder / "text.safetensors", text)))
