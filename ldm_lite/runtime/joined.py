"""Queries, keys and values of self-attention by one product in place of three, with the same three parameters.

The three weights become views of one tensor, so changes in place are seen.  Gradients, and weights that were moved,
cast, copied or replaced, take three products again.
"""

import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ldm_lite.core.layers import merge_heads, split_heads
from ldm_lite.core.unet import Attention, BasicTransformerBlock
from ldm_lite.runtime.patching import kernel, patch, patch_of, unpatch


class Memory:
    """What joins three weights: a tensor (3C, C) of which they are views.  A copy of a layer has none."""

    def __init__(self, qkv: Tensor | None) -> None:
        self.qkv = qkv

    def __deepcopy__(self, memo: object) -> "Memory":
        return Memory(None)


def use(network: nn.Module) -> None:
    """Join the weights of a network's self-attention layers.  Other layers are left as they are."""
    for block in network.modules():
        if type(block) is BasicTransformerBlock and type(block.attn1) is Attention:
            join_projections(block.attn1)


def join_projections(layer: Attention) -> None:
    """Move the weights of a self-attention layer's queries, keys and values into one memory."""
    projections = layer.to_q, layer.to_k, layer.to_v
    weights = [projection.weight for projection in projections]
    if len({weight.shape for weight in weights}) > 1 or not all(map(_is_plain, projections)):
        return
    if is_joined(layer):
        return
    with torch.no_grad():
        joined = torch.cat([weight.detach() for weight in weights])
    for weight, view in zip(weights, joined.chunk(3), strict=True):
        weight.data = view
    vars(layer)["joined"] = Memory(joined)
    patch(layer, _forward)


def joined_layers(network: nn.Module) -> Iterator[Any]:
    """Yield the layers of a network that were joined, and may have come apart since."""
    return (layer for layer in network.modules() if "joined" in vars(layer))


def is_joined(layer: Any) -> bool:
    """Whether a layer still has the memory of all three weights, and nothing else is computed."""
    qkv = memory_of(layer)
    projections = layer.to_q, layer.to_k, layer.to_v
    return qkv is not None and all(
        _is_plain(projection)
        and projection.weight.data_ptr() == rows.data_ptr()
        and projection.weight.dtype == rows.dtype
        for projection, rows in zip(projections, qkv.chunk(3), strict=True)
    )


def memory_of(layer: Any) -> Tensor | None:
    """Return the tensor that joins a layer's weights, if there is one."""
    memory: Memory | None = vars(layer).get("joined")
    return None if memory is None else memory.qkv


def come_apart(layer: Any) -> None:
    """Have a layer take three products again, and free what joined them."""
    vars(layer).pop("joined", None)
    if patch_of(layer) is _forward:
        unpatch(layer)


@functools.partial(kernel, is_whole=True)
def _forward(layer: Any, x: Tensor, context: Tensor) -> Tensor:
    if not _is_usable(layer) or context is not x:
        return Attention.forward(layer, x, context)
    q, k, v = F.linear(x, layer.joined.qkv).chunk(3, dim=-1)  # (B, N, C)
    q, k, v = (split_heads(part, layer.num_heads) for part in (q, k, v))  # (B, H, N, D)
    return layer.to_out(merge_heads(layer.attention(q, k, v)))


def _is_usable(layer: Any) -> bool:
    if torch.compiler.is_compiling():  # addresses are unknown here: CompiledStep looks at them before each call
        return layer.joined.qkv is not None and not torch.is_grad_enabled()
    if not is_joined(layer):
        come_apart(layer)
        return False
    return not (torch.is_grad_enabled() and layer.to_q.weight.requires_grad)


def _is_plain(layer: nn.Linear) -> bool:
    """Whether a layer only multiplies by its weight."""
    changed = "forward" in vars(layer) or layer._forward_hooks or layer._forward_pre_hooks
    return type(layer) is nn.Linear and layer.bias is None and not changed
