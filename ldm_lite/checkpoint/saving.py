"""Save a model as one .safetensors file in the original layout, of which load() makes the same model, or refuse to.

The model that the reader would make from the file is compared, before a byte is written and afterwards.
"""

import re
from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ldm_lite.checkpoint.loading import recognise_file, schedule_in_file
from ldm_lite.checkpoint.model import CheckpointModel
from ldm_lite.checkpoint.reader import NETWORK_KINDS, on_meta, prefix
from ldm_lite.cli.options import LoadOptions
from ldm_lite.core.family import PREFIX
from ldm_lite.core.files import Tensors
from ldm_lite.core.saving import modules_of, unwrapped, weights_of, write_file
from ldm_lite.runtime import cpu
from ldm_lite.runtime.attention import Fastest, is_stateless
from ldm_lite.runtime.blocks import BlockLinear
from ldm_lite.runtime.offload import is_own_hook
from ldm_lite.runtime.patching import is_kernel, patch_of
from ldm_lite.zoo.families import FAMILY_ROWS, describe, stored_facts
from ldm_lite.zoo.family import Flow, build_network

# Modules whose patches run the same network otherwise: in strips, by another kernel, compiled ahead of time.
RUNTIME = ("ldm_lite.runtime.tiling", "ldm_lite.runtime.attention", "ldm_lite.runtime.aot")


def save_model(model: CheckpointModel, path: Path) -> None:
    """Write all networks, each weight in its dtype, whole or not at all.

    Raises ValueError, one line, before anything is written, for a model that a file cannot hold; OSError.
    """
    if path.suffix != ".safetensors":
        raise ValueError(f"got {path}, expected a name that ends in .safetensors")
    if path.is_dir():
        raise ValueError(f"{path}: is a folder: use another name")
    _check(model)
    networks = {role: unwrapped(model.networks[role]) for role in model.family.specs}
    tensors = in_layout(model, {role: weights_of(network) for role, network in networks.items()})
    metadata = describe(model.family)
    if model.family.sampler != FAMILY_ROWS[metadata["family"]].sampler:
        metadata[f"{PREFIX}sampler"] = model.family.sampler
    if model.family.words:  # training, which describes the family too, may learn others
        metadata[f"{PREFIX}words"] = model.family.words
    if not isinstance(model.family.noise, Flow):
        usual = model.family.noise.schedule(model.schedule.prediction)
        if model.schedule.spacing is not None:
            metadata[f"{PREFIX}spacing"] = str(model.schedule.spacing)
        tensors["alphas_cumprod"] = torch.from_numpy(np.ascontiguousarray(model.schedule.alpha_bar))
        if np.array_equal(model.schedule.alpha_bar, usual.alpha_bar):
            tensors["betas"] = torch.from_numpy(np.ascontiguousarray(usual.betas))
    write_file(path, tensors, metadata, lambda file: _check_file(file, model))


def in_layout(model: CheckpointModel, weights: Mapping[str, Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Return the tensors of networks, by role, under the keys that they have in a file of the original layout."""
    tensors: dict[str, Tensor] = {}
    for role, values in weights.items():
        before = prefix(role, values, model.family.sgm)
        beside = next((kind.beside for kind in NETWORK_KINDS if kind.role == role and kind.probe in values), "")
        outside = re.sub(r"\w+\.$", "", before)
        for key, value in values.items():
            tensors[(outside if beside and key.startswith(beside) else before) + key] = value
    return tensors


def _check(model: CheckpointModel) -> None:
    """Raises ValueError for what a file cannot hold."""
    if model.offloader is not None and model.offloader.storage is not None:
        raise ValueError(f"cannot save weights in {model.offloader.storage}: load the model without `storage`")
    if model.learned or (model.tokenizer is not None and model.tokenizer.added):
        raise ValueError("cannot save the textual inversions that it has learned: load it without them")
    if model.networks.keys() - {"vae"} - model.family.specs.keys():
        raise ValueError(f"cannot save networks that {model.family.title} does not have: leave them out")
    for role, spec in model.family.specs.items():
        with on_meta():
            expected = dict(modules_of(build_network(spec)))
        modules = dict(modules_of(model.networks[role]))
        for name, module in modules.items():
            if fault := _fault(module, expected.get(name)):
                where = f"{role}'s {name}" if name else role
                raise ValueError(f"cannot save the {where}: {fault}")
        if missing := [name for name in expected if name not in modules]:
            raise ValueError(f"cannot save the {role}: it has no {missing[0]}, which load() would expect")


def _fault(module: nn.Module, expected: nn.Module | None) -> str:
    """Say which part of a module a file would not hold, and what to do; "" if nothing."""
    name, attributes = type(module).__name__, vars(module)
    if isinstance(module, BlockLinear):
        return "its weights are in blocks of a GGUF file: load a file with plain weights"
    if type(module) is not type(expected):
        what = "nothing" if expected is None else f"a {type(expected).__name__}"
        return f"it is a {name}, where load() would make {what}: merge the change into the weights, or undo it"
    hooks = (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
    if not all(map(is_own_hook, hooks)):
        return "it has hooks, which a file cannot hold: remove them"
    function, forward = patch_of(module), attributes.get("forward")
    if forward is not None and not is_kernel(function) and getattr(function, "__module__", "") not in RUNTIME:
        return "it has another forward, which a file cannot hold: undo it"
    attention = attributes.get("attention")
    is_ours = isinstance(attention, Fastest) or attention is cpu.attention
    if attention is not None and not is_ours and not is_stateless(attention):
        return 'it has attention of your own, which a file cannot hold: use_attention("sdpa") undoes it'
    return ""


def _check_file(file: Tensors, model: CheckpointModel) -> None:
    """Raises ValueError, saying what differs, unless load() would make this model from a file."""
    file = replace(file, metadata=stored_facts(file.metadata))
    try:
        family, parts, whole, metadata = recognise_file(file, LoadOptions())
        schedule: Any = schedule_in_file(family, whole, metadata, zero_snr=False)
    except ValueError as error:
        raise ValueError(f"cannot save this model, which could not be loaded again: {error}") from error
    for name in (field.name for field in fields(family)):
        ours, theirs = getattr(model.family, name), getattr(family, name)
        if ours != theirs:
            raise ValueError(f"cannot save the family's {name}, {ours!r:.100}: load() would use {theirs!r:.100}")
    for role, network in model.networks.items():
        shapes = {key: tuple(value.shape) for key, value in unwrapped(network).state_dict().items()}
        if role in family.specs and shapes != parts[role].shapes:
            raise ValueError(f"cannot save the {role}: load() would find other tensors")
    if isinstance(family.noise, Flow):
        return
    for name in ("prediction", "spacing", "alpha_bar"):
        ours, theirs = getattr(model.schedule, name), getattr(schedule, name)
        if not np.array_equal(ours, theirs):
            raise ValueError(f"cannot save the schedule's {name}: load() would use the family's, or {theirs!r:.60}")
