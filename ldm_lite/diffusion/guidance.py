"""Guidance: on which conditionings the network runs, and how its outputs are mixed.

A `Guidance` describes it for a whole run, in the core's terms: branches with weights, a scale, and functions that mix
and adjust the outputs (adjustments.py has some).  `Guidance.source` makes the core's InputSource of it.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard, TypeVar
from weakref import WeakSet

import numpy as np
import torch
from torch import Tensor

from ldm_lite.core.denoise import Adjust, Branch, Call, Combine, Inputs, InputSource, Outputs, running, weighted
from ldm_lite.core.denoise import Conditioning as Parts
from ldm_lite.diffusion.plan import Plan

Function = TypeVar("Function", bound=Callable[..., Any])
ScaleOrFunction = float | Callable[..., Any]  # of guidance; a function is step -> scale, or one of by_function

STATELESS: WeakSet[Callable[..., Any]] = WeakSet([weighted])  # functions for Inputs.combine and .adjust


def stateless(function: Function) -> Function:
    """Decorate a function whose result depends on its arguments alone, so that a CUDA graph may repeat what it did."""
    STATELESS.add(function)
    return function


class Conditioning(dict[str, Tensor]):
    """What a network reads besides latents and timesteps, batch first, by the names of its parameters.

    It is a mapping, as the core has it, whose usual parts are attributes too: context (B,T,D), y, vectors (B,V) or
    classes (B,) int64, and concat (B,C',h,w), channels appended to the latents; None if it has no such part.
    """

    def __init__(
        self, context: Tensor | None = None, y: Tensor | None = None, concat: Tensor | None = None, **more: Tensor
    ) -> None:
        parts = {"context": context, "y": y, "concat": concat, **more}
        super().__init__({name: part for name, part in parts.items() if part is not None})

    def __repr__(self) -> str:
        shapes = ", ".join(f"{name} {tuple(part.shape)}" for name, part in self.items())
        return f"{type(self).__name__}({shapes})"

    @property
    def context(self) -> Tensor | None:
        """The text."""
        return self.get("context")

    @property
    def y(self) -> Tensor | None:
        """Vectors or classes."""
        return self.get("y")

    @property
    def concat(self) -> Tensor | None:
        """Further channels."""
        return self.get("concat")


def as_conditioning(value: Any) -> Parts | None:
    """Ready conditioning from the user: what encode_prompt makes, or embeddings (N,T,D).  Raises TypeError."""
    if value is None or (isinstance(value, Mapping) and value and all(isinstance(x, Tensor) for x in value.values())):
        return value
    if isinstance(value, Tensor):
        return {"context": value}
    raise TypeError(f"got {type(value).__name__} as conditioning, expected what encode_prompt makes, or a tensor")


def conditioning_rows(conditioning: Parts, rows: slice | list[int], count: int) -> Parts:
    """Return some rows of a conditioning of `count` images, or of a single one for all.  Raises ValueError."""
    for part in conditioning.values():
        if part.ndim == 0 or len(part) not in (1, count):
            raise ValueError(f"got conditioning of shape {tuple(part.shape)} for {count} images, expected 1 or {count}")
    return {name: part.expand(count, *part.shape[1:])[rows] for name, part in conditioning.items()}


@dataclass(frozen=True)
class Constant:
    """An InputSource whose inputs are the same in every call: batches that have one can be joined."""

    inputs: Inputs

    def __call__(self, call: Call) -> Inputs:
        """Return the inputs."""
        return self.inputs


@dataclass(frozen=True, eq=False)
class Guidance:
    """The branches of a run, and how their outputs are mixed."""

    branches: tuple[Branch, ...]
    scale: float | Callable[[int], float] = 1.0  # or a function of the step, counted from 0
    combine: Combine = weighted
    combine_at: Callable[[int], Combine] | None = None  # the same for a step, if it changes
    adjust: tuple[Adjust, ...] = ()

    def source(self, model: Any) -> InputSource:
        """Return the inputs of each call of a model's network, on its device.

        context, y and concat are in the model's dtype unless they are integers, others as they are.
        """

        def sent(name: str, part: Tensor) -> Tensor:
            is_cast = name in ("context", "y", "concat") and part.is_floating_point()
            return part.to(model.device, model.dtype if is_cast else part.dtype)

        branches = tuple(
            branch._replace(conditioning={name: sent(name, part) for name, part in branch.conditioning.items()})
            for branch in self.branches
        )
        scale = 1.0 if callable(self.scale) else self.scale
        inputs = Inputs(model.unet, branches, scale, self.combine, self.adjust, run_row=model.run_row)
        return changing(self, inputs) if callable(self.scale) or self.combine_at else Constant(inputs)


def changing(guidance: Guidance, inputs: Inputs) -> InputSource:
    """Return inputs whose scale, or function of outputs, changes over the steps."""
    # Once a step: it may have several calls, and features look at the inputs of a call too.
    scale_at = functools.cache(guidance.scale) if callable(guidance.scale) else lambda step: inputs.scale
    combine_at = guidance.combine_at or (lambda step: inputs.combine)
    return lambda call: inputs._replace(scale=float(scale_at(call.step)), combine=combine_at(call.step))


@dataclass(frozen=True, eq=False)
class InTurns:
    """An InputSource that others replace during the run, with the same weights and shapes of conditionings."""

    turns: tuple[tuple[int, InputSource], ...]  # (first call, from 0, that uses it, input), in order

    def __call__(self, call: Call) -> Inputs:
        """Return the inputs of a call."""
        return next(source for first, source in reversed(self.turns) if first <= call.number)(call)


# ---- kinds of guidance ----------------------------------------------------------------------------------------------


def classifier_free(cond: Parts, uncond: Parts | None, guidance: ScaleOrFunction = 7.5) -> Guidance:
    """uncond + scale * (cond - uncond); no uncond, or scale 1, means no guidance, and half the work.

    guidance is the scale, or a function as by_function takes it.  Ho and Salimans 2022, eq. 6, in the original scripts'
    convention.  Raises TypeError for anything else, ValueError for a function without uncond.
    """
    if callable(guidance):
        return by_function(cond, uncond, guidance)
    if (scale := checked_scale(guidance)) == 1 or uncond is None:
        return Guidance((Branch(cond),))
    return Guidance((Branch(uncond, positive=False), Branch(cond)), scale)


def checked_scale(guidance: Any) -> float:
    """Return a guidance scale.  Raises TypeError for anything but a number, ValueError for one that is not finite."""
    try:
        if isinstance(guidance, (str, bytes)):
            raise TypeError
        scale = float(guidance)
    except (TypeError, ValueError, RuntimeError) as error:  # numpy and torch raise these for several numbers
        raise TypeError(f"got `guidance` {guidance!r:.60}, expected a number or a function") from error
    except OverflowError:
        scale = math.inf
    if not math.isfinite(scale):
        raise ValueError(f"got `guidance` {guidance!r:.60}, expected a finite number or a function")
    return scale


def by_function(cond: Parts, uncond: Parts | None, function: Callable[..., Any]) -> Guidance:
    """Guidance by the user's function: step -> scale, or of the network's raw outputs (B,C,h,w) float32.

    The second is a function (cond, uncond), optionally with the step as a third argument, -> output.  Steps count from
    0.  Raises ValueError if there is no uncond.
    """
    if uncond is None:
        raise ValueError("got a `guidance` function, but no conditioning of the negative prompt for it to read")
    branches = Branch(uncond, positive=False), Branch(cond)
    if reads_step_alone(function):
        return Guidance(branches, function)
    combine, parameters = functools.partial(_combined, function, ()), inspect.signature(function).parameters
    if len(_needed(function)) == 2 and "step" not in parameters:
        return Guidance(branches, 0.0, combine)  # a scale with which both run

    @functools.cache
    def combine_at(step: int) -> Combine:
        return functools.partial(_combined, function, (step,))

    return Guidance(branches, 0.0, combine, combine_at=combine_at)


def _needed(function: Callable[..., Any]) -> list[str]:
    parameters = inspect.signature(function).parameters.items()
    return [name for name, parameter in parameters if parameter.default is parameter.empty]


def reads_step_alone(guidance: ScaleOrFunction) -> TypeGuard[Callable[..., Any]]:
    """Whether guidance is a function of the step, and not of outputs."""
    return callable(guidance) and len(_needed(guidance)) < 2


def _combined(function: Callable[..., Tensor], step: tuple[int, ...], outputs: Outputs) -> Tensor:
    """Apply the user's function to the outputs of cond and uncond.  Raises ValueError unless its result fits them."""
    if len(outputs.outs) != 2:
        return weighted(outputs)
    uncond, cond = outputs.outs
    out: object = function(cond, uncond, *step)
    if not isinstance(out, Tensor) or out.shape != cond.shape:
        got = f"a tensor of shape {tuple(out.shape)}" if isinstance(out, Tensor) else type(out).__name__
        raise ValueError(f"got {got} from the `guidance` function, expected {tuple(cond.shape)} as it was given")
    return out


def composed(
    conds: Sequence[Parts],
    parts: tuple[float, ...],
    uncond: Parts | None,
    guidance: ScaleOrFunction,
) -> Guidance:
    """uncond + scale * sum of part * (cond - uncond), for conditionings and the weights of each: a prompt with AND.

    Liu et al. 2022, eq. 11.  Raises ValueError for guidance by a function of outputs, and if there is no uncond.
    """
    if parts == (1.0,):
        return classifier_free(conds[0], uncond, guidance)
    if uncond is None:
        raise ValueError("a prompt with AND, or with a weight at its end, needs a model with classifier-free guidance")
    scale = classifier_free(conds[0], uncond, guidance) if callable(guidance) else None
    if scale is not None and not callable(scale.scale):
        raise ValueError("a prompt with AND takes a `scale`, or a `guidance` function of the step")
    branches = Branch(uncond, positive=False), *map(Branch, conds, parts)
    return Guidance(branches, guidance if scale is None else scale.scale)


def cfg_plus_plus(plan: Plan, scale: float) -> Callable[[int], float]:
    """Return the guidance of every step, counted from 0, that makes DDIM's plan take the noise of uncond.

    With CFG++ x0 is guided by scale / 12.5, as in A1111, and the noise added back to it is not; since both are linear
    in the network's outputs, that is DDIM with a larger scale.  Chung et al. 2024, alg. 2.  Raises ValueError for a
    plan with a step from a level to itself.
    """
    after = np.append(plan.level[1:, 0], plan.end.a)
    of_x0 = plan.x0_of_out[:, 1] / plan.h_of_out[:, 1] * after  # weight of the prediction in x0's part of the step
    whole = plan.mix[:, 0, -2]
    if not (np.isfinite(of_x0).all() and abs(whole).min() > 1e-9):
        raise ValueError("CFG++ is undefined for a step that does not lower the noise: use 500 steps or less")
    scales = (scale / 12.5 * of_x0 / whole).tolist()
    return lambda step: float(scales[step])


def instructed(cond: Parts, uncond: Parts | None, concat: Tensor, scale: float, image_scale: float) -> Guidance:
    """Guidance by text and image: neither + image_scale * (image - neither) + scale * (both - image).

    concat (B,C',h,w) is the image; uncond may be None if both scales are 1.  Brooks et al. 2023, eq. 3.
    """
    both = {**cond, "concat": concat}
    if uncond is None:
        return Guidance((Branch(both),))
    neither, image = {**uncond, "concat": torch.zeros_like(concat)}, {**uncond, "concat": concat}
    branches = [
        Branch(neither, positive=False),
        Branch(image, image_scale - scale, positive=False),
        Branch(both, scale),
    ]
    return Guidance(tuple(branch for branch in branches if branch.weight != 0 or branch.positive))


def gated(source: InputSource, first: int) -> InputSource:
    """Return inputs of which only the last branch runs from a step on; regions, whose weights are maps, all run."""

    @functools.cache
    def last(branches: IdentityKey) -> tuple[Branch, ...]:
        maps = any(isinstance(branch.weight, Tensor) for branch in branches.value)
        chosen: tuple[Branch, ...] = branches.value if maps else (branches.value[-1]._replace(weight=1.0),)
        return chosen

    def inputs_of(call: Call) -> Inputs:
        inputs = source(call)
        if call.step < first:
            return inputs
        return inputs._replace(branches=last(IdentityKey(inputs.branches)), scale=1.0, combine=weighted)

    return inputs_of


def mapped(source: InputSource, change: Callable[[Inputs], Inputs]) -> InputSource:
    """Return inputs that are changed in every call in the same way; Constant ones stay Constant."""
    return Constant(change(source.inputs)) if isinstance(source, Constant) else lambda call: change(source(call))


def check_guided(job: Any, option: str) -> Inputs:
    """Return the inputs of a job's first call.  Raises ValueError if there is no guidance for an option to change."""
    inputs: Inputs = job.plain(Call(0, 0, job.plan.num_steps))
    negative = [not branch.positive for branch in inputs.branches]
    scaled = callable(job.guidance) or inputs.scale != 1 or any(negative[1:])
    several = callable(job.guidance) or len(running(inputs.branches, inputs.scale)) > 1
    if not (scaled and several and any(negative)):
        raise ValueError(
            f"`{option}` changes the guidance, but there is none: use a `scale` other than 1, and a checkpoint that "
            "is not distilled"
        )
    return inputs


def check_classifier_free(job: Any, option: str) -> float:
    """Return the scale of guidance, for an option that changes it.

    Raises ValueError unless there are one negative and one positive branch, and one number.
    """
    job.refuse_parts(f"takes no `{option}`: leave it out")
    inputs = check_guided(job, option)
    if callable(job.options.guidance):
        raise ValueError(f"got a `guidance` function and `{option}`: leave one of them out")
    if callable(job.guidance):
        raise ValueError(f"DDIM CFG++ has guidance of its own: leave out `{option}`, or use another sampler")
    if [branch.positive for branch in inputs.branches] != [False, True]:
        raise ValueError(f"`{option}` is for guidance by the prompt alone, not by image and prompt: leave it out")
    return inputs.scale


class IdentityKey:
    """A value as a key of a cache, by its identity: it stays alive with the key."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, IdentityKey) and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)
