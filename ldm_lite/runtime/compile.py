"""Compilation of the denoising step: tiers, one CUDA graph for each shape, and a fallback if compilation fails.

- graph: nothing is compiled, but on CUDA a plain step is captured in a CUDA graph at its third call;
- regional: repeated blocks are compiled separately and in place, so that one compilation serves many of them;
- step: guidance batch, UNet, guidance and the sampler's update are one graph, for all batches and sizes;
- max: the same for fixed sizes, with kernels chosen by measuring;
- auto: plain steps until the process has spent the time of one compilation on them, then step.  It takes at most twice
  the time of the better choice; on a CPU it never compiles, since plain steps are faster there.

On CUDA the whole step is then captured in CUDA graphs, one for each shape, each with its own buffers.  Inductor's graph
trees are not used: they fail in a loop whose output is its next input.
Weights may change in place (LoRA): compiled code and graphs read them at their address.  A graph repeats kernels, so a
step of a network with hooks or attention of the user's own runs without one.  Guidance that remembers, or is the
user's own, and what a shortened UNet stores, stay outside: only the network of such a step is compiled or captured.
"""

import contextlib
import copy
import functools
import importlib
import inspect
import logging
import os
import threading
import time
import weakref
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor, nn
from torch.utils.weak import TensorWeakRef, WeakTensorKeyDictionary

from ldm_lite.core.denoise import Guided, denoise_step, weighted
from ldm_lite.diffusion.guidance import STATELESS
from ldm_lite.runtime import attention, joined
from ldm_lite.runtime.blocks import BlockLinear
from ldm_lite.runtime.patching import is_as_written, patch_of
from ldm_lite.runtime.timing import CAPTURES, cache_folder, measured_convolutions

log = logging.getLogger("ldm_lite")

TIERS = ("off", "auto", "graph", "regional", "step", "max")
LAUNCH_BOUND = 1_000_000_000  # parameters: the steps of smaller networks wait for Python, which graphs leave out
PLAIN_CALLS = 2  # of a shape before tier graph captures it, so that runs of one or two steps do not pay for it
COLD_START_S = 60.0  # time of one compilation of the step, about
FOLD = 8  # of h and w: what a UNet of four levels divides them by
MOST_GRAPHS = 8  # CUDA graphs kept for a network, each with its buffers
Step = Callable[..., Tensor]  # called like core.denoise.denoise_step
_under_way: list[str] = []  # what the threads of this process prepare steps by


def compiled_step(
    tier: str, network: nn.Module, backend: str = "inductor", settings: Mapping[str, Any] | None = None
) -> Step:
    """Return a network's denoising step in a tier, called like denoise_step; it is compiled at the first call.

    settings are further options of Inductor.  Raises ValueError for an unknown tier.
    """
    if tier not in TIERS:
        raise ValueError(f"unknown compile tier {tier!r}: wanted one of {', '.join(TIERS)}")
    device = next(network.parameters()).device.type
    if tier == "off" or (tier in ("auto", "graph") and device != "cuda"):
        return denoise_step
    return CompiledStep(tier, network, backend, settings or {})


def is_compiled(step: Step) -> bool:
    """Whether a step, or what it wraps, is one that is compiled at its first call, or another function.

    A CUDA graph of plain steps is not compiled: where Python code has a say, it is not used.
    """
    inner = inspect.unwrap(step)
    return inner is not denoise_step and not (isinstance(inner, CompiledStep) and inner.tier == "graph")


def predict(model: Any, registers: Tensor, row: Any, noise: Tensor, guided: Guided, *how: Any) -> Any:
    """Return what the network of a step returns: the first part of denoise_step, of the same arguments."""
    num_branches, arguments = len(guided.positive), how[2] if len(how) > 2 else None
    batch = registers[0] if num_branches == 1 else registers[0].repeat(num_branches, 1, 1, 1)
    return model(batch, row.t.expand(len(batch)), **guided.conditioning, **(arguments or {}))


def in_two_parts(step: Step, model: Any, *args: Any) -> tuple[Tensor, Any]:
    """Run a step as two: the network, compiled if the step is, and what mixes and adds its outputs, as Python has it.

    Returns the registers, and what the network returned besides the prediction, or None.
    """
    inner, (inputs, how) = inspect.unwrap(step), (args[:4], args[4:])
    first = inner.of_network if isinstance(inner, CompiledStep) else predict
    out = first(model, *inputs, weighted, (), *how[2:])
    out, more = out if isinstance(out, tuple) else (out, None)
    return denoise_step(lambda *x, **conditioning: out, *inputs, *how[:2]), more


def compiling() -> str:
    """Return "compiling" or "capturing" (a CUDA graph) while a step of this process waits for that, else ""."""
    return next(iter(_under_way[-1:]), "")


@contextlib.contextmanager
def _as_under_way(what: str) -> Iterator[None]:
    _under_way.append(what)
    try:
        yield
    finally:
        _under_way.remove(what)


class CompiledStep:
    """denoise_step, compiled at its first call; the log tells how long that took and when it pays, or why it failed."""

    def __init__(
        self,
        tier: str,
        network: nn.Module,
        backend: str,
        settings: Mapping[str, Any] | None = None,
        plain: Step = denoise_step,
    ) -> None:
        """plain is what is compiled."""
        self.tier = "step" if tier == "auto" else tier
        self._network, self._backend, self._settings, self._plain = network, backend, settings or {}, plain
        self._graphs = _Graphs(plain, measured=tier == "max", plain_calls=PLAIN_CALLS if tier == "graph" else 0)
        self._wait_s = COLD_START_S if tier == "auto" else 0.0  # from the first call on
        self._first_call: float | None = None
        self._step: Step | None = None  # compiled
        self._regional: WeakSet[nn.Module] = WeakSet()  # networks whose blocks are compiled
        self._joined: WeakKeyDictionary[nn.Module, list[Any]] = WeakKeyDictionary()  # layers, by network: joined.py
        self._told = False  # that a model cannot be compiled
        self._lock = threading.Lock()
        self.failure: str | None = None  # why compilation failed, so that plain steps run, in one line

    @functools.cached_property
    def of_network(self) -> "CompiledStep":
        """The same for `predict`: the network of a step alone, in graphs of its own that share the memory."""
        tier = "auto" if self._wait_s else self.tier
        part = CompiledStep(tier, self._network, self._backend, self._settings, predict)
        part._graphs = self._graphs.of(predict)
        return part

    def __call__(self, model: Any, *args: Any) -> Any:
        """Compute one row like denoise_step; one of of_network() what its network predicts."""
        if self._plain is not predict and is_stateful(args[4:6]):  # combine and adjust
            return in_two_parts(self, model, *args)[0]
        now = time.perf_counter()
        self._first_call = now if self._first_call is None else self._first_call
        if self.failure is not None or now - self._first_call < self._wait_s:
            return self._plain(model, *args)
        if not isinstance(model, nn.Module) and self.tier != "regional":
            if not self._told:
                log.info("the model is a function, not a module: its steps are not compiled")
                self._told = True
            return self._plain(model, *args)
        try:
            with self._lock:  # one thread compiles, the others wait
                if isinstance(model, nn.Module):
                    self._check_joined(model)
                if self._step is None:
                    self._step = self._compile(model, *args)
                if self.tier == "regional":
                    self._compile_blocks(model)
                step = self._step
                if self.tier != "graph":
                    _set_up(self._backend)  # torch's settings are those of a thread
            return step(model, *args)
        except Exception as error:  # compilers raise anything
            if isinstance(error, torch.OutOfMemoryError) and self.tier != "graph":  # which takes memory of its own
                raise
            blocks = {module: module._compiled_call_impl for net in self._regional for module in net.modules()}
            for module in blocks:
                module._compiled_call_impl = None
            try:
                out = self._plain(model, *args)
            except Exception:  # the call was the cause, so what is compiled stays for others
                for module, compiled in blocks.items():
                    module._compiled_call_impl = compiled
                raise
            self._step = None
            self._graphs.clear()  # whose memory plain steps may need
            self.failure = f"{type(error).__name__}: {next(iter(str(error).strip().splitlines()), '')[:150]}"
            what = "capturing a CUDA graph" if self.tier == "graph" else "compilation"
            log.warning("%s failed (%s): continuing without", what, self.failure)
            return out

    @_as_under_way("compiling")
    def _compile(self, model: Any, *args: Any) -> Step:
        """Return the compiled step, and log the times of plain and compiled calls."""
        if self.tier == "graph":
            return self._graphs
        _set_up(self._backend)
        device = args[0].device
        for _ in range(2):  # the first call lays weights out and warms kernels up
            plain_s = _timed(self._plain, device, model, *args)
        more: dict[str, Any] = {"backend": self._backend}
        if self._backend == "inductor":
            more["options"] = _options(self.tier, next(self._network.parameters()).device.type, self._settings)
        if self.tier == "regional":
            self._compile_blocks(model)
            step: Step = self._plain
        elif self.tier == "max":
            step = torch.compile(self._plain, fullgraph=True, dynamic=False, **more)
        else:
            step = _for_all_sizes(torch.compile(_unfolding(self._plain), fullgraph=True, **more))
        if device.type == "cuda":
            step = self._graphs.of(step)
        cold_s, compiled_s = (_timed(step, device, model, *args) for _ in range(2))
        log.info("%s", _verdict(cold_s, plain_s, compiled_s))
        return step

    def _compile_blocks(self, model: Any) -> None:
        """Compile the blocks of a model and its ControlNets, or those of the UNet if the model is a function."""
        network = model if isinstance(model, nn.Module) else self._network
        if network not in self._regional:
            self._regional.add(network)
            for module in regions(network):
                if module._compiled_call_impl is None:
                    module.compile(fullgraph=True, dynamic=True, backend=self._backend)

    def _check_joined(self, model: nn.Module) -> None:
        """Compile anew without what joins weights that were replaced since: compiled code cannot see addresses."""
        if model not in self._joined:
            self._joined[model] = list(joined.joined_layers(model))
        for layer in self._joined[model]:
            if not joined.is_joined(layer):
                joined.come_apart(layer)
                self._step = None
                self._graphs.clear()
                self._joined.pop(model, None)


def regions(network: nn.Module) -> Iterator[nn.Module]:
    """Yield the outermost modules of a network whose class occurs more than once, except PyTorch's own classes."""
    counts = Counter(type(module) for module in network.modules())

    def walk(module: nn.Module) -> Iterator[nn.Module]:
        for child in module.children():
            kind = type(child)
            container = isinstance(child, (nn.ModuleList, nn.Sequential))
            if counts[kind] > 1 and not container and not kind.__module__.startswith("torch."):
                yield child
            else:
                yield from walk(child)

    return walk(network)


def _timed(step: Step, device: torch.device, *args: Any) -> float:
    start = time.perf_counter()
    step(*args)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start


def _verdict(cold_s: float, plain_s: float, compiled_s: float) -> str:
    text = f"compiled in {cold_s:.0f} s: a step takes {compiled_s * 1e3:.1f} ms in place of {plain_s * 1e3:.1f} ms"
    if compiled_s >= plain_s:
        return f'{text}; it does not pay here: take `compile="off"`'
    return f"{text}, which pays from {cold_s / (plain_s - compiled_s):,.0f} steps on"


# ---- one graph for all sizes ----------------------------------------------------------------------------------------
# The compiler is told two things: which sizes change, and, where it is so, that h and w are multiples of 8, which can
# be halved three times.  If they might be odd, it copies each lower-level map before using it as tokens: 66 more
# kernels in a step of Stable Diffusion on a GPU.  It learns this from maps (...,h,w) seen as (...,h/8,8,w/8,8).


def _for_all_sizes(compiled: Step) -> Step:
    """Return a compiled step that unfolds, to be called as denoise_step."""

    def step(model: nn.Module, *args: Any) -> Tensor:
        folded = fold(*args)
        mark_sizes(*folded)
        return compiled(model, *folded)

    return step


def fold(registers: Tensor, row: Any, noise: Tensor, guided: Guided, *others: Any) -> tuple[Any, ...]:
    """A step's arguments, with maps (...,h,w) as views (...,h/8,8,w/8,8) if h and w are larger multiples of 8."""
    if any(side % FOLD or side == FOLD for side in registers.shape[-2:]):
        return registers, row, noise, guided, *others

    def folded(x: Tensor) -> Tensor:
        return x.view(*x.shape[:-2], x.shape[-2] // FOLD, FOLD, -1, FOLD)

    conditioning = {name: folded(part) if name == "concat" else part for name, part in guided.conditioning.items()}
    return folded(registers), row, folded(noise), guided._replace(conditioning=conditioning), *others


def _unfolding(plain: Step) -> Step:
    """Return denoise_step or predict for arguments that may be folded."""

    def unfolded(x: Tensor) -> Tensor:
        return x.flatten(-2).flatten(-3, -2)

    def step(model: Any, registers: Tensor, row: Any, noise: Tensor, guided: Guided, *others: Any) -> Any:
        if registers.ndim == 7:
            registers, noise = unfolded(registers), unfolded(noise)
            # Field by field: torch 2.6 compiles no _replace and no slice of them.
            conditioning, weights, positive = guided
            parts = {name: unfolded(part) if name == "concat" else part for name, part in conditioning.items()}
            guided = Guided(parts, weights, positive)
        return plain(model, registers, row, noise, guided, *others)

    return step


def mark_sizes(
    registers: Tensor,
    row: Any,
    noise: Tensor,
    guided: Guided,
    combine: Any = None,
    adjust: Any = None,
    arguments: Any = None,
) -> None:
    """Tell the compiler which sizes of a step's arguments will change: batch, height, width, tokens.

    A size of 1 is not marked: the compiler treats it as a constant, so a batch of one has a graph of its own.
    """
    sides = (-4, -2) if registers.ndim == 7 else (-2, -1)
    marks: list[tuple[Tensor, tuple[int, ...]]] = [(registers, (1, *sides)), (noise, (0, *sides))]
    axes_of = {"concat": (0, *sides), "context": (0, 1)}  # of the other conditioning: that of images alone
    marks += [(part, axes_of.get(name, (0,))) for name, part in guided.conditioning.items()]
    marks.append((guided.weights, (-2, -1)))
    marks += [(tensor, (0, 2, 3)) for tensor in _tensors(arguments) if tensor.ndim == 4]  # (B or 1,C,h,w)
    marks += [(tensor, (0,)) for tensor in _tensors(arguments) if tensor.ndim == 3]  # (B,T,C)
    for tensor, axes in marks:
        for axis in axes:
            if tensor.shape[axis] > 1:
                torch._dynamo.maybe_mark_dynamic(tensor, axis % tensor.ndim)


# ---- settings of the compiler ---------------------------------------------------------------------------------------


def _options(tier: str, device: str, settings: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return the options of Inductor that this torch knows."""
    options: dict[str, Any] = {"conv_1x1_as_mm": True, **(settings or {})}
    if tier == "max":
        # Without coordinate_descent_tuning, which compiles some 140 kernels one after the other, for minutes;
        # TORCHINDUCTOR_COORDINATE_DESCENT_TUNING=1 turns it on.
        options |= {"max_autotune": True, "max_autotune_conv_backends": "ATEN"}  # Triton's convolutions lose to cuDNN's
    if device == "cuda":
        options["loop_reindexing_after_fusion"] = False  # with it, torch 2.12 and 2.13 are 6 times slower
    config = importlib.import_module("torch._inductor.config")
    return {name: value for name, value in options.items() if hasattr(config, name)}


def _set_up(backend: str) -> None:
    """Cache compiled kernels across processes, and allow one graph of a function for each width of a UNet."""
    if backend == "inductor":
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(cache_folder() / "inductor"))
    dynamo: Any = importlib.import_module("torch._dynamo.config")
    limit = "recompile_limit" if hasattr(dynamo, "recompile_limit") else "cache_size_limit"  # its name in torch 2.6
    setattr(dynamo, limit, max(getattr(dynamo, limit), 64))
    shapes: Any = importlib.import_module("torch.fx.experimental._config")
    shapes.use_duck_shape = False  # otherwise sizes that are equal at first (a square image) must stay equal


# ---- CUDA graphs ----------------------------------------------------------------------------------------------------


def code_of(network: nn.Module) -> tuple[tuple[object, ...], list[Tensor]] | None:
    """Return what a network runs beside its classes' code, the kernels and attention functions of its modules, and its
    weights.

    None if it does anything that a CUDA graph would not repeat: hooks, forwards or attention of somebody else's, and
    weights in blocks, to which LoRAs are added in Python.
    """
    code: list[object] = [type(network)]
    weights: list[Tensor] = []
    modules: list[Any] = [network]
    for place, module in enumerate(modules):
        attributes = vars(module)
        weights += [weight for weight in attributes["_parameters"].values() if weight is not None]
        if attributes["_forward_hooks"] or attributes["_forward_pre_hooks"]:
            return None
        if type(module) is BlockLinear and not module.compiled:
            return None
        function, forward = attributes.get("attention"), attributes.get("forward")
        if function is not None and not attention.is_stateless(function):
            return None
        if forward is not None and not is_as_written(module):
            return None
        if function is not None or forward is not None:
            code.append((place, type(module), function, patch_of(module)))
        modules += [part for part in attributes["_modules"].values() if part is not None]
    return tuple(code), weights


class _Graphs:
    """A step captured once for each shape of its arguments, and replayed with its own buffers.

    A graph reads weights at their address.  It serves every network that has the same ones, as the ControlledUNet of
    each run does, and is deleted with them.
    """

    def __init__(self, step: Step, measured: bool = False, plain_calls: int = 0) -> None:
        """measured lets cuDNN time its convolutions before the capture, which keeps the fastest ones.

        The first plain_calls of each shape run without a graph.
        """
        self._step, self._measured, self._plain_calls = step, measured, plain_calls
        self._calls: Counter[Any] = Counter()  # of shapes that have no graph yet
        # By the first weight of a network.
        self._graphs: MutableMapping[Tensor, OrderedDict[Any, _Captured]] = WeakTensorKeyDictionary()
        self._lock = threading.Lock()  # two threads must not fill the same buffers
        self._streams: dict[torch.device, Any] = {}  # of all captures: only those on one stream can share memory
        self._copied: dict[torch.device, Any] = {}  # the event when the last result was copied

    def of(self, step: Step) -> "_Graphs":
        """Return the same for another step: what both capture shares memory, and waits for one another."""
        graphs = copy.copy(self)
        graphs._step = step
        return graphs

    def clear(self) -> None:
        """Delete all graphs, those of other steps that share the memory too."""
        with self._lock:
            self._graphs.clear()

    def __call__(self, model: Any, *args: Any) -> Any:
        # A function may read tensors that are not among the arguments.
        code = code_of(model) if isinstance(model, nn.Module) else None
        leaves, tensors = list(_leaves(args)), list(_tensors(args))
        device = tensors[0].device
        if code is None or is_stateful(args) or (device.type == "cuda" and torch.is_autocast_enabled("cuda")):
            return self._step(model, *args)
        # A graph is fixed to the address of the weights, and to which arguments are None.
        kinds = tuple((leaf.shape, leaf.dtype) if isinstance(leaf, Tensor) else leaf for leaf in leaves)
        functions, weights = code
        key = self._step, device, weights[0].data_ptr(), kinds, functions, tuple(map(id, weights))
        with self._lock, torch.cuda.device_of(tensors[0]):  # type: ignore[no-untyped-call]  # streams are its own
            graphs = self._graphs.setdefault(weights[0], OrderedDict())
            if key not in graphs or graphs[key].is_stale:
                self._calls[hash(key)] += 1
                if self._calls[hash(key)] <= self._plain_calls:
                    return self._step(model, *args)
                for stale in [stale for stale, captured in graphs.items() if captured.is_stale]:
                    del graphs[stale]
                graphs[key] = self._capture(model, args)
                graphs[key].goes_with(weights)
                if len(graphs) > MOST_GRAPHS:
                    graphs.popitem(last=False)
            graphs.move_to_end(key)
            if device not in self._copied:
                self._copied[device] = torch.cuda.Event()  # type: ignore[no-untyped-call]
            torch.cuda.current_stream().wait_event(self._copied[device])  # of a thread with a stream of its own
            out = graphs[key].run(tensors)
            self._copied[device].record()
            return out

    @_as_under_way("capturing")
    def _capture(self, model: nn.Module, args: tuple[Any, ...]) -> "_Captured":
        """Capture a step, one at a time in the process; once more if that fails, since other threads may disturb it."""
        self._step(model, *args)  # compiles, and autotunes
        outside = torch.cuda.current_stream()

        def capture() -> _Captured:
            if not self._measured:
                return self._captured(model, args, outside)
            # In a new thread: cuDNN keeps its choices by threads, and what it has chosen it does not measure.
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
    def _captured(self, model: nn.Module, args: tuple[Any, ...], outside: Any) -> "_Captured":
        with torch.inference_mode(False):  # inference tensors cannot be written outside inference mode
            static = _map(args, lambda x: x.clone())
        tensor = next(_tensors(static))
        device = tensor.device
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream, graph = self._streams[device], torch.cuda.CUDAGraph()
        # One graph runs at a time, and its result is copied at once, so all graphs of a device can share their memory.
        others = (other for graphs in self._graphs.values() for other in graphs.values())
        pool = next((other.graph.pool() for other in others if next(_tensors(other.out)).device == device), None)
        stream.wait_stream(outside)
        # Around the capture too, which does not restore the stream if it fails.
        with torch.cuda.device_of(tensor), torch.cuda.stream(stream):  # type: ignore[no-untyped-call]
            self._step(model, *static)  # what libraries do once for a thread or a stream must not be captured
            # thread_local: other threads may allocate memory meanwhile.
            with (
                _own_workspace(),
                torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"),
            ):
                out = self._step(model, *static)
        outside.wait_stream(stream)
        return _Captured(graph, static, out)


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


class _Captured:
    """A CUDA graph with its input buffers and its output."""

    def __init__(self, graph: Any, static: tuple[Any, ...], out: Any) -> None:
        self.graph, self.out = graph, out
        self._buffers = list(_tensors(static))
        # The tensor, and its version, that each buffer holds a copy of.
        self._held: list[tuple[Any, int]] = [(lambda: None, 0)] * len(self._buffers)
        self.is_stale = False  # one of the weights is gone

    def goes_with(self, weights: Sequence[Tensor]) -> None:
        """Become stale when one of the weights is deleted, whose id another one may have then."""

        def forget(_: object) -> None:
            self.is_stale = True

        self._weights = [weakref.ref(weight, forget) for weight in weights]

    def run(self, values: list[Tensor]) -> Any:
        """Replay for these values; tensors that have not changed since the last call are not copied again."""
        for i, (buffer, value) in enumerate(zip(self._buffers, values, strict=True)):
            last, version = self._held[i]
            if value.is_inference():  # such tensors have no version
                buffer.copy_(value)
            elif last() is not value or version != value._version:
                buffer.copy_(value)
                self._held[i] = TensorWeakRef(value), value._version
        self.graph.replay()
        return _map(self.out, lambda x: x.clone())  # the next replay overwrites it


# The arguments of a step are nested tuples and mappings of tensors and other values.


def _leaves(value: Any) -> Iterator[Any]:
    """Yield all that is in nested tuples and mappings, in order, with the lengths of the tuples and the names."""
    if isinstance(value, Mapping):
        for name, item in value.items():
            yield name
            yield from _leaves(item)
    elif isinstance(value, tuple):
        yield len(value)
        for item in value:
            yield from _leaves(item)
    else:
        yield value


def is_stateful(args: Any) -> bool:
    """Whether a function among the arguments of a step may depend on more than its own: Python calls it every time."""
    return any(callable(leaf) and leaf not in STATELESS for leaf in _leaves(args) if not isinstance(leaf, Tensor))


def _tensors(value: Any) -> Iterator[Tensor]:
    return (leaf for leaf in _leaves(value) if isinstance(leaf, Tensor))


def _map(value: Any, function: Callable[[Tensor], Any]) -> Any:
    """Apply a function to every tensor in nested tuples and mappings."""
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, Mapping):
        return {name: _map(item, function) for name, item in value.items()}
    if isinstance(value, tuple):
        items = [_map(item, function) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
    return value
