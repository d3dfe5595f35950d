"""Kinds of change of a weight: LoRA, LoHa, LoKr, GLoRA, OFT, BOFT, IA3, and DoRA on top of LoRA, LoHa or LoKr.

Each is made from its parts in a file, as float32 matrices, and knows the shape of the weight that it changes, as far as
its parts show it: -1 is any size, and the sizes of a convolution's kernel may be part of the second.  LyCORIS's OFT and
BOFT rotate the rows of a weight, PEFT's the columns, in a convolution of (out, in * k * k).

Shape letters: r rank, n in * k * k (in for a linear), b size of a block.
Source: kohya-ss/sd-scripts networks/lora.py; LyCORIS modules/locon.py, loha.py, lokr.py, glora.py, diag_oft.py,
boft.py, ia3.py, functional/general.py; PEFT tuners/lora/dora.py, oft/layer.py, boft/layer.py, ia3/layer.py.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

Parts = Mapping[str, Tensor]


@dataclass(frozen=True)
class Settings:
    """What a configuration says about a module besides the file's tensors."""

    alpha: Callable[[int], float]  # rank -> alpha; 0 -> the scale, where no factor has a rank
    peft: Mapping[str, Any]  # settings of PEFT, by name; without them "writer": "ComfyUI", or None for others


def _low_rank(up: Tensor, down: Tensor, core: Tensor | None) -> Tensor:
    """up (out,r) @ down (r,n): (out,n); with a core (r,r,k,k) up is (r,out), down (r,in), the result (out,in,k,k)."""
    if core is None:
        return up.float() @ down.float()
    return torch.einsum("ij...,ip,jr->pr...", core.float(), up.float(), down.float())


def _low_rank_shape(up: Tensor, down: Tensor, core: Tensor | None) -> tuple[int, ...]:
    fits = up.ndim == down.ndim == 2 and (
        up.shape[1] == len(down) if core is None else core.ndim == 4 and core.shape[:2] == (len(up), len(down))
    )
    _check(fits, up, down, core)
    return (len(up), down.shape[1]) if core is None else (up.shape[1], down.shape[1], *core.shape[2:])


def _rows(tensor: Tensor) -> Tensor:
    return tensor.reshape(len(tensor), -1)


def _check(fits: bool, *parts: Tensor | None) -> None:
    """Raise ValueError, with the sizes of the parts, unless they fit together."""
    if not fits:
        sizes = ", ".join(" x ".join(map(str, part.shape)) for part in parts if part is not None)
        raise ValueError(f"its parts do not fit together ({sizes}): the file is damaged")


@dataclass(frozen=True)
class LoRA:
    """Adds alpha / r * up @ down, or up * mid * down, to a weight.  Hu et al. 2021, eq. 3."""

    shape: tuple[int, ...]  # of the weight; linears may be stored as 1x1 convolutions
    factors: tuple[Tensor, Tensor, Tensor | None]  # up (out,r), down (r,n) and None; or as LoHa's, with a core
    scale: float

    @staticmethod
    def of(parts: Parts, settings: Settings) -> "LoRA":
        """Make it from a file's parts: up (out,r,...), down (r,in,...), or those of an embedding, which are transposed.

        The dots are 1 in convolutions, except the kernel of down, or of mid (r,r,k,k) if there is one.
        """
        up, down = (parts["up"], parts["down"]) if "up" in parts else (parts["table_A"].T, parts["table_B"].T)
        mid = parts.get("mid")
        fits = {up.ndim, down.ndim} <= {2, 4} and up.shape[1] == len(down) and set(up.shape[2:]) <= {1}
        if mid is not None:
            fits = fits and mid.ndim == 4 and mid.shape[:2] == (len(down), len(down)) and set(down.shape[2:]) <= {1}
        _check(fits, down, up, mid)
        shape = (len(up), down.shape[1], *(down if mid is None else mid).shape[2:])
        up = up.flatten(1) if mid is None else up.flatten(1).T
        return LoRA(shape, (up, down.flatten(1), mid), settings.alpha(len(down)) / len(down))

    def change(self, parameter: Tensor) -> Tensor:
        """Return the change, which does not depend on the parameter."""
        return self.scale * _low_rank(*self.factors).reshape(self.shape)


@dataclass(frozen=True)
class LoHa:
    """Adds alpha / r * (w1_a w1_b) * (w2_a w2_b), element by element.  Hyeon-Woo et al. 2022, eq. 2."""

    shape: tuple[int, ...]  # of the weight: (out,n) or (out,in,k,k)
    first: tuple[Tensor, Tensor, Tensor | None]  # w1_a (out,r), w1_b (r,n), and t1 (r,r,k,k) or None
    second: tuple[Tensor, Tensor, Tensor | None]
    scale: float

    @staticmethod
    def of(parts: Parts, settings: Settings) -> "LoHa":
        """Make it from a file's parts."""
        names = [(f"hada_w{i}_a", f"hada_w{i}_b", f"hada_t{i}") for i in (1, 2)]  # OneTrainer's have kernels
        first, second = ((_rows(parts[a]), _rows(parts[b]), parts.get(core)) for a, b, core in names)
        shape = _low_rank_shape(*first)
        _check(shape == _low_rank_shape(*second), *first, *second)
        rank = len(first[1])
        return LoHa(shape, first, second, settings.alpha(rank) / rank)

    def change(self, parameter: Tensor) -> Tensor:
        """Return the change, which does not depend on the parameter."""
        return self.scale * _low_rank(*self.first) * _low_rank(*self.second)


@dataclass(frozen=True)
class LoKr:
    """Adds alpha / r * kron(w1, w2), of which either may be a product of low rank.  Yeh et al. 2024, sec. 3."""

    shape: tuple[int, ...]  # of the weight: (out,n) or (out,in,k,k)
    first: Tensor  # (a,c)
    second: Tensor  # (b,d), (b,d*k*k) or (b,d,k,k)
    scale: float

    @staticmethod
    def of(parts: Parts, settings: Settings) -> "LoKr":
        """Make it from a file's parts."""
        factors, rank = [], 0
        for name, core in (("lokr_w1", None), ("lokr_w2", parts.get("lokr_t2"))):
            if name in parts:
                factors.append(parts[name].float())
                continue
            up, down = parts[f"{name}_a"], parts[f"{name}_b"]
            _low_rank_shape(up, down, core)
            factors.append(_low_rank(up, down, core))
            rank = rank or len(down)
        first, second = factors
        _check(first.ndim == 2 and second.ndim in (2, 4), first, second)
        (a, c), (b, d, *kernel) = first.shape, second.shape
        return LoKr((a * b, c * d, *kernel), first, second, settings.alpha(rank) / (rank or 1))

    def change(self, parameter: Tensor) -> Tensor:
        """Return the change, which does not depend on the parameter."""
        first = self.first.reshape(*self.first.shape, *[1] * (self.second.ndim - 2))
        return self.scale * torch.kron(first, self.second.contiguous())


@dataclass(frozen=True)
class GLoRA:
    """Adds alpha / r * (W a1 a2 + b1 b2).  Chavan et al. 2023."""

    shape: tuple[int, ...]  # of the weight: (out,n) or (out,in,k,k)
    inside: tuple[Tensor, Tensor]  # a1 (in,r), a2 (r,in)
    beside: tuple[Tensor, Tensor, Tensor | None]  # b1 (out,r), b2 (r,n), and bm (r,r,k,k) or None
    scale: float

    @staticmethod
    def of(parts: Parts, settings: Settings) -> "GLoRA":
        """Make it from a file's parts."""
        a1, a2, b1, b2 = (_rows(parts[f"glora_{name}"]) for name in ("a1", "a2", "b1", "b2"))
        if (core := parts.get("glora_bm")) is not None:
            b1 = b1.T  # as LoHa's
        shape = _low_rank_shape(b1, b2, core)
        _check(_low_rank_shape(a1, a2, None) == (a2.shape[1], a2.shape[1]), a1, a2)
        return GLoRA(shape, (a1, a2), (b1, b2, core), settings.alpha(len(a2)) / len(a2))

    def change(self, parameter: Tensor) -> Tensor:
        """Return the change of a weight."""
        a1, a2 = (factor.float().to(parameter.device) for factor in self.inside)
        inside = torch.einsum("oi...,ij,jl->ol...", parameter, a1, a2)
        return self.scale * (inside + _low_rank(*self.beside).reshape(parameter.shape).to(parameter.device))


@dataclass(frozen=True)
class OFT:
    """Rotates blocks of rows of a weight: OFT, Qiu et al. 2023, or in stages of a butterfly: BOFT, Liu et al. 2024."""

    shape: tuple[int, ...]  # (out,-1): the number of rows of the weight
    blocks: Tensor  # (out/b,b,b), or (stages,out/b,b,b)
    rescale: Tensor | None  # (out,) or with sizes of 1: factors of the rows
    limit: float  # of the norm of all blocks, 0 = none

    @staticmethod
    def of(parts: Parts, settings: Settings) -> "OFT":
        """Make it from a file's parts, whose alpha is the limit, divided by the number of rows except in ComfyUI."""
        blocks, rescale = parts["oft_blocks"], parts.get("rescale")
        size = blocks.shape[-1]
        rows = blocks.shape[-3] * size if blocks.ndim in (3, 4) and blocks.shape[-2] == size else 0
        stages = blocks.ndim == 3 or (size % 2 == 0 and rows % 2 ** len(blocks) == 0)
        _check(rows > 0 and stages and (rescale is None or rescale.numel() == rows), blocks, rescale)
        limit = float(parts["alpha"]) if "alpha" in parts else 0.0
        return OFT((rows, -1), blocks, rescale, limit if settings.peft.get("writer") == "ComfyUI" else limit * rows)

    def change(self, parameter: Tensor) -> Tensor:
        """Return the change of a weight."""
        blocks = self.blocks.float().to(parameter.device)
        skew, eye = blocks - blocks.transpose(-1, -2), torch.eye(blocks.shape[-1], device=blocks.device)
        if 0 < self.limit < (norm := skew.norm() + 1e-8):
            skew = skew * self.limit / norm
        rotations = (eye + skew) @ torch.linalg.inv(eye - skew)  # Cayley's
        rows = parameter.flatten(1)
        if rotations.ndim == 3:
            rows = (rotations.transpose(1, 2) @ rows.view(*rotations.shape[:2], -1)).flatten(0, 1)
        else:
            for stage, rotation in enumerate(rotations):
                half, width = 2**stage * blocks.shape[-1] // 2, rows.shape[1]  # rows this far apart meet in a block
                rows = rotation @ rows.view(-1, 2, half, width).transpose(1, 2).reshape(*rotation.shape[:2], width)
                rows = rows.view(-1, half, 2, width).transpose(1, 2).reshape(-1, width)
        if self.rescale is not None:
            rows = rows * self.rescale.float().to(rows.device).reshape(-1, 1)
        return rows.view_as(parameter) - parameter


TERMS = 5  # of the Neumann series, unless the configuration says otherwise


def _rotated(columns: Tensor, rotations: Tensor) -> Tensor:
    """Rotate blocks of columns (out,n) by rotations (n/b,b,b)."""
    blocks = columns.view(len(columns), len(rotations), -1)
    return torch.einsum("okc,kdc->okd", blocks, rotations).flatten(1)


def _cayley(skew: Tensor) -> Tensor:
    """Return the rotations (I - Q) (I + Q)^-1 of skew-symmetric matrices Q (...,b,b)."""
    eye = torch.eye(skew.shape[-1], device=skew.device)
    return torch.linalg.solve(eye + skew, eye - skew, left=False)


def _series(skew: Tensor, terms: int) -> Tensor:
    """Return I + 2 Q + 2 Q^2 + ... + Q^(terms - 1), with PEFT's signs; from 3 terms it adds 4 at least."""
    terms = terms if terms < 3 else max(terms, 4)
    total = power = torch.eye(skew.shape[-1], device=skew.device).expand_as(skew)
    for exponent in range(1, terms):
        power = power @ skew
        total = total + (1 if exponent == terms - 1 > 1 else 2) * power
    return total


@dataclass(frozen=True)
class ColumnOFT:
    """Rotates blocks of columns: OFT, Qiu et al. 2023."""

    shape: tuple[int, ...]  # (-1,n), the columns of the weight; (-1,-b) if its blocks share one rotation: a multiple
    size: int  # b
    angles: Tensor  # (n/b,b*(b-1)/2) or, for all blocks, (1,b*(b-1)/2): the upper triangles of Q
    limit: float | None  # of the norm of Q, times the root of the number of blocks: COFT
    terms: int | None  # of the Neumann series of (I - Q) (I + Q)^-1; None = exactly
    kernels_turn_back: bool  # in convolutions the rotations are transposed

    @staticmethod
    def of(parts: Parts, settings: Settings) -> "ColumnOFT":
        """Make it from a file's parts; the configuration has the limit and the series.

        OneTrainer writes no configuration, may divide the angles, and transposes the rotations of convolutions.
        """
        about, angles = settings.peft, parts["oft_R"]
        terms = about.get("num_cayley_neumann_terms", TERMS) if about.get("use_cayley_neumann", True) else None
        size = (1 + math.isqrt(1 + 8 * angles.shape[-1])) // 2
        _check(angles.ndim == 2 and size * (size - 1) // 2 == angles.shape[1], angles)
        angles = angles / (2 * math.sqrt(size - 1)) if "scaled_oft" in parts else angles
        columns = -size if len(angles) == 1 else len(angles) * size
        limit = about.get("eps", 6e-5) if about.get("coft") else None
        return ColumnOFT((-1, columns), size, angles, limit, terms, kernels_turn_back="writer" in about)

    def change(self, parameter: Tensor) -> Tensor:
        """Return the change of a weight."""
        columns, size = parameter.flatten(1), self.size
        skew = torch.zeros(len(self.angles), size, size, device=parameter.device)
        rows, upper = torch.triu_indices(size, size, 1)
        skew[:, rows, upper] = self.angles.float().to(parameter.device)
        skew = skew - skew.transpose(1, 2)
        skew = -skew if self.kernels_turn_back and parameter.ndim == 4 else skew
        if self.limit is not None:
            most = self.limit / math.sqrt(len(skew))
            skew = skew * (most / skew.flatten(1).norm(dim=1).clamp(min=most)).view(-1, 1, 1)
        rotations = _cayley(skew) if self.terms is None else _series(skew, self.terms)
        return _rotated(columns, rotations.expand(columns.shape[1] // size, -1, -1)).view_as(parameter) - parameter


@dataclass(frozen=True)
class ColumnBOFT:
    """Rotates blocks of columns in stages of a butterfly, and scales the rows: BOFT, Liu et al. 2024."""

    shape: tuple[int, ...]  # of the weight: (out,n)
    blocks: Tensor  # (stages,n/b,b,b)
    scales: Tensor  # (out,)

    @staticmethod
    def of(parts: Parts, settings: Settings) -> "ColumnBOFT":
        """Make it from a file's parts."""
        blocks, scales = parts["boft_R"], parts["boft_s"]
        stages = len(blocks)
        fits = blocks.ndim == 4 and blocks.shape[2] == blocks.shape[3] and max(scales.shape) == scales.numel()
        in_stages = fits and (stages == 1 or (blocks.shape[2] % 2 == 0 and blocks.shape[1] % 2 ** (stages - 1) == 0))
        _check(in_stages, blocks, scales)
        return ColumnBOFT((scales.numel(), blocks.shape[1] * blocks.shape[-1]), blocks, scales.flatten())

    def change(self, parameter: Tensor) -> Tensor:
        """Return the change of a weight."""
        blocks, size = self.blocks.float().to(parameter.device), self.blocks.shape[-1]
        columns = parameter.flatten(1)
        order = torch.arange(columns.shape[1], device=columns.device)
        for stage, rotation in enumerate(_cayley(0.5 * (blocks - blocks.transpose(-1, -2)))):
            if len(blocks) > 1:  # columns 2^stage halves of a block apart meet
                order = torch.arange(columns.shape[1], device=columns.device).view(-1, 2**stage, 2, size // 2)
                order = order.transpose(1, 2).flatten()
            columns = _rotated(columns[:, order.argsort()], rotation)[:, order]
        return (columns * self.scales.float().to(columns.device).view(-1, 1)).view_as(parameter) - parameter


@dataclass(frozen=True)
class IA3:
    """Scales the rows or the columns of a weight, or a bias, by 1 + s.  Liu et al. 2022, sec. 3.3."""

    shape: tuple[int, ...]  # (out,-1) or (-1,in,-1) of a weight, (out,) of a bias
    scales: Tensor  # (out,) or (in,)
    columns: bool
    optional: bool = False  # of a bias that the module may lack

    @staticmethod
    def of(parts: Parts, settings: Settings) -> "IA3":
        """Make it from a file's parts; LyCORIS stores s, PEFT 1 + s."""
        if "ia3_l" not in parts:
            return IA3.scaling(parts["ia3"].flatten(), bool(parts["on_input"]))
        factors = parts["ia3_l"]
        if max(factors.shape) != factors.numel():
            raise ValueError(f"its part ia3_l is {' x '.join(map(str, factors.shape))}: the file is damaged")
        columns = factors.ndim == 2 and len(factors) == 1
        if factors.ndim != 2:  # of a convolution, whose shape does not show it
            if "feedforward" not in settings.peft:
                raise ValueError("is of IA3, whose adapter_config.json says what it scales: keep it beside the file")
            columns = bool(settings.peft["feedforward"])
        return IA3.scaling(factors.flatten().float() - 1, columns)

    @staticmethod
    def scaling(scales: Tensor, columns: bool) -> "IA3":
        """Scale the columns, or the rows, of a weight."""
        return IA3((-1, len(scales), -1) if columns else (len(scales), -1), scales, columns)

    def change(self, parameter: Tensor) -> Tensor:
        """Return the change of a weight."""
        scales = self.scales.float().to(parameter.device)
        return parameter * scales.view([-1 if i == int(self.columns) else 1 for i in range(parameter.ndim)])


@dataclass(frozen=True)
class DoRA:
    """Gives each row (or column) of the changed weight its own length: m (W + dW) / |W + dW|.  Liu et al. 2024."""

    shape: tuple[int, ...]  # of the weight
    inner: Any  # the change dW: LoRA's, LoHa's or LoKr's
    lengths: Tensor  # (out,1,...), (1,in,...), or PEFT's (out,) and (1,out,1,1)
    of_columns: bool

    @staticmethod
    def around(inner: Any, parts: Parts) -> "DoRA":
        """Make it from a change and a file's parts."""
        lengths = parts["magnitude"] if "magnitude" in parts else parts["dora_scale"]
        of_columns = "magnitude" not in parts and lengths.ndim > 1 and len(lengths) == 1 < lengths.shape[1]
        of_columns = of_columns or "table_A" in parts  # of an embedding
        wanted = inner.shape[1 if of_columns else 0]  # columns may be times the positions of a kernel
        _check(wanted % lengths.numel() == 0 and (of_columns or wanted == lengths.numel()), lengths)
        return DoRA(tuple(inner.shape), inner, lengths.flatten(), of_columns)

    def change(self, parameter: Tensor) -> Tensor:
        """Return the change of a weight."""
        total = parameter + self.inner.change(parameter).reshape(parameter.shape).to(parameter.device)
        axis = 1 if self.of_columns else 0
        norms = total.transpose(0, axis).flatten(1).norm(dim=1) + torch.finfo(torch.float32).eps
        factors = self.lengths.float().to(norms.device) / norms
        return total * factors.view([-1 if i == axis else 1 for i in range(total.ndim)]) - parameter


# By the part that identifies the kind: all parts that it must have, and those that it may have.
_KINDS: dict[str, tuple[Any, tuple[str, ...], tuple[str, ...]]] = {
    "up": (LoRA, ("up", "down"), ("mid", "up_b")),
    "table_A": (LoRA, ("table_A", "table_B"), ()),
    "hada_w1_a": (LoHa, ("hada_w1_a", "hada_w1_b", "hada_w2_a", "hada_w2_b"), ("hada_t1", "hada_t2")),
    "lokr_w": (LoKr, (), ("lokr_w1", "lokr_w1_a", "lokr_w1_b", "lokr_w2", "lokr_w2_a", "lokr_w2_b", "lokr_t2")),
    "glora_a1": (GLoRA, ("glora_a1", "glora_a2", "glora_b1", "glora_b2"), ("glora_bm",)),
    "oft_blocks": (OFT, ("oft_blocks",), ("rescale",)),
    "on_input": (IA3, ("on_input", "ia3"), ()),
    "oft_R": (ColumnOFT, ("oft_R",), ("scaled_oft",)),  # PEFT's, from here on
    "boft_R": (ColumnBOFT, ("boft_R", "boft_s"), ()),
    "ia3_l": (IA3, ("ia3_l",), ()),
}
PARTS = frozenset(part for _, need, may in _KINDS.values() for part in (*need, *may))


def make_changes(parts: Parts, settings: Settings) -> dict[str, Any]:
    """Return the changes that the parts of a module make, by parameter; none if their kind is unknown.

    Raises ValueError if parts or settings are missing, or if parts do not fit together or belong to two kinds.
    """
    kinds = [(kind, need) for kind, need, may in _KINDS.values() if parts.keys() & {*need, *may}]
    if not kinds:
        return {}
    if len(kinds) > 1:
        raise ValueError(f"changes its weight twice ({', '.join(sorted(parts.keys() & PARTS))}): the file is damaged")
    kind, need = kinds[0]
    if kind is LoKr:
        need = tuple(n for name in ("lokr_w1", "lokr_w2") if name not in parts for n in (f"{name}_a", f"{name}_b"))
    if lacking := [part for part in need if part not in parts]:
        raise ValueError(f"lacks its part {lacking[0]}: the file is damaged")
    change = kind.of(parts, settings)
    if "ia3_l" in parts and not change.columns:  # PEFT scales what the module computes, with its bias
        return {"weight": change, "bias": replace(change, shape=(len(change.scales),), optional=True)}
    return {"weight": change}
