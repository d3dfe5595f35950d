"""LoRA training: low-rank layers added to the frozen layers of a network, in the layout of kohya's files.

Trains every linear layer and 1x1 convolution of the UNet's transformers, and on request those of the text encoder's
layers: the same modules as kohya's networks/lora.py; of FLUX.1 and Stable Diffusion 3 all linear layers of the blocks.
Hu et al. 2021.
"""

import contextlib
import functools
import math
from collections.abc import Iterator, Mapping
from types import TracebackType

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ldm_lite.checkpoint.lora import file_names
from ldm_lite.checkpoint.model import Model
from ldm_lite.models.clip import EncoderLayer
from ldm_lite.models.flux import DoubleStreamBlock, SingleStreamBlock
from ldm_lite.models.mmdit import JointBlock
from ldm_lite.models.transformer import SpatialTransformer


class LoRALinear(nn.Module):
    """alpha / rank * up(down(x)), to be added to the output of a linear layer or 1x1 convolution; 0 at first."""

    def __init__(self, layer: nn.Linear | nn.Conv2d, rank: int, alpha: float) -> None:
        super().__init__()
        if isinstance(layer, nn.Linear):
            self.lora_down: nn.Module = nn.Linear(layer.in_features, rank, bias=False)
            self.lora_up: nn.Module = nn.Linear(rank, layer.out_features, bias=False)
        else:
            self.lora_down = nn.Conv2d(layer.in_channels, rank, 1, bias=False)
            self.lora_up = nn.Conv2d(rank, layer.out_channels, 1, bias=False)
        nn.init.kaiming_uniform_(self.lora_down.weight, a=math.sqrt(5))
        nn.init.zeros_(self.lora_up.weight)
        self.register_buffer("alpha", torch.tensor(float(alpha)))
        self.scale = alpha / rank

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * self.lora_up(self.lora_down(x))


class LoRA(nn.Module):
    """The LoRA layers of some networks, by kohya's names: its state dict is the content of a LoRA file.

    The networks do not use it until attach().  It holds no reference to them, so a deep copy copies only LoRA weights.
    """

    def __init__(self, networks: Mapping[str, nn.Module], rank: int, alpha: float | None = None) -> None:
        """networks by role ("unet", "text_encoder"); alpha defaults to the rank.  Raises ValueError if rank < 1."""
        super().__init__()
        if rank < 1:
            raise ValueError(f"got a LoRA rank of {rank}, wanted 1 or more")
        self.rank, self.alpha = rank, float(rank) if alpha is None else alpha
        for name, layer in _targets(networks).items():
            self.add_module(name, LoRALinear(layer, rank, self.alpha).to(layer.weight.device))

    def attach(self, networks: Mapping[str, nn.Module]) -> "AttachedLoRA":
        """Add these layers to networks with the LoRA's layers, and freeze the networks, until remove().

        Raises ValueError, with nothing changed, if they have other layers.
        """
        return AttachedLoRA(self, networks)

    @contextlib.contextmanager
    def using(self, other: nn.Module) -> Iterator[None]:
        """Within this block, hold the weights of a copy of this LoRA, such as its EMA."""
        own = {key: value.clone() for key, value in self.state_dict().items()}
        self.load_state_dict(other.state_dict())
        try:
            yield
        finally:
            self.load_state_dict(own)


class AttachedLoRA:
    """A LoRA attached to networks, until remove() or the end of a `with` block."""

    def __init__(self, lora: LoRA, networks: Mapping[str, nn.Module]) -> None:
        """As LoRA.attach."""
        targets = _targets(networks)
        layers = {name: each for name, each in lora.named_children() if isinstance(each, LoRALinear)}
        if targets.keys() != layers.keys():
            name = min(targets.keys() ^ layers.keys())
            raise ValueError(f"the LoRA was made for networks with other layers: {name} is in only one of them")
        parameters = [p for network in networks.values() for p in network.parameters()]
        self._unfrozen = [p.requires_grad_(False) for p in parameters if p.requires_grad]
        self._hooks: list[RemovableHandle] = [
            layer.register_forward_hook(functools.partial(_add, layers[name])) for name, layer in targets.items()
        ]

    def remove(self) -> None:
        """Detach the LoRA: the networks run as before, and the frozen parameters require gradients again."""
        for hook in self._hooks:
            hook.remove()
        for parameter in self._unfrozen:
            parameter.requires_grad_(True)
        self._hooks, self._unfrozen = [], []

    def __enter__(self) -> "AttachedLoRA":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.remove()


def _targets(networks: Mapping[str, nn.Module]) -> dict[str, nn.Linear | nn.Conv2d]:
    """Return the layers that a LoRA changes, by kohya's names."""
    found = {}
    for role, network in networks.items():
        names = file_names(role, network)
        for outer, part in network.named_modules():
            if isinstance(part, (SpatialTransformer, EncoderLayer, DoubleStreamBlock, SingleStreamBlock, JointBlock)):
                for inner, layer in part.named_modules():
                    if isinstance(layer, (nn.Linear, nn.Conv2d)):
                        found[names[f"{outer}.{inner}"][0]] = layer
    return found


def _add(lora: LoRALinear, layer: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> Tensor:
    """Forward hook of a layer: add the LoRA's output."""
    return output + lora(args[0])


def kohya_file(lora: nn.Module, model: Model) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return the tensors (float16, on the CPU) and the metadata of a LoRA file, from a LoRA or its EMA, for a model."""
    assert isinstance(lora, LoRA)
    second = model.family.unet.context_dim == 1024
    version = ("sd_v2" + "_v" * (model.schedule.prediction == "v")) if second else "sd_v1"
    version = {"flux": "flux1", "sd3": "sd3"}.get(model.family.conditioner, version)
    metadata = {
        "ss_network_module": "networks.lora",
        "ss_network_dim": str(lora.rank),
        "ss_network_alpha": f"{lora.alpha:g}",
        "ss_v2": str(second),
        "ss_base_model_version": version,
        "ss_sd_model_name": model.name,
    }
    return {key: value.to("cpu", torch.float16).contiguous() for key, value in lora.state_dict().items()}, metadata
