"""The training loop: optimiser, schedule, averages, and a run that can be stopped and taken up again at any step.

All chance of step k comes from a generator seeded with (seed, k), and its examples from data.order: so a resumed run
has the losses of one that was never stopped.
"""

import contextlib
import copy
import json
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from ldm_lite.train import distributed as ranks
from ldm_lite.train.data import Source, batches, write_whole
from ldm_lite.train.tasks import Task

STATE = "state.pt"
LOG = "log.jsonl"
CHECK_EVERY = 20  # steps between looks at the loss: each one waits for the GPU


@dataclass(frozen=True)
class Recipe:
    """How to optimise."""

    steps: int
    batch: int
    accumulate: int  # batches to an optimiser step
    lr: float
    warmup: int  # steps
    weight_decay: float
    ema: float
    clip: float  # of the gradient's norm
    seed: int
    minutes: float | None  # stop after these
    save_every: int  # steps
    workers: int
    bf16: bool  # autocast


class Run:
    """A run in a folder: the task's networks, their averages, the optimiser, and the step they have reached."""

    def __init__(self, task: Task, recipe: Recipe, folder: Path) -> None:
        """The networks are trained in place."""
        self.task, self.recipe, self.folder = task, recipe, folder
        self.step = self.saved = 0  # steps done; steps that the state on disk has done
        for network in task.networks.values():
            network.requires_grad_(True).train()
        self.average = {name: copy.deepcopy(net).requires_grad_(False).eval() for name, net in task.networks.items()}
        parameters = [p for network in task.networks.values() for p in network.parameters()]
        self.device = parameters[0].device
        self.optimizer = torch.optim.AdamW(
            parameters,
            lr=recipe.lr,
            betas=(0.9, 0.99),
            weight_decay=recipe.weight_decay,
            fused=self.device.type in ("cuda", "cpu"),
        )
        self.parameters = parameters
        self._last: tuple[Tensor, list[str]]  # the batch seen last

    # ---- state ------------------------------------------------------------------------------------------------------

    def save(self) -> None:
        """Write the state to resume from, whole or not at all."""
        state = {
            "step": self.step,
            "networks": {name: network.state_dict() for name, network in self.task.networks.items()},
            "average": {name: network.state_dict() for name, network in self.average.items()},
            "optimizer": self.optimizer.state_dict(),
        }
        write_whole(self.folder / STATE, lambda path: torch.save(state, path))
        self.saved = self.step

    def resume(self) -> None:
        """Take up the state in the folder.  Raises ValueError if it is of other networks."""
        path = self.folder / STATE
        try:
            state = torch.load(path, map_location=self.device, weights_only=True)
            for name, network in self.task.networks.items():
                network.load_state_dict(state["networks"][name])
                self.average[name].load_state_dict(state["average"][name])
            self.optimizer.load_state_dict(state["optimizer"])
        except (RuntimeError, KeyError, EOFError, ValueError) as error:
            line = str(error).splitlines()[0]
            raise ValueError(
                f"{path}: is not the state of this run ({line}): take its options, or another --out"
            ) from error
        self.step = self.saved = state["step"]
        log = self.folder / LOG
        if log.exists() and ranks.own() == 0:  # without what came after the state, which will be done again
            rows = [
                line for line in log.read_text(encoding="utf-8").splitlines() if json.loads(line)["step"] <= self.step
            ]
            write_whole(log, lambda path: path.write_text("".join(row + "\n" for row in rows), encoding="utf-8"))

    def untrained_tokens(self) -> Tensor:
        """Which rows (V,) of the text encoder's token table have never had a gradient, on the CPU."""
        table = self.task.networks["text_encoder"].get_parameter("embeddings.token_embedding.weight")
        return (self.optimizer.state[table]["exp_avg_sq"] == 0).all(dim=1).cpu()

    # ---- steps ------------------------------------------------------------------------------------------------------

    def fit(self, source: Source, on_step: Callable[[int, float | None], None], on_save: Callable[[int], None]) -> None:
        """Train to the recipe's last step, or for its minutes.

        on_step gets the number of steps done and, at every CHECK_EVERY-th, their mean loss; on_save is called after the
        state was written.  Raises ValueError, with what was saved left as it is, if the loss is not finite.
        """
        recipe, start, losses = self.recipe, time.perf_counter(), []
        micro = batches(
            source,
            recipe.seed,
            recipe.batch,
            range(
                self.step * recipe.accumulate * ranks.count() + ranks.own(),
                recipe.steps * recipe.accumulate * ranks.count(),
                ranks.count(),
            ),
            recipe.workers,
        )
        if self.step >= recipe.steps and ranks.own() == 0:  # it may have ended between its last state and on_save
            on_save(self.step)
        while self.step < recipe.steps:
            losses.append(self._step(micro))
            self.step += 1
            out_of_time = recipe.minutes is not None and ranks.agreed(time.perf_counter() - start > 60 * recipe.minutes)
            last = out_of_time or self.step == recipe.steps
            mean = None
            if self.step % CHECK_EVERY == 0 or last:
                mean, losses = self._check(float(torch.stack(losses).mean())), []
                self._log({"step": self.step, "loss": mean, "seconds": round(time.perf_counter() - start, 2)})
            on_step(self.step, mean)
            if (self.step % recipe.save_every == 0 or last) and ranks.own() == 0:
                self._verify()
                self.save()
                on_save(self.step)
            if last:
                return

    def _log(self, row: dict[str, float]) -> None:
        if ranks.own() == 0:
            with open(self.folder / LOG, "a", encoding="utf-8") as log:
                log.write(json.dumps(row) + "\n")

    def _step(self, micro: Any) -> Tensor:
        """One optimiser step over `accumulate` batches -> its loss (), not waited for."""
        recipe = self.recipe
        for group in self.optimizer.param_groups:
            group["lr"] = recipe.lr * learning_rate(self.step, recipe.warmup, recipe.steps)
        random = torch.Generator().manual_seed((recipe.seed * 2**32 + self.step) * ranks.count() + ranks.own())
        total = torch.zeros((), device=self.device)
        for _ in range(recipe.accumulate):
            self._last = pixels, captions = next(micro)
            autocast = torch.autocast(self.device.type, torch.bfloat16) if recipe.bf16 else contextlib.nullcontext()
            with self._kernels():
                with autocast:
                    loss = self.task.loss(pixels, captions, random) / recipe.accumulate
                loss.backward()  # type: ignore[no-untyped-call]
            total += loss.detach()
        ranks.average_gradients(self.parameters)
        nn.utils.clip_grad_norm_(self.parameters, recipe.clip)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self._update_average()
        return total

    def _kernels(self) -> contextlib.AbstractContextManager[None]:
        """Plain attention on a CPU, where the backward pass of flash attention takes four times as long."""
        return sdpa_kernel(SDPBackend.MATH) if self.device.type == "cpu" else contextlib.nullcontext()

    @torch.no_grad()
    def _update_average(self) -> None:
        """Polyak averaging, faster at first: min(ema, (1 + step) / (10 + step)) of the average is kept."""
        keep = min(self.recipe.ema, (1 + self.step) / (10 + self.step))
        for name, network in self.task.networks.items():
            torch._foreach_lerp_(list(self.average[name].parameters()), list(network.parameters()), 1 - keep)

    def _kept(self) -> str:
        return f"the state of step {self.saved} is kept in {self.folder}" if self.saved else "nothing was saved yet"

    def _check(self, loss: float) -> float:
        """The loss itself.  Raises ValueError if it is not finite."""
        if not math.isfinite(loss):
            raise ValueError(f"the loss is {loss} at step {self.step}: take a lower --lr; {self._kept()}")
        return loss

    @torch.no_grad()
    def _verify(self) -> None:
        """Raises ValueError if the weights, as they are now, give the last batch a loss that is not finite."""
        pixels, captions = self._last
        self._check(float(self.task.loss(pixels, captions, torch.Generator().manual_seed(0))))


def learning_rate(step: int, warmup: int, steps: int) -> float:
    """Share of the learning rate: a line up over the warm-up, then half a cosine down to nothing."""
    if step < warmup:
        return (step + 1) / warmup
    return 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, steps - warmup)))
