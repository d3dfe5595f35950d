"""Runs plans in float64, and the prediction that is best for Gaussian data."""

from collections.abc import Callable
from typing import Any

import numpy as np

from ldm_lite.core.plan import NUM_REGISTERS, Plan
from ldm_lite.core.schedule import Array, Schedule

Network = Callable[[Array, float], Array]  # (x, t) -> what it predicts
NOISES = np.random.Generator(np.random.PCG64(5)).standard_normal((40, 2, 2, 3, 3))  # the first starts a run
MEAN, DEVIATION = 0.7, 0.5  # of the Gaussian data


def network(x: Array, t: float) -> Array:
    """A smooth nonlinear prediction of x (B,C,h,w); every call and its timestep matter."""
    return 0.9 * x + 0.3 * np.sin(2 * x - np.roll(x, 1, axis=-1) + t / 100)


def best_eps(schedule: Schedule) -> Network:
    """E[eps | x] of the Gaussian data."""

    def predict(x: Array, t: float) -> Array:
        level = schedule.between(t)
        return level.s * (x - level.a * MEAN) / (level.a**2 * DEVIATION**2 + level.s**2)

    return predict


def run(plan: Plan, predict: Network = network, x: Any = None) -> list[Array]:
    """The latents at the start and after every step: each row is registers' = mix @ [registers, H, noise]."""
    noises = iter(NOISES[1:])
    x = NOISES[0] * plan.initial if x is None else np.asarray(x)
    registers = np.stack([x, *(0 * x for _ in range(NUM_REGISTERS - 1))])
    trajectory = [x]
    for i in range(len(plan.t)):
        h = plan.h_of_out[i, 0] * registers[0] + plan.h_of_out[i, 1] * predict(registers[0], plan.t[i])
        noise = next(noises) if plan.adds_noise[i] else 0 * h
        registers = np.einsum("rk,k...->r...", plan.mix[i], np.stack([*registers, h, noise]))
        if i + 1 == len(plan.t) or plan.step[i + 1] != plan.step[i]:
            trajectory.append(registers[0])
    return trajectory


def order(make: Callable[[int], Plan], schedule: Schedule) -> float:
    """The order with which a plan of 40 and 80 steps converges to the exact solution for the Gaussian data.

    At the last level before the end, since the step to clean data is of first order.
    """
    errors = []
    for steps in (40, 80):
        plan = make(steps)
        first_calls = np.unique(plan.step, return_index=True)[1]
        (a, s), (end_a, end_s) = plan.level[first_calls[0]], plan.level[first_calls[-1]]
        x = 0.4 * a + 1.3 * s
        exact = end_a * MEAN + (x - a * MEAN) * np.hypot(end_a * DEVIATION, end_s) / np.hypot(a * DEVIATION, s)
        errors.append(abs(float(run(plan, best_eps(schedule), x)[-2]) - exact))
    return float(np.log2(errors[0] / errors[1]))
