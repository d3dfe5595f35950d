"""Requests to a backend in another process, and peers that are not installed."""

import io
import json
import sys
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ldm_lite.bench import backends
from ldm_lite.bench.backends import Backend, FirstCall, SubprocessBackend, Unavailable, serve
from ldm_lite.bench.worker import PEERS, PeerWorkload, TorchNetworks, make_backend
from ldm_lite.bench.workload import Cell, Job, Setting, Target
from ldm_lite.zoo.families import FAMILIES

CELL = Cell("step", "fp32", 1)
SETTING = Setting(height=64, width=64, prompt="a", sampler="plms", steps=3, n_iter=2, scale=7.5, seed=1)
TARGET = Target("bundled", None, "cpu", None, SETTING)


class Fake:
    name = "fake"

    def first(self, cell: Cell) -> FirstCall:
        if cell.batch > 1:
            raise Unavailable("out of memory")
        return FirstCall(torch.arange(3.0), 2.0, None)

    def seconds(self, cell: Cell, calls: int) -> float:
        return 0.5 * calls


def make(name: str, target: Target) -> tuple[str, Backend]:
    assert target == TARGET
    if name != "fake":
        raise Unavailable("is not installed (x): pip install x")
    return "a fake", Fake()


def answers(tmp_path: Path, backend: str, *questions: dict[str, object]) -> list[dict[str, Any]]:
    lines = [{"backend": backend, "target": asdict(TARGET), "folder": str(tmp_path)}, *questions]
    out = io.StringIO()
    serve(make, io.StringIO("".join(json.dumps(line) + "\n" for line in lines)), out)
    return [json.loads(line) for line in out.getvalue().splitlines()]


def test_an_error_of_a_kernel_is_that_backends() -> None:
    """No kernel for this device, a driver's error: the other configurations go on."""

    class Work(Job):
        def check(self) -> torch.Tensor:
            return torch.zeros(1)

        def run(self, calls: int) -> None:
            raise RuntimeError("CUDA error: no kernel image is available\n" + "Compile with ... " * 99)

    class Load:
        def job(self, section: str, batch: int) -> Job:
            return Work()

    def fails(dtype: str) -> Load:
        if dtype == "fp16":
            raise RuntimeError('"baddbmm" not implemented')
        return Load()

    backend = backends.InProcessBackend("a", torch.device("cpu"), fails)
    with pytest.raises(Unavailable, match=r'^"baddbmm" not implemented$'):
        backend.first(replace(CELL, dtype="fp16"))
    backend.first(CELL)
    with pytest.raises(Unavailable, match="no kernel image") as caught:
        backend.seconds(CELL, 2)
    assert len(str(caught.value).splitlines()) == 1
    assert len(str(caught.value)) <= 200


def test_a_peers_scheduler_never_waits_for_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """diffusers' schedulers read the value of their timesteps, so those stay on the CPU; meta stands for the GPU."""

    class Scheduler:
        init_noise_sigma = 1.0

        def set_timesteps(self, steps: int, device: torch.device | None = None) -> None:
            self.timesteps = torch.arange(steps, device=device)

        def step(self, out: torch.Tensor, t: torch.Tensor, x: torch.Tensor) -> Any:
            assert int(t) >= 0
            return SimpleNamespace(prev_sample=x + out)

    def unet(x: torch.Tensor, t: torch.Tensor, context: torch.Tensor) -> torch.Tensor:
        assert t.device.type == "meta"
        return x

    peers = SimpleNamespace(schedulers=lambda family: {"plms": Scheduler})
    monkeypatch.setitem(sys.modules, "ldm_lite.bench.peers", peers)  # type: ignore[arg-type]
    monkeypatch.setattr("ldm_lite.bench.peers", peers, raising=False)
    meta = torch.device("meta")
    networks: Any = SimpleNamespace(unet=unet)
    workload = PeerWorkload(networks, FAMILIES["sd1"], SETTING, meta, torch.float32)
    noise, both = torch.zeros(1, 4, 8, 8, device=meta), torch.zeros(2, 77, 768, device=meta)
    assert workload.denoise("plms", 3, noise, both).shape == noise.shape


def test_the_compiled_peer_is_compiled_for_one_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """As ours is: otherwise its second batch runs a graph for all sizes."""
    asked: list[dict[str, Any]] = []
    monkeypatch.setattr(torch, "compile", lambda network, **options: asked.append(options) or network)
    peer = TorchNetworks.__new__(TorchNetworks)
    peer._compiled = True
    monkeypatch.setattr(peer, "_made", lambda role: role)
    assert peer._unet == "unet"
    assert [each["dynamic"] for each in asked] == [False]


def test_serving(tmp_path: Path) -> None:
    described, timed, failed = answers(
        tmp_path,
        "fake",
        {"do": "seconds", "cell": asdict(CELL), "calls": 4},
        {"do": "first", "cell": {**asdict(CELL), "batch": 2}},
    )
    assert described == {"description": "a fake"}
    assert timed == {"seconds": 2.0}
    assert failed == {"unavailable": "out of memory"}
    assert answers(tmp_path, "other") == [{"unavailable": "is not installed (x): pip install x"}]


def test_subprocess(monkeypatch: pytest.MonkeyPatch) -> None:
    """A real process, of a module that needs no torch to start."""
    script = (
        "import json, sys\n"
        "for line in sys.stdin:\n"
        "    asked = json.loads(line)\n"
        "    if 'backend' in asked: answer = {'description': 'it'}\n"
        "    elif asked['calls'] > 2: break\n"
        "    else: answer = {'seconds': 1.5 * asked['calls']}\n"
        "    print(json.dumps(answer), flush=True)\n"
    )
    popen = backends.subprocess.Popen
    monkeypatch.setattr(
        backends.subprocess, "Popen", lambda command, **rest: popen([sys.executable, "-S", "-c", script], **rest)
    )
    with SubprocessBackend("other", TARGET) as other:
        assert (other.name, other.description) == ("other", "it")
        assert other.seconds(CELL, 2) == 3.0
        with pytest.raises(Unavailable, match="its process ended"):
            other.seconds(CELL, 3)


@pytest.mark.parametrize("peer", PEERS)
def test_a_peer_that_is_not_installed_is_one_line(peer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("diffusers", "transformers", "openvino"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(Unavailable, match=r"is not installed .*pip install .*diffusers transformers"):
        make_backend(peer, TARGET)


def test_our_own_configurations_run_apart_too(small_path: Path) -> None:
    title, made = make_backend("math", replace(TARGET, size="", ckpt=str(small_path)))
    assert title == "ours, math attention"
    assert made.first(CELL).result.shape == (1, 4, 8, 8)
    assert made.seconds(CELL, 1) > 0
