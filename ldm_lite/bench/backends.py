"""The backends that a benchmark compares, in this process or in subprocesses.

A backend runs a cell once, for the comparison, then repeatedly, for timing.  A subprocess receives the same requests as
lines of JSON on its standard input and answers on its standard output; tensors go through a file.
"""

import json
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any, Protocol

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from ldm_lite.bench.measure import Peak, clock
from ldm_lite.bench.workload import Cell, Job, Target, Workload


class Unavailable(Exception):
    """A backend cannot run a cell; the message says why, in one line."""


@dataclass(frozen=True)
class FirstCall:
    """The result and the cost of running a cell for the first time."""

    result: Tensor  # float32, on the CPU
    seconds: float  # including everything that happens once, such as compilation
    peak: int | None  # bytes, without the weights


class Backend(Protocol):
    """Something that runs cells.  Both methods raise Unavailable if it cannot."""

    name: str

    def first(self, cell: Cell) -> FirstCall:
        """Run a cell once."""

    def seconds(self, cell: Cell, calls: int) -> float:
        """Run a cell `calls` times in a row and return the seconds per call."""


class InProcessBackend:
    """A backend in this process."""

    def __init__(self, name: str, device: torch.device, make: Callable[[str], Workload]) -> None:
        """make returns the workload of a dtype, given by its short name; it is called once per dtype."""
        self.name, self.device, self._make = name, device, make
        self._workloads: dict[str, Workload] = {}
        self._jobs: dict[Cell, Job] = {}

    def first(self, cell: Cell) -> FirstCall:
        """Run a cell once."""
        try:
            if cell.dtype not in self._workloads:
                self._workloads[cell.dtype] = self._make(cell.dtype)
            job = self._jobs[cell] = self._workloads[cell.dtype].job(cell.section, cell.batch)
            made: list[Tensor] = []
            with Peak(self.device) as peak:
                seconds = clock(lambda: made.append(job.check()), self.device)
        except torch.OutOfMemoryError as error:
            raise Unavailable("out of memory") from error
        except (ValueError, RuntimeError) as error:  # a kernel that this device lacks, a compiler's or a driver's error
            raise Unavailable(_one_line(error)) from error
        return FirstCall(made[0].float().cpu(), seconds, peak.bytes)

    def seconds(self, cell: Cell, calls: int) -> float:
        """Run a cell `calls` times in a row and return the seconds per call."""
        try:
            return clock(lambda: self._jobs[cell].run(calls), self.device) / calls
        except torch.OutOfMemoryError as error:
            raise Unavailable("out of memory") from error
        except RuntimeError as error:
            raise Unavailable(_one_line(error)) from error


def _one_line(error: Exception) -> str:
    """Return an error's message as one line of at most 200 characters."""
    return textwrap.shorten(f"{error}" or type(error).__name__, 200, placeholder=" ...")


class SubprocessBackend:
    """A backend in a process of its own, `python -m ldm_lite.bench.worker`, which ends with the `with` block."""

    def __init__(self, name: str, target: Target) -> None:
        """name is a configuration or a peer.  Raises Unavailable if it cannot run here."""
        self.name = name
        self._folder = tempfile.TemporaryDirectory()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "ldm_lite.bench.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        answer = self._ask({"backend": name, "target": asdict(target), "folder": self._folder.name})
        self.description = str(answer["description"])

    def __enter__(self) -> "SubprocessBackend":
        return self

    def __exit__(self, *error: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self._process.kill()
        self._folder.cleanup()

    def _ask(self, question: Mapping[str, object]) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps(question) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        answer = json.loads(line) if line else {"unavailable": f"its process ended (status {self._process.poll()})"}
        if "unavailable" in answer:
            raise Unavailable(answer["unavailable"])
        return answer

    def first(self, cell: Cell) -> FirstCall:
        """Run a cell once."""
        answer = self._ask({"do": "first", "cell": asdict(cell)})
        path = Path(answer["file"])
        result = load_file(path)["result"].clone()
        path.unlink()
        return FirstCall(result, answer["seconds"], answer["peak"])

    def seconds(self, cell: Cell, calls: int) -> float:
        """Run a cell `calls` times in a row and return the seconds per call."""
        return float(self._ask({"do": "seconds", "cell": asdict(cell), "calls": calls})["seconds"])


def serve(make: Callable[[str, Target], tuple[str, Backend]], questions: IO[str], answers: IO[str]) -> None:
    """Run the subprocess of SubprocessBackend: make the backend that the first line names, then answer all questions.

    make returns a description and the backend.
    """

    def answer(**values: object) -> None:
        answers.write(json.dumps(values) + "\n")
        answers.flush()

    request = json.loads(questions.readline())
    try:
        description, backend = make(request["backend"], Target.from_dict(request["target"]))
    except Unavailable as error:
        answer(unavailable=str(error))
        return
    answer(description=description)
    for line in questions:
        question = json.loads(line)
        cell = Cell(**question["cell"])
        try:
            if question["do"] == "first":
                first = backend.first(cell)
                path = Path(request["folder"], "result.safetensors")
                save_file({"result": first.result.contiguous()}, path)
                answer(file=str(path), seconds=first.seconds, peak=first.peak)
            else:
                answer(seconds=backend.seconds(cell, question["calls"]))
        except Unavailable as error:
            answer(unavailable=str(error))
