"""What the keys of an adapter file mean: the kinds of change of a module's weight or bias, and their parts.

A key is the name of a module and one of PARTS.  read_changes() checks the parts of a module and makes its changes.
Source: LyCORIS modules/norms.py and full.py; PEFT tuners/lora/layer.py.  The other kinds are in changes.py.
"""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from ldm_lite.adapters.changes import DoRA, LoHa, LoKr, LoRA, Settings, make_changes

# The end of a key -> which part of its module's changes the tensor is; the first pattern that fits.
PARTS = (
    (r"[._]lora_(down|up|mid)\.weight$", r"\1"),  # kohya; a converter writes an underscore
    (r"\.lora_A(?:\.\w+)?\.weight$", "down"),  # PEFT, with or without an adapter's name
    (r"\.lora_B(?:\.\w+)?\.weight$", "up"),
    (r"\.(?:lora_B(?:\.\w+)?|lora_up)\.bias$", "up_b"),
    (r"\.lora_embedding_(A|B)(?:\.\w+)?$", r"table_\1"),
    (r"(?:_lora|\.lora|\.lora_linear_layer)\.(down|up)\.weight$", r"\1"),  # diffusers before PEFT
    (r"\.(hada_(?:w[12]_[ab]|t[12])|lokr_(?:w[12](?:_[ab])?|t2))$", r"\1"),  # LyCORIS: LoHa, LoKr
    (r"\.(oft_blocks|rescale|on_input|dora_scale)$", r"\1"),
    (r"\.oft_R\.(scaled_oft)$", r"\1"),  # OneTrainer
    (r"\.(oft_R)(?:\.\w+)?\.weight$", r"\1"),  # PEFT: OFT, BOFT, IA3
    (r"\.(boft_[Rs]|ia3_l)(?:\.(?!weight$)\w+)?$", r"\1"),
    (r"\.([ab][12]|bm)\.weight$", r"glora_\1"),
    (r"^(?:lora|lycoris)_[^.]+\.weight$", "ia3"),
    (r"\.lora_magnitude_vector(?:\.\w+)*$", "magnitude"),  # PEFT: DoRA
    (r"(?:_lora_down)?\.(alpha)$", r"\1"),
    (r"\.(?:diff|w_norm)$", "diff"),  # LyCORIS: full differences and norms
    (r"\.(?:diff_b|b_norm)$", "diff_b"),
    (r"\.set_weight$", "value"),  # ComfyUI
    (r"(?<=_norm)\.scale$", "value_s"),  # Black Forest Labs
    (r"^(?=.*\bbase_model\.model\.)(?!.*\blora_).*\.weight$", "value"),  # PEFT: modules_to_save
    (r"^(?=.*\bbase_model\.model\.)(?!.*\blora_).*\.bias$", "value_b"),
)
# Inside a module's name: not a part of it.
_WRAPPERS = r"\bbase_model\.model\.|\.processor(?=\.|$)|\.base_layer(?=\.|$)|\.modules_to_save(\.\w+)?(?=$)"
NOT_SUPPORTED = {
    r"\.oft_[Rs](\.(?!weight$|scaled_oft$)\w+)?$|\.oft_(diag|embedding_R)\b|\.oft_blocks\.": "OFT in another layout "
    "than LyCORIS's and PEFT's since 0.16",
    r"\.lora_E\b|\.ranknum\b": "AdaLoRA",
    r"\bvera_(lambda_[bd]|A|B)\b": "VeRA",
    r"\.trainable_tokens_": "trained tokens",
    r"\.bias_(indices|values|size)$": "a sparse bias",
    r"\.reshape_weight$": "weights of another shape (reshape_weight)",
}
SUPPORTED = "LoRA, DoRA, LoHa, LoKr, GLoRA, OFT, BOFT, IA3, full differences, norms and biases are"
# A key that names a module: leaving it out would lose its change.
OF_A_MODULE = (
    r"^(lora|oft|lycoris|unet|transformer|text_encoders?|te\d?|diffusion_model|model|base_model|cond_stage_model"
    r"|conditioner|text_model|encoder|layers|(down|up|mid|input|output|middle|double|single|joint)_blocks?"
    r"|single_transformer|(noise|context)_refiner)[_.\d]"
)


class Change(Protocol):
    """How a file changes one parameter."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the parameter, as `fits` compares it."""
        ...

    def change(self, parameter: Tensor) -> Tensor:
        """Return the change of a parameter, given in float32, at weight 1: float32, of `shape`."""
        ...


@dataclass(frozen=True)
class Difference:
    """Adds a tensor, times a factor."""

    tensor: Tensor
    factor: float = 1.0

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the parameter."""
        return tuple(self.tensor.shape)

    def change(self, parameter: Tensor) -> Tensor:
        """Return the change, which does not depend on the parameter."""
        return self.tensor.float() * self.factor


@dataclass(frozen=True)
class Value:
    """Replaces a parameter; a weight other than 1 mixes both, unless `always` is set."""

    tensor: Tensor
    always: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the parameter."""
        return tuple(self.tensor.shape)

    def change(self, parameter: Tensor) -> Tensor:
        """Return the difference to the parameter."""
        return self.tensor.float().to(parameter.device) - parameter.reshape(self.shape)


WHOLE: tuple[tuple[str, str, Callable[[Tensor], Change]], ...] = (  # one tensor is the whole change
    *(("diff", "weight", Difference), ("diff_b", "bias", Difference)),
    *(("value", "weight", Value), ("value_b", "bias", Value), ("value_s", "scale", partial(Value, always=True))),
)
MARKS = ("alpha", "on_input", "scaled_oft")  # single numbers, of any type
Changes = Mapping[str, Change]  # "weight" or "bias" -> its change


# ---- reading --------------------------------------------------------------------------------------------------------


def part_of(key: str) -> tuple[str, str] | None:
    """Split a key into the name of its module, without wrappers, and one of PARTS; None if it is neither."""
    for pattern, part in PARTS:
        if match := re.search(pattern, key):
            module = key.rpartition(".")[0] if match.start() == 0 else key[: match.start()]
            return re.sub(_WRAPPERS, "", module), match.expand(part)
    return None


def check_keys(keys: Sequence[str]) -> list[str]:
    """Return the keys that belong to no change and no module.

    Raises ValueError for other unknown keys, and if there is no change.
    """
    if "lora_controlnet" in keys:
        raise ValueError("is a Control-LoRA, to be used with a checkpoint: `control=FILE:IMAGE`")
    for pattern, what in NOT_SUPPORTED.items():
        if refused := [key for key in keys if re.search(pattern, key)]:
            raise ValueError(
                f"holds {what}, which is not supported: {SUPPORTED} ({len(refused)} tensors: {refused[0]})"
            )
    parts = {key: part_of(key) for key in keys}
    if all(part is None or (part[1].startswith("value") and "set_weight" not in key) for key, part in parts.items()):
        raise ValueError(f"is not a LoRA (has {min(keys, default='nothing')}): give a whole checkpoint as `ckpt`")
    unknown = [key for key, part in parts.items() if part is None]
    if lost := [key for key in unknown if re.match(OF_A_MODULE, key)]:
        some = ", ".join(lost[:3]) + ", ..." * (len(lost) > 3)
        raise ValueError(f"holds {len(lost)} tensors of a kind that is not known ({some}): {SUPPORTED}")
    return unknown


def read_changes(parts: Mapping[str, str], read: Callable[[str], Tensor], settings: Settings) -> Changes:
    """Make the changes of one module from the keys of its parts; settings have alpha if no tensor does.

    Raises ValueError if parts are missing or do not fit together, and for tensors that do not hold numbers.
    """
    tensors = {part: _checked(part, read(key)) for part, key in parts.items()}

    def alpha_of(rank: int) -> float:
        if "alpha" not in tensors:
            return settings.alpha(rank)
        return float(tensors["alpha"]) or float(rank) if rank else 1.0

    changes: dict[str, Change] = make_changes(tensors, Settings(alpha_of, settings.peft))
    for part, parameter, kind in WHOLE:
        if part in tensors:
            if parameter in changes:
                raise ValueError(f"changes its {parameter} twice: the file is damaged")
            changes[parameter] = kind(tensors[part])
    if not changes:
        raise ValueError("lacks its up and down weights: the file is damaged")
    weight = changes.get("weight")
    if "up_b" in tensors and isinstance(weight, LoRA):
        changes["bias"] = Difference(tensors["up_b"], weight.scale)
    if tensors.keys() & {"dora_scale", "magnitude"}:
        if not isinstance(weight, LoRA | LoHa | LoKr):
            raise ValueError("has the lengths of DoRA without a LoRA, LoHa or LoKr: the file is damaged")
        changes["weight"] = DoRA.around(weight, tensors)
    return changes


def fits(change: tuple[int, ...], shape: Sequence[int]) -> bool:
    """Whether a change of this shape fits a parameter.

    A negative size is any multiple of it.  Sizes of 1 at the end may be missing or in excess, since files may store
    linears as 1x1 convolutions and the reverse, and a kernel may be part of the second size.
    """
    wanted, plain = (tuple(sizes[:2] if set(sizes[2:]) <= {1} else sizes) for sizes in (change, shape))
    flat = (*plain[:1], math.prod(plain[1:]))
    if min(wanted, default=0) < 0:
        sizes = flat if len(wanted) == 2 else plain
        return all(a == b or (a < 0 and b % a == 0) for a, b in zip(wanted, sizes, strict=False))
    return wanted in (plain, flat)


def _checked(part: str, tensor: Tensor) -> Tensor:
    """Return a tensor.  Raises ValueError if it is empty, or holds no real numbers or ones that are not finite."""
    if part in MARKS and tensor.numel() != 1:
        raise ValueError(f"its {part} has {tensor.numel()} elements, expected one: the file is damaged")
    if part not in MARKS and (not tensor.ndim or not tensor.numel()):
        size = " x ".join(map(str, tensor.shape)) or "a single number"
        raise ValueError(f"its part {part} is {size}, expected a tensor: the file is damaged")
    if part not in MARKS and not tensor.is_floating_point():
        raise ValueError(f"its part {part} is {str(tensor.dtype).removeprefix('torch.')}, expected floating point")
    if not torch.isfinite(tensor.float()).all():
        raise ValueError(f"its part {part} holds NaN or infinity: the file is damaged")
    return tensor
