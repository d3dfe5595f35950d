"""Files are written whole or not at all, and one process at a time writes to a folder."""

import contextlib
import os
import signal
import time
from pathlib import Path

import pytest

from ldm_lite.cli.writing import locked, replacing, write_whole

ADVICE = "wait for it"


def test_a_file_is_replaced_whole_or_stays(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    write_whole(path, "é")
    assert path.read_bytes() == b"\xc3\xa9"
    (tmp_path / ".a.txt.part").write_text("of a killed process")
    with contextlib.suppress(KeyError), replacing(path) as part:
        part.write_text("half")
        raise KeyError
    assert path.read_bytes() == b"\xc3\xa9"
    write_whole(path, b"new", unique=True)
    assert path.read_bytes() == b"new"
    assert [file.name for file in tmp_path.iterdir()] == ["a.txt"]
    (tmp_path / "plain").touch()
    assert path.stat().st_mode == (tmp_path / "plain").stat().st_mode


def test_a_folder_is_renamed_unless_another_process_was_quicker(tmp_path: Path) -> None:
    for content in ("first", "second"):
        with replacing(tmp_path / "shard", unique=True) as part:
            part.mkdir()
            (part / "file").write_text(content)
    assert [path.name for path in tmp_path.iterdir()] == ["shard"]
    assert (tmp_path / "shard" / "file").read_text() == "first"


def test_an_error_of_the_system_names_the_file(tmp_path: Path) -> None:
    with pytest.raises(OSError, match=r"a\.txt") as caught, replacing(tmp_path / "a.txt"):
        raise OSError(28, "No space left on device")
    assert caught.value.filename == str(tmp_path / "a.txt")


def test_a_lock_keeps_out_processes_and_threads_and_ends_with_its_process(tmp_path: Path) -> None:
    """Though it has forked others, which live on."""
    read, write = os.pipe()
    lock = tmp_path / "lock"
    if not (process := os.fork()):
        try:
            with locked(lock, ADVICE):
                worker = os.fork()
                if worker:
                    os.write(write, b"%d\n" % worker)
                time.sleep(600)
        finally:
            os._exit(1)
    worker = int(os.read(read, 100))
    try:
        with pytest.raises(ValueError, match=f"{tmp_path}: process {process} is writing to it: {ADVICE}$"):
            locked(lock, ADVICE).__enter__()
        os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)
        with locked(lock, ADVICE):
            assert lock.read_text() == f"{os.getpid()}\n"
            with pytest.raises(ValueError, match="this process is writing to it already"):
                locked(tmp_path / "." / "lock", ADVICE).__enter__()
    finally:
        os.kill(worker, signal.SIGKILL)
    with locked(lock, ADVICE):
        pass


@pytest.mark.parametrize(("shared", "other_shared"), [(True, True), (True, False), (False, True)])
def test_a_shared_lock_is_held_by_several(tmp_path: Path, shared: bool, other_shared: bool) -> None:
    with locked(tmp_path / "lock", ADVICE, shared):
        if not (process := os.fork()):
            try:
                from ldm_lite.cli import writing

                writing._held.clear()  # which a process that is started does not have
                with locked(tmp_path / "lock", ADVICE, other_shared):
                    os._exit(0)
            finally:
                os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == (0 if shared and other_shared else 1)
        assert (tmp_path / "lock").read_text() == ("" if shared else f"{os.getpid()}\n"), "nobody is named for several"
