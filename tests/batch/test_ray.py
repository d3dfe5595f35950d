"""A job on a cluster of three nodes has the bytes of one process, whatever is lost on the way."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from batch_files import contents
from waiting import wait_for

pytestmark = [pytest.mark.extra, pytest.mark.slow]
pytest.importorskip("ray")
ROOT = Path(__file__).parents[2]
Batch = Callable[..., list[dict[str, Any]]]
Write = Callable[..., Path]


class Cluster:
    """The process of fixtures/ray_cluster.py."""

    def __init__(self) -> None:
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
        argv = [sys.executable, ROOT / "tests" / "fixtures" / "ray_cluster.py"]
        self.process = subprocess.Popen(argv, text=True, cwd=ROOT, env=environment(), **pipes)
        self.address = self.process.stdout.readline().strip()  # type: ignore[union-attr]

    def tell(self, line: str) -> None:
        print(line, file=self.process.stdin, flush=True)
        assert self.process.stdout.readline() == f"{line} done\n"  # type: ignore[union-attr]


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.fspath(ROOT), "RAY_USAGE_STATS_ENABLED": "0"}


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    ray_cluster = Cluster()
    yield ray_cluster
    ray_cluster.process.communicate("exit\n", timeout=60)


def test_workers_nodes_and_drivers_may_be_lost(
    tmp_path: Path, cluster: Cluster, arguments: list[str], table: Write, batch: Batch
) -> None:
    path, out = table(300), tmp_path / "out"
    batch(path, out="whole")
    argv = [sys.executable, "-m", "ldm_lite.batch", path, *arguments, "--out", out, "--engine", "ray"]
    argv += ["--workers", "3", "--address", cluster.address]

    def start() -> subprocess.Popen[bytes]:
        return subprocess.Popen(list(map(os.fspath, argv)), env=environment(), cwd=tmp_path)

    driver = start()
    wait_for((out / "00001.tar").exists, "a second shard", process=driver, seconds=300)
    driver.kill()
    driver.wait()
    there = {path.name: path.stat().st_mtime_ns for path in out.glob("[!.]*.tar")}
    driver = start()
    wait_for((out / f"{len(there):05}.tar").exists, "another shard", process=driver, seconds=300)
    for line in ("add", "add", "kill", "remove"):
        cluster.tell(line)
    assert len(list(out.glob("[!.]*.tar"))) < 100  # so it is still at work
    assert driver.wait() == 0
    assert contents(out) == contents(tmp_path / "whole")
    assert all((out / name).stat().st_mtime_ns == when for name, when in there.items())


def test_what_is_wrong_is_one_line(tmp_path: Path, arguments: list[str], table: Write, batch: Batch) -> None:
    path = table(1)
    batch(path)
    argv = [sys.executable, "-m", "ldm_lite.batch", path, *arguments, "--out", tmp_path / "out", "--engine", "ray"]
    for more, wanted in (
        (["--address", "127.0.0.1:1"], "error: got --address 127.0.0.1:1, where no Ray cluster answers"),
        (["--steps", "2"], 'was made with steps "1", now it is "2"'),
    ):
        done = subprocess.run(
            [*map(os.fspath, argv), *more], capture_output=True, text=True, env=environment(), cwd=ROOT
        )
        assert done.returncode == 2
        assert wanted in done.stderr
        assert "Traceback" not in done.stderr
