"""Files that users name: regular ones of limited size are read, anything else is refused at once."""

import os
import socket
import threading
from pathlib import Path

import pytest

from ldm_lite.cli.files import open_file, parse_json, read_bytes, read_json, read_object, read_text, regular


def test_a_regular_file_is_read_and_its_line_ends_are_made_plain(tmp_path: Path) -> None:
    (tmp_path / "text").write_bytes(b"\xef\xbb\xbfone\r\ntwo\rthree\n")
    (tmp_path / "link").symlink_to("text")
    for name in ("text", "link"):
        assert read_text(tmp_path / name) == "one\ntwo\nthree\n"
        assert read_bytes(tmp_path / name, 18) == (tmp_path / "text").read_bytes()
    with open_file(str(tmp_path / "text")) as file:
        assert file.read(3) == b"\xef\xbb\xbf"


def test_what_is_not_a_regular_file_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    server = socket.socket(socket.AF_UNIX)
    server.bind(str(tmp_path / "socket"))
    (tmp_path / "link").symlink_to("pipe")
    for path, kind in ((tmp_path, "folder"), (tmp_path / "pipe", "pipe"), (tmp_path / "link", "pipe")):
        with pytest.raises(ValueError, match=f"is a {kind}, expected a regular file"):
            open_file(path)
    for name, kind in (("/dev/zero", "device"), ("/dev/urandom", "device"), (str(tmp_path / "socket"), "socket")):
        with pytest.raises(ValueError, match=f"{name}: is a {kind}, expected a regular file"):
            read_text(name)
    server.close()


def test_a_pipe_that_replaces_the_file_does_not_hang(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_bytes(b"x")
    os.mkfifo(tmp_path / "pipe")
    status = os.stat(tmp_path / "file")
    monkeypatch.setattr("os.stat", lambda path: status)
    raised: list[BaseException] = []

    def attempt() -> None:
        try:
            open_file(tmp_path / "pipe")
        except ValueError as error:
            raised.append(error)

    thread = threading.Thread(target=attempt, daemon=True)
    thread.start()
    thread.join(5)
    assert [str(error) for error in raised] == [f"{tmp_path / 'pipe'}: is a pipe, expected a regular file"]


def test_nothing_waits_to_append_either(tmp_path: Path) -> None:
    with open(tmp_path / "log", "ab", opener=regular) as file:
        file.write(b"one")
    with open(tmp_path / "log", "ab", opener=regular) as file:
        file.write(b"two")
    assert (tmp_path / "log").read_bytes() == b"onetwo"
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ValueError, match="is a pipe, expected a regular file"):
        open(tmp_path / "pipe", "ab", opener=regular).close()


def test_json_is_a_value_or_an_error_of_one_line(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    for content, message in (
        (b"[" * 10**5, "a.json: is nested too deeply"),
        (b'{"a":' * 10**5, "a.json: is nested too deeply"),
        (b"[1", "a.json: is not valid JSON"),
        (b"9" * 5000, "a.json: is not valid JSON"),
        (b"[]", "a.json: holds a JSON list, expected an object"),
        (b"null", "a.json: holds a JSON NoneType, expected an object"),
    ):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=f"{tmp_path}/{message}"):
            read_object(path)
    path.write_text('{"a": [1]}')
    assert read_object(path) == read_json(path) == parse_json('{"a": [1]}', "here") == {"a": [1]}


@pytest.mark.skipif(not Path("/proc/self/pagemap").exists(), reason="Linux only")
def test_files_of_the_system_that_have_no_bytes_or_wait_for_them_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def waits(*arguments: int) -> bytes:
        raise BlockingIOError

    with pytest.raises(ValueError, match="/proc/self/pagemap: is a device, expected a regular file"):
        open_file("/proc/self/pagemap")
    monkeypatch.setattr(os, "pread", waits)  # as /proc/kmsg does, which only root may open
    with pytest.raises(ValueError, match="/proc/self/maps: is a device, expected a regular file"):
        read_text("/proc/self/maps")


def test_sizes_encodings_and_names(tmp_path: Path) -> None:
    (tmp_path / "ten").write_bytes(bytes(10))
    assert len(read_bytes(tmp_path / "ten", 10)) == 10
    with pytest.raises(ValueError, match="ten: is too large, expected at most 9 bytes"):
        read_bytes(tmp_path / "ten", 9)
    with open(tmp_path / "sparse", "wb") as file:
        file.truncate(10**12)
    with pytest.raises(ValueError, match="sparse: is too large, expected at most 16 MiB"):
        read_text(tmp_path / "sparse")
    (tmp_path / "latin").write_bytes("café".encode("latin-1"))
    with pytest.raises(ValueError, match=r"latin: is not text in UTF-8 \(unexpected end of data at byte 3\)"):
        read_text(tmp_path / "latin")
    for name in ("a\0b", "a\ud800b"):
        with pytest.raises(ValueError, match=r"^'a.*b': is not a valid file name"):
            open_file(name)
    with pytest.raises(FileNotFoundError):
        open_file(tmp_path / "absent")


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="Linux only")
def test_a_file_whose_size_is_not_known_is_read_up_to_the_limit() -> None:
    assert os.stat("/proc/self/maps").st_size == 0
    with pytest.raises(ValueError, match="is too large"):
        read_bytes("/proc/self/maps", 100)
