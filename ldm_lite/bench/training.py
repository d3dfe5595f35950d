"""Training steps of the UNet in several ways, as contenders: a step is forward, backward and AdamW.

All ways but channels last train the same parameters with the same optimiser, so that memory is taken once.  They are
compared by their losses over the first steps from the same weights, on the same batches.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ldm_lite.bench.configurations import Models, plain, sharing
from ldm_lite.bench.contender import Contender, Here
from ldm_lite.bench.jobs import Inputs, Job, Setting, inputs
from ldm_lite.models.unet import UNet
from ldm_lite.runtime import attention
from ldm_lite.runtime.precision import DTYPES
from ldm_lite.train.losses import checkpoint_activations

STEPS = 8  # of the losses that are compared
LR = 1e-5


@dataclass(frozen=True)
class Way:
    """A way to train."""

    title: str
    attention: str  # a name of runtime.attention
    compiled: bool
    channels_last: bool
    checkpointed: bool


EAGER = Way("vanilla attention", "vanilla", compiled=False, channels_last=False, checkpointed=False)
SDPA = replace(EAGER, title="sdpa", attention="sdpa")
WAYS = {
    "vanilla": EAGER,
    "sdpa": SDPA,
    "channels_last": replace(SDPA, title="sdpa, channels last", channels_last=True),
    "checkpointed": replace(SDPA, title="sdpa, checkpointed", checkpointed=True),
    "compiled": replace(SDPA, title="sdpa, compiled", compiled=True),
}


class Trained:
    """Parameters, where they began, and their optimiser."""

    def __init__(self, unet: UNet) -> None:
        self.unet = unet.requires_grad_(True)
        self.optimizer = torch.optim.AdamW(unet.parameters(), lr=LR, fused=True)
        self._start = [each.detach().to("cpu", copy=True) for each in unet.parameters()]

    def reset(self) -> None:
        """To where they began."""
        self.optimizer.state.clear()
        with torch.no_grad():
            for parameter, start in zip(self.unet.parameters(), self._start, strict=True):
                parameter.copy_(start)


@dataclass(frozen=True)
class Lessons:
    """The one section of training, "train", by a UNet that trains some parameters."""

    unet: UNet
    trained: Trained
    models: Models
    setting: Setting
    autocast: torch.dtype | None
    channels_last: bool

    def job(self, section: str, batch: int) -> Job:
        """A training step, with its batch in place."""
        assert section == "train"
        given = inputs(self.models.loaded(torch.float32).family, self.setting, batch)

        def losses(count: int) -> Tensor:
            return torch.stack([self._step(given, k) for k in range(count)])

        def check() -> Tensor:
            self.trained.reset()
            made = losses(STEPS)
            self.trained.reset()
            return made

        return Job(losses, check)

    def _step(self, given: Inputs, k: int) -> Tensor:
        """Forward, backward, update on the k-th batch -> its loss (), not waited for."""
        device = self.models.device
        generator = torch.Generator().manual_seed(k)
        noise = torch.randn(given.noise.shape, generator=generator).to(device)
        t = torch.randint(1000, (len(noise),), generator=generator).to(device)
        x = given.noise.to(device) + noise  # whatever the schedule: the work is the same
        if self.channels_last:
            x = x.contiguous(memory_format=torch.channels_last)
        with torch.enable_grad(), torch.autocast(device.type, self.autocast, enabled=self.autocast is not None):
            loss = F.mse_loss(self.unet(x, t, given.context.to(device)).float(), noise)
        loss.backward()  # type: ignore[no-untyped-call]
        self.trained.optimizer.step()
        self.trained.optimizer.zero_grad(set_to_none=True)
        return loss.detach()


def contenders(models: Models, setting: Setting, names: Sequence[str]) -> tuple[Contender, list[Contender]]:
    """The reference, which is the first way in float32, and a contender for each way of WAYS by name."""
    shared: dict[bool, Trained] = {}

    def trained(channels_last: bool) -> Trained:
        if channels_last not in shared:
            unet: Any = plain(models.loaded(torch.float32).unet)
            own = {key: value.clone() for key, value in unet.state_dict().items()}  # not those that others run on
            unet.load_state_dict(own, assign=True)
            shared[channels_last] = Trained(unet.to(memory_format=torch.channels_last) if channels_last else unet)
        return shared[channels_last]

    def maker(way: Way) -> Callable[[str], Lessons]:
        def make(dtype: str) -> Lessons:
            master = trained(way.channels_last)
            unet = sharing(master.unet)
            attention.use(unet, way.attention)
            if way.checkpointed:
                checkpoint_activations(unet)
            if way.compiled:
                unet.compile(dynamic=False)
            cast = None if dtype == "fp32" else DTYPES[dtype]
            return Lessons(unet, master, models, setting, cast, way.channels_last)

        return make

    made: list[Contender] = [Here(name, models.device, maker(WAYS[name])) for name in names]
    return Here("reference", models.device, maker(EAGER)), made
