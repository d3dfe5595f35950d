"""A network compiled ahead of time runs on its own weights, and only for its compiled shapes.

The compiler is slow: only the slow test runs it; the others use a stand-in for its output.
"""

import copy
import json
import zipfile
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from ldm_lite.runtime import aot


class Tiny(nn.Module):
    """Called as a UNet is."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: Tensor, t: Tensor, context: Tensor | None = None, y: Tensor | None = None) -> Tensor:
        out = x @ self.inner.weight + t[:, None]
        return out if context is None else out + context.mean(dim=1)


class Runner:
    """Stands for a compiled Tiny: torch's loader has these methods."""

    def __init__(self, batch: int) -> None:
        self.about = json.dumps(aot._about(network(), inputs(batch)))

    def get_metadata(self) -> dict[str, str]:
        return {aot.ABOUT: self.about, "AOTI_PLATFORM": "linux"}

    def get_constant_fqns(self) -> list[str]:
        return ["inner.weight"]

    def load_constants(self, constants: dict[str, Tensor], inactive: bool, full: bool, user_managed: bool) -> None:
        assert (inactive, full, user_managed) == (False, True, True)
        self.weight = constants["inner.weight"]

    def boxed_run(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        x, t, context = tensors
        assert all(tensor.is_contiguous() for tensor in tensors)
        return [x @ self.weight + t[:, None] + context.mean(dim=1)]


def network(seed: int = 0) -> Tiny:
    torch.manual_seed(seed)
    return Tiny().requires_grad_(False)


def inputs(batch: int) -> tuple[Tensor, Tensor, Tensor]:
    """As the denoising loop gives them: t is expanded."""
    return torch.randn(batch, 4), torch.full((), 7.0).expand(batch), torch.randn(batch, 3, 4)


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    runners = [Runner(2), Runner(4)]
    monkeypatch.setattr(aot, "_runners", lambda path: runners)
    return tmp_path / "tiny.pt2"


def check(package: Path) -> None:
    """A package for batches of 2 and 4 computes what the network does, on that network's weights."""
    for seed in (0, 1):
        compiled, plain = network(seed), network(seed)
        aot.use(compiled, package)
        for batch in (2, 4):
            arguments = inputs(batch)
            assert torch.allclose(compiled(*arguments), plain(*arguments), atol=1e-5)
            assert torch.allclose(compiled(*arguments, None), plain(*arguments), atol=1e-5)
        for model in (compiled, plain):
            model.inner.weight.mul_(2)  # as a LoRA is merged
        assert torch.allclose(compiled(*arguments), plain(*arguments), atol=1e-5)


def test_it_computes_the_same_on_the_weights_of_the_network(package: Path) -> None:
    check(package)


def test_a_copy_runs_the_package_on_its_own_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(aot, "_runners", lambda path: [Runner(2)])
    compiled, arguments = network(), inputs(2)
    aot.use(compiled, tmp_path / "tiny.pt2")
    wanted = compiled(*arguments)
    copied = copy.deepcopy(compiled)
    copied.inner.weight.zero_()
    _, t, context = arguments
    assert torch.allclose(copied(*arguments), t[:, None] + context.mean(dim=1))
    assert torch.equal(compiled(*arguments), wanted)


@pytest.mark.slow
@pytest.mark.needs("C++ compiler")
def test_real_compilation(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "tiny.pt2"
    aot.export(network(), [tuple(tensor.contiguous() for tensor in inputs(batch)) for batch in (2, 4)], path)
    assert [file.name for file in path.parent.iterdir()] == ["tiny.pt2"]
    check(path)
    truncated = tmp_path / "truncated.pt2"
    with zipfile.ZipFile(path) as whole, zipfile.ZipFile(truncated, "w") as part:
        for item in whole.infolist():
            part.writestr(item, b"" if item.filename.endswith(".so") else whole.read(item))
    with pytest.raises(ValueError, match="cannot be loaded by torch"):
        aot.use(network(), truncated)


def test_what_it_was_not_compiled_for_is_one_line(package: Path) -> None:
    compiled = network()
    aot.use(compiled, package)
    with pytest.raises(ValueError, match=r"tiny.pt2 is compiled for 2x4 fp32, .*; or 4x4 fp32, .*; got 3x4 fp32, "):
        compiled(*inputs(3))
    x, t, context = inputs(2)
    with pytest.raises(ValueError, match="got 2x4 fp32, 2 fp32: export it for that too"):
        compiled(x, t)
    assert torch.equal(compiled(x.bfloat16(), t, context), compiled(x.bfloat16().float(), t, context))
    with pytest.raises(ValueError, match="a UNet without controls: leave out `control`"):
        compiled(x, t, context, residuals=())


def test_a_package_of_another_network_is_one_line(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="was exported for fp32, and this is bf16"):
        aot.use(network().bfloat16(), package)
    wider = network()
    wider.inner = nn.Linear(4, 5)
    with pytest.raises(ValueError, match="was exported from a different network"):
        aot.use(wider, package)
    turned = network()
    turned.inner.weight.data = turned.inner.weight.data.t().contiguous().t()  # the same shapes, otherwise in memory
    with pytest.raises(ValueError, match="was exported from a different network"):
        aot.use(turned, package)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX9000")
    with pytest.raises(ValueError, match="and this is cpu with AVX9000"):
        aot.use(network(), package)
    monkeypatch.setattr(Runner, "get_metadata", lambda self: {})
    with pytest.raises(ValueError, match=r"was not written by ldm_lite.export"):
        aot.use(network(), package)


def test_a_file_that_is_no_package_is_one_line(tmp_path: Path) -> None:
    path = tmp_path / "x.pt2"
    path.write_bytes(b"no zip")
    with pytest.raises(ValueError, match=r"is not a package of ldm_lite.export"):
        aot.use(network(), path)
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("a", "b")
    with pytest.raises(ValueError, match=r"is not a package of ldm_lite.export"):
        aot.use(network(), path)
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("x/data/aotinductor/model0/a.so", "no library")
    with pytest.raises(ValueError, match=r"is not a package of ldm_lite.export"):
        aot.use(network(), path)
    with zipfile.ZipFile(path, "a") as file:
        file.writestr("x/data/aotinductor/model0/a_metadata.json", "{}")
    with pytest.raises(ValueError, match="cannot be loaded by torch"):
        aot.use(network(), path)
    with pytest.raises(FileNotFoundError):
        aot.use(network(), tmp_path / "none.pt2")


@pytest.mark.slow
def test_a_machine_that_cannot_compile_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor.exc import InvalidCxxCompiler

    def fail(*args: object, **kwargs: object) -> None:
        raise InvalidCxxCompiler

    monkeypatch.setattr(torch._inductor, "aot_compile", fail)
    with pytest.raises(ValueError, match=r"cannot be compiled here \(No working C"):
        aot.export(network(), [inputs(2)], tmp_path / "x.pt2")
    assert not list(tmp_path.iterdir())
