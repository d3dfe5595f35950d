"""How loaded networks run: what makes them faster without changing what they compute, in one call."""

import ctypes
import logging
import sys
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import nn

from ldm_lite.diffusion.step import denoise_step
from ldm_lite.runtime import aot, group_norm
from ldm_lite.runtime import attention as attention_backends
from ldm_lite.runtime.compile import Step, compiled_step
from ldm_lite.runtime.cpu import winograd
from ldm_lite.runtime.precision import set_matmul_precision

log = logging.getLogger("ldm_lite")


def tune(
    networks: Mapping[str, nn.Module],
    *,
    attention: str = "sdpa",
    compile: str = "off",
    compiled: str | None = None,
    matmul_precision: str = "highest",
) -> Step:
    """Set up networks, by their roles, where they are now: in place, once, before they are used -> the UNet's step.

    attention is a name of runtime.attention.NAMES; compile one of runtime.compile.TIERS; compiled a package of
    ldm_lite.export that the UNet is to run; matmul_precision what float32 products on a GPU are made in: "highest"
    (float32) or "high" (TF32), for the whole process.  On a GPU, and on a CPU in half precision, the weights become
    channels last; on a CPU the 3x3 convolutions take Winograd's way in float32, and freed memory is kept for the
    next tensor.
    Raises ValueError for what there is not, and if the UNet cannot have the attention or run the package; other
    networks that cannot have the attention keep PyTorch's, which is said.
    """
    for role, network in networks.items():
        _set_attention(role, network, attention)
        if next(network.parameters()).is_cuda:
            set_matmul_precision(matmul_precision)
        _lay_out(network)
    if compiled is not None:
        if compile != "off":
            raise ValueError(f"got compile {compile!r} and a package that is compiled: leave one of them out")
        aot.use(networks["unet"], Path(compiled))
    return compiled_step(compile, networks["unet"]) if "unet" in networks else denoise_step


def tune_alike(network: nn.Module, other: nn.Module) -> None:
    """Set up a network as another one is, which has layers of the same names: a ControlNet as its UNet."""
    attention_backends.follow(network, other)
    _lay_out(network)


def _lay_out(network: nn.Module) -> None:
    first = next(network.parameters())
    on_cpu, in_float32 = first.device.type == "cpu", first.dtype == torch.float32
    if first.is_cuda or (on_cpu and not in_float32):
        network.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    if on_cpu and in_float32:
        winograd.use(network)
    if first.is_cuda or (on_cpu and in_float32):
        group_norm.use(network)
    if on_cpu:
        keep_freed_memory()


def _set_attention(role: str, network: nn.Module, name: str) -> None:
    if not attention_backends.layers(network):
        return
    try:
        attention_backends.use(network, name)
    except ValueError as error:
        if role == "unet":
            raise
        log.info("%s keeps attention sdpa: %s", role.replace("_", " "), error)


def unchanged(network: nn.Module) -> bool:
    """Whether a network runs as it is written, but for what tune does: no forward is another, no module has hooks."""
    modules = list(network.modules())
    own = (module for module in modules if not type(module).__module__.startswith("torch."))  # tune changes others'
    hooked = any(module._forward_pre_hooks or module._forward_hooks for module in modules)
    return not hooked and not any("forward" in vars(module) for module in own)


def keep_freed_memory() -> None:
    """Let the C library keep what is freed, up to 2 GiB, for the next tensor; without glibc this does nothing.

    By default it returns large blocks to the system and gets them back page by page, zeroed: a twelfth of the
    decoder's time on a CPU.
    """
    if sys.platform == "linux" and hasattr(libc := ctypes.CDLL(None), "mallopt"):
        m_trim_threshold, m_mmap_threshold = -1, -3  # malloc.h
        libc.mallopt(m_mmap_threshold, 1 << 30)
        libc.mallopt(m_trim_threshold, (1 << 31) - 1)
