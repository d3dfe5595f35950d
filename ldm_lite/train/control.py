"""Training a ControlNet: a copy of the UNet's encoder, beside the frozen UNet, that reads an image of its own."""

import torch
from torch import Tensor, nn

from ldm_lite import Pipeline
from ldm_lite.models.controlnet import ControlNet


def new_control(model: Pipeline) -> ControlNet:
    """Return a ControlNet for a model: its UNet's weights, a new embedding of the image, and outputs that are 0.

    Zhang et al. 2023, sec. 3.1.
    """
    with torch.device(model.device):
        network = ControlNet(model.family.unet)
    new, unet = network.state_dict(), model.unet.state_dict()
    network.load_state_dict({key: unet.get(key, value).float() for key, value in new.items()})
    for part in (network.input_hint_block[-1], network.zero_convs, network.middle_block_out):
        for parameter in part.parameters():
            nn.init.zeros_(parameter)
    return network.requires_grad_(True)


def control_file(network: nn.Module) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return the tensors (float16, on the CPU) and the metadata of a ControlNet's file in the original layout."""
    values = network.state_dict().items()
    return {f"control_model.{key}": value.to("cpu", torch.float16).contiguous() for key, value in values}, {}
