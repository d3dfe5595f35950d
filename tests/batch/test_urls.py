"""A job whose results go to a URL of fsspec's has the files of a folder, exactly once."""

import json
import os
import subprocess
import sys
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from batch_files import contents

from ldm_lite.batch.__main__ import main
from ldm_lite.batch.places import Folder, Remote, open_place
from ldm_lite.cli.version import pip_install

fsspec = pytest.importorskip("fsspec")
Batch = Callable[..., list[dict[str, Any]]]
Write = Callable[..., Path]


def download(place: Remote, folder: Path) -> Path:
    """Copy the files of a place into a folder."""
    for path in place.fs.find(place.root):
        target = folder / path.removeprefix(place.root).lstrip("/")
        target.parent.mkdir(parents=True, exist_ok=True)
        place.fs.get_file(path, os.fspath(target))
    return folder


@pytest.fixture
def url(tmp_path: Path) -> Iterator[str]:
    """A folder in fsspec's memory."""
    yield f"memory://{tmp_path.name}/job"
    fsspec.filesystem("memory").store.clear()


@pytest.mark.parametrize("kind", ["shards", "folder"])
def test_a_url_gets_the_files_of_a_folder(
    kind: str, tmp_path: Path, url: str, arguments: list[str], table: Write, batch: Batch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """And the second run makes nothing again, but for what was lost."""
    path, more = table(4), ["--format", kind]
    batch(path, *more)
    argv = [os.fspath(path), *arguments, *more, "--out", url]
    assert main(argv) == 0
    captured = capsys.readouterr()
    assert captured.out.splitlines()[-1] == f"{url}/manifest.jsonl"
    assert "does not support locks" in captured.err
    place = Remote(url)
    assert contents(download(place, tmp_path / "copy")) == contents(tmp_path / "out")
    name = "00000.tar" if kind == "shards" else "00000"
    times = {path: place.fs.created(path) for path in place.fs.find(place.root)}
    place.remove("00001" + name[5:])
    place.fs.pipe_file(f"{place.root}/parts/.00000.jsonl.part", b"of a killed process")
    assert main(argv) == 0
    assert contents(download(Remote(url), tmp_path / "again")) == contents(tmp_path / "out")
    kept = [path for path in times if f"/job/{name}" in path]
    assert kept
    assert all(place.fs.created(path) == times[path] for path in kept)
    assert main([*argv, "--steps", "2"]) == 2
    assert f"{url}: was made with" in capsys.readouterr().err


@pytest.mark.slow
def test_what_is_cut_is_made_again(
    tmp_path: Path, arguments: list[str], table: Write, batch: Batch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On fsspec's local file system, whatever a job that ends at any call of it has left."""
    path = table(4)
    batch(path)
    argv = [os.fspath(path), *arguments, "--out", f"file://{tmp_path}/remote"]
    monkeypatch.setattr("ldm_lite.batch.run.open_place", lambda out, folder: Remote(out))
    steps, calls = 0, ("put_file", "mv", "makedirs", "rm")
    kind = type(Remote(f"file://{tmp_path}").fs)
    for steps in range(100):
        left = [steps]

        def around(function: Callable[..., Any], left: list[int] = left) -> Callable[..., Any]:
            def call(*args: Any, **named: Any) -> Any:
                left[0] -= 1
                if left[0] < 0:
                    raise KeyboardInterrupt
                return function(*args, **named)

            return call

        with monkeypatch.context() as patch:
            for name in calls:
                patch.setattr(kind, name, around(getattr(kind, name)))
            status = main(argv)
        if status == 0:
            break
    assert steps > 10
    assert contents(tmp_path / "remote") == contents(tmp_path / "out")


def test_paths_and_urls(tmp_path: Path, batch: Batch, table: Write, capsys: pytest.CaptureFixture[str]) -> None:
    assert str(open_place(f"file://{tmp_path}/a", Path("/b"))) == f"{tmp_path}/a"
    assert isinstance(open_place("a", tmp_path), Folder)
    assert (tmp_path / "a" / "parts").is_dir()
    for wrong, message in (("nosuch://a/b", "Protocol not known: nosuch"), ("github://a", "github://a: ")):
        with pytest.raises(ValueError, match=message):
            open_place(wrong, tmp_path)
    (tmp_path / "images").mkdir()
    assert main([os.fspath(tmp_path / "images"), "--encode", "--out", "memory://a"]) == 2
    assert "give a folder as --out of --encode" in capsys.readouterr().err


@pytest.mark.slow
def test_fsspec_is_imported_for_a_url_only(tmp_path: Path, arguments: list[str], table: Write) -> None:
    code = "import sys; from ldm_lite.batch.__main__ import main; main(sys.argv[1:]); print('fsspec' in sys.modules)"
    argv = [sys.executable, "-c", "import sys; sys.modules['fsspec'] = None\n" + code]
    more: dict[str, Any] = {"env": {**os.environ, "PYTHONPATH": os.fspath(Path(__file__).parents[2])}, "cwd": tmp_path}
    for out, wanted in (("o", "00000.tar"), ("memory://a", f"fsspec is not installed: {pip_install('cloud')}")):
        command = [*argv, os.fspath(table(1)), *arguments, "--out", out]
        done = subprocess.run(command, capture_output=True, text=True, **more)
        assert "Traceback" not in done.stderr
        assert wanted in done.stderr or (tmp_path / out / wanted).exists()


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A bucket of a real server of S3's interface, in this process."""
    pytest.importorskip("s3fs")
    monkeypatch.undo()  # of what keeps tests from the network: this server is reached by it
    server = pytest.importorskip("moto.server").ThreadedMotoServer(port=0, verbose=False)
    server.start()
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "test")
    _, port = server.get_host_and_port()
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{port}")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    fsspec.filesystem("s3", skip_instance_cache=True).mkdir("pictures")
    yield "s3://pictures/some/job"
    server.stop()


@pytest.mark.extra
@pytest.mark.slow
def test_a_bucket_of_s3(
    tmp_path: Path, bucket: str, arguments: list[str], table: Write, batch: Batch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two processes of an array, one killed before its last shard is there: what it left is finished."""
    path = table(8)
    batch(path)
    argv = [os.fspath(path), *arguments, "--out", bucket]
    assert main([*argv, "--shard", "1/2"]) == 0
    place = Remote(bucket)
    assert sorted(place.names()) == ["00000.tar", "00002.tar", "job.json", "parts"]
    place.remove("00002.tar")  # its list is there: as if it was killed between the two
    assert main([*argv, "--shard", "2/2"]) == 0
    assert "1 of 3 shards are missing" in capsys.readouterr().err
    assert main(argv) == 0
    assert contents(download(place, tmp_path / "copy")) == contents(tmp_path / "out")
    with tarfile.open(tmp_path / "copy" / "00001.tar") as tar:
        assert len(tar.getnames()) == 6
    manifest = place.read("manifest.jsonl").splitlines()
    assert [json.loads(line)["row"] for line in manifest] == [*range(8)]
