"""Ahead-of-time compilation: a network as a package of compiled code for given shapes, without weights.

What torch.compile does at the first call is done once and written to a file (torch.export, AOTInductor).  The compiled
code reads the network's own parameters in place, so a merged LoRA takes effect.
"""

import hashlib
import json
import os
import re
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from ldm_lite.runtime import joined
from ldm_lite.runtime.blocks import BlockLinear
from ldm_lite.runtime.compile import ignore_advice
from ldm_lite.runtime.patching import patch
from ldm_lite.runtime.precision import short_name

ExportInputs = tuple[Tensor | None, ...]
Key = tuple[tuple[tuple[int, ...], str] | None, ...]  # shape and dtype of each input, None for a missing one
Runners = dict[Key, tuple[Any, dict[str, Tensor]]]  # by the inputs they are for, with the tensors that they point to
ABOUT = "ldm_lite"  # our entry in the metadata of a compiled model


def export(network: nn.Module, examples: Sequence[ExportInputs], path: Path) -> None:
    """Compile a network for the shapes and dtypes of the examples, and write one package.

    Raises ValueError if this machine cannot: it needs a C++ compiler, and for CUDA also its toolkit and Triton.
    """
    from torch._inductor.exc import CppCompileError, InvalidCxxCompiler
    from torch._inductor.package.package import package_aoti

    _check_changes(network)
    ignore_advice()
    compiled: dict[str, Any] = {}
    layers = list(joined.joined_layers(network))
    for layer in layers:
        joined.come_apart(layer)  # joined weights would be a constant in the package, which holds no weights
    try:
        for i, inputs in enumerate(examples):
            with torch.no_grad():
                program = torch.export.export(network, inputs)
                options = {
                    "aot_inductor.package": True,
                    "aot_inductor.package_constants_in_so": False,
                    "always_keep_tensor_constants": True,
                    "aot_inductor.metadata": {ABOUT: json.dumps(_about(network, inputs))},
                }
                compiled[f"model{i}"] = torch._inductor.aot_compile(program.module(), inputs, options=options)
    except (InvalidCxxCompiler, CppCompileError, OSError) as error:  # the last: CUDA_HOME is not set
        line, needs = str(error).strip().splitlines()[0], "a C++ compiler such as g++"
        needs += " and CUDA's toolkit" * any(parameter.is_cuda for parameter in network.parameters())
        raise ValueError(f"the network cannot be compiled here ({line}): install {needs}") from error
    finally:
        for layer in layers:
            joined.join_projections(layer)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.part.pt2")
    try:
        package_aoti(os.fspath(temporary), compiled)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def use(network: nn.Module, path: Path) -> None:
    """Run a network by a package's code, on its own weights; calls with inputs of other shapes raise ValueError.

    Raises ValueError if the file is not such a package, or is for another network, dtype or device.
    """
    _check_changes(network)
    package = _Package(path)
    package.runners(network)
    patch(network, package)


def _check_changes(network: nn.Module) -> None:
    if any(isinstance(layer, BlockLinear) and layer.changes for layer in network.modules()):
        raise ValueError(
            "a compiled package cannot have LoRAs on the weights of a GGUF file: leave out `lora`, or use a file of "
            "another format"
        )


class _Package:
    """The forward of networks that run a package, each with runners that read its own weights."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._runners: WeakKeyDictionary[nn.Module, Runners] = WeakKeyDictionary()

    def __reduce__(self) -> tuple[Any, ...]:
        return _Package, (self.path.resolve(),)  # whose code is loaded at the first call

    def __call__(
        self,
        network: nn.Module,
        x: Tensor,
        t: Tensor,
        context: Tensor | None = None,
        y: Tensor | None = None,
        concat: Tensor | None = None,
        **others: object,
    ) -> Tensor:
        if any(value is not None for value in others.values()):
            raise ValueError(f"{self.path.name} is compiled for a UNet without controls: leave out `control`")
        dtype = next(network.parameters()).dtype
        inputs: list[Tensor | None] = [x.to(dtype), t]
        for part in (context, y, concat):
            inputs.append(part.to(dtype) if part is not None and part.is_floating_point() else part)
        while inputs[-1] is None:
            inputs.pop()
        key, runners = _key(inputs), self.runners(network)
        if key not in runners:
            known = "; or ".join(map(_words, runners))
            raise ValueError(f"{self.path.name} is compiled for {known}; got {_words(key)}: export it for that too")
        runner, _ = runners[key]
        # The compiled code expects the memory layout of the examples.
        return runner.boxed_run([part.contiguous() for part in inputs if part is not None])[0]

    def runners(self, network: nn.Module) -> Runners:
        """Return the runners of a network, loaded at the first call.  Raises ValueError as use does."""
        if network in self._runners:
            return self._runners[network]
        runners: Runners = {}
        described, weights = _about(network, ()), network.state_dict()
        for runner in _runners(self.path):
            about = json.loads(runner.get_metadata().get(ABOUT, "null"))
            if about is None:
                raise ValueError(f"{self.path}: was not written by ldm_lite.export")
            for what in ("device", "dtype"):
                if about[what] != described[what]:
                    raise ValueError(
                        f"{self.path}: was exported for {about[what]}, and this is {described[what]}: export it again"
                    )
            if about["network"] != described["network"]:
                raise ValueError(f"{self.path}: was exported from a different network: export this one")
            constants = {name: weights[name] for name in runner.get_constant_fqns()}
            runner.load_constants(constants, False, True, True)  # all active constants, used in place
            key = tuple(None if part is None else (tuple(part[0]), part[1]) for part in about["inputs"])
            runners[key] = runner, constants
        if not runners:
            raise ValueError(f"{self.path}: is not a package of ldm_lite.export")
        self._runners[network] = runners
        return runners


def _runners(path: Path) -> list[Any]:
    """Load the compiled models of a package.  Raises ValueError for any other file.

    Uses torch's low-level loader: torch._inductor.aoti_load_package imports the compiler.
    """
    path.stat()  # may raise FileNotFoundError
    if not zipfile.is_zipfile(path):
        raise ValueError(f"{path}: is not a package of ldm_lite.export")
    # Each model has this file; without it torch 2.11 crashes instead of raising.
    metadata = r"data/aotinductor/([^/]+)/[^/]*_metadata\.json$"
    inside = (re.search(metadata, name) for name in zipfile.ZipFile(path).namelist())
    names = sorted({match[1] for match in inside if match})
    try:
        return [torch._C._aoti.AOTIModelPackageLoader(os.fspath(path), name, False, 1, -1) for name in names]
    except (RuntimeError, AttributeError, TypeError) as error:  # the last two if this torch is too old
        line = str(error).strip().splitlines()[0]
        raise ValueError(
            f"{path}: cannot be loaded by torch {torch.__version__} ({line}): export it again with this version"
        ) from error


def _about(network: nn.Module, inputs: ExportInputs) -> dict[str, Any]:
    """Describe the properties that a package and the network that runs it must share."""
    weights = network.state_dict()
    layout = [(name, tuple(w.shape), w.stride(), str(w.dtype)) for name, w in sorted(weights.items())]
    first = next(iter(weights.values()))
    device = first.device.type
    if device == "cuda":
        device += " sm_{}{}".format(*torch.cuda.get_device_capability(first.device))
    elif device == "cpu":
        device += f" with {torch.backends.cpu.get_cpu_capability()}"
    return {
        "network": hashlib.sha256(repr((getattr(network, "spec", None), layout)).encode()).hexdigest(),
        "dtype": short_name(first.dtype),
        "device": device,
        "inputs": _key(inputs),
    }


def _key(inputs: Sequence[Tensor | None]) -> Key:
    return tuple(None if part is None else (tuple(part.shape), short_name(part.dtype)) for part in inputs)


def _words(key: Key) -> str:
    return ", ".join("none" if part is None else f"{'x'.join(map(str, part[0]))} {part[1]}" for part in key)
