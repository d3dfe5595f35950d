"""What all commands share: an unknown flag, and the line when memory runs out, which names what to try next."""

import dataclasses
import math
import subprocess
import sys
import typing
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import ldm_lite
from ldm_lite.bench.options import Options as Bench
from ldm_lite.cli import console, flags
from ldm_lite.cli.options import FINITE, CheckedOptions, LoadOptions, SaveOptions
from ldm_lite.cli.task_options import CascadeOptions as Cascade
from ldm_lite.cli.task_options import CompareOptions as Samplers
from ldm_lite.cli.task_options import ExportOptions as Export
from ldm_lite.cli.task_options import Img2imgOptions as Img2img
from ldm_lite.cli.task_options import InpaintOptions as Inpaint
from ldm_lite.cli.task_options import StageOptions
from ldm_lite.cli.task_options import Txt2imgOptions as Options
from ldm_lite.cli.task_options import UpscaleOptions as Upscale
from ldm_lite.reconstruct import Options as Reconstruct
from ldm_lite.runtime.tiling import out_of_memory
from ldm_lite.train.options import TrainOptions as Train


def test_out_of_memory_names_the_next_cheaper_option(capsys: pytest.CaptureFixture[str]) -> None:
    """Following the advice leads through all options, each once, to a smaller picture."""

    def advice(*options: object) -> str:
        def fails() -> None:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.")

        assert console.run(fails, options) == 1
        return capsys.readouterr().err.strip().removeprefix("error: out of memory: try ")

    options, load, seen = Options(prompt="a cat", batch_size=4), LoadOptions(dtype="fp32"), []
    taken = {"--vae-tiling": {"vae_tiling": True}, "--offload model": {"offload": "model"}}
    taken |= {"--offload sequential": {"offload": "sequential"}, "--storage int8": {"storage": "int8"}}
    taken |= {"--dtype fp16": {"dtype": "fp16"}}
    while (step := advice(options, load)) != "a smaller picture":
        assert step not in seen
        seen.append(step)
        if step in taken:
            load = replace(load, **taken[step])
        else:
            options = replace(options, batch_size=1)
    assert seen == ["--n-samples 1", *[step for step in seen if step in taken]]
    assert set(taken) <= set(seen)
    assert seen.index("--offload model") < seen.index("--storage int8") < seen.index("--offload sequential")
    assert advice(Upscale(batch_size=3), LoadOptions(vae_tiling=True)) == "--tile 64"
    assert advice(Cascade(batch_size=2), StageOptions(dtype="fp32"), SaveOptions()) == "--n-samples 1"
    assert advice(Cascade(), StageOptions(stage_3="x4.ckpt"), SaveOptions()) == "--tile 64"
    assert advice(Cascade(), StageOptions(dtype="fp32"), SaveOptions()) == "--dtype fp16"
    assert advice(Bench()) == advice(Export(batches="1,2")) == "--batches 1"
    assert advice(Export()) == advice(Reconstruct(), SaveOptions()) == "a smaller picture"
    assert advice(Train(), LoadOptions()) == "--checkpointing"
    assert advice(Train(checkpointing=True), LoadOptions()) == "a smaller --batch, with --accumulate"


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
    [("--n_smaples", "the nearest is --n_samples (see"), ("--xyzzy", "unrecognized arguments: --xyzzy")],
)
def test_an_unknown_flag_names_the_nearest(flag: str, wanted: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as status:
        flags.parse(["an apple", flag, "3"], "txt2img", "", (Options,))
    assert status.value.code == 2
    error = capsys.readouterr().err
    assert wanted in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    "group", [Options, Img2img, Inpaint, Upscale, Cascade, Samplers, Train, Bench, Export, SaveOptions]
)
def test_every_number_has_a_range(group: type[CheckedOptions], capsys: pytest.CaptureFixture[str]) -> None:
    hints = typing.get_type_hints(group)
    numbers = [each for each in dataclasses.fields(group) if {int, float} & {*typing.get_args(hints[each.name])}]
    numbers += [each for each in dataclasses.fields(group) if hints[each.name] in (int, float)]
    assert numbers
    numbers = [each for each in numbers if not each.metadata["help"].startswith("not here")]
    for each in numbers:
        least, most = each.metadata["within"]
        for value in (least - 1, most + 1, math.nan, math.inf, -math.inf, 10**400):
            if not (value == 10**400 and most == math.inf):
                with pytest.raises(ValueError, match=rf"^got {each.name} .*, wanted "):
                    group(**{each.name: value})
    name = next(each.name for each in numbers if each.metadata["within"] != FINITE)
    with pytest.raises(SystemExit):
        flags.parse([f"--{name}=-1"], "train", "", (group,))
    assert capsys.readouterr().err.startswith(f"error: got {name} -1")


def test_words_beside_the_prompt_and_empty_values(capsys: pytest.CaptureFixture[str]) -> None:
    """What is left of a prompt without quotes, and of a shell's variable that is not set."""
    for argv, wanted in (
        (["a", "red", "apple"], "error: got words beside the prompt, 'red apple': put it into quotes (see --help)"),
        (["--init-img", ""], "error: argument --init_img/--init-img/--input: got an empty text: give a value, or"),
        (["--ckpt", ""], "error: argument --ckpt: got an empty text: give a value, or leave the flag out"),
    ):
        with pytest.raises(SystemExit):
            flags.parse(argv, "img2img", "", (Img2img, LoadOptions))
        error = capsys.readouterr().err
        assert error.startswith(wanted)
        assert error.count("\n") == 1
    [options], _ = flags.parse(["", "--negative-prompt", ""], "img2img", "", (Img2img,))
    assert options.prompt == options.negative_prompt == ""


@pytest.mark.skipif(sys.platform == "win32", reason="the shell is another")
@pytest.mark.parametrize("how", ["", "PYTHONIOENCODING=ascii", ">&-", "2>&-", ">&- 2>&-"])
def test_any_name_is_printed_to_any_stream_even_a_closed_one(how: str) -> None:
    code = """
import sys, tqdm
from ldm_lite import cli
def body():
    cli.logging.getLogger("ldm_lite").info("loaded")
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
import sys, time
from ldm_lite import cli
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
