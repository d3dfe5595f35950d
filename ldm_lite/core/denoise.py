"""Denoising: what a call of the network reads, the one step that runs any row of any plan, and the only loop.

An InputSource gives the inputs of each call.  Features wrap it: InputSource -> InputSource.

Shape letters: B images, K branches of guidance, R registers, C channels, h w latent size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ldm_lite.core.plan import NUM_REGISTERS, Plan, Row, rows_of

Conditioning = Mapping[str, Tensor]  # what the network reads besides latents and t, by its parameters, batch first
Network = Callable[..., Tensor]  # (x (K*B,C,h,w), t (K*B,), **conditioning) -> prediction, of the same shape as x
Draw = Callable[[], Tensor]  # -> unit noise (B,C,h,w), float32, on any device
Constraint = Callable[[int, Tensor], Tensor]  # (number of a call, latents before it) -> latents; also after the last


class Call(NamedTuple):
    """A call of the network."""

    number: int  # from 0
    step: int  # that it belongs to, from 0
    num_steps: int


# ---- guidance -------------------------------------------------------------------------------------------------------


class Branch(NamedTuple):
    """A conditioning that the network runs on, and what its output counts for."""

    conditioning: Conditioning
    weight: float | Tensor = 1.0  # at a guidance scale of 1; a tensor (1,h,w) has one for each position
    positive: bool = True  # False: a negative prompt, or none


class Outputs(NamedTuple):
    """What the network predicted in a call, for guidance to combine.  All tensors are float32."""

    outs: Tensor  # (K,B,C,h,w) one for each branch, in their order: eps or v, as the network predicts
    weights: Tensor  # (K,1,1,1,1) or (K,1,1,h,w): weight times scale of each branch; the first one's is not used
    positive: tuple[bool, ...]  # which branches are positive
    x: Tensor  # (B,C,h,w) the latents that the call read
    row: Row  # row.t, row.level and row.to_x0 tell the noise level

    def to_x0(self, out: Tensor) -> Tensor:
        """Return the clean latents (B,C,h,w) of an output in the network's units."""
        return self.row.to_x0[0] * self.x + self.row.to_x0[1] * out

    def from_x0(self, x0: Tensor) -> Tensor:
        """Return the output, in the network's units, of clean latents: the inverse of to_x0."""
        return (x0 - self.row.to_x0[0] * self.x) / self.row.to_x0[1]

    @property
    def cond(self) -> Tensor:
        """The output of the positive branch (B,C,h,w); of several, their mean by weight."""
        places = [k for k, positive in enumerate(self.positive) if positive]
        if len(places) == 1:
            return self.outs[places[0]]
        weights = self.weights[places]
        return (weights * self.outs[places]).sum(dim=0) / weights.sum(dim=0)


Combine = Callable[[Outputs], Tensor]  # -> the guided output (B,C,h,w), in the network's units
Adjust = Callable[[Tensor, Outputs], Tensor]  # (guided output, what it was made of) -> guided output


def weighted(outputs: Outputs) -> Tensor:
    """Guidance: the first output, plus the weighted differences of the others from it.

    For two branches this is uncond + scale * (cond - uncond).  Ho and Salimans 2022, eq. 6, in the original scripts'
    convention.
    """
    outs = outputs.outs
    return outs[0] if len(outs) == 1 else outs[0] + (outputs.weights[1:] * (outs[1:] - outs[:1])).sum(dim=0)


class Guided(NamedTuple):
    """The branches that run in a call, as one batch, branch by branch: the rows of branch k are k*B to (k+1)*B."""

    conditioning: Conditioning  # each tensor (K*B,...), on the device
    weights: Tensor  # (K,1,1,1,1) or (K,1,1,h,w)
    positive: tuple[bool, ...]


def running(branches: tuple[Branch, ...], scale: float) -> tuple[Branch, ...]:
    """Return the branches that run: all, or all but the first if its weight comes to 0, as at a scale of 1."""
    total = scale * sum(branch.weight for branch in branches[1:])
    farthest = abs(total - 1) if not isinstance(total, Tensor) else float((total - 1).abs().max())
    return branches[1:] if len(branches) > 1 and farthest < 1e-6 else branches


def join(branches: Sequence[Branch], scale: float, device: torch.device) -> Guided:
    """Return branches as one batch; do not wait for the device.  Raises ValueError for parts of different shapes."""
    parts = [branch.conditioning for branch in branches]
    for name in parts[0]:
        if len({part[name].shape for part in parts}) > 1:
            shapes = " and ".join(str(tuple(part[name].shape)) for part in parts)
            raise ValueError(f"got {name} of shapes {shapes}, expected the same for all branches of the guidance")
    conditioning = {name: torch.cat([part[name] for part in parts]).to(device) for name in parts[0]}
    weights = [scale * torch.as_tensor(branch.weight, dtype=torch.float64, device="cpu") for branch in branches]
    size = max(weights, key=Tensor.numel).shape[-2:] or (1, 1)
    stacked = torch.stack([weight.float().expand(1, 1, *size) for weight in weights])
    return Guided(conditioning, stacked.to(device, non_blocking=True), tuple(branch.positive for branch in branches))


# ---- the step -------------------------------------------------------------------------------------------------------


def denoise_step(
    network: Network,
    registers: Tensor,
    row: Row,
    noise: Tensor,
    guided: Guided,
    combine: Combine = weighted,
    adjust: tuple[Adjust, ...] = (),
    arguments: Mapping[str, Any] | None = None,
) -> Tensor:
    """Run one row: return the registers (R,B,C,h,w) float32, the first of which is the latent, after one call.

    noise (B,C,h,w) is unit noise or zeros; arguments are further ones of the network.  `torch.compile(denoise_step)`
    serves every sampler, number of steps and guidance scale; it compiles again for another network, number of branches,
    combine or adjust.
    """
    x, num_branches = registers[0], len(guided.positive)
    batch = x if num_branches == 1 else x.repeat(num_branches, 1, 1, 1)
    out = network(batch, row.t.expand(len(batch)), **guided.conditioning, **(arguments or {})).float()
    outputs = Outputs(out.view(num_branches, *x.shape), guided.weights, guided.positive, x, row)
    out = combine(outputs)
    for change in adjust:
        out = change(out, outputs)
    h = row.to_h[0] * x + row.to_h[1] * out
    # Multiply and add, not matmul: the sampler's arithmetic stays float32 even if matmuls are TF32.
    terms = torch.cat([registers, h[None], noise[None]])
    return (row.mix[:, :, None, None, None, None] * terms).sum(dim=1)


# ---- the inputs of a call -------------------------------------------------------------------------------------------


class Inputs(NamedTuple):
    """All that a call reads besides the latents, and the function that runs it."""

    network: Network
    branches: tuple[Branch, ...]  # the first is the one that guidance leads away from
    scale: float = 1.0  # of guidance: the factor of all weights
    combine: Combine = weighted
    adjust: tuple[Adjust, ...] = ()  # applied after `combine`, in this order
    arguments: Mapping[str, Any] | None = None  # further ones of the network, the same for all branches
    step: Callable[..., Tensor] = denoise_step  # perhaps compiled

    def combined_by(self, combine: Combine) -> Inputs:
        """Return inputs whose guidance is another function.  Raises ValueError if a feature replaced it already."""
        if self.combine is not weighted:
            raise ValueError("two options replace the guidance: leave one of them out")
        return self._replace(combine=combine)


InputSource = Callable[[Call], Inputs]


# ---- the loop -------------------------------------------------------------------------------------------------------


def unconstrained(number: int, x: Tensor) -> Tensor:
    """Leave the latents as they are: the Constraint of text to image."""
    return x


@dataclass(frozen=True, eq=False)
class State:
    """The latents after a step, and what is needed to tell the image that the step predicted."""

    step: int  # from 1
    num_steps: int
    latents: Tensor = field(repr=False)  # (B,C,h,w) float32, in the UNet's scale
    before: Tensor = field(repr=False)  # (B,C,h,w) that the last call read whose H is remembered
    h: Tensor = field(repr=False)  # (B,C,h,w) this H: eps or x0, as the sampler chose
    x0_of_h: tuple[float, float] = field(repr=False)  # (p, q): x0 = p * before + q * h
    constrain: Callable[[Tensor], Tensor] = field(repr=False)  # to clean latents: what a mask keeps is put back

    @property
    def x0(self) -> Tensor:
        """The clean latents (B,C,h,w) that the step predicted, after guidance: a preview."""
        return self.constrain(self.x0_of_h[0] * self.before + self.x0_of_h[1] * self.h)


@torch.no_grad()
def run_plan(
    x: Tensor, plan: Plan, inputs_of: InputSource, draw: Draw, constrain: Constraint = unconstrained
) -> Iterator[State]:
    """Yield the state after every step of a plan from latents x (B,C,h,w); the last one's latents are the result.

    The only loop.  draw is called for rows that add noise.  Leaving the loop stops it.  Raises ValueError for noise of
    another shape.
    """
    num_calls = len(plan.t)
    registers = torch.cat([x[None], x.new_zeros(NUM_REGISTERS - 1, *x.shape)])  # (R, B, C, h, w)
    no_noise, joined = torch.zeros_like(x), None
    remembered = x, x, (0.0, 1.0)
    for i, row in enumerate(rows_of(plan, x.device)):
        step = int(plan.step[i])
        registers = _constrained(constrain, i, registers)
        noise = draw().to(x.device, non_blocking=True) if plan.adds_noise[i] else no_noise
        if noise.shape != x.shape:
            raise ValueError(f"got noise of shape {tuple(noise.shape)} from `draw`, expected {tuple(x.shape)}")
        inputs = inputs_of(Call(i, step, plan.num_steps))
        if joined is None or joined[0] is not inputs.branches or joined[1] != inputs.scale:
            joined = inputs.branches, inputs.scale, join(running(inputs.branches, inputs.scale), inputs.scale, x.device)
        before = registers[0]
        how = inputs.combine, inputs.adjust, inputs.arguments
        registers = inputs.step(inputs.network, registers, row, noise, joined[2], *how)
        if plan.remembers[i]:
            remembered = before, registers[2], plan.x0_of_h(i)
        if i + 1 == num_calls:
            registers = _constrained(constrain, num_calls, registers)
        if i + 1 == num_calls or plan.step[i + 1] != step:
            yield State(step + 1, plan.num_steps, registers[0], *remembered, lambda x0: constrain(num_calls, x0))


def _constrained(constrain: Constraint, number: int, registers: Tensor) -> Tensor:
    """Return registers whose latent is constrained; not in place, since they may be the output of a CUDA graph."""
    x = registers[0]
    constrained = constrain(number, x)
    return registers if constrained is x else torch.cat([constrained[None], registers[1:]])
