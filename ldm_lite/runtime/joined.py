"""Linears that read the same input by one product, with the same parameters.

- queries, keys and values of a self-attention layer;
- keys and values of the text of all cross-attention layers, and what all residual blocks read of the timestep: 54
  products of few rows in a step of Stable Diffusion, which take a GPU longer to start than to compute.

Their weights become views of one tensor, so changes in place are seen.  Gradients, and weights that were moved, cast,
copied or replaced, take products of their own again.
"""

import functools
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ldm_lite.core.layers import merge_heads, split_heads
from ldm_lite.core.unet import Attention, BasicTransformerBlock, ResBlock
from ldm_lite.runtime.patching import kernel, patch, patch_of, unpatch

MOST_SHARED = 2**27  # numbers of a shared weight: in larger networks products are not bound by their start


class Memory:
    """The memory of three weights: a tensor (3C, C) of which they are views.  A copy of a layer has none."""

    def __init__(self, qkv: Tensor | None) -> None:
        self.qkv = qkv

    def __deepcopy__(self, memo: object) -> "Memory":
        return Memory(None)


def use(network: nn.Module) -> None:
    """Join the weights of a network's linears that read the same.  Other layers are left as they are."""
    texts, timesteps = list[Any](), list[Any]()
    for block in network.modules():
        if type(block) is BasicTransformerBlock and type(block.attn1) is type(block.attn2) is Attention:
            join_projections(block.attn1)
            texts += [block.attn2.to_k, block.attn2.to_v]
        elif type(block) is ResBlock:
            timesteps.append(block.emb_layers[1])
    share(texts)
    share(timesteps)


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
    """Yield the layers of a network that were joined, even if they no longer are."""
    return (layer for layer in network.modules() if "joined" in vars(layer))


def is_joined(layer: Any) -> bool:
    """Whether a layer still holds the joined memory, and it only runs three plain products."""
    qkv = memory_of(layer)
    projections = layer.to_q, layer.to_k, layer.to_v
    return qkv is not None and all(
        _is_plain(projection)
        and projection.weight.data_ptr() == rows.data_ptr()
        and projection.weight.dtype == rows.dtype
        for projection, rows in zip(projections, qkv.chunk(3), strict=True)
    )


def memory_of(layer: Any) -> Tensor | None:
    """Return the tensor that holds a layer's joined weights, if there is one."""
    memory: Memory | None = vars(layer).get("joined")
    return None if memory is None else memory.qkv


def come_apart(layer: Any) -> None:
    """Make a layer use three products again, and free the joined memory."""
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
    if torch.compiler.is_compiling():  # addresses are unknown here: CompiledStep checks them before each call
        return layer.joined.qkv is not None and not torch.is_grad_enabled()
    if not is_joined(layer):
        come_apart(layer)
        return False
    return not (torch.is_grad_enabled() and layer.to_q.weight.requires_grad)


def _is_plain(layer: nn.Linear) -> bool:
    """Whether a layer only multiplies by its weight."""
    changed = "forward" in vars(layer) or layer._forward_hooks or layer._forward_pre_hooks
    return type(layer) is nn.Linear and layer.bias is None and not changed


# ---- linears of several layers --------------------------------------------------------------------------------------
# The first of them multiplies for all, the others take their part of its product if their input is the same tensor, and
# the last forgets it.  If the weight of one was replaced, all come apart.


class Shared:
    """Weights (N,C) and biases (N,), or None, of linears.  A copy of a linear has none."""

    def __init__(self, weight: Tensor | None, bias: Tensor | None) -> None:
        self.weight, self.bias = weight, bias

    def __deepcopy__(self, memo: object) -> "Shared":
        return Shared(None, None)


@dataclass(frozen=True)
class Part:
    """The rows of shared weights that are a linear's."""

    shared: Shared
    start: int
    end: int

    def of(self, whole: Tensor, dim: int = 0) -> Tensor:
        """Return these rows, or columns."""
        return whole.narrow(dim, self.start, self.end - self.start)


class _Products(threading.local):
    """Of this thread: the input and the product of shared weights, while a network runs."""

    def __init__(self) -> None:
        self.kept: WeakKeyDictionary[Shared, tuple[Tensor, Tensor]] = WeakKeyDictionary()


_products = _Products()


def share(linears: Sequence[nn.Linear]) -> None:
    """Move the weights of linears, in the order in which a network calls them, into one memory."""
    kinds = {(linear.in_features, linear.bias is None, linear.weight.dtype) for linear in linears}
    is_small = sum(linear.weight.numel() for linear in linears) <= MOST_SHARED
    if len(kinds) != 1 or not is_small or not all(type(linear) is nn.Linear for linear in linears):
        return
    if any("forward" in vars(linear) for linear in linears):  # shared before, or patched
        return
    with torch.no_grad():
        weight = torch.cat([linear.weight.detach() for linear in linears])
        biases = [linear.bias.detach() for linear in linears if linear.bias is not None]
        shared, start = Shared(weight, torch.cat(biases) if biases else None), 0
    for linear in linears:
        part = Part(shared, start, start + linear.out_features)
        start = part.end
        linear.weight.data = part.of(weight)
        if shared.bias is not None:
            linear.bias.data = part.of(shared.bias)
        vars(linear)["part"] = part
        patch(linear, _part)


def is_shared(linear: Any) -> bool:
    """Whether a linear still has its part of the shared memory."""
    part: Part | None = vars(linear).get("part")
    if part is None or part.shared.weight is None:
        return False
    return _is_part(linear.weight, part, part.shared.weight) and _is_part(linear.bias, part, part.shared.bias)


def _is_part(tensor: Tensor | None, part: Part, whole: Tensor | None) -> bool:
    if tensor is None or whole is None:
        return tensor is whole
    return tensor.data_ptr() == part.of(whole).data_ptr() and tensor.dtype == whole.dtype


@kernel
def _part(linear: nn.Linear, x: Tensor) -> Tensor:
    if torch.compiler.is_compiling() or torch.is_grad_enabled():
        return nn.Linear.forward(linear, x)
    part: Any = vars(linear).get("part")
    if part is None or not is_shared(linear):
        if part is not None:
            part.shared.weight = part.shared.bias = None
            del linear.part
        if patch_of(linear) is _part:
            unpatch(linear)
        return nn.Linear.forward(linear, x)
    kept, shared = _products.kept, part.shared
    if part.start == 0:
        kept[shared] = x, F.linear(x, shared.weight, shared.bias)
    read, product = kept.get(shared, (None, None))
    if read is not x or product is None:
        return nn.Linear.forward(linear, x)
    if part.end == len(shared.weight):
        del kept[shared]
    return part.of(product, dim=-1)
