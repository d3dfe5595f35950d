"""The kinds of networks that a checkpoint can hold, recognised by a key that each always has; splitting and filling.

Further kinds join from outside, KINDS["name"] = Kind(...), with classes that are imported when a file needs them.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
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
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
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
        known = ", ".join(KINDS)
        raise ValueError(
            f"{tensors.path}: holds no known network, expected one of {known} (has {few(sorted(tensors))})"
        )
    if ignored := [key for key in tensors if key not in used and not NO_WEIGHTS.search(key)]:
        log.warning("%s: ignored %d unknown tensors: %s", tensors.path.name, len(ignored), few(ignored))
    if ema and "unet" in parts:
        parts["unet"] = ema_copy(tensors, parts["unet"]) or parts["unet"]
    return parts


def ema_copy(file: Tensors, unet: Tensors, ignored: re.Pattern[str] = NO_WEIGHTS) -> Tensors | None:
    """Return the EMA copy of a UNet in the same file; None if there is none or it is incomplete.

    EMA keys are "model_ema." plus the key in the Lightning module without its dots.  The dots cannot be restored, so
    the EMA keys are built from the UNet's.
    """
    names = {key: "model_ema.diffusion_model" + key.replace(".", "") for key in unet if not ignored.search(key)}
    is_whole = all(file.shapes.get(name) == unet.shapes[key] for key, name in names.items())
    return file.renamed(names) if is_whole else None


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
    check_fit(network, kind, tensors)
    weights = {key: tensors[key].to(device=device, dtype=dtype) for key in network.state_dict()}
    network.load_state_dict(weights, assign=True)
    return network.eval()


def check_fit(network: nn.Module, title: str, tensors: Tensors, ignored: re.Pattern[str] = NO_WEIGHTS) -> None:
    """Raise ValueError, one line with the first differences, unless tensors have the names and shapes of a network's.

    Those whose keys have the pattern `ignored` may be there besides.
    """
    shapes = {key: tuple(value.shape) for key, value in network.state_dict().items()}
    stored = tensors.shapes
    extra = stored.keys() - shapes.keys()
    common = [key for key in shapes if key in stored]
    differences = {
        "missing": sorted(shapes.keys() - stored.keys()),
        "unexpected": sorted(key for key in extra if not ignored.search(key)),
        "of another shape": [f"{k} {stored[k]} in place of {shapes[k]}" for k in common if stored[k] != shapes[k]],
    }
    problems = [f"{len(keys)} tensors {what} ({few(keys)})" for what, keys in differences.items() if keys]
    if problems:
        raise ValueError(f"{tensors.path}: the {title} does not fit: {'; '.join(problems)}")


def few(names: Sequence[str]) -> str:
    """Return the first names of a list, for a message."""
    return ", ".join(names[:3]) + ", ..." * (len(names) > 3)


class WithoutInit(TorchFunctionMode):
    """Skip torch.nn.init: on the meta device it has no effect, but it imports the compiler, over a second."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__module__", None) == "torch.nn.init":
            return args[0] if args else None
        return func(*args, **(kwargs or {}))


def pick_device(device: str | torch.device | None) -> torch.device:
    """Return a device; None is a CUDA GPU, else Apple's, else the CPU.  Raises ValueError for one that is not there."""
    if device is None:
        if torch.cuda.is_available():
            return torch.device("cuda")
        return torch.device("mps" if torch.backends.mps.is_available() else "cpu")
    try:
        place = torch.device(device)
        torch.empty(1, device=place).cpu()
    except (RuntimeError, AssertionError, NotImplementedError, TypeError) as error:
        reason = str(error).splitlines()[0].split(". ")[0][:150]
        raise ValueError(f"the device {str(device)!r} is not available ({reason}): leave it out, or use cpu") from error
    return place
