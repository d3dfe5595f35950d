"""Set up loaded networks to run as the options say, in one call."""

import ctypes
import importlib.util
import logging
import sys
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import nn

from ldm_lite.cli.options import RuntimeOptions
from ldm_lite.core.denoise import denoise_step
from ldm_lite.runtime import aot, fused_norm, joined
from ldm_lite.runtime import attention as attention_backends
from ldm_lite.runtime.blocks import BlockLinear
from ldm_lite.runtime.compile import Step, compiled_step
from ldm_lite.runtime.cpu import attention as cpu_attention
from ldm_lite.runtime.cpu import convolutions, group_norm, products
from ldm_lite.runtime.offload import Offloader
from ldm_lite.runtime.patching import follow
from ldm_lite.runtime.precision import check_matmul_precision, set_matmul_precision
from ldm_lite.runtime.tiling import tile

log = logging.getLogger("ldm_lite")

# What may be switched on a GPU by the option `kernels`, and what is on by default.
KERNELS = ("qkv", "norm", "pdl", "tma")
PLAIN = "plain"  # the option's value for PyTorch's own kernels alone, on a CPU too
BY_DEFAULT = frozenset({"qkv"})
SETTINGS = {"pdl": "triton.enable_pdl", "tma": "triton.enable_persistent_tma_matmul"}  # of Inductor


def prepare(
    networks: Mapping[str, nn.Module], options: RuntimeOptions, device: torch.device
) -> tuple[Step, Offloader | None]:
    """Set up networks, by role, in place and before their first use; they are on load_device(options, device).

    Returns the function that runs a step, and the offloader, if one is needed.  On a GPU, and on
    a CPU in half precision, weights become channels last.  On a CPU in float32 convolutions and norms get kernels of
    our own, and freed memory is kept for reuse.  `matmul_precision` is set for the whole process.
    Raises ValueError for options that are unknown, exclude each other, or do not fit the UNet.  Other networks that
    cannot run the attention keep PyTorch's, and the log names them.
    """
    compile = options.compile or "off"
    if options.compiled is not None and compile != "off":
        raise ValueError(f"got compile {compile!r} and a compiled package: leave out `compile` or `compiled`")
    if (options.compiled is not None or compile != "off") and (options.offload or options.storage):
        raise ValueError(
            "compiled code needs its weights in place: leave out `compile` and `compiled`, or `offload` and `storage`"
        )
    if options.vae_tiling and "vae" in networks:
        tile(networks["vae"])
    check_matmul_precision(options.matmul_precision or "highest")
    if device.type == "cuda":
        set_matmul_precision(options.matmul_precision or "highest")
    chosen = choose_kernels(options.kernels, device)
    for role, network in networks.items():
        _set_attention(role, network, options.attention or "sdpa", device)
        _use_kernels(network, device, chosen, may_move=options.offload is None and options.storage is None)
        if options.attention is None and _has_cpu_kernels(network, device, chosen):
            for layer in attention_backends.layers(network).values():
                layer.attention = cpu_attention.timed
    if options.compiled is not None:
        aot.use(networks["unet"], Path(options.compiled))
    is_compiled = options.compiled is not None or compile != "off"
    for module in networks["unet"].modules() if "unet" in networks else ():
        if isinstance(module, BlockLinear):
            module.compiled = is_compiled
    settings = {SETTINGS[name]: True for name in chosen & set(SETTINGS)}
    step = compiled_step(compile, networks["unet"], settings=settings) if "unet" in networks else denoise_step
    if options.offload is None and options.storage is None:
        return step, None
    return step, Offloader(networks, device, offload=options.offload, storage=options.storage)


def prepare_like(network: nn.Module, other: nn.Module, device: torch.device) -> None:
    """Set up a network like another one that has layers of the same names: a ControlNet like its UNet.

    device is where it computes; its weights may be elsewhere.
    """
    attention_backends.follow(network, other)
    plain, joins = vars(other).get("plain_kernels", False), any(joined.joined_layers(other))
    _use_kernels(network, device, frozenset({PLAIN} if plain else {"qkv"} if joins else ()))
    follow(network, other)


def load_device(options: RuntimeOptions, device: torch.device) -> torch.device:
    """Return where to load weights: the CPU if they are offloaded or quantised, which may not fit on the device."""
    return torch.device("cpu") if options.offload or options.storage else device


def choose_kernels(text: str | None, device: torch.device) -> frozenset[str]:
    """Parse the option `kernels`: names with commas between, "all", "plain" for none of them, or None for the default.

    Raises ValueError for an unknown name, and for Triton's kernel on a GPU where it is missing.
    """
    if text is None:
        return BY_DEFAULT
    if text == PLAIN:
        return frozenset({PLAIN})
    names = frozenset(KERNELS if text == "all" else text.split(","))
    if unknown := sorted(names - set(KERNELS)):
        raise ValueError(
            f"got `kernels` {unknown[0]!r}, wanted all, plain, or some of {', '.join(KERNELS)} with commas"
        )
    if device.type == "cuda" and "norm" in names and importlib.util.find_spec("triton") is None:
        raise ValueError("the kernel norm needs Triton, which torch for CUDA brings along: leave it out")
    return names


def _use_kernels(network: nn.Module, device: torch.device, chosen: frozenset[str], may_move: bool = False) -> None:
    on_cpu, in_float32 = device.type == "cpu", next(network.parameters()).dtype == torch.float32
    if device.type == "cuda" or (on_cpu and not in_float32):
        network.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    if device.type == "cuda":
        _use_gpu_kernels(network, device, chosen)
    if on_cpu and in_float32:
        group_norm.use(network)  # for exactness
    vars(network)["plain_kernels"] = PLAIN in chosen
    if _has_cpu_kernels(network, device, chosen):
        products.use(network)
        convolutions.use(network, may_move)
    if on_cpu:
        keep_freed_memory()


def _has_cpu_kernels(network: nn.Module, device: torch.device, chosen: frozenset[str]) -> bool:
    in_float32 = next(network.parameters()).dtype == torch.float32
    return device.type == "cpu" and in_float32 and PLAIN not in chosen


def _use_gpu_kernels(network: nn.Module, device: torch.device, chosen: frozenset[str]) -> None:
    fused_norm.use(network, triton="norm" in chosen)
    if "qkv" in chosen and _are_on(network, device):  # weights that move come apart
        joined.use(network)


def _are_on(network: nn.Module, device: torch.device) -> bool:
    return next(network.parameters()).device.type == device.type


def _set_attention(role: str, network: nn.Module, name: str, device: torch.device) -> None:
    if not attention_backends.layers(network):
        return
    try:
        attention_backends.use(network, name, device)
    except ValueError as error:
        if role == "unet":
            raise
        log.info("%s keeps attention sdpa: %s", role.replace("_", " "), error)


def keep_freed_memory() -> None:
    """Let the C library keep up to 2 GiB of freed memory; without glibc this does nothing.

    By default it returns large blocks to the system and gets them back zeroed, page by page: a twelfth of the
    decoder's time on a CPU.
    """
    if sys.platform == "linux" and hasattr(libc := ctypes.CDLL(None), "mallopt"):
        m_trim_threshold, m_mmap_threshold = -1, -3  # malloc.h
        libc.mallopt(m_mmap_threshold, 1 << 30)
        libc.mallopt(m_trim_threshold, (1 << 31) - 1)
