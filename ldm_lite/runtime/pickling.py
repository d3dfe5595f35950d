"""Pickling of models: errors come before a byte is written, and no weight is in a pickle twice."""

import io
import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from typing import Any, BinaryIO

import torch
from torch import Tensor, nn

from ldm_lite.runtime.offload import Offloader, moves

INSIDE = ("_parameters", "_buffers", "_modules")  # of a module: tensors, and modules, which are checked themselves


class _Dry(pickle.Pickler):
    """Pickles everything except tensors and modules."""

    def persistent_id(self, value: Any) -> str | None:
        """Name the values that are left out."""
        return type(value).__name__ if isinstance(value, (Tensor, nn.Module)) else None


def check(networks: Mapping[str, nn.Module], offloader: Offloader | None, others: Mapping[str, Any]) -> None:
    """Raises PicklingError, one line, for networks, by role, or other values, by name, that cannot be pickled."""
    for role, network in networks.items():
        if offloader is not None and not offloader.manages(network) and moves(network):
            raise pickle.PicklingError(
                f"cannot pickle the {role}: its weights move with those of the network that it was copied from"
            )
        for name, module in network.named_modules():
            attributes = {key: value for key, value in vars(module).items() if key not in INSIDE}
            if _fault(attributes):
                _check_each(f"the {role}: {name}." if name else f"the {role}: its ", attributes)
    _check_each("the ", {"offloader": offloader, **others})


def _check_each(where: str, values: Mapping[str, Any]) -> None:
    for name, value in values.items():
        if fault := _fault(value):
            raise pickle.PicklingError(
                f"cannot pickle {where}{name}, {value!r:.100}: {fault}; functions must have a name in a module that "
                "the reader can import"
            )


def _fault(value: Any) -> str:
    """Return why a value cannot be pickled; "" if it can."""
    try:
        _Dry(io.BytesIO()).dump(value)
    except Exception as error:  # reducers raise anything
        return " ".join(str(error).split()) or type(error).__name__
    return ""


# ---- tensors that torch cannot pickle as they are --------------------------------------------------------------------


def needs_packing(networks: Mapping[str, nn.Module]) -> bool:
    """Whether tensors share memory, which pickles would hold once for each, or are in fp8, which none can hold."""
    tensors = {tensor for network in networks.values() for tensor in (*network.parameters(), *network.buffers())}
    memories = [tensor.untyped_storage().data_ptr() for tensor in tensors if tensor.numel()]
    in_fp8 = any(tensor.is_floating_point() and tensor.element_size() == 1 for tensor in tensors)
    return in_fp8 or len(memories) > len(set(memories))


def packed(model: Any) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Return __reduce_ex__'s value for a model, a dataclass, whose tensors are views of storages, each pickled once."""
    packer = _Packer(file := io.BytesIO())
    packer.dump({field.name: getattr(model, field.name) for field in fields(model)})
    return _unpacked, (type(model), file.getvalue(), packer.memories)


def _unpacked(kind: type, content: bytes, memories: Sequence[Tensor]) -> Any:
    return kind(**_Unpacker(content, memories).load())


class _Packer(pickle.Pickler):
    """Puts the storages of tensors beside the pickle, as bytes."""

    def __init__(self, file: BinaryIO) -> None:
        super().__init__(file)
        self.memories: list[Tensor] = []  # uint8
        self._places: dict[int, int] = {}  # address of the memory -> its tensor
        self._tensors: list[Tensor] = []  # kept alive, so that their ids stay unique

    def persistent_id(self, value: Any) -> tuple[Any, ...] | None:
        """Describe a tensor."""
        if type(value) not in (Tensor, nn.Parameter) or value.layout != torch.strided:
            return None
        memory = value.untyped_storage()
        if memory.data_ptr() not in self._places or memory.nbytes() == 0:
            self._places[memory.data_ptr()] = len(self.memories)
            self.memories.append(torch.empty(0, dtype=torch.uint8, device=value.device).set_(memory))
        self._tensors.append(value)
        place = self._places[memory.data_ptr()]
        how = value.storage_offset(), tuple(value.shape), value.stride()
        return id(value), type(value), place, value.dtype, how, value.requires_grad


class _Unpacker(pickle.Unpickler):
    def __init__(self, content: bytes, memories: Sequence[Tensor]) -> None:
        super().__init__(io.BytesIO(content))
        self._memories, self._tensors = memories, dict[int, Tensor]()

    def persistent_load(self, pid: Any) -> Tensor:
        """Return the tensor of a description, the same object each time."""
        number, kind, place, dtype, how, needs_gradient = pid
        if number not in self._tensors:
            memory = self._memories[place]
            tensor = torch.empty(0, dtype=dtype, device=memory.device).set_(memory.untyped_storage(), *how)
            self._tensors[number] = nn.Parameter(tensor, needs_gradient) if kind is nn.Parameter else tensor
        return self._tensors[number]
