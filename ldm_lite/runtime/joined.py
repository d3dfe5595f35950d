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
from itertools import accumulate
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ldm_lite.core.layers import merge_heads, split_heads
from ldm_lite.core.unet import Attention, BasicTransformerBlock, ResBlock
from ldm_lite.runtime.patching import kernel, patch, patch_of, unpatch

MOST_SHARED = 2**27  # numbers of a shared weight: in larger networks products are not bound by their start


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

    def is_held_by(self, linear: nn.Linear) -> bool:
        """Whether the weight and the bias of a linear are still in the shared memory."""
        if self.shared.weight is None:
            return False
        pairs = (linear.weight, self.shared.weight), (linear.bias, self.shared.bias)
        return all(
            tensor is whole
            if tensor is None or whole is None
            else tensor.data_ptr() == self.of(whole).data_ptr() and tensor.dtype == whole.dtype
            for tensor, whole in pairs
        )


def _in_one_memory(linears: Sequence[nn.Linear]) -> tuple[Part, ...]:
    """Move the weights of linears, and their biases, into one memory; return the part of each."""
    with torch.no_grad():
        weight = torch.cat([linear.weight.detach() for linear in linears])
        biases = [linear.bias.detach() for linear in linears if linear.bias is not None]
        shared = Shared(weight, torch.cat(biases) if biases else None)
    ends = list(accumulate(linear.out_features for linear in linears))
    parts = tuple(Part(shared, end - linear.out_features, end) for linear, end in zip(linears, ends, strict=True))
    for linear, part in zip(linears, parts, strict=True):
        linear.weight.data = part.of(weight)
        if shared.bias is not None:
            linear.bias.data = part.of(shared.bias)
    return parts


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
    if len({linear.weight.shape for linear in projections}) > 1 or not all(map(_is_plain, projections)):
        return
    if not is_joined(layer):
        vars(layer)["joined"] = _in_one_memory(projections)
        patch(layer, _forward)


def joined_layers(network: nn.Module) -> Iterator[Any]:
    """Yield the layers of a network that were joined, even if they no longer are."""
    return (layer for layer in network.modules() if "joined" in vars(layer))


def is_joined(layer: Any) -> bool:
    """Whether a layer still holds the joined memory, and it only runs three plain products."""
    parts, projections = vars(layer).get("joined", ()), (layer.to_q, layer.to_k, layer.to_v)
    pairs = list(zip(parts, projections, strict=False))
    return bool(pairs) and all(_is_plain(linear) and part.is_held_by(linear) for part, linear in pairs)


def come_apart(layer: Any) -> None:
    """Make a layer use three products again, and free the joined memory."""
    vars(layer).pop("joined", None)
    if patch_of(layer) is _forward:
        unpatch(layer)


@functools.partial(kernel, is_whole=True)
def _forward(layer: Any, x: Tensor, context: Tensor) -> Tensor:
    if not _is_usable(layer) or context is not x:
        return Attention.forward(layer, x, context)
    q, k, v = F.linear(x, layer.joined[0].shared.weight).chunk(3, dim=-1)  # (B, N, C)
    q, k, v = (split_heads(part, layer.num_heads) for part in (q, k, v))  # (B, H, N, D)
    return layer.to_out(merge_heads(layer.attention(q, k, v)))


def _is_usable(layer: Any) -> bool:
    if torch.compiler.is_compiling():  # addresses are unknown here: CompiledStep checks them before each call
        return layer.joined[0].shared.weight is not None and not torch.is_grad_enabled()
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
    for linear, part in zip(linears, _in_one_memory(linears), strict=True):
        vars(linear)["part"] = part
        patch(linear, _part)


def is_shared(linear: Any) -> bool:
    """Whether a linear still has its part of the shared memory."""
    part: Part | None = vars(linear).get("part")
    return part is not None and part.is_held_by(linear)


@kernel
def _part(linear: nn.Linear, x: Tensor) -> Tensor:
    if torch.compiler.is_compiling() or torch.is_grad_enabled():
        return nn.Linear.forward(linear, x)
    part: Any = vars(linear).get("part")
    if part is None or not part.is_held_by(linear):
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
