"""Run a command: show its messages, print errors as one line, return the exit status."""

import contextlib
import errno
import logging
import os
import re
import signal
import sys
import unicodedata
import warnings
from collections.abc import Callable, Sequence
from typing import Any, TextIO, cast

from tqdm import tqdm

from ldm_lite.cli import threads
from ldm_lite.cli.progress import end_bars
from ldm_lite.cli.signals import Stopped, stoppable

# How messages name an option: `name`, `name=VALUE` or `name="value"`, as in Python.
_OPTION = re.compile(r"`([a-z]\w*)(?:=([^`]*))?`")


def as_flags(message: str) -> str:
    """Replace the Python names of options in a message by flags.

    "leave out `skip_grid`, or give `vae=FILE`" -> "leave out --skip-grid, or give --vae FILE".
    """

    def flag(match: re.Match[str]) -> str:
        name, value = match[1].replace("_", "-"), (match[2] or "").strip("\"'")
        return f"--{name}" + (f" {value}" if value and value != "True" else "")

    return _OPTION.sub(flag, message)


# Joiners are part of scripts and of emoji; all other characters of these kinds move the cursor, hide or reorder text.
_HIDDEN, _JOINERS = ("Cc", "Cf", "Cs", "Zl", "Zp"), "\u200c\u200d"


def printable(text: str) -> str:
    """Replace control characters, which files may have in their names and keys, by escapes: one line, without effects.

    They are those of ASCII and Unicode: ESC, line breaks, marks that change the direction of text, surrogates, ...
    """
    if text.isascii() and text.isprintable():
        return text
    return "".join(repr(c)[1:-1] if unicodedata.category(c) in _HIDDEN and c not in _JOINERS else c for c in text)


MOST_SHOWN_OF_A_MESSAGE = 2000  # characters


def shortened(text: str) -> str:
    """Leave out the middle of a message that quotes too much: names in files may have megabytes."""
    most = MOST_SHOWN_OF_A_MESSAGE // 2
    return text if len(text) <= 2 * most else f"{text[:most]} ... {text[-most:]}"


class _Printable:
    """A terminal's stream that control characters cannot reach."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """Write text in which all control characters but ends of lines and tabs are escapes."""
        self._stream.write(re.sub(r"[^\n\t]+", lambda match: printable(match[0]), text))
        return len(text)


MOST_SHOWN = 10_000


class _Messages(logging.Handler):
    """Log records as single lines on stderr, each once, above a progress bar."""

    def __init__(self) -> None:
        super().__init__()
        self._shown: set[str] = set()

    def emit(self, record: logging.LogRecord) -> None:
        line = ("warning: " if record.levelno >= logging.WARNING else "") + as_flags(
            printable(shortened(record.getMessage()))
        )
        if len(self._shown) > MOST_SHOWN:  # a server runs for months
            self._shown.clear()
        if line not in self._shown:
            self._shown.add(line)
            tqdm.write(line, file=sys.stderr)


def run(body: Callable[[], None], options: Sequence[object] = (), kept: str = "nothing is saved") -> int:
    """Run a command's body and return its exit status: 0, 1 (the machine failed), 2 (bad input) or 128 + a signal's.

    options are the command's dataclasses.  An error is one line on stderr, with options as flags; with debug set it is
    a traceback, and warnings of libraries are shown.  SIGINT (Ctrl-C, 130), SIGTERM (143) and SIGHUP (129) stop the
    command, with a line that says what is `kept`.  If stdout is closed, as by `| head -1`, the command stops
    silently with status 141.
    """

    def end(number: int) -> None:
        with contextlib.suppress(OSError):
            os.write(2, f"interrupted: {as_flags(kept)}\n".encode())
        os._exit(128 + number)

    threads.prepare()  # for this process, whose body loads torch, and for those that it starts
    with stoppable(end) as received:
        try:
            return _run(body, options, received)
        except BaseException as error:
            if not received and not isinstance(error, KeyboardInterrupt):
                raise
            end_bars()
            stopped = error if isinstance(error, Stopped) else Stopped((*received, signal.SIGINT)[0])
            print(f"interrupted: {as_flags(stopped.kept or kept)}", file=sys.stderr)
            return 128 + stopped.number


def _run(body: Callable[[], None], options: Sequence[object], received: Sequence[int]) -> int:
    log, messages, debug = logging.getLogger("ldm_lite"), _Messages(), any(getattr(o, "debug", False) for o in options)
    log.addHandler(messages)
    log.setLevel(logging.INFO)
    _open_streams()
    stdout = sys.stdout
    if stdout.isatty():  # a pipe or a file gets the names as they are
        sys.stdout = cast(TextIO, _Printable(stdout))
    try:
        with warnings.catch_warnings():
            if not debug:  # our own messages say what users need to know
                warnings.simplefilter("ignore")
            body()
        sys.stdout.flush()  # here, since at interpreter exit it is too late to set the status
        return 0
    except Exception as error:
        if received:  # an interrupted import may raise any other error
            raise
        if isinstance(error, BrokenPipeError) and _is_unread():
            return 141
        if debug:
            raise
        end_bars()
        message, status = _explain(error, options)
        print(f"error: {printable(shortened(message))}", file=sys.stderr)
        return status
    finally:
        sys.stdout = stdout
        log.removeHandler(messages)


def _open_streams() -> None:
    """Make stdout and stderr accept any file name, and discard everything if they are closed (`>&-`)."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "w", errors="backslashreplace"))  # noqa: SIM115  # for as long as the process lasts
        elif getattr(stream, "errors", None) == "strict":
            stream.reconfigure(errors="backslashreplace")


def _is_unread() -> bool:
    """Whether the other end of stdout is closed; if so, drop the remaining output."""
    try:
        print(flush=True)  # an empty line, since a failed flush may have left nothing to try again
    except BrokenPipeError:
        _drop_output()
        return True
    return False


def _drop_output() -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def show(text: str) -> int:
    """Print a text and return the exit status, as that of `run`, if it cannot be written."""
    try:
        print(text, end="", flush=True)
    except BrokenPipeError:
        _drop_output()
        return 141
    except OSError as error:
        _drop_output()
        print(f"error: {_explain(error, ())[0]}", file=sys.stderr)
        return 1
    return 0


def _cheaper(options: Sequence[object], on_cpu: bool) -> str:
    """Suggest what to try when memory runs out: the cheapest measure not yet taken."""
    values = {name: value for group in options for name, value in vars(group).items()}
    if "checkpointing" in values:  # training
        return "a smaller --batch-size, with --accumulate" if values["checkpointing"] else "--checkpointing"
    if "chunks" in values:  # export, whose other options are about what runs later
        values = {"batches": values["batches"]}
    one_by_one = "tile" in values and "stage_3" not in values  # images are upscaled one at a time
    steps = {
        "--batch-size 1": (values.get("batch_size") or 1) > 1 and not one_by_one,
        "--batches 1": values.get("batches", (1,)) != (1,),
        "--vae-tiling": not on_cpu and not values.get("vae_tiling", True),
        "--tile 64": values.get("tile", 0) > 64 and values.get("stage_3", "") is not None,
        "--dtype fp16": values.get("dtype") in ("fp32", "float32"),
        "--offload model": not on_cpu and values.get("offload", "") is None,
        "--storage int8": values.get("storage", "") is None,
        "--offload sequential": not on_cpu and values.get("offload") == "model",
    }
    return next((step for step, remains in steps.items() if remains), "a smaller image")


def _explain(error: Exception, options: Sequence[object]) -> tuple[str, int]:
    """Return the message line and the exit status for an exception."""
    texts = ("CUDA error: out of memory", "alloc_cpu", "ALLOC_FAILED")  # the last: cuBLAS and cuDNN
    if isinstance(error, MemoryError) or "OutOfMemory" in type(error).__name__ or any(t in str(error) for t in texts):
        on_cpu = isinstance(error, MemoryError) or "alloc_cpu" in str(error)
        return f"out of memory: try {_cheaper(options, on_cpu)}", 1
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        return f"the disk is full: {error.filename or 'the output'} was not written; earlier images stay", 1
    line = " ".join(str(error).split()) or type(error).__name__
    if isinstance(error, OSError) and error.filename and error.strerror:
        line = f"{error.filename}: {error.strerror}"
    if isinstance(error, ChildProcessError):
        return as_flags(line), 1
    if isinstance(error, (ValueError, OSError)):
        return as_flags(line), 2
    return f"{type(error).__name__}: {line} (a bug in ldm_lite: --debug shows where)", 1
