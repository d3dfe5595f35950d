"""Hypernetworks in the format of AUTOMATIC1111: small networks before the keys and values of a UNet's attention.

A file has two networks for each width of what an attention reads, one for keys and one for values: the text's width,
and those of feature maps, which read themselves.  Each adds to its input what it computes of it, times the strength.

Source: AUTOMATIC1111/stable-diffusion-webui, modules/hypernetworks/hypernetwork.py.
"""

import logging
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ldm_lite.checkpoint.reader import Checkpoint
from ldm_lite.checkpoint.torch_file import HYPERNETWORK
from ldm_lite.models.transformer import CrossAttention
from ldm_lite.models.unet import UNet

log = logging.getLogger("ldm_lite")

ACTIVATIONS: dict[str, type[nn.Module]] = {
    **{"linear": nn.Identity, "swish": nn.Hardswish},
    **{
        kind.__name__.lower(): kind
        for kind in (
            *(nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.ELU, nn.SELU, nn.CELU, nn.GELU, nn.SiLU, nn.Mish, nn.Hardswish),
            *(nn.Tanh, nn.Hardtanh, nn.Tanhshrink, nn.Sigmoid, nn.Hardsigmoid, nn.LogSigmoid, nn.Softplus),
            *(nn.Softsign, nn.Softshrink, nn.Hardshrink),
        )
    },
}
_KEY = re.compile(rf"{HYPERNETWORK}\.(\d+)\.([01])\.linear(?:\.(\d+)|([12]))\.(weight|bias)")


@dataclass(frozen=True)
class Hypernetwork:
    """The networks of a file by the width of their input: for keys, and for values."""

    layers: Mapping[int, tuple[nn.Sequential, nn.Sequential]]

    def layers_of(self, unet: nn.Module | None, compiled: bool) -> list[tuple[str, CrossAttention]]:
        """Return the attentions of a UNet that it changes, by name.

        Raises ValueError if there is none, or if their code is compiled already.
        """
        if not isinstance(unet, UNet):
            raise ValueError("is a hypernetwork, which is for the UNets of Stable Diffusion")
        if compiled:
            raise ValueError(
                "compiled code does not see a hypernetwork: name it when the model is loaded, with `lora=FILE`, or "
                "leave out `compile`"
            )
        every = [(name, layer) for name, layer in unet.named_modules() if isinstance(layer, CrossAttention)]
        found = [(name, layer) for name, layer in every if layer.to_k.in_features in self.layers]
        widths = {layer.to_k.in_features for _, layer in every}
        left, here = (", ".join(map(str, sorted(each))) for each in (self.layers.keys() - widths, widths))
        if not found:
            raise ValueError(f"is for another model: it is for widths of {left}, but attentions here read {here}")
        if left:
            log.warning("the hypernetwork's widths of %s have no effect: attentions here read %s", left, here)
        return found

    def attach(self, layer: CrossAttention, strength: float) -> list[RemovableHandle]:
        """Have an attention read its context through the networks of its width; return how to undo that."""
        handles = []
        for own, projection in zip(self.layers.get(layer.to_k.in_features, ()), (layer.to_k, layer.to_v), strict=False):
            own.to(projection.weight.device)
            handles.append(projection.register_forward_pre_hook(partial(_changed, own, strength)))
        return handles


def _changed(network: nn.Sequential, strength: float, layer: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return what a layer reads, with what the network computes of it in float32."""
    x: Tensor = args[0]
    with torch.autocast(x.device.type, enabled=False):
        return (x + (strength * network(x.float())).to(x.dtype), *args[1:])


def read_hypernetwork(file: Checkpoint) -> Hypernetwork | None:
    """Read a hypernetwork; None if the file is none.  Raises ValueError if it is damaged or of an unknown kind."""
    if not any(key.startswith(f"{HYPERNETWORK}.") for key in file.shapes):
        return None
    found: dict[int, tuple[dict[str, str], dict[str, str]]] = {}
    for key in file.shapes:
        if (match := _KEY.fullmatch(key)) is None:
            raise ValueError(f"holds {key}, which no hypernetwork has")
        number = match[3] if match[4] is None else str(int(match[4]) - 1)  # the oldest files: linear1 and linear2
        found.setdefault(int(match[1]), ({}, {}))[int(match[2])][f"{number}.{match[5]}"] = key
    return Hypernetwork({width: (_build(file, width, k), _build(file, width, v)) for width, (k, v) in found.items()})


def _build(file: Checkpoint, width: int, keys: Mapping[str, str]) -> nn.Sequential:
    """Build one network and load it: linears, each with an activation, a norm and (in training) dropout after it."""
    told = file.metadata
    activation = told.get("activation_func", "None")
    if activation not in ("None", *ACTIVATIONS):
        raise ValueError(f"has the activation {activation!r:.40}, wanted one of {', '.join(ACTIVATIONS)}")
    kind = ACTIVATIONS.get(activation, nn.Identity)
    shapes = {name: file.shapes[key] for name, key in keys.items()}
    layers = sorted(int(name.partition(".")[0]) for name in shapes if name.endswith(".weight"))
    linears = [i for i in layers if len(shapes[f"{i}.weight"]) == 2]
    built: list[nn.Module] = [nn.Identity() for _ in range(max(layers, default=0) + 1)]
    size = width
    for i in layers:
        out = shapes[f"{i}.weight"][0]
        fits = (out, size) if i in linears else (size,)
        if shapes[f"{i}.weight"] != fits or shapes.get(f"{i}.bias") != (out,):
            raise ValueError(f"its layer {i} for the width {width} does not fit the one before: the file is damaged")
        built[i] = nn.Linear(size, out) if i in linears else nn.LayerNorm(size)
        size = out
    if size != width or not linears or math.prod(shapes[f"{linears[0]}.weight"]) == 0:
        raise ValueError(f"its network for the width {width} is not whole: the file is damaged")
    for i in linears:
        last = i == linears[-1]
        if kind is nn.Identity or (last and told.get("activate_output", "True") == "False"):
            continue
        if last and i + 1 == len(built):
            built.append(kind())
        elif i + 1 == len(built) or not isinstance(built[i + 1], nn.Identity):
            raise ValueError(f"has no place for the activation {activation} after layer {i}: the file is damaged")
        else:
            built[i + 1] = kind()
    network = nn.Sequential(*built).requires_grad_(False)
    for name, parameter in network.named_parameters():
        value = file.read(keys[name]).float()
        if not torch.isfinite(value).all():
            raise ValueError(f"{keys[name]} holds NaN or infinity: the file is damaged")
        parameter.data = value.clone()
    return network.eval()
