"""Save images: files are written completely or not at all, and never overwritten."""

import contextlib
import os
import re
import struct
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path

from PIL.Image import Image

from ldm_lite.cli.files import open_file
from ldm_lite.cli.options import SaveOptions
from ldm_lite.cli.pictures import TEXT, write_picture
from ldm_lite.cli.signals import uninterrupted
from ldm_lite.cli.writing import replacing

KEY = "ldm_lite"  # of the PNG's text that identifies its image
# Endings of images other than PNG.
NO_PNG = (".jpg", ".jpeg", ".webp", ".bmp", ".tif", ".tiff", ".gif", ".avif")


class Saver:
    """Writes images under the next free name: DIR/samples/00000.png as the originals do, or NAME.png, NAME-1.png."""

    def __init__(self, options: SaveOptions, command: str) -> None:
        """Raises ValueError for a folder that cannot be written to, and formats other than PNG; creates nothing."""
        self.options = options
        self.out = Path(f"outputs/{command}-samples" if options.out is None else os.path.expanduser(options.out))
        self.single = self.out.suffix.lower() == ".png"
        self._next: dict[str, int] = {}  # by the folder of a kind of images: the number of the next one
        if options.skip_existing and (self.single or options.skip_save or command in ("cascade", "reconstruct")):
            raise ValueError(
                "`skip_existing` is for folders of images that txt2img, img2img, inpaint and upscale save: leave it out"
            )
        if not os.path.isdir(self.out) and (self.out.suffix.lower() in NO_PNG or self.out.name.lower() == ".png"):
            raise ValueError(f"got `out` {self.out}, expected a folder or a name ending in .png: images are PNG files")
        for folder in (self.out.parent,) if self.single else (self.out, self.out / "samples"):
            while not _is_there(folder):
                folder = folder.parent
            if not folder.is_dir() or not os.access(folder, os.W_OK):  # a dangling link is not a folder
                raise ValueError(f"cannot write to {folder}: use another `out`")

    def keys(self) -> Counter[str]:
        """Count the keys of the folder's whole images, for `skip_existing`; none without it."""
        paths = (self.out / "samples").glob("[!.]*.png") if self.options.skip_existing else ()
        return Counter(key for path in paths if (key := read_key(path)) is not None)

    def sample(self, image: Image, text: str, key: str = "") -> Path:
        """Save one image with its parameters and its key (see tasks/existing.py), and return its path."""
        texts = {TEXT: text} | ({KEY: key} if key else {})
        return self._save("", "samples", "{:05}.png", image, texts)

    def grid(self, image: Image, text: str) -> Path:
        """Save a grid, and return its path."""
        return self._save("-grid", "", "grid-{:04}.png", image, {TEXT: text})

    def _save(self, suffix: str, folder: str, name: str, image: Image, texts: Mapping[str, str]) -> Path:
        prefix, stem = name.partition("{")[0], self.out.stem + suffix
        if name not in self._next:  # the folder is listed once: others may write to it, but never under one name
            paths = () if self.single else (self.out / folder).glob(f"{prefix}[0-9]*.png")
            numbers = [path.stem.removeprefix(prefix) for path in paths]
            taken = [int(number) for number in numbers if re.fullmatch("[0-9]{1,9}", number)]
            self._next[name] = max(taken, default=-1) + 1

        def path_of(number: int) -> Path:
            if self.single:
                return self.out.with_stem(f"{stem}-{number}" if number else stem)
            return self.out / folder / name.format(number)

        path, self._next[name] = _save(path_of, image, texts, self._next[name])
        return path

    def preview(self, image: Image) -> None:
        """Save a preview as preview.png, replacing the last one."""
        folder = self.out.parent if self.single else self.out
        folder.mkdir(parents=True, exist_ok=True)
        with replacing(folder / "preview.png", unique=True) as part:
            image.save(part, format="PNG")


def _is_there(path: Path) -> bool:
    """Whether there is anything of this name, a link too.  Raises ValueError for a name that no file can have."""
    try:
        path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        raise ValueError(f"cannot write to {path}: {why}: use another `out`") from error
    return True


def read_key(path: Path) -> str | None:
    """Return the key in a PNG, from its header; None if it has none, is not a PNG or is not whole."""
    with contextlib.suppress(OSError, ValueError, struct.error), open_file(path) as file:
        if file.read(8) != b"\x89PNG\r\n\x1a\n":
            return None
        key, kind = None, b""
        while kind != b"IDAT":
            length, kind = struct.unpack(">I4s", file.read(8))
            name, _, value = (file.read(length) if kind == b"tEXt" and length < 200 else b"").partition(b"\0")
            if name == KEY.encode():
                key = value.decode("latin-1")
            file.seek(4 if name else length + 4, os.SEEK_CUR)
        file.seek(-12, os.SEEK_END)
        return key if file.read() == b"\0\0\0\0IEND\xaeB`\x82" else None
    return None


def _save(name: Callable[[int], Path], image: Image, texts: Mapping[str, str], start: int) -> tuple[Path, int]:
    """Write a PNG, completely or not at all, under the first free one of name(start), name(start + 1), ...

    Return its path, and the number after its own.
    """
    path = name(start)
    path.parent.mkdir(parents=True, exist_ok=True)
    with uninterrupted():
        descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=".", suffix=".png")
        try:
            with os.fdopen(descriptor, "wb") as file:
                write_picture(image, file, "PNG", texts)
            os.chmod(temporary, 0o644)
            while True:
                try:
                    os.link(temporary, path)  # unlike rename, fails if the name is taken
                    return path, start + 1
                except FileExistsError:
                    start += 1
                    path = name(start)
                except OSError:  # a file system without hard links
                    if _rename(temporary, path):
                        return path, start + 1
                    start += 1
                    path = name(start)
        except OSError as error:
            error.filename = os.fspath(path)  # Pillow's errors have no name, others the temporary one
            raise
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
