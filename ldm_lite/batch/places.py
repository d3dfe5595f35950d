"""Where a job's results go: a folder, or a URL of fsspec's, such as s3://bucket/folder.

Names are relative, "00000.tar" or "parts/00000.jsonl".  A file under its name is complete: files are written
elsewhere and renamed, and object stores take them whole.
"""

import contextlib
import logging
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

from ldm_lite.batch.table import extra
from ldm_lite.cli.files import open_file
from ldm_lite.cli.writing import locked, remove, replacing

log = logging.getLogger("ldm_lite")


class Folder:
    """A folder of this machine's file systems.  All functions raise OSError."""

    def __init__(self, path: Path) -> None:
        self.path = path
        (path / "parts").mkdir(parents=True, exist_ok=True)

    def __str__(self) -> str:
        return os.fspath(self.path)

    def read(self, name: str, most: int = -1) -> bytes:
        """Return a file's first bytes, or all.  Raises ValueError unless it is a regular file."""
        with open_file(self.path / name) as file:
            return file.read(most)

    def size(self, name: str) -> int:
        """Return the bytes of a file, or of the files in a folder."""
        return size(self.path / name)

    def names(self, folder: str = "") -> list[str]:
        """Return what is in the place, or in a folder of it."""
        return os.listdir(self.path / folder)

    def remove(self, name: str) -> None:
        """Remove a file or a folder, if it is there."""
        remove(self.path / name)

    def new(self, name: str) -> contextlib.AbstractContextManager[Path]:
        """Give a path for a new file or folder, which gets its name at the end of the block, unless the block fails."""
        return replacing(self.path / name, unique=True)

    def write(self, name: str, content: bytes) -> None:
        """Write a file, whole or not at all."""
        with self.new(name) as part:
            part.write_bytes(content)

    @contextlib.contextmanager
    def locked(self, turn: tuple[int, int]) -> Iterator[None]:
        """Keep other processes out within the block, except those that make another I of the same N (`shard=I/N`).

        Raises ValueError, one line, if another one is writing to it.
        """
        advice = "wait until it ends, or share the work: `shard=1/2` and `shard=2/2`"
        which, of = turn
        with contextlib.ExitStack() as stack:
            stack.enter_context(locked(self.path / ".lock", advice, shared=of > 1))
            if of > 1:
                for path in self.path.glob(".lock-*-of-*"):
                    if not path.name.endswith(f"-of-{of}"):
                        stack.enter_context(locked(path, advice))
                stack.enter_context(locked(self.path / f".lock-{which + 1}-of-{of}", advice))
            yield


class Remote(Folder):
    """A folder at a URL."""

    def __init__(self, url: str) -> None:
        """Raises ValueError, one line, if it cannot be used."""
        self.url = url.rstrip("/")
        try:
            self.fs, root = extra("fsspec.core", "cloud").url_to_fs(self.url, use_listings_cache=False)
            self.root = root.rstrip("/")
            self.names()
        except ImportError as error:  # of the package for this kind of URL
            raise ValueError(f"{url}: {error}") from error
        except Exception as error:  # of any package's own kinds
            raise ValueError(f"{url}: cannot be used ({str(error) or type(error).__name__:.200})") from error

    def __str__(self) -> str:
        return self.url

    def read(self, name: str, most: int = -1) -> bytes:
        content: bytes = self.fs.cat_file(f"{self.root}/{name}", end=most if most >= 0 else None)
        return content

    def size(self, name: str) -> int:
        return int(self.fs.du(f"{self.root}/{name}"))

    def names(self, folder: str = "") -> list[str]:
        try:
            paths = self.fs.ls(f"{self.root}/{folder}".rstrip("/"), detail=False)
        except FileNotFoundError:  # object stores have no empty folders
            return []
        return [path.rstrip("/").rpartition("/")[2] for path in paths]

    def remove(self, name: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            self.fs.rm(f"{self.root}/{name}", recursive=True)

    @contextlib.contextmanager
    def new(self, name: str) -> Iterator[Path]:
        folder, _, last = f"{self.root}/{name}".rpartition("/")
        # What object stores do not need, which are those that fsspec speaks to asynchronously, is written and renamed.
        part = f"{folder}/{last if self.fs.async_impl else f'.{last}.part'}"
        with tempfile.TemporaryDirectory() as temporary:
            path = Path(temporary, last)
            yield path
            self.fs.makedirs(folder, exist_ok=True)
            self.remove(name)
            for file in sorted(path.iterdir()) if path.is_dir() else [path]:
                target = f"{part}/{file.name}" if path.is_dir() else part
                self.fs.makedirs(target.rpartition("/")[0], exist_ok=True)
                self.fs.put_file(os.fspath(file), target)
            if not self.fs.async_impl:
                self.fs.mv(part, f"{self.root}/{name}", recursive=True)

    @contextlib.contextmanager
    def locked(self, turn: tuple[int, int]) -> Iterator[None]:
        log.warning("%s: does not support locks: make sure that only one process makes its shards", self.url)
        yield


def open_place(out: str, folder: Path) -> Folder:
    """Open a place by a URL, or a path in a folder.  Raises ValueError, one line, for an unusable URL; OSError."""
    kind, is_url, path = out.partition("://")
    if is_url and kind not in ("file", "local"):
        return Remote(out)
    return Folder(folder / os.path.expanduser(path if is_url else out))


def size(path: Path) -> int:
    """The bytes of a file, or of the files in a folder.  Raises OSError."""
    return sum(file.stat().st_size for file in path.iterdir()) if path.is_dir() else path.stat().st_size
