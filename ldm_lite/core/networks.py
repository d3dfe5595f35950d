"""The kinds of networks that a checkpoint can hold, recognised by a key that each always has; splitting and filling.

Further kinds join from outside, KINDS["name"] = Kind(...), with classes that are imported when a file needs them.
"""

from __future__ import annotations

import logging
import re
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from ldm_lite.core.clip import CLIPSpec, CLIPTextEncoder
from ldm_lite.core.files import Tensors, imported
from ldm_lite.core.unet import UNet, UNetSpec
from ldm_lite.core.vae import AutoencoderKL, VAESpec

log = logging.getLogger("ldm_lite")


class Kind(NamedTuple):
    """A kind of network."""

    probe: str  # a key that each network of this kind has, without its prefix in a file
    prefixes: tuple[str, ...]  # of its keys in a file; the first that fits counts, "" for a file of its own
    spec: Any  # a class with from_shapes(shapes), or its name, "module:Class"
    network: Any  # spec -> network


KINDS = {
    "unet": Kind("input_blocks.0.0.weight", ("model.diffusion_model.", ""), UNetSpec, UNet),
    "vae": Kind("decoder.conv_in.weight", ("first_stage_model.", ""), VAESpec, AutoencoderKL),
    "clip": Kind(
        "embeddings.token_embedding.weight",
        ("cond_stage_model.transformer.text_model.", "cond_stage_model.transformer.", "text_model.", ""),
        CLIPSpec,
        CLIPTextEncoder,
    ),
}
# Keys that carry no weights: buffers, and parts of no use here.
NO_WEIGHTS = re.compile(
    r"^(betas|alphas_cumprod\w*|(sqrt|log)_\w+|posterior_\w+|lvlb_weights|logvar|scale_factor|global_step|loss\..*)$"
    r"|^model_ema\.|position_ids$|logit_scale$|text_projection(\.weight)?$"
)


def split(tensors: Tensors, ema: bool = True) -> dict[str, Tensors]:
    """Return the networks of a file by kind, with `ema` the UNet's EMA copy if it is whole.  ValueError for none."""
    parts: dict[str, Tensors] = {}
    used: set[str] = set()
    for kind, (probe, prefixes, _, _) in KINDS.items():
        free = [key for key in tensors if key not in used]
        prefix = next((prefix for prefix in prefixes if prefix + probe in free), None)
        if prefix is None:
            continue
        keys = {key.removeprefix(prefix): key for key in free if key.startswith(prefix)}
        used |= set(keys.values())
        parts[kind] = tensors.renamed(keys)
    if not parts:
        few = ", ".join(sorted(tensors)[:3])
        raise ValueError(f"{tensors.path}: holds no known network, expected one of {', '.join(KINDS)} (has {few}, ...)")
    if ignored := [key for key in tensors if key not in used and not NO_WEIGHTS.search(key)]:
        log.warning("%s: ignored %d unknown tensors: %s", tensors.path.name, len(ignored), ", ".join(ignored[:3]))
    if ema and "unet" in parts:
        # The copy's keys are the network's without dots, which cannot be put back: build them from the network's.
        copy = {key: "model_ema.diffusion_model" + key.replace(".", "") for key in parts["unet"]}
        if all(key in tensors.shapes for key in copy.values()):
            parts["unet"] = tensors.renamed(copy)
    return parts


def build(kind: str, spec: Any) -> nn.Module:
    """Return a network of a kind on the meta device: without memory, and without values."""
    with torch.device("meta"), WithoutInit():
        network: nn.Module = imported(KINDS[kind].network)(spec)
    return network


def load_network(kind: str, spec: Any, tensors: Tensors, device: torch.device, dtype: torch.dtype) -> nn.Module:
    """Build a network, and fill it strictly, tensor by tensor.

    Raises ValueError, one line with the first differences, if names or shapes differ.
    """
    network = build(kind, spec)
    shapes = {key: tuple(value.shape) for key, value in network.state_dict().items()}
    stored = tensors.shapes
    extra = stored.keys() - shapes.keys()
    differences = {
        "missing": sorted(shapes.keys() - stored.keys()),
        "unexpected": sorted(key for key in extra if not NO_WEIGHTS.search(key)),
        "of another shape": [key for key in shapes if key in stored and stored[key] != shapes[key]],
    }
    for what, keys in differences.items():
        if keys:
            few = ", ".join(keys[:3])
            raise ValueError(f"{tensors.path}: the {kind} does not fit: {len(keys)} tensors {what} ({few})")
    weights = {key: tensors[key].to(device=device, dtype=dtype) for key in shapes}
    network.load_state_dict(weights, assign=True)
    return network.eval()


class WithoutInit(TorchFunctionMode):
    """Skip torch.nn.init: on the meta device it has no effect, but it imports the compiler, over a second."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__module__", None) == "torch.nn.init":
            return args[0] if args else None
        return func(*args, **(kwargs or {}))
