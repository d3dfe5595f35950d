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
import zipfile
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


VALUES = {"dtype": "fp16", "size": "--size sd1", "minutes": 3.0, "out": "out", "many": 16, "some": 4, "stage": "step"}
VALUES |= {"images": "", "profile": "", "shapes": "", "first": 2.5, "processes": 8, "training": "", "emoji": ""}


def test_the_benchmarks_of_the_stages_on_a_gpu_parse() -> None:
    """What fails there costs minutes of it."""
    commands = [shlex.split(text.format(**VALUES)) for _, texts in gpu.STAGES.values() for text in texts]
    benchmarks = [command[2:] for command in commands if command[1] == "ldm_lite.bench"]
    assert len(benchmarks) == 7
    for arguments in benchmarks:
        (options,), _ = flags.parse(arguments, "bench", "", (BenchOptions,))
        assert options.size == "sd1"
        for name in options.configs:
            assert configuration(name)


def test_the_first_stages_fit_into_eight_minutes() -> None:
    """And one by one into what the second eight have."""
    limits = {stage: most_s for stage, (most_s, _) in gpu.STAGES.items()}
    names = list(limits)
    assert names[-1:] == list(gpu.ALONE)
    assert sum(limits[name] for name in names[: names.index("article")]) <= 480
    assert max(limits[name] for name in names[names.index("article") : -1]) <= 480


class Process:
    """Stands for a process of a stage: it prints at seconds of a clock, and ends, if it does, with a status."""

    pid = 2**22 + 1  # none has it

    def __init__(self, clock: list[float], texts: dict[float, str], ends_s: float, status: int | None) -> None:
        read, self.write = os.pipe()
        self.stdout = os.fdopen(read, "rb")
        self.clock, self.texts, self.ends_s, self.status = clock, texts, ends_s, status
        self.is_over = False

    def wait(self, limit_s: float | None = None) -> int:
        """Let the clock go on; what is printed until then is in the pipe."""
        if self.is_over:
            return 0
        until = self.ends_s if limit_s is None else min(limit_s, self.ends_s)
        for second, text in self.texts.items():
            if second <= until:
                os.write(self.write, f"{text}\n".encode())
        self.clock[0] += until
        if limit_s is not None and until == limit_s < self.ends_s:
            raise subprocess.TimeoutExpired("", limit_s)
        self.end()
        if self.status is None:
            raise SystemExit(143)  # as the handler of a signal does
        return self.status

    def poll(self) -> int | None:
        return self.status if self.is_over else None

    def end(self) -> None:
        if not self.is_over:
            self.is_over = True
            os.close(self.write)


@pytest.mark.parametrize("fault", ["fails", "hangs", "is cut"])
@pytest.mark.parametrize("stage", [stage for stage in gpu.STAGES if stage not in gpu.ALONE])
def test_whatever_a_stage_reached_is_in_the_file(
    stage: str, fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """A rehearsal by a virtual clock: one stage fails, hangs until it is ended, or the whole command is cut there."""
    clock, started, report = [0.0], list[tuple[str, float]](), tmp_path / "report.txt"
    running: list[Process] = []
    is_faulty = [True]

    def popen(command: list[str], **how: object) -> Process:
        name = re.findall(r"^== (.+) ==$", report.read_text(), re.MULTILINE)[-1]
        started.append((name, clock[0]))
        most_s = gpu.STAGES[name][0] / len(gpu.STAGES[name][1])
        ends_s, status = 0.5 * most_s, 0
        if name == stage and is_faulty[0]:
            ends_s, status = {"fails": (2.0, 1), "hangs": (1e9, 0), "is cut": (3.0, None)}[fault]
        running.append(Process(clock, {1.0: f"{name} reached a"}, ends_s, status))
        return running[-1]

    def main() -> int:
        monkeypatch.setattr(sys, "argv", ["gpu.py", "--out", str(tmp_path)])
        return gpu.main()

    monkeypatch.setattr(gpu.subprocess, "Popen", popen)
    monkeypatch.setattr(gpu.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(gpu.os, "killpg", lambda pid, number: running[-1].end())
    monkeypatch.setattr(gpu, "about", lambda: "a card")
    monkeypatch.setattr(gpu, "WHEELS", tmp_path / "none")
    monkeypatch.setattr(signal, "signal", lambda *how: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for name in ("PYTHONPATH", "PYTEST_ADDOPTS"):
        monkeypatch.setenv(name, "")
    names = [name for name in gpu.STAGES if name not in gpu.ALONE]
    for _ in range(4):  # commands of eight minutes
        start = clock[0]
        try:
            status = main()
        except SystemExit:
            status = 1
        assert clock[0] - start <= 480
        text = report.read_text()
        for name in dict(started):
            assert f"{name} reached a" in text, "as soon as it was printed"
        if status == 0:
            break
        if stage in dict(started):
            is_faulty[0] = False
    assert status == 0
    assert all(f"done: {name}" in text.splitlines() for name in names)
    order = [name for name, _ in started]
    assert list(dict.fromkeys(order)) == names, "in the order of their worth"
    commands = len(gpu.STAGES[stage][1])
    if fault == "fails":
        assert order.count(stage) == commands, "a stage that failed is done"
        assert "status 1 after 2 s" in text
    else:
        assert order.count(stage) > commands
        assert fault == "is cut" or f"not done: {stage}" in text.splitlines()
    assert capfd.readouterr().out


def test_a_benchmark_that_is_ended_leaves_its_rows_in_the_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And one that ended by itself for lack of time goes on too."""
    (tmp_path / "compare").mkdir()
    (tmp_path / "compare" / "results.md").write_text("| 1 | graph | 9.84 ms |\n")
    report, prints = tmp_path / "report.txt", iter(["", "left out for lack of time: max", "| 1 | max | - |"])

    def run(command: list[str], report: Path, limit_s: float) -> int:
        with open(report, "a") as file:
            file.write(printed := next(prints))
        return 0 if printed else 124

    report.touch()
    monkeypatch.setattr(gpu, "run", run)
    values = VALUES | {"out": shlex.quote(str(tmp_path))}
    for name in ("stage", "minutes"):
        values.pop(name)
    assert [gpu.run_stage("compare", report, 240, values) for _ in range(3)] == [False, False, True]
    assert report.read_text().count("| 1 | graph | 9.84 ms |") == 1


def test_wheels_are_found_without_installing_them(tmp_path: Path) -> None:
    """Those of another Python are named before a minute is lost."""
    with zipfile.ZipFile(tmp_path / "peer-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("peer.py", "NAME = 'a peer'")
    folder = gpu.unpacked(tmp_path, tmp_path / "site")
    (folder / "peer.py").write_text("NAME = 'once'")
    process = subprocess.run(
        [sys.executable, "-c", "import peer; print(peer.NAME)"],
        env=os.environ | {"PYTHONPATH": str(gpu.unpacked(tmp_path, folder))},
        capture_output=True,
        text=True,
    )
    assert process.stdout == "once\n"
    (tmp_path / "other-1.0-cp27-cp27mu-manylinux1_x86_64.whl").touch()
    with pytest.raises(
        ValueError, match=r"other-1.0.* is for another Python: python scripts/gpu.py prepare --python 3"
    ):
        gpu.unpacked(tmp_path, folder)


@pytest.mark.slow
def test_a_machine_that_lacks_packages_is_told_before_a_stage_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """All stages would fail, and a stage that failed counts as done."""
    monkeypatch.setattr(gpu, "NEEDED", ("torch", "no_such_package"))
    monkeypatch.setattr(gpu, "WHEELS", tmp_path / "none")
    monkeypatch.setattr(sys, "argv", ["gpu.py", "--toy", "--out", str(tmp_path / "out")])
    monkeypatch.setenv("LDM_LITE_TEST_DEVICE", "")
    with pytest.raises(SystemExit):
        gpu.main()
    assert "no no_such_package: python scripts/gpu.py prepare --python 3." in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_stage_that_takes_too_long_is_ended_with_the_processes_that_it_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Also if they ignore the first signal; what they have printed is in the file, and was shown, by then."""
    monkeypatch.setattr(gpu, "GRACE_S", 0.2)
    child = "import signal, time; signal.signal(15, signal.SIG_IGN); print('ready', flush=True); time.sleep(600)"
    parent = f"import subprocess, sys; a = subprocess.Popen([sys.executable, '-c', {child!r}]); print(a.pid); a.wait()"
    output = tmp_path / "report.txt"
    assert gpu.run(["-c", parent], output, 3) == 124
    command, *lines = output.read_text().splitlines()[1:]
    assert command.startswith("$ python -c")
    pid, ready, ended = lines
    assert ready == "ready"
    assert re.fullmatch(r"ended after \d+ s", ended)
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


def test_kernels_are_summed_by_class() -> None:
    """By names that an H100's profiles and Inductor have."""
    names = {
        "sm90_xmma_fprop_implicit_gemm_f16f16_f16f32_f32_nhwckrsc_nhwc_kernel__5x_cudnn": "convolutions",
        "void cudnn::ops::nchwToNhwcKernel<__half, __half, float, false, true, (cudnnKernelDataType_t)0>": "copies",
        "nvjet_hsh_128x256_64x4_2x1_v_bz_coopA_bias_TNT": "products",
        "void cutlass::device_kernel<flash::enable_sm90<flash::FlashAttnFwdSm90>>": "attention",
        "pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<64, 128, 128, 4>>": "attention",
        "fmha_cutlassF_f16_aligned_64x64_rf_sm80(PyTorchMemEffAttention)": "attention",
        "void at::native::(anonymous namespace)::RowwiseMomentsCUDAKernel<c10::Half>": "norms",
        "void at::native::(anonymous namespace)::vectorized_layer_norm_kernel<c10::Half, float>": "norms",
        "triton_red_fused_native_group_norm_12": "norms",
        "void at::native::(anonymous namespace)::CatArrayBatchedCopy_vectorized<>": "copies",
        "Memcpy DtoD (Device -> Device)": "copies",
        "void at::native::vectorized_elementwise_kernel<8, at::native::GeluCUDAKernelImpl>": "pointwise",
        "void cublasLt::splitKreduce_kernel<32, 16, int, __half>": "products",
    }
    assert {name: profiling.class_of(name) for name in names} == names


@pytest.mark.slow
def test_a_stage_is_done_once_and_one_that_was_cut_off_is_not(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, str(ROOT / "scripts/gpu.py"), "--toy", "--out", "a folder", *arguments]
        return subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)

    assert run("probe", "step", "training").returncode == 0
    cut_off = run("step", "profile-max", "--minutes", "0.1")
    assert cut_off.returncode == 1
    assert "step: done before" in cut_off.stdout
    assert "not done: profile-max" in cut_off.stdout
    text = (tmp_path / "a folder" / "report.txt").read_text()
    assert "commit" in text
    assert "GB/s" in text
    assert re.search(r"\| convolutions \| [1-9]", text)
    assert "ended after" in text
    assert re.search(r"^\d{4} operators, of which \d{4} the network's$", text, re.MULTILINE)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_what_a_stage_runs_too(tmp_path: Path, number: signal.Signals) -> None:
    """SIGHUP comes when a connection breaks: what ran on had the GPU when the stages went on."""
    command = [sys.executable, "scripts/gpu.py", "--toy", "--out", str(tmp_path), "compare"]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    wait_for((tmp_path / "compare").exists, "the folder that the benchmark makes", process)

    def children() -> list[Path]:
        commands = {path: path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline")}
        return [path for path, text in commands.items() if f"--out\0{tmp_path}/compare".encode() in text]

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

@triton.jit
def kernel(a):
    return a // 7
'''
    changed = [source[:start] + text.encode() + source[end:] for start, end, text in mutate.changes_of(source)]
    assert len({*changed}) == len(changed)
    for text in changed:
        compile(text, "f", "exec")
        assert b'"""1 < 2"""\n    log.info("%d", 1 + 1)' in text
        assert b"got {a + 1}" in text
        assert b"return a // 7" in text
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
        ("image_headers.py", "components", "test_image_files.py"),
        ("image_headers.py", "TAG_SIZES =", "test_image_files.py"),
        ("text/tokenizer.py", "len(text) > most", "text/test_limits.py"),
        ("tasks/inpaint.py", "strength == 1 and", "test_inpaint.py"),
        ("serve/library.py", "def works", "serve/test_protection.py"),
    ):
        text = (ROOT / "ldm_lite" / file).read_text(encoding="utf-8")
        line = text[: text.index(words)].count("\n") + 1
        near = tests.near(Path("ldm_lite") / file, line)
        assert any(path.startswith(f"tests/{test}") for path in near), (file, near)


@pytest.mark.slow
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
