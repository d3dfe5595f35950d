"""What the network reads in a step: a model with its inputs on the device."""

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from ldm_lite.checkpoint.model import Model
from ldm_lite.diffusion.guidance import Branches, Conditioning, Guidance, SkipWeights
from ldm_lite.diffusion.step import Network
from ldm_lite.models.controlnet import ControlledUNet
from ldm_lite.models.unet import TextCache, UNet
from ldm_lite.runtime.patching import runs_as_written


class StepControl(Protocol):
    """Chooses the network that runs a step in place of the model's UNet, and its conditioning."""

    def __call__(self, step: int, conditioning: Conditioning) -> tuple[Network, Conditioning]:
        """Return both for a step, counted from 0, given the conditioning of all branches on the device."""


class Stage:
    """A model that runs some of the steps, with its inputs on the device."""

    def __init__(self, model: Model, branches: Branches, first_step: int, device: torch.device) -> None:
        self.model, self.branches, self.first_step, self.device = model, branches, first_step, device
        self.conditioning = self._all = _stacked(branches.conditionings, device, model.dtype)
        self._others: Conditioning | None = None  # without a first branch that only counts in some steps
        if isinstance(branches.weights, SkipWeights):
            self._others = _stacked(branches.conditionings[1:], device, model.dtype)
        self._cache: TextCache | None = None
        self._guidance: tuple[object, Guidance] | None = None

    def read_text(self) -> None:
        """Compute the keys and values of the text once for all steps, within the UNet's phase.

        Skipped under autocast, and if part of the network was replaced or hooked: such code may need the text, or
        may load the weights.
        """
        unet: Any = self.model.unet
        as_written = getattr(type(unet), "forward", None) is UNet.forward and runs_as_written(unet)
        autocast = torch.is_autocast_enabled(self.device.type)
        if self.conditioning.context is not None and as_written and not autocast:
            self._cache = unet.text_cache(self.conditioning.context)

    def inputs(self, step: int, control: StepControl | None) -> tuple[Network, Conditioning]:
        """Return the network that runs a step, and its conditioning."""
        network: Network = self.model.unet
        if self._others is not None:
            self.conditioning = self._others if self.branches.weights_at(step)[0] == 0 else self._all
        conditioning = self.conditioning
        if control is not None:
            network, conditioning = control(step, conditioning)
        own = network.unet if isinstance(network, ControlledUNet) else network  # other wrappers may take no cache
        if own is self.model.unet and conditioning.context is self.conditioning.context:
            conditioning = conditioning._replace(cache=self._cache)
        return network, conditioning

    def guidance(self, step: int) -> Guidance:
        """Return the guidance of a step, reusing the previous step's tensors if nothing changes."""
        weights = self.branches.weights_at(step)
        if self._others is not None and weights[0] == 0:
            weights = weights[1:]
        if self._guidance is None or self._guidance[0] != weights:
            percentile, limit = self.branches.threshold or (None, None)
            made = Guidance(
                weights=self._tensor(weights if len(weights) > 1 else None),
                rescale=self._tensor(self.branches.rescale or None),
                percentile=self._tensor(percentile),
                limit=self._tensor(limit),
                combine=self.branches.combine,
            )
            self._guidance = weights, made
        return self._guidance[1]

    def _tensor(self, value: float | Sequence[float] | None) -> Tensor | None:
        return None if value is None else torch.tensor(value, dtype=torch.float32, device=self.device)


def _stacked(conditionings: Sequence[Conditioning], device: torch.device, dtype: torch.dtype) -> Conditioning:
    """Concatenate all branches on the device; integers stay integers.  Raises ValueError if shapes differ."""
    parts = [{**each._asdict(), **(each.inputs or {})} for each in conditionings]
    stacked: dict[str, Tensor | None] = {}
    for name in ("context", "y", "concat", *(conditionings[0].inputs or {})):
        values = [part[name] for part in parts]
        if all(value is None for value in values):
            stacked[name] = None
            continue
        if len({value.shape[1:] for value in values}) > 1:
            shapes = " and ".join(str(tuple(value.shape)) for value in values)
            raise ValueError(f"got {name} of shapes {shapes}, wanted the same for all branches of the guidance")
        value = torch.cat(values)
        own = name in Conditioning._fields and value.is_floating_point()
        stacked[name] = value.to(device, dtype if own else value.dtype)
    main = Conditioning(stacked.pop("context"), stacked.pop("y"), stacked.pop("concat"))
    return main._replace(inputs={name: each for name, each in stacked.items() if each is not None} or None)
