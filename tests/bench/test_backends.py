"""Requests to a backend in another process, and peers that are not installed."""

import io
import json
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from ldm_lite.bench import backends
from ldm_lite.bench.backends import Backend, FirstCall, SubprocessBackend, Unavailable, serve
from ldm_lite.bench.worker import PEERS, make_backend
from ldm_lite.bench.workload import Cell, Setting, Target

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
