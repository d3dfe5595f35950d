"""The ways to run the networks that are compared: a row each, and how a row becomes networks.

The first five are those of the PyTorch 2 article "Accelerated Generative Diffusion Models".  Its "original" is run here
by our networks doing the original's arithmetic: weights in float32 that autocast casts at every call, and attention as
softmax(q k^T) v with all of its weights in memory.  To add a row is to add a way.
"""

import copy
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import nn

from ldm_lite.bench.contender import Here
from ldm_lite.bench.jobs import Ours, Setting
from ldm_lite.checkpoint.reader import Checkpoint, on_meta
from ldm_lite.cli.options import RuntimeOptions
from ldm_lite.pipeline import Pipeline, load
from ldm_lite.runtime import attention
from ldm_lite.runtime.compile import compiled_step
from ldm_lite.runtime.precision import DTYPES
from ldm_lite.runtime.setup import prepare

N = TypeVar("N", bound=nn.Module)


@dataclass(frozen=True)
class Configuration:
    """A way to run the networks."""

    title: str
    attention: str  # a name of runtime.attention; "efficient" is CUDA's kernel, elsewhere PyTorch's choice
    autocast: bool  # half precision by autocast from float32 weights, in place of weights cast once
    tuned: bool  # as runtime.setup prepares networks, in place of plain modules
    compile: str  # a tier of runtime.compile


ORIGINAL = Configuration("original", attention="vanilla", autocast=True, tuned=False, compile="off")
OURS = Configuration("ours", attention="sdpa", autocast=False, tuned=True, compile="off")
REFERENCE = replace(OURS, title="reference", tuned=False)
CONFIGURATIONS = {
    "original": ORIGINAL,
    "original-efficient": replace(ORIGINAL, title="original, memory-efficient attention", attention="efficient"),
    "math": replace(OURS, title="ours, math attention", attention="math"),
    "efficient": replace(OURS, title="ours, memory-efficient attention", attention="efficient"),
    "compiled": replace(
        OURS, title="ours, memory-efficient attention, compiled", attention="efficient", compile="step"
    ),
    "max": replace(OURS, title="ours, everything", compile="max"),
}


class Models:
    """A checkpoint's networks in every configuration and precision, made when first asked for."""

    def __init__(self, checkpoint: Checkpoint, device: torch.device) -> None:
        self.checkpoint, self.device = checkpoint, device
        self._loaded: dict[torch.dtype, Pipeline] = {}

    def loaded(self, dtype: torch.dtype = torch.float32) -> Pipeline:
        """As ldm_lite.load gives it."""
        if dtype not in self._loaded:
            self._loaded[dtype] = load(self.checkpoint, device=self.device, dtype=dtype)
        return self._loaded[dtype]

    def contender(self, name: str, configuration: Configuration, setting: Setting) -> Here:
        """A configuration that takes part under a name."""

        def make(dtype: str) -> Ours:
            wanted = DTYPES[dtype]
            casts = configuration.autocast and wanted != torch.float32
            pipe = configured(self.loaded(torch.float32 if casts else wanted), configuration)
            return Ours(pipe, setting, wanted if casts else None)

        return Here(name, self.device, make)


def configured(pipe: Pipeline, configuration: Configuration) -> Pipeline:
    """A pipeline with networks of its own, set up as the configuration says; weights are shared with the given one.

    Raises ValueError for an attention that the device lacks.
    """
    networks: dict[str, Any] = {
        role: (sharing if configuration.tuned else plain)(each) for role, each in pipe.networks.items()
    }
    fused = pipe.device.type != "cuda" and configuration.attention == "efficient"
    name = "sdpa" if fused else configuration.attention
    if configuration.tuned:
        options = RuntimeOptions(attention=name, compile=configuration.compile)
        return replace(pipe, **networks, step=prepare(networks, options, pipe.device)[0])
    for role in ("unet", "vae"):
        attention.use(networks[role], name)
    # As in the original, whose UNet could be trained: autocast keeps the casts of such weights for as long as it is on.
    networks["unet"].requires_grad_(configuration.autocast)
    return replace(pipe, **networks, step=compiled_step(configuration.compile, networks["unet"]))


def sharing(network: N) -> N:
    """A copy of a network with the same weights, not copies of them."""
    return copy.deepcopy(network, {id(each): each for each in (*network.parameters(), *network.buffers())})


def plain(network: nn.Module) -> nn.Module:
    """A network as its class makes it, not tuned, with the same weights; a copy of those that were laid out anew."""
    with on_meta():
        made = type(network)(network.spec)
    made.load_state_dict({key: value.contiguous() for key, value in network.state_dict().items()}, assign=True)
    return made.requires_grad_(False).eval()
