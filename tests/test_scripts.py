"""The scripts that measure and compare, as far as they run in seconds."""

import importlib
import os
import re
import shlex
import signal
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import count_memory
import gpu
import mutate
import profiling
import pytest
import torch
from waiting import wait_for

from ldm_lite.bench.options import BenchOptions
from ldm_lite.bench.ours import configuration
from ldm_lite.cli import flags

ROOT = Path(gpu.__file__).parent.parent


@pytest.mark.parametrize("name", ["parity", "fake_cuda"])
def test_scripts_import(name: str) -> None:
    """They use much of the package and have no other test here: a renamed function is found."""
    assert importlib.import_module(name).__doc__


def test_works_are_timed_in_turn() -> None:
    turns: list[str] = []
    clock = iter(range(100))
    works = {name: lambda name=name: turns.append(name) for name in "ab"}
    times = profiling.timed(works, 2, lambda: float(next(clock)))
    assert turns == ["a", "b", "b", "a", "a", "b"]
    assert times == {"a": [1.0, 1.0], "b": [1.0, 1.0]}


def test_the_chart_shows_the_table_of_the_page() -> None:
    plot = importlib.import_module("plot_performance")
    rows = plot.rows((plot.DOCS / "performance.md").read_text(encoding="utf-8"))
    assert len(rows) == 5
    assert rows[0] == ("original", 15.1)
    assert rows[-1] == ("ours, timed again", 6.17)


@pytest.mark.parametrize(("name", "arguments"), [("draw_plan", ["heun"]), ("plot_performance", [])])
def test_pictures_without_matplotlib_are_one_line(
    name: str, arguments: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("matplotlib", "matplotlib.figure"):
        monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.setattr(sys, "argv", [name, *arguments])
    with pytest.raises(SystemExit, match="no picture without matplotlib: pip install matplotlib"):
        importlib.import_module(name).main()


def test_memory_is_counted_while_tensors_live(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a chain of linears two maps live at a time, beside the input."""
    chain = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(5)))
    monkeypatch.setattr(count_memory, "build_network", lambda spec: chain.to("meta"))
    memory = count_memory.network_memory(None, torch.float16, torch.empty(10, 64, device="meta", dtype=torch.float16))
    assert memory.activations == 2 * 10 * 64 * 2
    assert memory.weights == 5 * 65 * 64 * 2


@pytest.mark.slow
def test_the_tables_of_memory_are_current() -> None:
    text = count_memory.PAGE.read_text(encoding="utf-8")
    assert count_memory.page(text) == text, "run scripts/count_memory.py"


def test_the_benchmarks_of_the_stages_on_a_gpu_parse() -> None:
    """What fails there costs minutes of it."""
    values = {"dtype": "fp16", "size": "--size sd1", "minutes": 3.0, "out": "out", "many": 16}
    values |= {"stage": "step", "images": "", "profile": "", "processes": 8, "emoji": ""}
    commands = [shlex.split(text.format(**values)) for _, texts in gpu.STAGES.values() for text in texts]
    benchmarks = [command[2:] for command in commands if command[1] == "ldm_lite.bench"]
    assert len(benchmarks) == 9
    for arguments in benchmarks:
        (options,), _ = flags.parse(arguments, "bench", "", (BenchOptions,))
        assert options.size == "sd1"
        for name in options.configs:
            assert configuration(name)


def test_a_command_on_a_gpu_is_done_once_and_one_that_lacked_time_is_not(tmp_path: Path) -> None:
    output, whole, short = (
        tmp_path / "stage.part",
        ["-c", "print('| 1 | max | 4 ms |')"],
        ["-c", "print('| 1 | max | - |')"],
    )
    output.touch()
    statuses = [gpu.run(command, output, 60) for command in (whole, short, whole, short)]
    assert statuses == [0, 1, 0, 1]
    assert output.read_text().count("$ python -c") == 3


def test_a_stage_that_takes_too_long_is_ended_with_the_processes_that_it_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Also if they ignore the first signal; what they have printed is in the file, and was shown, by then."""
    monkeypatch.setattr(gpu, "GRACE_S", 0.2)
    child = "import signal, time; signal.signal(15, signal.SIG_IGN); print('ready', flush=True); time.sleep(600)"
    parent = f"import subprocess, sys; a = subprocess.Popen([sys.executable, '-c', {child!r}]); print(a.pid); a.wait()"
    output = tmp_path / "stage.part"
    output.touch()
    assert gpu.run(["-c", parent], output, 3) == 124
    command, *lines = output.read_text().splitlines()[1:]
    assert command.startswith("$ python -c")
    pid, ready, ended = lines
    assert (ready, ended) == ("ready", "ended after 3 s")
    assert f"{pid}\nready" in capfd.readouterr().out
    for _ in range(50):  # until it is reaped by whoever is its parent now
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except FileNotFoundError:
            break
        if state == "Z":
            break
        time.sleep(0.1)
    else:
        pytest.fail("it runs on")


def test_a_rehearsal_does_no_stage_and_folders_may_have_spaces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    commands: list[list[str]] = []

    def run(command: list[str], *how: object) -> int:
        commands.append(command)
        return 0

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(gpu, "run", run)
    monkeypatch.setattr(signal, "signal", lambda *how: None)
    monkeypatch.setenv("LDM_LITE_TEST_DEVICE", "cpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)  # a GPU is asked for its name alone
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "card")
    for arguments in (["--toy"], [], ["--out", "with spaces"]):
        monkeypatch.setattr(sys, "argv", ["gpu.py", "step", *arguments])
        assert gpu.main() == 0
    assert "done before" not in capsys.readouterr().out
    folders = [command[command.index("--out") + 1] for command in commands]
    assert folders == ["outputs/gpu-toy/step", "outputs/gpu/step", "with spaces/step"]


@pytest.mark.slow
def test_a_stage_is_done_once_and_one_that_was_cut_off_is_not(tmp_path: Path) -> None:
    environment = os.environ | {"PYTHONPATH": str(ROOT)}

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "scripts/gpu.py", "--toy", "--out", str(tmp_path), *arguments]
        return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)

    assert run("probe").returncode == 0
    cut_off = run("probe", "profile", "--minutes", "0.1")
    assert cut_off.returncode == 1
    assert "not done: profile" in cut_off.stdout
    text = (tmp_path / "probe.txt").read_text()
    assert "commit" in text
    assert "GB/s" in text
    assert "ended after" in (tmp_path / "profile.part").read_text()
    assert "probe: done before" in run("probe").stdout


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_what_a_stage_runs_too(tmp_path: Path, number: signal.Signals) -> None:
    """SIGHUP comes when a connection breaks: what ran on had the GPU when the stages went on."""
    command = [sys.executable, "scripts/gpu.py", "--toy", "--out", str(tmp_path), "step"]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    wait_for((tmp_path / "step").exists, "the folder that the benchmark makes", process)

    def children() -> list[Path]:
        commands = {path: path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline")}
        return [path for path, text in commands.items() if f"--out\0{tmp_path}/step".encode() in text]

    assert children()
    process.send_signal(number)
    assert process.wait(60) == 128 + number
    assert not children()


def test_the_lock_has_the_versions_of_the_constraints() -> None:
    """And hashes of each package that the server needs, and the address of none."""
    text = (ROOT / ".ci" / "lock.txt").read_text()
    locked = dict(re.findall(r"^([\w.-]+)==(\S+)", text, re.MULTILINE))
    constraints = (ROOT / ".ci" / "constraints.txt").read_text().lower().replace("_", "-")
    pinned = dict(re.findall(r"^([\w.-]+)==(\S+)", constraints, re.MULTILINE))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for line in project["dependencies"] + project["optional-dependencies"]["serve"]:
        name = re.split(r"[^\w.-]", line.lower().replace("_", "-"))[0]
        assert locked[name] == pinned.get(name, locked[name]), name
    assert len(re.findall(r"^[\w.-]+==\S+.* \\\n    --hash=sha256:", text, re.MULTILINE)) == len(
        re.findall("==[0-9]", text)
    )
    assert "://" not in text


def test_mutants_are_valid_changes_and_not_of_messages() -> None:
    source = b'''
def f(a: int, b: int = 2) -> int:
    """1 < 2"""
    log.info("%d", 1 + 1)
    if a < b and a != 3:
        raise ValueError(f"got {a + 1}")
    a += 1
    return a * b
'''
    changed = [source[:start] + text.encode() + source[end:] for start, end, text in mutate.changes_of(source)]
    assert len({*changed}) == len(changed)
    for text in changed:
        compile(text, "f", "exec")
        assert b'"""1 < 2"""\n    log.info("%d", 1 + 1)' in text
        assert b"got {a + 1}" in text
    for part in (b"a <= b", b"or a != 3", b"    pass\n", b"a / b", b"b: int = 3", b"not (a < b and a != 3)", b"a == 3"):
        assert any(part in text for text in changed), part


def test_the_tests_of_a_place_are_those_that_speak_of_it() -> None:
    """In every folder: by the file's name, or by the words around the line."""
    tests = mutate.Tests(ROOT)
    for file, words, test in (
        ("tasks/xy.py", "def ", "test_xy.py"),
        ("train/losses.py", "class DiffusionLoss", "train/"),
        ("formats/gguf.py", "general.alignment", "checkpoint/test_gguf.py"),
        ("features/noise.py", "def change_job", "diffusion/test_noise.py"),
        ("cli/image_headers.py", "components", "test_image_files.py"),
        ("serve/library.py", "def works", "serve/test_protection.py"),
    ):
        text = (ROOT / "ldm_lite" / file).read_text(encoding="utf-8")
        line = text[: text.index(words)].count("\n") + 1
        near = tests.near(Path("ldm_lite") / file, line)
        assert any(path.startswith(f"tests/{test}") for path in near[:5]), (file, near)


def test_a_mutant_counts_as_noticed_if_the_test_passes_without_it(tmp_path: Path) -> None:
    (tmp_path / "package.py").write_text("def double(x):\n    return 2 * x\n")
    (tmp_path / "pyproject.toml").write_text("[tool.pytest.ini_options]\n")
    (tmp_path / "test_package.py").write_text(
        "import package\n\n\ndef test_broken():\n    assert False\n\n\n"
        "def test_double():\n    assert package.double(1) == 2\n"
    )
    broken: list[str] = []
    wrong, same = b"def double(x):\n    return 3 * x\n", b"def double(x):\n    return x * 2\n"
    outcomes = [
        mutate.judge(tmp_path, Path("package.py"), text, ["test_package.py"], 60, broken) for text in (wrong, same)
    ]
    assert outcomes == ["noticed", "lives"]
    assert broken == ["test_package.py::test_broken"]
    assert (tmp_path / "package.py").read_text() == "def double(x):\n    return 2 * x\n"
