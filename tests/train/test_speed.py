"""What makes a training step fast changes no result, and a step on a GPU does not wait for it."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import toy
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from training import load_options, options, train

from ldm_lite import Pipeline
from ldm_lite.conditioning import prompts
from ldm_lite.models.controlnet import ControlNet
from ldm_lite.train import additions, batches, data, losses, run
from ldm_lite.train.additions import LoRA
from ldm_lite.train.batches import Batch, Draws
from ldm_lite.train.losses import DiffusionLoss
from ldm_lite.train.trainer import make_optimizer, restore


def test_adamw_takes_stored_averages_of_another_layout() -> None:
    """As a divided run stores them: torch's fused kernel would pair them with weights in another order."""
    results = []
    stored: dict[str, Any] = {}
    for layout in (torch.channels_last, torch.contiguous_format):
        weight = toy.normal(1, 4, 6, 3, 3).contiguous(memory_format=layout)
        for step in range(3):
            optimizer = make_optimizer("adamw", [{"params": [weight]}], 1e-2, 0.1)
            if step:
                restore(optimizer, stored)
            weight.grad = toy.normal(10 + step, 4, 6, 3, 3).contiguous(memory_format=layout)
            optimizer.step()
            stored = optimizer.state_dict()
            stored["state"] = {0: {name: value.contiguous() for name, value in stored["state"][0].items()}}
        results.append(weight)
    torch.testing.assert_close(*results, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(("amx", "avx", "fast"), [(True, False, True), (False, True, True), (False, False, False)])
def test_a_cpu_with_either_kind_of_bfloat16_trains_in_it(
    monkeypatch: pytest.MonkeyPatch, amx: bool, avx: bool, fast: bool
) -> None:
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: amx)
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: avx)
    assert run.has_fast_bf16(torch.device("cpu")) == fast


def test_attention_is_plain_only_where_that_is_faster(
    folder: Path, tmp_path: Path, small_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a CPU flash attention's backward pass is faster than the plain one's in float32, and slower in bfloat16."""
    seen: list[bool] = []
    original = DiffusionLoss.__call__

    def call(loss: DiffusionLoss, batch: Batch, draws: Draws) -> torch.Tensor:
        seen.append(torch.backends.cuda.flash_sdp_enabled())
        return original(loss, batch, draws)

    monkeypatch.setattr(DiffusionLoss, "__call__", call)
    for fast in (False, True):
        monkeypatch.setattr(run, "has_fast_bf16", lambda device, fast=fast: fast)
        train(options(folder, tmp_path / str(fast), steps=1, lora_rank=1), load_options(small_path))
    assert seen[0]
    assert not seen[-2]
    assert torch.backends.cuda.flash_sdp_enabled()


class Waiting(TorchDispatchMode):
    """Counts the copies to a device of no values, the meta device, that Python waits for; reading from it is an error.

    PyTorch waits for all that a CUDA GPU has to do before it copies from memory that is not pinned.
    """

    copies = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.aten._to_copy.default and args[0].device.type == "cpu":
            self.copies += torch.device(kwargs.get("device") or "cpu").type == "meta" and not kwargs.get("non_blocking")
        return func(*args, **kwargs)


@pytest.fixture
def on_gpu(small: Pipeline, monkeypatch: pytest.MonkeyPatch) -> Pipeline:
    """The model on the meta device, which to_device takes for a GPU."""
    for module in (additions, batches, data, losses, prompts):
        monkeypatch.setattr(module, "to_device", lambda tensor, device: tensor.to(device, non_blocking=True))
    return small.with_networks(**{role: network.to("meta") for role, network in small.networks.items()})


PIXELS = torch.zeros(2, 3, 64, 64, dtype=torch.uint8)
MOMENTS = torch.zeros(2, 8, 8, 8)
TEXT = torch.zeros(2, 77, 64)
BATCHES: dict[str, Mapping[str, Any]] = {
    "images": {"pixels": PIXELS, "context": None, "mask": PIXELS[:, :1]},
    "encoded": {"pixels": MOMENTS, "context": TEXT},
    "control": {"pixels": MOMENTS, "context": TEXT, "hint": PIXELS},
    "lora": {"pixels": MOMENTS, "context": TEXT},
}


@pytest.mark.parametrize("kind", BATCHES)
def test_a_step_on_a_gpu_is_queued_without_waiting_for_the_one_before(kind: str, on_gpu: Pipeline) -> None:
    networks: dict[str, nn.Module] = {"unet": on_gpu.unet.requires_grad_(True)}
    control = None
    if kind == "control":
        networks = {"control": (control := ControlNet(on_gpu.family.unet).to("meta"))}
    elif kind == "lora":
        networks = {"lora": (lora := LoRA(networks, 2, dropout=0.1).to("meta"))}
        lora.attach({"unet": on_gpu.unet})
    empty = None if kind == "images" else {"context": torch.zeros(1, 77, 64)}
    loss = losses.DiffusionLoss(on_gpu, networks, caption_dropout=0.5, empty=empty, control=control)
    with Waiting() as waiting:
        value = loss(Batch(captions=["a", "b"], numbers=(0, 1), **BATCHES[kind]), Draws(0, (0, 1)))
        value.backward()  # type: ignore[no-untyped-call]
    assert value.is_meta
    assert all(parameter.grad is not None for network in networks.values() for parameter in network.parameters())
    assert waiting.copies == 0
