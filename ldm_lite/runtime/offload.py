"""Networks that are on the device only while they compute: whole, or block by block; and their weights in 8 bits.

Weights come and go by the `data` of their tensors, so that nothing else of a network knows of it:
- offload "model": a network is on the device during its phase, which Placement.phase begins and ends;
- offload "sequential": each block is there for its own forward, and while it computes the next one is copied, on a
  stream of its own and from pinned memory;
- storage "fp8" or "int8": each block's weights are restored for its own forward.

Two threads may use one network: what both need stays until both are done.
"""

import contextlib
import sys
import threading
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ldm_lite.runtime.memory import MappedPages, trim_heap
from ldm_lite.runtime.storage import STORAGES, Stored, restore, store

OFFLOADS = ("model", "sequential")
BLOCK = 2**26  # parameters: larger blocks are divided where that is safe
AHEAD = 2**21  # parameters, about: smaller blocks are done with too soon to hide the copy of the next


class Placement:
    """Where the networks of a pipeline are kept, and their coming and going."""

    def __init__(
        self,
        networks: Mapping[str, nn.Module],
        device: torch.device,
        *,
        offload: str | None,
        storage: str | None,
    ) -> None:
        """networks by role, on the CPU, ready to run on the device; they are changed in place, for inference.

        Autoencoders are never stored in 8 bits.  Raises ValueError for names that are not in OFFLOADS or STORAGES.
        """
        for what, name, known in (("offload", offload, OFFLOADS), ("storage", storage, tuple(STORAGES))):
            if name is not None and name not in known:
                raise ValueError(f"unknown {what} {name!r}: wanted one of {', '.join(known)}")
        self.device, self.offload = device, offload
        self.dtypes = {role: next(network.parameters()).dtype for role, network in networks.items()}  # to compute in
        self._phases: dict[str, list[_Group]] = {}
        self._release = MappedPages().release
        self._stored: dict[Tensor, Stored] = {}  # of weights that come and go block by block
        for role, network in networks.items():
            if device.type == "cuda":
                network.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
            self._place(role, network, None if role == "vae" else storage)
        if storage is not None:
            trim_heap()  # to 8 bits by way of float32, a weight at a time

    @contextlib.contextmanager
    def phase(self, *roles: str) -> Iterator[None]:
        """In this block the networks of these roles can compute; phases may be nested, and a role may be of none."""
        groups = [group for role in roles for group in self._phases.get(role, ())]
        with contextlib.ExitStack() as stack:
            for group in groups:
                stack.enter_context(group)
            yield

    def read(self, weight: Tensor, device: torch.device) -> Tensor:
        """A network's weight as it computes with it, on any device, wherever and however it is kept now."""
        stored = self._stored.get(weight)
        return weight.data.to(device) if stored is None else restore(stored, device)

    def _place(self, role: str, network: nn.Module, storage: str | None) -> None:
        blocks = _blocks(network) if self.offload == "sequential" or storage else []
        ahead = self.device.type == "cuda" and self.offload == "sequential"
        stream: Any = torch.cuda.Stream(self.device) if ahead else None  # type: ignore[no-untyped-call]
        order, taken, kept = _Order(), set[Tensor](), list[Tensor]()
        for block in blocks:
            tensors = [tensor for tensor in _tensors(block) if tensor not in taken]
            taken.update(tensors)
            slots = [(tensor, self._at_home(tensor, storage)) for tensor in tensors]
            self._stored.update(slots)
            kept += [value for _, stored in slots for value in stored[:2] if value is not None]
            group = _Group(slots, self.device, stream)
            block.register_forward_pre_hook(_Before(group, order if self.offload == "sequential" else None))
            block.register_forward_hook(_After(group), always_call=True)
        rest = [tensor for tensor in _tensors(network) if tensor not in taken]
        if self.offload is None:
            for tensor in rest:
                mapped, tensor.data = tensor.data, tensor.data.to(self.device, copy=storage is not None)
                if tensor.data_ptr() != mapped.data_ptr():
                    self._release(mapped)
            return
        moved = rest + (kept if self.offload == "model" else [])
        slots = [(tensor, self._at_home(tensor, None)) for tensor in moved]
        self._phases[role] = [_Group(slots, self.device, None)]

    def _at_home(self, tensor: Tensor, storage: str | None) -> Stored:
        """A weight as it is kept, where it is kept between phases."""

        def place(value: Tensor) -> Tensor:
            if self.offload is None:
                return value.to(self.device)
            return value.pin_memory() if self.device.type == "cuda" else value

        stored = store(tensor.data, storage)
        home = Stored(place(stored.values), None if stored.scale is None else place(stored.scale), stored.dtype)
        if home.values.data_ptr() != tensor.data_ptr():
            self._release(tensor.data)
        return home


class _Group:
    """Tensors that come to the device, and go, together; a context that may be entered several times."""

    def __init__(self, slots: list[tuple[Tensor, Stored]], device: torch.device, stream: Any) -> None:
        """Each tensor with what it is restored from; stream is what copies ahead of time go by, None for none."""
        self.slots, self.device, self.stream = slots, device, stream
        self.size = sum(tensor.numel() for tensor, _ in slots)
        self._lock, self._users = threading.Lock(), 0
        self._ready: tuple[list[Tensor], Any] | None = None
        # Of now: what is stored in 8 bits comes and goes itself.
        self._home = [stored.values.data for _, stored in slots]
        self._leave()

    def __enter__(self) -> None:
        with self._lock:
            self._users += 1
            if self._users > 1:
                return
            values, copied = self._ready or self._restore()
            self._ready = None
            if copied is not None:
                now = torch.cuda.current_stream(self.device)
                now.wait_event(copied)
                for value in values:
                    value.record_stream(now)
            for (tensor, _), value in zip(self.slots, values, strict=True):
                tensor.data = value

    def __exit__(self, *error: object) -> None:
        with self._lock:
            self._users -= 1
            if self._users == 0:
                self._leave()

    def __del__(self) -> None:
        # A network may go, as ControlNets do after their job, with a copy under way that nothing has waited for: its
        # memory is the computing stream's again only when that has ended.
        values, copied = self._ready or ((), None)
        if copied is not None and not sys.is_finalizing():
            for value in values:
                value.record_stream(self.stream)

    def fetch(self) -> None:
        """Begin to restore what the next __enter__ will need."""
        with self._lock:
            if self._users == 0 and self._ready is None and self.stream is not None:
                self._ready = self._restore()

    def _leave(self) -> None:
        for (tensor, _), home in zip(self.slots, self._home, strict=True):
            tensor.data = home

    def _restore(self) -> tuple[list[Tensor], Any]:
        if self.stream is None:
            return [restore(stored, self.device) for _, stored in self.slots], None
        # Of the computing stream's memory, where a copy takes what the blocks before it have left.  Copies are queued
        # far ahead of what computes: in memory of their own stream they would take that of all blocks.
        values = [torch.empty_like(stored.values, dtype=stored.dtype, device=self.device) for _, stored in self.slots]
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.stream):
            for value, (_, stored) in zip(values, self.slots, strict=True):
                value.copy_(stored.values if stored.scale is None else restore(stored, self.device), non_blocking=True)
            return values, self.stream.record_event()


class _Order:
    """In which order blocks compute: after each those that came next the last time."""

    def __init__(self) -> None:
        self.last: _Group | None = None
        self.next: dict[_Group, _Group] = {}

    def after(self, group: _Group) -> list[_Group]:
        """What comes after a block that begins: the next one, and where that is small, those after it up to AHEAD."""
        if self.last is not None:
            self.next[self.last] = group
        self.last = group
        found, then = list[_Group](), self.next.get(group)
        while then is not None and then not in (group, *found) and sum(each.size for each in found) < AHEAD:
            found.append(then)
            then = self.next.get(then)
        return found


class _Before:
    """A block's hook: its weights come, and the next block's are on their way."""

    def __init__(self, group: _Group, order: _Order | None) -> None:
        self.group, self.order = group, order

    def __call__(self, module: nn.Module, args: object) -> None:
        self.group.__enter__()
        if self.order is not None:
            for group in self.order.after(self.group):
                group.fetch()

    def __deepcopy__(self, memo: object) -> Any:
        return _nothing  # a copy of a network has its weights for itself


class _After:
    """A block's hook: its weights go."""

    def __init__(self, group: _Group) -> None:
        self.group = group

    def __call__(self, module: nn.Module, args: object, output: object) -> None:
        self.group.__exit__()

    def __deepcopy__(self, memo: object) -> Any:
        return _nothing


def _nothing(*args: object) -> None: ...


def _tensors(module: nn.Module) -> list[Tensor]:
    return [*module.parameters(), *module.buffers()]


def _blocks(network: nn.Module) -> list[nn.Module]:
    """What a network calls one after the other, in parts of up to about BLOCK parameters.

    A part that holds layers directly is not divided: it may read their weights without calling them.
    """
    found = []
    for child in network.children():
        size = sum(tensor.numel() for tensor in _tensors(child))
        if size == 0:
            continue
        called = type(child).forward is not nn.Module.forward
        layers = any(_tensors(part) and not list(part.children()) for part in child.children())
        own = next(child.parameters(recurse=False), None) is not None
        found += _blocks(child) if not called or (size > BLOCK and not layers and not own) else [child]
    return found
