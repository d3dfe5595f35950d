"""What all commands share: an unknown flag, and the line when memory runs out, which names what to try next."""

from dataclasses import replace

import pytest
import torch

from ldm_lite import cli
from ldm_lite.cli import LoadOptions
from ldm_lite.train import Options as Train
from ldm_lite.txt2img import Options


def test_out_of_memory_names_the_next_cheaper_option(capsys: pytest.CaptureFixture[str]) -> None:
    """Following the advice leads through all options, each once, to a smaller picture."""

    def advice(*options: object) -> str:
        def fails() -> None:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.")

        assert cli.run(fails, debug=False, options=options) == 1
        return capsys.readouterr().err.strip().removeprefix("error: out of memory: try ")

    options, load, seen = Options(prompt="a cat", n_samples=4), LoadOptions(dtype="fp32"), []
    taken = {"--vae-tiling": {"vae_tiling": True}, "--offload model": {"offload": "model"}}
    taken |= {"--offload sequential": {"offload": "sequential"}, "--storage int8": {"storage": "int8"}}
    taken |= {"--dtype fp16": {"dtype": "fp16"}}
    while (step := advice(options, load)) != "a smaller picture":
        assert step not in seen
        seen.append(step)
        if step in taken:
            load = replace(load, **taken[step])
        else:
            options = replace(options, n_samples=1)
    assert seen == ["--n-samples 1", *[step for step in seen if step in taken]]
    assert set(taken) <= set(seen)
    assert seen.index("--offload model") < seen.index("--storage int8") < seen.index("--offload sequential")
    assert advice(Train(), LoadOptions()) == "--checkpointing"
    assert advice(Train(checkpointing=True), LoadOptions()) == "a smaller --batch, with --accumulate"


def test_running_out_of_memory_on_a_cpu(capsys: pytest.CaptureFixture[str]) -> None:
    def fails() -> None:
        raise RuntimeError("[enforce fail at alloc_cpu.cpp:118] err == 0. DefaultCPUAllocator: can't allocate memory")

    assert cli.run(fails, debug=False, options=(Options(), LoadOptions())) == 1
    assert capsys.readouterr().err == "error: out of memory: try --vae-tiling\n"


@pytest.mark.parametrize(
    ("flag", "wanted"),
    [("--n_smaples", "the nearest is --n_samples (see"), ("--xyzzy", "unrecognized arguments: --xyzzy")],
)
def test_an_unknown_flag_names_the_nearest(flag: str, wanted: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as status:
        cli.parse(["an apple", flag, "3"], "txt2img", "", (Options,))
    assert status.value.code == 2
    error = capsys.readouterr().err
    assert wanted in error
    assert error.count("\n") == 1
