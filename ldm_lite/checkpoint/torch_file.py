"""Open torch's zip files and legacy pickles: every tensor is found in the file, checked, and read only when wanted."""

import io
import mmap
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor

from ldm_lite.checkpoint.unpickle import INVERSION, Inert, Refused, Special, Storage, Stored, unpickle
from ldm_lite.cli.files import open_file
from ldm_lite.core.layers import Shapes
from ldm_lite.runtime.memory import MappedPages

MOST_PICKLE = 64 * 2**20  # bytes
MOST_DIRECTORY = 8 * 2**20  # bytes of a zip file's list of members, some 100,000
WRAPPERS = ("state_dict", "params_ema", "params")  # the last two: BasicSR
IP_ADAPTER = ("image_proj", "ip_adapter")
MAGIC, PROTOCOL = 0x1950A86A20F9469CFC6C, 1001  # the first two pickles of a legacy file

Spans = dict[str, tuple[int, int]]  # a storage's name -> its first byte in the file, and its number of bytes


def open_torch(path: Path, is_zip: bool) -> tuple[Shapes, Callable[[str], Tensor]]:
    """Return the shapes of a torch file's tensors by key, unwrapped, and a function that reads one tensor.

    Tensors lie in the mapped file, unless they are not aligned there: then they are copies.  Raises ValueError, one
    line, having run nothing in the file.
    """
    try:
        with open_file(path) as file:
            content, spans = _zip(file) if is_zip else _legacy(file)
            tensors = _tensors(content)
            for key, stored in tensors.items():
                if stored.storage.key not in spans or stored.storage.nbytes > spans[stored.storage.key][1]:
                    raise ValueError(f"the values of {key} are missing")
            mapped = torch.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY), dtype=torch.uint8)
    except Refused as error:
        raise ValueError(
            f"{path}: refused, nothing in it was run: its pickle names {error.args[0]}, which weights do not need. "
            "Use the .safetensors file of this model, or convert it to safetensors on a machine where that is safe"
        ) from error
    except (ValueError, EOFError, zipfile.BadZipFile, NotImplementedError, struct.error) as error:
        reason = str(error).partition("\n")[0][:200] or type(error).__name__
        raise ValueError(
            f"{path}: is truncated or damaged ({reason}), nothing in it was run: download it again"
        ) from error
    if not tensors and isinstance(content, dict) and any(type(width) is int for width in content):
        raise ValueError(f"{path}: is a hypernetwork of AUTOMATIC1111's web UI, which ldm_lite does not support")
    if not tensors:
        raise ValueError(f"{path}: holds no named tensors, wanted a checkpoint")
    pages = MappedPages()

    def read(key: str) -> Tensor:
        stored = tensors[key]
        return _read(mapped, stored, spans[stored.storage.key][0], pages)

    return {key: stored.shape for key, stored in tensors.items()}, read


def _read(mapped: Tensor, stored: Stored, begin: int, pages: MappedPages) -> Tensor:
    size = stored.dtype.itemsize
    start = begin + stored.offset * size
    values = mapped[start : start + stored.length * size]
    if start % size:
        values, shared = values.clone(), values
        pages.release(shared)
    return torch.as_strided(values.view(stored.dtype), stored.shape, stored.strides)


def _tensors(content: object) -> dict[str, Stored]:
    """Return the tensors of what a pickle holds, without the dictionaries around them; without keys, by number."""
    for _ in range(8):
        wrapped = [content[name] for name in WRAPPERS if name in content] if isinstance(content, dict) else []
        if not (wrapped and isinstance(wrapped[0], dict)):
            break
        content = wrapped[0]
    if not isinstance(content, dict):
        values = content if isinstance(content, (list, tuple)) else [content]
        content = {str(i): value for i, value in enumerate(values)}
    if INVERSION in content:
        learned, name = content[INVERSION], content.get("name")
        learned = learned.parameters if isinstance(learned, Inert) else learned
        names = {"*": name} if isinstance(name, str) else {}
        parts = learned.items() if isinstance(learned, dict) else ()
        content = {f"{INVERSION}.{names.get(key, key)}": value for key, value in parts}
    for name in IP_ADAPTER:  # two dictionaries in one
        if isinstance(inner := content.get(name), dict):
            content = {**content, **{f"{name}.{key}": value for key, value in inner.items()}}
    for key, value in content.items():
        if isinstance(value, Special):
            raise ValueError(f"{key} is {value.kind}, wanted an ordinary tensor")
    return {str(key): value for key, value in content.items() if isinstance(value, Stored)}


# ---- zip files ------------------------------------------------------------------------------------------------------


class _Cautious(io.RawIOBase):
    """A file as zipfile reads it, which reads the list of members at once, however long it says that is."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file

    def seek(self, offset: int, whence: int = 0) -> int:
        return self._file.seek(offset, whence)

    def tell(self) -> int:
        return self._file.tell()

    def seekable(self) -> bool:
        return True

    def read(self, size: int = -1) -> bytes:
        if size > MOST_DIRECTORY:
            raise ValueError("its list of members is too long")
        return self._file.read(size)


def _zip(file: BinaryIO) -> tuple[object, Spans]:
    """Return what the pickle in a zip file holds, and where its storages are."""
    try:
        archive = zipfile.ZipFile(_Cautious(file))
    except OSError as error:
        raise zipfile.BadZipFile("its list of members is damaged") from error
    members, end = {info.filename: info for info in archive.infolist()}, archive.start_dir
    if len(members) < len(archive.infolist()):
        raise ValueError("two of its members have one name")
    pickles = [name for name in members if name.count("/") <= 1 and name.rpartition("/")[2] == "data.pkl"]
    if len(pickles) != 1:
        raise ValueError(f"it is a zip file with {len(pickles)} pickles, wanted 1")
    folder = pickles[0].removesuffix("data.pkl")
    if f"{folder}constants.pkl" in members:
        raise ValueError("it is a program for TorchScript")
    start = f"{folder}data/"
    wanted = [
        info for name, info in members.items() if name.startswith(start) or name in (*pickles, f"{folder}byteorder")
    ]
    spans = {info.filename: _member(file, info, end) for info in wanted}
    last = 0
    for begin, size in sorted(spans.values()):
        if begin < last:
            raise ValueError("its members overlap")
        last = begin + size
    if f"{folder}byteorder" in spans and _bytes(file, spans[f"{folder}byteorder"], 6) != b"little":
        raise ValueError("its numbers begin with the highest byte, wanted the lowest")
    content = unpickle(io.BytesIO(_bytes(file, spans[pickles[0]], MOST_PICKLE)))
    return content, {name.removeprefix(start): span for name, span in spans.items() if name.startswith(start)}


def _member(file: BinaryIO, info: zipfile.ZipInfo, end: int) -> tuple[int, int]:
    """Return the first byte and the size of a member, which must be stored as it is."""
    if info.compress_type != zipfile.ZIP_STORED or info.compress_size != info.file_size or info.flag_bits & 1:
        raise ValueError(f"{info.filename} is compressed: torch.save stores it as it is")
    if not 0 <= info.header_offset < end:
        raise ValueError(f"{info.filename} is truncated")
    file.seek(info.header_offset)
    signature, name, extra = struct.unpack("<4s22xHH", file.read(30))
    begin = info.header_offset + 30 + name + extra
    if signature != b"PK\x03\x04" or begin + info.file_size > end:
        raise ValueError(f"{info.filename} is truncated")
    return begin, info.file_size


def _bytes(file: BinaryIO, span: tuple[int, int], most: int) -> bytes:
    if span[1] > most:
        raise ValueError(f"a member has {span[1]} bytes, wanted at most {most}")
    file.seek(span[0])
    return file.read(span[1])


# ---- legacy files ---------------------------------------------------------------------------------------------------


def _legacy(file: BinaryIO) -> tuple[object, Spans]:
    """Return what the fourth of a legacy file's pickles holds, and where its storages are.

    The others are a magic number, a protocol, facts about the system, and the names of the storages, which follow.
    """
    pickles = io.BytesIO(file.read(MOST_PICKLE))
    if unpickle(pickles) != MAGIC or unpickle(pickles) != PROTOCOL:
        raise ValueError("it is another kind of pickle")
    system = unpickle(pickles)
    if not isinstance(system, dict) or system.get("little_endian") is not True:
        raise ValueError("its numbers begin with the highest byte, wanted the lowest")
    storages: dict[str, Storage] = {}
    content, names = unpickle(pickles, storages), unpickle(pickles)
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ValueError("its list of storages is damaged")
    spans: Spans = {}
    position, end = pickles.tell(), file.seek(0, io.SEEK_END)
    for name in names:
        file.seek(position)
        head = file.read(8)
        dtype = storages[name].dtype if name in storages else None
        size = int.from_bytes(head, "little") * (1 if dtype is None else dtype.itemsize)
        if len(head) < 8 or name in spans or position + 8 + size > end:
            raise ValueError("its storages are truncated")
        spans[name] = position + 8, size
        position += 8 + size
    return content, spans
