"""The configurations to compare, one row each, and functions that apply a row to networks.

The first five are from the PyTorch 2 article "Accelerated Generative Diffusion Models".  "original" here is our
networks with the original's arithmetic: float32 weights that autocast casts at every call, and attention as
softmax(q k^T) v with the whole attention matrix in memory.
"""

import copy
import functools
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import nn

from ldm_lite.bench.backends import InProcessBackend
from ldm_lite.bench.checkpoints import load
from ldm_lite.bench.inference import OurWorkload
from ldm_lite.bench.workload import Setting
from ldm_lite.checkpoint.model import Model
from ldm_lite.checkpoint.reader import Checkpoint, on_meta
from ldm_lite.cli.options import RuntimeOptions
from ldm_lite.runtime import attention
from ldm_lite.runtime.compile import compiled_step
from ldm_lite.runtime.precision import DTYPES
from ldm_lite.runtime.setup import KERNELS, prepare

N = TypeVar("N", bound=nn.Module)


@dataclass(frozen=True)
class Configuration:
    """How to run the networks."""

    title: str
    attention: str  # a name of runtime.attention; "efficient" is CUDA's kernel, on other devices PyTorch's choice
    autocast: bool  # half precision by autocast from float32 weights, instead of weights cast once
    tuned: bool  # set up by runtime.setup, instead of plain modules
    compile: str  # a tier of runtime.compile
    kernels: str | None = None  # of runtime.setup; None is the default


ORIGINAL = Configuration("original", attention="vanilla", autocast=True, tuned=False, compile="off")
OURS = Configuration("ours", attention="sdpa", autocast=False, tuned=True, compile="off")
MAX = replace(OURS, title="ours, everything", attention="fastest", compile="max")
REFERENCE = replace(OURS, title="reference", tuned=False)
CONFIGURATIONS = {
    "original": ORIGINAL,
    "original-efficient": replace(ORIGINAL, title="original, memory-efficient attention", attention="efficient"),
    "math": replace(OURS, title="ours, math attention", attention="math"),
    "efficient": replace(OURS, title="ours, memory-efficient attention", attention="efficient"),
    "compiled": replace(
        OURS, title="ours, memory-efficient attention, compiled", attention="efficient", compile="step"
    ),
    "compiled-sdpa": replace(OURS, title="ours, compiled", compile="step"),
    "max": MAX,
    # What each of the kernels earns on a GPU; "max" has qkv.
    "max-none": replace(MAX, title="ours, max without qkv", kernels="plain"),
    **{f"max-{name}": replace(MAX, title=f"ours, max and {name}", kernels=f"qkv,{name}") for name in KERNELS[1:]},
    "max-all": replace(MAX, title="ours, max and all kernels", kernels="all"),
    "norm": replace(OURS, title="ours, Triton's norms", kernels="qkv,norm"),
}


class Models:
    """A checkpoint's networks in every configuration and precision, loaded when first used."""

    def __init__(self, checkpoint: Checkpoint, device: torch.device) -> None:
        self.checkpoint, self.device = checkpoint, device
        self._loaded: dict[str, Model] = {}

    def loaded(self, dtype: str = "fp32") -> Model:
        """Return the model as loaded by default, in a dtype given by its short name."""
        if dtype not in self._loaded:
            self._loaded[dtype] = load(self.checkpoint, str(self.device), dtype)
        return self._loaded[dtype]

    def backend(self, name: str, configuration: Configuration, setting: Setting) -> InProcessBackend:
        """Return a backend that runs a configuration."""
        return InProcessBackend(name, self.device, functools.partial(self.workload, configuration, setting))

    def workload(self, configuration: Configuration, setting: Setting, dtype: str) -> OurWorkload:
        """Return the networks of a configuration in a dtype, given by its short name."""
        casts = configuration.autocast and dtype != "fp32"
        model = configured(self.loaded("fp32" if casts else dtype), configuration)
        return OurWorkload(model, setting, DTYPES[dtype] if casts else None)


def configured(model: Model, configuration: Configuration) -> Model:
    """Return a copy of the model in a configuration, with networks of its own that share the weights.

    Raises ValueError for an attention that the device lacks.
    """
    copied = shared_copy if configuration.tuned else plain_copy
    networks: dict[str, Any] = {role: copied(each) for role, each in model.networks.items()}
    fused = model.device.type != "cuda" and configuration.attention == "efficient"
    name = None if fused else configuration.attention  # None: what is fastest here
    if configuration.tuned:
        options = RuntimeOptions(attention=name, compile=configuration.compile, kernels=configuration.kernels)
        step, _ = prepare(networks, options, model.device)
        return replace(model, **networks, step=step)
    for role in ("unet", "vae"):
        attention.use(networks[role], name or "sdpa")
    # The original's UNet is trainable, and autocast caches the casts of trainable weights while it is on.
    networks["unet"].requires_grad_(configuration.autocast)
    return replace(model, **networks, step=compiled_step(configuration.compile, networks["unet"]))


def shared_copy(network: N) -> N:
    """Copy a network; the copy shares its weights."""
    return copy.deepcopy(network, {id(each): each for each in (*network.parameters(), *network.buffers())})


def plain_copy(network: nn.Module) -> nn.Module:
    """Build a network of the same class with the same weights, untuned; weights in another layout are copied."""
    with on_meta():
        made = type(network)(network.spec)
    made.load_state_dict({key: value.contiguous() for key, value in network.state_dict().items()}, assign=True)
    return made.requires_grad_(False).eval()
