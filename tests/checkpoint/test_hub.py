"""Finding checkpoints: paths, the bundled model, and the hub (a local server)."""

import hashlib
import json
import logging
import os
import socket
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar

import huggingface_hub.constants
import pytest
import torch
from diffusers_files import FILES, save, told
from random_checkpoint import LCM
from safetensors.torch import load_file, save_file
from waiting import free_port

import ldm_lite
from ldm_lite.checkpoint import hub
from ldm_lite.checkpoint.reader import open_source

DATA = Path(__file__).parents[1] / "data"
CONTENT = os.urandom(20_000)
CONNECT, GETADDRINFO = socket.socket.connect, socket.getaddrinfo  # before the tests' fixture forbids them
ERRORS = {  # by repository
    "owner/gated": (403, {"X-Error-Code": "GatedRepo"}),
    "owner/gone": (404, {"X-Error-Code": "RepoNotFound"}),
    "owner/other": (404, {"X-Error-Code": "EntryNotFound"}),
}


class Handler(BaseHTTPRequestHandler):
    """Answers as the hub does and records the paths of downloads.

    `files` are the files of the repository owner/pipe by name; all other files have the same content.
    """

    downloads: ClassVar[list[str]] = []
    files: ClassVar[dict[str, bytes]] = {}

    def _content(self) -> bytes:
        return self.files.get(self.path.partition("/owner/pipe/resolve/main/")[2], CONTENT)

    def do_HEAD(self) -> None:
        repository, content = "/".join(self.path.split("/")[1:3]), self._content()
        etag = hashlib.sha256(content).hexdigest()
        status, headers = ERRORS.get(repository, (200, {"ETag": f'"{etag}"', "X-Repo-Commit": "0" * 40}))
        self._answer(status, headers, len(content) if status == 200 else 0)

    def do_GET(self) -> None:
        if self.path.startswith("/api/models/owner/pipe/tree/main"):
            listing = [{"type": "file", "path": name, "size": len(c), "oid": "0"} for name, c in self.files.items()]
            content = json.dumps(listing).encode()
            self._answer(200, {"Content-Type": "application/json"}, len(content))
            self.wfile.write(content)
            return
        if self.path.startswith("/api/"):  # the library asks for things of its own
            missing = {"X-Error-Code": "RepoNotFound"} if "tree" in self.path else {}
            return self._answer(404, missing, 0)
        self.downloads.append(self.path)
        content = self._content()
        self._answer(200, {}, len(content))
        self.wfile.write(content)

    def _answer(self, status: int, headers: dict[str, str], length: int) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(length)}.items():
            self.send_header(name, value)
        self.end_headers()

    def log_message(self, *args: object) -> None:
        """Nothing."""


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The hub's empty cache; a local server stands in for the hub."""
    monkeypatch.setattr(socket.socket, "connect", CONNECT)
    monkeypatch.setattr(socket, "getaddrinfo", GETADDRINFO)
    monkeypatch.setattr(Handler, "downloads", [])
    monkeypatch.setattr(Handler, "files", {})
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        here = f"http://127.0.0.1:{server.server_port}"
        template = here + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", here)
        monkeypatch.setattr(huggingface_hub.constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", os.fspath(tmp_path))
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setenv("NO_PROXY", "127.0.0.1")
        yield tmp_path
        server.shutdown()


def test_checkpoint_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert hub.resolve(DATA) == DATA
    (tmp_path / "models").mkdir()
    monkeypatch.chdir(tmp_path)
    for name in ("nothing.ckpt", "a/b", "/no/such/file", "./no/such/file", "models/ldm/model.ckpt", "~nobody/x.ckpt"):
        with pytest.raises(FileNotFoundError, match="no such file"):
            hub.resolve(name)
    with pytest.raises(FileNotFoundError, match="got an empty checkpoint name"):
        hub.resolve("")
    mistyped = ("owner/flux.gguf", "owner/model.sft", "owner/model.SafeTensors", "models/model")
    for name in ("a", "a/b/c", "a/b.ckpt", *mistyped, "./b", "~/b", "/b", "a/", tmp_path):
        assert hub.repository(name) is None
    for name in ("owner/sdxl-1.0", "stable-diffusion-v1-5/stable-diffusion-v1-5"):
        assert hub.repository(name) == name


def test_a_file_is_downloaded_once_and_its_path_is_logged(cache: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "ldm_lite")
    first, again = (hub.resolve("owner/repo/folder/file.ckpt") for _ in range(2))
    assert first == again
    assert first.is_relative_to(cache)
    assert first.parts[-2:] == ("folder", "file.ckpt")
    assert first.read_bytes() == CONTENT
    assert len(Handler.downloads) == 1
    assert caplog.messages == [f"owner/repo/folder/file.ckpt: at {first}"] * 2


@pytest.mark.parametrize(
    ("repository", "reason"),
    [
        ("owner/gated", r"accept its licence at https://huggingface.co/owner/gated, and log in with `hf auth login`"),
        ("owner/gone", r"owner/gone does not exist, was moved, or is private and needs `hf auth login`"),
        ("owner/other", r"the repository has no such file; its files are listed at \S+/owner/other/tree/main"),
    ],
)
def test_a_refusal_of_the_hub_is_one_line(cache: Path, repository: str, reason: str) -> None:
    wanted = rf"^{repository}/file.ckpt: no such file, and the download from the hub failed: {reason}$"
    with pytest.raises(FileNotFoundError, match=wanted):
        hub.resolve(f"{repository}/file.ckpt")


def test_without_a_network_the_cached_file_is_used(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = hub.resolve("owner/repo/file.ckpt")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    assert hub.resolve("owner/repo/file.ckpt") == path
    with pytest.raises(FileNotFoundError, match=r"^owner/repo/no\.ckpt: .* failed: OfflineModeIsEnabled: .*offline"):
        hub.resolve("owner/repo/no.ckpt")


# ---- whole repositories ---------------------------------------------------------------------------------------------


def publish(folder: Path, *more: str) -> None:
    """Put a folder into the server's repository owner/pipe, with files that ldm_lite does not read."""
    names = (path for path in folder.rglob("*") if path.is_file())
    Handler.files |= {path.relative_to(folder).as_posix(): path.read_bytes() for path in names}
    Handler.files |= dict.fromkeys(("README.md", "safety_checker/model.safetensors", *more), b"")


def test_a_diffusers_repository_is_a_checkpoint(cache: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Only the files that are read are downloaded."""
    folder = save(tmp_path_factory.mktemp("saved"), "lcm")
    publish(folder)
    here, there = (ldm_lite.load(source, metadata=told(LCM), device="cpu") for source in (folder, "owner/pipe"))
    assert there.name == "pipe"
    assert there.description.startswith("pipe: small LCM")
    for role, network in here.networks.items():
        theirs = there.networks[role].state_dict()
        assert all(torch.equal(value, theirs[key]) for key, value in network.state_dict().items())
    fetched = {path.relative_to(cache).as_posix().split("/", 3)[3] for path in cache.glob("models--*/snapshots/**/*.*")}
    assert fetched == {f"{role}/{FILES.get(role, 'model')}.safetensors" for role in here.networks} | {
        f"{role}/config.json" for role in here.networks
    }


def test_without_a_network_the_cached_repository_is_used(
    cache: Path, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    publish(save(tmp_path_factory.mktemp("saved"), "lcm"))
    first = open_source("owner/pipe")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    again = open_source("owner/pipe")
    assert (again.path, again.shapes) == (first.path, first.shapes)
    with pytest.raises(FileNotFoundError, match=r"^owner/none: no such file or folder, .*: OfflineModeIsEnabled: "):
        open_source("owner/none")


def test_one_network_in_several_files(cache: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = save(tmp_path_factory.mktemp("saved"), "lcm") / "vae"
    whole = open_source(folder)
    values = load_file(folder / "diffusion_pytorch_model.safetensors")
    (folder / "diffusion_pytorch_model.safetensors").unlink()
    places = {key: f"part-{i % 2}.safetensors" for i, key in enumerate(sorted(values))}
    for name in set(places.values()):
        save_file({key: value for key, value in values.items() if places[key] == name}, folder / name)
    (folder / "diffusion_pytorch_model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    publish(folder)
    assert open_source("owner/pipe").shapes == whole.shapes


def test_the_files_of_another_repository_are_named(cache: Path) -> None:
    Handler.files |= {"README.md": b"", "v1-4.ckpt": b"", "lora/more.safetensors": b""}
    with pytest.raises(
        ValueError, match=r"is not a diffusers folder .*: owner/pipe/v1-4.ckpt, owner/pipe/lora/more.safetensors$"
    ):
        open_source("owner/pipe")
    with pytest.raises(FileNotFoundError, match=r"^owner/gone: no such file or folder, .* does not exist"):
        open_source("owner/gone")
    Handler.files.clear()
    Handler.files["README.md"] = b""
    with pytest.raises(ValueError, match=r"it has no weights that ldm_lite reads$"):
        open_source("owner/pipe")


@pytest.mark.parametrize("name", ["owner/repository/file.safetensors", "owner/repository"])
def test_a_hub_that_cannot_be_reached_is_said_at_once(
    name: str, cache: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The library tries five times, for 40 seconds."""
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", f"http://127.0.0.1:{free_port()}")
    monkeypatch.setattr(time, "sleep", lambda seconds: pytest.fail("it tries again"))
    with pytest.raises(FileNotFoundError, match=r"the hub cannot be reached .*: give the path of a file that is here"):
        ldm_lite.load(name)
    assert "Retry" not in capfd.readouterr().err


def test_a_hub_that_cannot_be_reached_leaves_the_cached_files(
    cache: Path, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    first = hub.resolve("owner/repo/file.ckpt")
    publish(save(tmp_path_factory.mktemp("saved"), "lcm"))
    pipe = open_source("owner/pipe")
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", f"http://127.0.0.1:{free_port()}")
    assert hub.resolve("owner/repo/file.ckpt") == first
    again = open_source("owner/pipe")
    assert (again.path, again.shapes) == (pipe.path, pipe.shapes)
