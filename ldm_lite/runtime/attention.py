"""Attention backends, chosen by name for each network, and attention maps by layer name.

There is no global switch: `use` sets the attribute `attention` of each attention layer of one network.  Every backend
computes softmax(q k^T / sqrt(D)) v for q (B,H,N,D) and k, v (B,H,M,D); `vanilla` is the reference for all others.

PyTorch's kernels for scaled dot-product attention are called as the operators that it dispatches to:
`torch.nn.attention.sdpa_kernel` sets flags of the whole process, which is not safe with two threads.
"""

import contextlib
import copy
import functools
import importlib
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ldm_lite.core.layers import AttentionFn, attention_layers, matching_layers, sdpa
from ldm_lite.runtime import timing
from ldm_lite.runtime.cpu import blocked
from ldm_lite.runtime.patching import patch, patch_of, unpatch, unpatched
from ldm_lite.runtime.precision import short_name

AnyNetwork = TypeVar("AnyNetwork", bound=nn.Module)
layers = attention_layers


def vanilla(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Compute the formula as the original attention.py does, with the whole (B,H,N,M) map in memory."""
    return probabilities(q, k) @ v


def probabilities(q: Tensor, k: Tensor) -> Tensor:
    """Return the attention map softmax(q k^T / sqrt(D)), (B,H,N,M)."""
    # q is scaled before the product, which exceeds float16 in some networks.
    return torch.softmax((q * q.shape[-1] ** -0.5) @ k.transpose(-2, -1), dim=-1)


def sliced(q: Tensor, k: Tensor, v: Tensor, num_slices: int = 8) -> Tensor:
    """Vanilla attention in slices of the queries, one after the other, which divides its memory by their number."""
    return torch.cat([vanilla(part, k, v) for part in q.tensor_split(num_slices, dim=2)], dim=2)


def _math(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.ops.aten._scaled_dot_product_attention_math(q, k, v)[0]


def _flash(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    if q.device.type == "cpu":
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v)[0]
    return torch.ops.aten._scaled_dot_product_flash_attention(q, k, v)[0]


def _efficient(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.ops.aten._scaled_dot_product_efficient_attention(q, k, v, None, _trains(q, k, v))[0]


def _cudnn(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    if q.dtype not in (torch.float16, torch.bfloat16):  # torch would make it read these numbers as float16
        raise NotImplementedError(f"cuDNN's attention is for fp16 and bf16, not for {short_name(q.dtype)}")
    return torch.ops.aten._scaled_dot_product_cudnn_attention(q, k, v, None, _trains(q, k, v))[0]


@torch.library.custom_op("ldm_lite::flash3", mutates_args=())
def _flash3_op(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Compute it by FlashAttention 3, for Hopper, if its package is installed.

    An operator of our own: torch's `activate_flash_attention_impl("FA3")` calls the same package, but replaces flash
    attention in the whole process.
    """
    function = importlib.import_module("flash_attn_interface").flash_attn_func
    out = function(*(x.transpose(1, 2) for x in (q, k, v)))  # (B, N, H, D)
    return (out[0] if isinstance(out, tuple) else out).transpose(1, 2).contiguous()


@_flash3_op.register_fake
def _(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return q.new_empty(q.shape)


def _flash3(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return _flash3_op(q, k, v)  # a function can be pickled


def _trains(*tensors: Tensor) -> bool:
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)


_FUNCTIONS: dict[str, AttentionFn] = {
    "sdpa": sdpa,
    "vanilla": vanilla,
    "math": _math,
    "flash": _flash,
    "efficient": _efficient,
    "cudnn": _cudnn,
    "flash3": _flash3,
    "sliced": sliced,
    "blocked": blocked,
}


def is_stateless(function: AttentionFn) -> bool:
    """Whether an attention has a name, so that its result depends on q, k and v alone: a CUDA graph may hold it."""
    return getattr(function, "func", function) in _FUNCTIONS.values()  # the function of a partial one: "sliced:4"


def name_of(function: AttentionFn) -> str:
    """Return the name of an attention, "sliced" for "sliced:4"; for an unnamed one, its function's name."""
    inner = getattr(function, "func", function)
    names = (name for name, known in _FUNCTIONS.items() if known is inner)
    return next(names, getattr(inner, "__name__", type(inner).__name__))


def register(name: str, function: AttentionFn) -> None:
    """Register a function of q, k and v under a name that every `attention` option accepts.

    Its result may depend on them alone: a CUDA graph calls it once.  Raises ValueError if the name is taken.
    """
    if name in names() or ":" in name:
        raise ValueError(f"attention {name!r} exists already: choose another name without a colon")
    _FUNCTIONS[name] = function


def names() -> tuple[str, ...]:
    """Return all names that `use` takes; "sliced:4" sets the number of slices."""
    return (*_FUNCTIONS, "mha", "fastest")


# ---- chosen by timing -----------------------------------------------------------------------------------------------

CANDIDATES = ("sdpa", "flash", "efficient", "cudnn", "flash3", "math", "blocked")  # the last is for CPUs


class Fastest:
    """A layer's attention until its first call, which times the kernels for its sizes and puts the fastest in place.

    Later calls use that one whatever their sizes are.  Steps run plain before they are compiled or captured, so
    compiled code has the kernel itself.
    """

    def __init__(self, layer: Any) -> None:
        self.layer = layer

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Compute the attention of q, k and v with the fastest kernel, or PyTorch's choice while code is traced."""
        if torch.compiler.is_compiling() or _trains(q, k, v):
            return sdpa(q, k, v)
        function = self.layer.attention = _FUNCTIONS[fastest(q, k, v)]
        return function(q, k, v)


def fastest(q: Tensor, k: Tensor, v: Tensor) -> str:
    """Return the name of the fastest kernel for q (B,H,N,D) and k, v (B,H,M,D) of these sizes, timed once a process.

    PyTorch's own choice stays unless another is clearly faster: it is right for other sizes too.
    """
    key = (short_name(q.dtype), *q.shape, k.shape[2])
    candidates = CANDIDATES if q.device.type == "cpu" else CANDIDATES[:-1]
    works = [name for name in candidates if _runs(_FUNCTIONS[name], q.device, q.dtype, q.shape[-1])]
    ways = {name: functools.partial(_FUNCTIONS[name], q, k, v) for name in works}
    what = f"attention of {q.shape[2]} to {k.shape[2]} tokens, {q.shape[3]} channels a head"
    return timing.fastest(what, key, ways, q.device)


# ---- in a network ---------------------------------------------------------------------------------------------------


def _mha(layer: Any, x: Tensor, context: Tensor) -> Tensor:
    """Run a cross-attention layer through torch.nn.MultiheadAttention's function, with the layer's own weights."""
    out, _ = F.multi_head_attention_forward(
        x.transpose(0, 1),  # (N, B, C)
        context.transpose(0, 1),  # (T, B, D)
        context.transpose(0, 1),
        embed_dim_to_check=layer.to_q.in_features,
        num_heads=layer.num_heads,
        in_proj_weight=None,
        in_proj_bias=None,
        bias_k=None,
        bias_v=None,
        add_zero_attn=False,
        dropout_p=0.0,
        out_proj_weight=layer.to_out[0].weight,
        out_proj_bias=layer.to_out[0].bias,
        training=False,
        need_weights=False,
        use_separate_proj_weight=True,
        q_proj_weight=layer.to_q.weight,
        k_proj_weight=layer.to_k.weight,
        v_proj_weight=layer.to_v.weight,
    )
    return out.transpose(0, 1)


def head_dim(layer: Any) -> int:
    """Return the number of channels of a layer's heads."""
    known: int | None = getattr(layer, "head_dim", None)
    projection: Any = getattr(layer, "to_q", None) or getattr(layer, "q", None)
    return known or projection.weight.shape[0] // getattr(layer, "num_heads", 1)


def check_name(name: str) -> None:
    """Raises ValueError if there is no attention of this name."""
    kind, _, number = name.partition(":")
    if name not in names() and not (kind == "sliced" and number.isdecimal() and int(number) > 0):
        raise ValueError(f"unknown attention {name!r:.60}: expected one of {', '.join(names())}, or sliced:4")


def attention_function(name: str, device: torch.device, dtype: torch.dtype, head_dim: int) -> AttentionFn:
    """Return the function with a name, or "sliced:n", after a trial run on this device and dtype.

    "mha" and "fastest" are not functions of q, k and v: see use.  Raises ValueError if the name is unknown or does not
    run here.
    """
    check_name(name)
    if name.startswith("sliced:"):
        return functools.partial(sliced, num_slices=int(name.partition(":")[2]))
    function = _FUNCTIONS[name]
    if device.type != "meta" and not _runs(function, device, dtype, head_dim):
        others = ", ".join(available(device, dtype, head_dim))
        raise ValueError(
            f"attention {name!r} is not available on {device} in {short_name(dtype)} for heads of {head_dim} "
            f"channels: use one of {others}"
        )
    return function


def available(device: torch.device, dtype: torch.dtype, head_dim: int = 64) -> list[str]:
    """Return the names that run on a device, in a dtype, for heads of this many channels."""
    return [name for name in names() if name not in _FUNCTIONS or _runs(_FUNCTIONS[name], device, dtype, head_dim)]


def _runs(function: AttentionFn, device: torch.device, dtype: torch.dtype, head_dim: int) -> bool:
    q = torch.zeros(1, 1, 16, head_dim, device=device, dtype=dtype)
    try:
        function(q, q, q)
    # The last two: it is not in this torch, or lacks a package.
    except (RuntimeError, NotImplementedError, AttributeError, ImportError):
        return False
    return True


def use(
    network: nn.Module, attention: str | AttentionFn, device: torch.device | None = None, pattern: str = "*"
) -> None:
    """Set the attention of a network's layers: a registered name, "sliced:n", or a function of q, k and v.

    pattern chooses layers, as for `record`.  device is where the network computes, if its weights are elsewhere.  Call
    it before compilation.  Raises ValueError, with nothing changed, if a layer cannot run it.
    """
    if not isinstance(attention, str) and not callable(attention):
        raise TypeError(f"got attention {attention!r}, expected a name or a function of q, k and v")
    chosen = matching_layers(network, pattern)
    if attention == "mha":
        if lacks := [name for name, layer in chosen.items() if not hasattr(layer, "to_q")]:
            raise ValueError(f"attention 'mha' needs layers with to_q, to_k and to_v; {lacks[0]} has none: use sdpa")
        for layer in chosen.values():
            patch(layer, _mha)
        return
    functions: dict[int, AttentionFn] = {}  # by the channels of a head; all are tried before a layer changes
    if isinstance(attention, str) and attention != "fastest":
        first = next(network.parameters())
        for channels in set(map(head_dim, chosen.values())):
            functions[channels] = attention_function(attention, device or first.device, first.dtype, channels)
    for layer in chosen.values():
        if patch_of(layer) is _mha:
            unpatch(layer)
        if callable(attention):
            layer.attention = attention
        else:
            layer.attention = Fastest(layer) if attention == "fastest" else functions[head_dim(layer)]


def use_like(network: nn.Module, template: nn.Module) -> None:
    """Copy the attention of another network, layer by layer and by name: a ControlNet uses its UNet's."""
    theirs_by_name = layers(template)
    for name, layer in layers(network).items():
        theirs = theirs_by_name[name].attention
        layer.attention = Fastest(layer) if isinstance(theirs, Fastest) else theirs
        if patch_of(theirs_by_name[name]) is _mha:
            patch(layer, _mha)


def in_float32(network: AnyNetwork, device: torch.device) -> AnyNetwork:
    """Return a copy of a network in float32 on a device; attention for half precision only becomes PyTorch's."""
    whole = copy.deepcopy(network).to(device, torch.float32)
    for layer in layers(whole).values():
        if is_stateless(layer.attention) and not _runs(layer.attention, device, torch.float32, head_dim(layer)):
            layer.attention = sdpa
    return whole


@contextlib.contextmanager
def record(network: nn.Module, pattern: str = "*") -> Iterator[dict[str, list[Tensor]]]:
    """Record attention maps by layer name: within the block each call of a layer appends one (B,H,N,M) tensor.

    pattern is a layer's name, with or without wildcards: "*attn2" is every cross-attention of a UNet.  In guided steps
    the first half of the batch is uncond's, the second cond's.  A map is large (N times M): choose few layers, or empty
    the lists.  For one thread at a time, since the network's own layers record.  Raises ValueError if no layer matches.
    """
    chosen = matching_layers(network, pattern)
    maps: dict[str, list[Tensor]] = {name: [] for name in chosen}
    before = {name: layer.attention for name, layer in chosen.items()}
    with contextlib.ExitStack() as stack:
        for name, layer in chosen.items():
            stack.enter_context(unpatched(layer))  # mha makes no maps
            layer.attention = functools.partial(_recorded, maps[name].append)
        try:
            yield maps
        finally:
            for name, function in before.items():
                chosen[name].attention = function


def _recorded(keep: Callable[[Tensor], None], q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    weights = probabilities(q, k)
    keep(weights)
    return weights @ v
