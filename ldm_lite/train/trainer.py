"""The trainer: optimiser, learning rate, EMA, and a run that can be stopped and continued at any step.

What a step computes depends on the state, the seed and the numbers of its examples alone (see batches.py), so a resumed
run is the same as one that was never stopped, bit for bit on as many processes, else up to rounding.
"""

import contextlib
import copy
import importlib
import json
import logging
import math
import os
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from ldm_lite.cli.signals import Stopped, noted
from ldm_lite.cli.version import pip_install
from ldm_lite.cli.writing import remove
from ldm_lite.train import distributed
from ldm_lite.train.batches import Batch, Draws, Slice, batches, reported_workers
from ldm_lite.train.data import Dataset
from ldm_lite.train.losses import Loss, Validation
from ldm_lite.train.options import MAY_CHANGE, PACKAGES, TrainOptions, resolved, settings_of
from ldm_lite.train.state import (
    STATE,
    Log,
    load_weights,
    opened_state,
    read_divided,
    write_divided,
    write_state,
    write_tensors,
)

log = logging.getLogger("ldm_lite")

CHECK_EVERY = 20  # steps between rows of the log
MOST_SKIPPED = 10  # steps in a row whose loss or gradient is not finite


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

    def __init__(
        self,
        loss: Loss,
        options: TrainOptions,
        folder: Path,
        precision: torch.dtype | None = None,
        inputs: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """The networks of `loss` are trained in place: the parameters that require gradients, or all if none does.

        precision: autocast's dtype, None for float32.  inputs: what identifies the run's inputs, by option; a
        resumed run must have the same.  Raises ValueError for more processes than images of a batch.
        """
        options = resolved(options)
        self.settings = settings_of(options) | dict(inputs)
        self.loss, self.options, self.folder, self.precision = loss, options, folder, precision
        self.steps, self.lr, self.ema_decay = options.steps or 0, options.lr or 0.0, options.ema_decay or 0.0
        if options.batch_size < distributed.world_size():
            processes = f"{distributed.world_size()} processes"
            raise ValueError(f"got `batch_size` {options.batch_size} for {processes}: expected one for each, or more")
        self.step = self.saved = 0  # steps done; steps done in the state on disk
        self.seconds = 0.0  # of these steps, over all commands of the run
        for network in loss.networks.values():
            if not any(p.requires_grad for p in network.parameters()):
                network.requires_grad_(True)
            network.train()
        self.ema = loss.networks  # if there is none
        if self.ema_decay:
            self.ema = {name: copy.deepcopy(net).requires_grad_(False).eval() for name, net in loss.networks.items()}
        self.averages = PowerAverages(loss.networks) if options.ema_lengths else None
        self.validation: Validation | None = None
        self.is_divided = options.fsdp and distributed.world_size() > 1
        if self.is_divided:
            for network in {*loss.networks.values(), *self.ema.values()}:
                distributed.shard(network)
        self.parameters = [p for network in loss.networks.values() for p in network.parameters()]
        self.device = self.parameters[0].device
        named = [(role, name, p) for role, network in loss.networks.items() for name, p in network.named_parameters()]
        weighting = [p for role, _, p in named if role == "weighting"]
        is_text = [role.startswith("text_encoder") or name.startswith("lora_te") for role, name, _ in named]
        text = [p for (_, _, p), is_text in zip(named, is_text, strict=True) if is_text and options.text_lr is not None]
        ids = {id(p) for p in (*weighting, *text)}
        groups: list[dict[str, Any]] = [{"params": [p for p in self.parameters if id(p) not in ids]}]
        groups += [{"params": text, "peak": options.text_lr}] if text else []
        if weighting:  # its scale is far from the networks': EDM2 trains both at 1e-2
            groups.append({"params": weighting, "peak": 1e-2, "weight_decay": 0.0})
        betas = options.beta1, options.beta2
        self.optimizer = make_optimizer(options.optimizer, groups, self.lr, options.weight_decay, betas)
        # Gradients of float16 would vanish.
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=precision == torch.float16)
        self.log = Log(folder)
        # Whether a step is left out is decided where it is computed, so that no step waits for the one before.
        self._is_decided_there = (
            options.optimizer == "adamw" and self.optimizer.defaults["fused"] and not self.is_divided
        )
        self._unread: list[Tensor] = []  # loss and norm of the gradient (2,) of the last steps, on their device
        self._losses: list[float] = []  # of the steps since the log's last row
        self._newest: Batch | None = None  # the last batch
        self._last: Batch | None = None  # the batch of the last good step that was read
        self._skipped, self._why_skipped = 0, ""  # steps since then
        self._module = distributed.parallel(_Whole(loss))

    # ---- state ------------------------------------------------------------------------------------------------------

    def save(self) -> None:
        """Write the state to resume from, atomically: divided tensors in a folder that the state's file names.

        Raises OSError, in all processes.
        """
        self.read()
        state: dict[str, Any] = {"step": self.step, "settings": self.settings, "losses": self._losses}
        state |= {"seconds": self.seconds} if self.options.lr_by_time else {}  # else equal runs have equal states
        state |= {"scaler": self.scaler.state_dict()}
        tensors, failed = self._tensors(), None
        if self.is_divided:
            state["divided"] = f"state-{self.step:07}"
            write_divided(self.folder / state["divided"], tensors | {"optimizer": self.optimizer.state_dict()["state"]})
        else:
            state |= tensors | {"optimizer": self.optimizer.state_dict()}
            state |= {"averages": self.averages.state()} if self.averages is not None else {}
        try:
            if distributed.rank() == 0:
                write_state(self.folder / STATE, state)
                for path in self.folder.glob("state-*"):
                    if path.name != state.get("divided"):
                        remove(path)
        except OSError as error:
            failed = error
        if message := distributed.broadcast(failed and str(failed)):
            raise failed or OSError(message)
        self.saved = self.step

    def _tensors(self) -> dict[str, Any]:
        """Return the weights, and their EMA if there is one, by network: not copies, and divided as they are."""
        kinds = {"networks": self.loss.networks} | ({"average": self.ema} if self.ema_decay else {})
        return {kind: {name: net.state_dict() for name, net in networks.items()} for kind, networks in kinds.items()}

    def resume(self) -> None:
        """Continue from the state in the folder.

        Raises ValueError if it is damaged, belongs to other networks, or is beyond the last step; OSError.
        """
        path = self.folder / STATE
        with opened_state(path) as state:
            changed = changed_settings(state, self.settings)
            if "divided" in state:  # perhaps among another number of processes
                tensors = self._tensors()
                trained = [p for group in self.optimizer.param_groups for p in group["params"]]
                tensors["optimizer"] = {
                    str(i): {"step": torch.zeros(()), "exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.zeros_like(p)}
                    for i, p in enumerate(trained)
                    if p.requires_grad
                }
                read_divided(self.folder / state["divided"], tensors)
                averages = {int(i): values for i, values in tensors.pop("optimizer").items()}
                state |= tensors | {"optimizer": {"state": averages, "param_groups": []}}
            pairs = [(self.loss.networks, state["networks"])]
            pairs += [(self.ema, state["average"])] if self.ema_decay else []
            if self.averages is not None:
                pairs += zip(self.averages.networks, state["averages"], strict=True)
            for networks, stored in pairs:
                for name, network in networks.items():
                    load_weights(network, stored[name])
            restore(self.optimizer, state["optimizer"])
            self.scaler.load_state_dict(state.get("scaler", {}))
            self._losses = [float(loss) for loss in state["losses"]]
            self.step, self.seconds = state["step"], float(state.get("seconds", 0.0))
            self.saved = self.step
        if self.step > self.steps:
            raise ValueError(f"{path}: is of step {self.step}, beyond `steps={self.steps}`: give more steps")
        if changed:
            log.info("the run continues with changed settings: %s", json.dumps(changed))
        if distributed.rank() == 0:
            self.log.trim(self.step)

    # ---- steps ------------------------------------------------------------------------------------------------------

    def fit(
        self,
        dataset: Dataset,
        on_step: Callable[[int, float | None], None],
        on_save: Callable[[int], None],
        prior: Dataset | None = None,
    ) -> None:
        """Train to the last step of the options, or until its time is up; each batch brings one of `prior`, if given.

        on_step gets the number of steps done and, every CHECK_EVERY steps, their mean loss; on_save gets the number of
        steps done, after the state was written.  A save that fails is tried again later, the last one raises OSError.
        After SIGINT, SIGTERM or SIGHUP the step is finished and the state saved, then Stopped is raised; a second
        signal stops at once.  A step whose loss or gradient is not finite changes nothing.  Raises ValueError if there
        are more than MOST_SKIPPED of them in a row when losses are read: the weights before them are then saved, if
        their loss is finite; ChildProcessError if a worker or another process of the run dies.
        """
        options, start, earlier, unsaved = self.options, time.perf_counter(), self.seconds, False
        data = contextlib.closing(self._batches(dataset, prior))  # its workers end before the process waits for them
        with noted() as received, reported_workers(), distributed.reported_peers(), data as batches:
            if self.step > 0 and self._is_due():
                on_save(self.step)  # the run may have been killed between this state and on_save
            if self.step == 0:
                self._validate()
            last = self.step == self.steps
            while not last:
                self._step(batches)
                self.step += 1
                # A signal to one process stops all of them, and all have the same time, so the same learning rate.
                sums = torch.tensor([bool(received), time.perf_counter() - start], dtype=torch.float64)
                signalled, seconds = (distributed.all_reduce_sum(sums) / distributed.world_size()).tolist()
                self.seconds = earlier + seconds
                spent = self.seconds if options.lr_by_time else seconds
                over = options.minutes is not None and spent > 60 * options.minutes
                last = signalled or over or self.step == self.steps
                mean, is_shown = None, self.step % CHECK_EVERY == 0 or self.step == self.steps
                if is_shown or last or self._is_due():
                    self.read()
                    self._check_skipped(on_save)
                if self._losses and is_shown:
                    mean, self._losses = sum(self._losses) / len(self._losses), []
                    if distributed.rank() == 0:
                        self.log.add({"step": self.step, "loss": mean, "seconds": round(seconds, 2)})
                on_step(self.step, mean)
                self._validate()
                if last or self._is_due() or (unsaved and self.step % CHECK_EVERY == 0):
                    # After a signal the state alone is saved, which is quick.
                    unsaved = not self._save_all(None if signalled else on_save, last)
        if received:
            raise Stopped(received[0], f"the state of step {self.step} is saved, `resume=True` continues")

    def _is_due(self) -> bool:
        return self.step % self.options.save_every == 0 or self.step == self.steps

    def _validate(self) -> None:
        """Add the validation loss of the EMA to the log, if it is due."""
        if self.validation is None or (self.step % self.validation.every and self.step < self.steps):
            return
        with using(self.loss.networks, self.ema), self._kernels(), self.autocast():
            value = self.validation()
        if distributed.rank() == 0:
            self.log.add({"step": self.step, "validation": value})

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        """Within the block networks compute as in a step."""
        return torch.autocast(self.device.type, self.precision) if self.precision else contextlib.nullcontext()

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
                "step %d is not saved (%s): the state of step %d is kept, the run continues and saves every %d steps",
                self.step, failed, self.saved, CHECK_EVERY,
            )  # fmt: skip
        return failed is None

    def _batches(self, dataset: Dataset, prior: Dataset | None = None) -> Generator[Batch]:
        """Yield this process's part of each batch, from the current step on."""
        options, rank, size = self.options, distributed.rank(), distributed.world_size()
        rows = range(rank * options.batch_size // size, (rank + 1) * options.batch_size // size)
        part = Slice(options.batch_size, rows, self.step * options.accumulate, self.steps * options.accumulate)
        return batches(dataset, options.seed, part, options.data_workers, prior)

    def _step(self, data: Iterator[Batch]) -> None:
        """Run one optimiser step over `accumulate` batches of all processes.

        Nothing changes if the loss or a gradient is not finite.
        """
        options = self.options
        factor = learning_rate(
            self.step, options.warmup, self.steps, options.lr_schedule, options.lr_cycles, self._share_of_time()
        )
        for group in self.optimizer.param_groups:
            group["lr"] = group.get("peak", self.lr) * factor
        total = torch.zeros((), device=self.device)  # of this process
        for left in reversed(range(options.accumulate)):
            batch = next(data)
            if options.shuffle_caption:
                captions = zip(batch.captions, batch.numbers, strict=True)
                shuffled = [shuffle(text, options.keep_tokens, [6, options.seed, number]) for text, number in captions]
                batch = replace(batch, captions=shuffled)
            part = len(batch.numbers) / (options.batch_size * options.accumulate)
            with distributed.without_exchange(self._module) if left else contextlib.nullcontext(), self._kernels():
                with self.autocast():
                    loss = part * self._module(batch, Draws(options.seed, batch.numbers))
                self.scaler.scale(distributed.world_size() * loss).backward()  # gradients are then averaged
            total += loss.detach()
        self.scaler.unscale_(self.optimizer)
        norm = nn.utils.clip_grad_norm_(self.parameters, options.max_grad_norm)
        norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
        values = torch.stack([distributed.all_reduce_sum(total), norm])
        is_finite = torch.isfinite(values).all()
        if self._is_decided_there:
            self.optimizer.found_inf = (~is_finite).float()  # type: ignore[attr-defined]  # skips the whole optimiser step
        if self._is_decided_there or is_finite:
            self.optimizer.step()
            self._update_averages(is_finite.float() if self._is_decided_there else 1.0)
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)
        self._unread.append(values)
        self._newest = batch

    def read(self) -> list[float]:
        """Read the losses of the steps since the last time, which waits for them, and return the finite ones.

        A warning names each step that was left out.
        """
        pairs = torch.stack(self._unread).tolist() if self._unread else []
        losses = list[float]()
        for step, (value, norm) in enumerate(pairs, start=self.step - len(pairs) + 1):
            is_finite = math.isfinite(value) and math.isfinite(norm)
            self._skipped = 0 if is_finite else self._skipped + 1
            if is_finite:
                losses.append(value)
            else:
                what = f"gradient is {norm}" if math.isfinite(value) else f"loss is {value}"
                self._why_skipped = f"the {what} at step {step}"
                log.warning("%s, which is left out", self._why_skipped)
        if pairs and not self._skipped:
            self._last = self._newest
        self._unread.clear()
        self._losses += losses
        return losses

    def _check_skipped(self, on_save: Callable[[int], None]) -> None:
        """Raise ValueError if too many steps in a row were left out, after saving the weights before them."""
        if self._skipped <= MOST_SKIPPED:
            return
        if self.step > self.saved and math.isfinite(self._loss_now()):
            first = self.saved == 0
            self.save()
            if first:
                on_save(self.step)
        raise self._not_finite(f"{self._why_skipped}, as in the {self._skipped - 1} before")

    def _share_of_time(self) -> float:
        """Return the fraction of the run's minutes that has passed, if the learning rate follows them."""
        if not self.options.lr_by_time:
            return 0.0
        return self.seconds / max(60 * (self.options.minutes or 0.0), 1e-9)

    def _kernels(self) -> contextlib.AbstractContextManager[None]:
        """Plain attention on a CPU in bfloat16, where the backward pass of flash attention takes four times as long.

        In float32 both passes take 0.4 to 0.7 of plain attention's time, and the maps are never in memory.
        """
        slow = self.device.type == "cpu" and self.precision == torch.bfloat16
        return sdpa_kernel(SDPBackend.MATH) if slow else contextlib.nullcontext()

    def _update_averages(self, is_good: Tensor | float) -> None:
        """Update the averages after a step that was done (1.) or left out (0.).

        The decay of the EMA is min(ema_decay, (1 + step) / (10 + step)): it follows faster at first.
        """
        if self.ema is not self.loss.networks:
            decay = min(self.ema_decay, (1 + self.step) / (10 + self.step))
            average(self.ema, self.loss.networks, (1 - decay) * is_good)
        if self.averages is not None:
            self.averages.update(self.loss.networks, self.step + 1, is_good)

    def _not_finite(self, why: str) -> ValueError:
        saved = f"the state of step {self.saved} is kept in {self.folder}" if self.saved else "nothing was saved"
        return ValueError(f"{why}: use a lower `lr`; {saved}")

    @torch.no_grad()
    def _loss_now(self) -> float:
        """Return the loss of the last good step's last batch, in all processes, with the current weights."""
        if self._last is None:
            return 0.0
        compiled = any(network._compiled_call_impl is not None for network in self.loss.networks.values())
        # Compiled code is for steps with gradients: without them everything would be compiled once more.
        with torch.compiler.set_stance("force_eager") if compiled else contextlib.nullcontext(), self.autocast():
            loss = self.loss(self._last, Draws(self.options.seed, self._last.numbers))
        return float(distributed.all_reduce_sum(loss)) / distributed.world_size()


def changed_settings(state: Mapping[str, Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that differ from the state of a run.  Raises ValueError for one that must not differ."""
    before = dict(state["settings"])
    changed = {name: value for name, value in settings.items() if before.get(name, value) != value}
    if fixed := [name for name in changed if name not in MAY_CHANGE]:
        raise ValueError(f"`{fixed[0]}` was {before[fixed[0]]!r:.60}, now it is {changed[fixed[0]]!r:.60}")
    return changed


def check_resumable(options: TrainOptions, inputs: Mapping[str, str]) -> None:
    """Raise ValueError if the run to continue, in the options' folder, had other options or inputs.

    Trainer.resume checks all of the state, but later, when encoded data may already have replaced the run's.
    """
    path = Path(options.out) / STATE
    if options.resume and os.path.lexists(path):
        with opened_state(path, whole=False) as state:
            changed_settings(state, settings_of(resolved(options)) | dict(inputs))


def shuffle(caption: str, kept: int, seed: Sequence[int]) -> str:
    """Return a caption with its parts, between commas, in a random order except for the first ones."""
    parts = [part.strip() for part in caption.split(",")]
    order = np.random.default_rng(seed).permutation(len(parts[kept:]))
    return ", ".join(parts[:kept] + [parts[kept:][i] for i in order])


def learning_rate(
    step: int, warmup: float, steps: int, schedule: str = "cosine", cycles: int = 1, least_done: float = 0.0
) -> float:
    """Return the factor of the peak learning rate: linear warm-up, then 1, or down to 0 in a line or half cosines.

    A warm-up below 1 is a fraction of all steps, and over when least_done is beyond it.  After the warm-up the schedule
    is at least at the fraction least_done.
    """
    share, warmup = warmup, math.ceil(warmup * steps) if warmup < 1 else warmup
    if step < warmup and (share >= 1 or least_done < share):
        return max((step + 1) / warmup, least_done / share if share < 1 else 0.0)
    done = min(1.0, max((step - warmup) / max(1, steps - warmup), least_done))
    cosine = 0.5 * (1 + math.cos(math.pi * (done * cycles % 1 if done < 1 else 1)))
    return {"constant": 1.0, "linear": 1 - done, "cosine": cosine}[schedule]


FOLDER = "averages"
LENGTHS = (0.05, 0.1)  # of the two that a run keeps
Weights = Mapping[str, Tensor]  # of all networks, "unet.out.2.weight"


def exponent(length: float) -> float:
    """Return the exponent of an average of a length in (0,0.28).  EDM2, algorithm 2."""
    t = length**-2
    return float(np.roots([1, 7, 16 - t, 12 - t]).real.max())


@torch.no_grad()
def average(averages: Mapping[str, nn.Module], networks: Mapping[str, nn.Module], share: Tensor | float) -> None:
    """Move averages towards the weights of networks by a fraction, which may be a number () on their device."""
    for name, network in networks.items():
        old, new = list[Tensor](averages[name].parameters()), list[Tensor](network.parameters())
        shares: Any = [share] * len(old) if isinstance(share, Tensor) else share
        torch._foreach_lerp_(old, new, shares)


class PowerAverages:
    """Averages of networks by power functions, one for each of LENGTHS."""

    def __init__(self, networks: Mapping[str, nn.Module]) -> None:
        self.exponents = [exponent(length) for length in LENGTHS]
        self.networks = [
            {name: copy.deepcopy(net).requires_grad_(False) for name, net in networks.items()} for _ in LENGTHS
        ]

    def update(self, networks: Mapping[str, nn.Module], step: int, is_good: Tensor | float = 1.0) -> None:
        """Add the weights after a step, counted from 1, if it was done.  EDM2, eq. 127: the first replaces all."""
        for g, averages in zip(self.exponents, self.networks, strict=True):
            average(averages, networks, (1 - (1 - 1 / step) ** (g + 1)) * is_good)

    def state(self) -> list[dict[str, Weights]]:
        """Return the averages, for the state of a run."""
        return [{name: net.state_dict() for name, net in averages.items()} for averages in self.networks]

    def store(self, folder: Path, step: int) -> None:
        """Write snapshots, in float16, to the folder of a run.  Raises OSError."""
        (folder / FOLDER).mkdir(exist_ok=True)
        for length, averages in zip(LENGTHS, self.networks, strict=True):
            values = {
                f"{name}.{key}": parameter.detach().to("cpu", torch.float16).contiguous()
                for name, network in averages.items()
                for key, parameter in network.named_parameters()
            }
            path = folder / FOLDER / f"{step:07}-{length:.3f}.safetensors"
            write_tensors(path, values)


@contextlib.contextmanager
@torch.no_grad()  # does not hold inside the with block
def using(networks: Mapping[str, nn.Module], averages: Mapping[str, nn.Module]) -> Iterator[None]:
    """Within the block networks hold other networks' parameters, such as their averages."""
    if averages is networks:
        yield
        return
    parameters = [parameter for network in networks.values() for parameter in network.parameters()]
    values = [parameter for name in networks for parameter in averages[name].parameters()]
    before = [parameter.clone() for parameter in parameters]
    for parameter, average in zip(parameters, values, strict=True):
        parameter.copy_(average)
    try:
        yield
    finally:
        for parameter, value in zip(parameters, before, strict=True):
            parameter.copy_(value)


# ---- optimisers -----------------------------------------------------------------------------------------------------

CLASSES = {"adamw8bit": "optim.AdamW8bit", "prodigy": "Prodigy"}  # in their packages


def make_optimizer(
    name: str, groups: list[dict[str, Any]], lr: float, weight_decay: float, betas: tuple[float, float] = (0.9, 0.99)
) -> torch.optim.Optimizer:
    """Return the optimiser of a name for groups of parameters.

    "adamw8bit" keeps its averages in 8 bits (Dettmers et al. 2022), "prodigy" finds the learning rate, of which `lr` is
    then a factor, usually 1 (Mishchenko and Defazio 2024).  Raises ValueError, one line, if its package is missing.
    """
    if name == "adamw":
        fused = groups[0]["params"][0].device.type in ("cuda", "cpu")
        return torch.optim.AdamW(groups, lr=lr, betas=betas, weight_decay=weight_decay, fused=fused)
    package = PACKAGES[name]
    try:
        optimizer: Any = importlib.import_module(package)
    except ImportError as error:
        raise ValueError(f"`optimizer={name}` needs {package}: {pip_install('optimizers')}") from error
    for part in CLASSES[name].split("."):
        optimizer = getattr(optimizer, part)
    return optimizer(groups, lr=lr, betas=betas, weight_decay=weight_decay)


def restore(optimizer: torch.optim.Optimizer, stored: dict[str, Any]) -> None:
    """Load an optimiser's state; its settings stay those of the options.  Raises any exception for another's state."""
    parameters, groups = [p for group in optimizer.param_groups for p in group["params"]], stored["param_groups"]
    ours, is_adamw = optimizer.state_dict()["param_groups"], isinstance(optimizer, torch.optim.AdamW)
    for index, values in stored["state"].items():
        for name in ("exp_avg", "exp_avg_sq") if is_adamw else ():
            squares = values["exp_avg_sq"]
            squares = squares.to_local() if isinstance(squares, DTensor) else squares
            if values[name].shape != parameters[index].shape or bool((squares < 0).any()):
                raise ValueError(f"{name} of parameter {index} is another's")
            # Fused kernels pair the values in memory order.
            laid_out = torch.empty_like(parameters[index])
            values[name] = laid_out.copy_(distributed.shard_like(values[name], parameters[index]))
    # prodigy's groups hold the rate that it has found.
    settings = [{key: group[key] for key in ("weight_decay", "betas")} for group in ours]
    groups = ours if is_adamw else [group | mine for group, mine in zip(groups, settings, strict=True)]
    optimizer.load_state_dict({"state": stored["state"], "param_groups": groups})
