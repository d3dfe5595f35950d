"""Ctrl-C, SIGTERM and SIGHUP, which ask a command to stop, and work that must be finished first."""

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType

SIGNALS = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)]  # not on Windows


class Stopped(KeyboardInterrupt):
    """A signal asks to stop: its number and, unless the command's default message suffices, what is kept."""

    def __init__(self, number: int, kept: str | None = None) -> None:
        super().__init__(number, kept)
        self.number, self.kept = number, kept


def stoppable(end: Callable[[int], None]) -> contextlib.AbstractContextManager[list[int]]:
    """Within the block each of SIGNALS raises Stopped; one that is ignored, as under nohup, stays so.

    Yields the numbers of the signals received.  `end(number)` has to end the process at once: it is called during an
    import, which may turn an exception into another error, or abort.
    """
    return _handled(0, {signal.SIG_IGN}, end)


def noted() -> contextlib.AbstractContextManager[list[int]]:
    """Within the block the first signal is only noted, in the list that is yielded; the second raises Stopped.

    Signals that end the process without Python stay as they are.
    """
    return _handled(1, {signal.SIG_IGN, signal.SIG_DFL})


@contextlib.contextmanager
def uninterrupted() -> Iterator[None]:
    """Delay the first signal until the end of the block, so that a file being written is finished."""
    with noted() as received:
        yield
    if received:
        signal.raise_signal(received[0])  # an outer block may only note it


@contextlib.contextmanager
def _handled(
    patience: int, left: set[signal.Handlers], end: Callable[[int], None] | None = None
) -> Iterator[list[int]]:
    received: list[int] = []

    def handle(number: int, frame: FrameType | None) -> None:
        received.append(number)
        while end is not None and frame is not None:
            if frame.f_code.co_filename.startswith("<frozen importlib"):
                end(number)
            frame = frame.f_back
        if len(received) > patience:
            raise Stopped(number)

    before = {}
    if threading.current_thread() is threading.main_thread():
        before = {number: signal.getsignal(number) for number in SIGNALS}
        before = {number: old for number, old in before.items() if old is not None and old not in left}
    try:
        for number in before:
            signal.signal(number, handle)
        yield received
    finally:
        for number, old in before.items():
            signal.signal(number, old)


def ignore_signals(worker: int = 0) -> None:
    """Leave SIGNALS to the main process: for workers, which also get the terminal's signals, and end with it."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
