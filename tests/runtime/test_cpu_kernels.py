"""Kernels of our own for a CPU: attention in blocks, products by the faster library, and the file of choices."""

import functools
import logging
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import toy
from torch import Tensor, nn
from torch.nn import functional as F

from ldm_lite.cli.options import RuntimeOptions
from ldm_lite.core.layers import Conv1x1
from ldm_lite.core.unet import GEGLU, SpatialTransformer
from ldm_lite.runtime import cpu, timing
from ldm_lite.runtime.patching import is_unmodified, patch_of
from ldm_lite.runtime.setup import prepare_networks

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def choices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file of choices of this test."""
    monkeypatch.setattr(timing, "_CHOICES", {})
    monkeypatch.setattr(timing, "choices_file", lambda: tmp_path / "cache" / "kernels.txt")
    for choice in (cpu._product, cpu._attention):
        monkeypatch.setattr(cpu, choice.__name__, functools.cache(choice.__wrapped__))
    return tmp_path / "cache" / "kernels.txt"


@pytest.fixture
def always(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Make every choice this one, without timing, for products of any size."""

    def choose(name: str) -> None:
        monkeypatch.setattr(cpu, "fastest", lambda what, key, ways, device: name)
        monkeypatch.setattr(cpu, "MIN_PRODUCT", 1)
        monkeypatch.setattr(cpu, "MIN_GEGLU", 1)

    return choose


# ---- attention ------------------------------------------------------------------------------------------------------


def _exact(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = q.double() @ k.double().transpose(-2, -1) * q.shape[-1] ** -0.5
    return scores.softmax(dim=-1) @ v.double()


@pytest.mark.parametrize("sizes", [(1, 1, 5, 7, 3), (2, 3, 600, 300, 40), (1, 5, 513, 257, 8), (3, 1, 1, 1000, 16)])
@pytest.mark.parametrize("bound", [1.0, 59.0, 61.0, 119.0])
@torch.no_grad()
def test_blocks_are_exact(sizes: tuple[int, ...], bound: float, monkeypatch: pytest.MonkeyPatch) -> None:
    batch, heads, n, m, dim = sizes
    q, k, v = (toy.normal(i, batch, count, heads, dim).transpose(1, 2) for i, count in enumerate((n, m, m)))
    centred = k - k.mean(dim=2, keepdim=True)
    lengths = q.norm(dim=-1) * centred.norm(dim=-1).amax(dim=-1, keepdim=True) * dim**-0.5
    q, k = q * (bound / lengths.max()), k + 3 * toy.normal(4, heads, 1, dim)  # a mean that all keys share
    plain, wanted = F.scaled_dot_product_attention(q, k, v), _exact(q, k, v)
    monkeypatch.setattr(cpu, "sdpa", lambda *args: pytest.fail("PyTorch's kernel ran"))
    out = cpu.blocked(q, k, v)
    assert float((out - wanted).abs().max()) <= max(2e-6, 2 * float((plain - wanted).abs().max()))


@pytest.mark.parametrize("length", [90.0, 119.0])
@torch.no_grad()
def test_scores_near_the_limit_lose_nothing(length: float, monkeypatch: pytest.MonkeyPatch) -> None:
    # One query along the longest key, one against it, one across: the bound is far above the maximum of the last two.
    k = torch.zeros(1, 1, 400, 4)
    k[0, 0, 0, 0], k[0, 0, 1, 0] = 1.0, -1.0
    q = torch.tensor([[1.0, 0, 0, 0], [-1.0, 0, 0, 0], [0, 1.0, 0, 0]])[None, None] * length * 2  # / sqrt(4)
    v = toy.normal(1, 1, 1, 400, 4)
    monkeypatch.setattr(cpu, "sdpa", lambda *args: pytest.fail("PyTorch's kernel ran"))
    out = cpu.blocked(q, k, v)
    assert float((out - _exact(q, k, v)).abs().max()) < 1e-5


@pytest.mark.parametrize("bound", [10.0, 100.0])
@torch.no_grad()
def test_blocks_in_bfloat16_round_as_pytorchs_kernel_does(bound: float, monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = (toy.normal(i, 2, 3, 600, 40).bfloat16() for i in range(3))
    q = q * (bound / float(q.norm(dim=-1).max() * k.norm(dim=-1).max() * 40**-0.5))
    plain, wanted = F.scaled_dot_product_attention(q, k, v), _exact(q, k, v)
    if cpu.HALF:  # elsewhere bfloat16 is emulated
        monkeypatch.setattr(cpu, "sdpa", lambda *args: pytest.fail("PyTorch's kernel ran"))
    out = cpu.blocked(q, k, v)
    assert out.dtype == torch.bfloat16
    assert float((out - wanted).norm()) < 2 * float((plain - wanted).norm()) < 1e-2 * float(wanted.norm())


@pytest.mark.parametrize("wrong", ["far", "nan", "half", "training"])
def test_other_inputs_take_pytorchs_kernel(wrong: str) -> None:
    q, k, v = (toy.normal(i, 1, 2, 300, 8) for i in range(3))
    if wrong == "far":
        q = q * 1000
    if wrong == "nan":
        k[0, 0, 5, 2] = float("nan")
    if wrong == "half":
        q, k, v = q.half(), k.half(), v.half()
    with torch.set_grad_enabled(wrong == "training"):
        out, wanted = cpu.blocked(q, k, v), F.scaled_dot_product_attention(q, k, v)
    assert torch.equal(out.nan_to_num(7), wanted.nan_to_num(7))


def test_training_in_bfloat16_takes_the_plain_formula() -> None:
    """With gradients like those of PyTorch's kernel in float32; autocast computes the softmax in float32."""
    q, k, v = (toy.normal(i, 2, 3, 40, 8) for i in range(3))
    results = []
    for attention, dtype in ((F.scaled_dot_product_attention, torch.float32), (cpu.attention, torch.bfloat16)):
        inputs = [x.clone().to(dtype).requires_grad_() for x in (q, k, v)]
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
            out: Tensor = attention(*inputs)
        assert out.dtype == dtype
        out.float().square().sum().backward()
        results.append([out.detach().float(), *(x.grad.float() for x in inputs if x.grad is not None)])
    for wanted, result in zip(*results, strict=True):
        assert toy.relative_error(result, wanted.numpy()) < 2e-2


@pytest.mark.parametrize("name", ["sdpa", "blocked"])
@torch.no_grad()
def test_attention_takes_the_choice(name: str, always: Callable[[str], None], monkeypatch: pytest.MonkeyPatch) -> None:
    always(name)
    monkeypatch.setattr(cpu, "MIN_KEYS", 8)
    monkeypatch.setattr(cpu, "MIN_SCORES", 8)
    q, k, v = (toy.normal(i, 2, 2, 20, 8) for i in range(3))
    kernel: Any = cpu.blocked if name == "blocked" else F.scaled_dot_product_attention
    assert torch.equal(cpu.attention(q, k, v), kernel(q, k, v))


# ---- products -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("missing", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@torch.no_grad()
def test_products_of_both_libraries(
    missing: bool, bias: bool, always: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    always("onednn")
    if missing:  # from this build of torch
        monkeypatch.setattr(cpu, "_ONEDNN", None)
    network = toy.fill(nn.Sequential(nn.Linear(24, 40, bias=bias), nn.Linear(40, 8)))
    x = toy.normal(1, 2, 3, 5, 24)
    wanted = network(x)
    cpu.use(network)
    assert [patch_of(layer) for layer in network] == [cpu._linear] * 2
    assert is_unmodified(network)
    assert toy.relative_error(network(x), wanted.numpy()) < 1e-6
    strided = x.transpose(1, 2)
    assert toy.relative_error(network(strided), wanted.transpose(1, 2).numpy()) < 1e-6
    conv = toy.fill(Conv1x1(24, 16))
    image = toy.normal(2, 2, 24, 3, 5)
    wanted = conv(image)
    cpu.use(conv)
    assert toy.relative_error(conv(image), wanted.numpy()) < 1e-6


@pytest.mark.parametrize("missing", [False, True])
@torch.no_grad()
def test_a_gate_within_the_products(
    missing: bool, always: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    always("onednn")
    if missing:  # from this build of torch
        monkeypatch.setattr(cpu, "_ONEDNN", None)
    layer, x = toy.fill(GEGLU(24, 40)), toy.normal(1, 2, 5, 24)
    wanted = toy.fill(GEGLU(24, 40)).double()(x.double())
    cpu.use(layer)
    assert patch_of(layer) is cpu._geglu
    assert is_unmodified(layer)
    assert toy.relative_error(layer(x), wanted.numpy()) < 1e-6
    strided = x.transpose(0, 1)
    assert toy.relative_error(layer(strided), wanted.transpose(0, 1).numpy()) < 1e-6
    half = toy.fill(GEGLU(24, 40)).bfloat16()
    plain = half(x.bfloat16())
    cpu.use(half)
    out = half(x.bfloat16())
    assert out.dtype == torch.bfloat16
    assert float((out - wanted).norm()) < 1.1 * float((plain - wanted).norm()), "no less exact than PyTorch's"


@pytest.mark.parametrize("change", ["hook", "another layer", "training"])
def test_a_gate_whose_linear_is_changed_calls_it(change: str, always: Callable[[str], None]) -> None:
    always("onednn")
    layer, x, calls = toy.fill(GEGLU(8, 8)).requires_grad_(), toy.normal(1, 4, 8), list[str]()
    wanted = layer(x)
    cpu.use(layer)
    if change == "hook":
        layer.proj.register_forward_hook(lambda *args: calls.append("hook"))
    if change == "another layer":
        layer.proj = nn.Sequential(layer.proj, nn.Identity())
    with torch.set_grad_enabled(change == "training"):
        out = layer(x)
    assert toy.relative_error(out.detach(), wanted.detach().numpy()) < 1e-6
    assert calls == ["hook"] * (change == "hook")
    assert out.requires_grad == (change == "training")


@torch.no_grad()
def test_autocast_takes_pytorchs_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights have another dtype than what they multiply, so nothing is timed and no choice is kept."""
    monkeypatch.setattr(cpu, "MIN_PRODUCT", 1)
    monkeypatch.setattr(cpu, "MIN_GEGLU", 1)
    monkeypatch.setattr(cpu, "fastest", lambda *args: pytest.fail("timed"))
    layer, x = toy.fill(nn.Sequential(nn.Linear(24, 24), GEGLU(24, 40))), toy.normal(1, 2, 5, 24)
    with torch.autocast("cpu", torch.bfloat16):
        wanted = layer(x)
        cpu.use(layer)
        assert torch.equal(layer(x), wanted)


@pytest.mark.parametrize("name", ["torch", "onednn"])
@torch.no_grad()
def test_winograds_products(name: str, always: Callable[[str], None]) -> None:
    always(name)
    x, weight, bias = toy.normal(1, 2, 9, 13, 11), toy.normal(2, 7, 9, 3, 3), toy.normal(3, 7)
    wanted = F.conv2d(x.double(), weight.double(), bias.double(), padding=1)
    for m in (2, 4):
        assert toy.relative_error(cpu.filtered(x, weight, bias, m), wanted.numpy()) < 1e-5


def test_training_takes_pytorchs_layers(always: Callable[[str], None]) -> None:
    always("onednn")
    layer, x = toy.fill(nn.Linear(8, 8)).requires_grad_(), toy.normal(1, 4, 8)
    wanted = layer(x)
    cpu.use(layer)
    assert torch.equal(layer(x), wanted)
    layer(x).sum().backward()
    assert layer.weight.grad is not None


def test_plain_takes_no_kernel_of_ours() -> None:
    kernels = {cpu._linear, cpu._conv1x1, cpu._conv3x3, cpu._geglu}

    def ours(option: str | None) -> set[object]:
        network = nn.Sequential(SpatialTransformer(128, 16, 2, 1), nn.Conv2d(128, 128, 3, padding=1))
        prepare_networks({"vae": network}, RuntimeOptions(kernels=option), CPU)
        attentions = {module.attention for module in network.modules() if hasattr(module, "attention")}
        return {patch_of(module) for module in network.modules()} & kernels | attentions

    assert ours("plain") == {cpu.sdpa}
    assert ours(None) > {cpu.attention, cpu._conv3x3}


# ---- choices --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("product", "taken"), [(0.5, True), (0.98, False), (2.0, False)])
def test_a_way_must_clearly_beat_the_default(product: float, taken: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = {"convolution": 1.0, "product": product}
    monkeypatch.setattr(timing, "_seconds", lambda way, device: seconds[way()])
    ways = {"convolution": lambda: "convolution", "product": lambda: "product"}
    assert timing.fastest("a convolution", (3, 4), ways, CPU) == ("product" if taken else "convolution")


@torch.no_grad()
def test_a_way_that_does_not_run_is_left_out(caplog: pytest.LogCaptureFixture) -> None:
    def broken() -> None:
        raise TypeError("no compiler\nmore")

    with caplog.at_level(logging.INFO, "ldm_lite"):
        assert timing.fastest("a product", object(), {"plain": lambda: None, "broken": broken}, CPU) == "plain"
    assert "a product: broken does not run here (no compiler)" in caplog.text
    with pytest.raises(TypeError):
        timing.fastest("a product", object(), {"broken": broken}, CPU)
    with caplog.at_level(logging.INFO, "ldm_lite"):
        assert timing.fastest("a product", object(), {"plain": lambda: None, "large": _too_large}, CPU) == "plain"
    assert "a product: large does not run here (too large)" in caplog.text
    with pytest.raises(torch.OutOfMemoryError):
        timing.fastest("a product", object(), {"large": _too_large}, CPU)


def _too_large() -> None:
    raise torch.OutOfMemoryError("too large")


# ---- the file of choices --------------------------------------------------------------------------------------------


def _choose(first: str, second: str = "other") -> str:
    """Choose between two ways of which the second is instant."""
    return timing.fastest("a product", (3, 4), {first: lambda: sum(range(20000)), second: int}, CPU)


def test_choices_are_kept(choices: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert _choose("slow") == "other"
    assert choices.read_text() == f"{timing.machine()}\ta product, (3, 4)\tother\n"
    monkeypatch.setattr(timing, "_CHOICES", {})
    monkeypatch.setattr(timing, "_seconds", lambda *args: pytest.fail("timed again"))
    assert _choose("slow") == "other"
    assert timing.summary() == f"1 kernels timed, {choices}"


def test_the_first_process_decides(choices: Path) -> None:
    ways = {"slow", "other"}
    choice = timing._remember("a product, (3, 4)", "slow", ways)
    assert timing._remember("a product, (3, 4)", "other", ways) == choice == "slow"
    assert _choose("slow") == "slow"


@pytest.mark.parametrize("text", ["", "a line", "\t\t", "a\tb", "a\tb\tc\td\n", "\xff"])
def test_a_broken_file_is_written_on(text: str, choices: Path, caplog: pytest.LogCaptureFixture) -> None:
    choices.parent.mkdir(parents=True)
    choices.write_text(text, encoding="latin-1")
    assert _choose("slow") == "other"
    assert "a product, (3, 4)" in choices.read_text("latin-1")
    timing._CHOICES.clear()
    assert _choose("other", "slow") == "other", "the choice is kept"


def test_an_unknown_name_in_the_file_is_timed_again(choices: Path) -> None:
    timing._remember("a product, (3, 4)", "removed", {"removed"})
    assert _choose("slow") == "other"


def test_a_folder_that_cannot_be_written(choices: Path, caplog: pytest.LogCaptureFixture) -> None:
    choices.parent.write_text("a file in place of the folder")
    with caplog.at_level(logging.WARNING, "ldm_lite"):
        assert _choose("slow") == "other"
    assert "cannot be written" in caplog.text


def test_one_thread_times_at_a_time(choices: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread that asks meanwhile waits, and takes the answer of the first, though no file can be written."""
    choices.parent.write_text("a file in place of the folder")
    timed, answers = list[str](), list[str]()

    def choose(fast: str) -> None:
        ways = {name: functools.partial(float, 1 if name == fast else 2) for name in ("one", "other")}
        answers.append(timing.fastest("a product", (3, 4), ways, CPU))

    def seconds(way: Callable[[], float], device: torch.device) -> float:
        timed.append(threading.current_thread().name)
        if len(timed) == 1:
            second.start()
            second.join(0.2)
        return way()

    second = threading.Thread(target=choose, args=("one",), name="second")
    monkeypatch.setattr(timing, "_seconds", seconds)
    choose("other")
    second.join()
    assert "second" not in timed
    assert answers == ["other", "other"]


def test_what_is_timed_may_time_its_parts() -> None:
    def whole() -> str:
        return timing.fastest("a part", (3, 4), {"one": lambda: None, "other": lambda: None}, CPU)

    asked = threading.Thread(target=lambda: timing.fastest("a whole", (3, 4), {"one": whole}, CPU), daemon=True)
    asked.start()
    asked.join(60)
    assert not asked.is_alive()
