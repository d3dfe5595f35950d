"""Triton's kernels on a CPU, by Triton's interpreter, and their machine code for three kinds of GPU."""

import copy
import importlib
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
import toy
from torch import Tensor, nn
from torch.nn import functional as F

from ldm_lite.core.unet import Block, ResBlock, SpatialTransformer
from ldm_lite.runtime import fused_norm

pytestmark = pytest.mark.extra
pytest.importorskip("triton", reason="Triton is not installed")
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

# groups, channels, height, width: one program a group, then strips; widths that are no power of two
MAPS = [(2, 20, 5, 3), (4, 12, 4, 8), (2, 20, 7, 6), (3, 24, 8, 9)]


def test_by_interpreter() -> None:
    """The other tests of this file, in a process where Triton interprets its kernels."""
    if INTERPRETED:
        return
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", __file__]
    ran = subprocess.run(
        command, env=os.environ | {"TRITON_INTERPRET": "1"}, capture_output=True, text=True, timeout=300
    )
    assert ran.returncode == 0, ran.stdout
    assert re.search(r"\d\d passed", ran.stdout)


def interpreted(test: Any) -> Any:
    return pytest.mark.skipif(not INTERPRETED, reason="test_by_interpreter runs it")(test)


@pytest.fixture(autouse=True)
def _whole_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton 3.6's interpreter calls int() on an array of one value, which numpy 2.4 refuses."""
    interpreter = importlib.import_module("triton.runtime.interpreter")
    given = interpreter._patch_lang_tensor

    def patched(tensor: Any, scope: Any) -> None:
        given(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    monkeypatch.setattr(interpreter, "_patch_lang_tensor", patched)


def expected(x: Tensor, norm: nn.GroupNorm, silu: bool, *parts: Tensor | None) -> tuple[Tensor, Tensor]:
    """In float64: the norm, and the sum that it is of, rounded if y is a part of it."""
    y, added, channel = (None if part is None else part.double() for part in parts)
    total = x.double()
    total = total if added is None else total + added[:, :, None, None]
    total = total if channel is None else total + channel[:, None, None]
    if y is not None:
        total = (total + y).to(x.dtype).double()
    out = F.group_norm(total, norm.num_groups, norm.weight.double(), norm.bias.double(), norm.eps)
    return F.silu(out) if silu else out, total


@pytest.fixture
def launch(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The kernels, with fewer strips of smaller maps, since the interpreter takes its time."""
    kernels = importlib.import_module("ldm_lite.runtime.norm_kernels")
    monkeypatch.setattr(kernels, "WHOLE", 32)
    monkeypatch.setattr(kernels, "STRIPS", 4)
    return kernels.launch


@interpreted
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("size", MAPS)
@torch.no_grad()
def test_equals_the_norm(size: tuple[int, int, int, int], dtype: torch.dtype, launch: Any) -> None:
    groups, channels, h, w = size
    norm = toy.fill(nn.GroupNorm(groups, channels)).to(dtype)
    x, y = (toy.normal(i, 2, channels, h, w).to(dtype).to(memory_format=torch.channels_last) for i in range(2))
    x = x * 2 + 3
    added, channel = toy.normal(2, 2, channels).to(dtype), toy.normal(3, channels).to(dtype)
    for parts in ((None, None, None), (None, added, channel), (y, None, channel), (y, added, None)):
        silu = parts[1] is not None
        found, total = launch(x, norm.weight, norm.bias, groups, norm.eps, silu, *parts)
        wanted, sums = expected(x, norm, silu, *parts)
        limit = {torch.float16: 1e-3, torch.bfloat16: 8e-3, torch.float32: 2e-6}[dtype]
        assert toy.relative_error(found.double(), wanted.numpy()) < limit
        if parts[0] is not None:
            assert toy.relative_error(total.double(), sums.numpy()) < limit
        assert found.is_contiguous(memory_format=torch.channels_last)


@interpreted
@torch.no_grad()
def test_a_large_mean_costs_no_digits(launch: Any) -> None:
    norm = nn.GroupNorm(4, 24)
    for side in (5, 8):
        x = (toy.normal(1, 1, 24, side, side) + 1000).to(memory_format=torch.channels_last)
        found, _ = launch(x, norm.weight, norm.bias, 4, norm.eps, False)
        wanted, _ = expected(x, norm, False, None, None, None)
        assert toy.relative_error(found.double(), wanted.numpy()) < 1e-4


@interpreted
@torch.no_grad()
def test_blocks_take_the_kernels() -> None:
    """Convolution's bias, timestep and residual connection inside, in a residual block and with a transformer."""
    pair = Block([ResBlock(32, 64, 16), SpatialTransformer(64, 24, 4, 1)])
    toy.fill(pair)
    plain = copy.deepcopy(pair)
    fused_norm.use(pair, triton=True)
    x, emb, context = toy.normal(1, 1, 32, 4, 4), toy.normal(2, 1, 16), toy.normal(3, 1, 5, 24)
    pair[0].in_layers[0] = plain[0].in_layers[0] = toy.fill(nn.GroupNorm(4, 32))  # 32 groups of one are PyTorch's
    fused_norm.use(pair, triton=True)
    calls: list[int] = []
    kernels = importlib.import_module("ldm_lite.runtime.norm_kernels")
    launch = kernels.launch
    kernels.launch = lambda *args, **options: calls.append(len(options)) or launch(*args, **options)
    try:
        found = pair(x, emb, context, None)
    finally:
        kernels.launch = launch
    assert calls == [0, 2, 2], "norm; timestep and bias; residual connection and bias"
    assert toy.relative_error(found, plain(x, emb, context, None).numpy()) < 2e-6
    hook = pair[1].register_forward_hook(lambda module, args, out: 2 * out)
    plain[1].register_forward_hook(lambda module, args, out: 2 * out)
    assert toy.relative_error(pair(x, emb, context, None), plain(x, emb, context, None).numpy()) < 2e-6
    hook.remove()


# ---- machine code ---------------------------------------------------------------------------------------------------


def registers(kernel: Any, capability: int, constants: dict[str, Any], **options: int) -> tuple[int, int]:
    """Registers of a thread, and bytes of stack: what does not fit into registers is spilled there."""
    compiler, backends = (importlib.import_module(f"triton.{each}") for each in ("compiler", "backends.compiler"))
    root = Path(str(importlib.import_module("triton.backends.nvidia").__file__)).parent
    names, signature = kernel.arg_names, {}
    for name in names:
        pointer = "*fp32" if name == "part_ptr" else "*fp16" if name.endswith("_ptr") else None
        signature[name] = "constexpr" if name in constants else pointer or ("fp32" if name == "eps" else "i32")
    source = compiler.ASTSource(
        fn=kernel,
        signature=signature,
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs={(i,): [["tt.divisibility", 16]] for i, name in enumerate(names) if name.endswith("_ptr")},
    )
    made = compiler.compile(source, target=backends.GPUTarget("cuda", capability, 32), options=options)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(made.asm["cubin"])
        file.flush()
        command = [root / "bin" / "cuobjdump", "--dump-resource-usage", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", text)
    assert found is not None, text
    return int(found[1]), int(found[2])


@pytest.mark.slow
@pytest.mark.skipif(INTERPRETED, reason="compiles")
@torch.no_grad()
def test_the_compiler_takes_them_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole block is one graph; it is not run, since there may be no GPU."""
    pair = Block([ResBlock(64, 64, 16), SpatialTransformer(64, 24, 4, 1)])
    fused_norm.use(pair, triton=True)
    monkeypatch.setattr(importlib.import_module("ldm_lite.runtime.norm_kernels"), "runs_on", lambda x: True)
    graphs: list[str] = []

    def backend(graph: torch.fx.GraphModule, inputs: object) -> Any:
        graphs.append(str(graph.graph))
        return lambda *given: (torch.zeros(1, 64, 4, 4),)

    torch._dynamo.reset()
    compiled = torch.compile(pair, fullgraph=True, backend=backend)
    compiled(toy.normal(1, 1, 64, 4, 4), toy.normal(2, 1, 16), toy.normal(3, 1, 5, 24), None)
    torch._dynamo.reset()
    assert len(graphs) == 1
    counts = [graphs[0].count(f"target=torch.ops.ldm_lite.{name}") for name in ("group_norm.", "group_norm_of_sum")]
    assert counts == [2, 1]


@pytest.mark.slow
@pytest.mark.skipif(INTERPRETED, reason="compiles")
@pytest.mark.parametrize("capability", [80, 90, 120])
def test_no_kernel_spills(capability: int) -> None:
    """At every width of Stable Diffusion's norms: 320 channels (10 a group) to 2560."""
    norms = importlib.import_module("ldm_lite.runtime.norm_kernels")
    all_parts = {"HAS_Y": True, "HAS_ADDED": True, "HAS_BIAS": True}
    for pad in (16, 32, 64, 128):
        whole, strips = norms.tiles(pad, 32)
        assert registers(norms.triton_norm_whole, capability, {**all_parts, "SILU": True, **whole}, num_warps=8)[1] == 0
        assert registers(norms.triton_norm_strips, capability, {**all_parts, **strips}, num_warps=4)[1] == 0
        apply = {**strips, "HAS_ADDED": True, "HAS_BIAS": True, "SILU": True, "S": norms.STRIPS}
        assert registers(norms.triton_norm_apply, capability, apply, num_warps=4)[1] == 0
