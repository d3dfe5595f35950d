"""DeepFloyd IF's stages: their files, whole runs against the original, the command, and that each stage is freed."""

import gc
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import random_checkpoint
import texts
import torch
import toy
import toy_zoo
from PIL import Image
from safetensors.torch import save_file
from torch import Tensor

import ldm_lite
from ldm_lite import Pipeline
from ldm_lite.cascade import main
from ldm_lite.checkpoint.loading import load_model
from ldm_lite.checkpoint.model import CheckpointModel
from ldm_lite.cli.command_options import CascadeOptions as Options
from ldm_lite.cli.command_options import StageOptions
from ldm_lite.cli.options import LoadOptions
from ldm_lite.cli.task_options import UpscaleOptions
from ldm_lite.core.denoise import State
from ldm_lite.core.tasks import noise_of
from ldm_lite.families.deepfloyd import IF_I_XL, IF_II_L
from ldm_lite.image import to_pil
from ldm_lite.models.pixels import Pixels, PixelSpec
from ldm_lite.models.t5 import T5Encoder
from ldm_lite.models.unet_if import UNetIF
from ldm_lite.tasks import cascade as cascade_task
from ldm_lite.tasks.cascade import cascade, encode_t5
from ldm_lite.tasks.upscale import upscale

GOLDEN = np.load(Path(__file__).parent / "data" / "if.npz")
CONTEXT, UNCOND = toy.normal(21, 1, 7, 192), toy.normal(22, 1, 7, 192)
SMALL = Options(  # the upscaler in miniature knows 50 levels
    height=8, width=8, steps="4,3", sampler="ddpm_respaced", noise_level_3=30
)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Both stages in miniature, as the originals' bare torch files."""
    folder = tmp_path_factory.mktemp("if")
    paths = {name: folder / f"{name}.bin" for name in toy.CASCADE}
    for name, path in paths.items():
        torch.save(toy.network(toy.CASCADE[name]).state_dict(), path)
    np.save(folder / "context.npy", CONTEXT.numpy())
    save_file({"embeds": UNCOND[0]}, folder / "uncond.safetensors")
    return paths


@pytest.fixture(scope="module")
def stages(files: dict[str, Path]) -> list[Pipeline]:
    return [ldm_lite.load(path, device="cpu") for path in files.values()]


@pytest.fixture(scope="module")
def upscaler(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Stable Diffusion's x4 upscaler in miniature."""
    path = tmp_path_factory.mktemp("x4") / "x4.safetensors"
    random_checkpoint.write(path, toy_zoo.small("x4"))
    return path


def command(files: dict[str, Path], out: Path, *flags: object) -> int:
    """Run the command with ready embeddings and small images; return its exit status."""
    folder = files["if_I"].parent
    options = {"--stage-1": files["if_I"], "--stage-2": files["if_II"], "--H": 8, "--W": 8, "--steps": "4,3"}
    options |= {"--prompt-embeds": folder / "context.npy", "--negative-embeds": folder / "uncond.safetensors"}
    options |= {"--sampler": "ddpm_respaced", "--device": "cpu", "--out": out}
    options |= dict(zip(flags[::2], flags[1::2], strict=True))
    return main([str(part) for flag, value in options.items() if value is not None for part in (flag, value)])


def refused(capsys: pytest.CaptureFixture[str], *args: object) -> str:
    """The one line with which the command ends."""
    try:
        status: object = command(*args)  # type: ignore[arg-type]
    except SystemExit as stop:  # a value is refused before anything is loaded
        status = stop.code
    assert status == 2
    return capsys.readouterr().err.splitlines()[-1]


# ---- files ----------------------------------------------------------------------------------------------------------


def test_stages_are_known_by_their_shapes(stages: list[Pipeline]) -> None:
    assert [stage.family.unet for stage in stages] == list(toy.CASCADE.values())
    assert [stage.family.title for stage in stages] == ["DeepFloyd IF, stage I", "DeepFloyd IF, stage II"]
    assert [(f.scale, f.steps, f.threshold) for f in (stage.family for stage in stages)] == [
        (7.0, 150, (0.95, 1.5)),
        (4.0, 50, (0.95, 1.0)),
    ]
    assert all(stage.schedule.alpha_bar[250] == pytest.approx(0.84588799) for stage in stages)


def test_the_released_stages_are_rows() -> None:
    from ldm_lite.zoo.families import FAMILY_ROWS

    assert (FAMILY_ROWS["if_I"].unet, FAMILY_ROWS["if_II"].unet) == (IF_I_XL, IF_II_L)


def test_other_commands_name_the_right_one(files: dict[str, Path], capsys: pytest.CaptureFixture[str]) -> None:
    from ldm_lite.txt2img import main as txt2img

    assert txt2img(["a cat", "--ckpt", str(files["if_I"]), "--device", "cpu"]) == 2
    assert "run python -m ldm_lite.cascade" in capsys.readouterr().err


# ---- runs -----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_both_stages_equal_the_original(stages: list[Pipeline]) -> None:
    """In float32 the first step, at a signal of 5e-5, leaves networks of random weights two or three digits."""
    [(first, seed)] = cascade(stages[:1], SMALL, CONTEXT, UNCOND)
    [(second, _)] = cascade(stages, SMALL, CONTEXT, UNCOND)
    assert seed == 42
    assert toy.relative_error(first[None], GOLDEN["cascade.if_I"]) < 1e-2
    assert toy.relative_error(second[None], GOLDEN["cascade.if_II"]) < 1e-2


@pytest.mark.slow
def test_both_stages_equal_the_original_in_float64(stages: list[Pipeline]) -> None:
    """With what is float32 everywhere, whatever the networks' dtype, in float64 too."""
    double = [
        stage.with_networks(unet=toy.network(spec).double(), vae=Pixels(PixelSpec()).double())
        for stage, spec in zip(stages, toy.CASCADE.values(), strict=True)
    ]
    single = torch.float32

    def drawn_in_float32(*arguments: Any) -> Any:
        draw = noise_of(*arguments)

        def noise() -> Tensor:
            with mock.patch.object(torch, "float32", single):
                return draw()

        return noise

    cast = mock.patch.object(torch.Tensor, "float", torch.Tensor.double)
    noises = mock.patch("ldm_lite.tasks.cascade.noise_of", drawn_in_float32)
    with mock.patch.object(torch, "float32", torch.float64), cast, noises:
        [(first, _)] = cascade(double[:1], SMALL, CONTEXT, UNCOND)
        [(second, _)] = cascade(double, SMALL, CONTEXT, UNCOND)
    assert toy.relative_error(first[None], GOLDEN["cascade.if_I"]) < 1e-6
    assert toy.relative_error(second[None], GOLDEN["cascade.if_II"]) < 1e-6


@pytest.mark.slow
def test_the_third_stage_upscales_with_the_prompt_and_the_seed(stages: list[Pipeline], upscaler: Path) -> None:
    """What the command `upscale` makes of the second stage's images; these go through 8 bits there."""
    x4 = ldm_lite.load(upscaler, device="cpu")
    options = replace(SMALL, prompt="a red apple", steps="2,1,1", scale="7,4,3", n_iter=2, seed=5, tile=24)
    third = list(cascade([*stages, x4], options, CONTEXT, UNCOND))
    two = replace(options, steps="2,1", scale="7,4")
    second = [to_pil(image) for image, _ in cascade(stages, two, CONTEXT, UNCOND)]
    job = UpscaleOptions(prompt="a red apple", negative_prompt="", noise_level=30, steps=1, scale=3, seed=5, tile=24)
    wanted = list(upscale(x4, replace(job, init_img=second)))
    assert [seed for _, seed in third] == [result.seed for result in wanted] == [5, 6]
    for (image, _), result in zip(third, wanted, strict=True):
        assert image.shape == (3, 128, 128)
        assert toy.relative_error(image, result.pixels.numpy()) < 0.02


@pytest.mark.slow
def test_two_values_are_not_the_third_stages(stages: list[Pipeline], upscaler: Path) -> None:
    """Nor is one; it has the checkpoint's own."""
    x4 = ldm_lite.load(upscaler, device="cpu")

    def stop(state: State) -> None:
        if state.latents.shape[1] == 4:
            raise InterruptedError(f"steps: {state.num_steps}")

    for steps in ("3", "4,3"):
        with pytest.raises(InterruptedError, match=f"steps: {x4.family.steps}"):
            list(cascade([*stages, x4], replace(SMALL, steps=steps), CONTEXT, UNCOND, on_step=stop))


@pytest.mark.slow
def test_an_image_depends_on_its_seed_alone(stages: list[Pipeline]) -> None:
    options = replace(SMALL, width=16, steps="2", batch_size=2, n_iter=2, seed=7)
    many = list(cascade(stages, options, CONTEXT, UNCOND))
    assert [seed for _, seed in many] == [7, 8, 9, 10]
    [(alone, _)] = cascade(stages, replace(options, batch_size=1, n_iter=1, seed=9), CONTEXT, UNCOND)
    assert alone.shape == (3, 32, 64)
    assert toy.relative_error(alone, many[2][0].numpy()) < 1e-2


@pytest.mark.slow
def test_a_stage_is_loaded_in_its_turn_and_freed_before_the_next(files: dict[str, Path], upscaler: Path) -> None:
    alive: list[weakref.ref[UNetIF]] = []

    def load(*args: Any) -> CheckpointModel:
        gc.collect()
        assert all(ref() is None for ref in alive)
        model = load_model(*args)
        alive.append(weakref.ref(model.unet))  # type: ignore[arg-type]
        return model

    stages = [LoadOptions(ckpt=path, device="cpu") for path in (*files.values(), upscaler)]
    with mock.patch.object(cascade_task, "load_model", load):
        assert len(list(cascade(stages, replace(SMALL, steps="1,1,1"), CONTEXT, UNCOND))) == 1
    gc.collect()
    assert [ref() for ref in alive] == [None, None, None]


@pytest.mark.slow
def test_the_small_images_noise_matters(files: dict[str, Path], tmp_path: Path) -> None:
    images = []
    for level in ("0", "0.5"):
        assert command(files, tmp_path / f"{level}.png", "--noise-level", level) == 0
        images.append(np.asarray(Image.open(tmp_path / f"{level}.png"), dtype=float))
    assert toy.relative_error(images[0], images[1]) > 1e-2


# ---- what does not fit ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--H", 12), "got --height 12 and --width 8, expected multiples of 8"),
        (("--steps", "0"), "got --steps 0, expected 1 to 1000"),
        (("--scale", "7,x"), "got --scale '7,x', expected numbers separated by commas"),
        (("--sampler", "x"), "unknown sampler 'x'"),
        (("--steps", "1,2,3"), "got --steps '1,2,3', expected one value, or one for each of 2 stages"),
        (("--noise-level", 1.0), "got --noise-level 1.0, expected 0 to 0.999"),
        (("--noise-level-3", 351), "got --noise-level-3 351, expected 0 to 350"),
        (("--tile", 4), "got --tile 4, expected 8 to"),
        (("--sampler", "ddpm_smart27", "--steps", "5"), "the spacing smart27 has 27: leave steps out"),
    ],
)
def test_wrong_options_are_one_line(
    files: dict[str, Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    flags: tuple[object, ...],
    message: str,
) -> None:
    assert message in refused(capsys, files, tmp_path / "a.png", *flags)


def test_stages_in_the_wrong_order_are_refused(
    files: dict[str, Path], small_path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for stages, message in (
        (("--stage-1", small_path), "is small SD1, which cannot be stage 1 of a cascade"),
        (
            ("--stage-1", files["if_II"], "--stage-2", files["if_I"]),
            "is DeepFloyd IF, stage II, which cannot be stage 1 of a cascade",
        ),
    ):
        assert message in refused(capsys, files, tmp_path / "a.png", *stages)


@pytest.mark.slow
def test_the_upscaler_may_be_the_last_of_two_stages_and_not_the_first(
    files: dict[str, Path], upscaler: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, x4 = (ldm_lite.load(path, device="cpu") for path in (files["if_I"], upscaler))
    [(image, _)] = cascade([first, x4], replace(SMALL, steps="1,1"), CONTEXT, UNCOND)
    assert image.shape == (3, 4 * SMALL.height, 4 * SMALL.width)
    assert "cannot be stage 1 of a cascade" in refused(capsys, files, tmp_path / "a.png", "--stage-1", upscaler)


# ---- prompts --------------------------------------------------------------------------------------------------------


def test_embeddings_are_read_from_any_kind_of_file(
    files: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    np.save(tmp_path / "a.npy", CONTEXT.numpy())
    torch.save(CONTEXT[0].half(), tmp_path / "b.pt")
    save_file({"prompt_embeds": CONTEXT}, tmp_path / "c.safetensors")
    images = {}
    for name in ("a.npy", "b.pt", "c.safetensors"):
        out = tmp_path / f"{name}.png"
        arguments = ("--stage-2", None, "--steps", "2", "--prompt-embeds", tmp_path / name)
        assert command(files, out, *arguments) == 0
        images[name] = np.asarray(Image.open(out), dtype=float)
    assert np.array_equal(images["a.npy"], images["c.safetensors"])
    assert toy.relative_error(images["b.pt"], images["a.npy"]) < 0.05
    np.save(tmp_path / "d.npy", np.zeros(3))
    message = "holds a tensor of shape (3,), expected (T, D) or (N, T, D)"
    assert message in refused(capsys, files, tmp_path / "d.png", "--prompt-embeds", tmp_path / "d.npy")


@pytest.mark.parametrize("suffix", [".npy", ".pt", ".bin", ".safetensors"])
def test_what_is_no_file_of_embeddings_is_one_line(
    files: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str], suffix: str
) -> None:
    for content in (b"", b"junk" * 10, b"PK\x03\x04", b"\x93NUMPY"):
        (tmp_path / f"e{suffix}").write_bytes(content)
        assert f"e{suffix}: " in refused(capsys, files, tmp_path / "a.png", "--prompt-embeds", tmp_path / f"e{suffix}")
    np.save(tmp_path / "words.npy", np.array(["a"]))
    said = refused(capsys, files, tmp_path / "a.png", "--prompt-embeds", tmp_path / "words.npy")
    assert "holds <U1, expected floats" in said


def test_t5_reads_prompts_from_a_file_in_parts(tmp_path: Path) -> None:
    """The same as the encoder itself, with padding masked."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {"<pad>": 0, "</s>": 1, "<unk>": 2, "▁a": 3, "▁red": 4, "▁apple": 5}
    tokenizer = Tokenizer(models.Unigram([(word, -float(i)) for word, i in words.items()], unk_id=2))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    encoder = toy.network(toy.T5)
    weights = encoder.state_dict()
    names = sorted(weights)
    weights["encoder.embed_tokens.weight"] = weights["shared.weight"]  # its second name, as in released files
    torch.save({name: weights[name] for name in names[:5]}, tmp_path / "1.bin")
    torch.save({name: weights[name] for name in (*names[5:], "encoder.embed_tokens.weight")}, tmp_path / "2.bin")
    parts = (str(tmp_path / "1.bin"), str(tmp_path / "2.bin"))
    context = encode_t5(["A red apple", ""], StageOptions(t5=parts, device="cpu"))
    assert context.shape == (2, 77, toy.T5.width)
    ids = torch.zeros(2, 77, dtype=torch.long)
    ids[0, :4], ids[1, 0] = torch.tensor([3, 4, 5, 1]), 1
    # max_distance, which weights do not tell, is 128 in released encoders; the miniature has 12.
    released = T5Encoder(replace(toy.T5, max_distance=128)).eval()
    released.load_state_dict(encoder.state_dict())
    torch.testing.assert_close(context, released(ids, ids != 0), rtol=1e-4, atol=1e-5)
    with pytest.raises(ValueError, match="needs all of them"):
        encode_t5(["a"], StageOptions(t5=parts[1:], device="cpu"))


# ---- the command ----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_command_makes_an_image_from_ready_embeddings(
    files: dict[str, Path],
    stages: list[Pipeline],
    upscaler: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = files["if_I"].parent
    arguments = ["--stage-1", str(files["if_I"]), "--stage-2", str(files["if_II"]), "--device", "cpu", "--H", "8"]
    arguments += ["--W", "8", "--steps", "4,3", "--sampler", "ddpm_respaced", "--out", str(tmp_path / "a.png")]
    embeds = ["--prompt-embeds", str(folder / "context.npy"), "--negative-embeds", str(folder / "uncond.safetensors")]
    assert main([*arguments, *embeds]) == 0, capsys.readouterr().err
    from ldm_lite.image import to_array

    [(wanted, _)] = cascade(stages, SMALL, CONTEXT, UNCOND)
    assert np.array_equal(np.asarray(Image.open(tmp_path / "a.png")), to_array(wanted))
    third = ["--stage-3", str(upscaler), "--steps", "4,3,1", "--noise-level-3", "30", "--out", str(tmp_path / "b.png")]
    assert main([*arguments, *embeds, *third]) == 0
    assert texts.load(tmp_path / "b.png").size == (128, 128)
    assert main([*arguments[:2], *arguments[4:], *embeds, *third]) == 2
    assert "got --stage-3 without --stage-2" in capsys.readouterr().err
    assert main(arguments) == 2
    assert "no prompt" in capsys.readouterr().err
    assert main([*arguments, "a red apple"]) == 2
    assert "no T5 for the prompt" in capsys.readouterr().err
