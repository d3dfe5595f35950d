"""A network compiled ahead of time: a package for given shapes, without weights, that runs on those of the checkpoint.

What torch.compile does at the first call is done once and kept in a file (torch.export, AOTInductor).  The compiled
code reads the network's own parameters, so what is merged into them in place holds for it too.
"""

import hashlib
import json
import os
import re
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ldm_lite.runtime.precision import short_name

Inputs = tuple[Tensor | None, ...]
Key = tuple[tuple[tuple[int, ...], str] | None, ...]  # shape and dtype of each input; None for one that is not given
ABOUT = "ldm_lite"  # our entry in the metadata of a compiled model


def export(network: nn.Module, examples: Sequence[Inputs], path: Path) -> None:
    """Compile a network for the shapes and dtypes of the examples, and write it as one package.

    Raises ValueError, one line, if this machine cannot: for a CPU it takes a C++ compiler, for CUDA Triton.
    """
    from torch._inductor.exc import CppCompileError, InvalidCxxCompiler
    from torch._inductor.package.package import package_aoti

    compiled: dict[str, Any] = {}
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
    except (InvalidCxxCompiler, CppCompileError) as error:
        line = str(error).strip().splitlines()[0]
        raise ValueError(f"the network cannot be compiled here ({line}): install a C++ compiler, as g++") from error
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.part.pt2")
    try:
        package_aoti(os.fspath(temporary), compiled)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def use(network: nn.Module, path: Path) -> None:
    """Have a network run the code of a package, on its own weights; for inputs of other shapes it raises ValueError.

    Raises ValueError, one line, for a file that is no such package, and for one of another network, dtype or device.
    """
    runners: dict[Key, tuple[Any, dict[str, Tensor]]] = {}  # each with the tensors that it points to
    mine, weights = _about(network, ()), network.state_dict()
    for runner in _runners(path):
        about = json.loads(runner.get_metadata().get(ABOUT, "null"))
        if about is None:
            raise ValueError(f"{path}: was not written by ldm_lite.export")
        for what in ("device", "dtype"):
            if about[what] != mine[what]:
                raise ValueError(f"{path}: was exported for {about[what]}, and this is {mine[what]}: export it again")
        if about["network"] != mine["network"]:
            raise ValueError(f"{path}: was exported from another network than this: export it from this one")
        own = {name: weights[name] for name in runner.get_constant_fqns()}
        runner.load_constants(own, False, True, True)  # into what is in use, all of them, as they lie in memory
        key = tuple(None if each is None else (tuple(each[0]), each[1]) for each in about["inputs"])
        runners[key] = runner, own
    if not runners:
        raise ValueError(f"{path}: is no package of ldm_lite.export")

    def forward(*inputs: Tensor | None, **others: object) -> Tensor:
        if others:
            raise ValueError(f"{path.name} is compiled for a network that nothing steers: leave out --control")
        given = inputs[: 1 + max(i for i, each in enumerate(inputs) if each is not None)]
        if _key(given) not in runners:
            known = "; or ".join(map(_words, runners))
            raise ValueError(f"{path.name} is compiled for {known}; got {_words(_key(given))}: export it for that too")
        # The compiled code takes memory as it lay in the examples.
        runner, _ = runners[_key(given)]
        return runner.boxed_run([each.contiguous() for each in given if each is not None])[0]

    network.forward = forward


def _runners(path: Path) -> list[Any]:
    """The compiled models in a package.  Raises ValueError if it is none.

    They are loaded by torch's own loader, not by torch._inductor.aoti_load_package, which imports the compiler.
    """
    path.stat()  # FileNotFoundError has a line of its own
    if not zipfile.is_zipfile(path):
        raise ValueError(f"{path}: is no package of ldm_lite.export")
    # By this file, without which torch 2.11 does not raise but crash.
    metadata = r"data/aotinductor/([^/]+)/[^/]*_metadata\.json$"
    inside = (re.search(metadata, name) for name in zipfile.ZipFile(path).namelist())
    names = sorted({match[1] for match in inside if match})
    try:
        return [torch._C._aoti.AOTIModelPackageLoader(os.fspath(path), name, False, 1, -1) for name in names]
    except (RuntimeError, AttributeError, TypeError) as error:  # the last two: a torch that is too old
        line = str(error).strip().splitlines()[0]
        raise ValueError(
            f"{path}: cannot be loaded by torch {torch.__version__} ({line}): export it again with this version"
        ) from error


def _about(network: nn.Module, inputs: Inputs) -> dict[str, Any]:
    """What a package must agree in with the network that is to run it."""
    weights = network.state_dict()
    layout = [(name, tuple(each.shape), each.stride(), str(each.dtype)) for name, each in sorted(weights.items())]
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


def _key(inputs: Inputs) -> Key:
    return tuple(None if each is None else (tuple(each.shape), short_name(each.dtype)) for each in inputs)


def _words(key: Key) -> str:
    return ", ".join("none" if each is None else f"{'x'.join(map(str, each[0]))} {each[1]}" for each in key)
