"""Write files whole or not at all, whenever the process is killed and however full the disk is; and lock folders."""

import contextlib
import logging
import os
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

log = logging.getLogger("ldm_lite")


@contextlib.contextmanager
def replacing(path: Path, unique: bool = False) -> Iterator[Path]:
    """Yield a path beside `path` for a new file or folder, which takes its place at the end of the block.

    If the block fails, an existing file stays as it is.  A killed process leaves .NAME.part, which the next one
    removes; with unique, for processes that may write one name at once, the part has its own name.  Raises OSError with
    a file's name, also if the disk is full.
    """
    part = path.with_name(f".{path.name}.{secrets.token_hex(4)}.part" if unique else f".{path.name}.part")
    try:
        remove(part)
        yield part
        flush(part)  # a machine that loses power must not keep the name without the content
        try:
            part.replace(path)
        except OSError:
            if not (part.is_dir() and path.is_dir()):  # else another process was quicker
                raise
        flush(path.parent)
    except OSError as error:
        if error.filename is None:
            error.filename = os.fspath(path)
        raise
    finally:
        with contextlib.suppress(OSError):
            remove(part)


def write_whole(path: Path, content: bytes | str, unique: bool = False) -> None:
    """Write a file, with text in UTF-8, as `replacing` does.  Raises OSError."""
    with replacing(path, unique) as part:
        part.write_bytes(content.encode() if isinstance(content, str) else content)


def flush(path: Path) -> None:
    """Flush a file, or the names in a folder, to the disk.  Raises OSError."""
    if os.name == "nt" and path.is_dir():  # Windows opens no folders
        return
    descriptor = os.open(path, os.O_RDWR if os.name == "nt" else os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove(path: Path) -> None:
    """Remove a file or a folder, if it is there.  Raises OSError."""
    with contextlib.suppress(FileNotFoundError):
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()


_held: set[Path] = set()  # locks of this process, which the system lets it take again


@contextlib.contextmanager
def locked(path: Path, advice: str, shared: bool = False) -> Iterator[None]:
    """Hold a lock file of a folder within the block; with shared, other processes may share it.

    The lock ends with its process, even if that is killed; processes that it forks do not hold it.  Raises ValueError,
    one line with the advice, if another process, or another thread of this one, holds it.  On Windows, and where files
    cannot be locked, other processes are not kept out.
    """
    path = path.resolve()
    if path in _held:
        raise ValueError(f"{path.parent}: this process is writing to it already: {advice}")
    _held.add(path)
    try:
        with open(path, "a+", encoding="utf-8") as file:
            if fcntl is not None:
                try:
                    # Not flock, whose locks belong to the open file, which forked processes have too.
                    fcntl.lockf(file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
                except (BlockingIOError, PermissionError) as error:
                    file.seek(0)
                    holder = f"process {number}" if (number := file.read(20).strip()) else "another process"
                    raise ValueError(f"{path.parent}: {holder} is writing to it: {advice}") from error
                except OSError as error:
                    message = "%s: its file system has no locks (%s): take care that only one process writes to it"
                    log.warning(message, path.parent, error.strerror)
            file.truncate(0)
            file.write("" if shared else f"{os.getpid()}\n")
            file.flush()
            yield
    finally:
        _held.remove(path)
