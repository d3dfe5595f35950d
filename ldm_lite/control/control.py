"""Control: ControlNets and T2I-Adapters, which steer a pipeline's UNet by pictures, for as long as a job.

load_controls() reads their files; Steering says what generate.denoise runs in place of the UNet, step by step.
"""

import inspect
import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from ldm_lite.checkpoint.diffusers_folder import open_source
from ldm_lite.checkpoint.model import Pipeline
from ldm_lite.checkpoint.reader import load_weights, on_meta, split
from ldm_lite.control.canny import canny
from ldm_lite.diffusion.guidance import Conditioning
from ldm_lite.diffusion.plan import Plan
from ldm_lite.diffusion.step import Model, denoise_step
from ldm_lite.image import clip_pixels, open_picture, resize
from ldm_lite.models.clip_vision import CLIPVisionEncoder
from ldm_lite.models.controlnet import ControlInput, ControlInputs, ControlledUNet, ControlNet, guess_scales
from ldm_lite.models.style_adapter import StyleAdapter, styled
from ldm_lite.models.t2i_adapter import T2IAdapter
from ldm_lite.models.unet import UNet, UNetSpec
from ldm_lite.runtime.attention import layers
from ldm_lite.runtime.offload import Placement
from ldm_lite.runtime.tuning import tune_alike
from ldm_lite.zoo.inference import Shapes, infer_adapter, infer_control, infer_style, infer_vision

log = logging.getLogger("ldm_lite")

Features = tuple[Tensor | None, ...]  # as UNet.forward takes them

# ---- what is asked for ----------------------------------------------------------------------------------------------

SYNTAX = "FILE:IMAGE[:WEIGHT][:START-END][:guess][:pool]"
PREPROCESSORS = ("none", "canny", "inpaint")


@dataclass(frozen=True)
class Request:
    """A control as the user asks for it."""

    source: str  # the file or folder of the network, or its name on the hub
    picture: str
    weight: float = 1.0
    start: float = 0.0  # shares of the steps, in [0,1], between which it steers
    end: float = 1.0
    guess: bool = False  # guess mode: the deeper, the stronger, and the negative prompt's branch is not steered
    pool: bool = False  # averaged over the picture, which the shuffle network needs; as in guess mode one branch only
    preprocess: str = "none"  # what is made of the picture first: one of PREPROCESSORS, "canny:LOW:HIGH" too


def parse(texts: Sequence[str], preprocess: str | None = None) -> list[Request]:
    """Texts of SYNTAX, and "canny" for all of them or "canny,none" for each -> requests.  Raises ValueError."""
    if preprocess is not None and not texts:
        raise ValueError("got --preprocess, but no --control whose picture it is for")
    ways = ["none"] if preprocess is None else preprocess.split(",")
    ways = ways * len(texts) if len(ways) == 1 else ways
    if len(ways) != len(texts):
        raise ValueError(f"got {len(ways)} ways to preprocess for {len(texts)} pictures, wanted one, or one for each")
    if unknown := [way for way in ways if not re.fullmatch(rf"{'|'.join(PREPROCESSORS)}|canny:[\d.]+:[\d.]+", way)]:
        raise ValueError(f"got preprocess {unknown[0]!r}, wanted {', '.join(PREPROCESSORS)} or canny:LOW:HIGH")
    return [replace(_parse(text), preprocess=way) for text, way in zip(texts, ways, strict=True)]


def _parse(text: str) -> Request:
    number, options, names = r"\d*\.?\d+", {}, text
    while ":" in names:
        rest, _, last = names.rpartition(":")
        if re.fullmatch(rf"-?{number}", last):
            options["weight"] = float(last)
        elif between := re.fullmatch(rf"({number})-({number})", last):
            options["start"], options["end"] = float(between[1]), float(between[2])
        elif last in ("guess", "pool"):
            options[last] = True
        else:
            break
        names = rest
    name = r"(?:[A-Za-z]:(?=[\\/]))?[^:]+"  # a drive's letter is no file
    found = re.fullmatch(f"({name}):({name})", names)
    if found is None:
        raise ValueError(f"got control {text!r}, wanted {SYNTAX}")
    request = Request(found[1], found[2], **options)  # type: ignore[arg-type]
    if not 0 <= request.start < request.end <= 1:
        raise ValueError(f"got control {text!r}, wanted it to start before it ends, as shares of the steps, 0 to 1")
    return request


def natural_size(texts: Sequence[str], resolution: int) -> tuple[int, int]:
    """(width, height) of the first control's picture, scaled to `resolution` on its short side, multiples of 64."""
    picture = open_picture(parse(texts)[0].picture)
    width, height = (max(64, round(side * resolution / min(picture.size) / 64) * 64) for side in picture.size)
    return width, height


def read_picture(request: Request, size: tuple[int, int]) -> Tensor:
    """A request's picture, cut to size (width, height) -> (1,3,H,W) in [0,1]; -1 where "inpaint" finds a hole.

    Raises ValueError for what is no image, or is to be inpainted and has no hole; OSError if it cannot be opened.
    """
    picture = resize(open_picture(request.picture), size, "crop")
    if request.preprocess.startswith("canny"):
        picture = canny(picture, *map(float, request.preprocess.split(":")[1:]))
    pixels = _unit(picture)
    if request.preprocess != "inpaint":
        return pixels
    with Image.open(request.picture) as image:
        alpha = resize(image.convert("RGBA").getchannel("A").point(lambda value: 255 * (value < 128)), size, "crop")
    hole = torch.from_numpy(np.array(alpha) > 0)
    if not hole.any():
        raise ValueError(f"{request.picture}: has no transparent part, which --preprocess inpaint takes for the hole")
    return pixels.masked_fill(hole, -1.0)


def _unit(picture: Image.Image) -> Tensor:
    """A picture -> pixels (1,3,H,W) in [0,1]."""
    return torch.from_numpy(np.array(picture)).permute(2, 0, 1)[None].float() / 255


# ---- networks -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Control:
    """A network that was asked for, loaded."""

    request: Request
    network: ControlNet | T2IAdapter | Tensor  # or what it makes of its picture, of any size: tokens (1,T,C)


def load_controls(pipe: Pipeline, requests: Sequence[Request], clip_vision: str | None = None) -> list[Control]:
    """Load what the requests name, in the pipeline's dtype, onto its device: whole, or block by block as its UNet.

    clip_vision is the file of CLIP's image encoder, through which style adapters look at their pictures.  Raises
    FileNotFoundError or ValueError, one line, for files that hold no control or one for another UNet.
    """
    if not requests and clip_vision is None:
        return []
    if not isinstance(pipe.unet, UNet):
        raise ValueError(f"{pipe.family.title} has no UNet that a control could steer")
    loaded = [_load(pipe, request) for request in requests]
    looks = any(isinstance(network, StyleAdapter) for _, network in loaded)
    if looks != (clip_vision is not None):
        raise ValueError(
            "a style adapter looks through CLIP ViT-L/14's image encoder: give its file with --clip-vision FILE, "
            "for instance openai/clip-vit-large-patch14/model.safetensors"
            if looks
            else "got --clip-vision, but no --control of a style adapter, which alone looks through it: leave it out"
        )
    vision = None if clip_vision is None else _load_vision(pipe, clip_vision)
    return [
        Control(request, _tokens(network, vision, request) if isinstance(network, StyleAdapter) else network)
        for request, network in loaded
    ]


def _load_vision(pipe: Pipeline, source: str) -> CLIPVisionEncoder:
    components = split(open_source(source))
    if "vision" not in components:
        raise ValueError(
            f"{source}: holds no image encoder of CLIP by Hugging Face's names, only {', '.join(components)}"
        )
    with on_meta():
        vision = CLIPVisionEncoder(infer_vision(components["vision"].shapes))
    load_weights(vision, components["vision"], "image encoder", pipe.device, pipe.dtype)
    return vision


@torch.no_grad()
def _tokens(network: StyleAdapter, vision: CLIPVisionEncoder | None, request: Request) -> Tensor:
    """What a style adapter makes of its picture, once a job: tokens (1,T,C), times its weight."""
    assert vision is not None
    if vision.spec.width != network.spec.width:
        raise ValueError(
            f"{request.source}: wants an image encoder {network.spec.width} wide, got one of {vision.spec.width}"
        )
    picture = _unit(clip_pixels(open_picture(request.picture), vision.spec.size))
    return request.weight * network(vision(picture.to(network.proj)))


def _load(pipe: Pipeline, request: Request) -> tuple[Request, ControlNet | T2IAdapter | StyleAdapter]:
    """What a request names; and the request, with what the network's own configuration asks for."""
    source = request.source
    components = split(open_source(source))
    role = next((role for role in ("control", "adapter", "style") if role in components), None)
    if role is None:
        raise ValueError(f"{source}: holds no ControlNet and no T2I-Adapter, only {', '.join(components)}")
    found = components[role]
    try:
        with on_meta():
            network = _build(pipe, role, found.shapes)
    except (KeyError, IndexError) as error:
        reason = f"is missing: {error.args[0]}" if isinstance(error, KeyError) else "has another shape"
        raise ValueError(f"{source}: a tensor that every such network has {reason}") from error
    except ValueError as error:
        raise ValueError(f"{source}: {error}") from error
    # A style adapter computes at once, and goes.
    by_block = role != "style" and pipe.placement is not None and pipe.placement.offload == "sequential"
    home = torch.device("cpu") if by_block else pipe.device
    load_weights(network, found, "control", home, pipe.dtype)
    if "difference" in found.checkpoint.shapes:
        _add_base(network, pipe)
        log.info("%s: holds differences, added to the checkpoint's own UNet", found.checkpoint.path.name)
    if isinstance(network, ControlNet):
        tune_alike(network, pipe.unet)
    if by_block:  # no weight of these networks is outside of a block, so there is no phase to enter
        Placement({"control": network}, pipe.device, offload="sequential", storage=None)
    if found.checkpoint.metadata.get("global_pool_conditions") == "True":  # of a folder of diffusers
        log.info("%s: averages over the picture, as its configuration says", source)
        request = replace(request, pool=True)
    return request, network


def _build(pipe: Pipeline, role: str, shapes: Shapes) -> ControlNet | T2IAdapter | StyleAdapter:
    """The network of a role that has weights of these shapes.

    Raises KeyError if one is missing, and ValueError if it is for UNets of another kind.
    """
    unet = pipe.family.unet
    if role == "adapter":
        return T2IAdapter(infer_adapter(shapes, len(unet.channel_mult)))
    if role == "style":
        style = infer_style(shapes)
        _check_fit(pipe, {"context": style.context_dim})
        return StyleAdapter(style)
    spec = replace(infer_control(shapes), num_heads=unet.num_heads, head_dim=unet.head_dim)
    _check_fit(pipe, _numbers(spec))
    if spec.in_channels > unet.in_channels:
        raise ValueError(f"reads {spec.in_channels} channels, but the UNet of {pipe.family.title} {unet.in_channels}")
    network = ControlNet(spec)
    if beyond := layers(network).keys() - layers(pipe.unet).keys():
        raise ValueError(f"has attention where the UNet of {pipe.family.title} has none: {min(beyond)}")
    return network


KNOWN = {"context": " (768: Stable Diffusion 1, 1024: 2, 2048: XL)", "vector": " (2816: Stable Diffusion XL)"}


def _numbers(spec: UNetSpec) -> dict[str, object]:
    """In what a ControlNet and its UNet are alike, unless it has none of it."""
    widths = tuple(spec.model_channels * mult for mult in spec.channel_mult)
    own = {"context": spec.context_dim, "vector": spec.vector_dim}
    return {**own, "levels": widths, "residual blocks": spec.num_res_blocks}


def _check_fit(pipe: Pipeline, numbers: Mapping[str, object]) -> None:
    """Raises ValueError if the numbers of a control are not those of its UNet."""
    own = _numbers(pipe.family.unet)
    for name, wanted in numbers.items():
        if wanted not in (None, own[name]):
            about = f"with {name} {wanted}{KNOWN.get(name, '')}, but that of {pipe.family.title} has {own[name]}"
            raise ValueError(f"is for UNets {about}")


def _add_base(network: nn.Module, pipe: Pipeline) -> None:
    """Make weights of a control out of its differences from the UNet's, wherever these are kept."""
    base = dict(pipe.unet.named_parameters())
    for key, value in network.state_dict().items():
        if key in base:
            own = base[key].data if pipe.placement is None else pipe.placement.read(base[key], value.device)
            value.copy_(value.float() + own.float())


# ---- steering -------------------------------------------------------------------------------------------------------


class Steering:
    """What runs in every step of a plan, for pictures of one size.

    In a step that no control is for, that is the UNet alone.  Where steps are compiled, all controls take part in all
    other steps, with a weight of zero out of their own range: to leave one out would be another graph.  Tokens of style
    adapters make the context longer, within their range alone.
    """

    def __init__(self, pipe: Pipeline, controls: Sequence[Control], plan: Plan, size: tuple[int, int]) -> None:
        """size is (width, height) in pixels.  Raises ValueError for sizes and UNets that an adapter does not fit."""
        self._unet, self._num_steps = pipe.unet, plan.num_steps
        self._compiled = inspect.unwrap(pipe.step) is not denoise_step  # a step may be watched
        nets: list[ControlNet] = []
        self._nets: list[tuple[Request, ControlInput]] = []  # as they are within their range of steps
        self._adapters: list[tuple[Request, Features]] = []
        self._styles: list[tuple[Request, Tensor]] = []
        for control in controls:
            request, network = control.request, control.network
            if isinstance(network, Tensor):
                self._styles.append((request, network))
                continue
            picture = read_picture(request, size).to(pipe.device, pipe.dtype)
            if isinstance(network, ControlNet):
                nets.append(network)
                self._nets.append((request, _control_input(network, request, picture)))
            else:
                features = _features(network, request, picture, pipe.family.unet.num_res_blocks)
                self._adapters.append((request, features))
        self._steered = ControlledUNet(pipe.unet, nets)

    def __call__(self, num_branches: int, step: int, conditioning: Conditioning) -> tuple[Model, Conditioning]:
        """What runs in a step, counted from 0, in place of the UNet on so many branches of guidance; what it reads."""
        tokens = [tokens for request, tokens in self._styles if self._steers(request, step)]
        if tokens and conditioning.context is not None:
            longer = styled(conditioning.context, torch.cat(tokens, dim=1), num_branches)
            conditioning = conditioning._replace(context=longer)
        if not any(self._steers(request, step) for request, _ in (*self._nets, *self._adapters)):
            return self._unet, conditioning
        hints: list[ControlInput | None] = []
        for request, hint in self._nets:
            if request.guess or request.pool:
                hint = hint._replace(share=num_branches)
            if not self._steers(request, step):
                hint = hint._replace(scales=torch.zeros_like(hint.scales))
            hints.append(hint if self._compiled or self._steers(request, step) else None)
        features: Features | None = None
        for request, own in self._adapters:
            if not self._steers(request, step):
                own = tuple(None if each is None else torch.zeros_like(each) for each in own)
            features = own if features is None else tuple(map(_plus, features, own))
        return self._steered, conditioning._replace(control=ControlInputs(tuple(hints), features))

    def _steers(self, request: Request, step: int) -> bool:
        # To the nearest thousandth of a step: shares like 0.3 are not exact.
        first, last = (round(share * self._num_steps, 3) for share in (request.start, request.end))
        return first <= step and step + 1 <= last


@torch.no_grad()
def _control_input(network: ControlNet, request: Request, picture: Tensor) -> ControlInput:
    """What a ControlNet reads: its picture, embedded once a job, and its weights."""
    num = len(network.zero_convs) + 1
    guess = guess_scales(num) if request.guess else [1.0] * num
    scales = torch.tensor([request.weight * scale for scale in guess], device=picture.device)
    return ControlInput(network.embed_hint(picture), scales, share=1, pool=request.pool)


@torch.no_grad()
def _features(network: T2IAdapter, request: Request, picture: Tensor, num_res_blocks: tuple[int, ...]) -> Features:
    """What an adapter adds to the UNet's input blocks and middle, computed once a job, times its weight."""
    factor, (height, width) = network.spec.factor, picture.shape[2:]
    if width % factor or height % factor:
        raise ValueError(f"got {width}x{height} pixels, but {request.source} wants multiples of {factor}")
    features = network(picture[:, :1] if network.spec.in_channels == 1 else picture)
    return network.place(tuple(request.weight * each for each in features), num_res_blocks)


def _plus(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    return b if a is None else a if b is None else a + b
