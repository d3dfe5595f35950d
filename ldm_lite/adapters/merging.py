"""Changes of weights: merged into them in place, or kept beside those that are quantised; undone bit for bit.

A quantised weight keeps its bits.  Its changes stay as a file has them (the small matrices of a LoRA), and are added
for each forward to the dequantised weight, in float32.
"""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ldm_lite.adapters.kinds import Change
from ldm_lite.runtime.blocks import BlockLinear
from ldm_lite.runtime.offload import Offloader

Weight = nn.Parameter | BlockLinear  # the latter in place of its weight


class Target(NamedTuple):
    """The weight or bias of a module: rows of a parameter, which may be the transposed weight."""

    parameter: Weight
    rows: slice = slice(None)
    transposed: bool = False
    swapped: bool = False  # a file's first half is the second one here

    @property
    def shape(self) -> torch.Size:
        """The shape of the weight or bias, on any device."""
        rest = torch.Size((len(range(*self.rows.indices(self.parameter.shape[0]))), *self.parameter.shape[1:]))
        return rest[::-1] if self.transposed else rest

    def of(self, whole: Tensor) -> Tensor:
        """Return the weight or bias as a view of the parameter's value."""
        return whole.T if self.transposed else whole[self.rows]

    def swap(self, value: Tensor) -> Tensor:
        """Convert a value between our layout and the file's, in either direction."""
        return value.roll(len(value) // 2, dims=0) if self.swapped else value


@dataclass(frozen=True, eq=False)
class Applied:
    """A change of rows of a weight, and its strength."""

    target: Target
    change: Change
    strength: float

    def __call__(self, weight: Tensor) -> None:
        """Add it to the weight, which is in float32, in place."""
        now = self.target.of(weight)
        change = on(self.change, weight.device).change(self.target.swap(now))
        now += self.strength * self.target.swap(change.reshape(now.shape))


class MergedLora:
    """LoRAs that are merged into networks; as a context manager it removes them at the end of the block."""

    def __init__(self, offloader: Offloader) -> None:
        self._offloader = offloader
        self._before: list[tuple[nn.Parameter, Tensor]] = []  # the earlier values
        self._added: list[tuple[Weight, list[Applied]]] = []  # to quantised weights

    def merge(self, weight: Weight, changes: Sequence[Applied], removable: bool) -> None:
        """Change a weight."""
        if isinstance(weight, BlockLinear) or self._offloader.kept(weight).scale is not None:
            with _changes(weight, self._offloader) as (present, device):
                added = [replace(applied, change=on(applied.change, device)) for applied in changes]
                present += added
            self._added.append((weight, added))
            return
        if removable:
            self._before.append((weight, self._offloader.read(weight, torch.device("cpu")).clone()))
        total = self._offloader.read(weight, weight.device, torch.float32).clone()
        for applied in changes:
            applied(total)
        self._offloader.write(weight, total)

    def remove(self) -> None:
        """Restore the earlier weights bit for bit.

        Several LoRAs on one network must be removed in reverse order: only quantised weights, which a LoRA does not
        change, allow any order.
        """
        for parameter, before in self._before:
            self._offloader.write(parameter, before)
        for weight, changes in self._added:
            with _changes(weight, self._offloader) as (present, _):
                present[:] = [applied for applied in present if applied not in changes]
        self._before, self._added = [], []

    def __enter__(self) -> "MergedLora":
        return self

    def __exit__(self, *error: object) -> None:
        self.remove()


@contextlib.contextmanager
def _changes(weight: Weight, offloader: Offloader) -> Iterator[tuple[list[Any], torch.device]]:
    """Let the block edit the changes of a quantised weight; yield them, and the device that keeps it."""
    if isinstance(weight, BlockLinear):
        yield weight.changes, weight.blocks.device
    else:
        with offloader.changing(weight) as kept:
            yield kept.changes, kept.values.device


def on(value: Any, device: torch.device) -> Any:
    """Return a change, or a part of one, with its tensors on a device."""
    if isinstance(value, Tensor):
        return value.to(device)
    if isinstance(value, tuple):
        return tuple(on(part, device) for part in value)
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{field.name: on(getattr(value, field.name), device) for field in fields(value)})
    return value
