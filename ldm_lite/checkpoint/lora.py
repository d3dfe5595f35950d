"""LoRA files: read, merged into the networks in place, and taken out again exactly.

A network then runs with W + scale * alpha / rank * up @ down (Hu et al. 2021, eq. 3), copied into the tensors that are
there already, so that compiled code and captured graphs stay valid.  Every spelling of a module (kohya's, PEFT's,
diffusers' older ones; names of diffusers or of the original) is built from our own names and looked up: names whose
dots became underscores cannot be split again.

Source: kohya-ss/sd-scripts networks/lora.py for names and formulas of kohya's files.
"""

import json
import logging
import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ldm_lite.checkpoint import hub
from ldm_lite.checkpoint.diffusers_keys import transformers_name, unet_blocks, unet_name
from ldm_lite.checkpoint.reader import Checkpoint, open_checkpoint
from ldm_lite.models.open_clip import OpenCLIPTextEncoder
from ldm_lite.models.unet import UNet

log = logging.getLogger("ldm_lite")

# ---- names ----------------------------------------------------------------------------------------------------------

# What a file may have before the name of a network's module, kohya's own first.  Files of one network may have nothing.
PREFIXES = {
    "unet": ("lora_unet_", "unet_", ""),
    "text_encoder": ("lora_te_", "lora_te1_", "text_encoder_", ""),
    "text_encoder_2": ("lora_te2_", "text_encoder_2_"),
}


def weights_of(network: nn.Module) -> dict[str, Tensor]:
    """Modules of a network that have a weight -> it, in the network's own memory.

    OpenCLIP's q_proj, k_proj and v_proj are thirds of one.
    """
    found: dict[str, Tensor] = {}
    for key, weight in network.state_dict().items():
        module, _, last = key.rpartition(".")
        if last == "weight":
            found[module] = weight
        elif last == "in_proj_weight":
            found |= {f"{module}.{part}_proj": third for part, third in zip("qkv", weight.chunk(3), strict=True)}
    return found


def file_names(role: str, network: nn.Module) -> dict[str, list[str]]:
    """Modules of weights_of(network) -> their names in files, dots as underscores, kohya's own first."""
    blocks = {}
    if isinstance(network, UNet):
        spec = network.spec
        blocks = unet_blocks(spec.num_res_blocks, spec.transformer_depth, spec.middle_depth)
    found = {}
    for module in weights_of(network):
        other = transformers_name(module) if isinstance(network, OpenCLIPTextEncoder) else module
        names = [unet_name(module, blocks), module] if blocks else [f"text_model.{other}", other]
        names += [re.sub(r"to_out\.0$", "to_out", name) for name in names]  # diffusers' older names
        names += [re.sub(r"self_attn\.(\w+)_proj$", r"self_attn.to_\1", name) for name in names]
        found[module] = [prefix + name.replace(".", "_") for prefix in PREFIXES[role] for name in names]
    return found


# A key of a file -> the name of its module and what it is of that module, by the first pattern that fits.
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
class Factors:
    """What one module's weight is changed by: alpha / rank * up @ down, `mid` in between if there is one."""

    up: Tensor  # (out,r) or (out,r,1,1)
    down: Tensor  # (r,in) or (r,in,k,k); (r,in,1,1) with mid
    mid: Tensor | None  # (r,r,k,k)
    alpha: float

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the weight that they are for, but that a linear may be written as a convolution of 1x1."""
        return (len(self.up), self.down.shape[1], *(self.down if self.mid is None else self.mid).shape[2:])

    def change(self) -> Tensor:
        """The change of the weight at scale 1, float32, of `shape`."""
        up, down = self.up.float().flatten(1), self.down.float().flatten(1)
        if self.mid is None:
            change = (up @ down).reshape(self.shape)
        else:
            change = torch.einsum("om,mnkl,ni->oikl", up, self.mid.float(), down)
        return change * (self.alpha / len(down))


@dataclass(frozen=True)
class Lora:
    """A LoRA file: its factors by module, as the file calls it but with dots as underscores."""

    name: str
    modules: Mapping[str, Factors]


def open_lora(source: str | os.PathLike[str]) -> Lora:
    """Open a LoRA file in kohya's, PEFT's or diffusers' format: a path, or owner/repository/file on the hub.

    An alpha that is missing, 0 or NaN is the rank.  Raises FileNotFoundError or ValueError, one line, if the file is no
    LoRA or of a kind that is not supported.
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
        raise ValueError(f"{file.path}: is no LoRA (has {unknown[0]}): give a whole checkpoint as `ckpt`")
    if unknown:
        log.warning("%s: ignored %d tensors that are none of a LoRA: %s, ...", file.path.name, len(unknown), unknown[0])
    modules, alphas = {}, _peft_alphas(file)
    for module, keys in parts.items():
        if not {"up", "down"} <= set(keys):
            raise ValueError(f"{file.path}: {module} has no up or no down: the file is damaged")
        tensors = {part: file.read(key) for part, key in keys.items()}
        up, down, mid = tensors["up"], tensors["down"], tensors.get("mid")
        alpha = next((alpha for prefix, alpha in alphas.items() if module.startswith(prefix)), 0.0)
        alpha = float(tensors["alpha"]) if "alpha" in tensors else alpha
        modules[module] = Factors(up, down, mid, alpha if alpha and math.isfinite(alpha) else float(len(down)))
    return Lora(file.path.name, modules)


def _peft_alphas(file: Checkpoint) -> dict[str, float]:
    """The alphas that PEFT's configuration in a file's metadata gives, by the prefix of the modules, longest first."""
    about = json.loads(file.metadata.get("lora_adapter_metadata", "{}"))
    for name, value in about.items():
        if value and name.endswith((".use_rslora", ".alpha_pattern", ".use_dora")):
            raise ValueError(f"{file.path}: its {name} is {value}, which is not supported")
    suffix = ".lora_alpha"
    alphas = {name.removesuffix(suffix) + "_": float(value) for name, value in about.items() if name.endswith(suffix)}
    # "text_encoder_" is also what the modules of "text_encoder_2_" begin with.
    return dict(sorted(alphas.items(), key=lambda item: -len(item[0])))


def parse(text: str) -> tuple[str, float]:
    """ "FILE" or "FILE:WEIGHT" -> the file and its weight, 1 if there is none; a drive's colon is part of the file."""
    file, _, weight = text.rpartition(":")
    try:
        return (file, float(weight)) if file else (text, 1.0)
    except ValueError:
        return text, 1.0


# ---- merging --------------------------------------------------------------------------------------------------------


class Merged:
    """LoRAs, merged into networks in place; remove() puts back the very weights that were there."""

    def __init__(
        self, networks: Mapping[str, nn.Module], loras: Sequence[tuple[Lora, float]], *, removable: bool = True
    ) -> None:
        """networks by role, those that LoRA files know; each LoRA with its weight, all of them added up in float32.

        removable keeps a copy of what is changed, on the CPU.  What was matched is said, and what was not; raises
        ValueError, with nothing changed, if none of a file's modules is in the networks, or one is of another shape.
        """
        networks = {role: network for role, network in networks.items() if role in PREFIXES}
        table = {
            name: (role, module)
            for role, network in networks.items()
            for module, names in file_names(role, network).items()
            for name in names
        }
        weights = {role: weights_of(network) for role, network in networks.items()}
        changes: dict[Place, list[tuple[Factors, float]]] = {}
        for lora, scale in loras:
            matched = _matched(lora, table)
            for (role, module), factors in matched.items():
                _check(lora, module, factors, weights[role][module].shape)
                changes.setdefault((role, module), []).append((factors, scale))
            log.info("%s: %d of %d modules merged, at %g", lora.name, len(matched), len(lora.modules), scale)
        self._before: list[tuple[Tensor, Tensor]] = []
        for (role, module), parts in changes.items():
            weight = weights[role][module]
            if removable:
                self._before.append((weight, weight.to("cpu", copy=True)))
            total = weight.float()
            for factors, scale in parts:
                total = total + scale * factors.change().reshape(weight.shape).to(weight.device)
            weight.copy_(total)

    def remove(self) -> None:
        """Put back the weights of before, bit for bit.  In the reverse order, if there are several on one network."""
        for weight, before in self._before:
            weight.copy_(before)
        self._before = []


Place = tuple[str, str]  # the role of a network, and one of its modules


def _matched(lora: Lora, table: Mapping[str, Place]) -> dict[Place, Factors]:
    """The factors by the weight that they are for.  Raises ValueError if there are none; says what is left over."""
    left = [module for module in lora.modules if module not in table]
    if len(left) == len(lora.modules):
        raise ValueError(f"{lora.name}: none of its {len(left)} modules is in this model (has {left[0]})")
    if left:
        some = ", ".join(left[:3])
        log.warning("%s: %d modules are not in this model and have no effect: %s", lora.name, len(left), some)
    return {table[module]: factors for module, factors in lora.modules.items() if module in table}


def _check(lora: Lora, module: str, factors: Factors, shape: torch.Size) -> None:
    """Raises ValueError if the factors are not for a weight of that shape."""
    ours, theirs = (wanted[:2] if set(wanted[2:]) <= {1} else wanted for wanted in (tuple(shape), factors.shape))
    if ours != theirs:
        raise ValueError(
            f"{lora.name}: is for another model: its {module}.weight is {' x '.join(map(str, factors.shape))}, "
            f"here it is {' x '.join(map(str, shape))}"
        )
