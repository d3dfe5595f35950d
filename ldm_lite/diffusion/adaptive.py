"""DPM adaptive: DPM-Solver-3 whose steps are chosen while it runs, by the difference to DPM-Solver-2.

Its rows depend on the network's outputs, so it is no table: generate.stream runs a short plan for every step it tries.
"""

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from torch import Tensor

from ldm_lite.core.plan import NOISE, Plan, Rows
from ldm_lite.core.schedule import Level, Schedule, Spacing, ancestral
from ldm_lite.diffusion.dpmpp import dpm_fast, solver_rows, solver_span
from ldm_lite.diffusion.names import register

RELATIVE, ABSOLUTE, FIRST, ACCEPTED = 0.05, 0.0078, 0.05, 0.81  # tolerances; first step; k-diffusion's defaults
MOST_TRIES = 1000

Run = Callable[..., Any]  # (plan, latents, share of the way) -> [eps of its first call, of its second, the end]


@dataclass(frozen=True, eq=False)
class Adaptive:
    """A range of lambda = -log sigma to solve in steps that the error sets.  Lu et al. 2022a, alg. 3; k-diffusion."""

    schedule: Schedule
    start: float
    end: float
    eta: float

    def solve(self, x: Tensor, run: Run, draw: Callable[[], Tensor]) -> Iterator[tuple[Tensor, float]]:
        """Yield the latents (1,C,h,w) after each step that was accepted, and the share of the way that is done.

        Raises ValueError if the steps become too small.
        """
        s, h, level = self.start, FIRST, self.schedule.at_sigma(math.exp(-self.start))
        previous = x / level.a
        for _ in range(MOST_TRIES):
            plan, down, up = self._attempt(s, min(self.end, s + h))
            eps, ahead, high = run(plan, x, (s - self.start) / (self.end - self.start))
            step = math.exp(-down) * math.expm1(down - s)
            low = x / level.a - step * eps - 1.5 * step * (ahead - eps)
            allowed = low.abs().maximum(previous.abs()).mul(RELATIVE).clamp(min=ABSOLUTE)
            error = float(((low - high / plan.end.a) / allowed).double().square().mean().sqrt())
            factor = 1 + math.atan((1 / (error + 1e-8)) ** (1 / (1.5 if self.eta else 3)) - 1)
            if factor >= ACCEPTED or not math.isfinite(error):
                x, s, previous, level = high, min(self.end, s + h), low, plan.end
                x = x + plan.end.a * up * draw() if up > 0 else x
                yield x, (s - self.start) / (self.end - self.start)
                if s >= self.end - 1e-5:
                    return
            h *= factor if math.isfinite(factor) else 1
        raise ValueError(f"DPM adaptive tried {MOST_TRIES} steps: take another sampler")

    def _attempt(self, s: float, t: float) -> tuple[Plan, float, float]:
        """Return the plan of the three calls from lambda s to t, where they aim to, and the sigma of noise to add."""
        rows, last = Rows(self.schedule, keep="eps"), t >= self.end
        after = self.schedule.at_sigma(math.exp(-t))
        after = Level(after.t, 1.0, after.sigma) if last else after
        down, _ = ancestral(math.exp(-s), after.sigma, self.eta)
        aim = min(self.end, -math.log(down)) if down > 0 else self.end
        up = math.sqrt(max(0.0, after.sigma**2 - math.exp(-2 * aim))) if self.eta else 0.0
        solver_rows(rows, 3, (s, aim), after, 0 * NOISE)
        return rows.plan(end=after, initial=1.0), aim, up


@dataclass(frozen=True, eq=False)
class AdaptivePlan(Plan):
    """A plan whose steps are chosen while it runs, in place of the table."""

    adaptive: Adaptive


def each_image(
    stream: Callable[..., Any], noise: Tensor, branches: Any, plan: AdaptivePlan, more: tuple[Any, Any]
) -> Iterator[Any]:
    """Run each image (B,C,h,w) in steps of its own, one after the other, so that none depends on its batch.

    stream is generate.stream of a model; more is its draw and extras.  Yields its states, of all images, with the
    share of the way as steps.  Raises ValueError for extras.
    """
    draw, extras = more
    if any(part is not None for part in extras):
        raise ValueError(
            "DPM adaptive has no fixed steps for controls, a mask, a refiner, DeepCache, T-GATE or FreeU: take another "
            "sampler"
        )
    drawn: list[Any] = []
    latents, count = noise * plan.initial, len(noise)
    clean = latents * 0

    def nth(index: int, one: slice) -> Any:
        while len(drawn) <= index:  # every image takes its own share of the same draws
            drawn.append(draw())
        return drawn[index][one].to(noise.device, noise.dtype)

    for k in range(count):
        one = slice(k, k + 1)
        last: list[Any] = []
        alone, tries = branches.map(lambda each, one=one: each.rows(one, count)), itertools.count()

        def run(
            part: Plan, x: Any, done: float, alone: Any = alone, last: list[Any] = last, tries: Iterator[int] = tries
        ) -> list[Any]:
            weights = alone.weights_at(min(plan.num_steps - 1, int(done * plan.num_steps)))
            last[:] = stream(x, replace(alone.from_call(next(tries) * len(part.t)), weights=weights), part)
            return [last[0].prediction, last[1].prediction, last[2].latents]

        noises = (nth(i, one) for i in itertools.count())
        for x, done in plan.adaptive.solve(latents[one], run, noises.__next__):
            latents, clean = latents.clone(), clean.clone()
            latents[one], clean[one] = x, last[0].x0
            step = max(1, math.ceil((k + done) / count * plan.num_steps - 1e-9))
            made = {"step": step, "num_steps": plan.num_steps, "latents": latents, "before": latents}
            yield replace(last[2], **made, prediction=clean, to_x0=(0.0, 1.0))


@register(label="DPM adaptive", aliases=("dpm_ad",))
def dpm_adaptive(schedule: Schedule, steps: int, spacing: str | Spacing = "linspace", eta: float = 1.0) -> Plan:
    """DPM-Solver-23 with adaptive steps, whatever their number: `steps` and the table are only those of dpm_fast.

    Over the same range as dpm_fast.  Lu et al. 2022a, alg. 3; k-diffusion sample_dpm_adaptive.
    """
    plan = dpm_fast(schedule, steps, spacing, eta)
    high, low = solver_span(schedule, steps, spacing)
    return AdaptivePlan(**vars(plan), adaptive=Adaptive(schedule, -float(np.log(high)), -float(np.log(low)), eta))
