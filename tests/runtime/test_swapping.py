"""LoRAs that are swapped on a compiled pipeline: weights change in place, so that nothing is compiled again."""

from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch._dynamo.testing import CompileCounter

import ldm_lite
from ldm_lite.runtime import setup


@pytest.mark.slow
@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("tier", ["step", "regional"])
def test_ten_loras_are_swapped_with_one_compilation(
    tier: str, small_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counter = CompileCounter()
    monkeypatch.setattr(setup, "compiled_step", partial(setup.compiled_step, backend=counter))
    pipe = ldm_lite.load(small_path, device="cpu", compile=tier)
    image = partial(pipe.txt2img, "an apple", height=64, width=64, steps=2, seed=1)
    plain = image()[0]
    compiled = counter.frame_count
    assert compiled > 0 if tier == "regional" else compiled == 1
    layers = [name for name, _ in pipe.unet.named_modules() if name.endswith(("attn1.to_q", "in_layers.2"))]
    seen = {plain.tobytes()}
    for n in range(10):
        rank = n + 1  # of which compiled code must not know
        tensors = {}
        for name in layers:
            weight = pipe.unet.get_submodule(name).weight
            key = f"lora_unet_{name.replace('.', '_')}"
            tensors[f"{key}.lora_down.weight"] = torch.randn(rank, *weight.shape[1:])
            tensors[f"{key}.lora_up.weight"] = torch.randn(len(weight), rank, *[1] * (weight.ndim - 2))
        save_file(tensors, tmp_path / f"{n}.safetensors")
        with pipe.lora(tmp_path / f"{n}.safetensors"):
            seen.add(image()[0].tobytes())
    assert len(seen) == 11, "each LoRA makes another image"
    assert image()[0].tobytes() == plain.tobytes()
    assert counter.frame_count == compiled
