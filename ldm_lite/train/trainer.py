"""The trainer: optimiser, learning rate, EMA, and a run that can be stopped and continued at any step.

The random numbers of step k come from a generator seeded with (seed, k), and its examples from data.example_indices.
So a resumed run has the same losses as one that was never stopped.
"""

import contextlib
import copy
import dataclasses
import json
import logging
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from ldm_lite.cli.files import open_file, read_bytes
from ldm_lite.cli.signals import Stopped, noted
from ldm_lite.train import distributed
from ldm_lite.train.data import Dataset, batches, reported_workers, write_atomically
from ldm_lite.train.losses import Loss

log = logging.getLogger("ldm_lite")

STATE = "state.pt"
LOG = "log.jsonl"
CHECK_EVERY = 20  # steps between reads of the loss, each of which waits for the GPU


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


def usable(tensor: Tensor) -> bool:
    """Whether a tensor holds finite floats."""
    return tensor.is_floating_point() and bool(torch.isfinite(tensor).all())


def load_finite(network: nn.Module, weights: dict[str, Tensor]) -> None:
    """Load a network's weights.  Raises any exception if they are not those of this network, or not finite."""
    own = network.state_dict()
    for name, value in weights.items():
        if name in own and (value.dtype != own[name].dtype or (value.is_floating_point() and not usable(value))):
            raise ValueError(f"{name} is of {value.dtype}, or not finite")
    network.load_state_dict(weights)


def read_log(path: Path) -> list[dict[str, float]]:
    """Return the rows of a run's log, with a warning if some lines cannot be read: a killed run may leave half a line.

    Raises ValueError if it is no regular file; OSError.
    """
    rows, lines = [], read_bytes(path, 2**30).decode("utf-8", errors="replace").splitlines()
    for line in lines:
        with contextlib.suppress(ValueError, RecursionError, TypeError, KeyError):
            row = json.loads(line)
            if type(row["step"]) is int and isinstance(row["loss"], (int, float)):
                rows.append(row)
    if len(rows) < len(lines):
        log.warning("%s: %d lines of it cannot be read, they are left out", path, len(lines) - len(rows))
    return rows


class Trainer:
    """A run in a folder: the networks of a loss, their EMA, the optimiser, and the current step."""

    def __init__(self, loss: Loss, config: TrainConfig, folder: Path) -> None:
        """The networks of `loss` are trained in place."""
        self.loss, self.config, self.folder = loss, config, folder
        self.step = self.saved = 0  # steps done; steps done in the state on disk
        for network in loss.networks.values():
            network.requires_grad_(True).train()
        self.ema = {name: copy.deepcopy(net).requires_grad_(False).eval() for name, net in loss.networks.items()}
        self.parameters = [p for network in loss.networks.values() for p in network.parameters()]
        self.device = self.parameters[0].device
        self.optimizer = torch.optim.AdamW(
            self.parameters,
            lr=config.lr,
            betas=(0.9, 0.99),
            weight_decay=config.weight_decay,
            fused=self.device.type in ("cuda", "cpu"),
        )
        self._last: tuple[Tensor, list[str]]  # the last batch

    # ---- state ------------------------------------------------------------------------------------------------------

    def save(self) -> None:
        """Write the state to resume from, atomically."""
        state = {
            "step": self.step,
            "settings": self._settings(),
            "networks": {name: network.state_dict() for name, network in self.loss.networks.items()},
            "average": {name: network.state_dict() for name, network in self.ema.items()},
            "optimizer": self.optimizer.state_dict(),
        }
        write_atomically(self.folder / STATE, lambda path: torch.save(state, path))
        self.saved = self.step

    def resume(self) -> None:
        """Continue from the state in the folder.

        Raises ValueError if it is damaged, belongs to other networks, or is beyond the last step; OSError.
        """
        path = self.folder / STATE
        with open_file(path) as file:
            try:
                state = torch.load(file, map_location=self.device, weights_only=True)
                for name, network in self.loss.networks.items():
                    load_finite(network, state["networks"][name])
                    load_finite(self.ema[name], state["average"][name])
                self._load_optimizer(state["optimizer"]["state"], state["step"])
            except torch.OutOfMemoryError:
                raise
            except Exception as error:  # torch raises nearly anything for a damaged file
                line = (str(error).splitlines() or [type(error).__name__])[0]
                raise ValueError(
                    f"{path}: is not the state of this run, or damaged ({line}): use the run's options, or "
                    "another `out`"
                ) from error
        self.step = self.saved = state["step"]
        if self.step > self.config.steps:
            raise ValueError(f"{path}: is of step {self.step}, beyond `steps={self.config.steps}`: give more steps")
        changed = {key: value for key, value in self._settings().items() if state.get("settings", {}).get(key) != value}
        if "settings" in state and changed:
            log.info("the run goes on with other settings than before: %s", json.dumps(changed))
        if distributed.rank() == 0:
            self._trim_log()

    def _settings(self) -> dict[str, object]:
        """The part of the config that results depend on."""
        values = dataclasses.asdict(self.config)
        return {key: value for key, value in values.items() if key not in ("minutes", "save_every", "workers", "bf16")}

    def _load_optimizer(self, state: dict[int, dict[str, Tensor]], step: int) -> None:
        """Load AdamW's averages; its settings are the config's.  Raises any exception for what is not its state."""
        if type(step) is not int or step < 1:
            raise ValueError(f"it is of step {step!r:.50}")
        for index, values in state.items():
            parameter = self.parameters[index]
            for name in ("exp_avg", "exp_avg_sq"):
                if values[name].shape != parameter.shape or not usable(values[name]):
                    raise ValueError(f"{name} of parameter {index} has another shape, or is not finite")
            if float(values["exp_avg_sq"].min()) < 0 or set(values) != {"step", "exp_avg", "exp_avg_sq"}:
                raise ValueError(f"the averages of parameter {index} are not AdamW's")
        if max(int(values["step"]) for values in state.values()) != step:
            raise ValueError(f"it is of step {step}, but its optimiser is not")
        self.optimizer.load_state_dict({"state": state, "param_groups": self.optimizer.state_dict()["param_groups"]})

    def _trim_log(self) -> None:
        """Drop the lines after the current step: those steps will be done again.  And those that cannot be read."""
        path = self.folder / LOG
        if path.exists():
            kept = "".join(json.dumps(row) + "\n" for row in read_log(path) if row["step"] <= self.step)
            write_atomically(path, lambda part: part.write_text(kept, encoding="utf-8"))

    def untrained_tokens(self) -> Tensor:
        """Return a mask (V,) of the rows of the token embedding that never had a gradient, on the CPU."""
        table = self.loss.networks["text_encoder"].get_parameter("embeddings.token_embedding.weight")
        return (self.optimizer.state[table]["exp_avg_sq"] == 0).all(dim=1).cpu()

    # ---- steps ------------------------------------------------------------------------------------------------------

    def fit(
        self, dataset: Dataset, on_step: Callable[[int, float | None], None], on_save: Callable[[int], None]
    ) -> None:
        """Train to the last step of the config, or until its time is over.

        on_step gets the number of steps done and, every CHECK_EVERY steps, their mean loss; on_save gets the number of
        steps done, after the state was written.  After SIGINT, SIGTERM or SIGHUP the step is finished and the state
        saved, then Stopped is raised; a second signal stops at once.  Raises ValueError, leaving the saved files as
        they are, if the loss is not finite, and ChildProcessError if a worker dies.
        """
        with noted() as received, reported_workers():
            self._fit(self._batches(dataset), on_step, on_save, received)
        if received:
            raise Stopped(received[0], f"the state of step {self.step} is saved, `resume=True` continues")

    def _fit(
        self,
        data: Iterator[tuple[Tensor, list[str]]],
        on_step: Callable[[int, float | None], None],
        on_save: Callable[[int], None],
        received: Sequence[int],
    ) -> None:
        """Train until the end, or until a signal is received; then save the state alone, which is quick."""
        config, start, losses = self.config, time.perf_counter(), []
        if self.step >= config.steps and distributed.rank() == 0:
            on_save(self.step)  # the run may have been killed between its last state and on_save
        while self.step < config.steps:
            losses.append(self._step(data))
            self.step += 1
            over = config.minutes is not None and time.perf_counter() - start > 60 * config.minutes
            asked = config.minutes is not None or distributed.world_size() == 1 or self.step % CHECK_EVERY == 0
            last = (asked and distributed.broadcast(over or bool(received))) or self.step == config.steps
            mean = None
            if self.step % CHECK_EVERY == 0 or last:
                mean, losses = self._check(float(torch.stack(losses).mean())), []
                self._log({"step": self.step, "loss": mean, "seconds": round(time.perf_counter() - start, 2)})
            on_step(self.step, mean)
            if (self.step % config.save_every == 0 or last) and distributed.rank() == 0:
                self._verify()
                self.save()
                if not received:
                    on_save(self.step)
            if last:
                return

    def _batches(self, dataset: Dataset) -> Iterator[tuple[Tensor, list[str]]]:
        """Yield the batches of this process from the current step on: each process takes every world_size-th."""
        config, size = self.config, distributed.world_size()
        first, end = self.step * config.accumulate * size + distributed.rank(), config.steps * config.accumulate * size
        return batches(dataset, config.seed, config.batch, range(first, end, size), config.workers)

    def _log(self, row: dict[str, float]) -> None:
        if distributed.rank() == 0:
            with open(self.folder / LOG, "a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")

    def _step(self, data: Iterator[tuple[Tensor, list[str]]]) -> Tensor:
        """Run one optimiser step over `accumulate` batches.  Returns its loss () without waiting for the device."""
        config = self.config
        for group in self.optimizer.param_groups:
            group["lr"] = config.lr * learning_rate(self.step, config.warmup, config.steps)
        seed = (config.seed * 2**32 + self.step) * distributed.world_size() + distributed.rank()
        generator = torch.Generator().manual_seed(seed)
        total = torch.zeros((), device=self.device)
        for _ in range(config.accumulate):
            self._last = pixels, captions = next(data)
            autocast = torch.autocast(self.device.type, torch.bfloat16) if config.bf16 else contextlib.nullcontext()
            with self._kernels():
                with autocast:
                    loss = self.loss(pixels, captions, generator) / config.accumulate
                loss.backward()  # type: ignore[no-untyped-call]
            total += loss.detach()
        distributed.average_gradients(self.parameters)
        nn.utils.clip_grad_norm_(self.parameters, config.clip)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self._update_ema()
        return total

    def _kernels(self) -> contextlib.AbstractContextManager[None]:
        """Plain attention on a CPU, where the backward pass of flash attention takes four times as long."""
        return sdpa_kernel(SDPBackend.MATH) if self.device.type == "cpu" else contextlib.nullcontext()

    @torch.no_grad()
    def _update_ema(self) -> None:
        """Update the EMA with decay min(ema_decay, (1 + step) / (10 + step)): it follows faster at first."""
        decay = min(self.config.ema_decay, (1 + self.step) / (10 + self.step))
        for name, network in self.loss.networks.items():
            torch._foreach_lerp_(list(self.ema[name].parameters()), list(network.parameters()), 1 - decay)

    def _check(self, loss: float) -> float:
        """Return the loss.  Raises ValueError if it is not finite."""
        if not math.isfinite(loss):
            saved = f"the state of step {self.saved} is kept in {self.folder}" if self.saved else "nothing was saved"
            raise ValueError(f"the loss is {loss} at step {self.step}: use a lower `lr`; {saved}")
        return loss

    @torch.no_grad()
    def _verify(self) -> None:
        """Raise ValueError if the loss of the last batch, with the current weights, is not finite."""
        pixels, captions = self._last
        compiled = any(network._compiled_call_impl is not None for network in self.loss.networks.values())
        # Compiled code is for steps with gradients: without them everything would be compiled once more.
        with torch.compiler.set_stance("force_eager") if compiled else contextlib.nullcontext():
            self._check(float(self.loss(pixels, captions, torch.Generator().manual_seed(0))))


def learning_rate(step: int, warmup: int, steps: int) -> float:
    """Return the share of the peak learning rate: linear warm-up, then half a cosine down to 0."""
    if step < warmup:
        return (step + 1) / warmup
    return 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, steps - warmup)))
