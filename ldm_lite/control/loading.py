"""The networks of controls: read from their files, checked against the model's UNet, and set up as it is."""

import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from ldm_lite.checkpoint.diffusers_folder import open_source
from ldm_lite.checkpoint.model import Model
from ldm_lite.checkpoint.reader import load_weights, on_meta, split
from ldm_lite.control.control import Control, unit_pixels
from ldm_lite.image import clip_crop
from ldm_lite.models.clip_vision import CLIPVisionEncoder, CLIPVisionSpec
from ldm_lite.models.controlnet import ControlNet, infer_spec
from ldm_lite.models.shapes import Shapes
from ldm_lite.models.style_adapter import StyleAdapter, StyleAdapterSpec
from ldm_lite.models.t2i_adapter import AdapterSpec, T2IAdapter
from ldm_lite.models.unet import UNet, UNetSpec
from ldm_lite.runtime.attention import layers
from ldm_lite.runtime.offload import Offloader
from ldm_lite.runtime.setup import prepare_like

log = logging.getLogger("ldm_lite")


@dataclass(frozen=True, eq=False)
class LoadedControl:
    """A control with its network; a style adapter's is what it makes of the image, of any size: tokens (1,T,C)."""

    control: Control
    network: ControlNet | T2IAdapter | Tensor


def load_controls(
    model: Model, controls: Sequence[Control], clip_vision: str | os.PathLike[str] | None = None
) -> list[LoadedControl]:
    """Load what the controls name, in the model's dtype, onto its device: whole, or block by block as its UNet.

    clip_vision is the file of CLIP's image encoder, which style adapters need.  Raises FileNotFoundError or ValueError,
    one line, for files that hold no control, or one for another UNet.
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
    with on_meta():
        vision = CLIPVisionEncoder(CLIPVisionSpec.from_shapes(components["vision"].shapes))
    load_weights(vision, components["vision"], "image encoder", model.device, model.dtype)
    return vision


@torch.no_grad()
def _tokens(network: StyleAdapter, vision: CLIPVisionEncoder | None, control: Control) -> Tensor:
    """What a style adapter makes of its image, once a job: tokens (1,T,C), times its weight."""
    assert vision is not None
    if vision.spec.width != network.spec.width:
        raise ValueError(
            f"{control.source}: needs an image encoder {network.spec.width} wide, got one of {vision.spec.width}"
        )
    pixels = unit_pixels(clip_crop(control.rgb(), vision.spec.size))
    return control.weight * network(vision(pixels.to(network.proj)))


def _load(model: Model, control: Control) -> tuple[Control, ControlNet | T2IAdapter | StyleAdapter]:
    """A control's network; and the control, with what the network's own configuration asks for."""
    if model.unet not in control.networks:
        control.networks[model.unet] = _read(model, control.source)
    network, pools = control.networks[model.unet]
    return replace(control, pool=True) if pools else control, network


def _read(model: Model, source: str | os.PathLike[str]) -> tuple[ControlNet | T2IAdapter | StyleAdapter, bool]:
    """The network in a file, ready to run with the model, and whether its configuration says that it pools."""
    components = split(open_source(source))
    role = next((role for role in ("control", "adapter", "style") if role in components), None)
    if role is None:
        raise ValueError(f"{source}: holds no ControlNet and no T2I-Adapter, only {', '.join(components)}")
    found = components[role]
    try:
        with on_meta():
            network = _build(model, role, found.shapes)
    except (KeyError, IndexError) as error:
        reason = f"is missing: {error.args[0]}" if isinstance(error, KeyError) else "has another shape"
        raise ValueError(f"{source}: a tensor that every such network has {reason}") from error
    except ValueError as error:
        raise ValueError(f"{source}: {error}") from error
    # A style adapter computes at once, and goes.
    by_block = role != "style" and model.offloader is not None and model.offloader.offload == "sequential"
    home = torch.device("cpu") if by_block else model.device
    load_weights(network, found, "control", home, model.dtype)
    if "difference" in found.checkpoint.shapes:
        _add_base(network, model)
        log.info("%s: holds differences, added to the checkpoint's own UNet", found.checkpoint.path.name)
    if isinstance(network, ControlNet):
        prepare_like(network, model.unet)
    if by_block:  # all weights of these networks are in blocks, so there is no phase to enter
        Offloader({"control": network}, model.device, offload="sequential", storage=None)
    pools = found.checkpoint.metadata.get("global_pool_conditions") == "True"  # of a diffusers folder
    if pools:
        log.info("%s: averages over the image, as its configuration says", source)
    return network, pools


def _build(model: Model, role: str, shapes: Shapes) -> ControlNet | T2IAdapter | StyleAdapter:
    """The network of a role with weights of these shapes.

    Raises KeyError if one is missing, and ValueError if it is for UNets of another kind.
    """
    unet = model.family.unet
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
    """What a ControlNet and its UNet must have in common, where the ControlNet has it at all."""
    widths = tuple(spec.model_channels * mult for mult in spec.channel_mult)
    own = {"context": spec.context_dim, "vector": spec.vector_dim}
    return {**own, "levels": widths, "residual blocks": spec.num_res_blocks}


def _check_fit(model: Model, numbers: Mapping[str, object]) -> None:
    """Raises ValueError if the numbers of a control are not those of its UNet."""
    own = _numbers(model.family.unet)
    for name, wanted in numbers.items():
        if wanted not in (None, own[name]):
            about = f"with {name} {wanted}{KNOWN.get(name, '')}, but that of {model.family.title} has {own[name]}"
            raise ValueError(f"is for UNets {about}")


def _add_base(network: nn.Module, model: Model) -> None:
    """Turn a control's differences from the UNet's weights into weights, wherever the UNet's are kept."""
    base = dict(model.unet.named_parameters())
    for key, value in network.state_dict().items():
        if key in base:
            own = base[key].data if model.offloader is None else model.offloader.read(base[key], value.device)
            value.copy_(value.float() + own.float())
