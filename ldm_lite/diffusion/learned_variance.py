"""The step of networks that predict the variance of the noise too: DeepFloyd IF.  Nichol and Dhariwal 2021, eq. 15."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from ldm_lite.core.denoise import (
    Adjust,
    Call,
    Combine,
    Guided,
    Inputs,
    InputSource,
    Network,
    run_row,
    weighted,
)
from ldm_lite.core.plan import Plan, Row
from ldm_lite.diffusion.plan import LearnedVariancePlan


def with_learned_variance(stretch: float) -> Callable[..., Tensor]:
    """Return the step of a network whose second half of channels is the variance, read from the last branch.

    -1 is the plan's variance, 1 the largest, where the noise is the plan's times exp(stretch).
    """

    def step(
        network: Network,
        registers: Tensor,
        row: Row,
        noise: Tensor,
        guided: Guided,
        combine: Combine = weighted,
        adjust: tuple[Adjust, ...] = (),
        arguments: Mapping[str, Any] | None = None,
    ) -> Tensor:
        x, num_branches = registers[0], len(guided.positive)
        batch = x if num_branches == 1 else x.repeat(num_branches, 1, 1, 1)
        out = network(batch, row.t.expand(len(batch)), **guided.conditioning, **(arguments or {})).float()
        prediction, variance = out.chunk(2, dim=1)
        noise = noise * torch.exp((variance[-len(x) :] + 1) / 2 * stretch)
        return run_row(lambda *inputs, **named: prediction, registers, row, noise, guided, combine, adjust)

    return step


def learning_variance(inputs_of: InputSource, plan: Plan) -> InputSource:
    """Return inputs whose step reads the variance that the network predicts."""

    def stepped(call: Call) -> Inputs:
        stretch = plan.stretch[call.number] if isinstance(plan, LearnedVariancePlan) else 0.0
        return inputs_of(call)._replace(run_row=with_learned_variance(float(stretch)))

    return stepped
