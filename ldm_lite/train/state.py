"""The files that a run continues from: its state and its log.

Whatever happens while they are written, the last good ones stay.
"""

import contextlib
import errno
import importlib
import json
import logging
import os
import pickle
import secrets
import warnings
import zipfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from ldm_lite.cli.files import open_file, read_bytes, read_text, regular
from ldm_lite.cli.version import pip_install
from ldm_lite.cli.writing import remove, replacing, write_whole
from ldm_lite.train import distributed

log = logging.getLogger("ldm_lite")

STATE = "state.pt"
LOG = "log.jsonl"


# ---- state ----------------------------------------------------------------------------------------------------------


def load_weights(network: nn.Module, weights: dict[str, Tensor]) -> None:
    """Load a network's weights, divided among processes as it is.  Raises any exception for another network's."""
    before = network.state_dict()
    for name, value in weights.items():
        if name in before and value.dtype != before[name].dtype:
            raise ValueError(f"{name} is of {value.dtype}")
    network.load_state_dict(weights | {name: distributed.shard_like(weights[name], before[name]) for name in before})


@contextlib.contextmanager
def opened_state(path: Path, whole: bool = True) -> Iterator[dict[str, Any]]:
    """Yield the content of a state file, which stays on the disk: tensors go to their devices one by one when used.

    whole: look through its tensors, which reads all of it.  Any error of it in the block becomes a ValueError of one
    line; OSError.
    """
    with open_file(path):
        try:
            state = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
            if whole:
                check_finite(state)
            if type(state["step"]) is not int or state["step"] < 1:
                raise ValueError(f"it is of step {state['step']!r:.50}")
            yield state
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # torch raises nearly anything for a damaged file
            line = (str(error).splitlines() or [type(error).__name__])[0]
            raise ValueError(
                f"{path}: is not the state of this run, or damaged ({line}): use the run's options, or another `out`"
            ) from error


def check_finite(state: object) -> None:
    """Raise ValueError if a tensor of the state holds numbers that are not finite, of a divided one this process's."""
    for value in tree_leaves(state):
        local = value.to_local() if isinstance(value, DTensor) else value
        if isinstance(local, Tensor) and local.is_floating_point() and not bool(torch.isfinite(local).all()):
            raise ValueError("it holds numbers that are not finite")


def write_state(path: Path, state: Mapping[str, Any]) -> None:
    """Write a file for torch.load; an earlier file stays as it is if that fails.  Raises OSError.

    If the disk is full, some versions of torch, such as 2.6, write what fits to a path without an error: so it gets an
    open file, and the end of the file is checked.
    """
    with replacing(path) as part, open(part, "wb") as file:
        try:
            torch.save(state, file)
        except RuntimeError as error:  # of torch, in place of the OSError
            raise OSError(errno.EIO, f"cannot be written ({str(error).splitlines()[0]:.200})", path) from error
        file.flush()
        if not zipfile.is_zipfile(part):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)


# ---- divided state --------------------------------------------------------------------------------------------------


def write_divided(folder: Path, tensors: Mapping[str, Any]) -> None:
    """Write tensors in nested dicts, each process its own parts.  All must call it.  Raises OSError in all of them."""
    if distributed.rank() == 0:
        remove(folder)
    distributed.barrier()
    try:
        save(dict(tensors), storage_writer=FileSystemWriter(folder))
    except CheckpointException as error:
        raise OSError(errno.EIO, f"cannot be written ({_cause(error)})", os.fspath(folder)) from error


def read_divided(folder: Path, tensors: dict[str, Any]) -> None:
    """Fill tensors in nested dicts, in each process its own parts, however many have written them.

    All must call it.  Raises ValueError if they are different ones, damaged or not finite.
    """
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")  # one process
            load(tensors, storage_reader=_Reader(folder))
    except CheckpointException as error:
        raise ValueError(f"{folder.name}: {_cause(error)}") from error
    check_finite(tensors)


def _cause(error: CheckpointException) -> str:
    """The first line of an error in one of the processes."""
    cause, _ = next(iter(error.failures.values()))
    return (str(cause).splitlines() or [type(cause).__name__])[0][:200]


class _Reader(FileSystemReader):
    """Torch's, except for the list of tensors: torch runs any code in that pickle, and in values that are bytes."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        with open_file(folder / ".metadata") as file:
            self._metadata: Metadata = _Unpickler(file).load()

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self._metadata


NAMES = {  # classes in the list of tensors of a divided state
    "torch.distributed.checkpoint.metadata": "ChunkStorageMetadata Metadata MetadataIndex StorageMeta "
    "TensorProperties TensorStorageMetadata _MEM_FORMAT_ENCODING",
    "torch.distributed.checkpoint.filesystem": "_StorageInfo",
    "torch": "Size float64 float32 float16 bfloat16 int64 int32 uint8 bool",
    "torch.serialization": "_get_layout",
    "pathlib": "PosixPath WindowsPath",
    "pathlib._local": "PosixPath WindowsPath",
}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if name not in NAMES.get(module, "").split():
            raise pickle.UnpicklingError(f"{module}.{name} has no place in a list of tensors")
        return super().find_class(module, name)


_DTYPES = {torch.float16: "F16", torch.float32: "F32", torch.int32: "I32"}  # in .safetensors files


def write_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> None:
    """Write a .safetensors file of tensors on the CPU; an earlier one stays as it is if that fails.  Raises OSError.

    Equal content has equal bytes.  The format's own library orders metadata at random, does not say when a disk is
    full, and leaves a file of a random name if it is killed.
    """
    header: dict[str, Any] = {"__metadata__": dict(sorted(metadata.items()))} if metadata else {}
    end, ordered = 0, sorted(tensors.items(), key=lambda item: (-item[1].element_size(), item[0]))
    for name, tensor in ordered:
        begin, end = end, end + tensor.nbytes
        header[name] = {"dtype": _DTYPES[tensor.dtype], "shape": [*tensor.shape], "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text = text.ljust(-(-len(text) // 8) * 8)  # so that numbers lie at multiples of their size
    with replacing(path) as part, open(part, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for _, tensor in ordered:
            file.write(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().data)


# ---- log ------------------------------------------------------------------------------------------------------------

Logger = Callable[[Mapping[str, float]], None]  # takes a row: "step", and values by name


def open_logger(name: str, folder: Path, options: Mapping[str, Any], step: int) -> Logger:
    """Open a log in a run's folder that continues after a step: "tensorboard" or "wandb" (offline: WANDB_MODE=offline).

    Raises ValueError, one line, if its package is missing.
    """

    def imported(module: str) -> Any:
        try:
            return importlib.import_module(module)
        except ImportError as error:
            raise ValueError(f"`log_to={name}` needs its package: {pip_install('loggers')}") from error

    if name == "tensorboard":
        imported("tensorboard")
        writer = imported("torch.utils.tensorboard").SummaryWriter(folder / "tensorboard", purge_step=step + 1)

        def log_row(row: Mapping[str, float]) -> None:
            for key in row.keys() - {"step"}:
                writer.add_scalar(key, row[key], int(row["step"]))
            writer.flush()

    else:
        config, name_of_run = {key: value for key, value in options.items() if value is not None}, folder.resolve().name
        place = folder / "wandb.id"  # other folders may have the same name
        if not place.exists():
            write_whole(place, secrets.token_hex(8))
        run = imported("wandb").init(
            project="ldm_lite", name=name_of_run, id=read_text(place), resume="allow", dir=folder, config=config
        )

        def log_row(row: Mapping[str, float]) -> None:
            run.log({key: value for key, value in row.items() if key != "step"}, step=int(row["step"]))

    return log_row


class Log:
    """The log of a run: a line of JSON for each row.  Rows that do not fit on the disk wait for the next."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / LOG
        self.loggers: list[Logger] = []  # loggers that get each row too
        self._waiting: list[str] = []

    def add(self, row: dict[str, float]) -> None:
        """Append a row."""
        for logger in self.loggers:
            logger(row)
        self._waiting.append(json.dumps(row) + "\n")
        try:
            with open(self.path, "ab", buffering=0, opener=regular) as file:
                end = file.tell()
                text = "".join(self._waiting).encode()
                if file.write(text) < len(text):  # a part of a line, which would spoil the next
                    file.truncate(end)
                    raise OSError(f"{self.path}: no room for a line")
            self._waiting.clear()
        except OSError as error:
            log.warning("%s: cannot be written (%s): its lines are kept for the next write", self.path, error)

    def trim(self, step: int) -> None:
        """Drop the rows after a step, which will be done again, and lines that cannot be read."""
        if self.path.exists():
            kept = "".join(json.dumps(row) + "\n" for row in read_log(self.path) if row["step"] <= step)
            write_whole(self.path, kept)


def read_log(path: Path) -> list[dict[str, float]]:
    """Return the rows of a run's log, with a warning if some lines cannot be read: a killed run may leave half a line.

    Raises ValueError if it is not a regular file; OSError.
    """
    rows, lines = [], read_bytes(path, 2**30).decode("utf-8", errors="replace").splitlines()
    for line in lines:
        with contextlib.suppress(ValueError, RecursionError, TypeError, KeyError):
            row = json.loads(line)
            value = row["loss"] if "loss" in row else row["validation"]
            if type(row["step"]) is int and isinstance(value, (int, float)):
                rows.append(row)
    if len(rows) < len(lines):
        log.warning("%s: %d lines of it cannot be read, they are left out", path, len(lines) - len(rows))
    return rows
