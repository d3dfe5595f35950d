"""The rows of a run's log, also for TensorBoard and Weights & Biases, of the extra `loggers`."""

import importlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

Logger = Callable[[Mapping[str, float]], None]  # takes a row: "step", and values by name


def open_logger(name: str, folder: Path, options: Mapping[str, Any], step: int) -> Logger:
    """Open a log in a run's folder that goes on after a step: "tensorboard" or "wandb" (offline: WANDB_MODE=offline).

    Raises ValueError, one line, if its package is missing.
    """
    return {"tensorboard": _tensorboard, "wandb": _wandb}[name](folder, options, step)


def _imported(module: str, package: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ValueError(f'`log_to={package}` needs its package: pip install "ldm_lite[loggers]"') from error


def _tensorboard(folder: Path, options: Mapping[str, Any], step: int) -> Logger:
    _imported("tensorboard", "tensorboard")
    writer = _imported("torch.utils.tensorboard", "tensorboard").SummaryWriter(
        folder / "tensorboard", purge_step=step + 1
    )

    def log(row: Mapping[str, float]) -> None:
        for name in row.keys() - {"step"}:
            writer.add_scalar(name, row[name], int(row["step"]))
        writer.flush()

    return log


def _wandb(folder: Path, options: Mapping[str, Any], step: int) -> Logger:
    config = {key: value for key, value in options.items() if value is not None}
    name = folder.resolve().name
    run = _imported("wandb", "wandb").init(
        project="ldm_lite", name=name, id=name, resume="allow", dir=folder, config=config
    )

    def log(row: Mapping[str, float]) -> None:
        run.log({key: value for key, value in row.items() if key != "step"}, step=int(row["step"]))

    return log
