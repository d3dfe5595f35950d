"""Open PyTorch's .ckpt files safely: torch.load(weights_only=True) runs no code of a file.

Its pickle may name classes that weights need, and those that training left in original files (Lightning's
callbacks, OmegaConf's settings, numpy's numbers), which inert classes of ours replace.
"""

import io
import pickletools
import re
import threading
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, BinaryIO

import torch

MOST_PICKLE = 64 * 2**20  # bytes
MOST_OPERATIONS = 1_000_000  # these take seconds; a Stable Diffusion with its EMA copy has 60,000
_lock = threading.Lock()  # PyTorch's list of allowed classes belongs to the process


class Inert:
    """Stands for an object that weights do not need: it takes anything and keeps nothing."""

    def __init__(self, *arguments: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        pass


# "module name" of what weights need, as PyTorch allows it, except bytearray and others that take memory.
WEIGHTS = re.compile(
    r"torch (\w+Storage|b?float\w+|double|half|complex\w+|u?int\d+|long|bool|device|Size)|torch.storage UntypedStorage"
    r"|torch\._utils _rebuild_\w+|torch\._tensor _rebuild_from_type_v2|torch\.nn\.parameter Parameter"
    r"|torch\.serialization _get_layout|collections (OrderedDict|Counter)|_codecs encode|(builtins|__builtin__) set"
)
# A pattern of other names in files, and a class that replaces them; the first match counts.
INERT: list[tuple[str, type[Inert]]] = [
    (r"(pytorch_lightning|lightning\w*|omegaconf)\.\S+ \w+|typing Any", Inert),
    (r"numpy\S* (dtype|\w+DType|ndarray|scalar|_reconstruct)", Inert),
    (r"(builtins|__builtin__) (list|dict|tuple|int|long|float|bool|complex|str|object)", Inert),
]


def load_torch(path: Path) -> Any:
    """Return what a file holds: containers of tensors, mapped into memory where the file's format allows that.

    Raises ValueError, one line, for a damaged file, and for one that names other things than weights need.
    """
    try:
        with open(path, "rb") as file:
            is_zip = file.read(4) == b"PK\x03\x04"
            stand_ins: list[Any] = []
            for pickled in _pickles(file, is_zip):
                stand_ins += _stand_ins(pickled)
            mapped = is_zip and path.suffix != ".safetensors"  # PyTorch opens no pickle of that name
            file.seek(0)
            with _lock, torch.serialization.safe_globals(stand_ins):
                return torch.load(path if mapped else file, map_location="cpu", weights_only=True, mmap=mapped)
    except Exception as error:  # a damaged file may raise nearly any exception
        message = str(error).rpartition("Unpickler error: ")[2].strip() or type(error).__name__
        reason = message.splitlines()[0][:200]
        raise ValueError(f"{path}: is damaged, or more than weights, and nothing in it was run: {reason}") from error


def _pickles(file: BinaryIO, is_zip: bool) -> Iterator[IO[bytes]]:
    """Yield the pickles of a file.  Raises ValueError if they would take too much memory."""
    if not is_zip:
        file.seek(0)
        pickles = io.BytesIO(file.read(MOST_PICKLE))
        for _ in ("magic number", "protocol", "system", "content", "names of storages"):
            yield pickles  # read to the end of one pickle, which is where the next begins
        return
    archive = zipfile.ZipFile(file)
    for member in archive.infolist():
        is_pickle = member.filename.lower().endswith("data.pkl")
        is_compressed = member.compress_type != zipfile.ZIP_STORED
        if is_compressed or (is_pickle and member.file_size > MOST_PICKLE):
            raise ValueError(f"{member.filename} is compressed or too large")
        if is_pickle:
            yield archive.open(member)


def _stand_ins(pickled: IO[bytes]) -> Iterator[type]:
    """Read a pickle's operations, and yield classes for the inert names in them.

    Raises ValueError for other names, and for too many operations: a tuple counts with all that it holds, since hashing
    it, as a key of a dictionary, visits all of that, and repeated parts repeatedly; lists cannot be keys.  A text
    counts with its length.
    """
    # A pickle is a program for a machine with a stack.  It is followed here with sizes in place of objects: before
    # each operation, stack[i] is the cost of what would be the i-th object on the machine's stack, marks are the
    # heights of that stack at its open marks, and memo[k] is the cost of what was put away under k.
    stack, marks, memo, total = list[int](), list[int](), dict[Any, int](), 0
    for opcode, argument, _ in pickletools.genops(pickled):
        if opcode.name == "GLOBAL" and not WEIGHTS.fullmatch(str(argument)):
            yield _stand_in(str(argument))
        if opcode.name == "MARK":
            marks.append(len(stack))
        elif "PUT" in opcode.name:
            memo[argument] = stack[-1]
        else:
            taken = opcode.stack_before  # what the operation takes from the stack; a mark means everything above it
            start = len(stack) - len(taken)
            if pickletools.markobject in taken:
                # APPENDS and the like also take what lies below their mark: the list, then the mark, then its items.
                start = marks.pop() - taken.index(pickletools.markobject)
            if "GET" in opcode.name:
                cost = memo[argument]
            elif "TUPLE" in opcode.name:
                cost = 1 + sum(stack[start:])
            else:
                cost = 1 + len(str(argument)) // 64
            stack[start:] = [cost] * len(opcode.stack_after)
            total += stack[-1] if stack else 0
        if total > MOST_OPERATIONS:
            raise ValueError("its pickle has too many operations: download it again")


def _stand_in(names: str) -> type:
    """Return a class for what a pickle names, "module name".  Raises ValueError for names that files do not need."""
    base = next((base for pattern, base in INERT if re.fullmatch(pattern, names)), None)
    if base is None:
        what = names.replace(" ", ".")
        raise ValueError(f"its pickle names {what}, which weights do not need: use a .safetensors file")
    module, name = names.replace("__builtin__", "builtins").replace(" long", " int").split()
    return type(name, (base,), {"__module__": module, "__qualname__": name})
