"""What all commands share: their flags, their help, and their messages, in which options are flags."""

import ast
import contextlib
import dataclasses
import importlib
import logging
import math
import os
import re
import subprocess
import sys
import typing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import ldm_lite
from ldm_lite import __main__ as package
from ldm_lite import txt2img
from ldm_lite.__main__ import COMMANDS
from ldm_lite.batch.options import BatchOptions
from ldm_lite.bench.options import BenchOptions as Bench
from ldm_lite.cli import console, flags
from ldm_lite.cli.command_options import CascadeOptions as Cascade
from ldm_lite.cli.command_options import ExportOptions as Export
from ldm_lite.cli.command_options import ReconstructOptions as Reconstruct
from ldm_lite.cli.command_options import StageOptions
from ldm_lite.cli.command_options import VerifyOptions as Verify
from ldm_lite.cli.console import as_flags
from ldm_lite.cli.options import CheckedOptions, LoadOptions, SaveOptions, numbers, words
from ldm_lite.cli.task_options import Img2imgOptions as Img2img
from ldm_lite.cli.task_options import InpaintOptions as Inpaint
from ldm_lite.cli.task_options import Txt2imgOptions as Options
from ldm_lite.cli.task_options import UpscaleOptions as Upscale
from ldm_lite.commands import TABLE
from ldm_lite.core.declare import FINITE, WHY_SCALES
from ldm_lite.runtime.tiling import out_of_memory
from ldm_lite.serve.options import ServeOptions
from ldm_lite.train.options import TrainOptions as Train


def test_out_of_memory_names_the_next_cheaper_option(capsys: pytest.CaptureFixture[str]) -> None:
    """Following the advice leads through all options, each once, to a smaller image."""

    def advice(*options: object) -> str:
        def fails() -> None:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.")

        assert console.run(fails, options) == 1
        return capsys.readouterr().err.strip().removeprefix("error: out of memory: try ")

    options, load, seen = Options(prompt="a cat", batch_size=4), LoadOptions(dtype="fp32"), []
    taken = {"--vae-tiling": {"vae_tiling": True}, "--offload model": {"offload": "model"}}
    taken |= {"--offload sequential": {"offload": "sequential"}, "--storage int8": {"storage": "int8"}}
    taken |= {"--dtype fp16": {"dtype": "fp16"}}
    while (step := advice(options, load)) != "a smaller image":
        assert step not in seen
        seen.append(step)
        if step in taken:
            load = replace(load, **taken[step])
        else:
            options = replace(options, batch_size=1)
    assert seen == ["--batch-size 1", *[step for step in seen if step in taken]]
    assert set(taken) <= set(seen)
    assert seen.index("--offload model") < seen.index("--storage int8") < seen.index("--offload sequential")
    assert advice(Upscale(batch_size=3), LoadOptions(vae_tiling=True)) == "--tile 64"
    assert advice(Cascade(batch_size=2), StageOptions(dtype="fp32"), SaveOptions()) == "--batch-size 1"
    assert advice(Cascade(), StageOptions(stage_3="x4.ckpt"), SaveOptions()) == "--tile 64"
    assert advice(Cascade(), StageOptions(dtype="fp32"), SaveOptions()) == "--dtype fp16"
    assert advice(Bench()) == advice(Export(batches="1,2")) == "--batches 1"
    assert advice(Export()) == advice(Reconstruct(), SaveOptions()) == "a smaller image"
    assert advice(Train(), LoadOptions()) == "--checkpointing"
    assert advice(Train(checkpointing=True), LoadOptions()) == "a smaller --batch-size, with --accumulate"


@pytest.mark.parametrize(
    ("message", "step"),
    [
        ("[enforce fail at alloc_cpu.cpp:118] err == 0. DefaultCPUAllocator: can't allocate memory", "--storage int8"),
        ("CUDA error: out of memory", "--vae-tiling"),
        ("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`", "--vae-tiling"),
    ],
)
def test_running_out_of_memory_outside_of_pytorchs_own_allocator(
    message: str, step: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """On a CPU nothing is named that changes nothing there."""

    def fails() -> None:
        raise RuntimeError(message)

    assert out_of_memory(RuntimeError(message))
    assert console.run(fails, (Options(), LoadOptions())) == 1
    assert capsys.readouterr().err == f"error: out of memory: try {step}\n"


@pytest.mark.parametrize(
    ("flag", "wanted"),
    [("--n_smaples", "did you mean --n-samples? (see"), ("--xyzzy", "error: unknown flag --xyzzy (see --help-all)")],
)
def test_an_unknown_flag_names_the_nearest(flag: str, wanted: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as status:
        flags.parse(["an apple", flag, "3"], "txt2img", "", (Options,))
    assert status.value.code == 2
    error = capsys.readouterr().err
    assert wanted in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("argv", "wanted"),
    [
        (["--steps", "x"], "got --steps 'x', expected a whole number"),
        (["--scale={0}"], "got --scale '{0}', expected a number"),
        (["--steps"], "--steps has no value: give one"),
        (["--skip-save=1"], "--skip-save takes no value: leave out what follows it"),
        (["--ema", "maybe"], "got --ema 'maybe', expected one of auto, yes, no, original"),
        (["--precision", "half"], "--precision is full or autocast"),
        (["--C", "four"], "got --C 'four', expected a whole number"),
        (["--negative", "blue"], "unknown flag --negative: use --negative-prompt"),
        (["-steps", "5"], "unknown flag -steps: use --steps"),
        (["--t5", "file"], "unknown flag --t5: it belongs to python -m ldm_lite.cascade"),
        (["--scale", "-3"], f"got --scale -3.0, expected 0 to 100 ({WHY_SCALES})"),
        (["--scale", "1e9"], f"got --scale 1000000000.0, expected 0 to 100 ({WHY_SCALES})"),
        (["--scale", "-1e9"], f"got --scale -1000000000.0, expected 0 to 100 ({WHY_SCALES})"),
        (["--seed", "-2"], f"got --seed -2, expected -1 to {2**64 - 1}"),
    ],
)
def test_what_is_wrong_with_a_flag_is_said_in_our_words(
    argv: list[str], wanted: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as status:
        txt2img.main(["an apple", *argv])
    assert status.value.code == 2
    assert capsys.readouterr().err == f"error: {wanted} (see --help)\n"


def test_a_seed_of_minus_one_is_random() -> None:
    """As in A1111, in its API, and on the page; each of a list, and whatever the task."""
    seeds = {Options("a", seed=-1).seed for _ in range(4)} | {*Img2img("a", seed=[-1, -1]).seed}  # type: ignore[misc]
    assert len(seeds) > 4
    assert all(isinstance(seed, int) and 0 <= seed < 2**32 for seed in seeds)
    for seed in (np.int64(-1), torch.tensor(-1)):
        assert 0 <= Options("a", seed=seed).seed < 2**32  # type: ignore[arg-type,operator]
    assert all(0 <= seed < 2**32 for seed in Options("a", seed=np.array([-1, 3])).seed)  # type: ignore[arg-type,union-attr]
    options = Options("a", seed=[5, -1])
    assert options.seed[0] == 5  # type: ignore[index]
    assert replace(options, steps=3).seed == options.seed


def test_values_with_commas_between_them() -> None:
    assert (words("sampler", "ddim, ,plms,"), words("sampler", "")) == (("ddim", "plms"), ())
    assert (numbers("steps", "7, 4"), numbers("steps", "")) == ((7, 4), ())
    with pytest.raises(ValueError, match="got `steps` '7,,4', expected whole numbers separated by commas"):
        numbers("steps", "7,,4")


def test_python_refuses_what_is_no_choice_of_an_option() -> None:
    with pytest.raises(ValueError, match=r"^got `resize` 'squash', expected one of crop, fit, stretch$"):
        Img2img("a", resize="squash")


@pytest.mark.parametrize("group", [Options, Img2img, Inpaint, Upscale, Cascade, Train, Bench, Export, SaveOptions])
def test_every_number_has_a_range(group: type[CheckedOptions], capsys: pytest.CaptureFixture[str]) -> None:
    hints = typing.get_type_hints(group)
    numbers = [field for field in dataclasses.fields(group) if {int, float} & {*typing.get_args(hints[field.name])}]
    numbers += [field for field in dataclasses.fields(group) if hints[field.name] in (int, float)]
    assert numbers
    numbers = [field for field in numbers if not field.metadata["help"].startswith("not used")]
    for field in numbers:
        least, most = field.metadata["within"]
        for value in (least - 1, most + 1, math.nan, math.inf, -math.inf, 10**400):
            if not (value == 10**400 and most == math.inf):
                with pytest.raises(
                    (ValueError, TypeError), match=rf"^got `{field.name}` .*, expected "
                ):  # NaN is no whole number
                    group(**{field.name: value})
    name = next(field.name for field in numbers if field.metadata["within"] != FINITE)
    with pytest.raises(SystemExit):
        flags.parse([f"--{name}=-1"], "train", "", (group,))
    assert capsys.readouterr().err.startswith(f"error: got --{name.replace('_', '-')} -1")


def test_words_beside_the_prompt_and_empty_values(capsys: pytest.CaptureFixture[str]) -> None:
    """What is left of a prompt without quotes, and of a shell's variable that is not set."""
    for argv, wanted in (
        (["a", "red", "apple"], "error: got words after the prompt, 'red apple': put it in quotes (see --help)"),
        (["--init-img", ""], "error: --init-img: got an empty text: give a value, or leave the flag out"),
        (["--ckpt", ""], "error: --ckpt: got an empty text: give a value, or leave the flag out"),
    ):
        with pytest.raises(SystemExit):
            flags.parse(argv, "img2img", "", (Img2img, LoadOptions))
        error = capsys.readouterr().err
        assert error.startswith(wanted)
        assert error.count("\n") == 1
    [options], _ = flags.parse(["", "--negative-prompt", ""], "img2img", "", (Img2img,))
    assert options.prompt == options.negative_prompt == ""


# ---- messages -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("message", "wanted"),
    [
        ("leave out `vae_tiling`", "leave out --vae-tiling"),
        ("give `vae=FILE`, or `text_encoder=FILE`", "give --vae FILE, or --text-encoder FILE"),
        ('try `dtype="fp32"`', "try --dtype fp32"),
        ("try `prediction='v'`", "try --prediction v"),
        ("take `vae_tiling=True`", "take --vae-tiling"),
        ("add `metadata=family=sdxl_turbo`", "add --metadata family=sdxl_turbo"),
        ("got `steps` 0, expected 1 to 1000", "got --steps 0, expected 1 to 1000"),
        ("run `git lfs pull`; log in with `hf auth login`", "run `git lfs pull`; log in with `hf auth login`"),
        ("run `python -m ldm_lite.export`", "run `python -m ldm_lite.export`"),
        ("out`put and `", "out`put and `"),
        ("nothing to translate: a_b=c", "nothing to translate: a_b=c"),
    ],
)
def test_messages_of_python_become_those_of_the_command_line(message: str, wanted: str) -> None:
    assert as_flags(message) == wanted


def test_what_a_message_quotes_is_cut_in_the_middle(capsys: pytest.CaptureFixture[str]) -> None:
    def body() -> None:
        logging.getLogger("ldm_lite").warning("%s: is odd", "x" * 10**6)
        raise ValueError(f"got `sampler` {'y' * 10**6}, expected ddim")

    assert console.run(body) == 2
    logged, error = capsys.readouterr().err.splitlines()
    assert re.fullmatch(r"warning: x+ \.\.\. x+: is odd", logged)
    assert re.fullmatch(r"error: got --sampler y+ \.\.\. y+, expected ddim", error)
    assert len(logged) < 2100
    assert len(error) < 2100


@pytest.mark.parametrize("group", [Options, Img2img, LoadOptions, SaveOptions])
def test_texts_of_options_are_limited(group: type[CheckedOptions]) -> None:
    """Before they are parsed and quoted: a message of megabytes helps nobody, in Python and from the server either."""
    for field in dataclasses.fields(group):
        for value in ("x" * 10**6, ("1", "x" * 10**6), ["x" * 10**6]):
            message = ""
            try:
                group(**{field.name: value})
            except (ValueError, TypeError) as error:
                message = str(error)
            assert len(message) < 300, field.name
            assert message or "prompt" in field.name, field.name


def test_errors_and_log_records_of_a_command_name_flags(capsys: pytest.CaptureFixture[str]) -> None:
    def body() -> None:
        logging.getLogger("ldm_lite").info("loaded; `prediction` overrides that")
        logging.getLogger("ldm_lite").warning("add `metadata=family=%s`", "sd1")
        logging.getLogger("ldm_lite").warning("add `metadata=family=%s`", "sd1")
        raise ValueError("no mask: give one with `mask=FILE`, or `extend=left=128`")

    assert console.run(body) == 2
    assert capsys.readouterr().err.splitlines() == [
        "loaded; --prediction overrides that",
        "warning: add --metadata family=sd1",
        "error: no mask: give one with --mask FILE, or --extend left=128",
    ]


def messages(tree: ast.AST) -> list[str]:
    """The texts in a module that are raised or logged, with {} for what is filled in."""
    strings = []
    for node in ast.walk(tree):
        is_log = isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
        is_log = is_log and ast.unparse(node.func) in ("log.info", "log.warning")
        if isinstance(node, ast.Raise) or is_log:
            texts = (part.value for part in ast.walk(node) if isinstance(part, ast.Constant))
            strings += [text for text in texts if isinstance(text, str)]
    return strings


def test_an_option_that_a_message_names_exists() -> None:
    """And below the commands no message names a flag."""
    groups: tuple[type, ...] = (Options, Img2img, Inpaint, Upscale, Cascade, StageOptions, LoadOptions, SaveOptions)
    groups = (*groups, Export, Train, Bench, Reconstruct, Verify, ServeOptions, BatchOptions)
    names = {field.name for group in groups for field in dataclasses.fields(group)}
    names |= {"draw", "output", "C", "f", "config", "run_row", "step"}  # of Python, old scripts, train.averages alone
    root, count = Path(ldm_lite.__file__).parent, 0
    for file in sorted(root.rglob("*.py")):
        for text in messages(ast.parse(file.read_text())):
            for name in re.findall(r"`(\w+)(?:=[^`]*)?`", text):
                assert name in names, f"{file}: {text}"
                count += 1
            if file.parent.name not in ("cli", "ldm_lite"):
                assert not re.search(r"(?<![\w-])--[a-z]", text), f"{file}: {text}"
    assert count > 50


# ---- help -----------------------------------------------------------------------------------------------------------


def shown(command: str, flag: str, capsys: pytest.CaptureFixture[str]) -> list[list[str]]:
    """The spellings of each flag in a command's help."""
    module = importlib.import_module(
        f"ldm_lite.{command}{'.__main__' * (command in ('serve', 'train', 'bench', 'batch'))}"
    )
    with pytest.raises(SystemExit) as status:
        module.main([flag])
    text, error = capsys.readouterr()
    assert (status.value.code, error) == (0, "")
    assert text.startswith(f"usage: python -m ldm_lite.{command} ")
    assert text.endswith("\n")
    if flag != "--help-all":
        [number] = re.findall(r"^--help-all shows all (\d+) options\.$", text, re.MULTILINE)
        assert int(number) == len(shown(command, "--help-all", capsys))
    assert max(map(len, text.splitlines())) <= 80
    lines = re.findall(r"^  (-.*?)(?:  |$)", text, re.MULTILINE)
    return [re.findall(r"(?<![\w-])--?[A-Za-z][\w-]*", line) for line in lines]


FILES = {
    "vae",
    "unet",
    "text-encoder",
    "tokenizer",
    "t5-vocab",
    "compiled",
    "ckpt",
    "data",
    "out",
    "renderer",
    "stage-1",
    "stage-3",
    "t5",
}


@pytest.mark.parametrize("command", COMMANDS)
def test_values_that_name_files_are_shown_as_such(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    module = f"ldm_lite.{command}{'.__main__' * (command in ('serve', 'train', 'bench', 'batch'))}"
    with pytest.raises(SystemExit):
        importlib.import_module(module).main(["--help-all"])
    values = re.findall(r"^  --([\w-]+)(?:, --[\w-]+)* ([A-Z]\S*)", capsys.readouterr().out, re.MULTILINE)
    assert {(name, value) for name, value in values if name in FILES and not re.search("FILE|PATH|DIR", value)} == set()


@pytest.mark.parametrize(
    ("command", "kept"),
    [
        ("txt2img", "finished images are saved"),
        ("verify", "nothing"),
    ],
)
def test_a_command_that_is_stopped_says_what_it_has_saved(
    command: str, kept: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def stopped(*options: object) -> None:
        raise KeyboardInterrupt

    folder, _, function = TABLE[command].run.partition(".")
    monkeypatch.setattr(f"ldm_lite.tasks.{folder}.{function}", stopped)
    assert importlib.import_module(f"ldm_lite.{command}").main([]) == 130
    assert capsys.readouterr().err.startswith(f"interrupted: {kept}")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="/dev/full is Linux's")
def test_help_that_cannot_be_written_is_one_line() -> None:
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-m", "ldm_lite.txt2img", "--help-all"]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True)
    assert (done.returncode, done.stderr.count("\n")) == (1, 1)
    assert done.stderr.startswith("error: the disk is full: the output was not written")


def test_help_shows_twenty_flags_and_help_all_every_one(capsys: pytest.CaptureFixture[str]) -> None:
    common, everything = (shown("txt2img", flag, capsys) for flag in ("--help", "--help-all"))
    assert common == shown("txt2img", "-h", capsys)
    assert len(common) <= 20
    assert all(len(spellings) == 1 for spellings in common)
    names = {name for [name] in common}
    assert names >= {
        "--prompt",
        "--negative-prompt",
        "--seed",
        "--steps",
        "--sampler",
        "--scale",
        "--height",
        "--width",
    }
    assert names >= {"--ckpt", "--vae", "--lora", "--dtype", "--batch-size", "--out"}
    flags_of = [spellings[0] for spellings in everything]
    assert len(flags_of) == len(set(flags_of))
    declared = [field for group in (Options, LoadOptions, SaveOptions) for field in dataclasses.fields(group)]
    declared = [field for field in declared if field.metadata["flag"]]
    originals = ["--plms", "--dpm_solver", "--precision", "--config", "--C", "--f", "--laion400m"]
    our_flags = {f"--{field.name.replace('_', '-')}" for field in declared}
    assert set(flags_of) == our_flags | {*originals, "-h", "--help-all"}
    spelled = {name for spellings in everything for name in spellings}
    assert spelled >= {flag for field in declared for flag in field.metadata["flags"]}
    assert not [name for name in our_flags if "_" in name]


@pytest.mark.parametrize("command", COMMANDS)
def test_every_commands_help_is_short_and_its_full_help_whole(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    common, everything = (shown(command, flag, capsys) for flag in ("--help", "--help-all"))
    assert 4 <= len(common) < len(everything)
    assert all(len(spellings) == 1 for spellings in common)
    names, every_name = {name for [name] in common}, {spellings[0] for spellings in everything}
    assert names <= every_name
    usual = {"--prompt", "--negative-prompt", "--sampler", "--steps", "--scale", "--ckpt", "--batch-size", "--out"}
    assert usual & every_name <= names


def test_each_group_of_options_is_a_topic_of_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    """Beside the common options the short help lists them; together they are all that --help-all shows."""
    with pytest.raises(SystemExit):
        txt2img.main(["--help"])
    topics = re.findall(r"^  (\w+)  ", capsys.readouterr().out.partition("by --help TOPIC:\n")[2], re.MULTILINE)
    assert {"prompts", "hires", "guidance", "noise", "control", "sampling", "load", "save"} <= {*topics}
    whole: list[str] = []
    for topic in topics:
        with pytest.raises(SystemExit, match="0"):
            txt2img.main(["--help", topic])
        whole += re.findall(r"^  (--[a-z][\w-]*)", capsys.readouterr().out, re.MULTILINE)
    declared = [field for group in (Options, LoadOptions, SaveOptions) for field in dataclasses.fields(group)]
    flags_of = [f"--{field.name.replace('_', '-')}" for field in declared if field.metadata["flag"]]
    assert sorted(whole) == sorted(flags_of)
    for module, topic, flag in (("train.__main__", "training", "--resume"), ("txt2img", "hi", "--hires-steps")):
        with pytest.raises(SystemExit, match="0"):
            importlib.import_module(f"ldm_lite.{module}").main(["--help", topic])
        assert flag in capsys.readouterr().out
    with pytest.raises(SystemExit, match="2"):
        txt2img.main(["--help", "weather"])
    assert capsys.readouterr().err.startswith("error: unknown topic 'weather': expected one of txt2img, ")


def test_a_group_without_common_flags_is_shown_whole(capsys: pytest.CaptureFixture[str]) -> None:
    """As reconstruct's own options are."""
    own_flags = {f"--{field.name}" for field in dataclasses.fields(Reconstruct)}
    assert {name for [name] in shown("reconstruct", "--help", capsys)} >= own_flags


def test_help_is_shown_beside_flags_that_are_wrong(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        flags.parse(["an apple", "--stepz", "3", "--help"], "txt2img", "", (Options,))
    assert capsys.readouterr().out.startswith("usage: ")


def test_the_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert package.main(["--version"]) == 0
    assert capsys.readouterr().out == f"ldm_lite {ldm_lite.__version__}\n"


# ---- spellings ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flag", "value", "name"),
    [
        *((flag, "3", "batch_size") for flag in ("--n_samples", "--n-samples", "--batch_size", "--batch-size")),
        *((flag, "3", "n_iter") for flag in ("--n_iter", "--n-iter")),
        *((flag, "3", "steps") for flag in ("--ddim_steps", "--ddim-steps", "--steps")),
        *((flag, "0.5", "eta") for flag in ("--ddim_eta", "--ddim-eta", "--eta")),
        *((flag, "64", "height") for flag in ("--H", "--height")),
        *((flag, "64", "width") for flag in ("--W", "--width")),
        *((flag, "out", "out") for flag in ("--outdir", "--out")),
        *((flag, "prompts.txt", "from_file") for flag in ("--from_file", "--from-file")),
        *((flag, "ugly", "negative_prompt") for flag in ("--negative_prompt", "--negative-prompt")),
        *((flag, "karras", "spacing") for flag in ("--scheduler", "--spacing")),
        *((flag, "7", "prompt") for flag in ("--class", "--boxes", "--label_map", "--label-map", "--embeddings")),
        *((flag, "a.png", "init_img") for flag in ("--init_img", "--init-img", "--input")),
        *((flag, "2", "image_scale") for flag in ("--cfg_image", "--cfg-image", "--image-scale", "--image_scale")),
        *((flag, None, "skip_grid") for flag in ("--skip_grid", "--skip-grid")),
        *((flag, None, "skip_save") for flag in ("--skip_save", "--skip-save")),
        *((flag, None, "fixed_code") for flag in ("--fixed_code", "--fixed-code")),
        *((flag, "2", "n_rows") for flag in ("--n_rows", "--n-rows")),
        *((flag, "a.safetensors", "text_encoder") for flag in ("--text_encoder", "--text-encoder")),
        *((flag, None, "vae_tiling") for flag in ("--vae_tiling", "--vae-tiling")),
    ],
)
def test_every_spelling_is_accepted(flag: str, value: str | None, name: str) -> None:
    groups, _ = flags.parse(
        [flag, *([] if value is None else [value])], "img2img", "", (Img2img, LoadOptions, SaveOptions)
    )
    values = [getattr(group, name) for group in groups if hasattr(group, name)]
    wanted = True if value is None else type(values[0])([value] if isinstance(values[0], tuple) else value)
    assert values == [wanted]


@pytest.mark.parametrize(
    ("extend", "argv", "name", "value"),
    [
        (flags.original_flags, ["--plms"], "sampler", "plms"),
        (flags.original_flags, ["--dpm_solver"], "sampler", "dpmpp_2m"),
        (flags.edit_flags, ["--edit", "make it red"], "prompt", "make it red"),
        (flags.edit_flags, ["--cfg-text", "5"], "scale", 5.0),
        (flags.edit_flags, ["--output", "a.png"], "out", "a.png"),
        (flags.edit_flags, ["--vae-ckpt", "a.ckpt"], "vae", "a.ckpt"),
    ],
)
def test_flags_of_the_original_scripts_set_our_options(
    extend: typing.Any, argv: list[str], name: str, value: object
) -> None:
    groups, others = flags.parse(argv, "img2img", "", (Img2img, LoadOptions, SaveOptions), extend)
    assert [getattr(group, name) for group in groups if hasattr(group, name)] == [value]
    assert others == {}


def test_flags_of_the_original_scripts_that_only_inform() -> None:
    argv = ["--C", "4", "--f", "8", "--precision", "full", "--config", "a.yaml", "--laion400m"]
    _, others = flags.parse(argv, "txt2img", "", (Options,), flags.txt2img_flags)
    assert others == {"C": 4, "f": 8, "precision": "full", "config": "a.yaml", "laion400m": True}


# ---- streams --------------------------------------------------------------------------------------------------------


@pytest.mark.needs("bash")
@pytest.mark.parametrize("how", ["", "PYTHONIOENCODING=ascii", ">&-", "2>&-", ">&- 2>&-"])
def test_any_name_is_printed_to_any_stream_even_a_closed_one(how: str) -> None:
    code = """
import logging, sys, tqdm
from ldm_lite.cli import console
def body():
    logging.getLogger("ldm_lite").info("loaded")
    bar = tqdm.tqdm(total=2)
    print("pictures/\\udcff \\u2764.png")
    raise ValueError("wrong")
sys.exit(console.run(body))
"""
    root = Path(ldm_lite.__file__).parent.parent
    variable, streams = (how, "") if "=" in how else ("", how)
    command = f"{variable} exec '{sys.executable}' -c '{code.replace(chr(39), chr(34))}' {streams}"
    done = subprocess.run(["bash", "-c", command], cwd=root, capture_output=True)
    assert done.returncode == 2
    if "2>&-" not in how:
        assert done.stderr.splitlines()[-1] == b"error: wrong"  # on a line of its own
    if not how.startswith(">&-"):
        assert done.stdout.startswith(b"pictures/")


@pytest.mark.skipif(sys.platform == "win32", reason="pipes there are other")
@pytest.mark.parametrize("flush", [True, False])
def test_a_command_that_nobody_reads_ends_without_a_line(flush: bool) -> None:
    """As behind `| head -1`: at the print that fails, or at the end for what is buffered."""
    code = f"""
import sys
from ldm_lite.cli import console
def body():
    sys.stdin.readline()  # until the other end is closed
    print("x", flush={flush})
    if {flush}: sys.exit("went on")
sys.exit(console.run(body))
"""
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=Path(ldm_lite.__file__).parent.parent,
        text=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdout.close()
    _, said = process.communicate("\n")
    assert (process.returncode, said) == (141, "")


HIDDEN = "\x1b[2J\x07\r\n\x7f\x9b\u202e\u2066\u200f\ufeff\u2028\udcff\u00ad"


def test_control_characters_do_not_reach_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    def body() -> None:
        # Without the surrogate, which pytest cannot send from one process to another with the log.
        logging.getLogger("ldm_lite").warning("%s: is odd", f"a{HIDDEN}b é 日本 👩\u200d🚀".replace("\udcff", ""))
        raise FileNotFoundError(2, "No such file", f"a{HIDDEN}b")

    for argument in (lambda: console.run(body), lambda: txt2img.main([f"--a{HIDDEN}b"])):
        with contextlib.suppress(SystemExit):
            argument()
        shown = capsys.readouterr().err
        assert not set(shown.replace("\n", "")) & set(HIDDEN.replace("[2J", ""))
        assert r"\x1b[2J\x07" in shown
    assert console.printable(f"a{HIDDEN}b") == (r"a\x1b[2J\x07\r\n\x7f\x9b\u202e\u2066\u200f\ufeff\u2028\udcff\xadb")
    assert console.printable("é 日本 👩\u200d🚀 न\u200dह") == "é 日本 👩\u200d🚀 न\u200dह"


def test_a_pipe_gets_names_as_they_are_and_a_terminal_their_escapes() -> None:
    leader, follower = os.openpty()
    code = "import sys; from ldm_lite.cli import console; console.run(lambda: print('a\\x1b[2Jb\\tc'))"
    assert subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, check=True).stdout == b"a\x1b[2Jb\tc\n"
    subprocess.run([sys.executable, "-c", code], stdout=follower, check=True)
    os.close(follower)
    assert os.read(leader, 100).split() == [rb"a\x1b[2Jb", b"c"]
    os.close(leader)
