"""Plan: a sampler as a table of coefficients; Rows builds one.

A row is one model call.  It replaces each register by a linear expression in the registers, the call's prediction H
(eps or x0, as the sampler chooses) and fresh NOISE.  X is the latent, in the variance-preserving scale.
"""

from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from ldm_lite.diffusion.schedule import Array, Level, Schedule

NUM_REGISTERS = 5
# The basis of a row's expressions: the latent, a latent (or noise) saved by an earlier call, the last three
# predictions (latest first), this call's prediction, fresh noise.
X, ASIDE, H1, H2, H3, H, NOISE = np.eye(NUM_REGISTERS + 2)


@dataclass(frozen=True, eq=False)
class Plan:
    """A sampler's table for N model calls: float64 coefficients, no state.

    make_plan makes one from a sampler's name.  To write your own, say Euler's method at four chosen timesteps:

        levels = [schedule.at(t) for t in (999, 750, 500, 250)] + [CLEAN]
        rows = Rows(schedule, keep="x0")  # H is x0, whatever the network predicts
        for step, (now, after) in enumerate(pairwise(levels)):
            eps = (X - now.a * H) / now.s
            rows.add(step, now, after.a * H + after.s * eps)
        plan = rows.plan(end=CLEAN)
    """

    t: Array  # (N,) the timestep given to the network, possibly fractional
    level: Array  # (N, 2) (a, s) of the latent that the call sees: x = a x0 + s eps
    to_h: Array  # (N, 2) (p, q): H = p x + q out, for the network's output
    to_x0: Array  # (N, 2) the same for x0, which guidance may change; NaN where undefined
    mix: Array  # (N, R, R+2) registers' = mix @ [registers, H, noise]
    step: Array  # (N,) the step that the call belongs to, from 0; a step can take two calls
    adds_noise: NDArray[np.bool_]  # (N,) whether the row uses noise
    remembers: NDArray[np.bool_]  # (N,) whether H joins the history
    stretch: Array  # (N,) log of the largest factor by which a learned variance scales the row's noise
    initial: float  # the first latent is unit noise times this
    end: Level  # the level of the result
    adaptive: Any = None  # adaptive.Adaptive, which chooses the steps in place of the table

    def with_learned_variance(self) -> "Plan":
        """Return this plan for networks that predict their variance, between the posterior's (this plan's) and beta.

        No other coefficient depends on the data.  Nichol and Dhariwal 2021, eq. 15.
        """
        after = np.append(self.level[1:, 1], self.end.s)
        ratio = np.divide(self.level[:, 1], after, out=np.ones_like(after), where=self.adds_noise)
        return replace(self, stretch=np.log(ratio))

    def at_whole_timesteps(self, schedule: Schedule) -> "Plan":
        """Return this plan for a network that is told the trained timestep whose log sigma is nearest.

        k-diffusion's `quantize`, A1111's "quantization in K samplers".  Raises ValueError for a rectified flow.
        """
        if schedule.is_flow or self.adaptive is not None:
            raise ValueError("`:quantised` is for schedules with 1000 timesteps and samplers with fixed steps")
        a, s = self.level.T
        logs = np.log(s / np.maximum(a, 2.0**-24))
        return replace(self, t=abs(np.log(schedule.sigmas) - logs[:, None]).argmin(axis=1).astype(np.float64))

    def rises_before(self, call: int) -> int:
        """Return how often the noise has risen before a call by over a tenth of all timesteps, as Restart's does."""
        return int((np.diff(self.t[: call + 1]) > 100).sum())

    @property
    def num_steps(self) -> int:
        """The number of steps; len(plan.t) is the number of model calls."""
        return int(self.step[-1]) + 1

    def x0_of_h(self, call: int) -> tuple[float, float]:
        """Return (p, q) with x0 = p x + q H, for the H of a call."""
        (p, q), (p0, q0) = self.to_h[call], self.to_x0[call]
        return float(p0 - q0 * p / q), float(q0 / q)


def to_kept(prediction: str, keep: str, level: Level) -> tuple[float, float]:
    """Return (p, q) with kept = p x + q out, for a network that predicts eps, v = a eps - s x0, or x0.

    Or a flow's velocity, eps - x0 or reversed.  NaN where undefined: x0 from eps at zero SNR.  Salimans and Ho 2022,
    sec. 4.
    """
    _, a, s = level
    if prediction == keep:
        return 0.0, 1.0
    if prediction in ("flow", "reverse_flow"):
        p, q = {"flow": (0.0, 1.0), "eps": (1.0, 1 - s), "x0": (1.0, -s)}[keep]
        return p, q if prediction == "flow" else -q
    if prediction == "v":
        return (s, a) if keep == "eps" else (a, -s)
    if prediction == "eps":
        return (1 / a, -s / a) if a > 0 else (np.nan, np.nan)
    return (1 / s, -a / s) if s > 0 else (np.nan, np.nan)


@dataclass
class Rows:
    """Builds a plan: call add() once for each model call, then plan()."""

    schedule: Schedule
    keep: Literal["eps", "x0", "flow"]  # what H is
    rows: list[tuple[Level, Array, int, bool]] = field(default_factory=list)

    def add(self, step: int, now: Level, x: Array, aside: Array = ASIDE, remember: bool = True) -> None:
        """Add a model call at level `now`: the latent becomes x, and H joins the history if `remember`."""
        history = (H, H1, H2) if remember else (H1, H2, H3)
        self.rows.append((now, np.array([x, aside, *history]), step, remember))

    def plan(self, end: Level, initial: float = 1.0) -> Plan:
        """Return the finished table.  Raises ValueError if a coefficient is undefined, as for eps at zero SNR."""
        levels, mixes, steps, remembers = zip(*self.rows, strict=True)
        prediction = self.schedule.prediction
        plan = Plan(
            t=np.array([self.schedule.time(level) for level in levels]),
            level=np.array([[level.a, level.s] for level in levels]),
            to_h=np.array([to_kept(prediction, self.keep, level) for level in levels]),
            to_x0=np.array([to_kept(prediction, "x0", level) for level in levels]),
            mix=np.stack(mixes),
            step=np.array(steps),
            adds_noise=np.any(np.stack(mixes)[:, :, -1] != 0, axis=1),
            remembers=np.array(remembers),
            stretch=np.zeros(len(steps)),
            initial=initial,
            end=end,
        )
        if not (np.isfinite(plan.mix).all() and np.isfinite(plan.to_h).all()):
            raise ValueError("undefined at zero terminal SNR: take a model with v prediction, and ddim or euler")
        return plan
