"""Stable Diffusion 2 and XL against diffusers' pipelines (the goldens), and the traps of their files and prompts."""

import gzip
import json
import logging
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import texts
import torch
import toy
from PIL import Image
from random_checkpoint import metadata, small, state_dict, write
from runs import ddim_latents, decoded_latents, unet_calls
from safetensors.torch import save_file
from toy import NEGATIVE, PROMPT

import ldm_lite
from ldm_lite import Pipeline, img2img, inpaint, txt2img
from ldm_lite.bench import __main__ as bench
from ldm_lite.checkpoint.reader import on_meta
from ldm_lite.diffusion.names import named_plan
from ldm_lite.families.sd2 import SD2
from ldm_lite.families.sdxl import SDXL
from ldm_lite.train import __main__ as train
from ldm_lite.zoo.families import FAMILY_ROWS, check_metadata, detect_family, stored_facts, with_prediction
from ldm_lite.zoo.family import build_network

DATA = Path(__file__).parents[1] / "data"
GOLDEN = np.load(DATA / "families.npz")
MANIFESTS = json.loads(gzip.decompress((DATA / "manifests.json.gz").read_bytes()))

Load = Callable[[str], Pipeline]


@pytest.fixture(scope="session")
def files(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """-> a function: the name of a family -> a file of it in miniature."""
    folder = tmp_path_factory.mktemp("families")

    def path(name: str) -> Path:
        target = folder / f"{name}.safetensors"
        if not target.exists():
            write(target, small(name))
        return target

    return path


@pytest.fixture(scope="session")
def load(files: Callable[[str], Path]) -> Load:
    pipes: dict[str, Pipeline] = {}

    def one(name: str) -> Pipeline:
        if name not in pipes:
            pipes[name] = ldm_lite.load(files(name), device="cpu")
        return pipes[name]

    return one


# ---- against diffusers ----------------------------------------------------------------------------------------------


def test_encoded_prompts_of_sd2_equal_diffusers(load: Load) -> None:
    """Traps 1 and 2: the layer before the last, with the final norm, of tokens padded with 0."""
    pipe = load("sd2")
    context = pipe.encode_prompt(PROMPT).context
    assert toy.relative_error(context, GOLDEN["sd2.context"]) < 1e-5
    padded = replace(pipe.tokenizer, pad_id=49407)([PROMPT])
    assert toy.relative_error(pipe.text_encoder(padded), GOLDEN["sd2.context"]) > 1e-3


@pytest.mark.parametrize("prediction", ["eps", "v"])
def test_runs_of_sd2_equal_diffusers(files: Callable[[str], Path], prediction: str) -> None:
    pipe = ldm_lite.load(files("sd2"), device="cpu", prediction=prediction)
    latents = ddim_latents(pipe, NEGATIVE, 9.0)
    assert toy.relative_error(latents, GOLDEN[f"sd2.{prediction}.latents"]) < 1e-5
    arguments = {"eps": "v", "v": "eps"}[prediction]
    assert toy.relative_error(latents, GOLDEN[f"sd2.{arguments}.latents"]) > 0.1  # trap 7


def test_runs_with_a_depth_map_equal_diffusers(load: Load) -> None:
    latents = ddim_latents(load("sd2_depth"), NEGATIVE, 9.0, depth=Image.fromarray(toy.depth_map()))
    assert toy.relative_error(latents, GOLDEN["depth.latents"]) < 1e-5


@pytest.mark.parametrize(("name", "key"), [("sd2", "sd2.eps"), ("sdxl_base", "sdxl.none")])
def test_images_equal_diffusers(load: Load, name: str, key: str) -> None:
    """Trap 6: the autoencoders are alike, their scale factors are not."""
    [pixels] = load(name).decode(torch.from_numpy(GOLDEN[f"{key}.latents"]), output="tensor")
    wanted = GOLDEN[f"{key.split('.')[0]}.pixels"].clip(-1, 1)
    assert toy.relative_error(pixels[None, :, ::4, ::4], wanted) < 1e-5


def test_encoded_prompts_of_sdxl_equal_diffusers(load: Load) -> None:
    """Traps 1, 2 and 3: no final norm, paddings of 49407 and 0, the pooled output projected."""
    conditioning = load("sdxl_base").encode_prompt(PROMPT)
    assert toy.relative_error(conditioning.context, GOLDEN["sdxl.context"]) < 1e-5
    assert toy.relative_error(conditioning.y[:, :96], GOLDEN["sdxl.pooled"]) < 1e-5


def test_runs_of_sdxl_equal_diffusers(load: Load) -> None:
    """Traps 4 and 28: sizes height first; no negative prompt is not the empty one."""
    pipe = load("sdxl_base")
    none, empty = (ddim_latents(pipe, negative, 5.0) for negative in (None, ""))
    assert toy.relative_error(none, GOLDEN["sdxl.none.latents"]) < 1e-5
    assert toy.relative_error(empty, GOLDEN["sdxl.empty.latents"]) < 1e-5
    assert toy.relative_error(none, GOLDEN["sdxl.empty.latents"]) > 1e-3


def test_the_refiner_goes_on_where_the_base_leaves_off(load: Load) -> None:
    latents = ddim_latents(load("sdxl_base"), None, 5.0, refiner=load("sdxl_refiner"), refiner_start=0.5)
    assert toy.relative_error(latents, GOLDEN["sdxl.refined.latents"]) < 1e-5
    assert toy.relative_error(latents, GOLDEN["sdxl.none.latents"]) > 1e-2


def test_sizes_and_scores_as_options_are_those_of_diffusers(load: Load) -> None:
    """Height first, and the scores are the refiner's alone."""
    pipe, refiner = load("sdxl_base"), load("sdxl_refiner")
    sizes = {"original_size": "96x80", "crop_top_left": "8,4", "target_size": "64x64"}
    for changes, same in (
        ({}, True),
        ({"target_size": "80x64"}, False),
        ({"original_size": "80x96", "crop_top_left": "4,8"}, False),
    ):
        error = toy.relative_error(ddim_latents(pipe, None, 5.0, **sizes | changes), GOLDEN["sdxl.sizes.latents"])
        assert error < 1e-5 if same else error > 1e-4
    scores = {"refiner": refiner, "refiner_start": 0.5, "aesthetic_score": 8.0, "negative_aesthetic_score": 1.5}
    assert toy.relative_error(ddim_latents(pipe, None, 5.0, **scores), GOLDEN["sdxl.scored.latents"]) < 1e-5


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        (
            "sd2",
            ["--original-size", "96x80"],
            "got original size, which small Stable Diffusion 2.x does not use: leave",
        ),
        (
            "sdxl_base",
            ["--aesthetic-score", "7"],
            "which small Stable Diffusion XL does not use: leave out --aesthetic-sc",
        ),
        ("sdxl_refiner", ["--target-size", "64x64"], "which small Stable Diffusion XL refiner does not use"),
        ("sd2", ["--image-embedding", "{embedding}"], "got image embedding, which small Stable Diffusion 2.x does not"),
        (
            "sdxl_base",
            ["--original-size", "96"],
            "got --original-size '96', expected HxW, height first, 1024x768 for instance",
        ),
        ("sdxl_base", ["--target-size", "0x96"], "got --target-size '0x96', expected HxW"),
        ("sdxl_base", ["--crop-top-left", "-1,0"], "got --crop-top-left '-1,0', expected Y,X, 0,128 for instance"),
    ],
)
def test_unused_sizes_are_one_line(
    files: Callable[[str], Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    name: str,
    arguments: list[str],
    message: str,
) -> None:
    np.save(tmp_path / "a.npy", np.zeros((1, 24)))
    arguments = [str(tmp_path / "a.npy") if a == "{embedding}" else a for a in arguments]
    if arguments[1].startswith("-"):
        arguments = ["=".join(arguments)]
    try:
        status: object = command(tmp_path, files(name), *arguments)
    except SystemExit as refused:  # text that is no size is refused like any flag's value, before anything is loaded
        status = refused.code
    assert status == 2
    assert message in capsys.readouterr().err


def test_sizes_are_stored_in_the_image(files: Callable[[str], Path], tmp_path: Path) -> None:
    assert command(tmp_path, files("sdxl_base"), "--original-size", "96X80", "--crop_top_left", "8,4") == 0
    told = texts.load(tmp_path / "out.png").info["parameters"]
    assert 'Original size: 96x80, Crop top left: "8,4"' in told


def test_the_vector_of_unclip_is_that_of_diffusers(load: Load) -> None:
    pipe, options = load("sd2_unclip_h"), {"image_embedding": toy.normal(10, 1, 24), "noise_level": 300}
    assert toy.relative_error(pipe.encode_prompt(["a", "b"], **options).y[1:], GOLDEN["unclip.y"]) < 1e-5
    assert not pipe.encode_prompt("", negative=True, **options).y.any()
    statistics = torch.cat([toy.normal(11, 1, 24), toy.normal(12, 1, 24).exp()])
    y = load("sd2_unclip_l").encode_prompt("a", image_statistics=statistics, **options).y
    assert toy.relative_error(y, GOLDEN["unclip_l.y"]) < 1e-5


# ---- files ----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_metadata_decide_the_prediction_before_weights(
    files: Callable[[str], Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Trap 7: Stable Diffusion 2's files of eps and of v have the same keys and shapes."""
    caplog.set_level("INFO", logger="ldm_lite")
    weights, about = dict(state_dict(small("sd2"))), metadata(small("sd2"))
    del about["prediction"], about["resolution"]
    save_file(weights, tmp_path / "eps", metadata=about)
    key = "model.diffusion_model.output_blocks.3.1.transformer_blocks.0.norm1.bias"
    assert key in weights
    save_file({**weights, key: 5 * weights[key]}, tmp_path / "v", metadata=about)

    eps, v = (ldm_lite.load(tmp_path / name, device="cpu").family for name in ("eps", "v"))
    assert (eps.prediction, eps.resolution, v.prediction, v.resolution) == ("eps", 512, "v", 768)
    assert "v: predicts v by its weights: output_blocks.3.1.transformer_blocks.0.norm1.bias deviates by" in caplog.text
    assert ldm_lite.load(tmp_path / "v", device="cpu", prediction="eps").schedule.prediction == "eps"
    stated = ldm_lite.load(tmp_path / "eps", device="cpu", metadata={"modelspec.prediction_type": "v"}).family
    assert (stated.prediction, stated.resolution) == ("v", 768)


def test_the_marker_of_v_prediction(files: Callable[[str], Path], tmp_path: Path) -> None:
    weights, about = dict(state_dict(small("sdxl_base"))), metadata(small("sdxl_base"))
    del about["prediction"]
    save_file({**weights, "v_pred": torch.zeros(0), "ztsnr": torch.zeros(0)}, tmp_path / "v", metadata=about)
    schedule = ldm_lite.load(tmp_path / "v", device="cpu").schedule
    assert schedule.prediction == "v"
    assert schedule.alpha_bar[-1] == 0


def test_turbo_is_detected_by_layout_or_two_signs(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    assert (FAMILY_ROWS["sd_turbo"].steps, FAMILY_ROWS["sd_turbo"].scale) == (1, 1.0)
    shapes = {"unet": {key: tuple(s) for key, s in MANIFESTS["unet_sdxl_base"]["shapes"].items()}}
    assert detect_family(shapes, {}, sgm=True) == SDXL
    assert detect_family(shapes, {"family": "sdxl_turbo"}, sgm=True) == FAMILY_ROWS["sdxl_turbo"]
    ancestral, euler = ({"scheduler": f"Euler{kind}DiscreteScheduler, trailing"} for kind in ("Ancestral", ""))
    small, named = {"sample_size": "64"}, {"pipeline": "owner/a-Turbo, None"}
    for sign in (small, named):
        assert detect_family(shapes, ancestral | sign, sgm=True) == FAMILY_ROWS["sdxl_turbo"]
        family = detect_family(shapes, ancestral | sign | {"family": "sdxl_base"}, sgm=True)
        assert replace(family, resolution=1024) == SDXL
    assert (
        "taken for SDXL-Turbo by its scheduler and its size; otherwise add `metadata=family=sdxl_base`" in caplog.text
    )
    for sign in (ancestral, small, named, euler | named):  # Euler: as of SDXL-Lightning
        assert replace(detect_family(shapes, sign, sgm=True), resolution=1024) == SDXL
    assert detect_family(shapes, {"scheduler": "EulerAncestralDiscreteScheduler, leading"} | named, sgm=True) == SDXL
    of_sd2 = {"unet": {key: tuple(s) for key, s in MANIFESTS["unet_sd2"]["shapes"].items()}}
    assert detect_family(of_sd2, euler | named) == FAMILY_ROWS["sd_turbo"]
    assert "taken for SD-Turbo by its scheduler and its name" in caplog.text
    for signs in (euler, euler | small, ancestral | named):  # Stable Diffusion 2's eps model has 512 px too
        detected = detect_family(of_sd2, signs)
        assert replace(detected, v_resolution=768) == SD2
    assert "its scheduler is that of SD-Turbo: if it is, add `metadata=family=sd_turbo`" in caplog.text
    of_sd1 = {"unet": {key: tuple(s) for key, s in MANIFESTS["unet_sd1"]["shapes"].items()}}
    assert detect_family(of_sd1, euler) == FAMILY_ROWS["sd1"]
    assert named_plan(FAMILY_ROWS["sdxl_turbo"].sampler, toy_schedule(), 4).t.tolist() == [999, 749, 499, 249]


def test_prefixed_facts_of_a_known_model_overrule_its_row() -> None:
    shapes = {"unet": {key: tuple(s) for key, s in MANIFESTS["unet_sd1"]["shapes"].items()}}
    told = stored_facts({"ldm_lite.resolution": "768", "ldm_lite.steps": "8", "guidance": "3"})
    assert detect_family(shapes, told) == replace(FAMILY_ROWS["sd1"], resolution=768, steps=8)


def test_a_turbo_file_name_gives_a_hint(
    files: Callable[[str], Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert [len(FAMILY_ROWS[name].hints) for name in ("sdxl_base", "sd2", "sd1", "sd_turbo", "sdxl_turbo")] == [
        *(1, 1, 0, 0, 0)
    ]
    for name in ("sd_xl_turbo_1.0.safetensors", "other.safetensors"):
        (tmp_path / name).symlink_to(files("sdxl_base"))
        for added in ({}, {"family": "sdxl_base"}):
            caplog.clear()
            ldm_lite.load(tmp_path / name, device="cpu", metadata=added)
            is_hinted = "if it is that, add `metadata=family=sdxl_turbo`" in caplog.text
            assert is_hinted == ("turbo" in name and not added)


def toy_schedule() -> "ldm_lite.diffusion.schedule.NoiseSchedule":
    from ldm_lite.diffusion.schedule import NoiseSchedule

    return NoiseSchedule.from_betas(SDXL.noise.betas, "eps")


def test_the_autoencoder_of_sdxl_stays_in_float32(files: Callable[[str], Path]) -> None:
    """Trap 27."""
    pipe = ldm_lite.load(files("sdxl_base"), device="cpu", dtype="fp16")
    assert next(pipe.vae.parameters()).dtype == torch.float32
    assert pipe.dtype == next(pipe.text_encoder_2.parameters()).dtype == torch.float16
    brain = ldm_lite.load(files("sdxl_base"), device="cpu", dtype="bf16")
    assert next(brain.vae.parameters()).dtype == torch.bfloat16


def test_converted_files_of_sd2_lack_unused_layers(tmp_path: Path) -> None:
    whole = {key: tuple(s) for key, s in MANIFESTS["text_openclip_h14"]["shapes"].items()}
    shapes = {key: s for key, s in whole.items() if ".resblocks.23." not in key and key != "text_projection"}
    unet = {key: tuple(s) for key, s in MANIFESTS["unet_sd2"]["shapes"].items()}
    family = detect_family({"unet": unet, "text_encoder": shapes}, {})
    assert family == replace(SD2, text_encoders=(replace(SD2.text, layers=23, skip=0, projection=False),))
    assert detect_family({"unet": unet, "text_encoder": whole}, {}) == SD2


@pytest.mark.slow
def test_miniatures_are_detected_by_their_metadata() -> None:
    for name in [name for name in FAMILY_ROWS if re.match("sd2|sd_|sdxl_[bir]", name)]:
        family = small(name)
        with on_meta():
            shapes = {
                role: {key: tuple(value.shape) for key, value in build_network(spec).state_dict().items()}
                for role, spec in family.specs.items()
            }
        assert with_prediction(detect_family(shapes, metadata(family)), family.prediction) == with_prediction(
            family, family.prediction
        )


def test_metadata_keys() -> None:
    for family in FAMILY_ROWS.values():
        assert set(metadata(family)) <= set(check_metadata(metadata(family)))
    with pytest.raises(ValueError, match="got `metadata` guidence, expected one of family, title, "):
        check_metadata({"family": "sd1", "guidence": "5"})


def test_an_unknown_family_in_the_metadata_is_one_line() -> None:
    unet = {key: tuple(s) for key, s in MANIFESTS["unet_sdxl_base"]["shapes"].items()}
    with pytest.raises(
        ValueError, match=r"the metadata name the family 'sdxl_turb', expected one of sd1, .*sdxl_turbo"
    ):
        detect_family({"unet": unet}, {"family": "sdxl_turb"}, sgm=True)


# ---- the command ----------------------------------------------------------------------------------------------------


def command(tmp_path: Path, path: Path, *arguments: str) -> int:
    common = ["--steps", "2", "--sampler", "ddim", "--device", "cpu", "--H", "64", "--W", "64", "--skip_grid"]
    return txt2img.main([PROMPT, "--ckpt", str(path), "--out", str(tmp_path / "out.png"), *common, *arguments])


def test_latents_have_the_published_scale() -> None:
    scales = {"sd1": 0.18215, "sd2": 0.18215, "sdxl_base": 0.13025, "flux_dev": 0.3611, "sd3_medium": 1.5305}
    assert {name: FAMILY_ROWS[name].scale_factor for name in scales} == scales


def test_base_then_refiner_by_one_flag(files: Callable[[str], Path], load: Load, tmp_path: Path) -> None:
    refiner = str(files("sdxl_refiner"))
    assert command(tmp_path, files("sdxl_base"), "--refiner", refiner, "--refiner_start", "0.5") == 0
    image = Image.open(tmp_path / "out.png")
    assert "Refiner: sdxl_refiner, Refiner from step: 2" in image.info["parameters"]
    options = {"steps": 2, "height": 64, "width": 64, "output": "result"}
    refined = {
        start: load("sdxl_base").txt2img(PROMPT, refiner=load("sdxl_refiner"), refiner_start=start, **options)[0]
        for start in (0.0, 0.5, 1.0)
    }
    assert np.array_equal(refined[0.5].array, np.asarray(image))
    assert not np.array_equal(refined[0.5].array, refined[1.0].array)
    [alone] = load("sdxl_base").txt2img(PROMPT, **options)
    assert torch.equal(refined[1.0].pixels, alone.pixels)
    [last] = load("sdxl_refiner").txt2img(PROMPT, **options)
    assert torch.equal(refined[0.0].pixels, last.pixels)


def test_img2img_with_a_refiner_equals_diffusers(load: Load, caplog: pytest.LogCaptureFixture) -> None:
    """The share of the steps is of all from pure noise on: of 8, 2 are left out, 2 the base's, 4 the refiner's."""
    caplog.set_level("INFO", "ldm_lite")
    settings = {"steps": 8, "scale": 5.0, "sampler": "ddim", "strength": 0.75, "refiner_start": 0.5}
    with decoded_latents(load("sdxl_base")) as latents:
        load("sdxl_base").img2img(PROMPT, Image.fromarray(toy.waves()), refiner=load("sdxl_refiner"), **settings)
    assert toy.relative_error(latents[0], GOLDEN["sdxl.img2img.latents"]) < 1e-5
    assert "sdxl_refiner: runs the last 4 of 6 steps" in caplog.text


@pytest.mark.slow
@pytest.mark.parametrize("name", ["sdxl_base", "sdxl_inpaint"])
def test_inpainting_with_a_refiner(load: Load, name: str) -> None:
    """By the network itself it changes nothing, by the refiner what is repainted: even after one that reads a mask."""
    mask = Image.fromarray(np.pad(np.full((32, 32), 255, np.uint8), 16))
    inputs = (PROMPT, Image.fromarray(toy.waves()), mask)
    options = {"steps": 4, "sampler": "ddim", "output": "tensor"}
    pixels = {
        refiner: load(name).inpaint(*inputs, refiner=load(refiner), refiner_start=0.5, **options)[0]
        for refiner in (name, "sdxl_refiner")
    }
    [pixels[None]] = load(name).inpaint(*inputs, **options)
    assert torch.equal(pixels[None], pixels[name])
    changed = (pixels[None] != pixels["sdxl_refiner"]).any(dim=0)
    assert changed[16:48, 16:48].float().mean() > 0.9
    changed[16:48, 16:48] = False
    assert not changed.any()


@pytest.mark.parametrize("command", [img2img, inpaint])
def test_img2img_with_a_refiner_by_one_flag(
    files: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str], command: ModuleType
) -> None:
    Image.fromarray(toy.waves()).save(tmp_path / "in.png")
    mask = ["--mask", str(tmp_path / "in.png")] if command is inpaint else []
    arguments = [PROMPT, "--ckpt", str(files("sdxl_base")), "--refiner", str(files("sdxl_refiner")), "--steps", "4"]
    arguments += ["--init-img", str(tmp_path / "in.png"), "--out", str(tmp_path / "out.png"), "--device", "cpu", *mask]
    assert command.main([*arguments, "--strength", "0.5", "--refiner-start", "0.75"]) == 0
    told = texts.load(tmp_path / "out.png").info["parameters"]
    assert "Refiner: sdxl_refiner, Refiner from step: 2" in told  # the first of two is the third of four
    with pytest.raises(SystemExit, match="2"):
        command.main([*arguments, "--refiner-start", "1.5"])
    assert "got --refiner-start 1.5, expected 0 to 1" in capsys.readouterr().err


def test_options_without_a_refiner_or_embedding_are_one_line(
    files: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for arguments, message in (
        (["--refiner-start", "0.5"], "--refiner-start needs a refiner: give one with --refiner FILE"),
        (["--noise-level", "100"], "--noise-level needs an image embedding: give one with --image-embedding"),
    ):
        assert command(tmp_path, files("sdxl_base"), *arguments) == 2
        assert message in capsys.readouterr().err
        assert not (tmp_path / "out.png").exists()


def test_no_negative_prompt_is_not_the_empty_one_to_sdxl_alone(load: Load) -> None:
    for name, differ in (("sdxl_base", True), ("sdxl_refiner", False), ("sd2", False)):
        options = {"steps": 2, "height": 64, "width": 64, "output": "tensor"}
        none, empty = (load(name).txt2img(PROMPT, negative_prompt=text, **options)[0] for text in (None, ""))
        assert torch.equal(none, empty) != differ


@pytest.mark.slow
def test_a_depth_map_is_read(files: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    grey = np.linspace(0, 255, 64 * 64).reshape(64, 64).astype(np.uint8)
    Image.fromarray(grey).save(tmp_path / "depth.png")
    Image.fromarray(grey[::-1].copy()).save(tmp_path / "turned.png")
    images = []
    for name in ("depth", "turned"):
        assert command(tmp_path, files("sd2_depth"), "--depth", str(tmp_path / f"{name}.png")) == 0
        images.append(np.asarray(Image.open(tmp_path / "out.png")))
        (tmp_path / "out.png").unlink()
    assert not np.array_equal(*images)
    assert command(tmp_path, files("sd2_depth")) == 2
    assert "got no depth map, but small Stable Diffusion 2 depth expects one: --depth FILE" in capsys.readouterr().err
    assert command(tmp_path, files("sd2"), "--depth", str(tmp_path / "depth.png")) == 2
    assert "got a depth map, but small Stable Diffusion 2.x expects none" in capsys.readouterr().err


def test_depth_maps_keep_all_their_bits(load: Load, tmp_path: Path) -> None:
    pipe = load("sd2_depth")

    def read(depth: Path | Image.Image, side: int = 64) -> torch.Tensor:
        """What the UNet reads of a depth map."""
        with unet_calls(pipe) as calls:
            pipe.txt2img("", depth=depth, steps=1, scale=1.0, height=side, width=side)
        return calls[0].x[:, 4:]

    wanted = read(Image.fromarray(toy.depth_map()))
    assert (wanted.min(), wanted.max()) == (-1, 1)
    values = (toy.depth_map().astype(np.uint16) * 7 + 30_000) * 1
    for name, image in (
        ("bits16.png", Image.fromarray(values)),
        ("float.tiff", Image.fromarray(values.astype(np.float32) / 7)),
        ("rgb.png", Image.fromarray(toy.depth_map()).convert("RGB")),
    ):
        image.save(tmp_path / name)
        assert torch.allclose(read(tmp_path / name), wanted, atol=1e-4), name
    assert torch.isfinite(read(Image.new("L", (8, 8), 9), side=32)).all()


def test_an_image_embedding_is_read(
    files: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    np.save(tmp_path / "image.npy", toy.normal(10, 24).numpy())
    save_file({"embedding": toy.normal(10, 1, 24)}, tmp_path / "image.safetensors")
    images = []
    for name in ("image.npy", "image.safetensors"):
        assert command(tmp_path, files("sd2_unclip_h"), "--image_embedding", str(tmp_path / name)) == 0
        images.append(np.asarray(Image.open(tmp_path / "out.png")))
        (tmp_path / "out.png").unlink()
    assert np.array_equal(*images)
    np.save(tmp_path / "wrong.npy", np.zeros((1, 7)))
    for arguments, message in (
        ([], r"reads an image's CLIP embedding (1, 24) besides the prompt: give one with --image-embedding FILE"),
        (["--image_embedding", str(tmp_path / "wrong.npy")], "got an image embedding (1, 7) and noise level 0"),
    ):
        assert command(tmp_path, files("sd2_unclip_h"), *arguments) == 2
        assert message in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        command(tmp_path, files("sd2_unclip_h"), "--image_embedding", str(tmp_path / "image.npy"), "--noise_level=1000")
    assert "got --noise-level 1000, expected 0 to 999" in capsys.readouterr().err


@pytest.mark.slow
def test_statistics_of_embeddings_are_read(
    files: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """unCLIP L's, which are in no checkpoint: karlo's two tensors, or diffusers' image_normalizer."""
    mean, deviation = toy.normal(11, 24), toy.normal(12, 24).exp()
    np.save(tmp_path / "image.npy", toy.normal(10, 24).numpy())
    torch.save((mean, deviation), tmp_path / "ViT-L-14_stats.th")
    save_file({"mean": mean[None], "std": deviation[None]}, tmp_path / "normalizer.safetensors")
    torch.save({"no": mean}, tmp_path / "other.th")
    embedding, images = ["--image-embedding", str(tmp_path / "image.npy"), "--noise-level", "500"], []
    for name in ("ViT-L-14_stats.th", "normalizer.safetensors"):
        arguments = [*embedding, "--image-statistics", str(tmp_path / name)]
        assert command(tmp_path, files("sd2_unclip_l"), *arguments) == 0
        images.append(np.asarray(Image.open(tmp_path / "out.png")))
        (tmp_path / "out.png").unlink()
    assert np.array_equal(*images)
    for family, arguments, message in (
        ("sd2_unclip_l", embedding, "statistics that its file lacks: give karlo's ViT-L-14_stats.th with"),
        ("sd2_unclip_l", [*embedding, f"--image-statistics={tmp_path}/other.th"], "holds no mean and standard deviati"),
        ("sd2_unclip_l", [*embedding, f"--image-statistics={tmp_path}/none.th"], "none.th: No such file"),
        ("sd2_unclip_h", [*embedding, f"--image-statistics={tmp_path}/ViT-L-14_stats.th"], "image statistics"),
    ):
        assert command(tmp_path, files(family), *arguments) == 2
        assert message in capsys.readouterr().err
    assert command(tmp_path, files("sd2_unclip_l"), *embedding[:2]) == 0


@pytest.mark.slow
def test_img2img_and_inpainting(files: Callable[[str], Path], tmp_path: Path) -> None:
    image, mask = tmp_path / "image.png", tmp_path / "mask.png"
    Image.fromarray(toy.depth_map()).convert("RGB").resize((64, 64)).save(image)
    Image.fromarray(255 * (toy.depth_map() > 200).astype(np.uint8)).resize((64, 64)).save(mask)
    common = ["--init-img", str(image), "--steps", "2", "--sampler", "ddim", "--device", "cpu", PROMPT]
    for number, (command, name, arguments) in enumerate(
        (
            (img2img, "sd2_depth", ["--depth", str(image)]),
            (img2img, "sdxl_refiner", []),
            (inpaint, "sd2_inpaint", ["--mask", str(mask)]),
            (inpaint, "sdxl_inpaint", ["--mask", str(mask)]),
        )
    ):
        out = tmp_path / f"{number}.png"
        assert command.main([*common, "--ckpt", str(files(name)), "--out", str(out), *arguments]) == 0, name
        assert texts.load(out).size == (64, 64)


def test_inpainting_files_are_refused_by_other_commands(
    files: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("sd2_inpaint", "sdxl_inpaint"):
        assert command(tmp_path, files(name)) == 2
        assert "which txt2img cannot use: run python -m ldm_lite.inpaint" in capsys.readouterr().err


def test_a_long_prompt_warns_once_with_two_encoders(load: Load, caplog: pytest.LogCaptureFixture) -> None:
    pipe = load("sdxl_base")
    caplog.clear()  # what loading says, if this test is the first to load it
    pipe.txt2img("a " * 75 + "fox", steps=1, height=64, width=64)
    assert [record.getMessage() for record in caplog.records] == ["the prompt is too long, dropped: fox"]


def test_long_prompts_of_sdxl_are_chunks_side_by_side(load: Load) -> None:
    pipe = load("sdxl_base")
    long = pipe.encode_prompt("a cat, " * 30, prompt_syntax="a1111")
    assert long.context.shape == (1, 2 * 77, 160)
    first = pipe.encode_prompt("a cat, " * 25, prompt_syntax="a1111")
    assert torch.allclose(long.context[:, :77], first.context, atol=1e-5)
    assert torch.allclose(long.y, first.y, atol=1e-5)  # the pooled output is the first chunk's


@pytest.mark.slow
def test_unsupported_options_are_one_line(
    files: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = tmp_path / "data"
    data.mkdir()
    Image.new("RGB", (64, 64)).save(data / "a.png")
    (data / "a.txt").write_text("a")
    for name in ("sd2_depth", "sdxl_refiner"):
        arguments = ["--data", str(data), "--out", str(tmp_path / "run"), "--steps", "1", "--device", "cpu"]
        assert train.main([*arguments, "--ckpt", str(files(name))]) == 2
        assert "only text-to-image models with CLIP text encoders can be trained" in capsys.readouterr().err
    assert bench.main(["--ckpt", str(files("sdxl_base")), "--device", "cpu", "--out", str(tmp_path / "bench")]) == 2


def test_a_unet_with_an_autoencoder_of_other_latents_is_refused(files: Callable[[str], Path], small_path: Path) -> None:
    xl = files("sdxl_base")
    with pytest.raises(
        ValueError, match=rf"{small_path}: is a UNet of .*SD1, and {xl} a checkpoint of .*XL.*other latents"
    ):
        ldm_lite.load(xl, unet=small_path, device="cpu")
    swapped = ldm_lite.load(xl, unet=small_path, vae=small_path, device="cpu")
    assert swapped.family.scale_factor == 0.18215
    assert ldm_lite.load(xl, unet=xl, device="cpu").family.scale_factor == 0.13025
