"""Read torch's zip files and legacy pickles without running any code in them.

Pickles are read with weights_only=True.  Inert stand-ins replace the classes that Lightning, OmegaConf and numpy leave
in original files; anything else in them is refused by name.
"""

import pickle
import re
import threading
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor


class _Inert:
    """Replaces a class or function named in a pickle: takes any arguments and state, and does nothing."""

    def __new__(cls, *args: object, **kwargs: object) -> "_Inert":
        return super().__new__(cls)

    def __init__(self, *args: object, **kwargs: object) -> None: ...
    def __setstate__(self, state: object) -> None: ...


# What training in the research repositories leaves in a checkpoint besides tensors: module -> names.
STAND_INS = {
    "pytorch_lightning.callbacks.model_checkpoint": ("ModelCheckpoint",),
    "pytorch_lightning.callbacks.early_stopping": ("EarlyStopping",),
    "pytorch_lightning.utilities.parsing": ("AttributeDict",),
    "lightning.pytorch.callbacks.model_checkpoint": ("ModelCheckpoint",),
    "lightning_fabric.utilities.data": ("AttributeDict",),
    "omegaconf.dictconfig": ("DictConfig",),
    "omegaconf.listconfig": ("ListConfig",),
    "omegaconf.base": ("ContainerMetadata", "Metadata"),
    "omegaconf.nodes": ("AnyNode", "ValueNode", "StringNode", "IntegerNode", "FloatNode", "BooleanNode"),
    "typing": ("Any",),
    "collections": ("defaultdict",),
    "builtins": ("dict", "list", "int", "float", "bool", "str"),
    "numpy": ("dtype", "ndarray"),
    "numpy.core.multiarray": ("scalar", "_reconstruct"),
    "numpy._core.multiarray": ("scalar", "_reconstruct"),
    "numpy.dtypes": ("Float64DType", "Float32DType", "Int64DType", "BoolDType"),
    "_codecs": ("encode",),
}


def stand_ins() -> list[Callable[..., Any] | tuple[Callable[..., Any], str]]:
    """Return the stand-ins as torch.serialization.safe_globals takes them."""
    parameters = (_Parameters, "torch.nn.modules.container.ParameterDict")
    inert = [
        type(name, (_Inert,), {"__module__": module, "__qualname__": name})
        for module, names in STAND_INS.items()
        for name in names
    ]
    return [*inert, parameters]


INVERSION = "string_to_param"  # key of the vectors in a textual inversion file


class _Parameters(_Inert):
    """Replaces the ParameterDict that holds the vectors in files of the original textual inversion."""

    values: object = None

    def __setstate__(self, state: object) -> None:
        if isinstance(state, Mapping) and "_parameters" in state:
            self.values = state["_parameters"]


_UNPICKLING = threading.Lock()  # torch keeps the list of allowed globals in the process


def is_mapped(path: Path, is_zip: bool) -> bool:
    """Whether torch can memory-map the file: it would parse any file named .safetensors as safetensors."""
    return is_zip and path.suffix != ".safetensors"


def unpickle(path: Path, is_zip: bool) -> dict[str, Tensor]:
    """Return the tensors of a torch file by key, unwrapped.  Raises ValueError, having run nothing in the file."""
    try:
        with open(path, "rb") as file, _UNPICKLING, torch.serialization.safe_globals(stand_ins()):
            if is_mapped(path, is_zip):
                content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
            else:
                content = torch.load(file, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        refused = re.search(r"GLOBAL (\S+)|(?:function|class) (\S+)", str(error))
        if refused is None:
            raise ValueError(
                f"{path}: is a damaged pickle, or one that is not a checkpoint; nothing in it was run"
            ) from error
        name = refused[1] or refused[2]
        raise ValueError(
            f"{path}: refused, nothing in it was run: its pickle names {name}, which weights do not need. "
            "Use the .safetensors file of this model, or convert it to safetensors on a machine where that is safe"
        ) from error
    except (RuntimeError, EOFError, zipfile.BadZipFile, OSError, ValueError, KeyError, TypeError, IndexError) as error:
        reason = str(error).splitlines()[0][:120] if str(error) else type(error).__name__
        raise ValueError(f"{path}: is truncated or damaged ({reason}): download it again") from error
    while isinstance(content, Mapping) and isinstance(content.get("state_dict"), Mapping):
        content = content["state_dict"]
    if isinstance(content, Mapping) and INVERSION in content:
        learned, name = content[INVERSION], content.get("name")
        learned = learned.values if isinstance(learned, _Parameters) else learned
        own = {"*": name} if isinstance(name, str) else {}
        parts = learned.items() if isinstance(learned, Mapping) else ()
        content = {f"{INVERSION}.{own.get(key, key)}": value for key, value in parts}
    tensors = {str(k): v for k, v in content.items() if isinstance(v, Tensor)} if isinstance(content, Mapping) else {}
    if not tensors:
        raise ValueError(f"{path}: holds no named tensors, wanted a checkpoint")
    return tensors
