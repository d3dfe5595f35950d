"""DPM adaptive: DPM-Solver-3 whose steps are chosen while it runs, by the difference from DPM-Solver-2.

Its rows depend on the network's outputs, so it is not a table: generate.stream runs a short plan for every step it
tries.
"""

import functools
import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ldm_lite.core.denoise import Branch, Call, Draw, Inputs, InputSource, State, run_plan
from ldm_lite.core.plan import NOISE, Plan, Rows
from ldm_lite.core.schedule import Level, Schedule, Spacing, ancestral
from ldm_lite.diffusion.dpmpp import dpm_fast, solver_rows, solver_span
from ldm_lite.diffusion.guidance import IdentityKey
from ldm_lite.diffusion.names import register

RELATIVE, ABSOLUTE, FIRST, ACCEPTED = 0.05, 0.0078, 0.05, 0.81  # tolerances; first step; k-diffusion's defaults
MOST_TRIES = 1000

Run = Callable[..., Any]  # (plan, latents, fraction of the range) -> [eps of its first call, of its second, the end]


@dataclass(frozen=True, eq=False)
class Adaptive:
    """A range of lambda = -log sigma to solve in steps that the error sets.  Lu et al. 2022a, alg. 3; k-diffusion."""

    schedule: Schedule
    start: float
    end: float
    eta: float

    def solve(self, x: Tensor, run: Run, draw: Callable[[], Tensor]) -> Iterator[tuple[Tensor, float]]:
        """Yield the latents (1,C,h,w) after each step that was accepted, and the fraction of the range covered.

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
        raise ValueError(f"DPM adaptive tried {MOST_TRIES} steps: use another sampler")

    def _attempt(self, s: float, t: float) -> tuple[Plan, float, float]:
        """Return the plan of three calls from lambda s to t, the level they aim at, and the sigma of noise to add."""
        rows, last = Rows(self.schedule, h="eps"), t >= self.end
        after = self.schedule.at_sigma(math.exp(-t))
        after = Level(after.t, 1.0, after.sigma) if last else after
        down, _ = ancestral(math.exp(-s), after.sigma, self.eta)
        aim = min(self.end, -math.log(down)) if down > 0 else self.end
        up = math.sqrt(max(0.0, after.sigma**2 - math.exp(-2 * aim))) if self.eta else 0.0
        solver_rows(rows, 3, (s, aim), after, 0 * NOISE)
        return rows.plan(end=after, initial=1.0), aim, up


@dataclass(frozen=True, eq=False, repr=False)
class AdaptivePlan(Plan):
    """A plan whose steps are chosen while it runs, in place of the table."""

    adaptive: Adaptive


def each_image(noised: Tensor, source: InputSource, plan: AdaptivePlan, draw: Draw) -> Iterator[State]:
    """Run each image (B,C,h,w) in its own steps, one after the other, so that none depends on its batch.

    Yields the states of core.denoise.run_plan, of all images, with the fraction of the range covered as steps.
    """
    latents, clean, count, rows = noised, torch.zeros_like(noised), len(noised), plan.num_steps
    drawn: list[Tensor] = []  # as many as each image needs
    for k in range(count):
        for x, x0, done in _one_image(latents[k : k + 1], k, source, plan, draw, drawn):
            latents, clean = latents.clone(), clean.clone()
            latents[k : k + 1], clean[k : k + 1] = x, x0
            step = max(1, math.ceil((k + done) / count * rows - 1e-9))
            yield State(step, rows, latents, latents, clean, (0.0, 1.0), lambda x0: x0)


def _one_image(
    x: Tensor, k: int, source: InputSource, plan: AdaptivePlan, draw: Draw, drawn: list[Tensor]
) -> Iterator[tuple[Tensor, Tensor, float]]:
    """Yield the latents (1,C,h,w) of image k after each of its steps, x0 before it, and the fraction covered."""
    states, calls, rows = list[State](), itertools.count(), plan.num_steps  # calls of all tries

    @functools.cache
    def branches_of(branches: IdentityKey) -> tuple[Branch, ...]:
        parts = [{name: part[k : k + 1] for name, part in branch.conditioning.items()} for branch in branches.value]
        return tuple(branch._replace(conditioning=part) for branch, part in zip(branches.value, parts, strict=True))

    def run(part: Plan, x: Tensor, done: float) -> list[Tensor]:
        def inputs_of(call: Call) -> Inputs:
            inputs = source(Call(next(calls), min(rows - 1, int(done * rows)), rows))
            return inputs._replace(branches=branches_of(IdentityKey(inputs.branches)))

        states[:] = run_plan(x, part, inputs_of, lambda: x)
        return [states[0].h, states[1].h, states[2].latents]

    def noise() -> Iterator[Tensor]:
        for number in itertools.count():
            if number == len(drawn):
                drawn.append(draw())
            yield drawn[number][k : k + 1].to(x.device, x.dtype)

    for end, done in plan.adaptive.solve(x, run, noise().__next__):
        yield end, states[0].x0, done


@register(label="DPM adaptive", aliases=("dpm_ad",))
def dpm_adaptive(schedule: Schedule, steps: int, spacing: str | Spacing = "linspace", eta: float = 1.0) -> Plan:
    """DPM-Solver-23 with adaptive steps, whatever their number: `steps` and the table are only those of dpm_fast.

    Over the same range as dpm_fast.  Lu et al. 2022a, alg. 3; k-diffusion sample_dpm_adaptive.
    """
    plan = dpm_fast(schedule, steps, spacing, eta)
    high, low = solver_span(schedule, steps, spacing)
    if high <= low:  # the last step of image to image alone
        raise ValueError("DPM adaptive has no range to solve in the last step alone: use more `steps` or `strength`")
    return AdaptivePlan(**vars(plan), adaptive=Adaptive(schedule, -float(np.log(high)), -float(np.log(low)), eta))
