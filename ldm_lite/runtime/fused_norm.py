"""Group normalisation on a GPU, with what surrounds it, in inference.

PyTorch's group norm on a GPU makes maps contiguous, so that a layer with channels last copies its input before it and
its result after it.  In half precision the kernels of triton_kernels.py take two in place of five, and a residual block
of a UNet needs none more for its activations, its timestep and the biases of its convolutions: 618 kernels in place of
911 in a step of Stable Diffusion.  They are compared with PyTorch's at their first use, and left if they differ or do
not run.

Inductor compiles PyTorch's group norm to four kernels, and to a fifth that restores channels last if sizes may change.
Written out for channels-last maps it takes three: statistics of lines, statistics of groups, and the result.

Everything else runs PyTorch's norm.

Shape letters: B batch, C channels, G groups.
"""

import functools
import importlib
import importlib.util
import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ldm_lite.core.layers import Conv1x1, channels_last
from ldm_lite.core.unet import ResBlock
from ldm_lite.runtime.patching import kernel, patch, patch_of

log = logging.getLogger("ldm_lite")


def written_out(x: Tensor, norm: nn.GroupNorm) -> Tensor:
    """Normalise x (B,C,h,w) by groups of channels in float32, in operations that fuse well."""
    (batch, channels, h, _), groups = x.shape, norm.num_groups
    pixels = x.permute(0, 2, 3, 1).float()  # (B, h, w, C)
    variances, means = torch.var_mean(pixels, dim=2, correction=0)  # of lines, (B, h, C)
    variances, means = variances.view(batch, h, groups, -1), means.view(batch, h, groups, -1)
    mean = means.mean((1, 3), keepdim=True)  # (B, 1, G, 1)
    rate = ((variances + (means - mean).square()).mean((1, 3), keepdim=True) + norm.eps).rsqrt()
    scale = rate * norm.weight.float().view(groups, -1)  # (B, 1, G, C/G)
    shift = norm.bias.float().view(groups, -1) - mean * scale
    scale, shift = scale.view(batch, 1, 1, channels), shift.view(batch, 1, 1, channels)
    return (pixels * scale + shift).to(x.dtype).permute(0, 3, 1, 2)


# ---- our kernels ----------------------------------------------------------------------------------------------------


@torch.library.custom_op("ldm_lite::group_norm", mutates_args=())
def _group_norm(
    x: Tensor, weight: Tensor, offset: Tensor, groups: int, eps: float, silu: bool, shift: Tensor | None, bias: Tensor
) -> Tensor:
    with torch.cuda.device_of(x):  # type: ignore[no-untyped-call]  # where Triton launches
        out: Tensor = _triton().group_norm(x, weight, offset, groups, eps, silu, shift, bias)
    return out


@torch.library.custom_op("ldm_lite::biased_sum", mutates_args=())
def _biased_sum(x: Tensor, y: Tensor, bias: Tensor) -> Tensor:
    with torch.cuda.device_of(x):  # type: ignore[no-untyped-call]
        out: Tensor = _triton().biased_sum(x, y, bias)
    return out


@_group_norm.register_fake
def _(x: Tensor, *others: Any) -> Tensor:
    return torch.empty_like(x)


@_biased_sum.register_fake
def _(x: Tensor, y: Tensor, bias: Tensor) -> Tensor:
    return torch.empty_like(x)


@functools.cache
def _triton() -> Any:
    return importlib.import_module("ldm_lite.runtime.triton_kernels")


@functools.cache
def runs_on(device: torch.device) -> bool:
    """Whether these kernels are for a device; on the meta device they are counted."""
    has_triton = device.type == "cuda" and torch.version.cuda is not None and importlib.util.find_spec("triton")
    return device.type == "meta" or bool(has_triton)


def _suits(x: Tensor, norm: nn.GroupNorm) -> bool:
    """Whether a norm, of this map in half precision with channels last, is for our kernels, and they compute it."""
    if x.ndim != 4 or x.dtype not in (torch.float16, torch.bfloat16) or norm.weight.dtype != x.dtype:
        return False
    if torch.is_grad_enabled() or torch.compiler.is_compiling() or not runs_on(x.device):
        return False
    if not x.is_contiguous(memory_format=torch.channels_last) or norm.num_groups.bit_count() != 1:
        return False
    return x.is_meta or _computes(x.device, x.dtype, x.shape[1], norm.num_groups)


@functools.cache
def _computes(device: torch.device, dtype: torch.dtype, channels: int, groups: int) -> bool:
    """Whether our kernels run on this device, and have the results of PyTorch's."""
    norm = nn.GroupNorm(groups, channels, device=device, dtype=dtype)
    waves = torch.arange(2 * 9 * 7 * channels, device=device).sin().to(dtype)  # not random, which has a state
    x = 3 + 2 * waves.view(2, 9, 7, channels).permute(0, 3, 1, 2)
    shift, bias = waves[: 2 * channels].view(2, channels), waves[-channels:]
    try:
        normed = _group_norm(x, norm.weight, norm.bias, groups, norm.eps, True, shift, bias)
        total = _biased_sum(x, x, bias)
    except Exception as error:  # compilers raise anything
        log.warning("group norm by PyTorch: our kernel does not run (%s)", str(error).partition("\n")[0][:150])
        return False
    shifted = x.float() + (shift + bias)[:, :, None, None].float()
    expected = F.silu(F.group_norm(shifted, groups, eps=norm.eps)), 2 * x.float() + bias.float()[:, None, None]
    difference = max(float((a.float() - b).norm() / b.norm()) for a, b in zip((normed, total), expected, strict=True))
    if not difference < 0.02:
        log.warning("group norm by PyTorch: our kernel differs from it by %.1e", difference)
    return difference < 0.02


@kernel
def _forward(norm: nn.GroupNorm, x: Tensor) -> Tensor:
    fuses = x.ndim == 4 and x.is_cuda and torch.compiler.is_compiling() and not torch.is_grad_enabled()
    if fuses:
        return written_out(x, norm)
    if _suits(x, norm):
        return _group_norm(x, norm.weight, norm.bias, norm.num_groups, norm.eps, False, None, norm.bias)
    return nn.GroupNorm.forward(norm, x)


def _normalised(norm: Any, x: Tensor, shift: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
    """Return SiLU of the norm of x, or of x + shift + bias."""
    bias = norm.bias if bias is None else bias
    return _group_norm(x, norm.weight, norm.bias, norm.num_groups, norm.eps, True, shift, bias)


@functools.partial(kernel, is_whole=True)
def _res_block(block: Any, x: Tensor, emb: Tensor) -> Tensor:
    """Run a residual block, whose first convolution's bias and timestep are read by the norm that follows."""
    norm_in, _, conv_in = block.in_layers
    norm_out, _, _, conv_out = block.out_layers
    if not (_suits(x, norm_in) and _is_plain(block)):
        return ResBlock.forward(block, x, emb)
    h = channels_last(conv_in._conv_forward(_normalised(norm_in, x), conv_in.weight, None))
    h = _normalised(norm_out, h, block.emb_layers(emb), conv_in.bias)
    h = channels_last(conv_out._conv_forward(h, conv_out.weight, None))
    return _biased_sum(channels_last(block.skip_connection(x)), h, conv_out.bias)


CLASSES = (ResBlock, nn.Sequential, nn.GroupNorm, nn.SiLU, nn.Conv2d, nn.Linear, nn.Identity, Conv1x1)


def _is_plain(block: nn.Module) -> bool:
    """Whether the layers of a block are what they were made as: no hooks, no forwards of others, no other classes."""
    return all(
        type(part) in CLASSES
        and not (part._forward_hooks or part._forward_pre_hooks)
        and ("forward" not in vars(part) or patch_of(part) in (_forward, _res_block) or part is block)
        for part in block.modules()
    )


def use(network: nn.Module) -> None:
    """Use these forms for the group norms and residual blocks of a network."""
    kernels: dict[type, Callable[..., Tensor]] = {nn.GroupNorm: _forward, ResBlock: _res_block}
    for module in network.modules():
        if type(module) in kernels:
            patch(module, kernels[type(module)])
