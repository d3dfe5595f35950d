"""A configuration or a peer in a separate process, and the code that runs in that process.

A backend runs a cell once, for the comparison, then repeatedly, for timing.
"""

import contextlib
import gc
import math
import multiprocessing
import signal
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from ldm_lite.bench.measure import clock
from ldm_lite.bench.options import PEERS, BenchOptions
from ldm_lite.bench.work import Cell, OutOfTime, Unavailable


class FirstCall(NamedTuple):
    """The result and the cost of running a cell for the first time."""

    result: Tensor  # float32, on the CPU
    seconds: float  # including everything that happens once, such as compilation
    peak: int | None  # bytes of tensors without the weights, on CUDA


class InProcessBackend:
    """A backend in this process.  It keeps the networks of one precision and the inputs of one cell.

    Its methods raise Unavailable if it cannot run a cell.
    """

    def __init__(self, name: str, device: torch.device, make: Callable[[str], Any]) -> None:
        """make returns the workload in a dtype, given by its short name."""
        self.name, self.device, self._make = name, device, make
        self._dtype = ""  # of the last cell, as are these
        self._workload: Any = None
        self._inputs: Any = None

    def load(self, dtype: str) -> None:
        """Load the networks in a dtype, given by its short name, unless they are loaded."""
        with _explained():
            if self._dtype != dtype:
                self._dtype, self._workload = "", None  # frees the other precision's
                self._dtype, self._workload = dtype, self._make(dtype)

    @property
    def compiles(self) -> bool:
        """Whether the first call of a cell takes long."""
        return takes_long(self.name)

    def begin(self, cell: Cell) -> None:
        """Do nothing: `first` runs the cell."""

    def is_ready(self, seconds: float) -> bool:
        """Whether `first` would not wait."""
        return True

    def stop(self) -> None:
        """Do nothing."""

    def first(self, cell: Cell) -> FirstCall:
        """Run a cell once."""
        results: list[Tensor] = []
        on_cuda = self.device.type == "cuda"
        with _explained():
            self._inputs = None
            self.load(cell.dtype)
            self._inputs = inputs = self._workload.inputs(cell.batch)
            work = getattr(self._workload, "prediction" if cell.section == "step" else cell.section)
            if on_cuda:
                gc.collect()
                torch.cuda.empty_cache()  # free the memory left by a batch that did not fit
                torch.cuda.reset_peak_memory_stats(self.device)
                before = torch.cuda.memory_allocated(self.device)
            seconds = clock(lambda: results.append(work(inputs)), self.device)
            peak = torch.cuda.max_memory_allocated(self.device) - before if on_cuda else None
            if on_cuda and cell.section == "step":
                self._workload.steps(inputs, 2)  # a CUDA graph is captured at the third step, which is not to be timed
            return FirstCall(results[0].float().cpu(), seconds, peak)

    def seconds(self, cell: Cell, calls: int) -> float:
        """Run the cell of the last `first` some times in a row, and return the seconds per call."""
        workload, inputs = self._workload, self._inputs

        def work() -> None:
            if cell.section == "step":
                return workload.steps(inputs, calls)
            for _ in range(calls):
                getattr(workload, cell.section)(inputs)

        with _explained():
            return clock(work, self.device) / calls


@contextlib.contextmanager
def _explained() -> Iterator[None]:
    """Turn errors of a kernel that this device lacks, of a compiler or of a driver into Unavailable, in one line."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise Unavailable("out of memory") from error
    except (ValueError, RuntimeError) as error:
        text = f"{error}" or type(error).__name__
        raise Unavailable(textwrap.shorten(text, 200, placeholder=" ...")) from error


Backend: TypeAlias = "InProcessBackend | SubprocessBackend"
Make: TypeAlias = Callable[[str, BenchOptions], tuple[str, Backend]]


def make_backend(name: str, options: BenchOptions) -> tuple[str, Backend]:
    """Return a description and the backend: a peer, one of our configurations, or "reference".

    Raises Unavailable if it is not installed or does not support this device.
    """
    from ldm_lite.bench import ours, theirs

    if options.threads is not None:
        torch.set_num_threads(options.threads)
    device = torch.device(options.device)
    if name in PEERS:
        versions = theirs.versions(name, options)
        return versions, InProcessBackend(name, device, lambda dtype: theirs.PeerWorkload(name, options, dtype))
    row = ours.REFERENCE if name == "reference" else ours.configuration(name)
    return row.title, InProcessBackend(name, device, lambda dtype: ours.OurWorkload(row, options, dtype))


class SubprocessBackend:
    """A backend in a separate process, which ends with the `with` block."""

    def __init__(
        self,
        name: str,
        options: BenchOptions,
        make: Make = make_backend,
        deadline: float = math.inf,
        loads: str | None = None,
    ) -> None:
        """name is a configuration or a peer.  At the deadline, of time.monotonic, the process is ended.

        With `loads`, a dtype, the process loads its networks in that dtype; this call does not wait, later ones do.
        Raises Unavailable if it cannot run here, or in time.
        """
        self.name, self._deadline = name, deadline
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(name, options, theirs, make))
        self._process.start()
        theirs.close()
        self.description = ""  # until the process has begun
        self._asked = ["description"]  # questions that the process has not answered, and its first message
        self._last: Any = None  # its last answer
        self._begun: Cell | None = None  # the cell whose first call runs
        if loads is None:
            self.wait_until_ready()
        else:
            self._ask("load", loads)

    @property
    def compiles(self) -> bool:
        """Whether the first call of a cell takes long."""
        return takes_long(self.name)

    def wait_until_ready(self) -> None:
        """Wait for the process to begin and to load.  Raises Unavailable if it cannot run here, or in time."""
        try:
            self._answer()
        except Unavailable:
            if not self.description:
                raise  # else the first call of a cell tries again, and says why

    def __enter__(self) -> "SubprocessBackend":
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        self._connection.close()  # ends the process, unless it is computing
        if kind is None:
            self._process.join(10)
        self._process.kill()

    def begin(self, cell: Cell) -> None:
        """Have the process run a cell the first time, and do not wait for it."""
        self._begun = cell
        self._ask("first", cell)

    def is_ready(self, seconds: float) -> bool:
        """Whether `first` would not wait, after waiting for that at most so many seconds."""
        until = time.monotonic() + seconds
        while self._asked:
            if not self._connection.poll(max(0.0, until - time.monotonic())):
                return False
            self._receive()
        return True

    def stop(self) -> None:
        """End the process: later calls raise OutOfTime."""
        self._deadline = -math.inf
        self._process.kill()

    def _ask(self, *question: object) -> None:
        if time.monotonic() < self._deadline:
            with contextlib.suppress(OSError):  # it has ended: _receive says so
                self._connection.send(question)
            self._asked.append(str(question[0]))

    def _receive(self) -> None:
        """Receive an answer, waiting for it."""
        try:
            self._last = self._connection.recv()
        except (EOFError, OSError):
            self._process.join(10)
            if self.description or not isinstance(self._last, Unavailable):  # which has said why it cannot begin
                self._last = Unavailable(f"its process ended (status {self._process.exitcode})")
            self._asked = []
            return
        if self._asked.pop(0) == "description" and not isinstance(self._last, Unavailable):
            self.description = self._last

    def _answer(self) -> Any:
        """Return the answer to the last question, once all have come."""
        while self._asked or time.monotonic() >= self._deadline:
            left = max(0.0, self._deadline - time.monotonic())
            if left == 0 or not self._connection.poll(None if left == math.inf else left):
                self.stop()
                raise OutOfTime("stopped for lack of time: the `minutes` are over")
            self._receive()
        if isinstance(self._last, Unavailable):
            raise self._last
        return self._last

    def first(self, cell: Cell) -> FirstCall:
        """Return the result and the cost of running a cell once."""
        if self._begun != cell:
            self.begin(cell)
        self._begun = None
        result, seconds, peak = self._answer()
        return FirstCall(torch.from_numpy(result), seconds, peak)

    def seconds(self, cell: Cell, calls: int) -> float:
        """Run the cell of the last `first` some times in a row, and return the seconds per call."""
        self._ask("seconds", cell, calls)
        return float(self._answer())


def takes_long(name: str) -> bool:
    """Whether the first call of a configuration, or of a peer, compiles."""
    from ldm_lite.bench import ours

    if name in PEERS:
        return name.endswith("compiled")
    row = ours.CONFIGURATIONS.get(name.partition("+")[0])
    return row is not None and row.compile not in ("off", "graph")


def _serve(name: str, options: BenchOptions, connection: Connection, make: Make) -> None:
    """Run the process: send a description of the backend, then an answer to each question."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the benchmark ends it
    sys.stdout = sys.stderr  # libraries may print
    with contextlib.suppress(EOFError, BrokenPipeError):  # the benchmark has ended
        try:
            description, backend = make(name, options)
            connection.send(description)
        except Unavailable as error:
            connection.send(error)
            return
        while True:
            method, *arguments = connection.recv()
            try:
                answer = getattr(backend, method)(*arguments)
            except Unavailable as error:
                answer = error
            if isinstance(answer, FirstCall):
                answer = (answer.result.numpy(), answer.seconds, answer.peak)
            connection.send(answer)
