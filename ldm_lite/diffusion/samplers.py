"""Samplers as tables: one function per sampler writes a Plan, which diffusion.step runs row by row.

A row is one model call.  It replaces each register by a linear expression in the registers, the prediction H that the
call made (eps or x0, as the plan keeps) and fresh NOISE.  X is the latent, in the variance-preserving scale.  A sampler
written for the variance-exploding scale y = x0 + sigma eps uses y = x / a, and x = a y.

To add a sampler: write the paper's update as such an expression, and add the function to SAMPLERS.
"""

import difflib
import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from ldm_lite.diffusion.schedule import SPACINGS, Array, Level, Schedule

NUM_REGISTERS = 5
# The basis of a row's expressions: the latent, the latent a two-call step started from, past predictions (the latest
# first), this call's prediction, fresh noise.
X, ANCHOR, H1, H2, H3, H, NOISE = np.eye(NUM_REGISTERS + 2)


@dataclass(frozen=True, eq=False)
class Plan:
    """A sampler's table for N model calls: float64 coefficients, no state.

    initial is the factor that turns unit noise into the first row's x.
    """

    t: Array  # (N,) the timestep given to the network, possibly fractional
    to_prediction: Array  # (N, 2) (p, q): prediction H = p x + q out
    mix: Array  # (N, R, R+2) registers' = mix @ [registers, H, noise]
    step: Array  # (N,) the user's step that the call belongs to
    draws: NDArray[np.bool_]  # (N,) whether the row uses noise
    initial: float

    @property
    def num_steps(self) -> int:
        """Steps as the user counts them; model calls are len(plan.t)."""
        return int(self.step[-1]) + 1


@dataclass
class Rows:
    """A plan being written: call add() for each model call, then plan()."""

    schedule: Schedule
    keep: Literal["eps", "x0"]  # what H is
    rows: list[tuple[Level, Array, int]] = field(default_factory=list)

    def add(self, step: int, now: Level, x: Array, anchor: Array = X, remember: bool = True) -> None:
        """One model call at level `now`: the latent becomes x; H joins the history if it is to be remembered."""
        history = (H, H1, H2) if remember else (H1, H2, H3)
        self.rows.append((now, np.stack([x, anchor, *history]), step))

    def plan(self, initial: float = 1.0) -> Plan:
        """The finished table."""
        levels, mixes, steps = zip(*self.rows, strict=True)
        mix = np.stack(mixes)
        return Plan(
            t=np.array([level.t for level in levels]),
            to_prediction=np.array([self._to_prediction(level) for level in levels]),
            mix=mix,
            step=np.array(steps),
            draws=np.any(mix[:, :, -1] != 0, axis=1),
            initial=initial,
        )

    def _to_prediction(self, level: Level) -> tuple[float, float]:
        """(p, q) with H = p x + q out.  Salimans and Ho 2022, sec. 4 for v = a eps - s x0."""
        _, a, s = level
        return {
            ("eps", "eps"): lambda: (0.0, 1.0),
            ("eps", "x0"): lambda: (1 / a, -s / a),
            ("v", "eps"): lambda: (s, a),
            ("v", "x0"): lambda: (a, -s),
            ("x0", "eps"): lambda: (1 / s, -a / s),
            ("x0", "x0"): lambda: (0.0, 1.0),
        }[self.schedule.prediction, self.keep]()


def _transfer(now: Level, after: Level, eps: Array, x: Array = X, sigma: float = 0.0) -> Array:
    """x at one level -> the next, by DDIM's update with a given eps.  Song et al. 2021, eq. 12."""
    x0 = (x - now.s * eps) / now.a
    return after.a * x0 + np.sqrt(after.s**2 - sigma**2) * eps + sigma * NOISE


def ddim(schedule: Schedule, steps: int, spacing: str = "leading", eta: float = 0.0) -> Plan:
    """DDIM; eta 1 is DDPM's variance.  Song et al. 2021, eqs. 12 and 16."""
    rows = Rows(schedule, keep="eps")
    for i, (now, after) in enumerate(pairwise(SPACINGS[spacing](schedule, steps))):
        sigma = eta * (after.s / now.s) * np.sqrt(1 - (now.a / after.a) ** 2)
        rows.add(i, now, _transfer(now, after, H, sigma=sigma))
    return rows.plan()


def plms(schedule: Schedule, steps: int, spacing: str = "leading") -> Plan:
    """Pseudo linear multistep: DDIM's update with eps from Adams-Bashforth.  Liu et al. 2022, eqs. 9, 12 and 13.

    The first step makes two calls (pseudo improved Euler), so there is one call more than steps.
    """
    rows = Rows(schedule, keep="eps")
    for i, (now, after) in enumerate(pairwise(SPACINGS[spacing](schedule, steps))):
        if i == 0:
            rows.add(i, now, _transfer(now, after, H))
            # The original asks at the next timestep, of which a single step has none.
            ahead = after if steps > 1 else after._replace(t=now.t)
            rows.add(i, ahead, _transfer(now, after, (H1 + H) / 2, x=ANCHOR), remember=False)
        elif i == 1:
            rows.add(i, now, _transfer(now, after, (3 * H - H1) / 2))
        elif i == 2:
            rows.add(i, now, _transfer(now, after, (23 * H - 16 * H1 + 5 * H2) / 12))
        else:
            rows.add(i, now, _transfer(now, after, (55 * H - 59 * H1 + 37 * H2 - 9 * H3) / 24))
    return rows.plan()


def euler(schedule: Schedule, steps: int, spacing: str = "linspace") -> Plan:
    """Euler's method on dy/dsigma = (y - x0) / sigma.  Karras et al. 2022, alg. 1 without the second half."""
    rows = Rows(schedule, keep="x0")
    levels = SPACINGS[spacing](schedule, steps)
    for i, (now, after) in enumerate(pairwise(levels)):
        y = X / now.a
        y = y + (y - H) / now.sigma * (after.sigma - now.sigma)
        rows.add(i, now, after.a * y)
    return rows.plan(initial=levels[0].s)


def euler_a(schedule: Schedule, steps: int, spacing: str = "linspace", eta: float = 1.0) -> Plan:
    """Euler ancestral: a step to below the next level, then noise up to it.  k-diffusion sample_euler_ancestral."""
    rows = Rows(schedule, keep="x0")
    levels = SPACINGS[spacing](schedule, steps)
    for i, (now, after) in enumerate(pairwise(levels)):
        variance = after.sigma**2 * (now.sigma**2 - after.sigma**2) / now.sigma**2
        up = min(after.sigma, eta * np.sqrt(variance))
        down = np.sqrt(after.sigma**2 - up**2)
        y = X / now.a
        y = y + (y - H) / now.sigma * (down - now.sigma) + up * NOISE
        rows.add(i, now, after.a * y)
    return rows.plan(initial=levels[0].s)


def dpmpp_2m(schedule: Schedule, steps: int, spacing: str = "linspace") -> Plan:
    """DPM-Solver++ (2M): x0 extrapolated in the log-SNR lambda = -log sigma.  Lu et al. 2022b, alg. 2.

    First order at the first step, and at the last, whose lambda is infinite.
    """
    rows = Rows(schedule, keep="x0")
    levels = SPACINGS[spacing](schedule, steps)
    for i, (now, after) in enumerate(pairwise(levels)):
        x0 = H
        if i > 0 and after.sigma > 0:
            h = np.log(now.sigma / after.sigma)
            r = np.log(levels[i - 1].sigma / now.sigma) / h
            x0 = (1 + 1 / (2 * r)) * H - 1 / (2 * r) * H1
        ratio = after.sigma / now.sigma  # exp(-h)
        rows.add(i, now, after.a * (ratio * X / now.a + (1 - ratio) * x0))
    return rows.plan(initial=levels[0].s)


# ---- names ----------------------------------------------------------------------------------------------------------

Sampler = Callable[..., Plan]  # (schedule, steps, spacing=..., and eta=... where it has one)
SAMPLERS: dict[str, Sampler] = {
    "ddim": ddim,
    "plms": plms,
    "euler": euler,
    "euler_a": euler_a,
    "dpmpp_2m": dpmpp_2m,
}
ALIASES = {
    "pndm": "plms",
    "k_euler": "euler",
    "k_euler_a": "euler_a",
    "euler_ancestral": "euler_a",
    "k_euler_ancestral": "euler_a",
    "dpm++_2m": "dpmpp_2m",
    "k_dpmpp_2m": "dpmpp_2m",
}


LABELS = {"ddim": "DDIM", "plms": "PLMS", "euler": "Euler", "euler_a": "Euler a", "dpmpp_2m": "DPM++ 2M"}


def label(name: str) -> str:
    """A sampler's name as AUTOMATIC1111's web UI writes it."""
    key, spacing = resolve(name)
    return LABELS[key] + (" Karras" if spacing == "karras" else "")


def resolve(name: str) -> tuple[str, str | None]:
    """A sampler's name as users write it ("DPM++ 2M Karras") -> (key of SAMPLERS, spacing that the name asks for).

    Raises ValueError for an unknown name, with the nearest ones.
    """
    key = name.strip().lower().replace(" ", "_").replace("-", "_")
    spacing = "karras" if key.endswith("_karras") else None
    key = key.removesuffix("_karras")
    key = ALIASES.get(key, key)
    if key not in SAMPLERS:
        near = difflib.get_close_matches(key, [*SAMPLERS, *ALIASES], n=3, cutoff=0.4) or list(SAMPLERS)
        raise ValueError(f"unknown sampler {name!r}: did you mean {' or '.join(near)}? (all: {', '.join(SAMPLERS)})")
    return key, spacing


def make_plan(
    name: str, schedule: Schedule, steps: int, *, eta: float | None = None, spacing: str | None = None
) -> Plan:
    """The plan of a sampler by any of its names; eta and spacing None = the sampler's own.

    Raises ValueError for an unknown name or spacing, for steps outside 1..1000, and for an eta that the sampler lacks.
    """
    key, named_spacing = resolve(name)
    spacing = named_spacing if spacing is None else spacing
    if not 1 <= steps <= len(schedule.alpha_bar):
        raise ValueError(f"got {steps} steps, wanted 1 to {len(schedule.alpha_bar)}")
    if spacing is not None and spacing not in SPACINGS:
        raise ValueError(f"unknown spacing {spacing!r}: wanted one of {', '.join(SPACINGS)}")
    arguments: dict[str, object] = {} if spacing is None else {"spacing": spacing}
    if eta is not None:
        if not 0 <= eta <= 1:
            raise ValueError(f"got eta {eta}, wanted 0 to 1")
        if "eta" in inspect.signature(SAMPLERS[key]).parameters:
            arguments["eta"] = eta
        elif eta != 0:
            raise ValueError(f"got eta {eta}, but {key} adds no noise: leave it out, or take ddim or euler_a")
    return SAMPLERS[key](schedule, steps, **arguments)
