"""Save a model as one file from which load() makes the same model again, or refuse: nothing is lost silently.

A .safetensors file holds tensors and a few words, no code.  So before a byte is written, the model that load() would
make from these tensors and metadata is compared with this one, module by module.
"""

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from ldm_lite.core.denoise import run_row
from ldm_lite.core.family import facts_of, recognise, schedule_of
from ldm_lite.core.files import Tensors, open_tensors
from ldm_lite.core.layers import note_size
from ldm_lite.core.model import Model
from ldm_lite.core.networks import KINDS, build, split

# Classes of PyTorch that only run another module -> the attribute that holds it.
WRAPPERS = {
    "OptimizedModule": "_orig_mod",  # torch.compile
    "DataParallel": "module",
    "DistributedDataParallel": "module",
    "AveragedModel": "module",
}
# Attributes of modules that do not change what they compute, once their tensors are compared.
HARMLESS = {"training", "_parameters", "_buffers", "_modules", "_compiled_call_impl"}
WHAT_TO_DO = (
    "a file holds the weights of plain networks: undo the change or merge it into the weights, and save that; or make "
    "your class the one that load() builds, in networks.KINDS"
)


def save(model: Model, path: Path) -> None:
    """Write all networks, in their dtype, with what load() needs to know, into one .safetensors file.

    Raises ValueError, one line, for a model that load() would not make again, before anything is written.
    """
    unknown = [kind for kind in model.networks if kind not in KINDS]
    if unknown:
        raise ValueError(f"cannot save the network {unknown[0]!r}: add its kind to networks.KINDS, or leave it out")
    for kind, network in model.networks.items():
        if not hasattr(unwrapped(network), "spec"):
            raise ValueError(f"cannot save the {kind}, a {type(network).__name__}: {WHAT_TO_DO}")
    if getattr(model.run_row, "_torchdynamo_orig_callable", model.run_row) is not run_row:
        raise ValueError("cannot save a model with a `run_row` of your own: replace(pipe, run_row=denoise.run_row)")
    tensors = {"alphas_cumprod": torch.from_numpy(np.ascontiguousarray(model.schedule.alpha_bar))}
    for kind, network in model.networks.items():
        prefix = KINDS[kind].prefixes[0]
        for key, tensor in weights_of(network).items():
            tensors[prefix + key] = tensor
    specs = {kind: unwrapped(network).spec for kind, network in model.networks.items()}
    facts = facts_of(replace(model.family, specs=specs, prediction=model.schedule.prediction))
    write_file(path, tensors, facts, lambda file: check_file(file, model))


def check_file(file: Tensors, model: Model) -> None:
    """Raise ValueError, saying what differs, unless load() would make this model from a file."""
    try:
        parts = split(file)
        family = recognise(parts, file.metadata, {})
        schedule = schedule_of(file, family)
    except ValueError as error:
        raise ValueError(f"cannot save this model, which could not be loaded again: {error}") from error
    expected = replace(model.family, specs=family.specs, prediction=model.schedule.prediction)
    for name in (field.name for field in fields(family)):
        if getattr(family, name) != getattr(expected, name):
            raise ValueError(
                f"cannot save the family's {name}, {getattr(expected, name)!r}: a file holds numbers and names only, "
                f"and load() would use {getattr(family, name)!r}; put it back, and in again after loading"
            )
    has_levels = np.array_equal(schedule.alpha_bar, model.schedule.alpha_bar)
    if type(schedule) is not type(model.schedule) or not has_levels:
        name = type(model.schedule).__name__
        raise ValueError(f"cannot save a schedule of the class {name}: a file holds alpha_bar and eps or v, no code")
    for kind, network in model.networks.items():
        difference = difference_of(network, build(kind, family.specs[kind]))
        if difference:
            raise ValueError(f"cannot save the {kind}: {difference}; {WHAT_TO_DO}")


def write_file(
    path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str], check: Callable[[Tensors], None]
) -> None:
    """Write a .safetensors file, whole or not at all, that passes a check, which is made before and after writing."""
    if not path.parent.is_dir():
        raise FileNotFoundError(f"{path}: there is no folder {path.parent}")
    shapes = {key: tuple(tensor.shape) for key, tensor in tensors.items()}
    check(Tensors(path, shapes, lambda key: tensors[key], metadata))
    part = path.with_name(path.name + ".part")
    try:
        save_file(dict(tensors), part, dict(metadata))
        part.chmod(0o644)  # a temporary file is only for its owner
        check(open_tensors(part))
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


# ---- networks -------------------------------------------------------------------------------------------------------


def unwrapped(network: Any) -> Any:
    """Return the network inside of torch.compile's module, DataParallel, DistributedDataParallel or AveragedModel."""
    while type(network).__module__.startswith("torch.") and type(network).__name__ in WRAPPERS:
        network = getattr(network, WRAPPERS[type(network).__name__])
    return network


def modules_of(network: nn.Module, name: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules of a network with their names; wrapped modules replace their wrappers."""
    network = unwrapped(network)
    yield name, network
    for key, child in network._modules.items():
        if child is not None:
            yield from modules_of(child, f"{name}.{key}" if name else key)


def tensors_of(module: nn.Module) -> dict[str, Tensor]:
    """The parameters and buffers of a module that belong in a file, without those of modules in it."""
    tensors = {**module._parameters, **module._buffers}
    left_out = module._non_persistent_buffers_set
    return {key: value for key, value in tensors.items() if value is not None and key not in left_out}


def weights_of(network: nn.Module) -> dict[str, Tensor]:
    """Return the tensors of a network by key, on the CPU, contiguous, and none of them a view of another."""
    weights: dict[str, Tensor] = {}
    storages = set[int]()
    for name, module in modules_of(network):
        for key, value in tensors_of(module).items():
            if value.is_meta:
                raise ValueError(f"cannot save a network without values: {name}.{key} is on the meta device")
            tensor = value.detach().cpu().contiguous()
            if tensor.untyped_storage().data_ptr() in storages:  # tied weights, which a file holds twice
                tensor = tensor.clone()
            storages.add(tensor.untyped_storage().data_ptr())
            weights[f"{name}.{key}" if name else key] = tensor
    return weights


def difference_of(network: nn.Module, expected: nn.Module) -> str:
    """Say which module of a network differs from another's in more than the values of its weights; "" if in none."""
    modules, others = dict(modules_of(network)), dict(modules_of(expected))
    for name, module in modules.items():
        counterpart, place = others.get(name), name or "the network"
        if counterpart is None:
            return f"load() would leave out {place}, a {type(module).__name__}"
        if type(module) is not type(counterpart):
            return f"{place} is a {type(module).__name__}, where load() would make a {type(counterpart).__name__}"
        shapes, expected_shapes = _shapes(module), _shapes(counterpart)
        if shapes != expected_shapes:
            return f"{place} has tensors {shapes}, where load() would make {expected_shapes}"
        for key in _changed_attributes(module, counterpart):
            return f"{place} has {key.strip('_').replace('_', ' ')} of its own, which load() would not give it"
    missing = [name for name in others if name not in modules]
    return f"load() would add {missing[0]}" if missing else ""


def _shapes(module: nn.Module) -> dict[str, tuple[int, ...]]:
    return {key: tuple(tensor.shape) for key, tensor in tensors_of(module).items()}


def _changed_attributes(module: nn.Module, counterpart: nn.Module) -> Iterator[str]:
    """Yield the attributes, hooks and methods in which a module differs from another of the same class."""
    others = _attributes(counterpart)
    for key, value in _attributes(module).items():
        is_known = key in others or hasattr(type(module), key)  # else the class does not read it
        if is_known and not _is_same(value, others.get(key)):
            yield key


def _is_same(value: Any, expected: Any) -> bool:
    if value is expected:
        return True
    if isinstance(value, (Tensor, np.ndarray)) or type(value) is not type(expected):
        return False
    return bool(value == expected)


def _attributes(module: nn.Module) -> dict[str, Any]:
    """The attributes of a module that may change what it computes."""
    names = [key for key in vars(module) if key not in HARMLESS and "backward" not in key]
    attributes = {key: vars(module)[key] for key in names}
    hooks = attributes["_forward_pre_hooks"].values()
    attributes["_forward_pre_hooks"] = [hook for hook in hooks if hook is not note_size]  # layers.use_attention's
    return attributes
