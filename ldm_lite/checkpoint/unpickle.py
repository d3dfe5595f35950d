"""Interpret a pickle that torch has written, without calling anything that it names.

A pickle is a program for a stack machine.  unpickle() runs it on a machine of its own, in which a call looks up a name
in a table: tensors become descriptions of where they are stored, containers become plain ones, and the classes
that Lightning, OmegaConf and numpy leave in original files become Inert.  Any other name is refused.
"""

import pickletools
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO, NamedTuple

import torch

INVERSION = "string_to_param"  # key of the vectors in a textual inversion file, in a ParameterDict
MOST_OPERATIONS = 1_000_000  # about a second; Stable Diffusion XL with an EMA copy takes 250,000


class Refused(ValueError):
    """A pickle names something that weights do not need.  args[0] is that name."""


class Storage(NamedTuple):
    """A storage that a pickle refers to: its name in the file, its dtype (None: bytes), and its number of elements."""

    key: str
    dtype: torch.dtype | None
    size: int
    start: int = 0  # in elements of the storage of that name: old files have views of storages

    @property
    def nbytes(self) -> int:
        """Bytes from the beginning of the storage of that name."""
        return (self.start + self.size) * (1 if self.dtype is None else self.dtype.itemsize)


@dataclass(frozen=True)
class Stored:
    """A tensor in a torch file: where its elements are, checked to lie in its storage."""

    storage: Storage
    dtype: torch.dtype
    offset: int  # in elements of its dtype, from the beginning of the storage of that name
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def length(self) -> int:
        """Elements from its first to its last one."""
        return _span(self.shape, self.strides)


class Named(NamedTuple):
    """A class or function that a pickle names."""

    module: str
    name: str

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"


class Inert:
    """Replaces an object that a pickle makes: holds nothing but the parameters of a ParameterDict."""

    parameters: object = None


class Special(NamedTuple):
    """Replaces a tensor that is not an ordinary one.  `kind` says what it is."""

    kind: str


# What training in the research repositories leaves in a checkpoint besides tensors: module -> names.
INERT = {
    "pytorch_lightning.callbacks.model_checkpoint": ("ModelCheckpoint",),
    "pytorch_lightning.callbacks.early_stopping": ("EarlyStopping",),
    "lightning.pytorch.callbacks.model_checkpoint": ("ModelCheckpoint",),
    "omegaconf.dictconfig": ("DictConfig",),
    "omegaconf.listconfig": ("ListConfig",),
    "omegaconf.base": ("ContainerMetadata", "Metadata"),
    "omegaconf.nodes": ("AnyNode", "ValueNode", "StringNode", "IntegerNode", "FloatNode", "BooleanNode"),
    "typing": ("Any",),
    **dict.fromkeys(
        ("builtins", "__builtin__"),
        ("list", "int", "float", "bool", "str", "set", "frozenset", "complex", "bytearray", "object"),
    ),
    "numpy": ("dtype", "ndarray"),
    "numpy.core.multiarray": ("scalar", "_reconstruct"),
    "numpy._core.multiarray": ("scalar", "_reconstruct"),
    "numpy.dtypes": ("Float64DType", "Float32DType", "Int64DType", "BoolDType"),
    "_codecs": ("encode",),
    "torch": ("device", "Size", "Tensor", "strided", "contiguous_format", "preserve_format", "channels_last"),
    "torch.serialization": ("_get_layout",),
    "torch.nn.parameter": ("Parameter",),
    "torch.nn.modules.container": ("ParameterDict",),
}
DICTS = {
    "collections": ("OrderedDict", "defaultdict", "Counter"),
    "pytorch_lightning.utilities.parsing": ("AttributeDict",),
    "lightning_fabric.utilities.data": ("AttributeDict",),
    "builtins": ("dict",),
    "__builtin__": ("dict",),
}
SPECIAL = {
    "_rebuild_sparse_tensor": "sparse",
    "_rebuild_sparse_csr_tensor": "sparse",
    "_rebuild_nested_tensor": "nested",
    "_rebuild_qtensor": "quantised",
    "_rebuild_meta_tensor_no_storage": "without values",
    "_rebuild_device_tensor_from_numpy": "of another device",
    "_rebuild_device_tensor_from_cpu_tensor": "of another device",
    "_rebuild_wrapper_subclass": "of a class of its own",
}
STORAGES = {
    f"{name}Storage": dtype
    for name, dtype in {
        **{"Double": torch.float64, "Float": torch.float32, "Half": torch.float16, "BFloat16": torch.bfloat16},
        **{"Long": torch.int64, "Int": torch.int32, "Short": torch.int16, "Char": torch.int8, "Byte": torch.uint8},
        **{"Bool": torch.bool, "ComplexDouble": torch.complex128, "ComplexFloat": torch.complex64},
        "Untyped": None,
    }.items()
}


DTYPES = {name: value for name, value in vars(torch).items() if isinstance(value, torch.dtype)}
DTYPES = {name: dtype for name, dtype in DTYPES.items() if not re.match(r"q|bits|u?int[1-7]$|float4", name)}


def unpickle(file: BinaryIO, storages: dict[str, Storage] | None = None) -> object:
    """Return what the pickle at the file's position makes, having called nothing; the file is then behind it.

    All storages that it refers to are added to `storages`.  Raises Refused if it names anything that weights do not
    need, and ValueError if it is damaged.
    """
    machine = _Machine({} if storages is None else storages)
    try:
        for number, (opcode, argument, _) in enumerate(pickletools.genops(file)):
            if number == MOST_OPERATIONS:
                raise ValueError("its pickle is too long")
            if opcode.name == "STOP":
                return machine.pop()
            OPERATIONS.get(opcode.name, _unknown)(machine, argument)
    except (IndexError, KeyError, AttributeError, TypeError, RecursionError) as error:  # of the pickle, on the stack
        raise ValueError("its pickle is damaged") from error
    raise ValueError("its pickle has no end")


# ---- the machine ----------------------------------------------------------------------------------------------------


class _Machine:
    """The stack, the positions of marks in it, and the memo."""

    def __init__(self, storages: dict[str, Storage]) -> None:
        self.storages = storages
        self.stack: list[Any] = []
        self.marks: list[int] = []
        self.memo: dict[int, Any] = {}

    def pop(self) -> Any:
        if self.marks and self.marks[-1] == len(self.stack):
            raise ValueError("its pickle is damaged")
        return self.stack.pop()

    def pop_to_mark(self) -> list[Any]:
        start = self.marks.pop()
        items, self.stack[start:] = self.stack[start:], []
        return items

    def discard(self) -> None:
        if self.marks and self.marks[-1] == len(self.stack):
            self.marks.pop()
        else:
            self.pop()

    def discard_to_mark(self, *then: object) -> None:
        self.pop_to_mark()
        self.stack.extend(then)

    def push(self, value: object) -> None:
        self.stack.append(value)

    def push_tuple(self, size: int) -> None:
        items = [self.pop() for _ in range(size)]
        self.push(tuple(reversed(items)))

    def append(self, items: Sequence[object]) -> None:
        if isinstance(self.stack[-1], list):
            self.stack[-1].extend(items)

    def set_items(self, items: Sequence[object]) -> None:
        if isinstance(self.stack[-1], dict):
            self.stack[-1].update(_dict(items))

    def name(self, module: object, name: object) -> None:
        if not isinstance(module, str) or not isinstance(name, str):
            raise ValueError("its pickle is damaged")
        named = Named(module, name)
        inert = name in (*INERT.get(module, ()), *DICTS.get(module, ()))
        if not (inert or named in REBUILD or _dtype(named) or _is_storage(named)):
            raise Refused(str(named)[:200])
        self.push(named)

    def call(self, arguments: object) -> None:
        made = _call(self.pop(), arguments)
        self.push(made)

    def build(self) -> None:
        state, made = self.pop(), self.stack[-1]
        if isinstance(made, Inert) and isinstance(state, dict):
            made.parameters = state.get("_parameters")

    def load(self, identity: Any) -> None:
        kind, storage, key, _, size, *view = identity
        if kind != "storage" or not _is_storage(storage) or not isinstance(key, str) or not _is_size(size):
            raise ValueError("its pickle refers to something else than storages")
        whole = Storage(key, STORAGES[storage.name], size)
        if self.storages.setdefault(key, whole).dtype != whole.dtype:
            raise ValueError("a storage has two dtypes")
        if view and view[0] is not None:  # (name, offset, size) in elements
            _, start, length = view[0]
            if not (_is_size(start) and _is_size(length)):
                raise ValueError("a view of a storage is damaged")
            whole = whole._replace(start=start, size=length)
        self.push(whole)


def _dtype(named: object) -> torch.dtype | None:
    return DTYPES.get(named.name) if isinstance(named, Named) and named.module == "torch" else None


def _is_storage(named: object) -> bool:
    return isinstance(named, Named) and named.module in ("torch", "torch.storage") and named.name in STORAGES


def _dict(items: Sequence[object]) -> dict[str | int, object]:
    """Return the pairs of keys and values that can be weights: nested keys could take forever to hash."""
    pairs = zip(items[::2], items[1::2], strict=True)
    return {key: value for key, value in pairs if isinstance(key, str) or (isinstance(key, int) and _is_size(key))}


def _unknown(machine: _Machine, argument: object) -> None:
    raise ValueError("its pickle is damaged")


Operation = Callable[[_Machine, Any], None]
VALUES = (
    *("INT", "LONG", "BININT", "BININT1", "BININT2", "LONG1", "LONG4", "FLOAT", "BINFLOAT", "STRING", "BINSTRING"),
    *("SHORT_BINSTRING", "BINBYTES", "SHORT_BINBYTES", "BINBYTES8", "BYTEARRAY8", "UNICODE", "BINUNICODE"),
    *("SHORT_BINUNICODE", "BINUNICODE8"),
)
GETS, PUTS = ("GET", "BINGET", "LONG_BINGET"), ("PUT", "BINPUT", "LONG_BINPUT")
OPERATIONS: dict[str, Operation] = {
    **dict.fromkeys(VALUES, lambda m, value: m.push(value)),
    **dict.fromkeys(("PROTO", "FRAME"), lambda m, _: None),
    "NONE": lambda m, _: m.push(None),
    "NEWTRUE": lambda m, _: m.push(True),
    "NEWFALSE": lambda m, _: m.push(False),
    "EMPTY_LIST": lambda m, _: m.push([]),
    "EMPTY_DICT": lambda m, _: m.push({}),
    "EMPTY_TUPLE": lambda m, _: m.push(()),
    "EMPTY_SET": lambda m, _: m.push(Inert()),
    "TUPLE1": lambda m, _: m.push_tuple(1),
    "TUPLE2": lambda m, _: m.push_tuple(2),
    "TUPLE3": lambda m, _: m.push_tuple(3),
    "MARK": lambda m, _: m.marks.append(len(m.stack)),
    "TUPLE": lambda m, _: m.push(tuple(m.pop_to_mark())),
    "LIST": lambda m, _: m.push(m.pop_to_mark()),
    "DICT": lambda m, _: m.push(_dict(m.pop_to_mark())),
    "FROZENSET": lambda m, _: m.discard_to_mark(Inert()),
    "POP": lambda m, _: m.discard(),
    "POP_MARK": lambda m, _: m.discard_to_mark(),
    "DUP": lambda m, _: m.push(m.stack[-1]),
    "APPEND": lambda m, _: m.append([m.pop()]),
    "APPENDS": lambda m, _: m.append(m.pop_to_mark()),
    "ADDITEMS": lambda m, _: m.append(m.pop_to_mark()),
    "SETITEM": lambda m, _: m.set_items([m.pop(), m.pop()][::-1]),
    "SETITEMS": lambda m, _: m.set_items(m.pop_to_mark()),
    **dict.fromkeys(GETS, lambda m, index: m.push(m.memo[index])),
    **dict.fromkeys(PUTS, lambda m, index: m.memo.__setitem__(index, m.stack[-1])),
    "MEMOIZE": lambda m, _: m.memo.__setitem__(len(m.memo), m.stack[-1]),
    "GLOBAL": lambda m, names: m.name(*names.split(" ", 1)),
    "STACK_GLOBAL": lambda m, _: m.name(*[m.pop(), m.pop()][::-1]),
    "REDUCE": lambda m, _: m.call(m.pop()),
    "NEWOBJ": lambda m, _: m.call(m.pop()),
    "NEWOBJ_EX": lambda m, _: m.call([m.pop(), m.pop()][1]),
    "BUILD": lambda m, _: m.build(),
    "BINPERSID": lambda m, _: m.load(m.pop()),
}


# ---- tensors --------------------------------------------------------------------------------------------------------


def _call(function: object, arguments: object) -> object:
    """Return what replaces the result of a call."""
    if not isinstance(function, Named) or not isinstance(arguments, tuple):
        raise ValueError("its pickle is damaged")
    if function in REBUILD:
        return REBUILD[function](*arguments)
    if function.name in DICTS.get(function.module, ()):
        pairs = arguments[0] if arguments and isinstance(arguments[0], list) else []  # as Python 2 wrote them
        if not all(isinstance(pair, (list, tuple)) and len(pair) == 2 for pair in pairs):
            raise ValueError("its pickle is damaged")
        return _dict([item for pair in pairs for item in pair])
    return Inert()


def _is_size(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**48


def _span(shape: Sequence[int], strides: Sequence[int]) -> int:
    if 0 in shape:
        return 0
    return 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))


def _tensor(storage: object, offset: object, shape: object, strides: object, *rest: object) -> object:
    """torch._utils._rebuild_tensor_v2(storage, offset, size, stride, requires_grad, hooks, metadata)."""
    conjugated = len(rest) > 2 and bool(rest[2])
    if not isinstance(storage, Storage) or storage.dtype is None:
        raise ValueError("a tensor has no storage")
    return Special("conjugated") if conjugated else _stored(storage, storage.dtype, offset, shape, strides)


def _untyped(storage: object, offset: object, shape: object, strides: object, *rest: object) -> object:
    """torch._utils._rebuild_tensor_v3(storage, offset, size, stride, requires_grad, hooks, dtype, metadata)."""
    found = _dtype(rest[2])
    if not isinstance(storage, Storage) or found is None:
        raise ValueError("a tensor has no storage or no dtype")
    return _stored(storage, found, offset, shape, strides)


def _stored(storage: Storage, dtype: torch.dtype, offset: Any, shape: Any, strides: Any) -> Stored:
    if not (_is_size(offset) and isinstance(shape, tuple) and isinstance(strides, tuple)):
        raise ValueError("a tensor's shape is damaged")
    if len(shape) != len(strides) or len(shape) > 64 or not all(map(_is_size, (*shape, *strides))):
        raise ValueError("a tensor's shape is damaged")
    held = storage.size * (1 if storage.dtype is None else storage.dtype.itemsize) // dtype.itemsize
    numel = 1
    for size in shape:
        numel *= size
    if offset + _span(shape, strides) > held or numel > held:
        raise ValueError(f"a tensor of shape {shape} is larger than its storage, of {held} elements")
    start = 0 if storage.dtype is None else storage.start
    return Stored(storage, dtype, start + offset, shape, strides)


def _first(value: object, *rest: object) -> object:
    """torch._utils._rebuild_parameter(data, requires_grad, hooks)."""
    return value


def _typed(function: object, kind: object, arguments: object, state: object) -> object:
    """torch._tensor._rebuild_from_type_v2(function, type, arguments, state)."""
    return _call(function, arguments)


def _special(kind: str) -> Callable[..., Special]:
    return lambda *arguments: Special(kind)


REBUILD: Mapping[Named, Callable[..., object]] = {
    Named("torch._utils", "_rebuild_tensor"): _tensor,
    Named("torch._utils", "_rebuild_tensor_v2"): _tensor,
    Named("torch._utils", "_rebuild_tensor_v3"): _untyped,
    Named("torch._utils", "_rebuild_parameter"): _first,
    Named("torch._utils", "_rebuild_parameter_with_state"): _first,
    Named("torch._tensor", "_rebuild_from_type_v2"): _typed,
    **{Named("torch._utils", name): _special(kind) for name, kind in SPECIAL.items()},
}
