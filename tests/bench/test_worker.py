"""A backend in a process of its own, and peers that are not installed."""

import os
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch._inductor.config as inductor

from ldm_lite.bench.options import PEERS, BenchOptions
from ldm_lite.bench.theirs import PeerWorkload
from ldm_lite.bench.work import Cell, OutOfTime, Unavailable
from ldm_lite.bench.worker import Backend, FirstCall, InProcessBackend, SubprocessBackend, make_backend

CELL = Cell("step", "fp32", 1)
OPTIONS = BenchOptions(size="bundled", device="cpu", height=64, width=64, prompt="a", steps=3)


class Fake:
    name = "fake"

    def first(self, cell: Cell) -> FirstCall:
        print("what a library prints")
        if cell.batch > 1:
            raise Unavailable("out of memory")
        return FirstCall(torch.arange(3.0), 2.0, None)

    def seconds(self, cell: Cell, calls: int) -> float:
        if calls > 2:
            os._exit(3)
        return float(os.getpid())


def make(name: str, options: BenchOptions) -> tuple[str, Backend]:
    assert options == OPTIONS
    if name != "fake":
        raise Unavailable("is not installed (x): pip install x")
    return "a fake", Fake()


class Endless(Fake):
    def seconds(self, cell: Cell, calls: int) -> float:
        time.sleep(600)
        return 0.0


def make_endless(name: str, options: BenchOptions) -> tuple[str, Backend]:
    return "endless", Endless()


@pytest.mark.slow
def test_at_the_deadline_what_runs_is_stopped() -> None:
    """While it computes, while its process starts, and afterwards."""
    with SubprocessBackend("fake", OPTIONS, make_endless, deadline=time.monotonic() + 60) as backend:
        assert backend.first(CELL).seconds == 2.0
        backend._deadline = start = time.monotonic() + 0.2
        for _ in range(2):
            with pytest.raises(OutOfTime, match="stopped for lack of time: the `minutes` are over"):
                backend.seconds(CELL, 1)
        assert time.monotonic() - start < 30
    with pytest.raises(OutOfTime):
        SubprocessBackend("fake", OPTIONS, make_endless, deadline=time.monotonic() + 0.01)


@pytest.mark.slow
def test_a_first_call_is_begun_without_waiting_and_can_be_stopped() -> None:
    with SubprocessBackend("fake", OPTIONS, make_endless) as backend:
        backend.begin(CELL)
        while not backend.is_ready(0.1):
            pass
        assert backend.first(CELL).seconds == 2.0
        backend._ask("seconds", CELL, 1)
        assert not backend.is_ready(0.1)
        backend.stop()
        with pytest.raises(OutOfTime):
            backend.first(CELL)


def test_an_error_of_a_kernel_is_that_backends() -> None:
    """No kernel for this device, a driver's error: the other configurations go on."""

    class Work:
        def inputs(self, batch: int) -> Any:
            return batch

        def prediction(self, tensors: Any) -> torch.Tensor:
            return torch.zeros(1)

        def steps(self, tensors: Any, count: int) -> None:
            raise RuntimeError("CUDA error: no kernel image is available\n" + "Compile with ... " * 99)

        decode = image = prediction

    def fails(dtype: str) -> Work:
        if dtype == "fp16":
            raise RuntimeError('"baddbmm" not implemented')
        return Work()

    backend = InProcessBackend("a", torch.device("cpu"), fails)
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

    def call(role: str, x: torch.Tensor, t: torch.Tensor, context: torch.Tensor) -> torch.Tensor:
        assert (role, t.device.type) == ("unet", "meta")
        return x

    _with_peers(monkeypatch, schedulers=lambda family: {"plms": Scheduler})
    workload = PeerWorkload("diffusers", replace(OPTIONS, device="meta"), "fp32")
    monkeypatch.setattr(workload, "call", call)
    meta = torch.device("meta")
    noise, both = torch.zeros(1, 4, 8, 8, device=meta), torch.zeros(2, 77, 768, device=meta)
    assert workload.denoise("plms", 3, noise, both).shape == noise.shape


def test_the_compiled_peer_is_what_its_guide_to_speed_says_for_one_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """As ours is: otherwise its second batch runs a graph for all sizes."""
    asked: list[dict[str, Any]] = []

    def compile(network: torch.nn.Module, **options: Any) -> torch.nn.Module:
        asked.append(options)
        return network

    monkeypatch.setattr(torch, "compile", compile)
    fused: list[torch.nn.Module] = []

    class Network(torch.nn.Identity):
        def fuse_qkv_projections(self) -> None:
            fused.append(self)

    for name in ("conv_1x1_as_mm", "epilogue_fusion"):  # of this process
        monkeypatch.setattr(inductor, name, getattr(inductor, name))
    _with_peers(monkeypatch, NETWORKS=dict.fromkeys(("unet", "vae"), lambda family, weights: Network()))
    peer = PeerWorkload("diffusers-compiled", OPTIONS, "fp32")
    assert peer.network("vae") is not peer.network("unet") is peer.network("unet")
    assert [(options["dynamic"], options["mode"]) for options in asked] == [(False, "max-autotune")]
    assert fused == [peer.network("unet")]
    assert (inductor.conv_1x1_as_mm, inductor.epilogue_fusion) == (True, False)


def _with_peers(monkeypatch: pytest.MonkeyPatch, **values: Any) -> None:
    """Stand in for the module that imports diffusers."""
    peers: Any = SimpleNamespace(**values)
    monkeypatch.setitem(sys.modules, "ldm_lite.bench.peers", peers)
    monkeypatch.setattr("ldm_lite.bench.peers", peers, raising=False)


@pytest.mark.slow
def test_every_backend_has_a_process_of_its_own(capfd: pytest.CaptureFixture[str]) -> None:
    with SubprocessBackend("fake", OPTIONS, make) as first, SubprocessBackend("fake", OPTIONS, make) as second:
        assert (first.name, first.description) == ("fake", "a fake")
        call = first.first(CELL)
        assert (call.result.tolist(), call.seconds, call.peak) == ([0, 1, 2], 2.0, None)
        assert len({os.getpid(), first.seconds(CELL, 1), second.seconds(CELL, 1)}) == 3
        with pytest.raises(Unavailable, match="out of memory"):
            first.first(replace(CELL, batch=2))
        for _ in range(2):
            with pytest.raises(Unavailable, match=r"its process ended \(status 3\)"):
                first.seconds(CELL, 3)
        assert second.seconds(CELL, 2) > 0
    captured = capfd.readouterr()
    assert (captured.out, "what a library prints" in captured.err) == ("", True)
    with pytest.raises(Unavailable, match="is not installed"):
        SubprocessBackend("other", OPTIONS, make)


@pytest.mark.parametrize("peer", PEERS)
def test_a_peer_that_is_not_installed_is_one_line(peer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("diffusers", "transformers", "openvino"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(Unavailable, match=r"is not installed .*pip install .*diffusers transformers"):
        make_backend(peer, OPTIONS)


def test_our_own_configurations_run_apart_too(small_path: Path) -> None:
    title, backend = make_backend("math", replace(OPTIONS, ckpt=str(small_path)))
    assert title == "ours, math attention"
    assert backend.first(CELL).result.shape == (1, 4, 8, 8)
    assert backend.seconds(CELL, 1) > 0
