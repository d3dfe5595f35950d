"""Group normalisation that the compiler fuses well on a GPU.

Inductor compiles PyTorch's group norm to four kernels, and to a fifth that restores channels last if sizes may change.
Written out for channels-last maps it takes three: statistics of lines, statistics of groups, and the result.  With
Triton's kernels it takes one or two, SiLU, the timestep and the convolution's bias included; they run in eager steps
too, where PyTorch's norm returns maps that are no longer channels last.

For inference on a GPU; everything else runs PyTorch's norm.

Shape letters: B batch, C channels, G groups.
"""

import importlib
from typing import Any

import torch
from torch import Tensor, nn

from ldm_lite.core.unet import Block, ResBlock, SpatialTransformer
from ldm_lite.models.unet import LinearTransformer, attend
from ldm_lite.runtime.patching import kernel, patch, patch_of

TRANSFORMERS = (SpatialTransformer, LinearTransformer)
_kernels: Any = None  # runtime.norm_kernels once it is used: Triton may be missing, and the compiler follows no import


def written_out(x: Tensor, norm: nn.GroupNorm) -> Tensor:
    """Normalise x (B,C,h,w) by groups of channels in float32, in operations that fuse well."""
    (batch, channels, h, _), groups = x.shape, norm.num_groups
    pixels = x.permute(0, 2, 3, 1).float()  # (B, h, w, C)
    variances, means = torch.var_mean(pixels, dim=2, correction=0)  # of lines, (B, h, C)
    variances, means = (each.view(batch, h, groups, -1) for each in (variances, means))
    mean = means.mean((1, 3), keepdim=True)  # (B, 1, G, 1)
    rate = ((variances + (means - mean).square()).mean((1, 3), keepdim=True) + norm.eps).rsqrt()
    scale = rate * norm.weight.float().view(groups, -1)  # (B, 1, G, C/G)
    shift = norm.bias.float().view(groups, -1) - mean * scale
    scale, shift = (each.view(batch, 1, 1, channels) for each in (scale, shift))
    return (pixels * scale + shift).to(x.dtype).permute(0, 3, 1, 2)


@kernel
def _forward(norm: nn.GroupNorm, x: Tensor) -> Tensor:
    fuses = x.ndim == 4 and x.is_cuda and torch.compiler.is_compiling() and not torch.is_grad_enabled()
    return written_out(x, norm) if fuses else nn.GroupNorm.forward(norm, x)


@kernel
def _by_triton(norm: nn.GroupNorm, x: Tensor) -> Tensor:
    return _normalise(norm, x, silu=False) if _suits(norm, x) else nn.GroupNorm.forward(norm, x)


@kernel
def _res_block(block: ResBlock, x: Tensor, emb: Tensor) -> Tensor:
    if not _block_suits(block, x):
        return ResBlock.forward(block, x, emb)
    return block.skip_connection(x) + block.out_layers[3](_before_last(block, x, emb))


def _before_last(block: ResBlock, x: Tensor, emb: Tensor) -> Tensor:
    """The input of a residual block's second convolution."""
    h, bias = _without_bias(block.in_layers[2], _normalise(block.in_layers[0], x, silu=True))
    return _normalise(block.out_layers[0], h, silu=True, added=block.emb_layers(emb), channel=bias)


@kernel
def _pair(pair: Any, x: Tensor, emb: Tensor, context: Tensor, size: tuple[int, int] | None = None) -> Tensor:
    """A residual block and a transformer, whose norm adds the residual connection."""
    block, transformer = pair[0], pair[1]
    known = type(block) is ResBlock and patch_of(block) is _res_block and type(transformer) in TRANSFORMERS
    changed = "forward" in vars(transformer) or any(map(_is_called_otherwise, (block, transformer)))
    if not known or changed or not _block_suits(block, x) or not _suits(transformer.norm, x):
        return Block.forward(pair, x, emb, context, size)
    h, bias = _without_bias(block.out_layers[3], _before_last(block, x, emb))
    norm = transformer.norm
    given = (norm.weight, norm.bias, norm.num_groups, norm.eps, False)
    skip = block.skip_connection(x)
    if torch.compiler.is_compiling():
        normed, x = _kernels.group_norm_of_sum(h, skip, *given, channel=bias)
    else:
        normed, x = _kernels.launch(h, *given, y=skip, channel=bias)
    x = x + attend(transformer, normed, context)
    return Block.forward(list(pair)[2:], x, emb, context, size)  # type: ignore[arg-type]


def _is_called_otherwise(module: nn.Module) -> bool:
    return bool(module._forward_hooks or module._forward_pre_hooks or module._compiled_call_impl)


def _block_suits(block: ResBlock, x: Tensor) -> bool:
    norms, acts = (block.in_layers[0], block.out_layers[0]), (block.in_layers[1], block.out_layers[1])
    simple = all(type(act) is nn.SiLU for act in acts)
    return simple and all(patch_of(norm) is _by_triton and _suits(norm, x) for norm in norms)


def _without_bias(conv: nn.Module, x: Tensor) -> tuple[Tensor, Tensor | None]:
    """Convolve, and return the bias that is still to be added, None if another forward or a hook is in place."""
    changed = "forward" in vars(conv) or conv._forward_hooks or conv._forward_pre_hooks
    if type(conv) is not nn.Conv2d or conv.padding_mode != "zeros" or changed:
        return conv(x), None
    return conv._conv_forward(x, conv.weight, None), conv.bias


def _suits(norm: Any, x: Tensor) -> bool:
    """Whether the kernels are for this: sizes of 1 would be constants to Triton."""
    several = x.ndim == 4 and x.shape[2] * x.shape[3] > 1 and 1 < norm.num_groups < norm.num_channels
    return several and not torch.is_grad_enabled() and _kernels.runs_on(x) and norm.weight.dtype == x.dtype


def _normalise(norm: Any, x: Tensor, silu: bool, **parts: Tensor | None) -> Tensor:
    given = (x, norm.weight, norm.bias, norm.num_groups, norm.eps, silu)
    if torch.compiler.is_compiling():
        return _kernels.group_norm(*given, **parts)
    return _kernels.launch(*given, **parts)[0]


def use(network: nn.Module, triton: bool = False) -> None:
    """Use this form for the group norms of a network in compiled steps, or Triton's kernels everywhere."""
    global _kernels
    if triton:
        _kernels = importlib.import_module("ldm_lite.runtime.norm_kernels")
    for module in network.modules():
        if type(module) is nn.GroupNorm:
            patch(module, _by_triton if triton else _forward)
        elif type(module) is ResBlock and triton:
            patch(module, _res_block)
        elif (
            type(module) is Block
            and triton
            and len(module) > 1
            and type(module[0]) is ResBlock
            and type(module[1]) in TRANSFORMERS
        ):
            patch(module, _pair)
