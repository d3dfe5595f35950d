"""Fixtures that several tests share.  Everything runs offline: a test that opens a connection fails."""

import functools
import os
import signal
import socket
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from ldm_lite.cli import threads

# Before torch is imported, and for every process that a test starts: miniature networks compute faster on one thread,
# many times so beside other work.  OMP_NUM_THREADS=2 python -m pytest takes two.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.update(threads.settings())

import machine
import pytest
import random_checkpoint
import torch
import toy
import toy_flow
import toy_z_image

import ldm_lite
from ldm_lite import Pipeline
from ldm_lite.runtime import setup
from ldm_lite.tasks.job import Task

if machine.BARE:
    machine.strip()

# A process in the background ignores SIGINT, under nohup SIGHUP too, and so do the processes that it starts: tests send
# these signals.
for _number, _handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    if signal.getsignal(_number) is signal.SIG_IGN and threading.current_thread() is threading.main_thread():
        signal.signal(_number, _handler)


@pytest.hookimpl(tryfirst=True)  # before those that are slow are left out
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Of the cases of a test with the mark thin(n), leave every n-th; the others become slow.  Skip what needs(...)."""
    machine.skip(items)
    counts = Counter[str]()
    for item in items:
        if (mark := item.get_closest_marker("thin")) is not None:
            test = item.nodeid.partition("[")[0]
            if counts[test] % mark.args[0]:
                item.add_marker("slow")
            counts[test] += 1


@pytest.fixture(autouse=True)
def _sizes_of_miniatures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Miniature models run at half their size, to save time: what they would say of it is tested in one place."""
    monkeypatch.setattr(Task, "warn_of_size", lambda task, shape: None)


@pytest.fixture(autouse=True)
def _no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    connect = socket.socket.connect

    def refuse(*args: object, **kwargs: object) -> None:
        raise AssertionError("a test tried to open a network connection")

    def connect_here(self: socket.socket, address: Any) -> None:
        """Processes of this machine talk by sockets too: those that load training data."""
        connect(self, address) if self.family == socket.AF_UNIX else refuse()

    monkeypatch.setattr(socket.socket, "connect", connect_here)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


@pytest.fixture(scope="session", autouse=True)
def _cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keep what tests choose between kernels, and compile, out of the user's folder.

    All processes share it, also those that tests start: with other kernels images have other last bits.
    """
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:  # where each worker has a folder within that of all
        folder = folder.parent
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("XDG_CACHE_HOME", str(folder / "cache"))
        yield


OWN_KERNELS = setup.BY_DEFAULT


@pytest.fixture(scope="session", autouse=True)
def _plain_kernels() -> Iterator[None]:
    """Networks run with PyTorch's kernels: which of ours are used, and so the last bits, depends on the CPU."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(setup, "BY_DEFAULT", frozenset({setup.PLAIN}))
        yield


@pytest.fixture
def own_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Networks that this test loads run with our kernels, as a user's do."""
    monkeypatch.setattr(setup, "BY_DEFAULT", OWN_KERNELS)


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    """No compiled code before or after."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture
def compiles_once(fresh_compiler: None) -> Iterator[None]:
    """And an error where something would be compiled again."""
    with torch._dynamo.config.patch(error_on_recompile=True):
        yield


@pytest.fixture(scope="session")
def bundled() -> Pipeline:
    """The bundled model in float32 on the CPU."""
    return ldm_lite.load(device="cpu")


@pytest.fixture(scope="session")
def small_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A miniature Stable Diffusion 1.x with random weights, as .safetensors with its metadata."""
    path = tmp_path_factory.mktemp("small") / "small.safetensors"
    random_checkpoint.write(path, random_checkpoint.SMALL)
    return path


@pytest.fixture(scope="module")
def pipe(small_path: Path) -> Pipeline:
    """small_path's pipeline, for the tests of a file."""
    return ldm_lite.load(small_path, device="cpu")


@pytest.fixture
def small(small_path: Path) -> Pipeline:
    """small_path's pipeline, for a test that changes it."""
    return ldm_lite.load(small_path, device="cpu")


@pytest.fixture(scope="session")
def predicting(small_path: Path) -> Callable[..., Pipeline]:
    """-> a function: "eps", "v" or "x0" -> small_path's pipeline with this prediction, whose schedule is SD 1's."""
    return functools.cache(lambda kind, **options: ldm_lite.load(small_path, device="cpu", prediction=kind, **options))


@pytest.fixture(scope="session")
def sd(predicting: Callable[..., Pipeline]) -> Pipeline:
    """A miniature of Stable Diffusion 1 with its noise schedule, which predicts eps."""
    return predicting("eps")


@pytest.fixture(scope="session", params=["flux_dev", "sd35_medium", "z_image_turbo"])
def flow_path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """FLUX.1 dev, Stable Diffusion 3.5 medium, then Z-Image Turbo, in miniature with random weights."""
    write = toy_z_image.write_whole if request.param == "z_image_turbo" else toy_flow.write
    return write(tmp_path_factory.mktemp("flow"), request.param)


@pytest.fixture(scope="session")
def picture_pipes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Pipeline]:
    """Miniatures of the families that begin with an image, by task, as loaded from files."""
    folder, pipes = tmp_path_factory.mktemp("pictures"), {}
    for task, family in toy.PICTURE_FAMILIES.items():
        random_checkpoint.write(folder / f"{task}.safetensors", family)
        pipes[task] = ldm_lite.load(folder / f"{task}.safetensors", device="cpu")
    return pipes
