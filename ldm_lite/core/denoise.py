"""Denoising: what a call of the network reads, the one step that runs any row of any plan, and the only loop.

A sampler is a table, and one row of it is one call of the network.  For DDIM from eps prediction, where the level is
x = a x0 + s eps now and x = a' x0 + s' eps after the row, it does this:

    out = network(x, t)                  # of each branch of guidance, then mixed
    h = 0 * x + 1 * out                  # row.h_of_out = (0, 1): H is eps, as DDIM chose
    x = (a'/a) * x + (s' - a' s/a) * h   # row.mix: Song et al. 2021, eq. 12, as coefficients of x and h

Other samplers have other coefficients, of the H of earlier calls and of noise too.  What a run keeps from call to call
are its registers: the latent X, a latent put ASIDE, and the last three predictions H1, H2, H3 (plan.py).  To see
latents in a debugger, stop in run_row, or look at each State that run_plan yields.

An InputSource gives the inputs of each call.  Features wrap it: InputSource -> InputSource.

Shape letters: B images, K branches of guidance, R registers, C channels, h w latent size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ldm_lite.core.layers import calling
from ldm_lite.core.plan import NUM_REGISTERS, Plan, Row, device_rows

# What the network reads besides latents and t, by the names of its parameters; each tensor has the batch first.
Conditioning = Mapping[str, Tensor]
# (x (K*B,C,h,w), t (K*B,), **conditioning) -> prediction, of the same shape as x
Network = Callable[..., Tensor]
# () -> unit noise (B,C,h,w), float32, on any device
Draw = Callable[[], Tensor]
# (number of a call, the latents before it) -> latents; also after the last call, with the number of calls
Constraint = Callable[[int, Tensor], Tensor]


class Call(NamedTuple):
    """A call of the network."""

    number: int  # from 0
    step: int  # the step of the call, from 0
    num_steps: int


# ---- guidance -------------------------------------------------------------------------------------------------------


class Branch(NamedTuple):
    """A conditioning that the network runs on, and the weight of its output."""

    conditioning: Conditioning
    # Multiplied by the guidance scale; a tensor (1,h,w) has one for each position.  `weighted` does not use that of the
    # first branch.
    weight: float | Tensor = 1.0
    # False for a negative prompt, and for a branch of your own that is no prompt: see Outputs.cond.
    positive: bool = True


class Outputs(NamedTuple):
    """What the network predicted in a call, for guidance to combine.  All tensors are float32."""

    outs: Tensor  # (K,B,C,h,w) of the branches, in their order: eps or v, as the network predicts
    weights: Tensor  # (K,1,1,1,1) or (K,1,1,h,w) of the branches, times the scale; `weighted` does not use the first
    positive: tuple[bool, ...]  # which branches are positive
    x: Tensor  # (B,C,h,w) the latents that the call read
    row: Row  # row.t, row.level and row.x0_of_out tell the noise level

    def to_x0(self, out: Tensor) -> Tensor:
        """Return the clean latents (B,C,h,w) of an output in the network's units."""
        return self.row.x0_of_out[0] * self.x + self.row.x0_of_out[1] * out

    def from_x0(self, x0: Tensor) -> Tensor:
        """Return the output, in the network's units, of clean latents: the inverse of to_x0."""
        return (x0 - self.row.x0_of_out[0] * self.x) / self.row.x0_of_out[1]

    @property
    def cond(self) -> Tensor:
        """The output of the positive branch (B,C,h,w); of several, their mean by weight.

        A branch of your own counts as a prompt unless it has positive=False.
        """
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
    if len(outs) == 1:
        return outs[0]
    differences = outs[1:] - outs[:1]
    return outs[0] + (outputs.weights[1:] * differences).sum(dim=0)


class Guided(NamedTuple):
    """The branches that run in a call, as one batch, branch by branch: the rows of branch k are k*B to (k+1)*B."""

    conditioning: Conditioning  # each tensor (K*B,...), on the device
    weights: Tensor  # (K,1,1,1,1) or (K,1,1,h,w)
    positive: tuple[bool, ...]


def running(branches: tuple[Branch, ...], scale: float) -> tuple[Branch, ...]:
    """Return the branches that run: all, or all but the first if its output would have no weight, as at a scale of 1.

    In `weighted`, the first output counts 1 - scale * (the sum of the others' weights).  Where that is 0, the
    others' weights sum to 1, so the next one may take its place.

    Raises ValueError for maps of weights of different sizes.
    """
    weights = [branch.weight for branch in branches[1:]]
    maps = [weight for weight in weights if isinstance(weight, Tensor) and weight.ndim]
    if len({tuple(weight.shape) for weight in maps}) > 1:
        shapes = " and ".join(str(tuple(weight.shape)) for weight in maps)
        raise ValueError(f"got maps of weights of shapes {shapes}, expected the same for all branches")
    first_counts = 1 - scale * sum(weights)  # a number, or a map
    largest = float(first_counts.abs().max()) if isinstance(first_counts, Tensor) else abs(first_counts)
    return branches[1:] if len(branches) > 1 and largest < 1e-6 else branches


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a tensor to a device; to a CUDA GPU without waiting for it, from pinned memory.

    From other memory, a copy that does not wait may read freed memory: on Apple's GPUs it does.
    """
    if device.type == "cuda" and tensor.device.type == "cpu":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


def join(branches: Sequence[Branch], scale: float, device: torch.device) -> Guided:
    """Return branches as one batch; do not wait for the device.  Raises ValueError for parts of different shapes."""
    parts = [branch.conditioning for branch in branches]
    for name in parts[0]:
        if len({part[name].shape for part in parts}) > 1:
            shapes = " and ".join(str(tuple(part[name].shape)) for part in parts)
            raise ValueError(f"got {name} of shapes {shapes}, expected the same for all branches of the guidance")
    conditioning = {}
    for name in parts[0]:
        tensor = torch.cat([part[name] for part in parts])
        conditioning[name] = to_device(tensor, device)
    weights = [
        torch.as_tensor(branch.weight, dtype=torch.float64, device="cpu")  # a number (), or a map (1, h, w)
        for branch in branches
    ]
    map_size = next((weight.shape[-2:] for weight in weights if weight.ndim), (1, 1))
    stacked = torch.stack([(scale * weight).float().expand(1, 1, *map_size) for weight in weights])
    positive = tuple(branch.positive for branch in branches)
    return Guided(conditioning, to_device(stacked, device), positive)


# ---- the step -------------------------------------------------------------------------------------------------------


def run_row(
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

    noise (B,C,h,w) is unit noise or zeros; arguments are further ones of the network.  `torch.compile(run_row)`
    serves every sampler, number of steps and guidance scale; it compiles again for another network, number of branches,
    combine or adjust.
    """
    x = registers[0]
    num_branches = len(guided.positive)
    batch = x if num_branches == 1 else x.repeat(num_branches, 1, 1, 1)  # (K*B, C, h, w)
    t = row.t.expand(len(batch))
    out = network(batch, t, **guided.conditioning, **(arguments or {})).float()
    outs = out.view(num_branches, *x.shape)  # (K, B, C, h, w)
    outputs = Outputs(outs, guided.weights, guided.positive, x, row)
    out = combine(outputs)  # (B, C, h, w)
    for change in adjust:
        out = change(out, outputs)
    h = row.h_of_out[0] * x + row.h_of_out[1] * out
    # Multiply and add, not matmul: the sampler's arithmetic stays float32 even if matmuls are TF32.
    terms = torch.cat([registers, h[None], noise[None]])
    return (row.mix[:, :, None, None, None, None] * terms).sum(dim=1)


# ---- the inputs of a call -------------------------------------------------------------------------------------------


class Inputs(NamedTuple):
    """All that a call reads besides the latents, and the function that runs it.

    A value of `arguments` that depends on the branches, of which some calls run fewer, is a function: it gets a tuple
    of bools, one for each branch that runs, which are True for the positive ones, and returns the value.

    With gradients=True, `combine` and `adjust` can differentiate what the network predicted by outputs.x, the latents:
    torch.autograd.grad(loss, outputs.x).  It takes the memory of training; the weights get no gradients from it.
    """

    network: Network
    branches: tuple[Branch, ...]  # the first is the one that guidance leads away from
    scale: float = 1.0  # of guidance: the factor of all weights
    combine: Combine = weighted
    adjust: tuple[Adjust, ...] = ()  # applied after `combine`, in this order
    arguments: Mapping[str, Any] | None = None  # further ones of the network, for all branches as one batch
    run_row: Callable[..., Tensor] = run_row  # that function, or what torch.compile made of it, or one of your own
    gradients: bool = False  # of the network's output, for guidance

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
    """The latents after a step, and what is needed to compute the image that the step predicted."""

    step: int  # how many are done, from 1 (Call.step counts from 0)
    num_steps: int
    latents: Tensor = field(repr=False)  # (B,C,h,w) float32, in the UNet's scale
    before: Tensor = field(repr=False)  # (B,C,h,w) the latents that the call of `h` read
    h: Tensor = field(repr=False)  # (B,C,h,w) this H: eps or x0, as the sampler chose
    x0_of_h: tuple[float, float] = field(repr=False)  # (p, q): x0 = p * before + q * h
    constrain: Callable[[Tensor], Tensor] = field(repr=False)  # puts into clean latents what a mask keeps

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
    no_noise = torch.zeros_like(x)
    # Of the last call, so that branches are joined only when they change.
    branches, scale, guided = None, None, None
    # Of the last call whose H was remembered, for previews; the first call of a plan always is.
    before, h, x0_of_h = x, x, (0.0, 1.0)
    for number, row in enumerate(device_rows(plan, x.device)):
        step = int(plan.step[number])
        is_last = number + 1 == num_calls
        registers = _constrained(constrain, number, registers)
        noise = to_device(draw(), x.device) if plan.adds_noise[number] else no_noise
        if noise.shape != x.shape:
            raise ValueError(f"got noise of shape {tuple(noise.shape)} from `draw`, expected {tuple(x.shape)}")
        call = Call(number, step, plan.num_steps)
        inputs = inputs_of(call)
        if guided is None or inputs.branches is not branches or inputs.scale != scale:
            branches, scale = inputs.branches, inputs.scale
            guided = join(running(branches, scale), scale, x.device)
        latents = registers[0]
        with calling(call, row.t, guided.positive):  # for attention functions with `place`; no effect on others
            registers = _run_call(inputs, registers, row, noise, guided)
        if plan.remembers[number]:
            before, x0_of_h = latents, plan.x0_of_h(number)
            h = registers[2]  # H1, where the row has put this call's H
        if is_last:
            registers = _constrained(constrain, num_calls, registers)
        if is_last or plan.step[number + 1] != step:
            yield State(
                step=step + 1,
                num_steps=plan.num_steps,
                latents=registers[0],
                before=before,
                h=h,
                x0_of_h=x0_of_h,
                constrain=lambda x0: constrain(num_calls, x0),
            )


def _run_call(inputs: Inputs, registers: Tensor, row: Row, noise: Tensor, guided: Guided) -> Tensor:
    """Run the step of a call, with gradients if its inputs ask for them, and return the registers without."""
    arguments = None
    if inputs.arguments is not None:
        arguments = {
            name: value(guided.positive) if callable(value) else value  # of the branches that run
            for name, value in inputs.arguments.items()
        }
    functions = inputs.combine, inputs.adjust
    if not inputs.gradients:
        return inputs.run_row(inputs.network, registers, row, noise, guided, *functions, arguments)
    with torch.enable_grad():
        registers = registers.detach().requires_grad_()
        registers = inputs.run_row(inputs.network, registers, row, noise, guided, *functions, arguments)
    return registers.detach()


def _constrained(constrain: Constraint, number: int, registers: Tensor) -> Tensor:
    """Return registers whose latent is constrained; not in place, since they may be the output of a CUDA graph."""
    x = registers[0]
    constrained = constrain(number, x)
    return registers if constrained is x else torch.cat([constrained[None], registers[1:]])
