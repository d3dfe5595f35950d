"""CUDA graphs: a denoising step is captured once for each shape of its arguments, and replayed in its own buffers.

A replay launches all kernels of a step at once, so Python is left out.  It repeats kernels and nothing else: a step of
a network with hooks, forwards or attention of the user's own, and one whose guidance has a state, runs without one.
Weights are read at their address, so they may change in place (LoRA).  Inductor's graph trees are not used: they fail
in a loop whose output is its next input.
"""

import contextlib
import copy
import logging
import threading
import weakref
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.utils.weak import TensorWeakRef, WeakTensorKeyDictionary

from ldm_lite.diffusion.guidance import STATELESS
from ldm_lite.runtime import attention
from ldm_lite.runtime.blocks import BlockLinear
from ldm_lite.runtime.patching import is_layer_unmodified, patch_of
from ldm_lite.runtime.timing import CAPTURES, measured_convolutions

log = logging.getLogger("ldm_lite")

MOST_GRAPHS = 8  # kept for a network, each with its buffers
Step = Callable[..., Tensor]  # called like core.denoise.run_row
UNDER_WAY: list[str] = []  # what the threads of this process are doing to prepare steps: "compiling", "capturing"


@contextlib.contextmanager
def as_under_way(what: str) -> Iterator[None]:
    """Within the block, or the function that this decorates, a step is prepared."""
    UNDER_WAY.append(what)
    try:
        yield
    finally:
        UNDER_WAY.remove(what)


class Graphs:
    """A step that is captured once and then replayed; it is called like the step.

    A graph serves every network that has the same weights, as the ControlledUNet of each run does, and is deleted with
    them.
    """

    def __init__(self, step: Step, measured: bool = False, plain_calls: int = 0) -> None:
        """measured lets cuDNN time its convolutions before the capture, which keeps the fastest ones.

        The first plain_calls of each shape run without a graph.
        """
        self._step, self._measured, self._plain_calls = step, measured, plain_calls
        self._codes: WeakKeyDictionary[nn.Module, Code] = WeakKeyDictionary()
        self._calls: Counter[int] = Counter()  # of arguments without a graph, by hash
        # By the first weight of a network.
        self._graphs: MutableMapping[Tensor, OrderedDict[Any, Captured]] = WeakTensorKeyDictionary()
        self._lock = threading.Lock()  # two threads must not fill the same buffers
        self._streams: dict[torch.device, Any] = {}  # of all captures: only those on one stream can share memory
        self._copied: dict[torch.device, Any] = {}  # the event when the last result was copied

    def of(self, step: Step) -> "Graphs":
        """Return the same for another step: their captures share memory, and wait for one another."""
        graphs = copy.copy(self)
        graphs._step = step
        return graphs

    def clear(self) -> None:
        """Delete all graphs, also of other steps that share the memory."""
        with self._lock:
            self._graphs.clear()

    def __call__(self, model: Any, *args: Any) -> Any:
        """Replay the graph for these arguments, which is captured if there is none, or run the step without one."""
        leaves = list(leaves_of(args))
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        in_autocast = tensors[0].is_cuda and torch.is_autocast_enabled("cuda")
        # A function may read tensors that are not among the arguments.
        if isinstance(model, nn.Module) and not in_autocast and not any(map(_is_stateful, leaves)):
            with self._lock, torch.cuda.device_of(tensors[0]):  # type: ignore[no-untyped-call]  # streams are its own
                captured = self._captured_for(model, args, leaves)
                if captured is not None:
                    return self._replayed(captured, tensors)
        return self._step(model, *args)

    def _captured_for(self, model: nn.Module, args: tuple[Any, ...], leaves: list[Any]) -> "Captured | None":
        """Return the graph for a model and arguments, captured if need be; None if the step is to run without one."""
        code = self._codes.get(model)
        if code is None or not code.is_current(model):
            code = self._codes[model] = Code(model)
        if not code.weights or (first := code.weights[0]()) is None:
            return None
        kinds = tuple((leaf.shape, leaf.dtype, leaf.device) if isinstance(leaf, Tensor) else leaf for leaf in leaves)
        key = self._step, kinds, code.key
        graphs = self._graphs.setdefault(first, OrderedDict())
        captured = graphs.get(key)
        if captured is None or captured.is_stale:
            self._calls[hash(key)] += 1
            if self._calls[hash(key)] <= self._plain_calls:
                return None
            for stale in [stale for stale, kept in graphs.items() if kept.is_stale]:
                del graphs[stale]
            captured = graphs[key] = self._capture(model, args)
            captured.watch(code.weights)
            if len(graphs) > MOST_GRAPHS:
                graphs.popitem(last=False)
        if next(reversed(graphs.values())) is not captured:
            graphs.move_to_end(key)
        return captured

    def _replayed(self, captured: "Captured", tensors: list[Tensor]) -> Any:
        """Replay a graph after the last result was copied, also in a thread with its own stream."""
        device = tensors[0].device
        if device not in self._copied:
            self._copied[device] = torch.cuda.Event()  # type: ignore[no-untyped-call]
        torch.cuda.current_stream().wait_event(self._copied[device])
        out = captured.replay(tensors)
        self._copied[device].record()
        return out

    @as_under_way("capturing")
    def _capture(self, model: nn.Module, args: tuple[Any, ...]) -> "Captured":
        """Capture the step, one at a time in the process; again if that fails, since other threads may disturb it."""
        self._step(model, *args)  # compiles, and autotunes
        outside = torch.cuda.current_stream()

        def capture() -> Captured:
            if not self._measured:
                return self._captured(model, args, outside)
            # In a new thread: cuDNN keeps its choices per thread, and does not measure again.
            with measured_convolutions(), ThreadPoolExecutor(1, "capture") as thread:
                return thread.submit(self._captured, model, args, outside).result()

        with CAPTURES:
            try:
                return capture()
            except torch.OutOfMemoryError:
                raise
            except RuntimeError as error:
                log.info("capturing a CUDA graph failed (%s): trying again", str(error).partition("\n")[0])
                return capture()

    @torch.no_grad()
    def _captured(self, model: nn.Module, args: tuple[Any, ...], outside: Any) -> "Captured":
        """Capture the step in separate buffers, on the device's stream; it and the outer stream wait for each other."""
        with torch.inference_mode(False):  # inference tensors cannot be written outside inference mode
            static = mapped(args, lambda x: x.clone())
        tensor = next(tensors_in(static))
        device = tensor.device
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream, graph = self._streams[device], torch.cuda.CUDAGraph()
        # One graph runs at a time, and its result is copied at once, so all graphs of a device can share their memory.
        captured = (kept for graphs in self._graphs.values() for kept in graphs.values())
        pool = next((kept.graph.pool() for kept in captured if next(tensors_in(kept.out)).device == device), None)
        stream.wait_stream(outside)
        # Around the capture too, which does not restore the stream if it fails.
        with torch.cuda.device_of(tensor), torch.cuda.stream(stream):  # type: ignore[no-untyped-call]
            self._step(model, *static)  # libraries' one-time work for a thread or a stream must not be captured
            # thread_local: other threads may allocate memory in the meantime.
            with (
                _own_workspace(),
                torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"),
            ):
                out = self._step(model, *static)
        outside.wait_stream(stream)
        return Captured(graph, static, out)


@contextlib.contextmanager
def _own_workspace() -> Iterator[None]:
    """Let cuBLAS allocate its workspace inside the captured graph's memory, and a new one after it.

    Otherwise the graph uses the process's, which torch frees when other code captures graphs ("reduce-overhead").
    """
    clear = getattr(torch._C, "_cuda_clearCublasWorkspaces", lambda: None)  # as torch's own graph trees do
    clear()
    try:
        yield
    finally:
        clear()


class Captured:
    """A CUDA graph with its input buffers and its output."""

    def __init__(self, graph: Any, static: tuple[Any, ...], out: Any) -> None:
        self.graph, self.out = graph, out
        self._buffers = list(tensors_in(static))
        # The tensor, and its version, that each buffer holds a copy of.
        self._last_inputs: list[tuple[Any, int]] = [(lambda: None, 0)] * len(self._buffers)
        self.is_stale = False  # one of the weights is gone

    def watch(self, weights: Sequence[Any]) -> None:
        """Become stale when one of the weights, given by references, is deleted, since another may then get its id."""

        def forget(_: object) -> None:
            self.is_stale = True

        self._weights = [weakref.ref(weight(), forget) for weight in weights]

    def replay(self, values: list[Tensor]) -> Any:
        """Replay for these values; tensors that have not changed since the last call are not copied again."""
        changed = list[int]()
        for place, value in enumerate(values):
            last, version = self._last_inputs[place]
            if value.is_inference():  # such tensors have no version
                changed.append(place)
            elif last() is not value or version != value._version:
                changed.append(place)
                self._last_inputs[place] = TensorWeakRef(value), value._version
        if changed:
            torch._foreach_copy_([self._buffers[place] for place in changed], [values[place] for place in changed])
        self.graph.replay()
        return mapped(self.out, lambda x: x.clone())  # the next replay overwrites it


# ---- what a graph may repeat ----------------------------------------------------------------------------------------


class Code:
    """What a network runs besides the code of its classes: kernels and attention of its modules, and its weights.

    Read once from all modules, which takes a millisecond of Python; is_current compares it with theirs in much less.
    It has no reference to the network, so it keeps none alive.
    """

    def __init__(self, network: nn.Module) -> None:
        """Read a network.

        There are no weights if it does anything that a graph would not repeat: hooks, other forwards, custom attention,
        and weights in blocks, to which LoRAs are added in Python.
        """
        modules = list(network.modules())
        self._parts = [vars(module) for module in modules[1:]]
        self._hooks = [part[name] for part in self._parts for name in ("_forward_hooks", "_forward_pre_hooks")]
        self._settings = [
            (part, name) for part in self._parts for name in ("forward", "attention", "compiled") if name in part
        ]
        self._seen = self._look(network)
        functions = [
            (place, type(module), vars(module).get("attention"), patch_of(module))
            for place, module in enumerate(modules)
            if "attention" in vars(module) or "forward" in vars(module)
        ]
        self.key = tuple(functions), hash((*map(type, modules), *self._seen[-2], *self._seen[-1]))
        self.weights: list[Any] = []  # references
        if all(map(_is_repeatable, modules)):
            weights = (weight for module in modules for weight in module._parameters.values() if weight is not None)
            self.weights = [weakref.ref(weight) for weight in weights]

    def is_current(self, network: nn.Module) -> bool:
        """Whether nothing was changed since: hooks, forwards, attention, modules, weights and their addresses."""
        return self._seen == self._look(network)

    def _look(self, network: nn.Module) -> tuple[Any, ...]:
        """Return values that change with the modules: by loops in C, since this runs before every step."""
        parts = [*self._parts, vars(network)]
        weights = list(chain.from_iterable(part["_parameters"].values() for part in parts))
        return (
            any(self._hooks) or bool(network._forward_hooks or network._forward_pre_hooks),
            list(map(len, parts)),  # a forward or an attention that is new
            [id(part.get(name)) for part, name in self._settings],
            list(map(id, chain.from_iterable(part["_modules"].values() for part in parts))),
            list(map(id, weights)),
            [weight.data_ptr() for weight in weights if weight is not None],
        )


def _is_repeatable(module: nn.Module) -> bool:
    """Whether a graph repeats all that a module does."""
    attributes = vars(module)
    function = attributes.get("attention")
    if function is not None and not attention.is_stateless(function):
        return False
    return is_layer_unmodified(module) and not (type(module) is BlockLinear and not module.compiled)


def is_stateful(args: Any) -> bool:
    """Whether a function among a step's arguments may depend on more than its arguments: Python calls it every time."""
    return any(map(_is_stateful, leaves_of(args)))


def _is_stateful(leaf: Any) -> bool:
    return not isinstance(leaf, Tensor) and callable(leaf) and leaf not in STATELESS


# ---- nested tuples and mappings of tensors and other values, as the arguments of a step are -------------------------


def leaves_of(value: Any) -> Iterator[Any]:
    """Yield every leaf of a nested value in order, with the lengths of its tuples and its names."""
    if isinstance(value, Mapping):
        for name, item in value.items():
            yield name
            yield from leaves_of(item)
    elif isinstance(value, tuple):
        yield len(value)
        for item in value:
            yield from leaves_of(item)
    else:
        yield value


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield the tensors in a nested value, in order."""
    return (leaf for leaf in leaves_of(value) if isinstance(leaf, Tensor))


def mapped(value: Any, function: Callable[[Tensor], Any]) -> Any:
    """Return a nested value with a function applied to every tensor."""
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, Mapping):
        return {name: mapped(item, function) for name, item in value.items()}
    if isinstance(value, tuple):
        items = [mapped(item, function) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
    return value
