"""Text to image, as a command and a function: options, results and messages."""

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import ldm_lite
from ldm_lite import Pipeline
from ldm_lite import txt2img as command

APPLE = "a red apple on a blue background"


def border(array: np.ndarray) -> np.ndarray:
    """The median colour of an image's outermost pixels."""
    edge = np.concatenate([array[0], array[-1], array[:, 0], array[:, -1]])
    return np.median(edge, axis=0)


COLOURS = {  # as scripts/render_emoji.py draws them
    "white": (255, 255, 255),
    "black": (0, 0, 0),
    "gray": (128, 128, 128),
    "red": (220, 30, 30),
    "orange": (255, 130, 0),
    "yellow": (255, 235, 40),
    "green": (30, 150, 50),
    "cyan": (60, 215, 225),
    "blue": (30, 70, 220),
    "purple": (130, 30, 170),
    "pink": (255, 150, 200),
    "brown": (120, 65, 20),
}


@pytest.mark.slow
def test_the_background_is_the_one_asked_for(bundled: Pipeline) -> None:
    """Of the twelve colours, the border's is nearest to the caption's."""
    for colour in COLOURS:
        [result] = bundled.txt2img(f"a cat on {colour}", steps=8, output="result")
        distances = {name: np.abs(border(result.array) - value).sum() for name, value in COLOURS.items()}
        assert min(distances, key=distances.__getitem__) == colour


def test_image_k_has_seed_plus_k_in_any_batch(bundled: Pipeline) -> None:
    many = bundled.txt2img(APPLE, steps=3, batch_size=2, n_iter=2, seed=10, sampler="euler_a", output="result")
    assert [result.seed for result in many] == [10, 11, 12, 13]
    for result in many:
        [single] = bundled.txt2img(APPLE, steps=3, seed=result.seed, sampler="euler_a", output="result")
        assert (single.pixels - result.pixels).abs().max() < 1e-3


def test_a1111_syntax_and_long_prompts(bundled: Pipeline) -> None:
    long = APPLE + ", " + "very good " * 60
    results = [
        bundled.txt2img(prompt, steps=4, prompt_syntax=syntax, output="numpy")[0]
        for prompt, syntax in ((APPLE, "plain"), (APPLE, "a1111"), ("a (red:1.5) apple on a blue background", "a1111"))
    ]
    assert np.array_equal(results[0], results[1])
    assert not np.array_equal(results[1], results[2])
    [result] = bundled.txt2img(long, steps=4, prompt_syntax="a1111", clip_skip=2, output="result")
    assert "Clip skip: 2" in result.parameters
    assert "Prompt syntax: a1111" in result.parameters


def test_sizes(bundled: Pipeline) -> None:
    [result] = bundled.txt2img(APPLE, steps=2, height=72, width=40, output="result")
    assert result.image.size == (40, 72)
    with pytest.raises(
        ValueError, match="got `height=70` and `width=41`, expected multiples of 8: use `height=72` and `width=40`"
    ):
        bundled.txt2img(APPLE, height=70, width=41)


@pytest.mark.parametrize("default", [torch.float64, torch.bfloat16, "meta"])
@pytest.mark.parametrize("compat", [False, True])
def test_the_defaults_of_a_process_change_nothing(bundled: Pipeline, default: torch.dtype | str, compat: bool) -> None:
    options = {"prompt_syntax": "a1111", "steps": 2, "sampler": "ddim", "eta": 0.5, "n_iter": 1, "batch_size": 1}
    options |= {"compat": compat, "output": "tensor"}
    [plain] = bundled.txt2img("a (red) apple", **options)
    try:
        if isinstance(default, str):
            torch.set_default_device(default)
        else:
            torch.set_default_dtype(default)
        [pixels] = bundled.txt2img("a (red) apple", **options)
    finally:
        torch.set_default_device(None)
        torch.set_default_dtype(torch.float32)
    assert torch.equal(pixels, plain)


def test_fixed_code_starts_every_batch_alike(bundled: Pipeline) -> None:
    results = bundled.txt2img(APPLE, steps=2, batch_size=2, n_iter=2, fixed_code=True, output="result")
    assert [result.seed for result in results] == [42, 43, 42, 43]
    assert np.array_equal(results[0].array, results[2].array)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "no prompt: give one"),
        ({"prompt": "a", "sampler": "dpm3"}, "unknown sampler 'dpm3': did you mean"),
        ({"prompt": "a", "batch_size": 0}, "got `batch_size` 0, expected 1 to 4096"),
        ({"prompt": "a", "n_iter": -1}, "got `n_iter` -1, expected 1 to"),
        ({"prompt": "a", "seed": -2}, "got `seed` -2, expected -1 to"),
        ({"prompt": "a", "eta": 1.5}, "got `eta` 1.5, expected 0 to 1"),
        (
            {"prompt": "a", "eta": 0.5, "sampler": "plms"},
            "got eta 0.5, but plms has none: leave it out, or use one of ddim",
        ),
        (
            {"prompt": "a", "churn": 1.0},
            "got churn 1.0, but ddim has none: leave it out, or use one of euler, heun, dpm2",
        ),
        ({"prompt": "a", "spacing": "x"}, "unknown spacing 'x': expected one of leading"),
        ({"prompt": "a", "guidance_rescale": 2.0}, "got `guidance_rescale` 2.0, expected 0 to 1"),
        ({"prompt": "a", "dynamic_threshold": -1.0}, "got `dynamic_threshold` -1.0, expected 0 to 1"),
        ({"prompt": "a", "compat": True, "sampler": "euler"}, "`compat` knows the samplers of the original script"),
        ({"prompt": "a", "compat": True, "steps": 3}, "the original scripts fail with 3 steps"),
        ({"prompt": "a", "from_file": "x.txt"}, "got a prompt and `from_file`"),
    ],
)
def test_options_that_do_not_fit(bundled: Pipeline, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        bundled.txt2img(**options)


# ---- compat ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("sampler", "calls"), [("ddim", 4), ("plms", 5)])
def test_compat_is_the_original_s_order_of_noise(bundled: Pipeline, sampler: str, calls: int) -> None:
    """One generator for the job: the first noise of a batch, then one draw a model call, even at eta 0."""
    inputs: list[torch.Tensor] = []
    hook = bundled.unet.register_forward_pre_hook(lambda module, args: inputs.append(args[0][:2].clone()))
    try:
        bundled.txt2img(APPLE, steps=4, sampler=sampler, compat=True, batch_size=2, n_iter=2, scale=2.0)
    finally:
        hook.remove()
    generator = torch.Generator().manual_seed(42)
    for batch in range(2):
        assert torch.equal(inputs[batch * calls], torch.randn(2, 16, 16, 16, generator=generator))
        for _ in range(calls):
            torch.randn(2, 16, 16, 16, generator=generator)


@pytest.mark.slow
def test_compat_has_the_original_s_counts(bundled: Pipeline) -> None:
    assert len(bundled.txt2img(APPLE, steps=12, compat=True)) == 6
    assert {state.num_steps for state in bundled.stream(APPLE, steps=12, compat=True)} == {13}
    assert len(bundled.txt2img(APPLE, steps=2, output="result")) == 1


# ---- the command ----------------------------------------------------------------------------------------------------


def run(arguments: list[str], out: Path) -> int:
    return command.main([*arguments, "--out", os.fspath(out), "--device", "cpu"])


def test_files_are_numbered_and_never_overwritten(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for _ in range(2):
        assert run([APPLE, "--steps", "2", "--n_samples", "2"], tmp_path) == 0
    names = sorted(path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*.png"))
    assert names == ["grid-0000.png", "grid-0001.png", *(f"samples/0000{i}.png" for i in range(4))]
    printed = capsys.readouterr().out.splitlines()
    assert sorted(Path(line).relative_to(tmp_path).as_posix() for line in printed) == names
    assert not list(tmp_path.rglob(".*")), "temporary files were left"


def test_a_file_name_as_out(tmp_path: Path) -> None:
    for _ in range(2):
        assert run([APPLE, "--steps", "2"], tmp_path / "apple.png") == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["apple-1.png", "apple.png"]


def test_the_png_says_how_it_was_made(tmp_path: Path) -> None:
    arguments = ["été 🍎", "--negative-prompt", "blue", "--steps", "3", "--seed", "5", "--sampler", "DPM++ 2M Karras"]
    assert run([*arguments, "--n_iter", "2", "--scale", "3.5"], tmp_path) == 0
    with Image.open(tmp_path / "samples" / "00001.png") as image:
        lines = image.info["parameters"].splitlines()
    assert lines[0] == "été 🍎"
    assert lines[1] == "Negative prompt: blue"
    start = "Steps: 3, Sampler: DPM++ 2M, Schedule type: Karras, CFG scale: 3.5, Seed: 6, Size: 128x128, Model: emoji"
    assert lines[2].startswith(start)


def test_the_original_s_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = "--plms --ddim_steps 4 --n_iter 1 --n_samples 2 --scale 5.0 --seed 3 --H 64 --W 64 --skip_grid --fixed_code"
    arguments = ["--prompt", APPLE, *line.split(), "--precision", "full", "--C", "16", "--f", "8", "--n_rows", "2"]
    assert run([*arguments, "--config", "configs/stable-diffusion/v1-inference.yaml"], tmp_path) == 0
    assert len(list(tmp_path.rglob("*.png"))) == 2
    assert "--config is not needed" in capsys.readouterr().err
    assert run([*arguments, "--C", "4"], tmp_path) == 2
    assert "got --C 4, but this checkpoint has 16" in capsys.readouterr().err
    assert run([APPLE, "--laion400m"], tmp_path) == 2


def test_prompts_from_a_file(bundled: Pipeline, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "prompts.txt").write_text("\ufeffa red apple\n\nrocket\r\na cat\n", encoding="utf-8")
    arguments = ["--from-file", os.fspath(tmp_path / "prompts.txt"), "--steps", "2", "--n_samples", "2", "--skip_grid"]
    assert run(arguments, tmp_path / "out") == 0
    prompts = []
    for path in sorted((tmp_path / "out").rglob("*.png")):
        with Image.open(path) as image:
            prompts.append(image.info["parameters"].splitlines()[0])
    assert prompts == ["a red apple", "rocket", "a cat"]
    many = {"from_file": tmp_path / "prompts.txt", "compat": True, "n_iter": 1, "steps": 2, "height": 16, "width": 16}
    results = bundled.txt2img(**many, output="result")
    assert [result.prompt for result in results] == ["a red apple", "", "rocket", "a cat"]
    capsys.readouterr()
    for content, message in ((b"", "holds no prompt"), (b"\xff\xfe\x00", "is not text in UTF-8")):
        (tmp_path / "bad.txt").write_bytes(content)
        assert run(["--from-file", os.fspath(tmp_path / "bad.txt")], tmp_path / "bad") == 2
        assert message in capsys.readouterr().err
    assert run(["--from-file", os.fspath(tmp_path / "none.txt")], tmp_path / "bad") == 2
    assert "No such file" in capsys.readouterr().err


def test_dropped_words_are_listed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["word " * 38 + "quite lost", "--steps", "1", "--n_iter", "3"], tmp_path) == 0
    assert capsys.readouterr().err.count("warning: the prompt is too long, dropped: quite lost") == 1


def test_skip_save_and_skip_grid(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for more in (["--n_samples", "2", "--skip_grid"], []):
        assert run([APPLE, "--steps", "1", "--skip_save", *more], tmp_path / "none") == 0
        assert not (tmp_path / "none").exists()
        shown = capsys.readouterr().err
        assert "warning: --skip-save without a grid of several images: nothing will be saved" in shown


def test_where_nothing_can_be_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    assert run([APPLE, "--steps", "1"], tmp_path / "file" / "deeper") == 2
    assert "cannot write to" in capsys.readouterr().err


def test_a_lora_in_the_prompt_is_no_lora_here(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run([APPLE + " <lora:sketch:0.8>", "--steps", "1", "--n_iter", "2"], tmp_path) == 0
    line = "<lora:sketch:0.8> in the prompt is read as words: leave it out, and give --lora FILE:WEIGHT"
    assert capsys.readouterr().err.count(line) == 1


@pytest.mark.slow
def test_a_full_disk_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run([APPLE, "--steps", "1"], tmp_path) == 0
    limits = "import resource, signal; signal.signal(signal.SIGXFSZ, signal.SIG_IGN)"
    code = (
        f"{limits}; resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000)); import sys; from ldm_lite import txt2img;"
        f"sys.exit(txt2img.main([{APPLE!r}, '--steps', '1', '--device', 'cpu', '--out', {os.fspath(tmp_path)!r}]))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode in (1, 2)
    assert done.stderr.splitlines()[-1].startswith("error: ")
    assert "Traceback" not in done.stderr
    assert [path.name for path in (tmp_path / "samples").iterdir()] == ["00000.png"]


@pytest.mark.slow
def test_ctrl_c_keeps_what_is_finished(tmp_path: Path) -> None:
    arguments = [APPLE, "--steps", "10", "--n_iter", "1000", "--device", "cpu", "--out", os.fspath(tmp_path)]
    process = subprocess.Popen(
        [sys.executable, "-m", "ldm_lite.txt2img", *arguments],
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a shell's background jobs ignore it
    )
    assert process.stdout is not None
    for _ in range(2):
        process.stdout.readline()
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=300)
    assert process.returncode == 130
    assert "interrupted: finished images are saved" in errors
    assert "Traceback" not in errors
    saved = sorted((tmp_path / "samples").iterdir())
    assert len(saved) >= 2
    for path in saved:
        with Image.open(path) as image:
            image.load()


def test_mistakes_are_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (["--no-such-flag"], [APPLE, "--prompt", "b"], [APPLE, "--steps", "many"], [APPLE, "--ema", "x"]):
        with pytest.raises(SystemExit) as stop:
            command.main(arguments)
        assert stop.value.code == 2
        assert len(capsys.readouterr().err.splitlines()) == 1
    assert command.main([APPLE, "--metadata", "x"]) == 2


@pytest.mark.slow
def test_the_list_of_commands() -> None:
    text = subprocess.run([sys.executable, "-m", "ldm_lite"], capture_output=True, text=True, check=True).stdout
    for word in (ldm_lite.__version__, "txt2img", torch.__version__.partition("+")[0], "cpu"):
        assert word in text


def test_debug_shows_the_traceback() -> None:
    with pytest.raises(ValueError, match="no prompt"):
        command.main(["--debug"])
