"""Set up loaded networks to run as the options say, in one call."""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ldm_lite.cli.options import RuntimeOptions
from ldm_lite.core.denoise import run_row
from ldm_lite.runtime import aot, attention, cpu, fused, joined
from ldm_lite.runtime.blocks import BlockLinear
from ldm_lite.runtime.compile import LAUNCH_BOUND, compiled_step
from ldm_lite.runtime.cuda_graphs import Step
from ldm_lite.runtime.memory import keep_freed_memory, weights_channels_last
from ldm_lite.runtime.offload import Offloader
from ldm_lite.runtime.patching import patch_like
from ldm_lite.runtime.precision import check_matmul_precision, set_matmul_precision
from ldm_lite.runtime.tiling import tile

log = logging.getLogger("ldm_lite")

# What may be switched on a GPU by the option `kernels`, and what is on by default.
KERNELS = ("qkv", "pdl", "tma")
PLAIN = "plain"  # the option's value for PyTorch's own kernels alone, on a CPU too
BY_DEFAULT = frozenset({"qkv"})
SETTINGS = {"pdl": "triton.enable_pdl", "tma": "triton.enable_persistent_tma_matmul"}  # of Inductor


def prepare_networks(
    networks: Mapping[str, nn.Module], options: RuntimeOptions, device: torch.device
) -> tuple[Step, Offloader | None]:
    """Set up networks, by role, in place and before their first use; they are on load_device(options, device).

    Returns the function that runs a step, and the offloader, if one is needed.  On a GPU, and on
    a CPU in half precision, weights become channels last.  On a CPU layers get kernels of our own, and freed memory
    is kept for reuse.  `matmul_precision`, if it is given, is set for the whole process.
    Raises ValueError for options that are unknown, exclude each other, or do not fit the UNet.  Other networks that
    cannot run the attention keep PyTorch's, and the log names them.
    """
    check_runtime(options, device)
    if device.type == "cpu":
        for name in ("offload", "matmul_precision"):
            if (value := getattr(options, name)) is not None:
                log.warning("`%s=%s` does nothing on a CPU: leave it out", name, value)
    compiles = options.compile not in (None, "off")
    moves = options.offload is not None or options.storage is not None
    kernels = BY_DEFAULT if options.kernels is None else choose_kernels(options.kernels, device)
    if options.matmul_precision is not None and device.type == "cuda":
        set_matmul_precision(options.matmul_precision)
    for role, network in networks.items():
        if options.attention is not None and attention.layers(network):
            try:
                attention.use(network, options.attention, device)
            except ValueError as error:
                if role == "unet":
                    raise
                log.info("%s keeps attention sdpa: %s", role.replace("_", " "), error)
        _use_kernels(network, device, kernels, owns_weights=not moves, attends=options.attention is None)
        if role == "vae" and options.vae_tiling:
            tile(network)
    unet, step = networks.get("unet"), run_row
    if unet is not None and (compiles or options.compiled is not None):
        for module in unet.modules():
            if isinstance(module, BlockLinear):
                module.compiled = True
        if options.compiled is not None:
            aot.use(unet, Path(options.compiled))
        else:
            settings = {SETTINGS[name]: True for name in kernels & set(SETTINGS)}
            step = compiled_step(options.compile or "off", unet, settings=settings)
    elif unet is not None and device.type == "cuda" and options.compile is None and not moves and PLAIN not in kernels:
        step = compiled_step("graph", unet) if num_parameters(unet) < LAUNCH_BOUND else run_row
    return step, Offloader(networks, device, offload=options.offload, storage=options.storage) if moves else None


def check_runtime(options: RuntimeOptions, device: torch.device) -> None:
    """Raises ValueError for options that are wrong whatever the networks."""
    compiles = options.compile not in (None, "off")
    moves = options.offload is not None or options.storage is not None
    if options.compiled is not None and compiles:
        raise ValueError(f"got compile {options.compile!r} and a compiled package: leave out `compile` or `compiled`")
    if moves and (compiles or options.compiled is not None):
        raise ValueError(
            "compiled code needs its weights in place: leave out `compile` and `compiled`, or `offload` and `storage`"
        )
    if options.kernels is not None:
        choose_kernels(options.kernels, device)
    if options.matmul_precision is not None:
        check_matmul_precision(options.matmul_precision)
    if options.attention is not None:
        attention.check_name(options.attention)


def prepare_like(network: nn.Module, template: nn.Module, device: torch.device) -> None:
    """Set up a network like another one that has layers of the same names: a ControlNet like its UNet.

    device is where it computes; its weights may be elsewhere.
    """
    attention.use_like(network, template)
    plain, joins = vars(template).get("plain_kernels", False), any(joined.joined_layers(template))
    kernels = frozenset({PLAIN} if plain else {"qkv"} if joins else ())
    _use_kernels(network, device, kernels, owns_weights=False, attends=False)
    patch_like(network, template)


def load_device(options: RuntimeOptions, device: torch.device) -> torch.device:
    """Return where to load weights: the CPU if they are offloaded or quantised, which may not fit on the device."""
    return torch.device("cpu") if options.offload or options.storage else device


def num_parameters(network: nn.Module) -> int:
    """Return the number of a network's parameters, those in blocks included."""
    in_blocks = (layer.shape.numel() for layer in network.modules() if isinstance(layer, BlockLinear))
    return sum(in_blocks) + sum(parameter.numel() for parameter in network.parameters())


def choose_kernels(text: str, device: torch.device) -> frozenset[str]:
    """Parse the option `kernels`: names separated by commas, "all", or "plain" for none of them.

    Raises ValueError for an unknown name.
    """
    if text == PLAIN:
        return frozenset({PLAIN})
    names = frozenset(KERNELS if text == "all" else text.split(","))
    if unknown := sorted(names - set(KERNELS)):
        raise ValueError(
            f"got `kernels` {unknown[0]!r}, expected all, plain, or some of {', '.join(KERNELS)} with commas"
        )
    return names


def _use_kernels(
    network: Any, device: torch.device, kernels: frozenset[str], owns_weights: bool, attends: bool
) -> None:
    """Give a network the kernels of its device; attends says whether the CPU's attention is among them."""
    weight = next(network.parameters())
    on_cpu, in_float32 = device.type == "cpu", weight.dtype == torch.float32
    vars(network)["plain_kernels"] = PLAIN in kernels
    if device.type == "cuda" or (on_cpu and not in_float32):
        weights_channels_last(network)
    if device.type == "cuda" and PLAIN not in kernels:
        fused.use(network)
        if "qkv" in kernels and _is_on(weight, device):  # moving weights would separate them
            joined.use(network)
    if on_cpu and PLAIN not in kernels:
        keep_freed_memory()
        cpu.use(network, owns_weights, attends)


def _is_on(weight: torch.Tensor, device: torch.device) -> bool:
    return weight.device.type == device.type
