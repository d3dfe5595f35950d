"""Plan: a sampler as a table of coefficients; Rows builds one.

A row is one call of the network.  It replaces each register by a linear expression in the registers, the call's
prediction H (eps or x0, as the sampler chooses) and fresh NOISE.  X is the latent, in the variance-preserving scale.

X, H, NOISE and the others are the unit vectors of these expressions: `0.5 * X + 2 * H` is a row of coefficients, which
numpy computes when the plan is made.  No latent is touched here.
"""

from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ldm_lite.core.schedule import Array, Level, Schedule

NUM_REGISTERS = 5
# The basis of a row's expressions: the latent, a latent saved by an earlier call, the last three predictions (latest
# first), this call's prediction, fresh noise.
X, ASIDE, H1, H2, H3, H, NOISE = np.eye(NUM_REGISTERS + 2)


@dataclass(frozen=True, eq=False)
class Plan:
    """A sampler's table for N calls of the network: float64 coefficients, no state.  samplers.make_plan makes one."""

    t: Array  # (N,) the timestep that the network is given, possibly fractional
    level: Array  # (N, 2) (a, s) of the latent that the call reads: x = a x0 + s eps
    h_of_out: Array  # (N, 2) (p, q): H = p x + q out, for the network's output
    x0_of_out: Array  # (N, 2) the same for x0; NaN where it is undefined
    mix: Array  # (N, R, R+2) registers' = mix @ [registers, H, noise]
    step: Array  # (N,) the step that the call belongs to, from 0; a step can take two calls
    adds_noise: NDArray[np.bool_]  # (N,) whether the row uses noise
    remembers: NDArray[np.bool_]  # (N,) whether H joins the history
    initial: float  # the first latent is unit noise times this
    end: Level  # the level of the result, for readers of a plan: no run reads it

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.num_steps} steps, {len(self.t)} calls of the network)"

    @property
    def num_steps(self) -> int:
        """The number of steps; len(plan.t) is the number of calls."""
        return int(self.step[-1]) + 1

    def x0_of_h(self, call: int) -> tuple[float, float]:
        """Return (p, q) with x0 = p x + q H, for the H of a call."""
        p, q = self.h_of_out[call]  # H = p x + q out
        p0, q0 = self.x0_of_out[call]  # x0 = p0 x + q0 out
        return float(p0 - q0 * p / q), float(q0 / q)


class Row(NamedTuple):
    """One row of a plan as float32 tensors on the device: one compiled step serves every sampler."""

    t: Tensor  # ()
    level: Tensor  # (2,)
    h_of_out: Tensor  # (2,)
    x0_of_out: Tensor  # (2,)
    mix: Tensor  # (R, R+2)


def device_rows(plan: Plan, device: torch.device) -> list[Row]:
    """The rows of a plan on a device, copied there at once."""
    columns = []
    for name in Row._fields:
        columns.append(torch.tensor(getattr(plan, name), dtype=torch.float32, device=device))
    return [Row(*row) for row in zip(*columns, strict=True)]


class _PlannedCall(NamedTuple):
    level: Level
    mix: Array  # (R, R+2)
    step: int
    remembers: bool


@dataclass
class Rows:
    """Builds a plan: call add() once for each call of the network, then plan()."""

    schedule: Schedule
    h: Literal["eps", "x0"]  # what H is, whatever the network predicts
    rows: list[_PlannedCall] = field(default_factory=list)

    def add(self, step: int, now: Level, x: Array, aside: Array = ASIDE, remember: bool = True) -> None:
        """Add a call at level `now`: the latent becomes x, ASIDE becomes `aside`, H joins the history if `remember`.

        These expressions read all registers as they were before the call; by default ASIDE stays what it was.
        """
        history = (H, H1, H2) if remember else (H1, H2, H3)  # the new H1, H2 and H3
        mix = np.array([x, aside, *history])
        self.rows.append(_PlannedCall(now, mix, step, remember))

    def plan(self, end: Level, initial: float | None = None) -> Plan:
        """Return the finished table.  The first latent is unit noise times `initial`: by default the first level's s.

        Raises ValueError for a table without rows, if a coefficient is undefined, as for eps at zero terminal SNR, and
        if the first call does not remember its H: a preview shows the last one that was remembered.
        """
        if not self.rows or not self.rows[0].remembers:
            raise ValueError("a plan needs rows, and the first must remember its H: leave out remember=False")
        levels, mixes, steps, remembers = zip(*self.rows, strict=True)
        mix = np.stack(mixes)
        plan = Plan(
            t=np.array([level.t for level in levels]),
            level=np.array([[level.a, level.s] for level in levels]),
            h_of_out=np.array([self.schedule.coefficients(self.h, level) for level in levels]),
            x0_of_out=np.array([self.schedule.coefficients("x0", level) for level in levels]),
            mix=mix,
            step=np.array(steps),
            adds_noise=np.any(mix[:, :, -1] != 0, axis=1),
            remembers=np.array(remembers),
            initial=levels[0].s if initial is None else initial,
            end=end,
        )
        if not (np.isfinite(plan.mix).all() and np.isfinite(plan.h_of_out).all()):
            raise ValueError("undefined at zero terminal SNR: use a model with v prediction, and ddim or euler")
        if plan.mix[0, 0, 1:NUM_REGISTERS].any():
            raise ValueError("the first row reads ASIDE, H1, H2 or H3, which no call before it has made")
        return plan
