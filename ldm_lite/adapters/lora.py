"""LoRA files: read, merged into the weights of networks in place, and removed again bit for bit.

A merged network runs with changed weights (kinds.py), written into the memory of the old ones, so that compiled code
and captured graphs stay valid.  Quantised weights stay as they are: the LoRA's part is computed for each forward,
from its small matrices (merging.py).  Modules are found by building every spelling that files use (kohya,
LyCORIS, PEFT, ComfyUI, older diffusers; names of diffusers or of the original) from our own names: names with dots
replaced by underscores cannot be split again.

Source: kohya-ss/sd-scripts networks/lora.py for names and formulas of kohya's files.
"""

import logging
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ldm_lite.adapters import kinds, peft
from ldm_lite.adapters.changes import Settings
from ldm_lite.adapters.kinds import Change, Changes, Value
from ldm_lite.adapters.merging import Applied, MergedLora, Target, Weight
from ldm_lite.adapters.positional import named
from ldm_lite.adapters.strength import Strength
from ldm_lite.adapters.textual_inversion import Embedding, bundled_embeddings
from ldm_lite.checkpoint.reader import errors_of, open_checkpoint
from ldm_lite.cli.files import parse_json, read_json
from ldm_lite.formats.diffusers_names import renamed, transformers_name, unet_blocks, unet_name
from ldm_lite.models.open_clip import OpenCLIPTextEncoder
from ldm_lite.models.ops import TransformerSpec
from ldm_lite.models.t5 import T5Encoder
from ldm_lite.models.unet import LDMUNet
from ldm_lite.runtime.blocks import BlockLinear
from ldm_lite.runtime.offload import Offloader
from ldm_lite.zoo.families import FAMILY_ROWS
from ldm_lite.zoo.family import FamilyRow

log = logging.getLogger("ldm_lite")

# ---- names ----------------------------------------------------------------------------------------------------------

# Prefixes of module names by role, kohya's first; ComfyUI's and the original's name the encoder itself.  Files for
# a single network may have none: shapes then tell the text encoders apart.
PREFIXES = {
    "unet": (
        *("lora_unet_", "unet_", "lycoris_", "diffusion_model_", "model_diffusion_model_", ""),
        *("transformer_", "lora_transformer_", "oft_unet_"),
        *("unet_unet_", "lora_unet_unet_"),  # diffusers' trainer of November 2023, and a converter of its files
    ),
    "text_encoder": (
        *("lora_te_", "lora_te1_", "text_encoder_", "text_encoders_clip_l_transformer_", ""),
        *("text_encoders_clip_h_transformer_", "cond_stage_model_transformer_", "cond_stage_model_model_"),
        *("conditioner_embedders_0_transformer_", "conditioner_embedders_0_model_"),
    ),
    "text_encoder_2": (
        *("lora_te2_", "text_encoder_2_", "text_encoders_clip_g_transformer_", "conditioner_embedders_1_model_", ""),
    ),
    "text_encoder_3": ("text_encoder_3_",),
}
OF_T5 = ("lora_te3_", "text_encoders_t5xxl_transformer_")  # for any of a model's encoders


def targets(network: nn.Module) -> dict[str, dict[str, Target]]:
    """Return the "weight" and "bias" of a network's modules, by name; OpenCLIP's q, k and v share parameters."""
    by_module: dict[str, dict[str, Target]] = {}
    for key, parameter in network.named_parameters(remove_duplicate=False):
        module, _, last = key.rpartition(".")
        if last in ("weight", "bias", "scale"):
            by_module.setdefault(module, {})[last] = Target(parameter)
        elif last in ("in_proj_weight", "in_proj_bias"):
            third, last = len(parameter) // 3, last.removeprefix("in_proj_")
            for i, part in enumerate("qkv"):
                target = Target(parameter, slice(i * third, (i + 1) * third))
                by_module.setdefault(f"{module}.{part}_proj", {})[last] = target
        elif key in ("positional_embedding", "text_projection"):
            by_module[key] = {"weight": Target(parameter, transposed=key == "text_projection")}
    for name, layer in network.named_modules():
        if isinstance(layer, BlockLinear):
            by_module.setdefault(name, {})["weight"] = Target(layer)
    spec = getattr(network, "spec", None)
    return by_module | (_parts(spec, by_module) if isinstance(spec, TransformerSpec) else {})


def _parts(spec: Any, by_module: Mapping[str, dict[str, Target]]) -> dict[str, dict[str, Target]]:
    """Return the targets of diffusers' modules of a transformer, which are rows of ours or have swapped halves."""
    parts: dict[str, dict[str, Target]] = {}
    for ours, (names, swapped) in renamed(by_module, spec.other_names).items():
        for i, name in enumerate(names):
            width = spec.width  # of queries, keys and values; the MLP is the rest
            rows = slice(None) if len(names) == 1 else slice(i * width, None if i == 3 else (i + 1) * width)
            for last, target in by_module[ours].items():
                key = "weight" if last == "scale" else last  # of norms
                parts.setdefault(name, {})[key] = Target(target.parameter, rows, swapped=swapped)
    return parts


def file_names(role: str, network: nn.Module) -> dict[str, list[str]]:
    """Return the names that each module of targets(network) has in files, dots as underscores, kohya's first."""
    blocks = {}
    if isinstance(network, LDMUNet):
        spec = network.spec
        blocks = unet_blocks(spec.num_res_blocks, spec.transformer_depth, spec.middle_depth)
    spellings = {}
    for module in targets(network):
        transformers = transformers_name(module) if isinstance(network, OpenCLIPTextEncoder) else module
        names = [unet_name(module, blocks), module] if blocks else [f"text_model.{transformers}", transformers, module]
        names = [module] if isinstance(getattr(network, "spec", None), TransformerSpec) else names
        names += [re.sub(r"to_out\.0$", "to_out", name) for name in names]  # older names of diffusers
        names += [re.sub(r"self_attn\.(\w+)_proj$", r"self_attn.to_\1", name) for name in names]
        flat = [name.replace(".", "_") for name in dict.fromkeys(names)]
        prefixes = (*OF_T5, *PREFIXES[role]) if isinstance(network, T5Encoder) else PREFIXES[role]
        spellings[module] = [prefix + name for prefix in prefixes for name in flat]
    return spellings


# ---- files ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Lora:
    """A LoRA, which can be merged repeatedly: changes by the file's module names, dots as underscores."""

    name: str
    modules: Mapping[str, Changes] = field(repr=False)
    embeddings: tuple[Embedding, ...] = field(
        default=(), repr=False
    )  # bundled textual inversions; merging does not use them
    names: tuple[str, ...] = ()  # its names: of its file, folder or repository, and in its metadata
    bases: Mapping[str, str] = field(default_factory=dict)  # the model that it is for, by its metadata


def open_lora(source: str | os.PathLike[str]) -> Lora:
    """Read a LoRA in the format of kohya, LyCORIS, PEFT, ComfyUI or diffusers.

    source is a file, a folder of PEFT (with adapter_config.json), or either on the hub: owner/repository[/file].  An
    alpha that is missing or 0 means the rank, unless a configuration of PEFT has it.  Raises FileNotFoundError, or
    ValueError if it is damaged, not a LoRA, or of a kind that is not supported.
    """
    title, files = peft.find(os.fspath(source))
    *_, folder, last = ("", *os.fspath(source).rstrip("/").split("/"))
    names = [f"{folder}/{last}" if last in (*peft.WEIGHT_NAMES, *peft.DIFFUSERS) else last]
    modules: dict[str, Changes] = {}
    embeddings: list[Embedding] = []
    bases: dict[str, str] = {}
    for role, weights, config in files:
        part = _read(weights, role, config)
        if twice := part.modules.keys() & modules.keys():
            raise ValueError(f"{title}: {min(twice)} is in two of its files")
        modules |= part.modules
        embeddings += part.embeddings
        names += part.names
        bases |= part.bases
    return Lora(title, modules, tuple(embeddings), tuple(names), bases)


def _read(path: Path, role: str, config: Path | None) -> Lora:
    """Read one file.  role is a network's if the file does not name it, else ""."""
    file = named(open_checkpoint(path))
    most, configs = len(file.shapes), dict[str, peft.PeftConfig]()
    if config is not None:
        configs[""] = peft.read_config(read_json(config), str(config), most)
    elif about := file.metadata.get("lora_adapter_metadata"):
        where = f"{path}: its lora_adapter_metadata"
        configs = peft.by_role(parse_json(about, where), where, most)
    keys = [key for key in file.shapes if not key.startswith("bundle_emb.")]
    parts: dict[str, dict[str, str]] = {}
    dotted: dict[str, str] = {}
    try:
        unknown = kinds.check_keys(keys)
        for key in keys:
            if (split_key := kinds.part_of(key)) is None:
                continue
            name, part = split_key
            module = (f"{role}_" if role else "") + name.replace(".", "_")
            dotted[module] = name
            if (first := parts.setdefault(module, {}).setdefault(part, key)) != key:
                raise ValueError(f"holds the same weights twice, as {first} and {key}")
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    if unknown:
        some = ", ".join(unknown[:8]) + ", ..." * (len(unknown) > 8)
        log.warning("%s: ignored %d tensors that belong to no LoRA: %s", path.name, len(unknown), some)
    if not configs and path.name in peft.WEIGHT_NAMES:
        log.warning("%s: %s is missing beside it: alpha is taken to be the rank", path, peft.CONFIG)
    modules = {}
    for module, keys_of_parts in parts.items():
        try:
            # Without a configuration of PEFT alpha is the rank, and the names show who wrote the file.
            writer = "ComfyUI" if dotted[module].startswith("diffusion_model.") else None
            settings = Settings(lambda rank: float(rank or 1), {"writer": writer})
            network, _, inside = dotted[module].partition(".")
            if told := configs.get(network) or configs.get(""):
                name = inside if network in configs else dotted[module]
                settings = Settings(partial(told.alpha_of, name), told.about_module(name))
            modules[module] = kinds.read_changes(keys_of_parts, file.read, settings)
        except ValueError as error:
            raise ValueError(f"{path}: {dotted[module]} {error}") from error
    names = [file.metadata[key] for key in ("ss_output_name", "modelspec.title") if key in file.metadata]
    bases = {key: file.metadata[key] for key in BASES if file.metadata.get(key)}
    for config_of_role in configs.values():
        bases |= {PEFT_BASE: config_of_role.base} if config_of_role.base else {}
    return Lora(path.name, modules, tuple(bundled_embeddings(file)), tuple(names), bases)


# Metadata that name the base model; Stability AI's standard, kohya's, PEFT's.
BASES = ("modelspec.architecture", "ss_base_model_version")
PEFT_BASE = "base_model_name_or_path"


def check_base(lora: Lora, family: FamilyRow) -> None:
    """Raise ValueError if a file's metadata say that it is for another family, whose layers may have the same names.

    A warning names an unknown family in the metadata, and another family in the file's name.
    """
    if not family.called:
        return

    def other(text: str) -> str | None:
        if re.search(family.called, text, re.IGNORECASE):
            return None
        rows = (row for row in FAMILY_ROWS.values() if row.called and re.search(row.called, text, re.IGNORECASE))
        return next((row.title for row in rows), None)

    for key, text in lora.bases.items():
        if (title := other(text)) is not None:
            raise ValueError(
                f"{lora.name}: is for {title}, as its metadata say ({key} {text!r:.60}), but this is {family.title}"
            )
    if any(re.search(family.called, text, re.IGNORECASE) for text in lora.bases.values()):
        return
    for key in [key for key in BASES if key in lora.bases]:
        log.warning("%s: is for %.60r, as its metadata say (%s): is that this model?", lora.name, lora.bases[key], key)
    for name in lora.names[:1]:
        if (title := other(name)) is not None:
            log.warning("%s: by its name it is for %s, but this is %s", lora.name, title, family.title)


# ---- merging --------------------------------------------------------------------------------------------------------


def merge_lora(
    networks: Mapping[str, nn.Module],
    loras: Sequence[tuple[Lora, float | Strength]],
    offloader: Offloader | None = None,
    *,
    removable: bool = True,
) -> MergedLora:
    """Merge LoRAs, each with its weight, into networks by role; the sums are computed in float32.

    A weight is a number, or a Strength by network and block.  Quantised weights keep their bits: the sums are computed
    for each forward.  offloader is the networks' offloader, if they have one.  removable keeps a copy of every other
    changed weight on the CPU.  Raises ValueError, with nothing changed, if no module of a file is in the networks, one
    has another shape, or compiled code would not see the change.
    """
    networks = {role: network for role, network in networks.items() if role in PREFIXES}
    places = {
        (role, name): parameters for role, network in networks.items() for name, parameters in targets(network).items()
    }
    table: dict[str, list[ModulePlace]] = {}
    for role, network in networks.items():
        for module, names in file_names(role, network).items():
            for name in names:
                table.setdefault(name, []).append((role, module))
    changes: dict[Weight, list[Applied]] = {}
    for lora, weight in loras:
        scale = weight if isinstance(weight, Strength) else Strength(weight, weight)
        with errors_of(lora.name):
            blocks = scale.by_block(networks)
        for place, target, change in _matched(lora, table, places):
            parameter = target.parameter
            if isinstance(parameter, BlockLinear):
                if parameter.compiled:
                    raise ValueError(
                        f"{lora.name}: compiled code does not see later changes of a GGUF file's weights: "
                        "give the LoRA when loading, with `lora=FILE`, or leave out `compile`"
                    )
            elif offloader is None and parameter.element_size() == 1:
                raise ValueError(f"{lora.name}: the weights are quantised: merging needs the offloader of the model")
            strength = 1.0 if isinstance(change, Value) and change.always else scale.of(*place, blocks)
            changes.setdefault(parameter, []).append(Applied(target, change, strength))
        count = sum(name in table for name in lora.modules)
        log.info("%s: %d of %d modules merged, at %s", lora.name, count, len(lora.modules), scale)
    # An offloader of no networks reads and writes weights in place.
    merged = MergedLora(offloader or Offloader({}, torch.device("cpu")))
    for parameter, parts in changes.items():
        merged.merge(parameter, parts, removable)
    return merged


ModulePlace = tuple[str, str]  # the role of a network, and one of its modules


def _matched(
    lora: Lora, table: Mapping[str, Sequence[ModulePlace]], places: Mapping[ModulePlace, Mapping[str, Target]]
) -> list[tuple[ModulePlace, Target, Change]]:
    """Return the changes of a file with their modules and targets.  Logs modules that are not in the networks.

    Raises ValueError if none is in them, if a shape differs, or if two modules of the file are one in a network.
    """
    left = [module for module in lora.modules if module not in table]
    deeper = [module for module in left if re.sub(r"\d+", "0", module) in table]
    if len(deeper) > len(lora.modules) / 2:
        raise ValueError(f"{lora.name}: is for a model of more blocks: this one lacks {deeper[0]}")
    if len(left) == len(lora.modules):
        raise ValueError(f"{lora.name}: none of its {len(left)} modules is in this model (has {left[0]})")

    def fits(changes: Changes, target: Mapping[str, Target]) -> bool:
        return all(
            kinds.fits(change.shape, target[name].shape) if name in target else getattr(change, "optional", False)
            for name, change in changes.items()
        )

    missing: list[str] = []
    matched: list[tuple[ModulePlace, Target, Change]] = []
    taken: dict[ModulePlace, str] = {}
    for name, changes in lora.modules.items():
        if name not in table:
            continue
        # A name without a prefix may be that of either text encoder.
        place = next((place for place in table[name] if fits(changes, places[place])), table[name][0])
        if (first := taken.setdefault(place, name)) != name:
            raise ValueError(f"{lora.name}: changes {'.'.join(place)} twice, as {first} and {name}")
        for parameter, change in changes.items():
            target = places[place].get(parameter)
            if target is None:
                missing += [f"the {parameter} of {name}"] * (not getattr(change, "optional", False))
            elif not kinds.fits(change.shape, target.shape):
                theirs, ours = (
                    " x ".join("any" if n == -1 else f"a multiple of {-n}" if n < 0 else str(n) for n in shape)
                    for shape in (change.shape, target.shape)
                )
                raise ValueError(
                    f"{lora.name}: is for another model: its {place[1]}.{parameter} is {theirs}, here it is {ours}"
                )
            else:
                matched.append((place, target, change))
    for what, names in (("modules", left), ("weights or biases", missing)):
        if names:
            some = ", ".join(names[:3]) + ", ..." * (len(names) > 3)
            log.warning("%s: %d %s are not in this model and have no effect: %s", lora.name, len(names), what, some)
    return matched
