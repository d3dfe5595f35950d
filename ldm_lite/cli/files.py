"""Open the files that users name: regular files only, and of limited size, so that no input can hang or fill memory."""

import json
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

KINDS: tuple[tuple[Callable[[int], bool], str], ...] = (
    (stat.S_ISDIR, "folder"),
    (stat.S_ISFIFO, "pipe"),
    (stat.S_ISSOCK, "socket"),
    (lambda mode: not stat.S_ISREG(mode), "device"),
)
# Opening a pipe that has replaced the file since it was checked must not wait either.
_FLAGS = getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_NOCTTY", 0)


def open_file(path: str | os.PathLike[str], most: int | None = None) -> BinaryIO:
    """Open a regular file of at most `most` bytes for reading; `None` = of any size.

    Symbolic links are followed.  Raises OSError if the file cannot be opened, and ValueError, one line, for a folder, a
    pipe, a socket, a device, a name that no file can have, or a larger file.
    """
    try:
        status = os.stat(path)
    except ValueError as error:  # a null character, or a surrogate
        raise ValueError(f"{os.fspath(path)!r}: is not a name that a file can have ({error})") from error
    _check(path, status, most)
    file = open(path, "rb", opener=lambda name, flags: os.open(name, flags | _FLAGS))  # noqa: SIM115  # the caller's
    try:
        _check(path, os.fstat(file.fileno()), most)
    except ValueError:
        file.close()
        raise
    return file


def read_bytes(path: str | os.PathLike[str], most: int) -> bytes:
    """Read a whole regular file of at most `most` bytes.  Raises as open_file does."""
    with open_file(path, most) as file:
        content = file.read(most + 1)
    if len(content) > most:  # it has grown, or is one of /proc, which have no size
        raise _too_large(path, most)
    return content


def read_text(path: str | os.PathLike[str], most: int = 16 * 2**20) -> str:
    """Read a text file in UTF-8, with or without a byte order mark, of at most `most` bytes.

    Line ends become "\\n".  Raises as open_file does, and ValueError, one line, for another encoding.
    """
    try:
        text = read_bytes(path, most).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{Path(path)}: is not text in UTF-8 ({error.reason} at byte {error.start})") from error
    return text.replace("\r\n", "\n").replace("\r", "\n")


def read_json(path: str | os.PathLike[str], most: int = 16 * 2**20) -> Any:
    """Read a JSON file of at most `most` bytes.  Raises as read_text does, and ValueError if it is not JSON."""
    text = read_text(path, most)
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError(f"{Path(path)}: is nested too deeply") from error
    except ValueError as error:
        raise ValueError(f"{Path(path)}: is not valid JSON ({error}): download it again") from error


def _check(path: str | os.PathLike[str], status: os.stat_result, most: int | None) -> None:
    kind = next((kind for test, kind in KINDS if test(status.st_mode)), None)
    if kind is not None:
        raise ValueError(f"{Path(path)}: is a {kind}, wanted a regular file")
    if most is not None and status.st_size > most:
        raise _too_large(path, most)


def _too_large(path: str | os.PathLike[str], most: int) -> ValueError:
    size = f"{most / 2**20:,.0f} MiB" if most >= 2**20 else f"{most:,} bytes"
    return ValueError(f"{Path(path)}: is too large, wanted at most {size}")
