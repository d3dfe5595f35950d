"""Open torch's files by the core's safe reader, and find the tensors in them, however they are wrapped."""

import io
import struct
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ldm_lite.core.files import Tensors
from ldm_lite.core.torch_file import INERT, Inert, load_torch

INVERSION = "string_to_param"  # vectors of a textual inversion, in a ParameterDict
_WRAPPERS = ("state_dict", "params_ema", "params")  # the last two: BasicSR
MOST_DIMENSIONS = 8
MOST_MEMBERS = 8 * 2**20  # bytes of a zip file's list of members, some 100,000
IP_ADAPTER = ("image_proj", "ip_adapter")


class PlainDict(Inert):
    """Stands for another kind of dictionary: PyTorch fills none but plain ones."""

    def __new__(cls, *arguments: Any) -> Any:
        """Return a plain dictionary."""
        return {}


class ParameterDict(Inert):
    """Stands for torch's, and keeps its parameters."""

    parameters: object = None

    def __setstate__(self, state: Any) -> None:
        self.parameters = state.get("_parameters") if isinstance(state, dict) else None


INERT[:0] = [
    (r"(pytorch_lightning|lightning\w*)\.\S+ AttributeDict|collections defaultdict", PlainDict),
    (r"torch\.nn\.modules\.container ParameterDict", ParameterDict),
    (r"torch (Tensor|strided|contiguous_format|preserve_format|channels_last)|(builtins|__builtin__) frozenset", Inert),
]


def open_torch(path: Path) -> Tensors:
    """Open a torch file, whose tensors may be wrapped in dictionaries.

    Tensors of zip files lie in the mapped file.  Raises ValueError, one line, having run nothing in the file.
    """
    _check_members(path)
    content = load_torch(path)
    tensors = {key: value.detach() for key, value in _named(content).items() if isinstance(value, Tensor)}
    if not tensors and isinstance(content, dict) and any(type(width) is int for width in content):
        raise ValueError(f"{path}: is a hypernetwork of AUTOMATIC1111's web UI, which ldm_lite does not support")
    if not tensors:
        raise ValueError(f"{path}: holds no named tensors, expected a checkpoint")
    for key, value in tensors.items():
        if kind := _odd(value, path.stat().st_size):
            raise ValueError(f"{path}: {key:.60} is {kind}, expected an ordinary tensor")
    return Tensors(path, {key: tuple(value.shape) for key, value in tensors.items()}, tensors.__getitem__)


def _check_members(path: Path) -> None:
    """Raise ValueError for a zip file whose list of members is too long, or not where all readers look for it."""
    with open(path, "rb") as file:
        if file.read(4) != b"PK\x03\x04":
            return
        end = max(file.seek(0, io.SEEK_END), 98) - 22
        file.seek(end - 76)
        tail = file.read()
    is_end = tail[-22:-18] + tail[-2:] == b"PK\x05\x06\0\0"
    if tail[-42:-38] == b"PK\x06\x07":  # with numbers of 8 bytes
        end -= 76
        is_end &= tail[-34:-26] == end.to_bytes(8, "little")
        length, start = struct.unpack("<40xQQ", tail[:56])
    else:
        length, start = struct.unpack("<12xII2x", tail[-22:].rjust(22))
    if not is_end or start + length != end or length > MOST_MEMBERS:
        raise ValueError(f"{path}: is truncated or damaged: its list of members is missing or too long")


def _named(content: Any) -> dict[str, object]:
    """Return a file's content by key, without the dictionaries around it; lists by number."""
    for _ in range(8):
        wrapped = [content[name] for name in _WRAPPERS if name in content] if isinstance(content, dict) else []
        if not (wrapped and isinstance(wrapped[0], dict)):
            break
        content = wrapped[0]
    if not isinstance(content, dict):
        values = content if isinstance(content, (list, tuple)) else [content]
        content = dict(enumerate(values))
    if INVERSION in content:
        learned, name = content[INVERSION], content.get("name")
        learned = learned.parameters if isinstance(learned, ParameterDict) else learned
        tokens = {"*": name} if isinstance(name, str) else {}
        parts = learned.items() if isinstance(learned, dict) else ()
        content = {f"{INVERSION}.{tokens.get(key, key)}": value for key, value in parts}
    for name in IP_ADAPTER:  # two dictionaries in one
        if isinstance(inner := content.get(name), dict):
            content = {**content, **{f"{name}.{key}": value for key, value in inner.items()}}
    return {str(key): value for key, value in content.items()}


def _odd(value: Tensor, file_size: int) -> str | None:
    """Say what is unusual about a tensor; "" if its values are plain and fit in a file of so many bytes."""
    if value.is_meta:
        return "without values"
    if value.is_quantized:
        return "quantised"
    if value.layout != torch.strided:
        return "sparse"
    if value.is_conj() or value.is_neg():
        return "conjugated"
    if type(value) is not Tensor or value.is_nested:
        return "of a class of its own"
    if value.ndim > MOST_DIMENSIONS:
        return f"of {value.ndim} dimensions"
    is_held = value.numel() * value.itemsize <= value.untyped_storage().nbytes() <= file_size
    return None if is_held else f"of shape {tuple(value.shape)}, larger than what is stored"
