"""Files of images: their numbers, several writers at once, and signals."""

import errno
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from unittest import mock

import pytest
import texts
from PIL import Image

from ldm_lite.cli import console
from ldm_lite.cli.options import SaveOptions
from ldm_lite.cli.output import Saver
from ldm_lite.cli.signals import noted, uninterrupted

PICTURE = Image.new("RGB", (4, 4))


def test_names_that_are_no_numbers_do_not_matter(tmp_path: Path) -> None:
    folder = tmp_path / "samples"
    folder.mkdir()
    for name in ("1².png", "2٣.png", "1a.png", "99999999999999999999.png", "9" * 200 + ".png", "00006.jpg", "0x.png"):
        (folder / name).touch()
    (folder / "00004.png").mkdir()
    saver = Saver(SaveOptions(out=os.fspath(tmp_path)), "txt2img")
    assert saver.sample(PICTURE, "").name == "00005.png"
    assert (folder / "00005.png").stat().st_mode & 0o777 == 0o644, "others may read it, too"
    (tmp_path / "grid-²².png").touch()
    assert saver.grid(PICTURE, "").name == "grid-0000.png"


@pytest.mark.parametrize("out", ["", "a.png"])
def test_a_folder_is_listed_once(out: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not for each image, which took quadratic time; what others write meanwhile stays."""
    first = Saver(SaveOptions(out=os.fspath(tmp_path / out)), "txt2img")
    names = [first.sample(PICTURE, "").name for _ in range(3)]
    saver, tried = Saver(SaveOptions(out=os.fspath(tmp_path / out)), "txt2img"), list[str]()
    link = os.link
    monkeypatch.setattr(os, "link", lambda a, b: (tried.append(Path(b).name), link(a, b)))
    lists = mock.Mock(side_effect=Path.glob)
    monkeypatch.setattr(Path, "glob", lambda self, pattern: lists(self, pattern))
    names += [saver.sample(PICTURE, "").name]
    tried.clear()
    names += [saver.sample(PICTURE, "").name for _ in range(3)]
    assert tried == names[-3:]
    assert lists.call_count <= 1
    names += [first.sample(PICTURE, "").name, saver.sample(PICTURE, "").name]
    assert len({*names}) == len(names) == 9


@pytest.mark.parametrize(
    ("out", "message"),
    [
        ("photo.jpg", "expected a folder or a name ending in .png: images are PNG files"),
        (".png", "expected a folder or a name ending in .png"),
        ("file", "cannot write to .*file: use another `out`"),
        ("taken", "cannot write to .*samples: use another `out`"),
        ("link", "cannot write to .*link: use another `out`"),
        ("loop/a", "cannot write to .*: use another `out`"),
        ("x" * 300, "cannot write to .*: File name too long: use another `out`"),
        ("a\0b", "cannot write to .*null.*: use another `out`"),
    ],
)
def test_a_name_that_cannot_be_written_to_is_refused_before_any_work(out: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "samples").touch()
    (tmp_path / "link").symlink_to("nowhere")
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(ValueError, match=message):
        Saver(SaveOptions(out=os.fspath(tmp_path / out)), "txt2img")


def test_a_folder_may_have_any_name(tmp_path: Path) -> None:
    (tmp_path / "old.jpg").mkdir()
    for name in ("old.jpg", "v1.5", "run.d/deeper"):
        path = Saver(SaveOptions(out=os.fspath(tmp_path / name)), "txt2img").sample(PICTURE, "")
        assert path == tmp_path / name / "samples" / "00000.png"


def test_an_image_that_was_not_written_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    full = OSError(errno.ENOSPC, "No space left on device")  # as Pillow raises it, without a name
    monkeypatch.setattr(Image.Image, "save", mock.Mock(side_effect=full))
    with pytest.raises(OSError, match="No space") as error:
        Saver(SaveOptions(out=os.fspath(tmp_path)), "txt2img").sample(PICTURE, "")
    assert error.value.filename == os.fspath(tmp_path / "samples" / "00000.png")


WRITER = """
import errno, os, sys, time
from PIL import Image
from ldm_lite.cli.options import SaveOptions
from ldm_lite.cli.output import Saver
def no_link(*args, **kwargs):
    raise OSError(int(sys.argv[3]), "no hard links here")
os.link = no_link
saver = Saver(SaveOptions(out=sys.argv[1]), "txt2img")
print(flush=True)
sys.stdin.readline()
for i in range(40):
    print(saver.sample(Image.new("RGB", (4, 4)), f"{sys.argv[2]} {i}"), flush=True)
"""


@pytest.mark.parametrize("number", [errno.EPERM, errno.ENOTSUP])
def test_writers_on_a_file_system_without_hard_links_lose_nothing(tmp_path: Path, number: int) -> None:
    writers = [
        subprocess.Popen(
            [sys.executable, "-c", WRITER, os.fspath(tmp_path), str(i), str(number)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for i in range(3)
    ]
    for writer in writers:  # all have imported what they need
        assert writer.stdout is not None
        writer.stdout.readline()
    named = {line for writer in writers for line in writer.communicate("\n")[0].splitlines()}
    saved = sorted((tmp_path / "samples").iterdir())
    assert {os.fspath(path) for path in saved} == named
    parameters = {texts.load(path).info["parameters"] for path in saved}
    assert parameters == {f"{i} {k}" for i in range(3) for k in range(40)}


@pytest.mark.parametrize(("name", "status"), [("SIGINT", 130), ("SIGTERM", 143), ("SIGHUP", 129)])
def test_a_signal_is_one_line_and_a_status(name: str, status: int, capsys: pytest.CaptureFixture[str]) -> None:
    number, handlers = getattr(signal, name), [signal.getsignal(signum) for signum in (signal.SIGTERM, signal.SIGHUP)]

    def body() -> None:
        try:
            os.kill(os.getpid(), number)
            time.sleep(5)
        except KeyboardInterrupt as error:  # an import that is interrupted may end in any other error
            raise ImportError("numpy failed") from error

    assert console.run(body) == status
    assert capsys.readouterr().err == "interrupted: nothing is saved\n"
    assert [signal.getsignal(signum) for signum in (signal.SIGTERM, signal.SIGHUP)] == handlers


def test_a_file_is_finished_first_and_a_second_signal_stops_at_once() -> None:
    done = []

    def interrupted(times: int) -> None:
        with uninterrupted():
            for _ in range(times):
                os.kill(os.getpid(), signal.SIGINT)
            done.append(times)

    for times in (1, 2):
        with pytest.raises(KeyboardInterrupt):
            interrupted(times)
    assert done == [1]


def test_a_signal_that_waited_for_a_file_has_its_status(capsys: pytest.CaptureFixture[str]) -> None:
    def body() -> None:
        with uninterrupted():
            os.kill(os.getpid(), signal.SIGTERM)

    assert console.run(body) == 143
    assert capsys.readouterr().err == "interrupted: nothing is saved\n"


def test_what_only_notes_signals_does_so_around_a_file_too() -> None:
    """As training does, to save its state first."""
    with noted() as received, uninterrupted():
        os.kill(os.getpid(), signal.SIGINT)
    assert received == [signal.SIGINT]


def test_a_signal_that_is_ignored_stays_so(capsys: pytest.CaptureFixture[str]) -> None:
    """As under nohup."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        assert console.run(lambda: os.kill(os.getpid(), signal.SIGHUP)) == 0
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGHUP"])
def test_a_signal_at_any_moment_shows_no_traceback(name: str, tmp_path: Path) -> None:
    """From the first moment in which Python runs code of ldm_lite, through the import of torch, to the images."""
    number, chance, lines = getattr(signal, name), random.Random(0), 0
    code = "import sys, runpy; sys.argv[0] = '-m'; import ldm_lite.cli; print(flush=True)\n"
    code += "runpy.run_module('ldm_lite.txt2img', run_name='__main__')"
    for _ in range(20):
        process = subprocess.Popen(
            [sys.executable, "-c", code, "a cat", "--steps", "9", "--n_iter", "99", "--out", os.fspath(tmp_path)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )
        assert process.stdout is not None
        process.stdout.readline()
        time.sleep(chance.uniform(0.1, 3))
        process.send_signal(number)
        _, errors = process.communicate(timeout=60)
        assert process.returncode in (128 + number, -number)
        assert "Traceback" not in errors
        assert "Error" not in errors
        lines += "interrupted: finished images are saved" in errors
    assert lines
