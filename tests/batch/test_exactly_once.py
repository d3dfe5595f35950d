"""Whatever happens to a job, the same command finishes it, and the result has the same bytes."""

import contextlib
import errno
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from batch_files import contents
from PIL import Image
from waiting import wait_for

from ldm_lite.batch import store
from ldm_lite.batch.__main__ import main
from ldm_lite.batch.places import Folder

Batch = Callable[..., list[dict[str, Any]]]
Write = Callable[..., Path]
KILLS = int(os.environ.get("LDM_LITE_TEST_KILLS", "4"))


def changed(folder: Path) -> dict[str, int]:
    """When each file was last changed."""
    return {path.name: path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file() and path.name[0] != "."}


@pytest.mark.slow
def test_a_job_that_is_done_is_not_touched(
    tmp_path: Path, table: Write, batch: Batch, capsys: pytest.CaptureFixture[str]
) -> None:
    batch(table(7))
    before = changed(tmp_path / "out")
    batch(table(7))
    assert changed(tmp_path / "out") == before
    assert "3 of 3 shards were complete already" in capsys.readouterr().err


@pytest.mark.parametrize(
    "what",
    ["00001.tar", *(pytest.param(name, marks=pytest.mark.slow) for name in ("parts/00001.jsonl", "manifest.jsonl"))],
)
def test_only_what_is_missing_is_made(tmp_path: Path, what: str, table: Write, batch: Batch) -> None:
    batch(table(7))
    before, times = contents(tmp_path / "out"), changed(tmp_path / "out")
    (tmp_path / "out" / what).unlink()
    batch(table(7))
    assert contents(tmp_path / "out") == before
    written = {name for name, when in changed(tmp_path / "out").items() if when != times[name]}
    assert written == {"manifest.jsonl"} | ({"00001.tar", "00001.jsonl"} if what != "manifest.jsonl" else set())


@pytest.mark.slow
def test_a_shard_that_was_cut_is_made_again(tmp_path: Path, table: Write, batch: Batch) -> None:
    batch(table(4))
    before = contents(tmp_path / "out")
    for path in (tmp_path / "out" / "00000.tar", tmp_path / "out" / "parts" / "00001.jsonl"):
        path.write_bytes(path.read_bytes()[: -path.stat().st_size // 2])
    batch(table(4))
    assert contents(tmp_path / "out") == before


@pytest.mark.slow
def test_changed_rows_are_made_again_and_others_are_not(tmp_path: Path, table: Write, batch: Batch) -> None:
    batch(table(7))
    times = changed(tmp_path / "out")
    rows = [{"prompt": f"picture {i}"} for i in range(9)]  # two more, in the last shard
    rows[1] = {"prompt": "another"}
    batch(table(rows))
    written = {name for name, when in changed(tmp_path / "out").items() if when != times[name]}
    assert written == {"00000.tar", "00002.tar", "00000.jsonl", "00002.jsonl", "manifest.jsonl"}
    batch(table(rows), out="new")
    assert contents(tmp_path / "out") == contents(tmp_path / "new")


@pytest.mark.slow
def test_a_changed_image_is_a_changed_row(tmp_path: Path, table: Write, batch: Batch) -> None:
    Image.new("RGB", (32, 32), "red").save(tmp_path / "a.png")
    path = table([{"prompt": "a", "init_image": "a.png"}, {"prompt": "b", "init_image": "late.png"}])
    first = batch(path)
    assert "late.png" in first[1]["error"]
    Image.new("RGB", (32, 32), "blue").save(tmp_path / "a.png")
    Image.new("RGB", (32, 32), "blue").save(tmp_path / "late.png")
    second = batch(path)
    assert second[0]["sha256"] != first[0]["sha256"]
    assert second[1]["error"] is None


@pytest.mark.thin(7)
@pytest.mark.parametrize(
    ("more", "wanted"),
    [
        (["--steps", "2"], 'was made with steps "1", now it is "2": use the same value, or another --out'),
        (["--batch-size", "3"], "was made with batch_size 2, now it is 3"),
        (["--shard-size", "2"], "was made with shard_size 3, now it is 2"),
        (["--negative-prompt", "b"], "was made with negative_prompt null, now it is"),
        (["--dtype", "bf16"], 'was made with dtype "fp32", now it is "bf16"'),
        (["--format", "folder"], 'was made with format "shards", now it is "folder"'),
        (["--prediction", "v"], "was made with model"),
    ],
)
def test_changed_options_are_refused(
    tmp_path: Path, more: list[str], wanted: str, table: Write, batch: Batch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = table(1)
    batch(path)
    before = changed(tmp_path / "out")
    batch(path, *more, status=2)
    assert wanted in capsys.readouterr().err
    assert changed(tmp_path / "out") == before


def test_options_that_change_no_image_may_change(
    tmp_path: Path, table: Write, batch: Batch, small_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The same weights in another file, too."""
    path = table(1)
    batch(path)
    before = changed(tmp_path / "out")
    copy = shutil.copyfile(small_path, tmp_path / "copy.safetensors")
    batch(path, "--ckpt", copy, "--compile", "off")
    assert "complete already" in capsys.readouterr().err
    assert changed(tmp_path / "out") == before


@pytest.mark.slow
def test_fewer_rows_leave_no_stale_shards(table: Write, batch: Batch, capsys: pytest.CaptureFixture[str]) -> None:
    batch(table(7))
    batch(table(3), status=2)
    assert "holds 00001.tar, but" in (errors := capsys.readouterr().err)
    assert "has 1 shards of 3 rows" in errors


@contextlib.contextmanager
def held_by_another_process(out: Path, turn: tuple[int, int]) -> Iterator[None]:
    """Within the block a process of its own has its turn in the folder."""
    read, write = os.pipe()
    if not (process := os.fork()):
        try:
            with Folder(out).locked(turn):
                os.write(write, b".")
                time.sleep(600)
        finally:
            os._exit(1)
    assert os.read(read, 1) == b"."
    try:
        yield
    finally:
        os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)


@pytest.mark.slow
def test_processes_share_a_job_or_are_locked_out(
    tmp_path: Path, table: Write, batch: Batch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = table(8)
    batch(path)
    assert batch(path, "--shard", "2/2", out="shared") == []
    assert "2 of 3 shards are missing: the last process writes the manifest" in capsys.readouterr().err
    with held_by_another_process(tmp_path / "shared", (1, 2)):
        batch(path, out="shared", status=2)
        batch(path, "--shard", "2/2", out="shared", status=2)
        batch(path, "--shard", "1/3", out="shared", status=2)
        errors = capsys.readouterr().err
        assert errors.count("is writing to it: wait until it ends, or share the work") == 3
        assert "--shard 1/2" in errors
        assert len(batch(path, "--shard", "1/2", out="shared")) == 8
    assert contents(tmp_path / "out") == contents(tmp_path / "shared")


class DiskFull:
    """Makes the n-th write of a shard fail, as a full disk does."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, after: int) -> None:
        self.left, self.add = after, store._add
        monkeypatch.setattr(store, "_add", self)

    def __call__(self, *args: Any) -> None:
        self.left -= 1
        if self.left < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self.add(*args)


@pytest.mark.slow
def test_a_full_disk_is_one_line_and_nothing_is_lost(
    tmp_path: Path, table: Write, batch: Batch, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    batch(table(4), out="whole")
    with monkeypatch.context() as patch:
        DiskFull(patch, 7)
        batch(table(4), status=1)
    assert f"error: the disk is full: {tmp_path / 'out' / '00001.tar'} was not written" in capsys.readouterr().err
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [".lock", "00000.tar", "job.json", "parts"]
    batch(table(4))
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


@pytest.mark.needs("mount namespaces")
@pytest.mark.slow
def test_a_disk_that_is_really_full(tmp_path: Path, arguments: list[str], table: Write) -> None:
    """A file system of 64 KiB, in a mount namespace of its own."""
    out, path = tmp_path / "out", table(30)
    out.mkdir()
    command = [sys.executable, "-m", "ldm_lite.batch", path, *arguments, "--out", out]
    script = 'mount -t tmpfs -o size=64k none "$1" && shift && "$@"; s=$?; ls -A "$OUT"; exit $s'
    argv = ["unshare", "-rm", "sh", "-c", script, "sh", out, *command]
    env = {**os.environ, "OUT": os.fspath(out), "PYTHONPATH": os.fspath(Path(__file__).parents[2])}
    done = subprocess.run(list(map(os.fspath, argv)), capture_output=True, text=True, env=env)
    assert done.returncode == 1, done.stderr
    assert "error: the disk is full: " in done.stderr
    assert "Traceback" not in done.stderr
    assert "00000.tar" in done.stdout
    assert ".part" not in done.stdout


class Killer:
    """Kills the process before its n-th call that changes the file system."""

    def __init__(self, after: int) -> None:
        self.left = after

    def around(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            self.left -= 1
            if self.left < 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*args, **kwargs)

        return call


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["shards", "folder"])
def test_killed_before_every_change_of_the_file_system(
    tmp_path: Path, kind: str, arguments: list[str], table: Write, batch: Batch
) -> None:
    path, steps = table(2), 0
    batch(path, "--format", kind, "--shard-size", 1, out="whole")
    argv = [os.fspath(path), *arguments, "--format", kind, "--shard-size", "1"]
    names = ("rename", "replace", "unlink", "fsync", "link", "rmdir", "mkdir", "chmod", "open")
    for steps in range(200):
        if (pid := os.fork()) == 0:
            killer = Killer(steps)
            for name in names:
                setattr(os, name, killer.around(getattr(os, name)))
            os._exit(main([*argv, "--out", os.fspath(tmp_path / "out")]))
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        assert status in (0, -signal.SIGKILL)
        if status == 0:
            break
        if steps % 6 == 0:  # go on from there, else begin anew
            batch(path, "--format", kind, "--shard-size", 1)
            assert contents(tmp_path / "out") == contents(tmp_path / "whole"), steps
            shutil.rmtree(tmp_path / "out")
    assert steps > 20
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


@pytest.mark.slow
def test_killed_at_any_moment(
    tmp_path: Path, arguments: list[str], table: Write, batch: Batch, capsys: pytest.CaptureFixture[str]
) -> None:
    """LDM_LITE_TEST_KILLS=50 kills it 50 times."""
    path, chance, killed, out = table(rows := 60 * KILLS), random.Random(0), 0, tmp_path / "out"
    shards = rows // 3
    batch(path, out="whole")

    def made() -> int:
        return len(list(out.glob("[!.]*.tar")))

    argv = [sys.executable, "-m", "ldm_lite.batch", os.fspath(path), *arguments, "--out", os.fspath(out)]
    while killed < KILLS:
        process = subprocess.Popen(argv, stderr=subprocess.PIPE, cwd=Path(__file__).parents[2])
        assert process.stderr is not None
        if killed % 5:  # else at any time, also before there is a model
            while b"loaded in" not in process.stderr.readline() and process.poll() is None:
                pass
        most = shards * (killed + 1) // (KILLS + 1)  # a fast machine must not finish
        with contextlib.suppress(TimeoutError):
            wait_for(
                lambda most=most: made() >= most, "enough shards", seconds=chance.uniform(0, 1 if killed % 5 else 6)
            )
        assert process.poll() is None
        process.kill()
        process.stderr.close()
        process.wait()
        killed += 1
    there = made()
    assert len(batch(path)) == rows
    assert contents(out) == contents(tmp_path / "whole")
    with capsys.disabled():
        print(f"\nkilled {killed} times, which left {there} of {shards} shards")


@pytest.mark.slow
def test_a_signal_ends_it_with_a_line(tmp_path: Path, arguments: list[str], table: Write) -> None:
    argv = [
        sys.executable,
        "-m",
        "ldm_lite.batch",
        os.fspath(table(300)),
        *arguments,
        "--out",
        os.fspath(tmp_path / "o"),
    ]
    process = subprocess.Popen(argv, stderr=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2])
    wait_for(lambda: list((tmp_path / "o").glob("[!.]*.tar")), "a shard", process=process, seconds=300)
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate()
    assert process.returncode == 143
    assert "interrupted: finished shards are kept, the same command continues" in errors
    assert "Traceback" not in errors
    assert not list((tmp_path / "o").glob(".*.part"))
    lists = [json.loads(line) for line in (tmp_path / "o" / "parts" / "00000.jsonl").read_text().splitlines()]
    assert len(lists) == 4
