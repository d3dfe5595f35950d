"""OFT, BOFT and IA3 as PEFT stores them: rotations of a weight's columns, and factors of its rows or columns.

The columns of a convolution's weight are those of (out, in * k * k).
Shape letters: b size of a block, n number of columns.
Source: PEFT tuners/oft/layer.py, boft/layer.py, ia3/layer.py.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ldm_lite.checkpoint.lycoris import IA3

PARTS = frozenset({"oft_R", "boft_R", "boft_s", "ia3_l"})
TERMS = 5  # of the Neumann series, unless the configuration says otherwise


def _rotated(columns: Tensor, rotations: Tensor) -> Tensor:
    """Rotate blocks of columns (out,n) by rotations (n/b,b,b)."""
    blocks = columns.view(len(columns), len(rotations), -1)
    return torch.einsum("okc,kdc->okd", blocks, rotations).flatten(1)


def _cayley(skew: Tensor) -> Tensor:
    """Return the rotations (I - Q) (I + Q)^-1 of skew-symmetric matrices Q (...,b,b)."""
    eye = torch.eye(skew.shape[-1], device=skew.device)
    return torch.linalg.solve(eye + skew, eye - skew, left=False)


@dataclass(frozen=True)
class ColumnOFT:
    """Rotates blocks of columns: OFT, Qiu et al. 2023."""

    angles: Tensor  # (n/b,b*(b-1)/2) or, for all blocks, (1,b*(b-1)/2): the upper triangles of Q
    limit: float | None  # of the norm of Q, times the root of the number of blocks: COFT
    terms: int | None  # of the Neumann series of (I - Q) (I + Q)^-1; None = exactly

    @property
    def size(self) -> int:
        """The size of a block."""
        return (1 + math.isqrt(1 + 8 * self.angles.shape[1])) // 2

    @property
    def shape(self) -> tuple[int, ...]:
        """The number of columns of the weight; if its blocks share one rotation, any multiple of their size."""
        return (-1, -self.size if len(self.angles) == 1 else len(self.angles) * self.size)

    def change(self, parameter: Tensor) -> Tensor:
        """Return the change of a weight."""
        columns, size = parameter.flatten(1), self.size
        skew = torch.zeros(len(self.angles), size, size, device=parameter.device)
        rows, upper = torch.triu_indices(size, size, 1)
        skew[:, rows, upper] = self.angles.float().to(parameter.device)
        skew = skew - skew.transpose(1, 2)
        if self.limit is not None:
            most = self.limit / math.sqrt(len(skew))
            skew = skew * (most / skew.flatten(1).norm(dim=1).clamp(min=most)).view(-1, 1, 1)
        rotations = _cayley(skew) if self.terms is None else self._series(skew)
        return _rotated(columns, rotations.expand(columns.shape[1] // size, -1, -1)).view_as(parameter) - parameter

    def _series(self, skew: Tensor) -> Tensor:
        """Return I + 2 Q + 2 Q^2 + ... + Q^(terms - 1), with PEFT's signs; from 3 terms it adds 4 at least."""
        assert self.terms is not None
        terms = self.terms if self.terms < 3 else max(self.terms, 4)
        total = power = torch.eye(skew.shape[-1], device=skew.device).expand_as(skew)
        for exponent in range(1, terms):
            power = power @ skew
            total = total + (1 if exponent == terms - 1 > 1 else 2) * power
        return total


@dataclass(frozen=True)
class ColumnBOFT:
    """Rotates blocks of columns in stages of a butterfly, and scales the rows: BOFT, Liu et al. 2024."""

    blocks: Tensor  # (stages,n/b,b,b)
    scales: Tensor  # (out,)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the weight, (out,n)."""
        return (len(self.scales), self.blocks.shape[1] * self.blocks.shape[-1])

    def change(self, parameter: Tensor) -> Tensor:
        """Return the change of a weight."""
        blocks, size = self.blocks.float().to(parameter.device), self.blocks.shape[-1]
        columns = parameter.flatten(1)
        order = torch.arange(columns.shape[1], device=columns.device)
        for stage, each in enumerate(_cayley(0.5 * (blocks - blocks.transpose(-1, -2)))):
            if len(blocks) > 1:  # columns 2^stage halves of a block apart meet
                order = torch.arange(columns.shape[1], device=columns.device).view(-1, 2**stage, 2, size // 2)
                order = order.transpose(1, 2).flatten()
            columns = _rotated(columns[:, order.argsort()], each)[:, order]
        return (columns * self.scales.float().to(columns.device).view(-1, 1)).view_as(parameter) - parameter


@dataclass(frozen=True)
class OptionalIA3(IA3):
    """Scales a bias, if the module has one."""

    optional: bool = True

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the bias."""
        return (len(self.scales),)


def make(parts: Mapping[str, Tensor], settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the changes of these kinds that the parts of a module make, by parameter; none if it is of another kind.

    settings are PEFT's.  Raises ValueError if parts are missing or do not fit together, or settings are missing.
    """
    found = {name: value for name, value in parts.items() if name in PARTS}
    if not found:
        return {}
    sizes = ", ".join(" x ".join(map(str, value.shape)) for value in found.values())
    damaged = ValueError(f"its parts do not fit together ({sizes}): the file is damaged")
    if found.keys() == {"oft_R"}:
        if found["oft_R"].ndim != 2:
            raise damaged
        made = _oft(found["oft_R"], settings)
        if made.size * (made.size - 1) // 2 != made.angles.shape[1]:
            raise damaged
        return {"weight": made}
    if found.keys() == {"boft_R", "boft_s"}:
        blocks, scales = found["boft_R"], found["boft_s"]
        stages = len(blocks)
        fits = blocks.ndim == 4 and blocks.shape[2] == blocks.shape[3] and max(scales.shape) == scales.numel()
        if not fits or (stages > 1 and (blocks.shape[2] % 2 or blocks.shape[1] % 2 ** (stages - 1))):
            raise damaged
        return {"weight": ColumnBOFT(blocks, scales.flatten())}
    if found.keys() == {"ia3_l"}:
        return _ia3(found["ia3_l"], settings)
    raise ValueError(f"has the parts {', '.join(sorted(found))}, which no kind has: the file is damaged")


def _oft(angles: Tensor, settings: Mapping[str, Any]) -> ColumnOFT:
    terms = settings.get("num_cayley_neumann_terms", TERMS) if settings.get("use_cayley_neumann", True) else None
    limit = settings.get("eps", 6e-5) if settings.get("coft") else None
    return ColumnOFT(angles, limit, terms)


def _ia3(factors: Tensor, settings: Mapping[str, Any]) -> dict[str, Any]:
    if max(factors.shape) != factors.numel():
        raise ValueError(f"its part ia3_l is {' x '.join(map(str, factors.shape))}: the file is damaged")
    columns = factors.ndim == 2 and len(factors) == 1
    if factors.ndim != 2:  # of a convolution, whose shape does not tell
        if "feedforward" not in settings:
            raise ValueError("is of IA3, whose adapter_config.json tells what it scales: keep it beside the file")
        columns = bool(settings["feedforward"])
    scales = factors.flatten().float() - 1
    return {"weight": IA3(scales, columns)} | ({} if columns else {"bias": OptionalIA3(scales, False)})
