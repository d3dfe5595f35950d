"""Load the networks of controls, check that they fit the model's UNet, and set them up like it."""

import logging
import os
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from PIL import Image
from torch import Tensor, nn

from ldm_lite.checkpoint.model import Model
from ldm_lite.checkpoint.reader import errors_of, load_weights, on_meta, open_source, split
from ldm_lite.control.control import Control, unit_pixels
from ldm_lite.control.low_rank import MARK, differences
from ldm_lite.core.layers import Shapes
from ldm_lite.image import clip_crop
from ldm_lite.models.clip_vision import CLIPVisionEncoder, CLIPVisionSpec
from ldm_lite.models.controlnet import ControlNet, infer_spec
from ldm_lite.models.flux import Flux, FluxSpec
from ldm_lite.models.ip_adapter import Images, IPAdapter, IPAdapterSpec
from ldm_lite.models.redux import Redux, ReduxSpec, SiglipSpec, SiglipVisionEncoder
from ldm_lite.models.style_adapter import StyleAdapter, StyleAdapterSpec
from ldm_lite.models.t2i_adapter import AdapterSpec, T2IAdapter
from ldm_lite.models.unet import UNet, UNetSpec
from ldm_lite.runtime.attention import layers
from ldm_lite.runtime.blocks import BlockLinear
from ldm_lite.runtime.offload import Offloader
from ldm_lite.runtime.setup import prepare_like

log = logging.getLogger("ldm_lite")


Network = ControlNet | T2IAdapter | StyleAdapter | IPAdapter | Redux
Seer = CLIPVisionEncoder | SiglipVisionEncoder


class ImagePrompt(NamedTuple):
    """The keys and values of an image for every cross-attention, and those for the negative prompt's branch."""

    positive: Images
    negative: Images


@dataclass(frozen=True, eq=False)
class LoadedControl:
    """A control with its network, or with what was made of its image: tokens (1,T,C), an IP-Adapter's ImagePrompt."""

    control: Control
    network: ControlNet | T2IAdapter | Tensor | ImagePrompt


def load_controls(
    model: Model, controls: Sequence[Control], clip_vision: str | os.PathLike[str] | None = None
) -> list[LoadedControl]:
    """Load the controls' networks, in the model's dtype, onto its device: whole, or offloaded by block like its UNet.

    clip_vision is the file of the image encoder that style adapters and IP-Adapters (CLIP's) and Redux (SigLIP's) need.
    Raises FileNotFoundError or ValueError, one line, for files that hold no control, or one for a different network.
    """
    if not controls and clip_vision is None:
        return []
    if not isinstance(model.unet, UNet | Flux):
        raise ValueError(f"{model.family.title} has no UNet that a control could act on")
    loaded = [_load(model, control) for control in controls]
    vision = _load_vision(model, clip_vision, [network for _, network in loaded])
    return [LoadedControl(control, _with_image(network, vision, control)) for control, network in loaded]


SEERS = {  # what the networks that read an image encoder need
    StyleAdapter: "a style adapter needs CLIP ViT-L/14's image encoder: give its file with `clip_vision=FILE`, for "
    "instance openai/clip-vit-large-patch14/model.safetensors",
    IPAdapter: "an IP-Adapter needs the image encoder that it was trained with (CLIP ViT-H, or bigG for "
    "ip-adapter_sdxl): give its file with `clip_vision=FILE`, for instance "
    "h94/IP-Adapter/models/image_encoder/model.safetensors",
    Redux: "FLUX.1 Redux needs SigLIP's image encoder: give its file with `clip_vision=FILE`, for instance "
    "black-forest-labs/FLUX.1-Redux-dev/image_encoder/model.safetensors",
}


def _load_vision(model: Model, source: str | os.PathLike[str] | None, networks: Sequence[nn.Module]) -> Seer | None:
    """Load the image encoder, if a network reads one.  Raises ValueError if there is one too many or too few."""
    needed = [text for kind, text in SEERS.items() if any(isinstance(network, kind) for network in networks)]
    if source is None:
        if needed:
            raise ValueError(needed[0])
        return None
    if not needed:
        raise ValueError(
            "got `clip_vision`, which only a `control` with a style adapter, an IP-Adapter or FLUX.1 Redux uses: "
            "leave it out"
        )
    components = split(open_source(source))
    if "vision" not in components:
        raise ValueError(
            f"{source}: holds no image encoder of CLIP or SigLIP with the names of Hugging Face or OpenCLIP, only "
            f"{', '.join(components)}"
        )
    shapes = components["vision"].shapes
    if ("embeddings.class_embedding" in shapes) == any(isinstance(network, Redux) for network in networks):
        raise ValueError(f"{source}: is not the right image encoder: {needed[0]}")
    vision: Seer
    with errors_of(source), on_meta():
        if "embeddings.class_embedding" in shapes:
            vision = CLIPVisionEncoder(CLIPVisionSpec.from_shapes(shapes))
        else:
            vision = SiglipVisionEncoder(SiglipSpec.from_shapes(shapes))
    load_weights(vision, components["vision"], "image encoder", model.device, model.dtype)
    return vision


@torch.no_grad()
def _with_image(
    network: Network, vision: Seer | None, control: Control
) -> ControlNet | T2IAdapter | Tensor | ImagePrompt:
    """Compute once per job what a style adapter, an IP-Adapter or Redux makes of its image, times its weight."""
    if isinstance(network, Redux):
        return _redux_tokens(network, vision, control)
    if not isinstance(network, StyleAdapter | IPAdapter):
        return network
    assert isinstance(vision, CLIPVisionEncoder)
    linear = isinstance(network, IPAdapter) and network.spec.kind == "linear"
    wanted = network.spec.image_width if isinstance(network, IPAdapter) else network.spec.width
    got = vision.spec.projection if linear else vision.spec.width
    if got != wanted:
        what = "whose pooled output is" if linear else "that is"
        face = ": embeddings of faces are not read" if wanted == FACES else ""
        raise ValueError(
            f"{control.source}: needs an image encoder {what} {wanted} wide{face}{WIDTHS.get((linear, wanted), '')}, "
            f"got one of {got}"
        )
    pixels = unit_pixels(clip_crop(control.rgb(), vision.spec.size)).to(vision.embeddings.class_embedding)
    if isinstance(network, StyleAdapter):
        return control.weight * network(vision(pixels))
    positive, negative = network.tokens(vision, pixels)
    return ImagePrompt(*(_scaled(network(tokens), control.weight) for tokens in (positive, negative)))


def _redux_tokens(network: Redux, vision: Seer | None, control: Control) -> Tensor:
    """Return Redux's tokens (1,N,C) of an image, which is stretched to a square, times its weight."""
    assert isinstance(vision, SiglipVisionEncoder)
    if vision.spec.width != network.spec.width:
        raise ValueError(
            f"{control.source}: needs an image encoder {network.spec.width} wide, got one of {vision.spec.width}"
        )
    side = vision.spec.size
    pixels = unit_pixels(control.rgb().resize((side, side), Image.Resampling.BICUBIC))
    return control.weight * network(vision(pixels.to(network.redux_up.weight)))


FACES = 512  # width of InsightFace's embeddings, which InstantID reads
WIDTHS = {  # of image encoders, by whether the pooled output is read
    (True, 1024): " (CLIP ViT-H)",
    (True, 1280): " (CLIP ViT-bigG)",
    (False, 1280): " (CLIP ViT-H)",
    (False, 1664): " (CLIP ViT-bigG)",
    (False, 1024): " (CLIP ViT-L)",
}


def _scaled(images: Images, weight: float) -> Images:
    """Multiply the values, and so what attention makes of them, by a weight."""
    return tuple((k, weight * v) for k, v in images)


def _load(model: Model, control: Control) -> tuple[Control, Network]:
    """Load a control's network; return the control, updated from the network's configuration, and the network."""
    if model.unet not in control.networks:
        control.networks[model.unet] = _read(model, control.source)
    network, pools = control.networks[model.unet]
    return replace(control, pool=True) if pools else control, network


def _read(model: Model, source: str | os.PathLike[str]) -> tuple[Network, bool]:
    """Read a network, ready to run with the model, and whether its configuration asks for pooling."""
    components = split(open_source(source))
    role = next((role for role in ROLES if role in components), None)
    if role is None:
        raise ValueError(f"{source}: holds no ControlNet, T2I-Adapter or IP-Adapter, only {', '.join(components)}")
    found = components[role]
    with errors_of(source), on_meta():
        network = _build(model, role, found.shapes)
        if isinstance(model.family.unet, UNetSpec):
            _check_heads(model.family.unet, found.metadata)
    runs_now = isinstance(network, StyleAdapter | IPAdapter | Redux)
    by_block = not runs_now and model.offloader is not None and model.offloader.offload == "sequential"
    home = torch.device("cpu") if by_block else model.device
    differs, whole = "difference" in components.file.shapes, set[str]()
    if MARK in found.shapes:
        with errors_of(source):
            wanted = {key: tuple(value.shape) for key, value in network.state_dict().items()}
            found, whole = differences(found, wanted, _base(model))
        differs = True
    load_weights(network, found, "control", home, model.dtype)
    if differs:
        _add_base(network, model, whole)
        log.info("%s: holds differences, added to the checkpoint's own UNet", found.path.name)
    if isinstance(network, ControlNet):
        prepare_like(network, model.unet, model.device)
    if by_block:  # all weights of these networks are in blocks, so there is no phase to enter
        Offloader({"control": network}, model.device, offload="sequential", storage=None)
    pools = found.metadata.get("global_pool_conditions") == "True"  # in a diffusers folder
    if pools:
        log.info("%s: averages over the image, as its configuration says", source)
    return network, pools


ROLES = ("control", "adapter", "style", "ip_adapter", "redux")  # components that are a control


def _build(model: Model, role: str, shapes: Shapes) -> Network:
    """Build the network of a role for weights of these shapes.

    Raises ValueError if they make no sense, or are for networks of another kind.
    """
    unet = model.family.unet
    if role == "redux":
        redux = ReduxSpec.from_shapes(shapes)
        if not isinstance(unet, FluxSpec) or unet.context_dim != redux.context_dim:
            raise ValueError(f"is for FLUX.1 with T5 {redux.context_dim} wide, not for {model.family.title}")
        return Redux(redux)
    if not isinstance(unet, UNetSpec):
        raise ValueError(f"is for UNets, but {model.family.title} is a transformer, for which there is no control here")
    if role == "adapter":
        return T2IAdapter(AdapterSpec.from_shapes(shapes, len(unet.channel_mult)))
    if role == "style":
        style = StyleAdapterSpec.from_shapes(shapes)
        _check_fit(model, {"context": style.context_dim})
        return StyleAdapter(style)
    if role == "ip_adapter":
        ip_adapter = IPAdapterSpec.from_shapes(shapes)
        _check_fit(model, {"context": ip_adapter.context_dim})
        assert isinstance(model.unet, UNet)
        return IPAdapter(ip_adapter, model.unet)
    if MARK in shapes:
        return ControlNet(replace(unet, guidance_dim=None))
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


def _base(model: Model) -> dict[str, nn.Parameter | BlockLinear]:
    """Return the UNet's weights by key, wherever they are stored."""
    in_blocks = {f"{name}.weight": each for name, each in model.unet.named_modules() if isinstance(each, BlockLinear)}
    return {**dict(model.unet.named_parameters()), **in_blocks}


def _add_base(network: nn.Module, model: Model, whole: Container[str]) -> None:
    """Add the UNet's weights to a control that holds differences from them, but to those that are `whole`."""
    base = _base(model)
    for key, value in network.state_dict().items():
        if key in whole or (own := base.get(key)) is None:
            continue
        if isinstance(own, BlockLinear):
            weight = own.weight.to(value.device)
        else:
            weight = own.data if model.offloader is None else model.offloader.read(own, value.device)
        value.copy_(value.float() + weight.float())
