"""Offloading and weight quantisation: a network's weights are on the device, in full, only while they compute.

Weights move by replacing the `data` of their tensors, so the rest of a network is unaffected:
- offload "model": a network is on the device during its phase, between enter and exit of Offloader.phase;
- offload "sequential": each block is there for its own forward, while the next one is copied from pinned memory, on a
  separate stream;
- storage "fp8" or "int8": each block's weights are dequantised for its own forward.

Two threads may use one network: weights that both need stay until both are done.
"""

import contextlib
import functools
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from pickle import PicklingError
from typing import Any

import torch
from torch import Tensor, nn

from ldm_lite.models.ops import TransformerBlock
from ldm_lite.models.t5 import T5Layers as T5Stack
from ldm_lite.runtime.memory import MappedPages, trim_heap, weights_channels_last
from ldm_lite.runtime.quantization import STORAGES, Quantized, dequantize, quantize

OFFLOADS = ("model", "sequential")
BLOCK = 2**26  # parameters: larger blocks are divided where that is safe
AHEAD = 2**21  # parameters, about: smaller blocks compute too fast to hide the copy of the next
DIVISIBLE = (T5Stack,)  # it calls each of its parts


class Offloader:
    """Moves the weights of a pipeline's networks to the device and back, and dequantises them."""

    def __init__(
        self,
        networks: Mapping[str, nn.Module],
        device: torch.device,
        *,
        offload: str | None = None,
        storage: str | None = None,
        quantized: Mapping[Tensor, Quantized] | None = None,
    ) -> None:
        """Manage networks, by role, that are on the CPU; they are changed in place, for inference.

        Autoencoders are never quantised.  quantized describes weights that are in 8 bits already.  Raises
        ValueError for names that are not in OFFLOADS or STORAGES.
        """
        for what, name, known in (("offload", offload, OFFLOADS), ("storage", storage, tuple(STORAGES))):
            if name is not None and name not in known:
                raise ValueError(f"unknown {what} {name!r}: expected one of {', '.join(known)}")
        self.device, self.offload, self.storage = device, offload, storage
        self._networks, self._quantized = networks, quantized or {}
        self.dtypes = {role: next(network.parameters()).dtype for role, network in networks.items()}  # to compute in
        self._phases: dict[str, _Group] = {}
        self._release = MappedPages().release
        self._groups: dict[Tensor, _Group] = {}  # by the weights, and by the quantised values and scales that move
        for role, network in networks.items():
            if device.type == "cuda":
                weights_channels_last(network)
            self._place(role, network, None if role == "vae" else storage)
        self._quantized = {}
        if storage is not None:
            trim_heap()  # quantisation computes in float32, one weight at a time

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle, or copy deeply, the networks with the scales of their weights; they are placed anew."""
        groups = {id(group): group for group in (*self._groups.values(), *self._phases.values())}
        if any(group.is_used for group in groups.values()):
            raise PicklingError("its networks are computing, and their weights are moving: wait for the images")
        kept = {weight: group.kept[weight] for weight, group in self._groups.items()}
        quantized = {
            weight: value._replace(values=torch.empty(0)) for weight, value in kept.items() if value.scale is not None
        }
        return _placed, (self._networks, self.device, self.offload, self.storage, self.dtypes, quantized)

    @contextlib.contextmanager
    def phase(self, *roles: str) -> Iterator[None]:
        """Keep networks, by role, ready to compute within the block.  Phases may nest; unknown roles are ignored."""
        with contextlib.ExitStack() as stack:
            for role in roles:
                if role in self._phases:
                    stack.enter_context(self._phases[role])
            yield

    def read(self, weight: Tensor, device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
        """Return the value of a network's weight, wherever it is now; it may share memory with the weight.

        dtype None is the one that the network computes in.
        """
        group = self._groups.get(weight)
        if group is None:
            return weight.data.to(device, dtype)
        kept = group.kept[weight]
        return dequantize(kept if dtype is None else kept._replace(dtype=dtype), device).to(dtype or kept.dtype)

    def kept(self, weight: Tensor) -> Quantized:
        """Return how a network's weight is kept between computations: in 8 bits, or as it is."""
        group = self._groups.get(weight)
        return quantize(weight.data, None) if group is None else group.kept[weight]

    def write(self, weight: Tensor, value: Tensor) -> None:
        """Replace the value of a weight that is not quantised, in the memory where it is kept.

        A forward that is running in another thread may see either value.
        """
        group = self._groups.get(weight)
        if group is None:
            weight.data.copy_(value)
            return
        with group.writing(weight) as kept:
            self.write(kept.values, value)  # which may move too

    @contextlib.contextmanager
    def changing(self, weight: Tensor) -> Iterator[Quantized]:
        """Let the block add or remove changes of a quantised weight, which the next forward makes."""
        with self._groups[weight].writing(weight) as kept:
            yield kept

    def differentiable(self, network: nn.Module) -> None:
        """Let gradients pass through a network whose blocks move or are in 8 bits, if its activations are recomputed.

        A block's weights are then read anew for each forward, and live as long as the backward pass needs them.
        """
        for block in _without_hooks(network):
            block.forward = functools.partial(self._read, block.forward, block)

    def manages(self, network: nn.Module) -> bool:
        """Whether this is one of the networks."""
        return any(network is managed for managed in self._networks.values())

    def release(self, *roles: str) -> None:
        """Free the copies of networks that stay where they are now: on the device, say, in a phase that never ends."""
        for group in [self._phases.pop(role) for role in roles if role in self._phases]:
            self._groups = {tensor: home for tensor, home in self._groups.items() if home is not group}
            group.kept, group._home = {}, []

    def _read(self, forward: Any, block: nn.Module, *args: Any, **named: Any) -> Any:
        """Run a block's forward with its weights as attributes, which hide its parameters."""
        hidden = list[tuple[dict[str, Any], str]]()
        try:
            for part in block.modules():
                for name, weight in part.named_parameters(recurse=False):
                    if name not in vars(part):  # else an outer block's forward has read it
                        vars(part)[name] = self.read(weight, self.device)
                        hidden.append((vars(part), name))
            return forward(*args, **named)
        finally:
            for attributes, name in hidden:
                del attributes[name]

    def _place(self, role: str, network: nn.Module, storage: str | None) -> None:
        """Decide where each tensor of a network is kept, and register the hooks of its blocks."""
        blocks = _blocks(network) if self.offload == "sequential" or storage else []
        ahead = self.device.type == "cuda" and self.offload == "sequential"
        stream: Any = torch.cuda.Stream(self.device) if ahead else None  # type: ignore[no-untyped-call]
        order, members, homes = _Order(), list[list[Tensor]](), dict[Tensor, Quantized]()
        for block in blocks:
            members.append([tensor for tensor in _tensors(block) if not (tensor in self._groups or tensor in homes)])
            homes |= {tensor: self._stored(tensor, storage) for tensor in members[-1]}
        moved = [value for home in homes.values() for value in home[:2] if value is not None]
        unblocked = [tensor for tensor in _tensors(network) if not (tensor in self._groups or tensor in homes)]
        if self.offload is None:
            for tensor in unblocked:
                mapped, tensor.data = tensor.data, tensor.data.to(self.device, copy=storage is not None)
                if tensor.data_ptr() != mapped.data_ptr():
                    self._release(mapped)
        else:
            homes |= {tensor: self._stored(tensor, None) for tensor in unblocked}
            if self.device.type == "cuda":
                self._pin(homes)
        groups = []
        for block, tensors in zip(blocks, members, strict=True):
            groups.append(self._group({tensor: homes[tensor] for tensor in tensors}, stream))
            hooks = _Hooks(groups[-1], order if self.offload == "sequential" else None)
            block.register_forward_pre_hook(hooks.before)
            block.register_forward_hook(hooks.after, always_call=True)
        if self.offload is not None:
            homes |= {value: quantize(value.data, None) for value in moved}
            together = unblocked + (moved if self.offload == "model" else [])
            self._phases[role] = self._group({tensor: homes[tensor] for tensor in together}, None)
            self._phases[role].blocks = groups

    def _stored(self, tensor: Tensor, storage: str | None) -> Quantized:
        """Return the form in which a tensor is kept: on the device, if it never moves."""
        known = self._quantized.get(tensor)
        home = quantize(tensor.data, storage) if known is None else known._replace(values=tensor.data)
        if self.offload is None:
            scale = None if home.scale is None else home.scale.to(self.device)
            home = home._replace(values=home.values.to(self.device), scale=scale)
        if home.values.data_ptr() != tensor.data_ptr():
            self._release(tensor.data)
        return home

    def _pin(self, homes: Mapping[Tensor, Quantized]) -> None:
        """Move the stored form of tensors to pinned memory, and the tensors with it, so that old memory is freed."""
        kept = [(tensor, value) for tensor, home in homes.items() for value in home[:2] if value is not None]
        for place, copy in in_pinned_memory([value for _, value in kept]):
            tensor, value = kept[place]
            self._release(value)
            if value is homes[tensor].values:
                tensor.data = copy
            value.data = copy

    def _group(self, homes: Mapping[Tensor, Quantized], stream: Any) -> "_Group":
        """Group tensors that move together."""
        group = _Group(homes, self.device, stream)
        self._groups |= dict.fromkeys(homes, group)
        return group


def _placed(
    networks: Mapping[str, nn.Module],
    device: torch.device,
    offload: str | None,
    storage: str | None,
    dtypes: dict[str, torch.dtype],
    quantized: Mapping[Tensor, Quantized],
) -> Offloader:
    """Return the offloader of networks that were pickled or copied."""
    for network in networks.values():
        _without_hooks(network)
    offloader = Offloader(networks, device, offload=offload, storage=storage, quantized=quantized)
    offloader.dtypes = dtypes
    return offloader


class _Group:
    """Tensors that move to the device and back together; a context manager that may be entered several times."""

    def __init__(self, kept: Mapping[Tensor, Quantized], device: torch.device, stream: Any) -> None:
        """Group tensors, each with its stored form; stream is for prefetching, None without it."""
        self.kept, self.device, self.stream = kept, device, stream
        self.size = sum(tensor.numel() for tensor in kept)
        self._lock, self._users = threading.Lock(), 0
        self._ready: tuple[list[Tensor], Any] | None = None  # prefetched values, and the event of their copy
        self._copied: Any = None  # the event of the copy of the values that are in use
        self.blocks: list[_Group] = []  # their prefetched values are dropped when this group leaves: the end of a phase
        # The current tensors: quantised values may move too, in a separate group.
        self._home = [home.values.data for home in kept.values()]
        self._leave()

    def __enter__(self) -> None:
        with self._lock:
            self._users += 1
            if self._users == 1:
                values, self._copied = self._ready or self._restore()
                self._ready = None
                for tensor, value in zip(self.kept, values, strict=True):
                    tensor.data = value
            if self._copied is not None:  # every thread may compute on its own stream
                now = torch.cuda.current_stream(self.device)
                now.wait_event(self._copied)
                for tensor in self.kept:
                    tensor.data.record_stream(now)

    def __exit__(self, *error: object) -> None:
        with self._lock:
            self._users -= 1
            if self._users == 0:
                self._leave()
                for block in self.blocks:
                    block.drop()

    def __del__(self) -> None:
        # A network may be deleted, as ControlNets are after their job, with a prefetch under way.
        if not sys.is_finalizing():
            self._discard()

    @property
    def is_used(self) -> bool:
        """Whether the tensors are away from where they are kept."""
        return self._users > 0

    def prefetch(self) -> None:
        """Begin to restore the tensors that the next __enter__ will need."""
        with self._lock:
            if self._users == 0 and self._ready is None and self.stream is not None:
                self._ready = self._restore()

    def drop(self) -> None:
        """Free unused prefetched tensors: those of the block that begins the next step, if there is no next step."""
        with self._lock:
            self._discard()

    @contextlib.contextmanager
    def writing(self, tensor: Tensor) -> Iterator[Quantized]:
        """Let the block change the stored form of a tensor; no older copy of it is used afterwards."""
        with self._lock:
            self._discard()
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)  # queued copies still read what will be overwritten
            yield self.kept[tensor]
            if self._users:
                tensor.data.copy_(dequantize(self.kept[tensor], self.device))

    def _discard(self) -> None:
        """Drop prefetched values: the computing stream gets their memory back only when the copy has ended."""
        values, copied = self._ready or ((), None)
        self._ready = None
        if copied is not None:
            for value in values:
                value.record_stream(self.stream)

    def _leave(self) -> None:
        for tensor, home in zip(self.kept, self._home, strict=True):
            tensor.data = home

    def _restore(self) -> tuple[list[Tensor], Any]:
        if self.stream is None:
            values = [dequantize(home, self.device) for home in self.kept.values()]
            on_cuda = self.device.type == "cuda"
            return values, torch.cuda.current_stream(self.device).record_event() if on_cuda else None
        # Allocated on the computing stream, so that a copy reuses the memory of earlier blocks.  Copies are queued far
        # ahead of the computation: allocated on their own stream they would need the memory of all blocks.
        values = [torch.empty_like(home.values, dtype=home.dtype, device=self.device) for home in self.kept.values()]
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.stream):
            for value, home in zip(values, self.kept.values(), strict=True):
                value.copy_(home.values if home.scale is None else dequantize(home, self.device), non_blocking=True)
            return values, self.stream.record_event()


LARGEST = 2**30  # bytes of a piece of pinned memory, unless one tensor is larger


def in_pinned_memory(tensors: Sequence[Tensor]) -> Iterator[tuple[int, Tensor]]:
    """Yield copies of tensors in pinned memory, each with the number of its tensor, in the order of the pieces."""
    for size, places in packed([tensor.nbytes for tensor in tensors]):
        memory = torch.empty(size, dtype=torch.uint8, pin_memory=True)
        for number, start in places.items():
            tensor = tensors[number]
            numbers = memory[start : start + tensor.nbytes].view(tensor.dtype)
            strides = torch.empty_like(tensor, device="meta").stride()
            yield number, numbers.as_strided(tensor.shape, strides).copy_(tensor)


def packed(sizes: Sequence[int]) -> Iterator[tuple[int, dict[int, int]]]:
    """Divide tensors of these sizes, in bytes, among pieces of memory; yield the size of each, and its tensors' starts.

    The sizes are powers of two, since torch rounds pinned memory up to one.
    """
    aligned = [-(-size // 256) * 256 for size in sizes]
    left = sorted(range(len(sizes)), key=aligned.__getitem__, reverse=True)
    while left:
        rest, largest = sum(aligned[number] for number in left), aligned[left[0]]
        whole = 1 << max(12, rest.bit_length() - 1)  # all of it is used, if tensors fit well
        size = max(min(LARGEST, whole), 1 << max(0, largest - 1).bit_length())
        used, places = 0, dict[int, int]()
        for number in left:
            if used + aligned[number] <= size:
                places[number] = used
                used += aligned[number]
        left = [number for number in left if number not in places]
        yield size, places


class _Order:
    """The order in which blocks compute: for each block, the one that followed it last time."""

    def __init__(self) -> None:
        self.last: _Group | None = None
        self.next: dict[_Group, _Group] = {}

    def after(self, group: _Group) -> list[_Group]:
        """Return the blocks to prefetch when a block begins: the next one and, if that is small, more, up to AHEAD."""
        if self.last is not None:
            self.next[self.last] = group
        self.last = group
        following, then = list[_Group](), self.next.get(group)
        while then is not None and then not in (group, *following) and sum(f.size for f in following) < AHEAD:
            following.append(then)
            then = self.next.get(then)
        return following


class _Hooks:
    """What a block does around its forward: move its weights in, prefetch the next one's, release its own."""

    def __init__(self, group: _Group | None, order: _Order | None, lacks_scales: bool = False) -> None:
        self.group, self.order, self._lacks_scales = group, order, lacks_scales

    def before(self, module: nn.Module, args: object) -> None:
        """Run before the block's forward."""
        if self._lacks_scales:
            raise RuntimeError("a network copied alone lacks the scales of its 8-bit weights: copy the pipeline")
        if self.group is not None:
            self.group.__enter__()
            for following in self.order.after(self.group) if self.order is not None else ():
                following.prefetch()

    def after(self, module: nn.Module, args: object, output: object) -> None:
        """Run after it, also if it fails."""
        if self.group is not None:
            self.group.__exit__()

    def __reduce__(self) -> tuple[Any, ...]:
        # A copy of a network has separate weights, which its offloader, if it is copied too, gives other hooks.
        kept = () if self.group is None else self.group.kept.values()
        return _Hooks, (None, None, self._lacks_scales or any(value.scale is not None for value in kept))


def is_own_hook(hook: Any) -> bool:
    """Whether a hook is one of an offloader's."""
    return isinstance(getattr(hook, "__self__", None), _Hooks)


def moves(network: nn.Module) -> bool:
    """Whether blocks of a network bring their weights to the device."""
    hooks = (hook for block in network.modules() for hook in block._forward_pre_hooks.values())
    return any(map(is_own_hook, hooks))


def _without_hooks(network: nn.Module) -> list[nn.Module]:
    """Remove these hooks from a network; return the blocks that had some."""
    blocks = []
    for block in network.modules():
        for hooks in (block._forward_pre_hooks, block._forward_hooks):
            for key in [key for key, hook in hooks.items() if is_own_hook(hook)]:
                del hooks[key]
                blocks += [block] * (hooks is block._forward_pre_hooks)
    return blocks


def _tensors(module: nn.Module) -> list[Tensor]:
    return [*module.parameters(), *module.buffers()]


def _blocks(network: nn.Module) -> list[nn.Module]:
    """Return the modules that a network calls one after the other, of up to about BLOCK parameters each.

    A module that holds layers directly is not divided: it may read their weights without calling them.
    """
    blocks = []
    for child in network.children():
        size = sum(tensor.numel() for tensor in _tensors(child))
        if size == 0:
            continue
        called = type(child).forward is not nn.Module.forward
        layers = any(_tensors(part) and not list(part.children()) for part in child.children())
        has_tensors = next(child.parameters(recurse=False), None) is not None
        is_atomic = isinstance(child, TransformerBlock) and child.is_atomic
        is_whole = is_atomic or ((layers or has_tensors) and not isinstance(child, DIVISIBLE))
        blocks += _blocks(child) if not called or (size > BLOCK and not is_whole) else [child]
    return blocks
