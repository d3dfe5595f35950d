"""What the networks share: attention, small layers, the timestep embedding, and reading sizes from shapes.

Shape letters: B batch, C channels, h w latent size, N tokens, H heads, D channels of a head.
"""

import contextlib
import copy
import fnmatch
import functools
import inspect
import math
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

# ---- attention ------------------------------------------------------------------------------------------------------

# q (B,H,N,D), k and v (B,H,M,D) -> (B,H,N,D); with a fourth parameter named `place`, it gets a Place too.
AttentionFn = Callable[..., Tensor]


def sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """softmax(q k^T / sqrt(D)) v by PyTorch's fused kernels: the default.  Vaswani et al. 2017, eq. 1."""
    return F.scaled_dot_product_attention(q, k, v)


def explicit(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The same as nn.MultiheadAttention writes it, with the whole map in memory: for reading and hooking."""
    scores = (q / math.sqrt(q.shape[-1])) @ k.transpose(-2, -1)  # (B, H, N, M)
    return scores.softmax(dim=-1) @ v


ATTENTIONS: dict[str, AttentionFn] = {"sdpa": sdpa, "explicit": explicit}


def attention_layers(network: nn.Module, where: str = "*") -> dict[str, Any]:
    """The layers of a network with an attribute `attention`, by their names that match a pattern: "*attn2", ..."""
    layers = {name: layer for name, layer in network.named_modules() if callable(vars(layer).get("attention"))}
    return {name: layer for name, layer in layers.items() if fnmatch.fnmatchcase(name, where)}


def matching_layers(network: nn.Module, where: str) -> dict[str, Any]:
    """The same.  Raises ValueError if no layer matches."""
    if layers := attention_layers(network, where):
        return layers
    if not (names := list(attention_layers(network))):
        raise ValueError(f"{type(network).__name__} has no attention layers")
    raise ValueError(f"no attention layer matches {where!r}: they are {', '.join(names)}")


def use_attention(network: nn.Module, attention: str | AttentionFn, where: str = "*") -> None:
    """Set the attention of those layers: a name of ATTENTIONS, or a function.  It changes the network in place.

    A function with a parameter named `place` learns where it is called: see Place.  Raises ValueError for an unknown
    name, and for a pattern that no layer matches.
    """
    if isinstance(attention, str) and attention not in ATTENTIONS:
        raise ValueError(f"unknown attention {attention!r}: expected a function, or one of {', '.join(ATTENTIONS)}")
    layers = matching_layers(network, where)
    function = ATTENTIONS[attention] if isinstance(attention, str) else attention
    takes_place = _takes_place(function)
    layer: Any
    for name, layer in layers.items():
        layer.attention = function
        if takes_place:
            layer.attention = functools.partial(function, place=Place(name))
            _note_sizes(network, name)


def _note_sizes(network: nn.Module, name: str) -> None:
    """Make a layer of a network, and the modules that contain it, note the size of their feature maps."""
    names = name.split(".")
    for depth in range(1, len(names) + 1):
        module = network.get_submodule(".".join(names[:depth]))
        if note_size not in module._forward_pre_hooks.values():
            module.register_forward_pre_hook(note_size)


def _takes_place(function: AttentionFn) -> bool:
    try:
        return "place" in inspect.signature(function).parameters
    except ValueError:  # functions of C have no signature
        return False


class _Now(threading.local):
    """What attention functions learn about the call that runs in this thread; the defaults are those outside of a run.

    `calling` sets it around a call of the network, and hooks of layers set the size of their feature map as it goes
    on.  It belongs to the thread, since threads may share a network, which has no state.
    """

    call: Any = None
    t: Tensor | None = None
    branches: tuple[bool, ...] = (True,)
    size: tuple[int, int] = (0, 0)  # (height, width) of the feature map


_now = _Now()


@dataclass(frozen=True)
class Place:
    """Where an attention function is called: in which layer, and in which call of the network by denoise.run_plan.

    A compiled function is compiled anew for each value of `call` that it reads: compare `t`, a tensor, instead.
    """

    layer: str  # its name in the network: "input_blocks.1.1.transformer_blocks.0.attn1"

    @property
    def height(self) -> int:
        """The height of the feature map: q has height * width positions, row by row."""
        return _now.size[0]

    @property
    def width(self) -> int:
        """The width of the feature map."""
        return _now.size[1]

    @property
    def call(self) -> Any:
        """The denoise.Call: number, step, num_steps; None outside of a run."""
        return _now.call

    @property
    def t(self) -> Tensor | None:
        """The timestep, () on the device; None outside of a run."""
        return _now.t

    @property
    def branches(self) -> tuple[bool, ...]:
        """One for each branch that runs, in their order: whether it is positive; (True,) outside of a run."""
        return _now.branches

    def by_branch(self, tensor: Tensor) -> Tensor:
        """(K*B,...), as q, k and v are, -> (K,B,...), a view: branch by branch."""
        return tensor.view(len(self.branches), -1, *tensor.shape[1:])


@contextlib.contextmanager
def calling(call: Any, t: Tensor, branches: tuple[bool, ...]) -> Iterator[None]:
    """Tell attention functions which call of the network runs in this thread."""
    before = _now.call, _now.t, _now.branches
    _now.call, _now.t, _now.branches = call, t, branches
    try:
        yield
    finally:
        _now.call, _now.t, _now.branches = before


def note_size(module: nn.Module, inputs: tuple[Any, ...]) -> None:
    """A hook before a module that gets a feature map (B,C,h,w): tell attention functions within it the size."""
    if inputs and isinstance(inputs[0], Tensor) and inputs[0].ndim == 4:
        _now.size = inputs[0].shape[2], inputs[0].shape[3]


def shared_copy(network: nn.Module) -> Any:
    """A copy of a network with new modules and the same weights, to change without changing the original."""
    # Attention functions are not copied either: they may be the user's objects, with stored maps.
    attentions = [vars(layer)["attention"] for layer in attention_layers(network).values()]
    shared = (*network.parameters(), *network.buffers(), *attentions)
    already_copied = {id(value): value for value in shared}  # deepcopy's memo
    return copy.deepcopy(network, already_copied)


def split_heads(x: Tensor, num_heads: int) -> Tensor:
    """(B,N,C) -> (B,H,N,C/H), a view."""
    return x.view(*x.shape[:2], num_heads, -1).transpose(1, 2)


def merge_heads(x: Tensor) -> Tensor:
    """(B,H,N,D) -> (B,N,H*D)."""
    return x.transpose(1, 2).flatten(2)


# ---- feature maps ---------------------------------------------------------------------------------------------------


def channels_last(x: Tensor) -> Tensor:
    """(B,C,h,w) with channels last in memory: faster convolutions, and tokens (B,N,C) become a view."""
    return x.contiguous(memory_format=torch.channels_last)


class Conv1x1(nn.Conv2d):
    """A 1x1 convolution (B,C,h,w) -> (B,K,h,w) as a linear over positions, which copies nothing with channels last."""

    def __init__(self, in_channels: int, out_channels: int) -> None:
        super().__init__(in_channels, out_channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        positions = channels_last(x).permute(0, 2, 3, 1)  # (B, h, w, C), a view
        out = F.linear(positions, self.weight.flatten(1), self.bias)  # (B, h, w, K)
        return out.permute(0, 3, 1, 2)


class Upsample(nn.Module):
    """(B,C,h,w) -> (B,C,*size), by default twice the size, by nearest neighbour; then a convolution."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, x: Tensor, size: tuple[int, int] | None = None) -> Tensor:
        factor = None if size else 2.0
        return self.conv(F.interpolate(x, size, factor, "nearest"))


def sinusoids(t: Tensor, dim: int) -> Tensor:
    """Timesteps (B,) in [0,1000), possibly fractional -> float32 sinusoids (B,dim), the cosines first.

    Frequencies exp(-ln 10000 * i / (dim/2)).  Vaswani et al. 2017, sec. 3.5, in the order of CompVis openaimodel.py.
    """
    half = dim // 2
    numbers = torch.arange(half, dtype=torch.float32, device=t.device)
    freqs = torch.exp(numbers * (-math.log(10000) / half))
    angles = t.float()[:, None] * freqs  # (B, dim/2)
    return torch.cat([angles.cos(), angles.sin()], dim=1)


# ---- sizes from shapes ----------------------------------------------------------------------------------------------

Shapes = Mapping[str, tuple[int, ...]]  # by key, without prefix
MOST_BLOCKS = 100  # of one kind in a row: released networks have at most 64


def checked_shape(shapes: Shapes, key: str, rank: int) -> tuple[int, ...]:
    """Return the shape of a tensor that must be there, with so many dimensions.  Raises ValueError, naming the key."""
    if key not in shapes:
        raise ValueError(f"a tensor that every such network has is missing: {key}")
    shape = shapes[key]
    if len(shape) != rank or not all(0 < side <= 2**24 for side in shape):
        raise ValueError(f"{key} has the shape {tuple(shape)}, expected {rank} dimensions, none empty")
    return tuple(shape)


def count_blocks(shapes: Shapes, pattern: str) -> int:
    """Count blocks: keys have their index, from 0, where the pattern has its group.  Raises ValueError for a gap."""
    blocks = {}  # index -> the beginning of its keys
    for key in shapes:
        if match := re.match(pattern, key):
            blocks[int(match[1])] = match[0]
    if sorted(blocks) != list(range(min(len(blocks), MOST_BLOCKS))):
        last = blocks[max(blocks)]
        raise ValueError(f"has {last}*, and {len(blocks)} such blocks: expected all from 0 on, at most {MOST_BLOCKS}")
    return len(blocks)
