"""What is trained beside a frozen model, and its files: LoRAs and similar adapters, textual inversion, ControlNets."""

import contextlib
import functools
import json
import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional as F

from ldm_lite import Pipeline
from ldm_lite.core.denoise import to_device
from ldm_lite.models.clip import num_known
from ldm_lite.models.controlnet import ControlNet
from ldm_lite.models.open_clip import OpenCLIPTextSpec
from ldm_lite.networks import lora_layers, token_tables
from ldm_lite.runtime.patching import patch, unpatch
from ldm_lite.train.batches import Draws, bits_of, fraction, seed_of

log = logging.getLogger("ldm_lite")

Content = tuple[dict[str, Tensor], dict[str, str]]  # tensors and metadata of a file

# ---- changes of a frozen layer --------------------------------------------------------------------------------------
#
# Their parameters have the names of LyCORIS's files.  A change is called with a layer's input x, its frozen weight W
# (out,in), its output and its bias, and returns what is to be added to the output; it is 0 at first.  Layers are
# linears, x (...,in), or 1x1 convolutions, x (B,in,h,w).  Shape letters: r rank; LoKr's W is the Kronecker product of
# (a,c) and (b,d), out = a b, in = c d.  Initial values of a change are drawn from a generator on the CPU.


class LowRank(nn.Module):
    """alpha / r * up(down(x)).  Hu et al. 2021, eq. 3."""

    def __init__(self, weight: Tensor, rank: int, alpha: float, generator: torch.Generator) -> None:
        """weight (out,in) or (out,in,1,1) of the layer."""
        super().__init__()
        out, width = weight.shape[:2]
        with torch.device("meta"):  # where nothing is drawn
            if weight.ndim == 2:
                self.lora_down: nn.Module = nn.Linear(width, rank, bias=False)
                self.lora_up: nn.Module = nn.Linear(rank, out, bias=False)
            else:
                self.lora_down = nn.Conv2d(width, rank, (weight.shape[2], weight.shape[3]), bias=False)
                self.lora_up = nn.Conv2d(rank, out, 1, bias=False)
        self.to_empty(device="cpu")
        nn.init.kaiming_uniform_(self.lora_down.get_parameter("weight"), a=math.sqrt(5), generator=generator)
        nn.init.zeros_(self.lora_up.get_parameter("weight"))
        self.register_buffer("alpha", torch.tensor(float(alpha)))
        self.scale, self.dropout = alpha / rank, 0.0
        self.keys: Tensor | None = None  # (B,) int64, of a step's examples: which inner values are left out

    def forward(self, x: Tensor, weight: Tensor, out: Tensor, bias: Tensor | None) -> Tensor:
        up, down = (layer.get_parameter("weight").flatten(1) for layer in (self.lora_up, self.lora_down))
        return _times(self.scale * self.dropped(_times(x, down)), up)

    def convolved(self, x: Tensor, layer: nn.Conv2d) -> Tensor:
        """Return the term to add to the output of a convolution of any size."""
        y = F.conv2d(x, self.lora_down.get_parameter("weight"), None, layer.stride, layer.padding)
        return F.conv2d(self.scale * self.dropped(y), self.lora_up.get_parameter("weight"))

    def dropped(self, y: Tensor) -> Tensor:
        """Drop values, only in training steps: the same ones when activations are recomputed."""
        if self.keys is None or not torch.is_grad_enabled():
            return y
        drawn = fraction(bits_of(self.keys, math.ceil(y.numel() / len(self.keys)))).flatten()
        return y * (drawn[: y.numel()].view(y.shape) > self.dropout) / (1 - self.dropout)


class DoRA(LowRank):
    """m (W + BA) / |W + BA|, with a trained length m (out,) of each row and the norm as a constant in gradients.

    Liu et al. 2024, eq. 5 and sec. 4.3.
    """

    def __init__(self, weight: Tensor, rank: int, alpha: float, generator: torch.Generator) -> None:
        super().__init__(weight, rank, alpha, generator)
        lengths = weight.detach().float().flatten(1).norm(dim=1)
        self.dora_scale = nn.Parameter(lengths.view(-1, *[1] * (weight.ndim - 1)).clone())

    def forward(self, x: Tensor, weight: Tensor, out: Tensor, bias: Tensor | None) -> Tensor:
        with torch.no_grad():
            up, down = (layer.get_parameter("weight").flatten(1) for layer in (self.lora_up, self.lora_down))
            norm = (weight.to(up.dtype) + self.scale * up @ down).norm(dim=1)
        factor = self.dora_scale.flatten() / norm
        factor, shape = (factor[:, None, None], (-1, 1, 1)) if self.dora_scale.ndim == 4 else (factor, (-1,))
        base = out if bias is None else out - bias.view(shape)
        return (factor - 1) * base + factor * super().forward(x, weight, out, bias)


class LoHa(nn.Module):
    """alpha / r * (w1_a w1_b) * (w2_a w2_b), multiplied element by element.  Hyeon-Woo et al. 2022, eq. 2."""

    def __init__(self, weight: Tensor, rank: int, alpha: float, generator: torch.Generator) -> None:
        super().__init__()
        out, width = weight.shape[:2]
        self.hada_w1_a, self.hada_w2_a = (nn.Parameter(torch.zeros(out, rank)) for _ in range(2))
        self.hada_w1_b, self.hada_w2_b = (nn.Parameter(torch.zeros(rank, width)) for _ in range(2))
        for parameter, std in ((self.hada_w1_b, 1.0), (self.hada_w2_b, 1.0), (self.hada_w1_a, 0.1)):
            nn.init.normal_(parameter, std=std, generator=generator)
        self.register_buffer("alpha", torch.tensor(float(alpha)))
        self.scale = alpha / rank

    def forward(self, x: Tensor, weight: Tensor, out: Tensor, bias: Tensor | None) -> Tensor:
        change = (self.hada_w1_a @ self.hada_w1_b) * (self.hada_w2_a @ self.hada_w2_b)
        return _times(x, self.scale * change)


class LoKr(nn.Module):
    """alpha / r * kron(w1, w2_a w2_b), or kron(w1, w2) if r is no less than half of w2.  Yeh et al. 2024."""

    def __init__(
        self, weight: Tensor, rank: int, alpha: float, generator: torch.Generator, factor: int = -1
    ) -> None:  # fmt: skip
        super().__init__()
        (a, b), (c, d) = (factorised(size, factor) for size in weight.shape[:2])
        self.lokr_w1 = nn.Parameter(torch.empty(a, c))
        nn.init.kaiming_uniform_(self.lokr_w1, a=math.sqrt(5), generator=generator)
        self.full = rank >= max(b, d) / 2
        if self.full:
            self.lokr_w2 = nn.Parameter(torch.zeros(b, d, *weight.shape[2:]))
        else:
            self.lokr_w2_a, self.lokr_w2_b = nn.Parameter(torch.empty(b, rank)), nn.Parameter(torch.zeros(rank, d))
            nn.init.kaiming_uniform_(self.lokr_w2_a, a=math.sqrt(5), generator=generator)
        self.scale = 1.0 if self.full else alpha / rank
        self.register_buffer("alpha", torch.tensor(float(rank if self.full else alpha)))  # LyCORIS reads it so

    def forward(self, x: Tensor, weight: Tensor, out: Tensor, bias: Tensor | None) -> Tensor:
        w2 = self.lokr_w2.flatten(1) if self.full else self.lokr_w2_a @ self.lokr_w2_b
        channels_first = x.ndim == 4
        x = x.movedim(1, -1) if channels_first else x
        rows = F.linear(x.reshape(*x.shape[:-1], -1, w2.shape[1]), w2)  # (...,c,b)
        y = self.scale * (self.lokr_w1 @ rows).flatten(-2)  # (...,a,b) -> (...,out)
        return y.movedim(-1, 1) if channels_first else y


ADDITIONS: dict[str, type[LowRank | LoHa | LoKr]] = {"lora": LowRank, "dora": DoRA, "loha": LoHa, "lokr": LoKr}


def factorised(size: int, factor: int) -> tuple[int, int]:
    """Return (small, large) with small * large = size: small is `factor` if that divides it, else the largest below.

    -1 is as near to a square as possible.
    """
    if factor > 0 and size % factor == 0:
        return min(factor, size // factor), max(factor, size // factor)
    most = math.isqrt(size) if factor < 0 else min(factor, math.isqrt(size))
    small = next(divisor for divisor in range(most, 0, -1) if size % divisor == 0)
    return small, size // small


def _times(x: Tensor, weight: Tensor) -> Tensor:
    """Multiply the channels of x (...,in) or (B,in,h,w) by a weight (out,in)."""
    return F.linear(x.movedim(1, -1), weight).movedim(-1, 1) if x.ndim == 4 else F.linear(x, weight)


# ---- LoRAs ----------------------------------------------------------------------------------------------------------


class ChangedWeight(NamedTuple):
    """A weight that is changed: of a layer, or rows of OpenCLIP's joined queries, keys and values."""

    layer: nn.Module
    rows: slice | None = None

    @property
    def weight(self) -> Tensor:
        """(out,in), or (out,in,1,1) of a convolution."""
        name = "weight" if self.rows is None else "in_proj_weight"
        weight: Tensor = getattr(self.layer, name)  # may not be a parameter while it runs: see Offloader.differentiable
        return weight[self.rows or slice(None)]

    @property
    def bias(self) -> Tensor | None:
        """(out,), if there is one."""
        bias: Tensor | None = getattr(self.layer, "bias" if self.rows is None else "in_proj_bias")
        return None if bias is None else bias[self.rows or slice(None)]


class LoRA(nn.Module):
    """The changes of some networks' layers, by kohya's names: its state dict is the content of a file.

    The networks do not use them until attach().  It holds no reference to them, so a deep copy copies only its weights.
    """

    def __init__(
        self,
        networks: Mapping[str, nn.Module],
        rank: int,
        alpha: float | None = None,
        kind: str = "lora",
        factor: int = -1,
        conv: int | None = None,
        dropout: float = 0.0,
        seed: int = 0,
    ) -> None:
        """networks by role ("unet", "text_encoder"); alpha defaults to the rank; factor is LoKr's.

        conv is the rank of convolutions larger than 1x1, if they have any; dropout is a fraction of inner values; seed
        is that of the initial weights.

        Raises ValueError if rank < 1.
        """
        super().__init__()
        if rank < 1:
            raise ValueError(f"got a LoRA rank of {rank}, expected 1 or more")
        self.kind, self.rank, self.alpha = kind, rank, float(rank) if alpha is None else alpha
        self.conv, self.dropout, more = conv, dropout, {"factor": factor} if kind == "lokr" else {}
        generator = torch.Generator().manual_seed(seed_of(seed, "a LoRA's weights"))
        for name, place in _places(networks, conv).items():
            is_large = conv is not None and place.weight.shape[2:].numel() > 1
            size, scale = (conv or 0, float(conv or 0) if alpha is None else alpha) if is_large else (rank, self.alpha)
            change = ADDITIONS[kind](place.weight, size, scale, generator, **more).to(place.weight.device)
            if isinstance(change, LowRank):
                change.dropout = dropout
            self.add_module(name, change)

    def at_step(self, draws: Draws) -> None:
        """Let dropout depend on these examples of a run only, however they are divided into batches."""
        if self.dropout:
            keys = to_device(draws.keys("dropout"), next(self.parameters()).device)
            for name, change in self.named_children():
                change.keys = keys + seed_of(draws.seed, name)

    def attach(self, networks: Mapping[str, nn.Module]) -> "AttachedLoRA":
        """Add these changes to networks with the same layers, and freeze the networks, until remove().

        Raises ValueError, with nothing changed, if they have other layers.
        """
        return AttachedLoRA(self, networks)


class AttachedLoRA(contextlib.ExitStack):
    """A LoRA attached to networks, until remove() or the end of a `with` block."""

    def __init__(self, lora: LoRA, networks: Mapping[str, nn.Module]) -> None:
        """As LoRA.attach."""
        super().__init__()
        places, changes = _places(networks, lora.conv), dict(lora.named_children())
        if places.keys() != changes.keys():
            name = min(places.keys() ^ changes.keys())
            raise ValueError(f"the LoRA was made for networks with other layers: {name} is in only one of them")
        self.active = True  # whether the networks run with the changes
        for parameter in (p for network in networks.values() for p in network.parameters() if p.requires_grad):
            self.callback(parameter.requires_grad_)
            parameter.requires_grad_(False)
        joined: dict[nn.Module, list[tuple[ChangedWeight, nn.Module]]] = {}
        for name, place in places.items():
            if place.rows is None:
                hook = functools.partial(self._add, place, changes[name])
                self.callback(place.layer.register_forward_hook(hook).remove)
            else:
                joined.setdefault(place.layer, []).append((place, changes[name]))
        for layer, parts in joined.items():
            patch(layer, functools.partial(self._attend, parts))
            self.callback(unpatch, layer)

    def _add(
        self, place: ChangedWeight, change: nn.Module, layer: nn.Module, args: tuple[Tensor, ...], out: Tensor
    ) -> Tensor:
        """Forward hook of a layer."""
        return out + self.added(place, change, args[0], out) if self.active else out

    def _attend(self, parts: Sequence[tuple[ChangedWeight, nn.Module]], attention: Any, x: Tensor) -> Tensor:
        """Forward of OpenCLIP's attention with changes of its queries, keys and values."""
        qkv = F.linear(x, attention.in_proj_weight, attention.in_proj_bias)  # (B, T, 3 * D)
        if self.active:
            rows = [self.added(place, change, x, qkv[..., place.rows]) for place, change in parts]
            qkv = qkv + torch.cat(rows, dim=-1)
        return attention.attend(qkv)

    def added(self, place: ChangedWeight, change: nn.Module, x: Tensor, out: Tensor) -> Tensor:
        """Return the term that a change adds to a layer's output."""
        if isinstance(place.layer, nn.Conv2d) and place.weight.shape[2:].numel() > 1 and isinstance(change, LowRank):
            return change.convolved(x, place.layer)
        return change(x, place.weight.flatten(1), out, place.bias)

    @contextlib.contextmanager
    def off(self) -> Iterator[None]:
        """Within the block the networks run without the changes."""
        self.active = False
        try:
            yield
        finally:
            self.active = True

    def remove(self) -> None:
        """Detach the LoRA: the networks run as before, and the frozen parameters require gradients again."""
        self.close()


def _places(networks: Mapping[str, nn.Module], conv: int | None) -> dict[str, ChangedWeight]:
    """Return the weights that are changed, by kohya's names, the rows of a joined one in their order."""
    return {name: ChangedWeight(layer, rows) for name, (layer, rows) in lora_layers(networks, conv is not None).items()}


def load_lora(lora: LoRA, path: Path) -> None:
    """Begin with the weights of a file.  Raises ValueError, one line, if it holds another kind of LoRA; OSError."""
    try:
        weights = {key: value.float() for key, value in load_file(path).items()}
        for key, value in lora.state_dict().items():
            if key.endswith(".alpha") and float(weights[key]) != float(value):
                raise ValueError(f"its alpha is {float(weights[key]):g}: give it as `lora_alpha`")
        lora.load_state_dict(weights)
    except (ValueError, KeyError, RuntimeError, SafetensorError) as error:
        line = (str(error).splitlines() or [""])[-1].strip()
        raise ValueError(f"{path}: is not a LoRA of the same layers, kind and rank ({line:.200})") from error


def kohya_file(lora: nn.Module, model: Pipeline) -> Content:
    """Return the tensors (float16, on the CPU) and the metadata of a LoRA file, from a LoRA or its EMA, for a model."""
    assert isinstance(lora, LoRA)
    second = isinstance(model.family.text, OpenCLIPTextSpec)  # Stable Diffusion 2.x reads OpenCLIP
    version = model.family.base_version + "_v" * (second and model.schedule.prediction == "v")
    metadata = {
        "ss_network_module": "networks.lora" if lora.kind == "lora" else "lycoris.kohya",
        "ss_network_dim": str(lora.rank),
        "ss_network_alpha": f"{lora.alpha:g}",
        "ss_v2": str(second),
        "ss_base_model_version": version,
        "ss_sd_model_name": model.name,
    }
    arguments: dict[str, str] = {}
    if lora.conv is not None:
        alpha = lora.conv if lora.alpha == lora.rank else lora.alpha
        arguments = {"conv_dim": str(lora.conv), "conv_alpha": f"{alpha:g}"}
    if lora.kind != "lora":
        arguments = {"algo": "lora", "dora_wd": "True"} if lora.kind == "dora" else {"algo": lora.kind}
    metadata |= {"ss_network_args": json.dumps(arguments)} if arguments else {}
    return {key: value.to("cpu", torch.float16).contiguous() for key, value in lora.state_dict().items()}, metadata


# ---- textual inversion ----------------------------------------------------------------------------------------------


class Vectors(nn.Module):
    """The vectors (n,D) of one name, for each text encoder of width D.  Gal et al. 2022."""

    def __init__(self, model: Pipeline, word: str, count: int) -> None:
        """They start as the vectors of a word's tokens, repeated.  Raises ValueError for a word without tokens."""
        super().__init__()
        assert model.tokenizer is not None
        ids = replace(model.tokenizer, added=()).encode(word)
        if not ids:
            raise ValueError(f"got `init_word` {word!r}, expected a word that CLIP knows, such as 'cat'")
        if len(ids) > count:
            log.warning(
                "%r has %d tokens, of which the first %d are used: give `vectors=%d`", word, len(ids), count, len(ids)
            )
        chosen = torch.tensor([ids[i % len(ids)] for i in range(count)])
        self.vectors = nn.ParameterDict(
            {
                str(table.shape[1]): nn.Parameter(table[chosen.to(table.device)].float().clone())
                for table in token_tables(model)
            }
        )

    def known_to(self, model: Pipeline, name: str) -> Pipeline:
        """Return the model whose prompts know the name: changes of the vectors take effect at once."""
        assert model.tokenizer is not None
        first = num_known(max(map(len, token_tables(model))))
        count = len(next(iter(self.vectors.values())))
        tokenizer = replace(model.tokenizer, added=((name, tuple(range(first, first + count))),))
        return replace(model, tokenizer=tokenizer, learned={int(width): rows for width, rows in self.vectors.items()})


def embedding_file(vectors: nn.Module, model: Pipeline) -> Content:
    """Return the tensors (float32, on the CPU) and the metadata of a file in the layout of kohya's."""
    assert isinstance(vectors, Vectors)
    values = [rows.detach().to("cpu", torch.float32).contiguous() for rows in vectors.vectors.values()]
    names = ("emb_params",) if len(values) == 1 else ("clip_l", "clip_g")
    return dict(zip(names, values, strict=True)), {"ss_sd_model_name": model.name}


# ---- ControlNets ----------------------------------------------------------------------------------------------------


def new_control(model: Pipeline, seed: int = 0) -> ControlNet:
    """Return a ControlNet for a model, to be trained beside its UNet: a copy of the encoder that reads an image.

    It has the UNet's weights, a new embedding of the image, drawn as torch does, and outputs that are 0.  Zhang et al.
    2023, sec. 3.1.
    """
    with torch.device("meta"):
        network = ControlNet(model.family.unet)
    generator = torch.Generator().manual_seed(seed_of(seed, "a ControlNet's weights"))
    unet, weights = model.unet.state_dict(), dict[str, Tensor]()
    for name, parameter in network.named_parameters():
        weights[name] = unet[name].float().clone() if name in unet else torch.zeros(parameter.shape)
    *hidden, _ = network.input_hint_block.named_children()
    for place, layer in hidden:
        if isinstance(layer, nn.Conv2d):
            most = layer.weight[0].numel() ** -0.5
            for kind in ("weight", "bias"):
                weights[f"input_hint_block.{place}.{kind}"].uniform_(-most, most, generator=generator)
    network.load_state_dict(weights, assign=True)
    return network.to(model.device).requires_grad_(True)


def control_file(network: nn.Module, model: Pipeline) -> Content:
    """Return the tensors (float16, on the CPU) and the metadata of a ControlNet's file in the original layout."""
    values = network.state_dict().items()
    return {f"control_model.{key}": value.to("cpu", torch.float16).contiguous() for key, value in values}, {}
