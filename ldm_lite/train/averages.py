"""Write the EMA of a given length afterwards: `python -m ldm_lite.train.averages RUN --length 0.1`.

A run with --ema-lengths stores snapshots of two power-function averages (trainer.py); from these the average of any
length and step is a linear combination.  Karras et al. 2024 (EDM2), sec. 3 and appendix C.
"""

import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import safe_open
from torch import Tensor

from ldm_lite.cli import console, flags
from ldm_lite.cli.files import open_file
from ldm_lite.cli.options import CheckedOptions
from ldm_lite.core.declare import option
from ldm_lite.train.trainer import FOLDER, Weights, exponent

NAME = re.compile(r"(\d+)-(0\.\d+)\.safetensors")


def products(steps: NDArray[np.float64], exponents: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the scalar products (N,N) of the power functions of N averages, after steps (N,).  EDM2, algorithm 3."""
    t, u, g, h = steps[:, None], steps, exponents[:, None], exponents
    earlier, later, power = np.minimum(t, u), np.maximum(t, u), np.where(t < u, h, g)  # the later one's
    result: Any = (g + 1) * (h + 1) / (g + h + 1) * (earlier / later) ** power / later
    return result


def coefficients(steps: Sequence[int], lengths: Sequence[float], step: int, length: float) -> NDArray[np.float64]:
    """Return the factors with which snapshots add up to the nearest average of a length after a step."""
    exponents = np.array([exponent(snapshot) for snapshot in (*lengths, length)])
    matrix = products(np.array([*steps, step], dtype=np.float64), exponents)
    factors: Any = np.linalg.lstsq(matrix[:-1, :-1], matrix[:-1, -1], rcond=None)[0]
    return factors


def reconstructed(folder: Path, length: float, step: int | None = None) -> tuple[Weights, int]:
    """Return the weights of the average of a length after a step (default: the last), and the step.

    Raises ValueError, one line, if the folder holds no snapshots, or none of the step.
    """
    matches = {path: match for path in sorted(folder.glob(f"{FOLDER}/*")) if (match := NAME.fullmatch(path.name))}
    if not matches:
        raise ValueError(f"{folder}: holds no averages: train with `ema_lengths`")
    steps = [int(match[1]) for match in matches.values()]
    last = max(steps) if step is None else step
    if last not in steps:
        raise ValueError(f"got `step` {last}, expected one of {', '.join(map(str, sorted(set(steps))))}")
    used = [(path, at, float(match[2])) for (path, match), at in zip(matches.items(), steps, strict=True) if at <= last]
    factors = coefficients([at for _, at, _ in used], [stored for _, _, stored in used], last, length)
    total: dict[str, Tensor] = {}
    for (path, _, _), factor in zip(used, factors.tolist(), strict=True):
        open_file(path).close()  # a pipe would wait
        with safe_open(path, "pt") as file:
            for key in file.keys():  # noqa: SIM118
                value = factor * file.get_tensor(key).double()
                total[key] = total[key] + value if key in total else value
    return {key: value.float() for key, value in total.items()}, last


@dataclass(frozen=True)
class AverageOptions(CheckedOptions):
    """Which average to write."""

    run: str | None = option(None, "folder of a run with --ema-lengths", positional=True)
    length: float = option(0.1, "length of the average, as a fraction of the training", within=(0.001, 0.25))
    step: int | None = option(None, "step of a snapshot (default: the last)", within=(1, 10**9))
    out: str | None = option(None, "file to write (default: average-LENGTH.safetensors in the folder)")
    debug: bool = option(False, "show the traceback of an error")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status."""
    about = "Write the average of any length of the weights of a run."
    (options,), _ = flags.parse(argv, "train.averages", about, (AverageOptions,))
    return console.run(lambda: run(options), (options,))


def run(options: AverageOptions) -> None:
    """Write the average, and print the file's path."""
    from ldm_lite.train.run import write_average

    if options.run is None:
        raise ValueError("expected the folder of a run with `ema_lengths`")
    folder = Path(options.run)
    out = folder / f"average-{options.length:g}.safetensors" if options.out is None else Path(options.out)
    if options.out is not None and out.exists():
        raise ValueError(f"{out}: exists already: use another `out`")
    write_average(folder, reconstructed(folder, options.length, options.step), out)
    print(out)


if __name__ == "__main__":
    sys.exit(main())
