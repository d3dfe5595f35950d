"""LoRA files: read, merged into the weights of networks in place, and removed again bit for bit.

A merged network runs with W + scale * alpha / rank * up @ down (Hu et al. 2021, eq. 3), written into the memory of W,
so that compiled code and captured graphs stay valid.  Modules are found by building every spelling that files use
(kohya, PEFT, older diffusers; names of diffusers or of the original) from our own names: names with dots replaced
by underscores cannot be split again.

Source: kohya-ss/sd-scripts networks/lora.py for names and formulas of kohya's files.
"""

import json
import logging
import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ldm_lite.checkpoint import hub
from ldm_lite.checkpoint.diffusers_keys import transformers_name, unet_blocks, unet_name
from ldm_lite.checkpoint.reader import Checkpoint, open_checkpoint
from ldm_lite.models.open_clip import OpenCLIPTextEncoder
from ldm_lite.models.unet import UNet
from ldm_lite.runtime.offload import Offloader
from ldm_lite.runtime.quantization import Quantized

log = logging.getLogger("ldm_lite")

# ---- names ----------------------------------------------------------------------------------------------------------

# Prefixes of module names by role, kohya's first.  Files for a single network may have none.
PREFIXES = {
    "unet": ("lora_unet_", "unet_", ""),
    "text_encoder": ("lora_te_", "lora_te1_", "text_encoder_", ""),
    "text_encoder_2": ("lora_te2_", "text_encoder_2_"),
}


class Target(NamedTuple):
    """The weight of a module: rows of a parameter."""

    parameter: nn.Parameter
    rows: slice

    @property
    def shape(self) -> torch.Size:
        """The shape of the weight, on any device."""
        return torch.Size((len(range(*self.rows.indices(len(self.parameter)))), *self.parameter.shape[1:]))


def targets(network: nn.Module) -> dict[str, Target]:
    """Return the modules of a network that have a weight, by name; OpenCLIP's q, k and v share one parameter."""
    found: dict[str, Target] = {}
    for key, parameter in network.named_parameters(remove_duplicate=False):
        module, _, last = key.rpartition(".")
        if last == "weight":
            found[module] = Target(parameter, slice(None))
        elif last == "in_proj_weight":
            third = len(parameter) // 3
            for i, part in enumerate("qkv"):
                found[f"{module}.{part}_proj"] = Target(parameter, slice(i * third, (i + 1) * third))
    return found


def file_names(role: str, network: nn.Module) -> dict[str, list[str]]:
    """Return the names that each module of targets(network) has in files, dots as underscores, kohya's first."""
    blocks = {}
    if isinstance(network, UNet):
        spec = network.spec
        blocks = unet_blocks(spec.num_res_blocks, spec.transformer_depth, spec.middle_depth)
    found = {}
    for module in targets(network):
        other = transformers_name(module) if isinstance(network, OpenCLIPTextEncoder) else module
        names = [unet_name(module, blocks), module] if blocks else [f"text_model.{other}", other]
        names += [re.sub(r"to_out\.0$", "to_out", name) for name in names]  # older names of diffusers
        names += [re.sub(r"self_attn\.(\w+)_proj$", r"self_attn.to_\1", name) for name in names]
        found[module] = [prefix + name.replace(".", "_") for prefix in PREFIXES[role] for name in names]
    return found


# The end of a key -> which part of its module the tensor is; the first pattern that fits.
PARTS = (
    (r"\.lora_(down|up|mid)\.weight$", r"\1"),  # kohya
    (r"\.lora_A(?:\.\w+)?\.weight$", "down"),  # PEFT, with or without an adapter's name
    (r"\.lora_B(?:\.\w+)?\.weight$", "up"),
    (r"(?:_lora|\.lora|\.lora_linear_layer)\.(down|up)\.weight$", r"\1"),  # diffusers before PEFT
    (r"\.(alpha)$", r"\1"),
)
NOT_SUPPORTED = {
    r"\.dora_scale$|\.lora_magnitude_vector": "DoRA",
    r"\.hada_": "LoHa",
    r"\.lokr_": "LoKr",
    r"\.oft_|\.boft_": "OFT",
    r"\.diff(_b)?$": "full differences",
    r"^bundle_emb\.": "a bundled textual inversion",
}


def _part(key: str) -> tuple[str, str] | None:
    for pattern, part in PARTS:
        if match := re.search(pattern, key):
            module = re.sub(r"base_model\.model\.|\.processor(?=\.|$)", "", key[: match.start()])
            return module.replace(".", "_"), match.expand(part)
    return None


# ---- files ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LoraWeights:
    """The LoRA weights of one module: they add alpha / rank * up @ down, or up * mid * down, to its weight."""

    up: Tensor  # (out,r) or (out,r,1,1)
    down: Tensor  # (r,in) or (r,in,k,k); (r,in,1,1) with mid
    mid: Tensor | None  # (r,r,k,k)
    alpha: float

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the module's weight; linears may be stored as 1x1 convolutions."""
        return (len(self.up), self.down.shape[1], *(self.down if self.mid is None else self.mid).shape[2:])

    def change(self) -> Tensor:
        """Return the change of the weight at scale 1, in float32, of `shape`."""
        up, down = self.up.float().flatten(1), self.down.float().flatten(1)
        if self.mid is None:
            change = (up @ down).reshape(self.shape)
        else:
            change = torch.einsum("om,mnkl,ni->oikl", up, self.mid.float(), down)
        return change * (self.alpha / len(down))


@dataclass(frozen=True)
class Lora:
    """A LoRA file, which can be merged repeatedly: weights by the file's module names, dots as underscores."""

    name: str
    modules: Mapping[str, LoraWeights]


def open_lora(source: str | os.PathLike[str]) -> Lora:
    """Read a LoRA file in the format of kohya, PEFT or diffusers: a path, or owner/repository/file on the hub.

    An alpha that is missing, 0 or NaN means the rank.  Raises FileNotFoundError, or ValueError if the file is not a
    LoRA of a supported kind.
    """
    file = open_checkpoint(hub.resolve(source))
    for pattern, what in NOT_SUPPORTED.items():
        if any(re.search(pattern, key) for key in file.shapes):
            raise ValueError(f"{file.path}: holds {what}, which is not supported: only LoRA is")
    parts: dict[str, dict[str, str]] = {}
    unknown = []
    for key in file.shapes:
        if (part := _part(key)) is None:
            unknown.append(key)
        else:
            parts.setdefault(part[0], {})[part[1]] = key
    if not parts:
        raise ValueError(f"{file.path}: is not a LoRA (has {unknown[0]}): give a whole checkpoint as `ckpt`")
    if unknown:
        log.warning("%s: ignored %d tensors that belong to no LoRA: %s, ...", file.path.name, len(unknown), unknown[0])
    modules, alphas = {}, _peft_alphas(file)
    for module, keys in parts.items():
        if not {"up", "down"} <= set(keys):
            raise ValueError(f"{file.path}: {module} lacks its up or down weight: the file is damaged")
        tensors = {part: file.read(key) for part, key in keys.items()}
        up, down, mid = tensors["up"], tensors["down"], tensors.get("mid")
        alpha = next((alpha for prefix, alpha in alphas.items() if module.startswith(prefix)), 0.0)
        alpha = float(tensors["alpha"]) if "alpha" in tensors else alpha
        modules[module] = LoraWeights(up, down, mid, alpha if alpha and math.isfinite(alpha) else float(len(down)))
    return Lora(file.path.name, modules)


def _peft_alphas(file: Checkpoint) -> dict[str, float]:
    """Return the alphas of PEFT's configuration in a file's metadata, by the prefix of module names, longest first."""
    about = json.loads(file.metadata.get("lora_adapter_metadata", "{}"))
    for name, value in about.items():
        if value and name.endswith((".use_rslora", ".alpha_pattern", ".use_dora")):
            raise ValueError(f"{file.path}: its {name} is {value}, which is not supported")
    suffix = ".lora_alpha"
    alphas = {name.removesuffix(suffix) + "_": float(value) for name, value in about.items() if name.endswith(suffix)}
    # Longest first, since modules of "text_encoder_2_" begin with "text_encoder_" too.
    return dict(sorted(alphas.items(), key=lambda item: -len(item[0])))


def parse(text: str) -> tuple[str, float]:
    """Split "FILE:WEIGHT" into file and weight (default 1); a drive letter's colon belongs to the file."""
    file, _, weight = text.rpartition(":")
    try:
        return (file, float(weight)) if file else (text, 1.0)
    except ValueError:
        return text, 1.0


# ---- merging --------------------------------------------------------------------------------------------------------


class MergedLora:
    """LoRAs that are merged into networks; as a context manager it removes them at the end of the block."""

    def __init__(self, offloader: Offloader, before: Sequence[tuple[nn.Parameter, Quantized]]) -> None:
        """before holds the changed parameters, each with its earlier value from offloader.save."""
        self._offloader, self._before = offloader, before

    def remove(self) -> None:
        """Restore the earlier weights bit for bit.  Several LoRAs on one network must be removed in reverse order."""
        for parameter, before in self._before:
            self._offloader.write(parameter, before)
        self._before = []

    def __enter__(self) -> "MergedLora":
        return self

    def __exit__(self, *error: object) -> None:
        self.remove()


def merge_lora(
    networks: Mapping[str, nn.Module],
    loras: Sequence[tuple[Lora, float]],
    offloader: Offloader | None = None,
    *,
    removable: bool = True,
) -> MergedLora:
    """Merge LoRAs, each with its weight, into networks by role; the sums are computed in float32.

    offloader is the networks' offloader, if they have one: quantised weights are quantised again.  removable keeps a
    copy of every changed weight on the CPU.  Raises ValueError, with nothing changed, if no module of a file is in
    the networks, or one has another shape.
    """
    networks = {role: network for role, network in networks.items() if role in PREFIXES}
    places = {(role, name): target for role, network in networks.items() for name, target in targets(network).items()}
    table = {
        name: (role, module)
        for role, network in networks.items()
        for module, names in file_names(role, network).items()
        for name in names
    }
    changes: dict[nn.Parameter, list[tuple[slice, LoraWeights, float]]] = {}
    for lora, scale in loras:
        matched = _matched(lora, table)
        for place, weights in matched.items():
            target = places[place]
            _check(lora, place[1], weights, target.shape)
            if offloader is None and target.parameter.element_size() == 1:
                raise ValueError(f"{lora.name}: the weights are quantised: merging needs the offloader of the model")
            changes.setdefault(target.parameter, []).append((target.rows, weights, scale))
        log.info("%s: %d of %d modules merged, at %g", lora.name, len(matched), len(lora.modules), scale)
    offloader = offloader or Offloader({}, torch.device("cpu"))  # of no networks: reads and writes weights in place
    before = []
    for parameter, parts in changes.items():
        if removable:
            before.append((parameter, offloader.save(parameter)))
        total = offloader.read(parameter, parameter.device, torch.float32).clone()
        for rows, weights, scale in parts:
            total[rows] += scale * weights.change().reshape(total[rows].shape).to(total.device)
        offloader.write(parameter, total)
    return MergedLora(offloader, before)


Place = tuple[str, str]  # the role of a network, and one of its modules


def _matched(lora: Lora, table: Mapping[str, Place]) -> dict[Place, LoraWeights]:
    """Return the file's weights by place.  Logs modules that are not in the networks; raises ValueError if none is."""
    left = [module for module in lora.modules if module not in table]
    if len(left) == len(lora.modules):
        raise ValueError(f"{lora.name}: none of its {len(left)} modules is in this model (has {left[0]})")
    if left:
        some = ", ".join(left[:3])
        log.warning("%s: %d modules are not in this model and have no effect: %s", lora.name, len(left), some)
    return {table[module]: weights for module, weights in lora.modules.items() if module in table}


def _check(lora: Lora, module: str, weights: LoraWeights, shape: torch.Size) -> None:
    """Raise ValueError if the LoRA weights are not for a weight of that shape."""
    ours, theirs = (wanted[:2] if set(wanted[2:]) <= {1} else wanted for wanted in (tuple(shape), weights.shape))
    if ours != theirs:
        raise ValueError(
            f"{lora.name}: is for another model: its {module}.weight is {' x '.join(map(str, weights.shape))}, "
            f"here it is {' x '.join(map(str, shape))}"
        )
