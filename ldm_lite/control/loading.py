"""Load the networks of controls, check that they fit the model's UNet, and set them up like it."""

import logging
import math
import os
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from PIL import Image
from torch import Tensor, nn

from ldm_lite.checkpoint.model import CheckpointModel
from ldm_lite.checkpoint.reader import errors_of, load_weights, on_meta, open_source, parts_of, read_weight
from ldm_lite.control.control import Control, unit_pixels
from ldm_lite.core.files import Tensors
from ldm_lite.core.layers import Shapes
from ldm_lite.image import clip_crop
from ldm_lite.models.clip_vision import CLIPVisionEncoder, CLIPVisionSpec
from ldm_lite.models.controlnet import ControlNet, infer_spec
from ldm_lite.models.flux import Flux, FluxSpec
from ldm_lite.models.ip_adapter import Images, IPAdapter, IPAdapterSpec
from ldm_lite.models.redux import Redux, ReduxSpec, SiglipSpec, SiglipVisionEncoder
from ldm_lite.models.style_adapter import StyleAdapter, StyleAdapterSpec
from ldm_lite.models.t2i_adapter import AdapterSpec, T2IAdapter
from ldm_lite.models.unet import LDMUNet, LDMUNetSpec
from ldm_lite.runtime.attention import layers
from ldm_lite.runtime.blocks import BlockLinear
from ldm_lite.runtime.offload import Offloader
from ldm_lite.runtime.setup import prepare_like

log = logging.getLogger("ldm_lite")


ControlNetwork = ControlNet | T2IAdapter | StyleAdapter | IPAdapter | Redux
ImageEncoder = CLIPVisionEncoder | SiglipVisionEncoder


class ImagePrompt(NamedTuple):
    """The keys and values of an image for every cross-attention, and those for the negative prompt's branch."""

    positive: Images
    negative: Images


@dataclass(frozen=True, eq=False)
class LoadedControl:
    """A control with its network, or with its encoded image: tokens (1,T,C), or an IP-Adapter's ImagePrompt."""

    control: Control
    network: ControlNet | T2IAdapter | Tensor | ImagePrompt


def load_controls(
    model: CheckpointModel, controls: Sequence[Control], clip_vision: str | os.PathLike[str] | None = None
) -> list[LoadedControl]:
    """Load the controls' networks, in the model's dtype, onto its device: whole, or offloaded by block like its UNet.

    clip_vision is the file of the image encoder that style adapters and IP-Adapters (CLIP's) and Redux (SigLIP's) need.
    Raises FileNotFoundError or ValueError, one line, for files that hold no control, or one for a different network.
    """
    if not controls and clip_vision is None:
        return []
    if not isinstance(model.unet, LDMUNet | Flux):
        raise ValueError(f"{model.family.title} has no UNet that a control could act on")
    new = [control for control in controls if model.unet not in control.networks]
    for control, network in zip(new, _read_once(model, [control.source for control in new]), strict=True):
        control.networks[model.unet] = network
    networks = [control.networks[model.unet] for control in controls]  # each with whether it pools
    vision = _load_vision(model, clip_vision, [network for network, _ in networks])
    return [
        LoadedControl(replace(control, pool=True) if pools else control, _with_image(network, vision, control))
        for control, (network, pools) in zip(controls, networks, strict=True)
    ]


ENCODER_HINTS = {  # what the networks that read an image encoder need
    StyleAdapter: "a style adapter needs CLIP ViT-L/14's image encoder: give its file with `clip_vision=FILE`, for "
    "instance openai/clip-vit-large-patch14/model.safetensors",
    IPAdapter: "an IP-Adapter needs the image encoder that it was trained with (CLIP ViT-H, or bigG for "
    "ip-adapter_sdxl): give its file with `clip_vision=FILE`, for instance "
    "h94/IP-Adapter/models/image_encoder/model.safetensors",
    Redux: "FLUX.1 Redux needs SigLIP's image encoder: give its file with `clip_vision=FILE`, for instance "
    "black-forest-labs/FLUX.1-Redux-dev/image_encoder/model.safetensors",
}


def _load_vision(
    model: CheckpointModel, source: str | os.PathLike[str] | None, networks: Sequence[nn.Module]
) -> ImageEncoder | None:
    """Load the image encoder, if a network reads one.  Raises ValueError if there is one too many or too few."""
    needed = [text for kind, text in ENCODER_HINTS.items() if any(isinstance(network, kind) for network in networks)]
    if source is None:
        if needed:
            raise ValueError(needed[0])
        return None
    if not needed:
        raise ValueError(
            "got `clip_vision`, which only a `control` with a style adapter, an IP-Adapter or FLUX.1 Redux uses: "
            "leave it out"
        )
    components = parts_of(open_source(source))
    if "vision" not in components:
        raise ValueError(
            f"{source}: holds no image encoder of CLIP or SigLIP with the names of Hugging Face or OpenCLIP, only "
            f"{', '.join(components)}"
        )
    shapes = components["vision"].shapes
    if ("embeddings.class_embedding" in shapes) == any(isinstance(network, Redux) for network in networks):
        raise ValueError(f"{source}: is not the right image encoder: {needed[0]}")
    vision: ImageEncoder
    with errors_of(source), on_meta():
        is_clip = "embeddings.class_embedding" in shapes
        spec: Any = CLIPVisionSpec.from_shapes(shapes) if is_clip else SiglipSpec.from_shapes(shapes)
        spec = replace(spec, heads=int(components["vision"].metadata.get("vision_num_heads", spec.heads)))
        if spec.width % spec.heads:
            raise ValueError(f"its num_attention_heads cannot be {spec.heads}: expected a divisor of {spec.width}")
        vision = CLIPVisionEncoder(spec) if is_clip else SiglipVisionEncoder(spec)
    load_weights(vision, components["vision"], "image encoder", model.device, model.dtype)
    return vision


@torch.no_grad()
def _with_image(
    network: ControlNetwork, vision: ImageEncoder | None, control: Control
) -> ControlNet | T2IAdapter | Tensor | ImagePrompt:
    """Encode the image of a style adapter, an IP-Adapter or Redux, times its weight, once per job."""
    if isinstance(network, Redux):  # its image is stretched to a square
        assert isinstance(vision, SiglipVisionEncoder)
        width, side = network.spec.width, vision.spec.size
        if vision.spec.width != width:
            raise ValueError(f"{control.source}: needs an image encoder {width} wide, got one of {vision.spec.width}")
        pixels = unit_pixels(control.rgb().resize((side, side), Image.Resampling.BICUBIC))
        return control.weight * network(vision(pixels.to(network.redux_up.weight)))
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
    # The weight multiplies the values, and so the output of attention.
    return ImagePrompt(
        *(tuple((k, control.weight * v) for k, v in network(tokens)) for tokens in network.tokens(vision, pixels))
    )


FACES = 512  # width of InsightFace's embeddings, which InstantID reads
WIDTHS = {  # of image encoders, by whether the pooled output is read
    (True, 1024): " (CLIP ViT-H)",
    (True, 1280): " (CLIP ViT-bigG)",
    (False, 1280): " (CLIP ViT-H)",
    (False, 1664): " (CLIP ViT-bigG)",
    (False, 1024): " (CLIP ViT-L)",
}


# The ControlNets of the last job of each UNet, by file: the next job, if it names them too, runs the CUDA graphs of
# the same weights.
_LAST_READ: WeakKeyDictionary[nn.Module, dict[object, tuple[ControlNet, bool]]] = WeakKeyDictionary()


def _version(model: CheckpointModel, source: str | os.PathLike[str]) -> object:
    """Return a key that is equal if a file, and where its network goes, are the same as before; None if unknown."""
    try:
        stat = os.stat(source)
    except OSError:
        return None  # of the hub
    is_file = os.path.isfile(source) and model.offloader is None
    return (os.path.realpath(source), stat.st_mtime_ns, stat.st_size, model.device, model.dtype) if is_file else None


def _read_once(model: CheckpointModel, sources: Sequence[str | os.PathLike[str]]) -> list[tuple[ControlNetwork, bool]]:
    """Read the networks of a job, except ControlNets that the job before it read from the same files."""
    before, read, networks = _LAST_READ.get(model.unet, {}), dict[object, tuple[ControlNet, bool]](), []
    for source in sources:
        version = _version(model, source)
        if version in before:
            prepare_like(before[version][0], model.unet, model.device)  # the UNet's attention may have changed since
        network, pools, is_whole = (*before[version], True) if version in before else _read(model, source)
        networks.append((network, pools))
        if isinstance(network, ControlNet) and is_whole and version is not None:
            read[version] = network, pools
    _LAST_READ[model.unet] = read
    return networks


def _read(model: CheckpointModel, source: str | os.PathLike[str]) -> tuple[ControlNetwork, bool, bool]:
    """Read a network, ready to run with the model; also return whether its configuration asks for pooling, and
    whether its file holds all of it, not differences from the UNet's weights."""
    components = parts_of(open_source(source))
    role = next((role for role in ROLES if role in components), None)
    if role is None:
        raise ValueError(f"{source}: holds no ControlNet, T2I-Adapter or IP-Adapter, only {', '.join(components)}")
    tensors = components[role]
    with errors_of(source), on_meta():
        network = _build(model, role, tensors)
    runs_now = isinstance(network, StyleAdapter | IPAdapter | Redux)
    by_block = not runs_now and model.offloader is not None and model.offloader.offload == "sequential"
    home = torch.device("cpu") if by_block else model.device
    differs, whole, base = "difference" in components.file.shapes, set[str](), dict[str, Any]()
    if differs or MARK in tensors.shapes:  # the UNet's weights by key, wherever they are stored
        in_blocks = (layer for layer in model.unet.named_modules() if isinstance(layer[1], BlockLinear))
        base = {**dict(model.unet.named_parameters()), **{f"{name}.weight": layer for name, layer in in_blocks}}
    if MARK in tensors.shapes:
        with errors_of(source):
            wanted = {key: tuple(value.shape) for key, value in network.state_dict().items()}
            tensors, whole = differences(tensors, wanted, base)
        differs = True
    load_weights(network, tensors, "control", home, model.dtype)
    if differs:
        for key, value in network.state_dict().items():
            if key in whole or (weight := base.get(key)) is None:
                continue
            if isinstance(weight, BlockLinear):
                weight = weight.weight.to(value.device)
            else:
                weight = weight.data if model.offloader is None else model.offloader.read(weight, value.device)
            value.copy_(value.float() + weight.float())
        log.info("%s: holds differences from the checkpoint's UNet, which are added to it", tensors.path.name)
    if isinstance(network, ControlNet):
        prepare_like(network, model.unet, model.device)
    if by_block:  # all weights of these networks are in blocks, so there is no phase to enter
        Offloader({"control": network}, model.device, offload="sequential", storage=None)
    pools = tensors.metadata.get("global_pool_conditions") == "True"  # in a diffusers folder
    if pools:
        log.info("%s: averages over the image, as its configuration says", source)
    return network, pools, not differs


ROLES = ("control", "adapter", "style", "ip_adapter", "redux")  # components that are a control


def _build(model: CheckpointModel, role: str, file: Tensors) -> ControlNetwork:
    """Build the network of a role for the weights of a file.

    Raises ValueError if they make no sense, or are for networks of another kind.
    """
    unet, shapes = model.family.unet, file.shapes
    if role == "redux":
        redux = ReduxSpec.from_shapes(shapes)
        if type(unet) is not FluxSpec or unet.context_dim != redux.context_dim:
            raise ValueError(f"is for FLUX.1 with T5 {redux.context_dim} wide, not for {model.family.title}")
        return Redux(redux)
    if not isinstance(unet, LDMUNetSpec):
        raise ValueError(f"is for UNets, but {model.family.title} is a transformer, whose controls are not supported")
    network: ControlNetwork
    if role == "adapter":
        network = T2IAdapter(AdapterSpec.from_shapes(shapes, len(unet.channel_mult)))
    elif role == "style":
        style = StyleAdapterSpec.from_shapes(shapes)
        _check_fit(model, {"context": style.context_dim})
        network = StyleAdapter(style)
    elif role == "ip_adapter":
        ip_adapter = IPAdapterSpec.from_shapes(shapes)
        _check_fit(model, {"context": ip_adapter.context_dim})
        assert isinstance(model.unet, LDMUNet)
        network = IPAdapter(ip_adapter, model.unet)
    elif MARK in shapes:
        network = ControlNet(replace(unet, guidance_dim=None))
    else:
        spec = replace(infer_spec(shapes), num_heads=unet.num_heads, head_dim=unet.head_dim)
        _check_fit(model, _numbers(spec))
        if spec.in_channels > unet.in_channels:
            raise ValueError(
                f"reads {spec.in_channels} channels, but the UNet of {model.family.title} {unet.in_channels}"
            )
        network = ControlNet(spec)
        if beyond := layers(network).keys() - layers(model.unet).keys():
            raise ValueError(f"has attention where the UNet of {model.family.title} has none: {min(beyond)}")
    # A diffusers folder's configuration may give a control other heads than its UNet has.
    widths = {
        unet.model_channels * m for m, depth in zip(unet.channel_mult, unet.transformer_depth, strict=True) if depth
    }
    for width in widths:
        heads = {"unet_num_heads": unet.heads(width), "unet_head_dim": width // unet.heads(width)}
        if wrong := [key for key in heads.keys() & file.metadata.keys() if int(file.metadata[key]) != heads[key]]:
            raise ValueError(
                f"its attention_head_dim gives {wrong[0][5:]} {file.metadata[wrong[0]]}, "
                f"but its UNet has {heads[wrong[0]]}"
            )
    return network


KNOWN = {"context": " (768: Stable Diffusion 1, 1024: 2, 2048: XL)", "vector": " (2816: Stable Diffusion XL)"}


def _numbers(spec: LDMUNetSpec) -> dict[str, object]:
    """Return the sizes that must be equal in a ControlNet and its UNet, if the ControlNet has them at all."""
    widths = tuple(spec.model_channels * mult for mult in spec.channel_mult)
    inputs = {"context": spec.context_dim, "vector": spec.vector_dim}
    return {**inputs, "levels": widths, "residual blocks": spec.num_res_blocks}


def _check_fit(model: CheckpointModel, numbers: Mapping[str, object]) -> None:
    """Raises ValueError if these sizes of a control differ from its UNet's."""
    sizes = _numbers(model.family.unet)
    for name, wanted in numbers.items():
        if wanted not in (None, sizes[name]):
            about = f"with {name} {wanted}{KNOWN.get(name, '')}, but that of {model.family.title} has {sizes[name]}"
            raise ValueError(f"is for UNets {about}")


# ---- Control-LoRA ---------------------------------------------------------------------------------------------------
# A ControlNet as differences of low rank from the UNet that it is used with.  A file has X.up and X.down for most of
# the weights X.weight, which are the UNet's plus up @ down.  Tensors that it has whole replace the UNet's; those that
# it lacks are the UNet's.  Source: Stability AI's control-lora; ComfyUI comfy/controlnet.py, ControlLora.

MARK = "lora_controlnet"  # a tensor that only says what kind of file it is


def differences(file: Tensors, wanted: Shapes, base: Container[str]) -> tuple[Tensors, set[str]]:
    """Return the weights of a Control-LoRA as differences from a UNet's, and the keys of those stored whole.

    wanted are the shapes of the ControlNet, base the keys that its UNet has too.  Keys that do not belong to it stay
    in the result.  Raises ValueError if a pair of factors is for another UNet.
    """
    stored, pairs = file.shapes, dict[str, tuple[str, str]]()
    added = {key: shape for key, shape in wanted.items() if key in base and key not in stored}
    for key, shape in added.items():
        up, down = (key.removesuffix("weight") + part for part in ("up", "down"))
        if key.endswith(".weight") and up in stored and down in stored:
            # each as a matrix with the same rows
            rows, rank, inner, columns = (
                math.prod(part) for key in (up, down) for part in (stored[key][:1], stored[key][1:])
            )
            if [rows, columns] != [math.prod(shape[:1]), math.prod(shape[1:])] or rank != inner:
                raise ValueError(f"is for another UNet: its {up} is {stored[up]}, {down} {stored[down]}, for {shape}")
            pairs[key] = up, down
    whole = stored.keys() - {MARK, *(part for pair in pairs.values() for part in pair)}

    def read(key: str) -> Tensor:
        if key in whole:
            return file.read(key)
        if key not in pairs:
            return torch.zeros(added[key])
        up, down = (read_weight(file, part).float().flatten(1) for part in pairs[key])
        return (up @ down).view(added[key])

    shapes = {**added, **{key: stored[key] for key in whole}}
    return Tensors(file.path, shapes, read, file.metadata), set(whole)
