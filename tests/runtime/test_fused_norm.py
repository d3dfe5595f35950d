"""Group norms and residual blocks by our kernels: the same numbers, how many kernels a step has, and the way out."""

import importlib
import os
from collections import Counter
from types import SimpleNamespace
from typing import Any

import profiling
import pytest
import torch
import toy
from torch import Tensor, nn
from torch.nn import functional as F

from ldm_lite.core.unet import ResBlock
from ldm_lite.runtime import fused_norm
from ldm_lite.runtime.memory import weights_channels_last
from ldm_lite.runtime.patching import patch


def triton_kernels() -> Any:
    """Return the module; its kernels run on a GPU, or where Triton was imported as an interpreter."""
    pytest.importorskip("triton")
    if not torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("no CUDA device; TRITON_INTERPRET=1 runs Triton's kernels on the CPU")
    return importlib.import_module("ldm_lite.runtime.triton_kernels")


@pytest.fixture(autouse=True)
def _inference() -> Any:
    fused_norm._computes.cache_clear()
    with torch.no_grad():
        yield
    fused_norm._computes.cache_clear()


def group_norm(
    x: Tensor, weight: Tensor, offset: Tensor, groups: int, eps: float, silu: bool, shift: Tensor | None, bias: Tensor
) -> Tensor:
    """What the kernel computes, in PyTorch, with its layout."""
    wide = x.double() if shift is None else x.double() + (shift.double() + bias.double())[:, :, None, None]
    wide = F.group_norm(wide, groups, weight.double(), offset.double(), eps)
    return (F.silu(wide) if silu else wide).to(x.dtype).contiguous(memory_format=torch.channels_last)


def biased_sum(x: Tensor, y: Tensor, bias: Tensor) -> Tensor:
    return (x.double() + y.double() + bias.double()[:, None, None]).to(x.dtype)


@pytest.fixture(params=["in PyTorch", "in Triton"])
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The kernels, for maps on a CPU too: by Triton's interpreter, and as they are meant."""
    monkeypatch.setattr(fused_norm, "runs_on", lambda device: True)
    implementation: Any = SimpleNamespace(group_norm=group_norm, biased_sum=biased_sum)
    if request.param == "in Triton":
        implementation = triton_kernels()
    calls: Counter[str] = Counter()

    def counted(name: str) -> Any:
        return lambda *args: calls.update([name]) or getattr(implementation, name)(*args)

    both = SimpleNamespace(group_norm=counted("group_norm"), biased_sum=counted("biased_sum"))
    monkeypatch.setattr(fused_norm, "_triton", lambda: both)
    return calls


SHAPES = [((2, 320, 6, 6), 0), ((1, 640, 9, 7), 30), ((1, 2560, 2, 2), 3), ((3, 64, 5, 5), 0)]


def a_map(*shape: int, dtype: torch.dtype = torch.float16) -> Tensor:
    return (2 * toy.normal(1, *shape) + 3).to(dtype).contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize(("shape", "mean"), SHAPES)
def test_the_kernel_is_exact_to_rounding(shape: tuple[int, ...], mean: float) -> None:
    ours = triton_kernels()
    x = (a_map(*shape) + mean).contiguous(memory_format=torch.channels_last)
    weight, offset, bias = ((1 + toy.normal(i, shape[1]) / 3).half() for i in range(3))
    for silu, shift in ((False, None), (True, None), (True, toy.normal(4, *shape[:2]).half())):
        normed = ours.group_norm(x, weight, offset, 32, 1e-5, silu, shift, bias)
        expected = group_norm(x.double(), weight, offset, 32, 1e-5, silu, shift, bias)
        assert toy.relative_error(normed, expected.numpy()) < 3e-4
        assert normed.is_contiguous(memory_format=torch.channels_last)
    total = ours.biased_sum(x, x, bias)
    assert toy.relative_error(total, biased_sum(x.double(), x.double(), bias).numpy()) < 3e-4


def test_a_residual_block_is_the_same(kernels: Counter[str]) -> None:
    for channels in (64, 32):
        block: Any = toy.fill(ResBlock(64, channels, 48)).half()
        weights_channels_last(block)
        x, emb = a_map(2, 64, 9, 8), toy.normal(2, 2, 48).half()
        expected = block.double()(x.double(), emb.double())
        block.half()
        fused_norm.use(block)
        kernels.clear()
        out = block(x, emb)
        assert out.is_contiguous(memory_format=torch.channels_last)
        assert toy.relative_error(out, expected.numpy()) < 2e-3
        assert kernels["biased_sum"] >= 1, "with one for the comparison"


@pytest.mark.parametrize("change", ["hook", "forward", "float32", "gradients", "contiguous", "circular"])
def test_what_the_kernels_are_not_for_runs_as_written(change: str, kernels: Counter[str]) -> None:
    block: Any = toy.fill(ResBlock(64, 64, 48)).half()
    fused_norm.use(block)
    x, emb, calls = a_map(1, 64, 8, 8), toy.normal(2, 1, 48).half(), list[int]()
    block(x, emb)
    assert kernels.total() > 0
    kernels.clear()
    if change == "hook":
        block.in_layers[2].register_forward_hook(lambda *args: calls.append(1))
    elif change == "forward":
        patch(block.out_layers[3], lambda conv, h: calls.append(1) or nn.Conv2d.forward(conv, h))
    elif change == "float32":
        block.float()
        x, emb = x.float(), emb.float()
    elif change == "contiguous":
        x = x.contiguous()
    elif change == "circular":
        for conv in (block.in_layers[2], block.out_layers[3]):
            conv.padding_mode, conv._reversed_padding_repeated_twice = "circular", [1, 1, 1, 1]
    with torch.set_grad_enabled(change == "gradients"):
        out = block(x, emb)
    unfused = ResBlock.forward(block, x, emb)
    assert toy.relative_error(out.detach(), unfused.float().numpy()) < 2e-3
    assert calls == ([1, 1] if change in ("hook", "forward") else [])
    assert (kernels["biased_sum"] > 0) == (change == "circular")


@pytest.mark.parametrize("fault", ["raises", "is wrong"])
def test_kernels_that_do_not_work_here_are_left(
    fault: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(x: Tensor, *others: Any) -> Tensor:
        if fault == "raises":
            raise RuntimeError("no compiler\nand a long story")
        return torch.zeros_like(x)

    monkeypatch.setattr(fused_norm, "runs_on", lambda device: True)
    monkeypatch.setattr(fused_norm, "_triton", lambda: SimpleNamespace(group_norm=broken, biased_sum=broken))
    block: Any = toy.fill(ResBlock(64, 64, 48)).half()
    x, emb = a_map(1, 64, 8, 8), toy.normal(2, 1, 48).half()
    expected = block(x, emb)
    fused_norm.use(block)
    for _ in range(2):
        assert torch.equal(block(x, emb), expected)
    [line] = [record.getMessage() for record in caplog.records if record.name == "ldm_lite"]
    assert line.startswith("group norm by PyTorch: our kernel ")


def test_a_step_has_few_kernels_and_no_transposing_copy() -> None:
    """Counted on meta tensors, as CUDA would run it: it had 911 kernels, 122 of them such copies."""
    sums = profiling.estimate(1)
    assert sum(count for count, _ in sums.values()) <= 620
    assert sums["copies"][0] <= 18, "concatenations of skips, and copies of latents"
    assert sums["convolutions"][0] == 52
