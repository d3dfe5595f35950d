"""Open checkpoint files: first bytes choose the opener, then small adapters turn other layouts into the original one.

Other formats add to OPENERS, other layouts to ADAPTERS; an entry may be named, "module:function", and is imported when
a file needs it.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from ldm_lite.core.layers import Shapes
from ldm_lite.core.torch_file import load_torch


@dataclass(frozen=True, eq=False)
class Tensors(Mapping[str, Tensor]):
    """The tensors of a file by key, each read when it is asked for, on the CPU."""

    path: Path
    shapes: Shapes
    read: Callable[[str], Tensor]
    metadata: Mapping[str, str] = field(default_factory=dict)

    def __getitem__(self, key: str) -> Tensor:
        if key not in self.shapes:
            raise KeyError(key)
        return self.read(key)

    def __iter__(self) -> Iterator[str]:
        return iter(self.shapes)

    def __len__(self) -> int:
        return len(self.shapes)

    def renamed(self, keys: Mapping[str, str]) -> Tensors:
        """Return a view with other keys: new -> old.  Tensors that are not named are left out."""
        shapes = {new: self.shapes[old] for new, old in keys.items()}
        return replace(self, shapes=shapes, read=lambda new: self.read(keys[new]))


def bundled() -> Path:
    """The model that comes with the package: beside its modules, or in the checkout.  Raises FileNotFoundError."""
    for folder in list(Path(__file__).parents)[:3]:
        path = folder / "weights" / "emoji.safetensors"
        if path.exists():
            return path
    raise FileNotFoundError(f"{path}: the bundled model is missing: give the path of a checkpoint")


def open_tensors(path: Path) -> Tensors:
    """Open a checkpoint, whatever its extension, in the original layout.  No code in it is run.

    Raises FileNotFoundError, and ValueError, one line, for a file that is not a checkpoint or is damaged.
    """
    with open(path, "rb") as file:
        head = file.read(64)
    for first_bytes, opener in OPENERS:
        if re.match(first_bytes, head, re.DOTALL):
            tensors: Tensors = imported(opener)(path)
            for pattern, adapter in ADAPTERS:
                if any(re.search(pattern, key) for key in tensors):
                    adapted = imported(adapter)(tensors)
                    tensors = tensors if adapted is None else adapted
            return tensors
    if head.startswith(b"version https://git-lfs"):
        raise ValueError(f"{path}: is a Git LFS pointer, not the weights themselves: run `git lfs pull`")
    raise ValueError(f"{path}: is not a checkpoint (starts with {head[:8]!r}), expected .safetensors or .ckpt")


def _open_safetensors(path: Path) -> Tensors:
    try:
        file: Any = safe_open(path, framework="pt")
    except SafetensorError as error:
        raise ValueError(f"{path}: is a truncated or damaged safetensors file ({error}): download it again") from error
    shapes = {key: tuple(file.get_slice(key).get_shape()) for key in file.keys()}  # noqa: SIM118
    return Tensors(path, shapes, file.get_tensor, file.metadata() or {})


def _open_torch(path: Path) -> Tensors:
    content = load_torch(path)
    content = content if isinstance(content, dict) else {}
    if isinstance(content.get("state_dict"), dict):  # as training scripts wrap the weights
        content = content["state_dict"]
    tensors = {}
    for key, value in content.items():
        if isinstance(key, str) and isinstance(value, Tensor):
            tensors[key] = value.detach()
    if not tensors:
        raise ValueError(f"{path}: holds no named tensors, expected a checkpoint")
    shapes = {key: tuple(tensor.shape) for key, tensor in tensors.items()}
    return Tensors(path, shapes, read=tensors.__getitem__)


# A pattern of a file's first bytes, and a function Path -> Tensors.
OPENERS: list[tuple[bytes, Any]] = [
    (rb".{8}\{", _open_safetensors),  # the header's length, and JSON
    (rb"PK\x03\x04|\x80", _open_torch),  # a zip file, or a pickle alone
]
# A pattern of a key, and a function Tensors -> Tensors in the original layout, or None.  All that match are tried.
ADAPTERS: list[tuple[str, Any]] = [(r"token_embedding\.rows$", f"{__package__}.words:whole_tables")]


def imported(entry: Any) -> Any:
    """Return an entry of a table, imported if it is named: "module:name"."""
    if not isinstance(entry, str):
        return entry
    module, _, name = entry.partition(":")
    return getattr(importlib.import_module(module), name)
