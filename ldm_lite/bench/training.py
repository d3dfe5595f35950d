"""Training steps of the UNet in several configurations; a step is forward, backward and AdamW.

All configurations except channels last share parameters and optimiser, to save memory.  They are compared by their
losses over the first steps, from the same weights on the same batches.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ldm_lite.bench.backends import Backend, InProcessBackend
from ldm_lite.bench.configurations import Models, plain_copy, shared_copy
from ldm_lite.bench.workload import TRAIN, Inputs, Job, Setting, inputs
from ldm_lite.models.unet import UNet
from ldm_lite.runtime import attention
from ldm_lite.runtime.precision import DTYPES
from ldm_lite.train.losses import checkpoint_activations
from ldm_lite.zoo.families import Family

STEPS = 8  # whose losses are compared
LR = 1e-5


@dataclass(frozen=True)
class TrainConfiguration:
    """How to train."""

    title: str
    attention: str  # a name of runtime.attention
    compiled: bool
    channels_last: bool
    checkpointed: bool


EAGER = TrainConfiguration("vanilla attention", "vanilla", compiled=False, channels_last=False, checkpointed=False)
SDPA = replace(EAGER, title="sdpa", attention="sdpa")
TRAIN_CONFIGURATIONS = {
    "vanilla": EAGER,
    "sdpa": SDPA,
    "channels_last": replace(SDPA, title="sdpa, channels last", channels_last=True),
    "checkpointed": replace(SDPA, title="sdpa, checkpointed", checkpointed=True),
    "compiled": replace(SDPA, title="sdpa, compiled", compiled=True),
}


class Trained:
    """Trained parameters, their initial values and their optimiser."""

    def __init__(self, unet: UNet) -> None:
        self.unet = unet.requires_grad_(True)
        self.optimizer = torch.optim.AdamW(unet.parameters(), lr=LR, fused=True)
        self._initial = [each.detach().to("cpu", copy=True) for each in unet.parameters()]

    def reset(self) -> None:
        """Restore the initial values and forget the optimiser's state."""
        self.optimizer.state.clear()
        with torch.no_grad():
            for parameter, initial in zip(self.unet.parameters(), self._initial, strict=True):
                parameter.copy_(initial)


@dataclass(frozen=True)
class TrainWorkload:
    """The section "train"."""

    unet: UNet
    trained: Trained
    family: Family
    setting: Setting
    autocast: torch.dtype | None
    channels_last: bool

    def job(self, section: str, batch: int) -> Job:
        """Prepare training steps at a batch size."""
        assert section == TRAIN
        return _TrainJob(self, inputs(self.family, self.setting, batch))


class _TrainJob(Job):
    def __init__(self, workload: TrainWorkload, given: Inputs) -> None:
        self.workload, self.given = workload, given
        self.device = next(workload.unet.parameters()).device

    def check(self) -> Tensor:
        """The losses of the first steps (STEPS,)."""
        self.workload.trained.reset()
        losses = torch.stack([self._step(k) for k in range(STEPS)])
        self.workload.trained.reset()
        return losses

    def run(self, calls: int) -> None:
        for k in range(calls):
            self._step(k)

    def _step(self, k: int) -> Tensor:
        """Run forward, backward and update on the k-th batch; return its loss () without waiting for it."""
        work, device = self.workload, self.device
        generator = torch.Generator().manual_seed(k)
        noise = torch.randn(self.given.noise.shape, generator=generator).to(device)
        t = torch.randint(1000, (len(noise),), generator=generator).to(device)
        x = self.given.noise.to(device) + noise  # no schedule: the work is the same
        if work.channels_last:
            x = x.contiguous(memory_format=torch.channels_last)
        with torch.enable_grad(), torch.autocast(device.type, work.autocast, enabled=work.autocast is not None):
            loss = F.mse_loss(work.unet(x, t, self.given.context.to(device)).float(), noise)
        loss.backward()  # type: ignore[no-untyped-call]
        work.trained.optimizer.step()
        work.trained.optimizer.zero_grad(set_to_none=True)
        return loss.detach()


class TrainModels:
    """The UNet in every training configuration; one copy of the parameters for each memory layout."""

    def __init__(self, models: Models, setting: Setting) -> None:
        self.models, self.setting = models, setting
        self._trained: dict[bool, Trained] = {}

    def backend(self, name: str, configuration: TrainConfiguration) -> InProcessBackend:
        """Return a backend that trains in a configuration."""
        return InProcessBackend(name, self.models.device, functools.partial(self.workload, configuration))

    def workload(self, configuration: TrainConfiguration, dtype: str) -> TrainWorkload:
        """Return the UNet of a configuration; a dtype other than fp32 is used by autocast."""
        trained = self._parameters(configuration.channels_last)
        unet = shared_copy(trained.unet)
        attention.use(unet, configuration.attention)
        if configuration.checkpointed:
            checkpoint_activations(unet)
        if configuration.compiled:
            unet.compile(dynamic=False)
        cast = None if dtype == "fp32" else DTYPES[dtype]
        family = self.models.loaded().family
        return TrainWorkload(unet, trained, family, self.setting, cast, configuration.channels_last)

    def _parameters(self, channels_last: bool) -> Trained:
        if channels_last not in self._trained:
            unet: Any = plain_copy(self.models.loaded().unet)
            own = {key: value.clone() for key, value in unet.state_dict().items()}  # others use the loaded ones
            unet.load_state_dict(own, assign=True)
            self._trained[channels_last] = Trained(
                unet.to(memory_format=torch.channels_last) if channels_last else unet
            )
        return self._trained[channels_last]


def train_backends(models: Models, setting: Setting, names: Sequence[str]) -> tuple[Backend, list[Backend]]:
    """Return the reference (vanilla attention in float32) and a backend for each name of TRAIN_CONFIGURATIONS."""
    made = TrainModels(models, setting)
    return made.backend("reference", EAGER), [made.backend(name, TRAIN_CONFIGURATIONS[name]) for name in names]
