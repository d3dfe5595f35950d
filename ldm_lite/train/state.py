"""The files that a run goes on from: its state and its log.

Whatever happens while they are written, the last good ones stay.
"""

import contextlib
import json
import logging
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ldm_lite.cli.files import open_file, read_bytes
from ldm_lite.cli.writing import write_whole
from ldm_lite.train import distributed
from ldm_lite.train.loggers import Logger

log = logging.getLogger("ldm_lite")

STATE = "state.pt"
LOG = "log.jsonl"


# ---- state ----------------------------------------------------------------------------------------------------------


def usable(tensor: Tensor) -> bool:
    """Whether a tensor holds finite floats."""
    return tensor.is_floating_point() and bool(torch.isfinite(tensor).all())


def load_finite(network: nn.Module, weights: dict[str, Tensor]) -> None:
    """Load a network's weights.  Raises any exception if they are not those of this network, or not finite."""
    before = network.state_dict()
    for name, value in weights.items():
        if name in before and (value.dtype != before[name].dtype or (value.is_floating_point() and not usable(value))):
            raise ValueError(f"{name} is of {value.dtype}, or not finite")
    network.load_state_dict(weights | {name: distributed.shard_like(weights[name], before[name]) for name in before})


def check_averages(state: dict[int, dict[str, Tensor]], parameters: Sequence[Tensor], step: int) -> None:
    """Check AdamW's averages of the parameters after a step.  Raises any exception for what cannot be them."""
    if type(step) is not int or step < 1:
        raise ValueError(f"it is of step {step!r:.50}")
    for index, values in state.items():
        for name in ("exp_avg", "exp_avg_sq"):
            if values[name].shape != parameters[index].shape or not usable(values[name]):
                raise ValueError(f"{name} of parameter {index} has another shape, or is not finite")
        if float(values["exp_avg_sq"].min()) < 0 or set(values) != {"step", "exp_avg", "exp_avg_sq"}:
            raise ValueError(f"the averages of parameter {index} are not AdamW's")
    if max(int(values["step"]) for values in state.values()) != step:
        raise ValueError(f"it is of step {step}, but its optimiser is not")


@contextlib.contextmanager
def opened_state(path: Path, device: torch.device) -> Iterator[dict[str, Any]]:
    """Yield the content of a state file.  Any error of it in the block becomes a ValueError of one line; OSError."""
    with open_file(path) as file:
        try:
            yield torch.load(file, map_location=device, weights_only=True)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # torch raises nearly anything for a damaged file
            line = (str(error).splitlines() or [type(error).__name__])[0]
            raise ValueError(
                f"{path}: is not the state of this run, or damaged ({line}): use the run's options, or another `out`"
            ) from error


# ---- log ------------------------------------------------------------------------------------------------------------


class Log:
    """The log of a run: a line of JSON for each row.  Rows that find no room on the disk wait for the next."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / LOG
        self.loggers: list[Logger] = []  # that get each row too
        self._waiting: list[str] = []

    def add(self, row: dict[str, float]) -> None:
        """Append a row."""
        for logger in self.loggers:
            logger(row)
        self._waiting.append(json.dumps(row) + "\n")
        try:
            with open(self.path, "ab", buffering=0) as file:
                end = file.tell()
                text = "".join(self._waiting).encode()
                if file.write(text) < len(text):  # a part of a line, which would spoil the next
                    file.truncate(end)
                    raise OSError(f"{self.path}: no room for a line")
            self._waiting.clear()
        except OSError as error:
            log.warning("%s: cannot be written (%s): its lines wait for the next one", self.path, error)

    def trim(self, step: int) -> None:
        """Drop the rows after a step, which will be done again, and lines that cannot be read."""
        if self.path.exists():
            kept = "".join(json.dumps(row) + "\n" for row in read_log(self.path) if row["step"] <= step)
            write_whole(self.path, kept)


def read_log(path: Path) -> list[dict[str, float]]:
    """Return the rows of a run's log, with a warning if some lines cannot be read: a killed run may leave half a line.

    Raises ValueError if it is no regular file; OSError.
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
