"""What takes part in a benchmark, here or in a process of its own, and the questions that it is asked.

A contender does a cell once, to be compared, and then again and again, to be timed.  One in another process is asked
the same by lines of JSON through its standard input and output; tensors go through a file.
"""

import json
import logging
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any, Protocol

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from ldm_lite.bench.jobs import Cell, Job, Jobs
from ldm_lite.bench.measure import Peak, clock

log = logging.getLogger("ldm_lite")


@dataclass(frozen=True)
class First:
    """What came of doing a cell for the first time."""

    result: Tensor  # float32, on the CPU
    seconds: float  # with everything that happens only once, as compilation
    peak: int | None  # bytes, beside the weights


class Contender(Protocol):
    """Something that can do cells.  Both methods raise Unable where it cannot."""

    name: str

    def first(self, cell: Cell) -> First:
        """Do a cell once."""

    def seconds(self, cell: Cell, calls: int) -> float:
        """Do it so many times in a row -> seconds for each."""


class Unable(Exception):
    """A contender cannot do a cell; the message says why, in one line."""


class Here:
    """A contender in this process."""

    def __init__(self, name: str, device: torch.device, make: Callable[[str], Jobs]) -> None:
        """make gives the jobs of a dtype, by its short name; they are kept."""
        self.name, self.device, self._make = name, device, make
        self._jobs: dict[str, Jobs] = {}
        self._cells: dict[Cell, Job] = {}

    def first(self, cell: Cell) -> First:
        """As of Contender."""
        try:
            if cell.dtype not in self._jobs:
                self._jobs[cell.dtype] = self._make(cell.dtype)
            job = self._cells[cell] = self._jobs[cell.dtype].job(cell.section, cell.batch)
            made: list[Tensor] = []
            with Peak(self.device) as peak:
                seconds = clock(lambda: made.append(job.check()), self.device)
        except torch.OutOfMemoryError as error:
            raise Unable("out of memory") from error
        except (ValueError, NotImplementedError) as error:
            raise Unable(" ".join(str(error).split())) from error
        return First(made[0].float().cpu(), seconds, peak.bytes)

    def seconds(self, cell: Cell, calls: int) -> float:
        """As of Contender."""
        try:
            return clock(lambda: self._cells[cell].run(calls), self.device) / calls
        except torch.OutOfMemoryError as error:
            raise Unable("out of memory") from error


class Apart:
    """A contender in a process of its own, for as long as the `with` block lasts.

    The process runs `python -m ldm_lite.benchmark.worker`, and is told at first what to be.
    """

    def __init__(self, name: str, about: Mapping[str, object]) -> None:
        """about is the worker's first line.  Raises Unable if it cannot be that."""
        self.name = name
        self._folder = tempfile.TemporaryDirectory()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "ldm_lite.bench.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.description = str(self._ask({**about, "folder": self._folder.name})["description"])

    def __enter__(self) -> "Apart":
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
        answer = json.loads(line) if line else {"unable": f"its process ended (status {self._process.poll()})"}
        if "unable" in answer:
            raise Unable(answer["unable"])
        return answer

    def first(self, cell: Cell) -> First:
        """As of Contender."""
        answer = self._ask({"do": "first", "cell": asdict(cell)})
        path = Path(answer["file"])
        result = load_file(path)["result"].clone()
        path.unlink()
        return First(result, answer["seconds"], answer["peak"])

    def seconds(self, cell: Cell, calls: int) -> float:
        """As of Contender."""
        return float(self._ask({"do": "seconds", "cell": asdict(cell), "calls": calls})["seconds"])


def serve(make: Callable[[dict[str, Any]], tuple[str, Contender]], asked: IO[str], answers: IO[str]) -> None:
    """The other end of Apart: become what the first line asks for, then answer until there are no more questions."""

    def answer(**values: object) -> None:
        answers.write(json.dumps(values) + "\n")
        answers.flush()

    about = json.loads(asked.readline())
    try:
        description, contender = make(about)
    except Unable as error:
        answer(unable=str(error))
        return
    answer(description=description)
    for line in asked:
        question = json.loads(line)
        cell = Cell(**question["cell"])
        try:
            if question["do"] == "first":
                first = contender.first(cell)
                path = Path(about["folder"], "result.safetensors")
                save_file({"result": first.result.contiguous()}, path)
                answer(file=str(path), seconds=first.seconds, peak=first.peak)
            else:
                answer(seconds=contender.seconds(cell, question["calls"]))
        except Unable as error:
            answer(unable=str(error))
