"""Trained changes (kinds.py) of the frozen layers of networks, in the layout of kohya's and LyCORIS's files."""

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ldm_lite import Pipeline
from ldm_lite.networks import lora_layers
from ldm_lite.runtime.patching import patch, unpatch
from ldm_lite.train.kinds import KINDS


class Place(NamedTuple):
    """A weight that is changed: of a layer, or rows of OpenCLIP's joined one of queries, keys and values."""

    layer: nn.Module
    rows: slice | None = None

    @property
    def weight(self) -> Tensor:
        """(out,in), or (out,in,1,1) of a convolution."""
        name = "weight" if self.rows is None else "in_proj_weight"
        return self.layer.get_parameter(name)[self.rows or slice(None)]

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
    ) -> None:
        """networks by role ("unet", "text_encoder"); alpha defaults to the rank; factor is LoKr's.

        Raises ValueError if rank < 1.
        """
        super().__init__()
        if rank < 1:
            raise ValueError(f"got a LoRA rank of {rank}, wanted 1 or more")
        self.kind, self.rank, self.alpha = kind, rank, float(rank) if alpha is None else alpha
        more = {"factor": factor} if kind == "lokr" else {}
        for name, place in _places(networks).items():
            self.add_module(name, KINDS[kind](place.weight, rank, self.alpha, **more).to(place.weight.device))

    def attach(self, networks: Mapping[str, nn.Module]) -> "AttachedLoRA":
        """Add these changes to networks with the same layers, and freeze the networks, until remove().

        Raises ValueError, with nothing changed, if they have other layers.
        """
        return AttachedLoRA(self, networks)


class AttachedLoRA:
    """A LoRA attached to networks, until remove() or the end of a `with` block."""

    def __init__(self, lora: LoRA, networks: Mapping[str, nn.Module]) -> None:
        """As LoRA.attach."""
        places, changes = _places(networks), dict(lora.named_children())
        if places.keys() != changes.keys():
            name = min(places.keys() ^ changes.keys())
            raise ValueError(f"the LoRA was made for networks with other layers: {name} is in only one of them")
        parameters = [p for network in networks.values() for p in network.parameters()]
        self._unfrozen = [p.requires_grad_(False) for p in parameters if p.requires_grad]
        self._active = True
        self._undo: list[Callable[[], None]] = []
        joined: dict[nn.Module, list[tuple[Place, nn.Module]]] = {}
        for name, place in places.items():
            if place.rows is None:
                hook = functools.partial(self._add, place, changes[name])
                self._undo.append(place.layer.register_forward_hook(hook).remove)
            else:
                joined.setdefault(place.layer, []).append((place, changes[name]))
        for layer, parts in joined.items():
            patch(layer, functools.partial(_attend, self, parts))
            self._undo.append(functools.partial(unpatch, layer))

    def _add(self, place: Place, change: nn.Module, layer: nn.Module, args: tuple[Tensor, ...], out: Tensor) -> Tensor:
        """Forward hook of a layer."""
        return out + self.added(place, change, args[0], out) if self._active else out

    def added(self, place: Place, change: nn.Module, x: Tensor, out: Tensor) -> Tensor:
        """Return what a change adds to a layer's output."""
        return change(x, place.weight.flatten(1), out, place.bias)

    @contextlib.contextmanager
    def off(self) -> Iterator[None]:
        """Within the block the networks run without the changes."""
        self._active = False
        try:
            yield
        finally:
            self._active = True

    @property
    def active(self) -> bool:
        """Whether the networks run with the changes."""
        return self._active

    def remove(self) -> None:
        """Detach the LoRA: the networks run as before, and the frozen parameters require gradients again."""
        for undo in self._undo:
            undo()
        for parameter in self._unfrozen:
            parameter.requires_grad_(True)
        self._undo, self._unfrozen = [], []

    def __enter__(self) -> "AttachedLoRA":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.remove()


def _attend(attached: AttachedLoRA, parts: Sequence[tuple[Place, nn.Module]], attention: Any, x: Tensor) -> Tensor:
    """Forward of OpenCLIP's attention with changes of its queries, keys and values."""
    qkv = F.linear(x, attention.in_proj_weight, attention.in_proj_bias)  # (B, T, 3 * D)
    if attached.active:
        rows = [attached.added(place, change, x, qkv[..., place.rows]) for place, change in parts]
        qkv = qkv + torch.cat(rows, dim=-1)
    return attention.attend(qkv)


def _places(networks: Mapping[str, nn.Module]) -> dict[str, Place]:
    """Return the weights that are changed, by kohya's names, the rows of a joined one in their order."""
    return {name: Place(layer, rows) for name, (layer, rows) in lora_layers(networks).items()}


def kohya_file(lora: nn.Module, model: Pipeline) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return the tensors (float16, on the CPU) and the metadata of a LoRA file, from a LoRA or its EMA, for a model."""
    assert isinstance(lora, LoRA)
    second = model.family.unet.context_dim == 1024
    version = ("sd_v2" + "_v" * (model.schedule.prediction == "v")) if second else "sd_v1"
    version = {"flux": "flux1", "sd3": "sd3", "z_image": "zimage", "sdxl": "sdxl_base_v1-0"}.get(
        model.family.conditioner, version
    )
    metadata = {
        "ss_network_module": "networks.lora" if lora.kind == "lora" else "lycoris.kohya",
        "ss_network_dim": str(lora.rank),
        "ss_network_alpha": f"{lora.alpha:g}",
        "ss_v2": str(second),
        "ss_base_model_version": version,
        "ss_sd_model_name": model.name,
    }
    if lora.kind != "lora":
        algorithm = {"dora": "lora"}.get(lora.kind, lora.kind)
        metadata["ss_network_args"] = f'{{"algo": "{algorithm}"' + ', "dora_wd": "True"' * (lora.kind == "dora") + "}"
    return {key: value.to("cpu", torch.float16).contiguous() for key, value in lora.state_dict().items()}, metadata
