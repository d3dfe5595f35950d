"""Write the files of a run: whole or not at all, whenever it is killed and however full the disk is."""

import contextlib
import errno
import json
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor


def write_atomically(path: Path, write: Callable[[Path], object]) -> None:
    """Write a temporary file and rename it to `path`; an earlier file stays as it is if writing fails.

    Raises OSError, also for the errors of torch and safetensors when a disk is full.
    """
    temporary = path.with_name(f".{path.name}.part")
    try:
        try:
            write(temporary)
            with open(temporary, "rb+") as file:
                os.fsync(file.fileno())  # a machine that loses power must not keep the name without the content
        except (RuntimeError, SafetensorError) as error:
            full = shutil.disk_usage(path.parent).free < 2**20  # they do not tell
            why = os.strerror(errno.ENOSPC) if full else f"cannot be written ({str(error).splitlines()[0]:.200})"
            raise OSError(errno.ENOSPC if full else errno.EIO, why, os.fspath(path)) from error
        temporary.replace(path)
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)


def write_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> None:
    """Write a .safetensors file atomically; equal content has equal bytes.  Raises as write_atomically does."""
    write_atomically(path, lambda part: _write(dict(tensors), dict(metadata or {}), part))


def _write(tensors: dict[str, Tensor], metadata: dict[str, str], path: Path) -> None:
    """Write a .safetensors file.  Its library orders metadata at random, and here they are sorted.

    The library writes to a file of a random name, which a killed process leaves, and which only its owner may read: it
    gets a folder, which the next process clears, and the file the rights of others.
    """
    folder = path.with_suffix(".folder")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    try:
        path.touch()
        written = folder / "tensors"
        save_file(tensors, written, metadata=metadata)
        with contextlib.suppress(OSError):  # file systems without rights
            written.chmod(path.stat().st_mode)
        written.replace(path)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    with open(path, "rb+") as file:
        size = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(size))
        if metadata:
            header["__metadata__"] = dict(sorted(metadata.items()))
        text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode().ljust(size)
        assert len(text) == size
        file.seek(8)
        file.write(text)
