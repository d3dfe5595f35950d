"""Low-rank factors to train beside the frozen layers of a network, in the layout of kohya's files.

What is trained: every linear and 1x1 convolution of the UNet's transformers and, if wanted, of the text encoder's
layers, as kohya's networks/lora.py chooses them.  Hu et al. 2021.
"""

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor, nn

from ldm_lite.checkpoint.lora import file_names
from ldm_lite.models.clip import EncoderLayer
from ldm_lite.models.transformer import SpatialTransformer
from ldm_lite.pipeline import Pipeline


class Factors(nn.Module):
    """x -> alpha / rank * up(down(x)), beside one linear or 1x1 convolution; 0 to begin with."""

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


class LowRank(nn.Module):
    """The factors of some networks by kohya's names, so that its state dict is what a LoRA file holds.

    The networks are frozen, and compute with the factors for as long as this module is there.
    """

    def __init__(self, networks: Mapping[str, nn.Module], rank: int, alpha: float | None) -> None:
        """networks by role ("unet", "text_encoder"); alpha None is the rank.  Raises ValueError for a rank below 1."""
        super().__init__()
        if rank < 1:
            raise ValueError(f"got a LoRA rank of {rank}, wanted 1 or more")
        self.rank, self.alpha = rank, float(rank) if alpha is None else alpha
        for role, network in networks.items():
            network.requires_grad_(False).eval()
            names = file_names(role, network)
            for name, layer in _layers(network):
                factors = Factors(layer, rank, self.alpha).to(layer.weight.device)
                self.add_module(names[name][0], factors)
                layer.register_forward_hook(_add(factors))

    @contextlib.contextmanager
    def using(self, other: nn.Module) -> Iterator[None]:
        """In this block the networks compute with the values of a copy of this module, its average for instance."""
        own = {key: value.clone() for key, value in self.state_dict().items()}
        self.load_state_dict(other.state_dict())
        try:
            yield
        finally:
            self.load_state_dict(own)


def _layers(network: nn.Module) -> Iterator[tuple[str, nn.Linear | nn.Conv2d]]:
    for outer, part in network.named_modules():
        if isinstance(part, (SpatialTransformer, EncoderLayer)):
            for inner, layer in part.named_modules():
                if isinstance(layer, (nn.Linear, nn.Conv2d)):
                    yield f"{outer}.{inner}", layer


def _add(factors: Factors) -> Callable[[nn.Module, tuple[Tensor, ...], Tensor], Tensor]:
    return lambda layer, args, output: output + factors(args[0])


def file(pipe: Pipeline, lora: nn.Module) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The tensors (float16, on the CPU) and the metadata of the file of a LowRank, or a copy of it, for a pipeline."""
    assert isinstance(lora, LowRank)
    second = pipe.family.unet.context_dim == 1024
    version = ("sd_v2" + "_v" * (pipe.schedule.prediction == "v")) if second else "sd_v1"
    about = {
        "ss_network_module": "networks.lora",
        "ss_network_dim": str(lora.rank),
        "ss_network_alpha": f"{lora.alpha:g}",
        "ss_v2": str(second),
        "ss_base_model_version": version,
        "ss_sd_model_name": pipe.name,
    }
    return {key: value.to("cpu", torch.float16).contiguous() for key, value in lora.state_dict().items()}, about
