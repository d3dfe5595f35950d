"""Open the files that users name: regular files only, and of limited size, so that no input can hang or fill memory."""

import contextlib
import json
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

_KINDS: tuple[tuple[Callable[[int], bool], str], ...] = (
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
    pipe, a socket, a device, a name that no file can have, or a larger file; TypeError for anything but a path.
    """
    if not isinstance(path, (str, os.PathLike)):
        raise TypeError(f"got {path!r:.60} as a file, expected its path")
    try:
        os.stat(path)
    except ValueError as error:  # a null character, or a surrogate
        raise ValueError(f"{os.fspath(path)!r:.200}: is not a valid file name ({error})") from error
    file = open(path, "rb", opener=regular)  # noqa: SIM115  # the caller's
    if most is not None and os.fstat(file.fileno()).st_size > most:
        file.close()
        raise _too_large(path, most)
    return file


def regular(path: str, flags: int) -> int:
    """An `opener` for `open`, in any mode: it refuses all but regular files, and never waits.

    Raises OSError, and ValueError as open_file does.
    """
    with contextlib.suppress(FileNotFoundError):  # it may be created
        _check_kind(path, os.stat(path))
    descriptor = os.open(path, flags | _FLAGS, 0o666)
    try:
        status = os.fstat(descriptor)
        _check_kind(path, status)
        if status.st_size == 0 and not flags & (os.O_WRONLY | os.O_RDWR) and hasattr(os, "pread"):
            os.pread(descriptor, 1, 0)  # some files of /proc and /sys wait for content
    except (ValueError, OSError) as error:
        os.close(descriptor)
        if isinstance(error, ValueError):
            raise
        raise ValueError(f"{path}: is a device, expected a regular file") from error
    return descriptor


def read_bytes(path: str | os.PathLike[str], most: int) -> bytes:
    """Read a whole regular file of at most `most` bytes.  Raises as open_file does."""
    with open_file(path, most) as file:
        content: bytes | None = file.read(most + 1)
    if content is None:
        raise ValueError(f"{Path(path)}: is a device, expected a regular file")  # of /proc, which would wait for more
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
    return parse_json(read_text(path, most), Path(path))


def read_object(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Read an object of a JSON file.  Raises as read_json does, and ValueError for another value."""
    return parse_object(read_text(path), Path(path))


def parse_json(text: str | bytes, where: object) -> Any:
    """Parse JSON.  Raises ValueError, one line that begins with `where`, if it is not JSON."""
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError(f"{where}: is nested too deeply") from error
    except ValueError as error:
        raise ValueError(f"{where}: is not valid JSON ({error}): download it again") from error


def parse_object(text: str | bytes, where: object) -> dict[str, Any]:
    """Parse an object of JSON.  Raises as parse_json does, and ValueError for another value."""
    content = parse_json(text, where)
    if not isinstance(content, dict):
        raise ValueError(f"{where}: holds a JSON {type(content).__name__}, expected an object")
    return content


def _check_kind(path: str | os.PathLike[str], status: os.stat_result) -> None:
    kind = next((kind for test, kind in _KINDS if test(status.st_mode)), None)
    if kind is not None:
        raise ValueError(f"{Path(path)}: is a {kind}, expected a regular file")


def _too_large(path: str | os.PathLike[str], most: int) -> ValueError:
    size = f"{most / 2**20:,.0f} MiB" if most >= 2**20 else f"{most:,} bytes"
    return ValueError(f"{Path(path)}: is too large, expected at most {size}")
