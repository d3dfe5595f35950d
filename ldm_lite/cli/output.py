"""Save images: files are written completely or not at all, and never overwritten."""

import contextlib
import os
import re
import tempfile
from collections.abc import Callable
from pathlib import Path

from PIL.Image import Image
from PIL.PngImagePlugin import PngInfo

from ldm_lite.cli.options import SaveOptions
from ldm_lite.cli.signals import uninterrupted


class Saver:
    """Writes images under the next free name: DIR/samples/00000.png as the originals do, or NAME.png, NAME-1.png."""

    def __init__(self, options: SaveOptions, command: str) -> None:
        """Raises ValueError for a folder that cannot be written to; creates nothing yet."""
        self.options = options
        self.out = Path(f"outputs/{command}-samples" if options.out is None else os.path.expanduser(options.out))
        self.single = self.out.suffix.lower() == ".png"
        folder = self.out.parent if self.single else self.out
        while not folder.exists():
            folder = folder.parent
        if not folder.is_dir() or not os.access(folder, os.W_OK):
            raise ValueError(f"cannot write to {folder}: take another `out`")

    def sample(self, image: Image, text: str) -> Path:
        """Save one image with its parameters, and return its path."""
        if self.single:
            return _save(lambda i: self.out if i == 0 else self.out.with_stem(f"{self.out.stem}-{i}"), image, text)
        folder = self.out / "samples"
        return _save(lambda i: folder / f"{i:05}.png", image, text, _next_index(folder, ""))

    def preview(self, image: Image) -> None:
        """Save a preview as preview.png, replacing the last one."""
        folder = self.out.parent if self.single else self.out
        folder.mkdir(parents=True, exist_ok=True)
        temporary = folder / f".preview-{os.getpid()}.png"
        image.save(temporary)
        os.replace(temporary, folder / "preview.png")

    def grid(self, image: Image, text: str) -> Path:
        """Save a grid, and return its path."""
        if self.single:
            return _save(lambda i: self.out.with_stem(f"{self.out.stem}-grid" + f"-{i}" * (i > 0)), image, text)
        return _save(lambda i: self.out / f"grid-{i:04}.png", image, text, _next_index(self.out, "grid-"))


def _next_index(folder: Path, prefix: str) -> int:
    taken = (path.stem.removeprefix(prefix) for path in folder.glob(f"{prefix}[0-9]*.png"))
    return max((int(number) + 1 for number in taken if re.fullmatch("[0-9]{1,9}", number)), default=0)


def _save(name: Callable[[int], Path], image: Image, text: str, start: int = 0) -> Path:
    """Write a PNG, completely or not at all, under the first free one of name(start), name(start + 1), ..."""
    info = PngInfo()
    info.add_text("parameters", text)
    path = name(start)
    path.parent.mkdir(parents=True, exist_ok=True)
    with uninterrupted():
        descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=".", suffix=".png")
        try:
            with os.fdopen(descriptor, "wb") as file:
                image.save(file, format="PNG", pnginfo=info)
            os.chmod(temporary, 0o644)
            while True:
                try:
                    os.link(temporary, path)  # unlike rename, fails if the name is taken
                    return path
                except FileExistsError:
                    start += 1
                    path = name(start)
                except OSError:  # a file system without hard links
                    if _rename(temporary, path):
                        return path
                    start += 1
                    path = name(start)
        finally:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(temporary)


def _rename(temporary: str, path: Path) -> bool:
    """Rename a file unless the name is taken, on a file system where only creating a file can fail for that reason.

    Whoever creates the lock may look and rename.  If it is killed meanwhile the number is never used.
    """
    lock = path.with_name(f".{path.name}.lock")
    try:
        os.close(os.open(lock, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    try:
        if os.path.lexists(path):
            return False
        os.replace(temporary, path)
        return True
    finally:
        os.unlink(lock)
