"""Open PyTorch's .ckpt files safely: torch.load(weights_only=True) runs no code of a file.

It refuses every name that weights do not need.  Original files also hold what training left in them (Lightning's
callbacks, OmegaConf's settings, numpy's numbers): for these names it gets inert classes of ours.
"""

import pickletools
import threading
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

MOST_PICKLE = 64 * 2**20  # bytes
MOST_OPERATIONS = 1_000_000  # about a second; Stable Diffusion with an EMA copy takes 60,000
MOST_NESTED = 20  # tuples in tuples: hashing t = (t, t), t = (t, t), ... takes twice as long each time
# What training in the research repositories leaves in a checkpoint besides tensors: module -> names.
INERT = {
    "pytorch_lightning.callbacks.model_checkpoint": ("ModelCheckpoint",),
    "pytorch_lightning.callbacks.early_stopping": ("EarlyStopping",),
    "pytorch_lightning.utilities.parsing": ("AttributeDict",),
    "omegaconf.dictconfig": ("DictConfig",),
    "omegaconf.listconfig": ("ListConfig",),
    "omegaconf.base": ("ContainerMetadata", "Metadata"),
    "omegaconf.nodes": ("AnyNode", "ValueNode", "StringNode", "IntegerNode", "FloatNode", "BooleanNode"),
    "typing": ("Any",),
    "builtins": ("list", "dict", "int", "float", "bool", "str", "object"),
    "__builtin__": ("list", "dict", "int", "float", "bool", "str", "object", "long"),
    "numpy": ("dtype", "ndarray"),
    "numpy.core.multiarray": ("scalar", "_reconstruct"),
    "numpy._core.multiarray": ("scalar", "_reconstruct"),
    "_codecs": ("encode",),
}
_lock = threading.Lock()  # PyTorch's list of allowed classes belongs to the process


class Inert:
    """Stands for an object that weights do not need: it takes anything and keeps nothing."""

    def __new__(cls, *arguments: Any) -> "Inert":
        return super().__new__(cls)

    def __init__(self, *arguments: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        pass


# PyTorch finds an allowed class by its module and name.
STAND_INS: list[Any] = [
    type(name, (Inert,), {"__module__": module, "__qualname__": name})
    for module, names in INERT.items()
    for name in names
]


def open_torch(path: Path) -> Mapping[str, Tensor]:
    """Return the tensors of a file by key, mapped into memory where its format allows that.

    Raises ValueError, one line, for a damaged file, and for one that names something else than weights need.
    """
    is_zip = zipfile.is_zipfile(path)
    try:
        _check_pickles(path, is_zip)
        with _lock, torch.serialization.safe_globals(STAND_INS):
            content = torch.load(path, map_location="cpu", weights_only=True, mmap=is_zip or None)
    except Exception as error:  # a damaged file may raise nearly any exception
        lines = [line for line in str(error).splitlines() if "GLOBAL" in line] or str(error).splitlines() or [""]
        reason = lines[0].strip().partition(" Please use")[0][:200] or type(error).__name__
        raise ValueError(f"{path}: is damaged, or more than weights; nothing in it was run ({reason})") from error
    for _ in range(3):  # how training scripts wrap them
        if isinstance(content, dict) and isinstance(content.get("state_dict"), dict):
            content = content["state_dict"]
    items = content.items() if isinstance(content, dict) else ()
    tensors = {key: value.detach() for key, value in items if isinstance(key, str) and isinstance(value, Tensor)}
    if not tensors:
        raise ValueError(f"{path}: holds no named tensors, wanted a checkpoint")
    return tensors


def _check_pickles(path: Path, is_zip: bool) -> None:
    """Raises ValueError for pickles that would take too long or too much memory, before they are read."""
    with open(path, "rb") as file:
        if not is_zip:
            for _ in range(5):  # a magic number, a protocol, the system, the content, the names of the storages
                _check_pickle(file)
            return
        archive = zipfile.ZipFile(file)
        for member in archive.infolist():
            small = member.file_size <= MOST_PICKLE
            if member.compress_type != zipfile.ZIP_STORED or (member.filename.endswith("data.pkl") and not small):
                raise ValueError(f"{member.filename} is compressed or too large")
            if member.filename.endswith("data.pkl"):
                with archive.open(member) as pickled:
                    _check_pickle(pickled)


def _check_pickle(file: IO[bytes]) -> None:
    """Read a pickle's operations.  Tuples that contain tuples from the pickle's memory are counted generously."""
    nested, depths, is_tuple = 0, dict[Any, int](), False
    for number, (opcode, argument, _) in enumerate(pickletools.genops(file)):
        if is_tuple and "PUT" in opcode.name:
            depths[argument] = nested + 1
        elif "GET" in opcode.name:
            nested = max(nested, depths.get(argument, 0))
        is_tuple = "TUPLE" in opcode.name
        if number > MOST_OPERATIONS or nested > MOST_NESTED:
            raise ValueError("its pickle has too many operations, or tuples nested too deep")
