"""Compilation of the denoising step: tiers, and plain steps if it fails.

- graph: nothing is compiled, but on CUDA a plain step is captured in a CUDA graph at its third call;
- regional: repeated blocks are compiled separately and in place, so that one compilation serves many of them;
- step: guidance batch, UNet, guidance and the sampler's update are one graph, for all batches and sizes;
- max: the same for fixed sizes, with kernels chosen by measuring;
- auto: plain steps until the process has spent the time of one compilation on them, then step.  It takes at most twice
  the time of the better choice; on a CPU it never compiles, since plain steps are faster there.

On CUDA the compiled step is then captured in CUDA graphs too, one for each shape (cuda_graphs.py).
Weights may change in place (LoRA): compiled code reads them at their address.  Guidance that has a state, or is
the user's own, and what a shortened UNet stores, stay outside: only the network of such a step is compiled or captured.
"""

import functools
import importlib
import inspect
import logging
import os
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor, nn

from ldm_lite.core.denoise import Guided, run_row, weighted
from ldm_lite.runtime import joined
from ldm_lite.runtime.cuda_graphs import UNDER_WAY, Graphs, Step, as_under_way, is_stateful, mapped, tensors_in
from ldm_lite.runtime.timing import cache_folder

log = logging.getLogger("ldm_lite")

TIERS = ("off", "auto", "graph", "regional", "step", "max")
LAUNCH_BOUND = 1_000_000_000  # parameters: the steps of smaller networks wait for Python, which graphs leave out
PLAIN_CALLS = 2  # of a shape before tier graph captures it, so that runs of one or two steps do not pay for it
COLD_START_S = 60.0  # time of one compilation of the step, about


def compiled_step(
    tier: str, network: nn.Module, backend: str = "inductor", settings: Mapping[str, Any] | None = None
) -> Step:
    """Return a network's denoising step in a tier, called like run_row; it is compiled at the first call.

    settings are further options of Inductor.  Raises ValueError for an unknown tier.
    """
    if tier not in TIERS:
        raise ValueError(f"unknown compile tier {tier!r}: expected one of {', '.join(TIERS)}")
    device = next(network.parameters()).device.type
    if tier == "off" or (tier in ("auto", "graph") and device != "cuda"):
        return run_row
    return CompiledStep(tier, network, backend, settings)


def is_compiled(step: Step) -> bool:
    """Whether a step, or the one that it wraps, is compiled at its first call, or is another function.

    A CUDA graph of plain steps is not compiled: it is not used where Python code may change a step.
    """
    inner = inspect.unwrap(step)
    return inner is not run_row and not (isinstance(inner, CompiledStep) and inner.tier == "graph")


def compiling() -> str:
    """Return "compiling" or "capturing" (a CUDA graph) while a step of this process waits for that, else ""."""
    return next(iter(UNDER_WAY[-1:]), "")


class CompiledStep:
    """run_row, compiled at its first call; the log says how long that took and when it pays off, or why it failed."""

    def __init__(
        self,
        tier: str,
        network: nn.Module,
        backend: str,
        settings: Mapping[str, Any] | None = None,
        plain: Step = run_row,
    ) -> None:
        """plain is the function to compile."""
        self._made_of = tier, network, backend, settings, plain
        self.tier = "step" if tier == "auto" else tier
        self._network, self._backend, self._settings, self._plain = network, backend, settings, plain
        self._graphs = Graphs(plain, measured=tier == "max", plain_calls=PLAIN_CALLS if tier == "graph" else 0)
        self._wait_s = COLD_START_S if tier == "auto" else 0.0  # from the first call on
        self._start: float | None = None  # when this has passed
        self._step: Step | None = None  # compiled
        self._regional: WeakSet[nn.Module] = WeakSet()  # networks whose blocks are compiled
        self._joined: WeakKeyDictionary[nn.Module, list[Any]] = WeakKeyDictionary()  # layers, by network: joined.py
        self._has_warned = False  # about a model that cannot be compiled
        self._lock = threading.Lock()
        self.failure: str | None = None  # why compilation failed, so that plain steps run, in one line

    def __reduce__(self) -> tuple[Any, ...]:
        return CompiledStep, self._made_of  # the copy compiles anew

    @functools.cached_property
    def of_network(self) -> "CompiledStep":
        """The same for `predict`: only the network of a step, in separate graphs that share the memory."""
        tier = "auto" if self._wait_s else self.tier
        part = CompiledStep(tier, self._network, self._backend, self._settings, predict)
        part._graphs = self._graphs.of(predict)
        return part

    def __call__(self, model: Any, *args: Any) -> Any:
        """Compute one row like run_row; the one that of_network returns computes only the network's prediction."""
        if self._plain is not predict and is_stateful(args[4:6]):  # combine and adjust
            return in_two_parts(self, model, *args)[0]
        now = time.perf_counter()
        self._start = now + self._wait_s if self._start is None else self._start
        if self.failure is not None or now < self._start:
            return self._plain(model, *args)
        if not isinstance(model, nn.Module) and self.tier != "regional":
            if not self._has_warned:
                log.info("the model is a function, not a module: its steps are not compiled")
                self._has_warned = True
            return self._plain(model, *args)
        try:
            return self._run(model, *args)
        except Exception as error:  # compilers raise anything
            if isinstance(error, torch.OutOfMemoryError) and self.tier != "graph":  # which takes additional memory
                raise
            return self._plain_after(error, model, *args)

    def _run(self, model: Any, *args: Any) -> Any:
        """Run the compiled step; outside of inference mode, whose tensors would need separate code."""
        if torch.is_inference_mode_enabled():
            with torch.inference_mode(False), torch.no_grad():
                return self._run(model, *mapped(args, lambda x: _another(x) if x.is_inference() else x))
        return self._prepared(model, *args)(model, *args)

    def _prepared(self, model: Any, *args: Any) -> Step:
        """Return the compiled step.  One thread compiles, the others wait."""
        with self._lock:
            if isinstance(model, nn.Module) and self.tier != "graph":  # a graph holds the addresses of all weights
                self._check_joined(model)
            if self._step is None:
                self._step = self._graphs if self.tier == "graph" else self._compile(model, *args)
            if self.tier == "regional":
                self._compile_blocks(model)
            if self.tier != "graph":
                _set_up(self._backend)  # torch's settings are those of a thread
            return self._step

    @as_under_way("compiling")
    def _compile(self, model: Any, *args: Any) -> Step:
        """Return the compiled step, and log the times of plain and compiled calls."""
        _set_up(self._backend)
        device = args[0].device
        for _ in range(2):  # the first call changes weights' layouts and warms kernels up
            plain_s = _timed(self._plain, device, model, *args)
        how: dict[str, Any] = {"backend": self._backend}
        if self._backend == "inductor":
            how["options"] = _options(self.tier, next(self._network.parameters()).device.type, self._settings)
        if self.tier == "regional":
            self._compile_blocks(model)
            step = self._plain
        elif self.tier == "max":
            step = _laid_out(torch.compile(self._plain, fullgraph=True, dynamic=False, **how))
        else:
            step = _for_all_sizes(self._plain, **how)
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
        """Separate joined layers whose weights were replaced, and compile anew: compiled code cannot see addresses."""
        if model not in self._joined:
            self._joined[model] = list(joined.joined_layers(model))
        for layer in self._joined[model]:
            if not joined.is_joined(layer):
                joined.come_apart(layer)
                self._step = None
                self._graphs.clear()
                self._joined.pop(model, None)

    def _plain_after(self, error: Exception, model: Any, *args: Any) -> Any:
        """Run a plain step after an error, and only plain steps from now on.

        If that fails too, the call was the cause: its error is raised, and compiled code stays for other calls.
        """
        blocks = {module: module._compiled_call_impl for net in self._regional for module in net.modules()}
        for module in blocks:
            module._compiled_call_impl = None
        try:
            out = self._plain(model, *args)
        except Exception:
            for module, compiled in blocks.items():
                module._compiled_call_impl = compiled
            raise
        self._step = None
        self._graphs.clear()  # plain steps may need their memory
        self.failure = f"{type(error).__name__}: {next(iter(str(error).strip().splitlines()), '')[:150]}"
        what = "capturing a CUDA graph" if self.tier == "graph" else "compilation"
        log.warning("%s failed (%s): continuing without", what, self.failure)
        return out


def regions(network: nn.Module, counts: Mapping[type, int] | None = None) -> Iterator[nn.Module]:
    """Yield the outermost modules of a network whose class occurs more than once, except PyTorch's own classes.

    counts says how often each class occurs, for parts of a network.
    """
    counts = Counter(type(module) for module in network.modules()) if counts is None else counts
    for child in network.children():
        kind, is_container = type(child), isinstance(child, (nn.ModuleList, nn.Sequential))
        if counts[kind] > 1 and not is_container and not kind.__module__.startswith("torch."):
            yield child
        else:
            yield from regions(child, counts)


def _timed(step: Step, device: torch.device, *args: Any) -> float:
    start = time.perf_counter()
    step(*args)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start


def _verdict(cold_s: float, plain_s: float, compiled_s: float) -> str:
    text = f"compiled in {cold_s:.0f} s: a step takes {compiled_s * 1e3:.1f} ms in place of {plain_s * 1e3:.1f} ms"
    if compiled_s >= plain_s:
        return f'{text}; it does not pay off here: use `compile="off"`'
    return f"{text}, which pays off from {cold_s / (plain_s - compiled_s):,.0f} steps on"


# ---- a step in two parts --------------------------------------------------------------------------------------------


def in_two_parts(step: Step, model: Any, *args: Any) -> tuple[Tensor, Any]:
    """Run a step in two parts: the network, compiled if the step is, and plain Python that mixes and adds its outputs.

    Returns the registers, and what the network returned besides the prediction, or None.
    """
    inner, (inputs, how) = inspect.unwrap(step), (args[:4], args[4:])
    first = inner.of_network if isinstance(inner, CompiledStep) else predict
    out = first(model, *inputs, weighted, (), *how[2:])
    out, more = out if isinstance(out, tuple) else (out, None)
    return run_row(lambda *x, **conditioning: out, *inputs, *how[:2]), more


def predict(model: Any, registers: Tensor, row: Any, noise: Tensor, guided: Guided, *how: Any) -> Any:
    """Return the network's output in a step: the first part of run_row, with the same arguments."""
    num_branches, arguments = len(guided.positive), how[2] if len(how) > 2 else None
    batch = registers[0] if num_branches == 1 else registers[0].repeat(num_branches, 1, 1, 1)
    return model(batch, row.t.expand(len(batch)), **guided.conditioning, **(arguments or {}))


# ---- one graph for all sizes ----------------------------------------------------------------------------------------
# The compiler is told two things: which sizes change, and, where that holds, that h and w are multiples of 8, which can
# be halved three times.  If they might be odd, it copies each lower-level map before using it as tokens: 66 more
# kernels in a step of Stable Diffusion on a GPU.  It learns this from maps (...,h,w) seen as (...,h/8,8,w/8,8).

FOLD = 8  # what a UNet of four levels divides h and w by


def _for_all_sizes(plain: Step, **how: Any) -> Step:
    """Compile run_row or predict so that one graph serves all sizes.  how is torch.compile's."""

    def unfolding(model: Any, registers: Tensor, row: Any, noise: Tensor, guided: Guided, *others: Any) -> Any:
        if registers.ndim == 7:
            registers, noise, guided = _with_maps(_unfolded, registers, noise, guided)
        return plain(model, registers, row, noise, guided, *others)

    compiled = torch.compile(unfolding, fullgraph=True, **how)

    def step(model: Any, registers: Tensor, row: Any, noise: Tensor, guided: Guided, *others: Any) -> Any:
        if all(side % FOLD == 0 and side > FOLD for side in registers.shape[-2:]):
            registers, noise, guided = _with_maps(_folded, registers, noise, guided)
        else:
            registers, noise = _another(registers), _another(noise)
        _mark_sizes(registers, noise, guided, others[2] if len(others) > 2 else None)
        return compiled(model, registers, row, noise, guided, *others)

    return step


def _with_maps(
    change: Callable[[Tensor], Tensor], registers: Tensor, noise: Tensor, guided: Guided
) -> tuple[Tensor, Tensor, Guided]:
    """Return arguments of a step, with their maps changed by `change`."""
    conditioning, weights, positive = guided  # field by field: torch 2.6 cannot compile _replace, nor a slice of them
    parts = {name: change(part) if name == "concat" else part for name, part in conditioning.items()}
    return change(registers), change(noise), Guided(parts, weights, positive)


def _folded(x: Tensor) -> Tensor:
    return _another(x, *x.shape[:-2], x.shape[-2] // FOLD, FOLD, x.shape[-1] // FOLD, FOLD)


def _unfolded(x: Tensor) -> Tensor:
    return x.flatten(-2).flatten(-3, -2)


def _mark_sizes(registers: Tensor, noise: Tensor, guided: Guided, arguments: Any) -> None:
    """Tell the compiler which sizes of a step's arguments will change: batch, height, width, tokens.

    A size of 1 is not marked: the compiler treats it as a constant, so a batch of one has a separate graph.
    """
    sides = (-4, -2) if registers.ndim == 7 else (-2, -1)
    marks: list[tuple[Tensor, tuple[int, ...]]] = [(registers, (1, *sides)), (noise, (0, *sides))]
    axes_of = {"concat": (0, *sides), "context": (0, 1)}  # of the other conditioning: that of images alone
    marks += [(part, axes_of.get(name, (0,))) for name, part in guided.conditioning.items()]
    marks.append((guided.weights, (-2, -1)))
    marks += [(tensor, (0, 2, 3)) for tensor in tensors_in(arguments) if tensor.ndim == 4]  # (B or 1,C,h,w)
    marks += [(tensor, (0,)) for tensor in tensors_in(arguments) if tensor.ndim == 3]  # (B,T,C)
    for tensor, axes in marks:
        for axis in axes:
            if tensor.shape[axis] > 1:
                torch._dynamo.maybe_mark_dynamic(tensor, axis % tensor.ndim)


# Compiled code expects certain strides, also of a view's base, and tensors from outside of inference mode.


def _laid_out(step: Step) -> Step:
    """Return a step for latents and noise in any layout, such as the channels last of an encoded image."""
    return lambda model, registers, row, noise, *others: step(model, _another(registers), row, _another(noise), *others)


def _another(x: Tensor, *shape: int) -> Tensor:
    """Return a tensor without gaps that shares the memory of x but is not a view; or x if it requires gradients."""
    x = x.contiguous()
    if x.requires_grad:
        return x.view(shape or x.shape)
    size = torch.Size(shape) or x.shape
    memory = torch.empty(0, dtype=x.dtype, device=x.device)
    return memory.set_(x.untyped_storage(), x.storage_offset(), size)  # type: ignore[call-overload]


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
    ignore_advice()


def ignore_advice() -> None:
    """Silence Inductor's advice to use TF32 (here --matmul-precision), which stops it where warnings are errors."""
    warnings.filterwarnings("ignore", "TensorFloat32 tensor cores for float32 matrix multiplication available")
