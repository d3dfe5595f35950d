"""The trainer: optimiser, learning rate, EMA, and a run that can be stopped and continued at any step.

What a step computes depends on the state, the seed and the numbers of its examples alone (see batches.py), so a resumed
run is the same as one that was never stopped, bit for bit on as many processes, else up to rounding.
"""

import contextlib
import copy
import dataclasses
import json
import logging
import math
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._pytree import tree_map_only

from ldm_lite.cli.signals import Stopped, noted
from ldm_lite.train import distributed
from ldm_lite.train.batches import Batch, Draws, Slice, batches, reported_workers
from ldm_lite.train.ema import PowerAverages, using
from ldm_lite.train.examples import Dataset
from ldm_lite.train.files import write_state
from ldm_lite.train.losses import Loss
from ldm_lite.train.optimizers import make_optimizer, restore
from ldm_lite.train.state import STATE, Log, check_averages, load_finite, opened_state
from ldm_lite.train.validation import Validation

log = logging.getLogger("ldm_lite")

CHECK_EVERY = 20  # steps between rows of the log


@dataclass(frozen=True)
class TrainConfig:
    """How to optimise."""

    steps: int
    batch: int
    accumulate: int  # batches per optimiser step
    lr: float
    warmup: int  # steps
    weight_decay: float
    ema_decay: float
    clip: float  # norm of the gradient
    seed: int
    minutes: float | None  # stop after this time
    save_every: int  # steps
    workers: int
    bf16: bool  # autocast
    optimizer: str = "adamw"
    ema_lengths: bool = False  # keep averages of two lengths too
    shard: bool = False  # divide weights, averages and gradients among the processes


_WITHOUT_EFFECT = ("minutes", "save_every", "workers", "bf16", "shard")  # on results


class _Whole(nn.Module):
    """A loss and the networks that it trains, as one module."""

    def __init__(self, loss: Loss) -> None:
        super().__init__()
        self.networks = nn.ModuleDict(loss.networks)
        self.loss = loss

    def forward(self, batch: Batch, draws: Draws) -> Tensor:
        return self.loss(batch, draws)


class Trainer:
    """A run in a folder: the networks of a loss, their EMA, the optimiser, and the current step."""

    def __init__(self, loss: Loss, config: TrainConfig, folder: Path) -> None:
        """The networks of `loss` are trained in place: the parameters that require gradients, or all if none does.

        Raises ValueError for more processes than images of a batch.
        """
        self.loss, self.config, self.folder = loss, config, folder
        if config.batch < distributed.world_size():
            raise ValueError(
                f"got `batch` {config.batch} for {distributed.world_size()} processes: wanted one for each, or more"
            )
        self.step = self.saved = 0  # steps done; steps done in the state on disk
        for network in loss.networks.values():
            if not any(p.requires_grad for p in network.parameters()):
                network.requires_grad_(True)
            network.train()
        self.ema = {name: copy.deepcopy(net).requires_grad_(False).eval() for name, net in loss.networks.items()}
        self.averages = PowerAverages(loss.networks) if config.ema_lengths else None
        self.validation: Validation | None = None
        if config.shard:
            for network in (*loss.networks.values(), *self.ema.values()):
                distributed.shard(network)
        self.parameters = [p for network in loss.networks.values() for p in network.parameters()]
        self.device = self.parameters[0].device
        self.optimizer = make_optimizer(config.optimizer, self._groups(), config.lr, config.weight_decay)
        self.log = Log(folder)
        self._losses: list[float] = []  # of the steps since the log's last row
        self._last: Batch  # the batch of the last good step
        self._module = distributed.parallel(_Whole(loss))

    def _groups(self) -> list[dict[str, Any]]:
        """Return the parameters, with the settings of those that have their own."""
        weighting = list(self.loss.networks.get("weighting", nn.Module()).parameters())
        ids = {id(p) for p in weighting}
        groups: list[dict[str, Any]] = [{"params": [p for p in self.parameters if id(p) not in ids]}]
        # A weighting is far from the networks in scale: EDM2 trains both at 1e-2.
        return groups + [{"params": weighting, "peak": 1e-2, "weight_decay": 0.0}] * bool(weighting)

    # ---- state ------------------------------------------------------------------------------------------------------

    def save(self) -> None:
        """Write the state to resume from, atomically."""
        state = {
            "step": self.step,
            "settings": self._settings(),
            "losses": self._losses,
            "networks": {name: network.state_dict() for name, network in self.loss.networks.items()},
            "average": {name: network.state_dict() for name, network in self.ema.items()},
            "optimizer": self.optimizer.state_dict(),
        }
        if self.averages is not None:
            state["averages"] = self.averages.state()
        state = tree_map_only(Tensor, distributed.gather, state)
        if distributed.rank() == 0:
            write_state(self.folder / STATE, state)
        self.saved = self.step

    def resume(self) -> None:
        """Continue from the state in the folder.

        Raises ValueError if it is damaged, belongs to other networks, or is beyond the last step; OSError.
        """
        path = self.folder / STATE
        with opened_state(path, self.device) as state:
            for name, network in self.loss.networks.items():
                load_finite(network, state["networks"][name])
                load_finite(self.ema[name], state["average"][name])
            if self.averages is not None:
                for average, stored in zip(self.averages.networks, state["averages"], strict=True):
                    for name, network in average.items():
                        load_finite(network, stored[name])
            self._restore(state["optimizer"], state["step"])
            self._losses = [float(loss) for loss in state["losses"]]
            self.step = self.saved = state["step"]
            settings = dict(state["settings"])
        if self.step > self.config.steps:
            raise ValueError(f"{path}: is of step {self.step}, beyond `steps={self.config.steps}`: give more steps")
        changed = {key: value for key, value in self._settings().items() if settings.get(key) != value}
        if changed:
            log.info("the run goes on with other settings than before: %s", json.dumps(changed))
        if distributed.rank() == 0:
            self.log.trim(self.step)

    def _restore(self, stored: dict[str, Any], step: int) -> None:
        """Load the optimiser's state after a step.  Raises any exception if it is not that."""
        if self.config.optimizer != "adamw":
            restore(self.optimizer, stored)
            return
        averages = stored["state"]
        check_averages(averages, self.parameters, step)
        for index, values in averages.items():
            for name in ("exp_avg", "exp_avg_sq"):
                values[name] = distributed.shard_like(values[name], self.parameters[index])
        groups = self.optimizer.state_dict()["param_groups"]  # the settings are the config's
        self.optimizer.load_state_dict({"state": averages, "param_groups": groups})

    def _settings(self) -> dict[str, object]:
        """The part of the config that results depend on."""
        values = dataclasses.asdict(self.config)
        return {key: value for key, value in values.items() if key not in _WITHOUT_EFFECT}

    # ---- steps ------------------------------------------------------------------------------------------------------

    def fit(
        self,
        dataset: Dataset,
        on_step: Callable[[int, float | None], None],
        on_save: Callable[[int], None],
        prior: Dataset | None = None,
    ) -> None:
        """Train to the last step of the config, or until its time is over; each batch brings one of `prior`, if given.

        on_step gets the number of steps done and, every CHECK_EVERY steps, their mean loss; on_save gets the number of
        steps done, after the state was written.  A save that fails is tried again later, the last one raises OSError.
        After SIGINT, SIGTERM or SIGHUP the step is finished and the state saved, then Stopped is raised; a second
        signal stops at once.  Raises ValueError if the loss is not finite: the weights of the step before are saved
        then, if theirs is; ChildProcessError if a worker or another process of the run dies.
        """
        data = contextlib.closing(self._batches(dataset, prior))  # its workers end before the process waits for them
        with noted() as received, reported_workers(), distributed.reported_peers(), data as batches:
            self._fit(batches, on_step, on_save, received)
        if received:
            raise Stopped(received[0], f"the state of step {self.step} is saved, `resume=True` continues")

    def _fit(
        self,
        data: Iterator[Batch],
        on_step: Callable[[int, float | None], None],
        on_save: Callable[[int], None],
        received: Sequence[int],
    ) -> None:
        """Train until the end, or until a signal is received; then save the state alone, which is quick."""
        config, start = self.config, time.perf_counter()
        if self.step > 0 and self._is_due():
            on_save(self.step)  # the run may have been killed between this state and on_save
        unsaved = False
        if self.step == 0:
            self._validate()
        while self.step < config.steps:
            self._losses.append(self._step(data, on_save))
            self.step += 1
            over = config.minutes is not None and time.perf_counter() - start > 60 * config.minutes
            # A signal to one process stops all of them.
            signalled, over = (distributed.all_reduce_sum(torch.tensor([bool(received), over]).float()) > 0).tolist()
            last = signalled or over or self.step == config.steps
            mean = self._mean(time.perf_counter() - start)
            on_step(self.step, mean)
            self._validate()
            if last or self._is_due() or (unsaved and self.step % CHECK_EVERY == 0):
                unsaved = not self._save_all(None if signalled else on_save, last)
            if last:
                return

    def _is_due(self) -> bool:
        return self.step % self.config.save_every == 0 or self.step == self.config.steps

    def _mean(self, seconds: float) -> float | None:
        """Add a row to the log every CHECK_EVERY steps, and return its loss."""
        if self.step % CHECK_EVERY and self.step < self.config.steps:
            return None
        mean, self._losses = sum(self._losses) / len(self._losses), []
        if distributed.rank() == 0:
            self.log.add({"step": self.step, "loss": mean, "seconds": round(seconds, 2)})
        return mean

    def _validate(self) -> None:
        """Add the validation loss of the EMA to the log, if it is due."""
        if self.validation is None or (self.step % self.validation.every and self.step < self.config.steps):
            return
        with using(self.loss.networks, self.ema), self._kernels(), self._autocast():
            value = self.validation()
        if distributed.rank() == 0:
            self.log.add({"step": self.step, "validation": value})

    def _autocast(self) -> contextlib.AbstractContextManager[Any]:
        return torch.autocast(self.device.type, torch.bfloat16) if self.config.bf16 else contextlib.nullcontext()

    def _save_all(self, on_save: Callable[[int], None] | None, last: bool) -> bool:
        """Save the state and call on_save.  Returns whether both worked; if not at the last step, raises OSError."""
        if not math.isfinite(loss := self._loss_now()):
            raise self._not_finite(f"the loss is {loss} after step {self.step}")
        failed = None
        try:
            self.save()
            if on_save is not None:
                on_save(self.step)
        except OSError as error:
            if last:
                raise
            failed = str(error)
        failed = distributed.broadcast(failed)
        if failed is not None:
            log.warning(
                "step %d is not saved (%s): the state of step %d is kept, the run goes on and saves every %d steps now",
                self.step, failed, self.saved, CHECK_EVERY,
            )  # fmt: skip
        return failed is None

    def _batches(self, dataset: Dataset, prior: Dataset | None = None) -> Generator[Batch]:
        """Yield this process's part of each batch, from the current step on."""
        config, rank, size = self.config, distributed.rank(), distributed.world_size()
        rows = range(rank * config.batch // size, (rank + 1) * config.batch // size)
        part = Slice(config.batch, rows, self.step * config.accumulate, config.steps * config.accumulate)
        return batches(dataset, config.seed, part, config.workers, prior)

    def _step(self, data: Iterator[Batch], on_save: Callable[[int], None]) -> float:
        """Run one optimiser step over `accumulate` batches of all processes.  Returns its loss.

        Raises ValueError, with the weights as before, if the loss or a gradient is not finite.
        """
        config = self.config
        for group in self.optimizer.param_groups:
            group["lr"] = group.get("peak", config.lr) * learning_rate(self.step, config.warmup, config.steps)
        total = torch.zeros((), device=self.device)  # of this process
        for left in reversed(range(config.accumulate)):
            batch = next(data)
            part = len(batch.numbers) / (config.batch * config.accumulate)
            with distributed.without_exchange(self._module) if left else contextlib.nullcontext(), self._kernels():
                with self._autocast():
                    loss = part * self._module(batch, Draws(config.seed, batch.numbers))
                (distributed.world_size() * loss).backward()  # whose gradients' mean is taken
            total += loss.detach()
        norm = nn.utils.clip_grad_norm_(self.parameters, config.clip)
        norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
        value, size = torch.stack([distributed.all_reduce_sum(total), norm]).tolist()
        if not math.isfinite(value):
            raise self._stopped(f"the loss is {value} at step {self.step + 1}", on_save)
        if not math.isfinite(size):
            raise self._stopped(f"the gradient is {size} at step {self.step + 1}", on_save)
        self._last = batch
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self._update_ema()
        if self.averages is not None:
            self.averages.update(self.loss.networks, self.step + 1)
        return value

    def _kernels(self) -> contextlib.AbstractContextManager[None]:
        """Plain attention on a CPU in bfloat16, where the backward pass of flash attention takes four times as long.

        In float32 both passes take 0.4 to 0.7 of plain attention's time, and the maps are never in memory.
        """
        slow = self.device.type == "cpu" and self.config.bf16
        return sdpa_kernel(SDPBackend.MATH) if slow else contextlib.nullcontext()

    @torch.no_grad()
    def _update_ema(self) -> None:
        """Update the EMA with decay min(ema_decay, (1 + step) / (10 + step)): it follows faster at first."""
        decay = min(self.config.ema_decay, (1 + self.step) / (10 + self.step))
        for name, network in self.loss.networks.items():
            torch._foreach_lerp_(list(self.ema[name].parameters()), list(network.parameters()), 1 - decay)

    def _stopped(self, why: str, on_save: Callable[[int], None]) -> ValueError:
        """Save the weights before a step that failed, unless their own loss is not finite; return the error."""
        if self.step > self.saved and math.isfinite(self._loss_now()):
            first = self.saved == 0
            self.save()
            if first:
                on_save(self.step)
        return self._not_finite(why)

    def _not_finite(self, why: str) -> ValueError:
        saved = f"the state of step {self.saved} is kept in {self.folder}" if self.saved else "nothing was saved"
        return ValueError(f"{why}: use a lower `lr`; {saved}")

    @torch.no_grad()
    def _loss_now(self) -> float:
        """Return the loss of the last good step's last batch, in all processes, with the current weights."""
        compiled = any(network._compiled_call_impl is not None for network in self.loss.networks.values())
        # Compiled code is for steps with gradients: without them everything would be compiled once more.
        with torch.compiler.set_stance("force_eager") if compiled else contextlib.nullcontext():
            loss = self.loss(self._last, Draws(self.config.seed, self._last.numbers))
        return float(distributed.all_reduce_sum(loss)) / distributed.world_size()


def learning_rate(step: int, warmup: int, steps: int) -> float:
    """Return the factor of the peak learning rate: linear warm-up, then half a cosine down to 0."""
    if step < warmup:
        return (step + 1) / warmup
    return 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, steps - warmup)))
