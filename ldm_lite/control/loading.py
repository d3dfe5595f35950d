"""Load the networks of controls, check that they fit the model's UNet, and set them up like it."""

import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from ldm_lite.checkpoint.diffusers_folder import open_source
from ldm_lite.checkpoint.model import Model
from ldm_lite.checkpoint.reader import errors_of, load_weights, on_meta, split
from ldm_lite.control.control import Control, unit_pixels
from ldm_lite.image import clip_crop
from ldm_lite.models.clip_vision import CLIPVisionEncoder, CLIPVisionSpec
from ldm_lite.models.controlnet import ControlNet, infer_spec
from ldm_lite.models.shapes import Shapes
from ldm_lite.models.style_adapter import StyleAdapter, StyleAdapterSpec
from ldm_lite.models.t2i_adapter import AdapterSpec, T2IAdapter
from ldm_lite.models.unet import UNet, UNetSpec
from ldm_lite.runtime.attention import layers
from ldm_lite.runtime.blocks import BlockLinear
from ldm_lite.runtime.offload import Offloader
from ldm_lite.runtime.setup import prepare_like

log = logging.getLogger("ldm_lite")


@dataclass(frozen=True, eq=False)
class LoadedControl:
    """A control with its network, or, for a style adapter, with the tokens (1,T,C) computed from its image."""

    control: Control
    network: ControlNet | T2IAdapter | Tensor


def load_controls(
    model: Model, controls: Sequence[Control], clip_vision: str | os.PathLike[str] | None = None
) -> list[LoadedControl]:
    """Load the controls' networks, in the model's dtype, onto its device: whole, or offloaded by block like its UNet.

    clip_vision is the file of CLIP's image encoder, which style adapters need.  Raises FileNotFoundError or ValueError,
    one line, for files that hold no control, or one for a different UNet.
    """
    if not controls and clip_vision is None:
        return []
    if not isinstance(model.unet, UNet):
        raise ValueError(f"{model.family.title} has no UNet that a control could act on")
    loaded = [_load(model, control) for control in controls]
    styles = any(isinstance(network, StyleAdapter) for _, network in loaded)
    if styles != (clip_vision is not None):
        raise ValueError(
            "a style adapter needs CLIP ViT-L/14's image encoder: give its file with `clip_vision=FILE`, for instance "
            "openai/clip-vit-large-patch14/model.safetensors"
            if styles
            else "got `clip_vision`, which only a `control` with a style adapter uses: leave it out"
        )
    vision = None if clip_vision is None else _load_vision(model, clip_vision)
    return [
        LoadedControl(control, _tokens(network, vision, control) if isinstance(network, StyleAdapter) else network)
        for control, network in loaded
    ]


def _load_vision(model: Model, source: str | os.PathLike[str]) -> CLIPVisionEncoder:
    components = split(open_source(source))
    if "vision" not in components:
        raise ValueError(
            f"{source}: holds no CLIP image encoder in Hugging Face's format, only {', '.join(components)}"
        )
    with errors_of(source), on_meta():
        vision = CLIPVisionEncoder(CLIPVisionSpec.from_shapes(components["vision"].shapes))
    load_weights(vision, components["vision"], "image encoder", model.device, model.dtype)
    return vision


@torch.no_grad()
def _tokens(network: StyleAdapter, vision: CLIPVisionEncoder | None, control: Control) -> Tensor:
    """Compute a style adapter's tokens (1,T,C), times its weight, once per job."""
    assert vision is not None
    if vision.spec.width != network.spec.width:
        raise ValueError(
            f"{control.source}: needs an image encoder {network.spec.width} wide, got one of {vision.spec.width}"
        )
    pixels = unit_pixels(clip_crop(control.rgb(), vision.spec.size))
    return control.weight * network(vision(pixels.to(network.proj)))


def _load(model: Model, control: Control) -> tuple[Control, ControlNet | T2IAdapter | StyleAdapter]:
    """Load a control's network; return the control, updated from the network's configuration, and the network."""
    if model.unet not in control.networks:
        control.networks[model.unet] = _read(model, control.source)
    network, pools = control.networks[model.unet]
    return replace(control, pool=True) if pools else control, network


def _read(model: Model, source: str | os.PathLike[str]) -> tuple[ControlNet | T2IAdapter | StyleAdapter, bool]:
    """Read a network, ready to run with the model, and whether its configuration asks for pooling."""
    components = split(open_source(source))
    role = next((role for role in ("control", "adapter", "style") if role in components), None)
    if role is None:
        raise ValueError(f"{source}: holds no ControlNet and no T2I-Adapter, only {', '.join(components)}")
    found = components[role]
    with errors_of(source), on_meta():
        network = _build(model, role, found.shapes)
        _check_heads(model.family.unet, found.checkpoint.metadata)
    # A style adapter runs now and is freed.
    by_block = role != "style" and model.offloader is not None and model.offloader.offload == "sequential"
    home = torch.device("cpu") if by_block else model.device
    load_weights(network, found, "control", home, model.dtype)
    if "difference" in found.checkpoint.shapes:
        _add_base(network, model)
        log.info("%s: holds differences, added to the checkpoint's own UNet", found.checkpoint.path.name)
    if isinstance(network, ControlNet):
        prepare_like(network, model.unet, model.device)
    if by_block:  # all weights of these networks are in blocks, so there is no phase to enter
        Offloader({"control": network}, model.device, offload="sequential", storage=None)
    pools = found.checkpoint.metadata.get("global_pool_conditions") == "True"  # in a diffusers folder
    if pools:
        log.info("%s: averages over the image, as its configuration says", source)
    return network, pools


def _build(model: Model, role: str, shapes: Shapes) -> ControlNet | T2IAdapter | StyleAdapter:
    """Build the network of a role for weights of these shapes.

    Raises ValueError if they make no sense, or are for UNets of another kind.
    """
    unet = model.family.unet
    if not isinstance(unet, UNetSpec):
        raise ValueError(f"is for UNets, but {model.family.title} is a transformer, for which there is no control here")
    if role == "adapter":
        return T2IAdapter(AdapterSpec.from_shapes(shapes, len(unet.channel_mult)))
    if role == "style":
        style = StyleAdapterSpec.from_shapes(shapes)
        _check_fit(model, {"context": style.context_dim})
        return StyleAdapter(style)
    spec = replace(infer_spec(shapes), num_heads=unet.num_heads, head_dim=unet.head_dim)
    _check_fit(model, _numbers(spec))
    if spec.in_channels > unet.in_channels:
        raise ValueError(f"reads {spec.in_channels} channels, but the UNet of {model.family.title} {unet.in_channels}")
    network = ControlNet(spec)
    if beyond := layers(network).keys() - layers(model.unet).keys():
        raise ValueError(f"has attention where the UNet of {model.family.title} has none: {min(beyond)}")
    return network


KNOWN = {"context": " (768: Stable Diffusion 1, 1024: 2, 2048: XL)", "vector": " (2816: Stable Diffusion XL)"}


def _numbers(spec: UNetSpec) -> dict[str, object]:
    """Return the sizes that must be equal in a ControlNet and its UNet, if the ControlNet has them at all."""
    widths = tuple(spec.model_channels * mult for mult in spec.channel_mult)
    own = {"context": spec.context_dim, "vector": spec.vector_dim}
    return {**own, "levels": widths, "residual blocks": spec.num_res_blocks}


def _check_fit(model: Model, numbers: Mapping[str, object]) -> None:
    """Raises ValueError if these sizes of a control differ from its UNet's."""
    own = _numbers(model.family.unet)
    for name, wanted in numbers.items():
        if wanted not in (None, own[name]):
            about = f"with {name} {wanted}{KNOWN.get(name, '')}, but that of {model.family.title} has {own[name]}"
            raise ValueError(f"is for UNets {about}")


def _check_heads(unet: UNetSpec, about: Mapping[str, str]) -> None:
    """Raises ValueError if a diffusers folder's configuration gives a control other heads than its UNet has."""
    for width in {
        unet.model_channels * m for m, depth in zip(unet.channel_mult, unet.transformer_depth, strict=True) if depth
    }:
        own = {"unet_num_heads": unet.heads(width), "unet_head_dim": width // unet.heads(width)}
        if wrong := [key for key in own.keys() & about.keys() if int(about[key]) != own[key]]:
            raise ValueError(
                f"its attention_head_dim gives {wrong[0][5:]} {about[wrong[0]]}, but its UNet has {own[wrong[0]]}"
            )


def _add_base(network: nn.Module, model: Model) -> None:
    """Add the UNet's weights, wherever they are stored, to a control that holds differences from them."""
    base = dict(model.unet.named_parameters())
    in_blocks = {f"{name}.weight": each for name, each in model.unet.named_modules() if isinstance(each, BlockLinear)}
    for key, value in network.state_dict().items():
        if key in base:
            own = base[key].data if model.offloader is None else model.offloader.read(base[key], value.device)
            value.copy_(value.float() + own.float())
        elif key in in_blocks:
            value.copy_(value.float() + in_blocks[key].weight.to(value.device, torch.float32))
