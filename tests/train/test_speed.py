"""What makes a training step fast changes no result."""

from pathlib import Path
from typing import Any

import pytest
import torch
import toy
from training import load_options, options, train

from ldm_lite.train import run
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
