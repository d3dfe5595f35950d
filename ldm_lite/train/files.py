"""Write the tensors of a run; an earlier file stays as it is if that fails."""

import contextlib
import errno
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from ldm_lite.cli.writing import replacing


def write_state(path: Path, state: Mapping[str, Any]) -> None:
    """Write what torch.load reads.  Raises OSError."""
    with replacing(path) as part, _os_errors(path):
        torch.save(state, part)


def write_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> None:
    """Write a .safetensors file; equal content has equal bytes.  Raises OSError."""
    with replacing(path) as part, _os_errors(path):
        _write(dict(tensors), dict(metadata or {}), part)


@contextlib.contextmanager
def _os_errors(path: Path) -> Iterator[None]:
    """Make the errors of torch and safetensors an OSError: they do not tell when a disk is full."""
    try:
        yield
    except (RuntimeError, SafetensorError) as error:
        full = shutil.disk_usage(path.parent).free < 2**20
        why = os.strerror(errno.ENOSPC) if full else f"cannot be written ({str(error).splitlines()[0]:.200})"
        raise OSError(errno.ENOSPC if full else errno.EIO, why, os.fspath(path)) from error


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
