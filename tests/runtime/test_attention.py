"""Every attention backend against every other, the errors, and attention maps by layer name."""

import copy
import functools
import itertools
import logging
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import toy
from random_checkpoint import SMALL
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter

import ldm_lite
from ldm_lite import Pipeline
from ldm_lite.core.vae import AutoencoderKL
from ldm_lite.runtime import attention, timing
from ldm_lite.runtime.attention import attention_function, available, head_dim, layers, names, use

CPU = torch.device("cpu")
HERE = [name for name in available(CPU, torch.float32, 40) if name not in ("mha", "fastest")] + ["sliced:1", "sliced:3"]
# (B, H, N, M, D): the widths of Stable Diffusion's heads, text, one token, odd and prime lengths
SHAPES = [
    (2, 8, 96, 96, 40),
    (2, 8, 63, 77, 40),
    (1, 2, 37, 37, 80),
    (3, 1, 5, 154, 160),
    (1, 1, 1, 1, 64),
    (1, 1, 49, 49, 512),
]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def qkv(shape: tuple[int, ...], dtype: torch.dtype) -> list[Tensor]:
    """As the layers make them: heads split by a view, so that nothing is contiguous."""
    b, h, n, m, d = shape
    return [toy.normal(i, b, length, h, d).to(dtype).transpose(1, 2) for i, length in enumerate((n, m, m))]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_all_backends_agree(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    q, k, v = qkv(shape, dtype)
    outs = {name: attention_function(name, CPU, dtype, shape[-1])(q, k, v) for name in HERE}
    tolerance = {torch.float32: 2e-6, torch.bfloat16: 2e-2, torch.float16: 3e-3}[dtype]
    for first, second in itertools.combinations(outs, 2):
        assert outs[first].shape == q.shape
        assert outs[first].dtype == dtype
        assert toy.relative_error(outs[first].float(), outs[second].float().numpy()) < tolerance, (first, second)


def test_vanilla_is_the_formula() -> None:
    q, k, v = (x.double() for x in qkv((1, 2, 7, 5, 40), torch.float32))
    logits = torch.einsum("bhnd,bhmd->bhnm", q, k) / 40**0.5
    weights = logits.exp() / logits.exp().sum(-1, keepdim=True)
    torch.testing.assert_close(attention_function("vanilla", CPU, torch.float64, 40)(q, k, v), weights @ v)


@pytest.fixture
def unet() -> nn.Module:
    return toy.network(SMALL.unet)


@pytest.fixture
def pipe(small_path: Path) -> Pipeline:
    """With the UNet of SMALL, whose latents (2,4,8,12) and texts of 5 tokens are toy.unet_inputs."""
    return ldm_lite.load(small_path, device="cpu")


@pytest.mark.parametrize(
    "name", ["sdpa", "vanilla", "math", "flash", "sliced", "sliced:1", "sliced:3", "blocked", "mha", "fastest"]
)
def test_a_network_gives_the_same_with_each(name: str, pipe: Pipeline) -> None:
    x, context, _ = toy.unet_inputs(SMALL.unet)
    wanted, keys = pipe.unet(x, toy.T, context), list(pipe.unet.state_dict())
    pipe.use_attention(name)
    assert toy.relative_error(pipe.unet(x, toy.T, context), wanted.numpy()) < 2e-6
    assert list(pipe.unet.state_dict()) == keys
    pipe.use_attention("sdpa")
    assert torch.equal(pipe.unet(x, toy.T, context), wanted)


def test_each_name_has_an_effect(unet: nn.Module) -> None:
    layer = layers(unet)["middle_block.1.transformer_blocks.0.attn1"]
    seen = []
    for name in HERE:
        use(unet, name)
        seen.append(layer.attention)
    assert len(set(seen)) == len(seen)


def test_mha_runs_torchs_own(pipe: Pipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    original = nn.functional.multi_head_attention_forward
    monkeypatch.setattr(
        nn.functional, "multi_head_attention_forward", lambda *a, **k: calls.append(1) or original(*a, **k)
    )
    x, context, _ = toy.unet_inputs(SMALL.unet)
    pipe.use_attention("mha")
    copied = copy.deepcopy(pipe.unet)
    nn.init.zeros_(copied.get_submodule("middle_block.1.transformer_blocks.0.attn1").to_out[0].weight)  # type: ignore[index,union-attr]
    assert not torch.equal(copied(x, toy.T, context), pipe.unet(x, toy.T, context))  # the copy has its own weights
    assert len(calls) == 2 * 8  # of itself and of the text, in four transformers


class Timings:
    """Stands for the clock: flash is twice as fast for heads of 8 channels, and no faster than sdpa for others."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.timed: list[tuple[int, ...]] = []
        monkeypatch.setattr(timing, "_CHOICES", {})
        monkeypatch.setattr(timing, "_read", dict)
        monkeypatch.setattr(timing, "_seconds", self.seconds)

    def seconds(self, way: functools.partial[Tensor], device: torch.device) -> float:
        function, (q, k, _) = way.func, way.args
        self.timed.append((*q.shape, k.shape[2]))
        flash = function is attention._FUNCTIONS["flash"]
        first = 1.0 if self.timed.count(self.timed[-1]) <= 4 else 0.0  # the first round warms up
        return first + (0.5 if flash and q.shape[-1] == 8 else 0.99 if flash else 1.0)


def test_the_fastest_is_chosen_for_each_layer_at_its_first_call(
    unet: nn.Module, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    clock, (x, context, _) = Timings(monkeypatch), toy.unet_inputs(SMALL.unet)
    wanted = unet(x, toy.T, context)
    use(unet, "fastest")
    with caplog.at_level(logging.DEBUG, "ldm_lite"), torch.no_grad():
        out = unet(x, toy.T, context)
    assert toy.relative_error(out, wanted.numpy()) < 2e-6
    functions = {head_dim(layer): layer.attention for layer in layers(unet).values()}
    assert functions == {8: attention._flash, 16: attention.sdpa}
    assert all(clock.timed.count(sizes) == 4 * 7 for sizes in clock.timed), "each size once, though layers repeat it"
    assert "96 to 5 tokens, 8 channels a head: flash (sdpa 1000000 us, flash 500000 us" in caplog.text
    count = len(clock.timed)
    use(unet, "fastest")
    with torch.no_grad():
        unet(x, toy.T, context)
    assert len(clock.timed) == count, "what is known is not timed again"


@pytest.mark.slow
def test_compiled_code_has_the_chosen_kernel(unet: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    clock, (x, context, _) = Timings(monkeypatch), toy.unet_inputs(SMALL.unet)
    use(unet, "fastest")
    twin = toy.network(SMALL.unet)
    attention.use_like(twin, unet)
    copied = copy.deepcopy(unet)
    with torch.no_grad():
        wanted = unet(x, toy.T, context)
    for network in (twin, copied):
        assert all(layer.attention.layer is layer for layer in layers(network).values()), "each has its own choice"
    torch._dynamo.reset()
    count, counter = len(clock.timed), CompileCounter()
    with torch.no_grad():
        out = torch.compile(unet, fullgraph=True, backend=counter)(x, toy.T, context)
        traced = torch.compile(copied, fullgraph=True, backend="eager")(x, toy.T, context)  # before any choice
    assert toy.relative_error(out, wanted.numpy()) < 2e-6
    assert toy.relative_error(traced, wanted.numpy()) < 2e-6
    assert (len(clock.timed), counter.frame_count) == (count, 1)


def test_a_fork_brings_its_own(pipe: Pipeline) -> None:
    x, context, _ = toy.unet_inputs(SMALL.unet)
    before = pipe.unet(x, toy.T, context)
    pipe.use_attention(lambda q, k, v: torch.zeros_like(q))
    assert not torch.allclose(pipe.unet(x, toy.T, context), before)


def test_a_registered_function_is_used_by_its_name(unet: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "_FUNCTIONS", dict(attention._FUNCTIONS))

    def average(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return v.mean(dim=2, keepdim=True).expand_as(q)

    attention.register("average", average)
    assert "average" in available(CPU, torch.float32)
    use(unet, "average")
    assert {layer.attention for layer in layers(unet).values()} == {average}
    with pytest.raises(ValueError, match=r"unknown attention 'other': expected one of sdpa, .*, average, mha"):
        use(unet, "other")
    for name in ("average", "sdpa", "mha", "sliced:9"):
        with pytest.raises(ValueError, match=f"attention '{name}' exists already"):
            attention.register(name, average)


def test_cudnns_attention_refuses_float32() -> None:
    """torch checks only for bfloat16, and has cuDNN read all other numbers as float16."""
    q = torch.zeros(1, 1, 16, 64)
    with pytest.raises(NotImplementedError, match="for fp16 and bf16, not for fp32"):
        attention._cudnn(q, q, q)


def test_an_autoencoder_that_overflows_runs_in_float32_without_attention_for_half_precision(
    small_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(attention, "_FUNCTIONS", dict(attention._FUNCTIONS))

    def half(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if q.dtype == torch.float32:
            raise NotImplementedError("as cuDNN's")
        return attention.vanilla(q, k, v)

    attention.register("half", half)
    pipe = ldm_lite.load(small_path, device="cpu", dtype="fp16", attention="half", kernels="plain")
    for part in (pipe.vae.encoder, pipe.vae.decoder):
        part.conv_in.weight.data *= 1e5  # the norms after it take it back
    latents = pipe.encode(torch.rand(1, 3, 32, 32, generator=torch.Generator().manual_seed(0)))
    assert torch.isfinite(pipe.decode(latents, output="tensor")[0]).all()
    assert caplog.text.count("the autoencoder overflows in float16") == 2
    assert {layer.attention for layer in layers(pipe.vae).values()} == {half}


def test_two_networks_have_two_backends(unet: nn.Module) -> None:
    vae = AutoencoderKL(SMALL.vae)
    use(unet, "vanilla")
    use(vae, "math")
    assert {layer.attention for layer in layers(unet).values()} != {layer.attention for layer in layers(vae).values()}


def test_an_unavailable_backend_is_one_line(unet: nn.Module) -> None:
    before = [layer.attention for layer in layers(unet).values()]
    for name in sorted(set(names()) - set(available(CPU, torch.float32))):
        with pytest.raises(ValueError, match=rf"^attention '{name}' is not available on cpu in fp32.*use one of sdpa"):
            use(unet, name)
    for name in ("xformers", "sliced:0", "sliced:x", "mha:2", ""):
        with pytest.raises(ValueError, match="unknown attention"):
            use(unet, name)
    with pytest.raises(ValueError, match=r"'mha' needs layers with to_q.*mid.attn_1"):
        use(AutoencoderKL(SMALL.vae), "mha")
    with pytest.raises(ValueError, match="Linear has no attention layers"):
        use(nn.Linear(2, 2), "sdpa")
    assert [layer.attention for layer in layers(unet).values()] == before


@pytest.mark.parametrize("name", ["sdpa", "math", "flash", "vanilla", "sliced", "mha"])
def test_gradients_flow(name: str, pipe: Pipeline) -> None:
    network = pipe.unet.requires_grad_(True)
    pipe.use_attention(name)
    x, context, _ = toy.unet_inputs(SMALL.unet)
    network(x, toy.T, context).square().sum().backward()
    assert all(p.grad is not None and torch.isfinite(p.grad).all() for p in network.parameters())


@pytest.mark.slow
@pytest.mark.usefixtures("compiles_once")
@pytest.mark.parametrize("name", ["math", "flash", "vanilla", "sliced", "mha"])
def test_each_compiles_to_one_graph(name: str) -> None:
    spec = replace(SMALL.unet, transformer_depth=(0, 0))  # a transformer in the middle
    unet, counter = toy.network(spec), CompileCounter()
    use(unet, name)
    x, context, _ = toy.unet_inputs(spec)
    compiled = torch.compile(unet, fullgraph=True, backend=counter)
    for t in (toy.T, toy.T_FRACTIONAL):
        torch.testing.assert_close(compiled(x, t, context), unet(x, t, context))
    assert counter.frame_count == 1


# ---- maps -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["sdpa", "mha"])
def test_maps_by_layer_name(name: str, pipe: Pipeline) -> None:
    pipe.use_attention(name)
    x, context, _ = toy.unet_inputs(SMALL.unet)  # latents 8 by 12, 5 tokens of text
    before = pipe.unet(x, toy.T, context)
    with pipe.attention_maps("*attn2") as maps:
        for _ in range(2):
            torch.testing.assert_close(pipe.unet(x, toy.T, context), before, rtol=1e-4, atol=1e-5)
    assert "middle_block.1.transformer_blocks.0.attn2" in maps
    assert not any("attn1" in layer for layer in maps)
    shapes = {layer: [tuple(tensor.shape) for tensor in value] for layer, value in maps.items()}
    assert shapes["input_blocks.1.1.transformer_blocks.0.attn2"] == [(2, 4, 96, 5)] * 2
    for layer_maps in maps.values():
        torch.testing.assert_close(layer_maps[0].sum(-1), torch.ones(layer_maps[0].shape[:-1]))
    assert torch.equal(pipe.unet(x, toy.T, context), before)
    assert all(len(layer_maps) == 2 for layer_maps in maps.values())


def test_a_map_is_that_of_the_layers_own_queries_and_keys(pipe: Pipeline) -> None:
    name = "middle_block.1.transformer_blocks.0.attn2"
    x, context, _ = toy.unet_inputs(SMALL.unet)
    seen: list[Tensor] = []
    handle = pipe.unet.get_submodule(name).to_q.register_forward_hook(lambda module, args, out: seen.append(out))  # type: ignore[union-attr]
    with pipe.attention_maps(name) as maps:
        pipe.unet(x, toy.T, context)
    handle.remove()
    q = seen[0].unflatten(2, (4, -1))
    k = pipe.unet.get_submodule(name).to_k(context).unflatten(2, (4, -1))  # type: ignore[operator]
    logits = torch.einsum("bnhd,bmhd->bhnm", q, k) * q.shape[-1] ** -0.5
    torch.testing.assert_close(maps[name][0], logits.softmax(-1))


def test_recording_nothing_is_an_error(pipe: Pipeline) -> None:
    with pytest.raises(ValueError, match=r"no attention layer matches '\*attn3': they are input_blocks\.1\.1"):
        pipe.attention_maps("*attn3").__enter__()


# ---- FlashAttention 3 -----------------------------------------------------------------------------------------------


def test_flash3_is_called_as_its_package_wants_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """With heads after tokens; compiled code has it as one operator.  No CPU runs the package itself."""
    q, k, v = qkv((2, 8, 63, 77, 40), torch.float32)
    with pytest.raises(ValueError, match="attention 'flash3' is not available on cpu in fp32 for heads of 40 channels"):
        attention_function("flash3", CPU, torch.float32, 40)

    def flash_attn_func(*heads: Tensor) -> Tensor:
        return attention.vanilla(*(x.transpose(1, 2) for x in heads)).transpose(1, 2)

    monkeypatch.setitem(sys.modules, "flash_attn_interface", SimpleNamespace(flash_attn_func=flash_attn_func))
    flash3, counter = attention_function("flash3", CPU, torch.float32, 40), CompileCounter()
    for function in (flash3, torch.compile(lambda *qkv: flash3(*qkv), backend=counter, fullgraph=True)):
        torch.testing.assert_close(function(q, k, v), attention.vanilla(q, k, v))
    assert (counter.frame_count, counter.op_count) == (1, 1)
    assert attention.is_stateless(flash3), "a CUDA graph may hold it"
    assert "flash3" in attention.CANDIDATES[:-1], "timed on CUDA"
