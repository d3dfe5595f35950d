"""Norms, gates and the blocks around them by our kernels: the same numbers, how many a step has, and the way out."""

import copy
import functools
import importlib
import os
import re
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import profiling
import pytest
import torch
import toy
from random_checkpoint import SMALL
from torch import Tensor, nn
from torch.nn import functional as F

from ldm_lite.core.unet import GEGLU, BasicTransformerBlock, ResBlock
from ldm_lite.runtime import fused
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
    fused._computes.cache_clear()
    with torch.no_grad():
        yield
    fused._computes.cache_clear()


def group_norm(
    x: Tensor, weight: Tensor, offset: Tensor, groups: int, eps: float, silu: bool, shift: Tensor | None, bias: Tensor
) -> Tensor:
    """What the kernel computes, in PyTorch, with its layout."""
    wide = x.double() if shift is None else x.double() + (shift.double() + bias.double())[:, :, None, None]
    wide = F.group_norm(wide, groups, weight.double(), offset.double(), eps)
    return (F.silu(wide) if silu else wide).to(x.dtype).contiguous(memory_format=torch.channels_last)


def biased_sum(x: Tensor, y: Tensor, bias: Tensor) -> Tensor:
    return (x.double() + y.double() + bias.double()[:, None, None]).to(x.dtype)


def sum_and_norm(x: Tensor, y: Tensor, weight: Tensor, offset: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    total = x.double() + y.double()
    normed = F.layer_norm(total, (x.shape[-1],), weight.double(), offset.double(), eps)
    return total.to(x.dtype), normed.to(x.dtype)


def gated(x: Tensor) -> Tensor:
    value, gate = x.double().chunk(2, dim=-1)
    return (value * F.gelu(gate)).to(x.dtype)


IN_PYTORCH = {"group_norm": group_norm, "biased_sum": biased_sum, "sum_and_norm": sum_and_norm, "gated": gated}


@pytest.fixture(params=["in PyTorch", "in Triton"])
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The kernels, for maps on a CPU too: by Triton's interpreter, and as they are meant."""
    monkeypatch.setattr(fused, "runs_on", lambda device: True)
    implementation: Any = SimpleNamespace(**IN_PYTORCH)
    if request.param == "in Triton":
        implementation = triton_kernels()
    calls: Counter[str] = Counter()

    def counted(name: str) -> Any:
        return lambda *args: calls.update([name]) or getattr(implementation, name)(*args)

    monkeypatch.setattr(fused, "_triton", lambda: SimpleNamespace(**{name: counted(name) for name in IN_PYTORCH}))
    return calls


SHAPES = [  # the last two are not of one program for each group
    ((2, 320, 6, 6), 0),
    ((1, 640, 9, 7), 30),
    ((1, 2560, 2, 2), 3),
    ((3, 64, 16, 16), 0),
    ((1, 96, 19, 17), 30),
    ((1, 8192, 2, 2), 3),
]


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


@pytest.mark.parametrize(("channels", "mean"), [(320, 0), (1280, 30), (48, 3)])
def test_kernels_of_tokens_are_exact_to_rounding(channels: int, mean: float) -> None:
    ours = triton_kernels()
    x, y = ((2 * toy.normal(i, 2, 5, channels) + mean).half() for i in range(2))
    weight, offset = ((1 + toy.normal(i, channels) / 3).half() for i in range(2))
    expected = *sum_and_norm(x.double(), y.double(), weight, offset, 1e-5), gated(x.double())
    results = *ours.sum_and_norm(x, y, weight, offset, 1e-5), ours.gated(x)
    for result, exact in zip(results, expected, strict=True):
        assert result.shape == exact.shape
        assert toy.relative_error(result, exact.numpy()) < 3e-4


def test_a_residual_block_is_the_same(kernels: Counter[str]) -> None:
    for channels in (64, 32):
        block: Any = toy.fill(ResBlock(64, channels, 48)).half()
        weights_channels_last(block)
        x, emb = a_map(2, 64, 9, 8), toy.normal(2, 2, 48).half()
        expected = block.double()(x.double(), emb.double())
        block.half()
        fused.use(block)
        kernels.clear()
        out = block(x, emb)
        assert out.is_contiguous(memory_format=torch.channels_last)
        assert toy.relative_error(out, expected.numpy()) < 2e-3
        assert kernels["biased_sum"] >= 1, "with one for the comparison"


def test_a_transformer_block_is_the_same(kernels: Counter[str]) -> None:
    block = toy.fill(BasicTransformerBlock(64, 48, 4))
    x, context = toy.normal(1, 2, 9, 64), toy.normal(2, 2, 5, 48)
    expected = block.double()(x.double(), context.double()).numpy()
    block.half()
    fused.use(block)
    kernels.clear()
    assert toy.relative_error(block(x.half(), context.half()), expected) < 2e-3
    assert kernels == {"sum_and_norm": 3, "gated": 2}, "one of each is for the comparison"
    kernels.clear()
    with torch.enable_grad():
        assert toy.relative_error(block(x.half(), context.half()).detach(), expected) < 2e-3
    assert not kernels
    calls = list[int]()
    block.norm2.register_forward_hook(lambda *args: calls.append(1))
    assert toy.relative_error(block(x.half(), context.half()), expected) < 2e-3
    assert (calls, kernels) == ([1], {"gated": 1})


@pytest.mark.parametrize("change", ["hook", "forward", "float32", "gradients", "contiguous", "circular"])
def test_what_the_kernels_are_not_for_runs_as_written(change: str, kernels: Counter[str]) -> None:
    block: Any = toy.fill(ResBlock(64, 64, 48)).half()
    fused.use(block)
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
@pytest.mark.parametrize(
    ("block", "sizes", "what"),
    [
        (ResBlock(64, 64, 48), (48,), "group norm"),
        (BasicTransformerBlock(64, 48, 4), (3, 48), "layer norm"),
        (GEGLU(64, 64), (), "GEGLU"),
    ],
)
def test_kernels_that_do_not_work_here_are_left(
    block: Any, sizes: tuple[int, ...], what: str, fault: str, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    def broken(name: str, *inputs: Any) -> Any:
        if fault == "raises":
            raise RuntimeError("no compiler\nand a long story")
        results = IN_PYTORCH[name](*inputs)  # type: ignore[operator]
        return tuple(map(torch.zeros_like, results)) if isinstance(results, tuple) else torch.zeros_like(results)

    monkeypatch.setattr(fused, "runs_on", lambda device: True)
    names = {name: functools.partial(broken, name) for name in IN_PYTORCH}
    monkeypatch.setattr(fused, "_triton", lambda: SimpleNamespace(**names))
    block = toy.fill(copy.deepcopy(block)).half()
    x = a_map(1, 64, 8, 8) if isinstance(block, ResBlock) else toy.normal(1, 1, 5, 64).half()
    inputs = (x, *([toy.normal(2, 1, *sizes).half()] if sizes else []))
    expected = block(*inputs)
    fused.use(block)
    for _ in range(2):
        assert torch.equal(block(*inputs), expected)
    lines = [record.getMessage() for record in caplog.records if record.name == "ldm_lite"]
    assert [line for line in lines if line.startswith(f"{what} by PyTorch: our kernel ")] == lines[:1]
    assert len(lines) == (2 if what == "layer norm" else 1), "once for each kernel"


@pytest.mark.slow
def test_compiled_code_has_none_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Inductor fuses as much by itself."""
    monkeypatch.setattr(fused, "runs_on", lambda device: True)
    torch._dynamo.reset()
    unet: Any = toy.network(SMALL.unet).requires_grad_(False).bfloat16()
    weights_channels_last(unet)
    inputs = toy.normal(1, 2, 4, 8, 8), torch.tensor([5.0, 700.0]), toy.normal(2, 2, 5, SMALL.unet.context_dim)
    expected = unet(*inputs)
    fused.use(unet)
    assert torch.equal(torch.compile(unet, backend="eager", fullgraph=True)(*inputs), expected)
    torch._dynamo.reset()


def test_profiles_sum_our_kernels_by_class() -> None:
    """By their names, which are those of the functions."""
    text = (Path(fused.__file__).parent / "triton_kernels.py").read_text()
    names = re.findall(r"^@triton.jit.*\ndef (\w+)", text, re.MULTILINE)
    assert [profiling.class_of(name) for name in names] == ["norms"] * 4 + ["pointwise"] * 2


def test_a_step_has_few_kernels_and_no_transposing_copy() -> None:
    """Counted on meta tensors, as CUDA would run it: it had 911 kernels, 122 of them such copies."""
    sums = profiling.estimate(1)
    assert sum(count for count, _ in sums.values()) <= 490
    assert sums["copies"][0] <= 18, "concatenations of skips, and copies of latents"
    assert sums["convolutions"][0] == 52
