"""Our configurations, one row each, and every section by ldm_lite as its users run it.

The first five rows are from the PyTorch 2 article "Accelerated Generative Diffusion Models".  "original" here is our
networks with the original's arithmetic: float32 weights that autocast casts at every call, and attention as
softmax(q k^T) v with the whole attention matrix in memory.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

import ldm_lite
from ldm_lite.bench.checkpoints import open_model
from ldm_lite.bench.options import BenchOptions
from ldm_lite.bench.work import CHECK_SCALE, BenchInputs, inputs
from ldm_lite.core.networks import DTYPES
from ldm_lite.core.plan import H, X
from ldm_lite.runtime import attention
from ldm_lite.runtime.setup import KERNELS


@dataclass(frozen=True)
class Configuration:
    """How to run the networks."""

    title: str
    attention: str  # a name of runtime.attention; "efficient" is CUDA's kernel, on other devices PyTorch's choice
    compile: str = "off"  # a tier of runtime.compile
    kernels: str | None = None  # of runtime.setup; None is the default
    original: bool = False  # plain modules, in half precision by autocast, instead of what `load` sets up


CONFIGURATIONS = {
    "original": Configuration("original", "vanilla", original=True),
    "original-efficient": Configuration("original, memory-efficient attention", "efficient", original=True),
    "math": Configuration("ours, math attention", "math"),
    "efficient": Configuration("ours, memory-efficient attention", "efficient"),
    "compiled": Configuration("ours, memory-efficient attention, compiled", "efficient", "step"),
    "compiled-sdpa": Configuration("ours, compiled", "sdpa", "step"),
    "graph": Configuration("ours, as by default on CUDA: a CUDA graph of plain steps", "sdpa", "graph"),
    "max": Configuration("ours, everything", "fastest", "max"),
}
REFERENCE = Configuration("reference", "sdpa", original=True)  # in float32


def configuration(name: str) -> Configuration:
    """Return a row by its name, with what follows a plus: max+pdl adds a kernel, efficient+cudnn chooses an attention.

    Raises ValueError for an unknown name; the original has no kernels.
    """
    base, *changes = name.split("+")
    known = {*attention.names(), *(() if base.startswith("original") else KERNELS)}
    if base not in CONFIGURATIONS or not set(changes) <= known:
        raise ValueError(
            f"unknown {name!r} in `configs`: expected some of {', '.join(CONFIGURATIONS)}, "
            f"with +{', +'.join(KERNELS)} or +ATTENTION"
        )
    row = CONFIGURATIONS[base]
    for change in changes:
        row = replace(row, title=f"{row.title}, {change}")
        if change in KERNELS:
            row = replace(row, kernels=f"{row.kernels or KERNELS[0]},{change}")
        else:
            row = replace(row, attention=change)
    return row


class OurWorkload:
    """A workload by ldm_lite."""

    def __init__(self, row: Configuration, options: BenchOptions, dtype: str) -> None:
        """Load the model; dtype is a short name.  Raises ValueError for an attention that the device lacks."""
        self.options, self.title = options, row.title
        device, in_half = torch.device(options.device), row.original and dtype != "fp32"
        self.autocast = torch.autocast(device.type, DTYPES[dtype] if in_half else None, enabled=in_half)
        fused = row.attention == "efficient" and device.type != "cuda"
        self.pipe = ldm_lite.load(
            open_model(options.size, options.ckpt, options.device),
            device=device,
            dtype="fp32" if in_half else dtype,
            attention=None if fused or row.original else row.attention,  # None: the fastest here
            compile=row.compile,
            kernels="plain" if row.original else row.kernels,
            matmul_precision="highest" if device.type == "cuda" else None,
        )
        if row.original:
            networks: dict[str, Any] = {role: plain_copy(network) for role, network in self.pipe.networks.items()}
            for role in ("unet", "vae"):
                attention.use(networks[role], "sdpa" if fused else row.attention)
            # The original's UNet is trainable, and autocast caches the casts of trainable weights while it is on.
            networks["unet"].requires_grad_(in_half)
            self.pipe = self.pipe.with_networks(**networks)

    def inputs(self, batch: int) -> BenchInputs:
        return inputs(self.pipe.family, self.options, batch).to(self.pipe.device, torch.float32)

    def _denoise(self, tensors: BenchInputs, steps: int, scale: float) -> tuple[Any, Tensor]:
        plan = self.pipe.plan("ddim", steps, spacing="trailing")
        cond: Any = tensors.context
        uncond: Any = tensors.uncond
        with self.autocast:
            return plan, self.pipe.denoise(tensors.noise, cond, uncond, plan, scale)

    def prediction(self, tensors: BenchInputs) -> Tensor:
        """Return the guided prediction, recovered from the latents after one step."""
        plan, latents = self._denoise(tensors, 1, CHECK_SCALE)
        if (failure := getattr(self.pipe.run_row, "failure", None)) is not None:
            raise ValueError(f"could not be compiled: {failure}")
        functions = {layer.attention for layer in attention.layers(self.pipe.unet).values()}
        print(f"{self.title}: attention {', '.join(sorted(map(attention.name_of, functions)))}")
        row, x, (p, q) = plan.mix[0, 0], tensors.noise * plan.initial, plan.h_of_out[0]
        kept = (latents - float(row @ X) * x) / float(row @ H)  # H = p x + q prediction
        return (kept - float(p) * x) / float(q)

    def steps(self, tensors: BenchInputs, count: int) -> None:
        self._denoise(tensors, count, self.options.scale)

    def decode(self, tensors: BenchInputs) -> Tensor:
        with self.autocast:
            return torch.stack(self.pipe.decode(tensors.noise * self.pipe.family.scale_factor, output="tensor"))

    def image(self, tensors: BenchInputs) -> Tensor:
        options, batch = self.options, len(tensors.noise)
        names = ("height", "width", "sampler", "steps", "n_iter", "scale", "seed")
        settings = {name: getattr(options, name) for name in names}
        with self.autocast:
            results = self.pipe.txt2img(options.prompt, batch_size=batch, output="result", **settings)
        assert len([result.array for result in results]) == batch * options.n_iter
        return torch.stack([result.pixels for result in results[-batch:]])


def plain_copy(network: nn.Module) -> nn.Module:
    """Build a network of the same class with the same weights, untuned; weights in another layout are copied."""
    with torch.device("meta"):
        copy = type(network)(network.spec)
    copy.load_state_dict({key: value.contiguous() for key, value in network.state_dict().items()}, assign=True)
    return copy.requires_grad_(False).eval()
