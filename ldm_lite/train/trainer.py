"""The trainer: optimiser, learning rate, EMA, and a run that can be stopped and continued at any step.

The random numbers of step k come from a generator seeded with (seed, k), and its examples from data.example_indices.
So a resumed run has the same losses as one that was never stopped.
"""

import contextlib
import copy
import json
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from ldm_lite.train import distributed
from ldm_lite.train.data import Dataset, batches, write_atomically
from ldm_lite.train.losses import Loss

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
            "networks": {name: network.state_dict() for name, network in self.loss.networks.items()},
            "average": {name: network.state_dict() for name, network in self.ema.items()},
            "optimizer": self.optimizer.state_dict(),
        }
        write_atomically(self.folder / STATE, lambda path: torch.save(state, path))
        self.saved = self.step

    def resume(self) -> None:
        """Continue from the state in the folder.  Raises ValueError if it belongs to other networks."""
        path = self.folder / STATE
        try:
            state = torch.load(path, map_location=self.device, weights_only=True)
            for name, network in self.loss.networks.items():
                network.load_state_dict(state["networks"][name])
                self.ema[name].load_state_dict(state["average"][name])
            self.optimizer.load_state_dict(state["optimizer"])
        except (RuntimeError, KeyError, EOFError, ValueError) as error:
            line = str(error).splitlines()[0]
            raise ValueError(
                f"{path}: is not the state of this run ({line}): use the run's options, or another `out`"
            ) from error
        self.step = self.saved = state["step"]
        if distributed.rank() == 0:
            self._trim_log()

    def _trim_log(self) -> None:
        """Drop the lines after the current step: those steps will be done again."""
        log = self.folder / LOG
        if log.exists():
            lines = log.read_text(encoding="utf-8").splitlines()
            kept = "".join(line + "\n" for line in lines if json.loads(line)["step"] <= self.step)
            write_atomically(log, lambda path: path.write_text(kept, encoding="utf-8"))

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
        steps done, after the state was written.  Raises ValueError, leaving the saved files as they are, if the loss is
        not finite.
        """
        config, start, losses = self.config, time.perf_counter(), []
        data = self._batches(dataset)
        if self.step >= config.steps and distributed.rank() == 0:
            on_save(self.step)  # the run may have been killed between its last state and on_save
        while self.step < config.steps:
            losses.append(self._step(data))
            self.step += 1
            over = config.minutes is not None and time.perf_counter() - start > 60 * config.minutes
            last = (config.minutes is not None and distributed.broadcast(over)) or self.step == config.steps
            mean = None
            if self.step % CHECK_EVERY == 0 or last:
                mean, losses = self._check(float(torch.stack(losses).mean())), []
                self._log({"step": self.step, "loss": mean, "seconds": round(time.perf_counter() - start, 2)})
            on_step(self.step, mean)
            if (self.step % config.save_every == 0 or last) and distributed.rank() == 0:
                self._verify()
                self.save()
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
            with open(self.folder / LOG, "a", encoding="utf-8") as log:
                log.write(json.dumps(row) + "\n")

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
