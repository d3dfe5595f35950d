"""Continuing a run from whatever is in its folder, and ending it by a signal or by the death of a worker."""

import contextlib
import dataclasses
import importlib
import io
import json
import os
import pickle
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.checkpoint.metadata import BytesStorageMetadata
from torch.overrides import TorchFunctionMode
from training import CONFIG, Grey, Squares, trainer
from waiting import wait_for

from ldm_lite.train import __main__ as command
from ldm_lite.train.batches import Batch, Draws, reported_workers
from ldm_lite.train.state import read_divided, read_log, write_divided, write_state, write_tensors
from ldm_lite.train.trainer import Trainer


def resumed(folder: Path, **config: object) -> Trainer:
    new = trainer(folder, **config)
    new.resume()
    return new


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of two steps."""
    out = tmp_path_factory.mktemp("run")
    trainer(out, steps=2).fit(Grey(), lambda step, loss: None, lambda step: None)
    return out


def nan(values: torch.Tensor) -> torch.Tensor:
    return torch.full_like(values, float("nan"))


def first(state: dict[str, Any], *keys: str) -> dict[Any, Any]:
    for key in keys:
        state = state[key]
    return state


def change(values: dict[Any, Any], make: Callable[[Any], Any]) -> None:
    values.update({next(iter(values)): make(next(iter(values.values())))})


CHANGES: dict[str, Callable[[dict[str, Any]], object]] = {
    "a negative step": lambda s: s.update(step=-5),
    "a step of another type": lambda s: s.update(step=2.0),
    "a truth value as step": lambda s: s.update(step=True),
    "a text as step": lambda s: s.update(step="2\nnext"),
    "no step": lambda s: s.pop("step"),
    "no networks": lambda s: s.pop("networks"),
    "no averages": lambda s: s.pop("average"),
    "no optimiser": lambda s: s.pop("optimizer"),
    "networks as a list": lambda s: s.update(networks=[1]),
    "no weight": lambda s: first(s, "networks", "unet").popitem(),
    "a weight of NaN": lambda s: change(first(s, "networks", "unet"), nan),
    "an average of NaN": lambda s: change(first(s, "average", "unet"), nan),
    "whole numbers as a weight": lambda s: change(first(s, "networks", "unet"), torch.Tensor.int),
    "a weight of another shape": lambda s: change(first(s, "networks", "unet"), lambda value: value[:1]),
    "a text as a weight": lambda s: change(first(s, "networks", "unet"), lambda value: "text"),
    "an optimiser's average of NaN": lambda s: s["optimizer"]["state"][0].update(exp_avg=torch.tensor(torch.nan)),
    "a negative square": lambda s: s["optimizer"]["state"][0]["exp_avg_sq"].sub_(1.0),
    "an optimiser of other shapes": lambda s: s["optimizer"]["state"][0].update(exp_avg=torch.zeros(3)),
    "an optimiser of more parameters": lambda s: s["optimizer"]["state"].update({10**6: s["optimizer"]["state"][0]}),
    "an optimiser without averages": lambda s: s["optimizer"]["state"][0].clear(),
    "an optimiser's text": lambda s: s["optimizer"].update(state="text"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_state_that_cannot_be_is_one_line(name: str, tmp_path: Path, done: Path) -> None:
    state = torch.load(done / "state.pt", weights_only=True)
    CHANGES[name](state)
    torch.save(state, tmp_path / "state.pt")
    with pytest.raises(ValueError, match=r"state\.pt: is not the state of this run, or damaged \(") as error:
        resumed(tmp_path)
    assert "\n" not in str(error.value)


def test_a_file_that_is_no_state_is_one_line(tmp_path: Path, done: Path) -> None:
    whole, path = (done / "state.pt").read_bytes(), tmp_path / "state.pt"
    for content in (b"", b"text", whole[:100], whole[: len(whole) // 2], whole[:-20], bytes(range(256)) * 99):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=r"state\.pt: is not the state of this run, or damaged \("):
            resumed(tmp_path)
    for value in (None, [], {}, torch.zeros(3), 5, {"step": 1}):
        torch.save(value, path)
        with pytest.raises(ValueError, match=r"state\.pt: is not the state of this run, or damaged \("):
            resumed(tmp_path)
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(ValueError, match=r"state\.pt: is a pipe"):
        resumed(tmp_path)


class Harmful:
    """Runs code when it is unpickled."""

    def __reduce__(self) -> Any:
        return os.mkdir, (os.fspath(HARM),)


HARM = Path(tempfile.gettempdir()) / f"harm-{os.getpid()}"


def divided(folder: Path) -> dict[str, Any]:
    """Write a divided state, and return other tensors of its shapes."""
    tensors = {"networks": {"unet": {"weight": torch.arange(6.0).view(2, 3), "bias": torch.ones(2)}}}
    write_divided(folder, tensors)
    return {"networks": {"unet": {"weight": torch.zeros(2, 3), "bias": torch.zeros(2)}}}


def bytes_for_tensors(metadata: Any) -> Any:
    """Say that all tensors are bytes, which torch would unpickle."""
    kinds = dict.fromkeys(metadata.state_dict_metadata, BytesStorageMetadata())
    return dataclasses.replace(metadata, state_dict_metadata=kinds)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # a divided state of one process
def test_a_divided_state_that_cannot_be_is_one_line_and_runs_no_code(tmp_path: Path) -> None:
    tensors = divided(tmp_path / "state")
    read_divided(tmp_path / "state", tensors)
    assert tensors["networks"]["unet"]["weight"].tolist() == [[0, 1, 2], [3, 4, 5]]
    metadata, part = tmp_path / "state" / ".metadata", next((tmp_path / "state").glob("*.distcp"))
    whole, content = metadata.read_bytes(), part.read_bytes()
    as_bytes = pickle.dumps(bytes_for_tensors(pickle.loads(whole)))
    for harmful in (pickle.dumps(Harmful()), as_bytes):
        metadata.write_bytes(harmful)
        with pytest.raises(pickle.UnpicklingError, match="has no place in a list of tensors"):
            read_divided(tmp_path / "state", tensors)
    assert not HARM.exists()
    metadata.write_bytes(whole)
    for damaged in (content[: len(content) // 2], b"x" * len(content)):
        part.write_bytes(damaged)
        with pytest.raises(ValueError, match=r"^state: [^\n]+$"):
            read_divided(tmp_path / "state", tensors)
    part.write_bytes(content)
    for wrong in ({"other": torch.zeros(2)}, {"networks": {"unet": {"weight": torch.zeros(4, 4)}}}):
        with pytest.raises(ValueError, match=r"^state: [^\n]+$"):
            read_divided(tmp_path / "state", wrong)
    write_divided(tmp_path / "state", {"a": torch.tensor([1.0, torch.nan])})
    with pytest.raises(ValueError, match="not finite"):
        read_divided(tmp_path / "state", {"a": torch.zeros(2)})


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # a divided state of one process
def test_a_divided_state_on_a_full_disk_is_an_error(tmp_path: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    for most in (0, 100, 5000):
        resource.setrlimit(resource.RLIMIT_FSIZE, (most, before[1]))
        try:
            with pytest.raises(OSError, match=r"cannot be written"):
                write_divided(tmp_path / "state", {"a": torch.zeros(20_000)})
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_state_beyond_the_last_step_and_other_settings(
    tmp_path: Path, done: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    caplog.set_level("INFO")
    with pytest.raises(ValueError, match=r"state\.pt: is of step 2, beyond `steps=1`: give more steps"):
        resumed(done, steps=1)
    state = torch.load(done / "state.pt", weights_only=True)
    state["settings"]["lr"] = 0.5
    torch.save(state, tmp_path / "state.pt")
    state["optimizer"]["param_groups"][0]["weight_decay"] = "text"
    torch.save(state, tmp_path / "state.pt")
    again = resumed(tmp_path)
    assert again.step == 2
    assert again.optimizer.param_groups[0]["weight_decay"] == 0.01
    assert 'with changed settings: {"steps": 4, "lr": 0.001}' in caplog.text


def test_a_damaged_log_keeps_its_whole_lines(
    tmp_path: Path, done: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    (tmp_path / "state.pt").write_bytes((done / "state.pt").read_bytes())
    log, lines = tmp_path / "log.jsonl", [{"step": step, "loss": 0.5, "seconds": 1.0} for step in (1, 2, 3)]
    whole = "".join(json.dumps(line) + "\n" for line in lines).encode()
    damaged = (
        b'\xff\x00\x80\n[1]\nnull\n{"step": "2"}\n{"step": true, "loss": 1}\n' + b"[" * 10**5 + b'\n{"step": 2, "lo'
    )
    log.write_bytes(whole + damaged)
    assert [row["step"] for row in read_log(log)] == [1, 2, 3]
    assert "log.jsonl: 7 lines of it cannot be read, they are left out" in caplog.text
    resumed(tmp_path)
    assert [json.loads(line) for line in log.read_text().splitlines()] == lines[:2]


# ---- ends -----------------------------------------------------------------------------------------------------------

CODE = """
import os, signal, sys, threading, time
from ldm_lite.train import trainer, __main__ as command
step = trainer.Trainer._step
def slow(self, *arguments):
    print("step", flush=True)
    time.sleep(0.3)
    return step(self, *arguments)
trainer.Trainer._step = slow
sys.exit(command.main(sys.argv[1:]))
"""


def start(out: Path, folder: Path, small_path: Path, workers: int) -> "subprocess.Popen[str]":
    argv = [
        "--data",
        folder,
        "--ckpt",
        small_path,
        "--out",
        out,
        "--steps",
        "500",
        "--batch-size",
        "2",
        "--device",
        "cpu",
    ]
    process = subprocess.Popen(
        [sys.executable, "-c", CODE, *map(os.fspath, argv), "--data-workers", str(workers)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        start_new_session=True,
    )
    assert process.stdout is not None
    for _ in range(2):
        assert process.stdout.readline() == "step\n"
    return process


@pytest.mark.slow
@pytest.mark.parametrize(("number", "to_all"), [("SIGINT", True), ("SIGTERM", False), ("SIGHUP", True)])
def test_a_signal_saves_the_state(tmp_path: Path, folder: Path, small_path: Path, number: str, to_all: bool) -> None:
    """Sent to the process, or to all of them as a terminal does."""
    process, which = start(tmp_path, folder, small_path, 2), getattr(signal, number)
    os.killpg(process.pid, which) if to_all else process.send_signal(which)
    _, errors = process.communicate(timeout=300)
    assert process.returncode == 128 + which
    step = torch.load(tmp_path / "state.pt", weights_only=True)["step"]
    assert step >= 2
    assert errors.splitlines()[-1] == f"interrupted: the state of step {step} is saved, --resume continues"
    assert "Traceback" not in errors


SLOW_SCENES = """
import time
from PIL import Image

def scene(index):
    time.sleep(0.05)
    return Image.new("RGB", (64, 64)), "grey"

def scenes(resolution):
    return scene
"""


@pytest.mark.parametrize("workers", [5, pytest.param(2, marks=pytest.mark.slow)])
def test_a_signal_ends_the_encoding_of_images(tmp_path: Path, small_path: Path, workers: int) -> None:
    """Also the processes that read them, of which some wait for work: they ignore signals."""
    (tmp_path / "scenes.py").write_text(SLOW_SCENES)
    argv = ["-m", "ldm_lite.train", "--ckpt", small_path, "--renderer", tmp_path / "scenes.py", "--scenes", 2000]
    argv += ["--batch-size", 200, "--data-workers", workers, "--out", tmp_path / "out", "--device", "cpu"]
    process = subprocess.Popen([sys.executable, *map(str, argv)], stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    assert any(line == "encoding 2000 images\n" for line in process.stderr)
    wait_for(lambda: list((tmp_path / "out" / "latents").glob("*0*")), "a shard that is written", process)
    process.terminate()
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGTERM
    assert errors.splitlines()[-1].startswith("interrupted: ")


DAEMON = """
import multiprocessing, os, signal, sys, time
from pathlib import Path
import ldm_lite.train.batches

def work(path, started):
    def end(*signal):
        path.write_text("put away")
        os._exit(0)
    signal.signal(signal.SIGTERM, end)
    started.set()
    time.sleep(60)

context = multiprocessing.get_context("fork")
started = context.Event()
context.Process(target=work, args=(Path(sys.argv[1]), started), daemon=True).start()
started.wait()
"""


def test_other_processes_of_a_program_end_by_sigterm(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-W", "ignore", "-c", DAEMON, tmp_path / "end"], check=True, timeout=60)
    assert (tmp_path / "end").read_text() == "put away"


@pytest.mark.slow
def test_a_killed_worker_is_not_our_fault(tmp_path: Path, folder: Path, small_path: Path) -> None:
    process = start(tmp_path, folder, small_path, 2)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    os.kill(int(children[0]), signal.SIGKILL)
    _, errors = process.communicate(timeout=300)
    assert process.returncode == 1
    assert errors.splitlines()[-1].startswith("error: a process that reads images was ended from outside")
    assert "--data-workers" in errors
    assert "Traceback" not in errors


def test_the_death_of_a_worker_is_one_line() -> None:
    for message in ("DataLoader worker (pid 7) is killed by signal: Killed.", "DataLoader worker (pid(s) 7) exited"):
        with pytest.raises(ChildProcessError, match="ended from outside"), reported_workers():
            raise RuntimeError(message)
    with pytest.raises(RuntimeError, match="other"), reported_workers():
        raise RuntimeError("other")


def test_images_that_vanish_and_an_empty_folder_to_continue(
    tmp_path: Path, small_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "data").mkdir()
    for i in range(2):
        Image.new("RGB", (8, 8)).save(tmp_path / "data" / f"{i}.png")
        (tmp_path / "data" / f"{i}.txt").write_text("a")
    run = importlib.import_module("ldm_lite.train.run")
    data = importlib.import_module("ldm_lite.train.encoded")
    encoded = data.encoded

    def vanish(*args: Any) -> Any:
        (tmp_path / "data" / "0.png").unlink()
        return encoded(*args)

    argv = [
        "--data",
        tmp_path / "data",
        "--ckpt",
        small_path,
        "--out",
        tmp_path / "out",
        "--batch-size",
        "2",
        "--resume",
    ]
    command_line = [*map(os.fspath, argv), "--data-workers", "0", "--device", "cpu", "--steps", "1"]
    monkeypatch.setattr(run, "sample", lambda *args: None)
    assert command.main(command_line) == 0
    assert "out: holds no state to continue from, a new run begins" in capsys.readouterr().err
    shutil.rmtree(tmp_path / "out" / "latents")
    monkeypatch.setattr(data, "encoded", vanish)
    assert command.main(command_line) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("error: ")
    assert "0.png: No such file" in error


# ---- what must not be lost ------------------------------------------------------------------------------------------


class Breaks(Squares):
    """Squares, whose loss, gradient or weights are not finite from a call on."""

    def __init__(self, call: int, what: str, last: int = 10**9) -> None:
        super().__init__()
        self.call, self.what, self.last, self.calls = call, what, last, 0

    def __call__(self, batch: Batch, draws: Draws) -> Tensor:
        value, self.calls = super().__call__(batch, draws), self.calls + torch.is_grad_enabled()
        if not self.call <= self.calls <= self.last or not torch.is_grad_enabled():
            return value
        if self.what == "gradient":
            value.register_hook(lambda gradient: gradient * float("inf"))
            return value
        return value * float("nan")


@pytest.mark.parametrize("what", ["loss", "gradient"])
@pytest.mark.parametrize("save_every", [2, 100])
def test_steps_that_are_never_finite_again_end_the_run_and_those_before_are_saved(
    tmp_path: Path, what: str, save_every: int
) -> None:
    config = dataclasses.replace(CONFIG, steps=99, save_every=save_every)
    run, saved = Trainer(Breaks(6, what), config, tmp_path), list[int]()
    message = (
        rf"the {what} is (nan|inf) at step 16, as in the 10 before: use a lower `lr`; the state of step 16 is kept in "
    )
    with pytest.raises(ValueError, match=message):
        run.fit(Grey(), lambda step, loss: None, saved.append)
    assert saved == ([2, 4, 6, 8, 10, 12, 14] if save_every == 2 else [16]), "a checkpoint, if there was none"
    whole = trainer(tmp_path / "whole", steps=99, save_every=100)
    whole.folder.mkdir()
    for _ in range(5):
        whole._step(whole._batches(Grey()))
        whole.step += 1
    kept = torch.load(tmp_path / "state.pt", weights_only=True)
    for name, value in whole.loss.networks["unet"].state_dict().items():
        assert torch.equal(kept["networks"]["unet"][name], value)
    run = Trainer(Squares(), config, tmp_path)
    run.resume()
    run.fit(Grey(), lambda step, loss: None, saved.append)
    assert run.step == 99, "a run that was stopped so can go on"


@pytest.mark.parametrize("what", ["loss", "gradient"])
@pytest.mark.parametrize("first", [1, 3])
@pytest.mark.parametrize("is_decided_there", [True, False])
def test_a_step_that_is_not_finite_is_left_out(
    tmp_path: Path, what: str, first: int, is_decided_there: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Also the first ones, before any good one, at each of which a state is due; of the averages too."""
    config = dataclasses.replace(CONFIG, save_every=1, ema_lengths=True)
    run, seen = Trainer(Breaks(first, what, first + 1), config, tmp_path), [torch.ones(0)]
    assert run._is_decided_there
    assert run.averages is not None
    run._is_decided_there = is_decided_there
    networks = run.loss.networks, run.ema, *run.averages.networks

    def on_step(step: int, loss: float | None) -> None:
        seen.append(torch.stack([network["unet"].weight.detach().clone() for network in networks]))

    run.fit(Grey(), on_step, lambda step: None)
    assert f"the {what} is" in caplog.text
    assert f"at step {first}, which is left out" in caplog.text
    same = [torch.equal(seen[step], seen[step - 1]) for step in range(2, 5)]
    assert same == [step in (first, first + 1) for step in range(2, 5)]
    assert [row["step"] for row in read_log(tmp_path / "log.jsonl")] == [
        s for s in range(1, 5) if s - first not in (0, 1)
    ]


class Reads(TorchFunctionMode):
    """Counts how often numbers are read of tensors, which waits for a GPU."""

    count = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += getattr(func, "__name__", "") in ("tolist", "item", "__bool__", "__float__", "__int__", "cpu")
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("precision", [None, torch.float16])
def test_a_step_reads_no_number_until_losses_are_shown(tmp_path: Path, precision: torch.dtype | None) -> None:
    """So it does not wait for the GPU: neither for its loss nor to see whether it is finite."""
    config = dataclasses.replace(CONFIG, steps=9, ema_lengths=True)
    run = Trainer(Breaks(3, "loss", 4), config, tmp_path, precision)
    data = iter([*run._batches(Grey())])  # read before
    with Reads() as reads:
        for _ in range(9):
            run._step(data)
            run.step += 1
        assert reads.count == 0
        assert len(run.read()) in ((7,) if precision is None else range(1, 8)), "the first ones find a scale"
        assert reads.count > 0
    assert run.read() == []
    assert len(run._losses) > 0


def test_weights_that_are_broken_are_not_saved(tmp_path: Path, done: Path) -> None:
    """A finite step may lead to weights whose loss is not."""
    (tmp_path / "state.pt").write_bytes((done / "state.pt").read_bytes())
    run = resumed(tmp_path, lr=1e36, warmup=0, steps=100)
    with pytest.raises(ValueError, match=r"the loss is (nan|inf) .*step \d: .*; the state of step 2 is kept"):
        run.fit(Grey(), lambda step, loss: None, lambda step: None)
    assert (tmp_path / "state.pt").read_bytes() == (done / "state.pt").read_bytes()


def test_a_file_of_tensors_leaves_nothing_beside_it_and_others_may_read_it(tmp_path: Path) -> None:
    """Also what a killed process left; files of the format's own library are for their owner alone."""
    path, tensors, about = tmp_path / "model.safetensors", {"b": torch.ones(3), "a": torch.zeros(2, 2)}, {"z": "1"}
    (tmp_path / "plain").touch()
    (tmp_path / ".model.safetensors.part").write_bytes(b"killed")
    contents = set()
    for metadata in ({**about, "y": "2", "x": "3"}, {"x": "3", "y": "2", **about}, {"y": "2", **about, "x": "3"}):
        write_tensors(path, tensors, metadata)
        contents.add(path.read_bytes())
        with safe_open(path, "pt") as file:
            assert file.metadata() == metadata
        assert {name: value.tolist() for name, value in load_file(path).items()} == {
            "a": [[0, 0], [0, 0]],
            "b": [1] * 3,
        }
    assert len(contents) == 1
    assert path.stat().st_mode == (tmp_path / "plain").stat().st_mode
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (40, before[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            write_tensors(path, {"other": torch.ones(3)})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    write_tensors(tmp_path / "bare.safetensors", tensors)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["bare.safetensors", "model.safetensors", "plain"]
    assert {path.read_bytes()} == contents


def test_a_disk_that_is_full_for_a_while(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The kernel refuses files beyond a size, at any byte: the run goes on, and saves once there is room again."""
    whole, part = tmp_path / "whole", tmp_path / "part"
    for folder in (whole, part):
        folder.mkdir()
    trainer(whole, steps=12).fit(Grey(), lambda step, loss: None, lambda step: None)
    size = (whole / "state.pt").stat().st_size
    limits = {3: size - 1, 5: size // 2, 7: 100, 8: 0, 9: resource.RLIM_INFINITY}
    seen = dict[int, int]()

    def on_step(step: int, loss: float | None) -> None:
        if step in limits:
            resource.setrlimit(resource.RLIMIT_FSIZE, (limits[step], before[1]))
        seen[step] = torch.load(part / "state.pt", weights_only=True)["step"] if step > 2 else 0

    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        trainer(part, steps=12).fit(Grey(), on_step, lambda step: None)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert seen == {1: 0, 2: 0, 3: 2, 4: 2, 5: 2, 6: 2, 7: 2, 8: 2, 9: 2, 10: 9, 11: 10, 12: 10}
    assert "step 4 is not saved" in caplog.text
    assert "log.jsonl: cannot be written" in caplog.text
    assert [row["loss"] for row in read_log(part / "log.jsonl")] == [
        row["loss"] for row in read_log(whole / "log.jsonl")
    ]
    whole_state, part_state = (torch.load(folder / "state.pt", weights_only=True) for folder in (whole, part))
    assert torch.equal(whole_state["networks"]["unet"]["weight"], part_state["networks"]["unet"]["weight"])
    assert not list(part.glob(".*"))


def test_a_full_disk_that_torch_does_not_notice_keeps_the_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in torch 2.6: what fits is written, and nothing raised, whatever it is given."""
    path, save = tmp_path / "state.pt", torch.save

    def quiet(state: object, to: Any) -> None:
        buffer = io.BytesIO()
        save(state, buffer)
        with contextlib.suppress(OSError), contextlib.ExitStack() as stack:
            file = to if hasattr(to, "write") else stack.enter_context(open(to, "wb"))
            file.write(buffer.getvalue())

    monkeypatch.setattr(torch, "save", quiet)
    write_state(path, {"step": 1})
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    for most in (0, 1000, 50_000):
        resource.setrlimit(resource.RLIMIT_FSIZE, (most, before[1]))
        try:
            with pytest.raises(OSError, match=r"File too large|No space left"):
                write_state(path, {"step": 2, "weight": torch.ones(20_000)})
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert torch.load(path, weights_only=True) == {"step": 1}
    assert [file.name for file in tmp_path.iterdir()] == ["state.pt"]


def test_a_disk_that_stays_full_is_an_error(tmp_path: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
    try:
        with pytest.raises(OSError, match=r"state\.pt|File too large"):
            trainer(tmp_path).fit(Grey(), lambda step, loss: None, lambda step: None)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert not list(tmp_path.glob("*state*"))
