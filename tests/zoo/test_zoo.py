"""The LDM zoo and the x4 upscaler in miniature: from a file of each, as the original code samples (the goldens)."""

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import random_checkpoint
import texts
import torch
import toy
import toy_zoo
from PIL import Image
from runs import run_latents
from safetensors import safe_open
from safetensors.torch import save_file

import ldm_lite
from ldm_lite import Pipeline, generate, img2img, inpaint, txt2img
from ldm_lite.cli.task_options import Txt2imgOptions
from ldm_lite.core.denoise import State
from ldm_lite.diffusion.guidance import Conditioning, classifier_free
from ldm_lite.families.ldm import ROWS
from ldm_lite.image import mask_latent, to_array
from ldm_lite.tasks import inpaint as inpaint_task
from ldm_lite.tasks import txt2img as txt2img_task
from ldm_lite.tasks.command import previews
from ldm_lite.zoo.families import FAMILY_ROWS

GOLDEN = np.load(Path(__file__).parents[1] / "data" / "zoo.npz")
Load = Callable[[str], Pipeline]


@pytest.fixture(scope="module")
def path_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return the file of a family's miniature, by name."""
    folder = tmp_path_factory.mktemp("zoo")

    def path(name: str) -> Path:
        file = folder / f"{name}.safetensors"
        if not file.exists():
            random_checkpoint.write(file, toy_zoo.small(name))
        return file

    return path


@pytest.fixture(scope="module")
def load(path_of: Callable[[str], Path]) -> Load:
    """Return a family's loaded miniature, by name."""
    return functools.cache(lambda name: ldm_lite.load(path_of(name), device="cpu"))


def prompt_of_run(name: str, folder: Path) -> str:
    """The prompt of a run, which may be a file."""
    if name in ("ldm_text2img_large", "ldm_text2img256"):
        return toy_zoo.PROMPTS[0]
    if name in ("ldm_cin256_v2", "ldm_cin256"):
        return str(toy_zoo.CLASS)
    if name == "ldm_layout2img":
        boxes = [{"class": box[0], "box": box[1:]} for box in toy.layouts()[0]]
        (folder / "boxes.json").write_text(json.dumps(boxes))
        return str(folder / "boxes.json")
    if name == "ldm_semantic_synthesis":
        Image.fromarray(toy_zoo.labels()[0].numpy().astype(np.uint8)).save(folder / "labels.png")
        return str(folder / "labels.png")
    if name == "rdm768":
        np.save(folder / "embeddings.npy", toy_zoo.neighbours()[0].numpy())
        return str(folder / "embeddings.npy")
    return ""


FROM_PROMPTS = [name for name in toy_zoo.RUNS if name not in ("ldm_inpainting_big", "ldm_bsr_sr", "x4")]


@pytest.mark.parametrize("name", FROM_PROMPTS)
def test_a_run_equals_the_originals(name: str, load: Load, tmp_path: Path) -> None:
    """DDIM with the original's timesteps; the image too, with the scale factor or codes."""
    pipe, run = load(name), toy_zoo.RUNS[name]
    height, width = (4 * side for side in toy_zoo.latent_size(name))
    options = {"sampler": "ddim", "spacing": "original", "steps": run.steps, "scale": run.scale}
    options |= {"noise": toy_zoo.noise(name), "height": height, "width": width}
    with toy.in_float64(*pipe.networks.values()):
        latents = run_latents(pipe, prompt_of_run(name, tmp_path), **options)
        pixels = pipe.decode(latents, output="tensor")[0]
    assert toy.relative_error(latents, GOLDEN[f"run.{name}.latents"]) < 1e-5
    if run.decoded:
        assert toy.relative_error(pixels, GOLDEN[f"run.{name}.pixels"][0].clip(-1, 1)) < 1e-5


# ---- the command ----------------------------------------------------------------------------------------------------


@pytest.fixture
def prompt_of(tmp_path: Path) -> dict[str, list[str]]:
    """The prompt flags of each family that reads prompts."""
    boxes = [{"class": 3, "box": [0.1, 0.2, 0.5, 1.0]}]
    (tmp_path / "boxes.json").write_text(json.dumps(boxes))
    Image.fromarray(toy_zoo.labels()[0].numpy().astype(np.uint8)).save(tmp_path / "labels.png")
    np.save(tmp_path / "embedding.npy", toy_zoo.neighbours()[0, 0].numpy())
    return {
        "ldm_celeba_ffhq_beds256": [],
        "ldm_lsun_churches256": [],
        "ldm_text2img_large": ["a red apple"],
        "ldm_text2img256": ["--prompt", "a red apple"],
        "ldm_cin256_v2": ["--class", "7"],
        "ldm_cin256": ["9"],
        "ldm_layout2img": ["--boxes", str(tmp_path / "boxes.json")],
        "ldm_semantic_synthesis": ["--label-map", str(tmp_path / "labels.png")],
        "rdm768": ["--embeddings", str(tmp_path / "embedding.npy")],
    }


@pytest.mark.parametrize("name", [name for name in toy_zoo.SMALL if toy_zoo.small(name).task == "txt2img"])
@pytest.mark.thin(3)
def test_the_command_makes_an_image(
    name: str, path_of: Callable[[str], Path], prompt_of: dict[str, list[str]], tmp_path: Path
) -> None:
    arguments = [*prompt_of[name], "--ckpt", str(path_of(name)), "--device", "cpu", "--steps", "2"]
    assert txt2img.main([*arguments, "--out", str(tmp_path / "out.png"), "--H", "48"]) == 0
    image = Image.open(tmp_path / "out.png")
    assert image.size == (32, 48)
    assert np.asarray(image).std() > 1
    # another prompt gives another image
    if prompt_of[name] and name not in ("ldm_layout2img", "ldm_semantic_synthesis", "rdm768"):
        others = [*prompt_of[name][:-1], "3", *arguments[len(prompt_of[name]) :]]
        assert txt2img.main([*others, "--out", str(tmp_path / "other.png"), "--H", "48"]) == 0
        assert not np.array_equal(np.asarray(Image.open(tmp_path / "other.png")), np.asarray(image))


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("ldm_celeba_ffhq_beds256", ["a face"], "reads no prompt: got 'a face', leave it out"),
        ("ldm_text2img256", [], "no prompt: give one"),
        ("ldm_text2img256", ["an apple", "--clip-skip", "2"], "has no CLIP: leave out --clip-skip"),
        ("ldm_cin256_v2", [], "no prompt: give one"),
        ("ldm_cin256_v2", ["--class", "10"], "reads a class, 0 to 9: got '10'"),
        ("ldm_cin256_v2", ["--class", "a dog"], "reads a class, 0 to 9: got 'a dog'"),
        ("ldm_cin256", ["--class", "1", "--scale", "3"], "without a negative prompt (leave out --scale): got 'none'"),
        ("ldm_layout2img", ["a dog"], "a dog: no such file: small LDM layout-to-image (OpenImages) reads a JSON file"),
        ("ldm_layout2img", ["--boxes", __file__], "is not a list of boxes"),
        ("ldm_semantic_synthesis", ["{rgb}"], "is not a label map: its mode is RGB"),
        ("ldm_semantic_synthesis", ["{high}"], "is not a label map: it holds the label 200, expected 0 to 5"),
        ("ldm_semantic_synthesis", [__file__], "is not an image that can be read"),
        ("rdm768", ["{rgb}"], "is not a .npy file"),
        ("rdm768", ["{wide}"], "holds floats of shape (1, 41), expected (40,) or (T, 40)"),
        ("ldm_bsr_sr", [], "run python -m ldm_lite.upscale"),
        ("ldm_inpainting_big", [], "run python -m ldm_lite.inpaint"),
    ],
)
def test_an_invalid_prompt_is_one_line(
    name: str,
    arguments: list[str],
    message: str,
    path_of: Callable[[str], Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    Image.new("RGB", (4, 4)).save(tmp_path / "rgb.png")
    Image.new("L", (4, 4), 200).save(tmp_path / "high.png")
    np.save(tmp_path / "wide.npy", np.zeros(41, dtype=np.float32))
    files = {"rgb": tmp_path / "rgb.png", "high": tmp_path / "high.png", "wide": tmp_path / "wide.npy"}
    filled = [argument.format(**files) if argument.startswith("{") else argument for argument in arguments]
    arguments = [*filled, "--ckpt", str(path_of(name)), "--device", "cpu", "--steps", "1", "--out", str(tmp_path)]
    assert txt2img.main(arguments) == 2
    *_, last = capsys.readouterr().err.splitlines()
    assert message in last


# ---- what only some files hold --------------------------------------------------------------------------------------


def test_the_scale_factor_of_churches_is_read_from_the_file(path_of: Callable[[str], Path], tmp_path: Path) -> None:
    """Trap 22: it was measured when training began, and stands in a buffer."""
    path = path_of("ldm_lsun_churches256")
    assert ldm_lite.load(path, device="cpu").family.scale_factor == pytest.approx(random_checkpoint.SCALE_FACTOR)
    with safe_open(path, "pt") as file:
        values, metadata = {key: file.get_tensor(key) for key in file.keys()}, file.metadata()  # noqa: SIM118
    del values["scale_factor"]
    save_file(values, tmp_path / "without.safetensors", metadata=metadata)
    with pytest.raises(ValueError, match="lacks scale_factor"):
        ldm_lite.load(tmp_path / "without.safetensors", device="cpu")
    pipe = ldm_lite.load(tmp_path / "without.safetensors", device="cpu", metadata={"scale_factor": "0.5"})
    assert pipe.family.scale_factor == 0.5


def test_the_autoencoder_that_inpainting_holds_twice_is_read_once(
    path_of: Callable[[str], Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Trap 29."""
    with safe_open(path_of("ldm_inpainting_big"), "pt") as file:
        values, metadata = {key: file.get_tensor(key) for key in file.keys()}, file.metadata()  # noqa: SIM118
    stage = "first_stage_model."
    again = {key.replace(stage, "cond_stage_model."): 0 * v for key, v in values.items() if key.startswith(stage)}
    save_file({**values, **again}, tmp_path / "twice.safetensors", metadata=metadata)
    pipe = ldm_lite.load(tmp_path / "twice.safetensors", device="cpu")
    assert torch.equal(pipe.vae.encoder.conv_in.weight, values[f"{stage}encoder.conv_in.weight"])
    assert pipe.text_encoder is None
    assert "ignored" not in caplog.text


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ldm_celeba_ffhq_beds256", "ldm_cin256"])
def test_the_ema_copy_is_used(name: str, load: Load, tmp_path: Path) -> None:
    """Trap 13: the original sampled inside of ema_scope."""
    random_checkpoint.write(tmp_path / "ema.ckpt", toy_zoo.small(name), container="zip", ema=True)
    metadata = random_checkpoint.metadata(toy_zoo.small(name))
    pipe, true = ldm_lite.load(tmp_path / "ema.ckpt", device="cpu", metadata=metadata), load(name)
    assert all(map(torch.equal, pipe.unet.state_dict().values(), true.unet.state_dict().values()))
    other_pipe = ldm_lite.load(tmp_path / "ema.ckpt", device="cpu", metadata=metadata, ema="no")
    assert not torch.equal(other_pipe.unet.out[2].weight, true.unet.out[2].weight)


@pytest.mark.parametrize(
    ("names", "alpha_bar"),  # of timesteps 0, 500 and 999
    [
        (("ldm_text2img_large",), (0.99915, 0.27633268, 4.66009851e-3)),
        (
            ("ldm_celeba_ffhq_beds256", "ldm_cin256", "ldm_cin256_v2", "ldm_text2img256"),
            (0.9985, 0.11492200, 1.42303975e-4),
        ),
        (("ldm_lsun_churches256", "ldm_bsr_sr"), (0.9985, 0.15007005, 6.68665174e-4)),
        (("ldm_inpainting_big", "ldm_semantic_synthesis", "ldm_layout2img"), (0.9985, 0.10767675, 9.69108668e-5)),
        (("rdm768",), (0.9985, 0.15529056, 8.12518471e-4)),
        (("x4",), (0.9999, 0.33127458, 7.33412460e-4)),
    ],
)
def test_schedules_are_the_originals(names: tuple[str, ...], alpha_bar: tuple[float, ...], load: Load) -> None:
    """Trap 16: what the configurations call linear is linear in the square roots."""
    for name in names:
        assert load(name).schedule.alpha_bar[[0, 500, 999]] == pytest.approx(alpha_bar, rel=1e-7)


def test_head_counts_are_the_rows() -> None:
    """Trap 8: shapes do not tell them, and a wrong one loads."""
    heads = {
        "ldm_cin256_v2": (1, None),
        "x4": (8, None),
        "ldm_text2img_large": (8, None),
        "ldm_text2img256": (None, 32),
        "ldm_cin256": (None, 32),
        "ldm_celeba_ffhq_beds256": (None, 32),
        "ldm_lsun_churches256": (8, None),
        "ldm_layout2img": (None, 32),
        "ldm_semantic_synthesis": (8, None),
        "rdm768": (None, 32),
        "ldm_inpainting_big": (8, None),
        "ldm_bsr_sr": (None, 32),
    }
    assert {
        name: (FAMILY_ROWS[name].unet.num_heads, FAMILY_ROWS[name].unet.head_dim) for name in (*ROWS, "x4")
    } == heads


# ---- inpainting -----------------------------------------------------------------------------------------------------


def test_inpainting_equals_the_original(load: Load) -> None:
    """Trap 12: a black hole, the image before the mask, and a mask of 1 and -1: all unlike Stable Diffusion's."""
    name = "ldm_inpainting_big"
    pipe, run = load(name), toy_zoo.RUNS[name]
    hole = toy_zoo.hole()[0]
    concat = inpaint_task._masked_channels(pipe, toy_zoo.picture(name)[0], hole, mask_latent(hole, 4))
    plan = pipe.plan("ddim", run.steps, spacing="original")
    branches = classifier_free(Conditioning(concat=concat), None, run.scale)
    with toy.in_float64(*pipe.networks.values()):
        latents = generate.denoise(pipe, toy_zoo.noise(name), branches, plan)
        pixels = pipe.decode(latents, output="tensor")[0]
    assert toy.relative_error(latents, GOLDEN[f"run.{name}.latents"]) < 1e-5
    assert toy.relative_error(pixels, GOLDEN[f"run.{name}.pixels"][0].clip(-1, 1)) < 1e-5


def test_inpainting_needs_no_prompt(path_of: Callable[[str], Path], tmp_path: Path) -> None:
    values = np.random.Generator(np.random.PCG64(0)).integers(0, 256, (30, 41, 3), dtype=np.uint8)
    Image.fromarray(values).save(tmp_path / "in.png")
    mask = np.zeros((30, 41), dtype=np.uint8)
    mask[10:20, 8:30] = 255
    Image.fromarray(mask).save(tmp_path / "in_mask.png")
    arguments = ["--indir", str(tmp_path), "--ckpt", str(path_of("ldm_inpainting_big")), "--device", "cpu"]
    assert inpaint.main([*arguments, "--steps", "2", "--out", str(tmp_path / "out.png")]) == 0
    painted = np.asarray(Image.open(tmp_path / "out.png"))
    assert np.array_equal(painted[mask == 0], values[mask == 0])
    assert not np.array_equal(painted, values)


# ---- other autoencoders ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", toy_zoo.SMALL)
@pytest.mark.thin(4)
def test_another_autoencoder_replaces_the_familys(name: str, path_of: Callable[[str], Path], tmp_path: Path) -> None:
    """One of the same kind, and where it is a VQ one, a KL one of such latents: its scale factor is the family's."""
    spec = toy_zoo.small(name).vae
    fields = {key: value for key, value in vars(spec).items() if key != "num_codes"}
    for replacement in (spec, type(toy.KL_F16)(**fields)):
        weights = toy.fill(toy.network(replacement), "another").state_dict()
        save_file(dict(weights), tmp_path / "other.safetensors")
        pipe = ldm_lite.load(path_of(name), device="cpu", vae=tmp_path / "other.safetensors")
        assert pipe.vae.spec == pipe.family.vae == replacement
        assert torch.equal(pipe.vae.decoder.conv_in.weight, weights["decoder.conv_in.weight"])
        scale = random_checkpoint.SCALE_FACTOR if name == "ldm_lsun_churches256" else toy_zoo.small(name).scale_factor
        assert pipe.family.scale_factor == pytest.approx(scale)


@pytest.mark.slow
def test_the_preview_is_of_the_step_and_replaced_by_the_next(small_path: Path, tmp_path: Path) -> None:
    taesd = toy.network(toy.TINY)
    save_file(dict(taesd.state_dict()), tmp_path / "taesd.safetensors")
    arguments = ["a red apple", "--ckpt", str(small_path), "--device", "cpu", "--steps", "2", "--n-samples", "3"]
    arguments += ["--out", str(tmp_path), "--preview", str(tmp_path / "taesd.safetensors"), "--skip-grid"]
    assert txt2img.main(arguments) == 0
    assert texts.load(tmp_path / "preview.png").size == (134, 134)  # of a grid
    assert len(list((tmp_path / "samples").glob("*.png"))) == 3
    # The last one is of the results, through TAESD.
    latents = run_latents(ldm_lite.load(small_path, device="cpu"), "a red apple", steps=2)
    levels = (127.5 * (taesd.decode(latents)[0].clamp(-1, 1) + 1)).round().int().permute(1, 2, 0).numpy()
    first = np.asarray(Image.open(tmp_path / "preview.png").crop((2, 2, 66, 66)), dtype=int)
    assert np.abs(first - levels).max() <= 1


def test_the_preview_of_a_step_is_the_x0_that_it_predicts(small_path: Path, tmp_path: Path) -> None:
    taesd: Any = toy.network(toy.TINY)
    save_file(dict(taesd.state_dict()), tmp_path / "taesd.safetensors")
    states: list[State] = []
    shown: list[Image.Image] = []
    pipe = ldm_lite.load(small_path, device="cpu")
    preview = previews(pipe, str(tmp_path / "taesd.safetensors"), shown.append)

    def on_step(state: State) -> None:
        preview(state)
        states.append(state)

    list(txt2img_task.txt2img(pipe, Txt2imgOptions(prompt="a red apple", steps=3, sampler="ddim"), on_step))
    assert len(shown) == len(states) == 3
    for image, wanted in zip(shown, [states[0].x0, states[1].x0, states[2].latents], strict=True):
        pixels = np.asarray(image, dtype=int)
        assert np.abs(pixels - to_array(taesd.decode(wanted)[0])).max() <= 1


def test_a_preview_that_does_not_fit_is_an_error(
    path_of: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_file(dict(toy.network(toy.TINY).state_dict()), tmp_path / "taesd.safetensors")
    arguments = ["--ckpt", str(path_of("ldm_celeba_ffhq_beds256")), "--device", "cpu", "--out", str(tmp_path)]
    assert txt2img.main([*arguments, "--preview", str(tmp_path / "taesd.safetensors")]) == 2
    assert "does not fit: its latents have 4 channels at 1/8" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["ldm_celeba_ffhq_beds256", "ldm_cin256_v2"])
def test_img2img(name: str, path_of: Callable[[str], Path], prompt_of: dict[str, list[str]], tmp_path: Path) -> None:
    """img2img, through a VQ autoencoder, with whatever the family reads."""
    Image.new("RGB", (32, 32), "orange").save(tmp_path / "in.png")
    arguments = [*prompt_of[name], "--init-img", str(tmp_path / "in.png"), "--ckpt", str(path_of(name))]
    arguments += ["--device", "cpu", "--steps", "2", "--strength", "0.5", "--out", str(tmp_path / "out.png")]
    assert img2img.main(arguments) == 0
    assert texts.load(tmp_path / "out.png").size == (32, 32)
