"""Control: ControlNets and T2I-Adapters, which steer a pipeline's UNet by pictures, for as long as a job.

load_controls() reads their files; Steering makes of them what generate.denoise runs in place of the UNet, step by step.
"""

import logging
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from ldm_lite import hub
from ldm_lite.canny import canny
from ldm_lite.checkpoint import Component, load_weights, on_meta, open_checkpoint, split
from ldm_lite.diffusion.plan import Plan
from ldm_lite.fingerprint import infer_adapter
from ldm_lite.image import open_picture, resize
from ldm_lite.models.controlnet import ControlNet, guess_scales
from ldm_lite.models.t2i_adapter import T2IAdapter
from ldm_lite.models.unet import UNet
from ldm_lite.pipeline import Pipeline

log = logging.getLogger("ldm_lite")

# ---- what is asked for ----------------------------------------------------------------------------------------------

SYNTAX = "FILE:IMAGE[:WEIGHT][:START-END][:guess][:pool]"
PREPROCESSORS = ("none", "canny", "inpaint")


@dataclass(frozen=True)
class Request:
    """A control as the user asks for it."""

    source: str  # the file of the network
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
    pixels = torch.from_numpy(np.array(picture)).permute(2, 0, 1)[None].float() / 255
    if request.preprocess != "inpaint":
        return pixels
    with Image.open(request.picture) as image:
        alpha = resize(image.convert("RGBA").getchannel("A").point(lambda value: 255 * (value < 128)), size, "crop")
    hole = torch.from_numpy(np.array(alpha) > 0)
    if not hole.any():
        raise ValueError(f"{request.picture}: has no transparent part, which --preprocess inpaint takes for the hole")
    return pixels.masked_fill(hole, -1.0)


# ---- networks -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Control:
    """A network that was asked for, loaded."""

    request: Request
    network: ControlNet | T2IAdapter


def load_controls(pipe: Pipeline, requests: Sequence[Request]) -> list[Control]:
    """Load what the requests name, onto the pipeline's device and in its dtype.

    Raises FileNotFoundError or ValueError, one line, for files that hold no control or one for another UNet.
    """
    if not requests:
        return []
    if not isinstance(pipe.unet, UNet):
        raise ValueError(f"{pipe.family.title} has no UNet that a control could steer")
    return [Control(request, _load(pipe, request.source)) for request in requests]


def _load(pipe: Pipeline, source: str) -> ControlNet | T2IAdapter:
    components = split(open_checkpoint(hub.resolve(source)))
    found = next((components[role] for role in ("control", "adapter") if role in components), None)
    if found is None:
        raise ValueError(f"{source}: holds no ControlNet and no T2I-Adapter, only {', '.join(components)}")
    _check_fit(pipe, found, source)
    network: ControlNet | T2IAdapter
    spec = pipe.family.unet
    with on_meta():
        if "adapter" in components:
            network = T2IAdapter(infer_adapter(found.shapes, len(spec.channel_mult)))
        else:
            in_channels = found.shapes["input_blocks.0.0.weight"][1]
            plain = replace(spec, in_channels=in_channels, vector_dim=None, guidance_dim=None, num_classes=None)
            network = ControlNet(plain)
    load_weights(network, found, "control", pipe.device, pipe.dtype)
    if "difference" in found.checkpoint.shapes:
        _add_base(network, pipe.unet)
        log.info("%s: holds differences, added to the checkpoint's own UNet", found.checkpoint.path.name)
    return network


def _check_fit(pipe: Pipeline, control: Component, source: str) -> None:
    """Raises ValueError if a control is for UNets of another kind."""
    unet, shapes = pipe.family.unet, control.shapes
    contexts = {shape[1] for key, shape in shapes.items() if key.endswith("attn2.to_k.weight")}
    if contexts and contexts != {unet.context_dim}:
        raise ValueError(
            f"{source}: is for UNets that read a context {contexts.pop()} wide (768: Stable Diffusion 1, 1024: 2), "
            f"but that of {pipe.family.title} reads one of {unet.context_dim}"
        )


def _add_base(network: nn.Module, unet: UNet) -> None:
    """Make weights of a control out of its differences from the UNet's."""
    base = unet.state_dict()
    for key, value in network.state_dict().items():
        if key in base:
            value.copy_(value.float() + base[key].float())


# ---- steering -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Steered:
    """A UNet and what some controls add to it, called as the UNet is."""

    unet: UNet
    nets: Sequence[tuple[Request, ControlNet, Tensor]]  # with their embedded pictures (1,C,h,w)
    features: tuple[Tensor | None, ...] | None  # the adapters' sum, as UNet.forward takes it
    num_branches: int  # of guidance, in a batch; the last of them has all of the conditioning

    def __call__(self, x: Tensor, t: Tensor, context: Tensor | None = None, y: Tensor | None = None) -> Tensor:
        """As UNet.forward."""
        control: tuple[Tensor, ...] | None = None
        for request, net, hint in self.nets:
            one_branch = request.guess or request.pool
            first = x.shape[0] - x.shape[0] // self.num_branches if one_branch else 0
            text = None if context is None else context[first:]
            added = net(x[first:, : net.spec.in_channels], t[first:], text, hint)
            scales = guess_scales(len(added)) if request.guess else [1.0] * len(added)
            added = tuple(request.weight * scale * each for scale, each in zip(scales, added, strict=True))
            if request.pool:
                added = tuple(each.mean(dim=(2, 3), keepdim=True) for each in added)
            if first:
                added = tuple(torch.cat([each.new_zeros(first, *each.shape[1:]), each]) for each in added)
            control = added if control is None else tuple(a + b for a, b in zip(control, added, strict=True))
        return self.unet(x, t, context, y, control=control, features=self.features)


class Steering:
    """The network of every step of a plan, for pictures of one size.

    Outside of a control's range of steps it is not run at all.
    """

    def __init__(self, pipe: Pipeline, controls: Sequence[Control], plan: Plan, size: tuple[int, int]) -> None:
        """size is (width, height) in pixels.  Raises ValueError for sizes and UNets that an adapter does not fit."""
        self._pipe, self._num_steps = pipe, plan.num_steps
        self._ready = [(each, _embedded(pipe, each, size)) for each in controls]

    def network(self, num_branches: int, step: int) -> UNet | Steered:
        """What runs in place of the UNet in a step, counted from 0, on batches of so many branches of guidance."""
        nets, features = [], None
        for control, made in self._ready:
            request, network = control.request, control.network
            # To the nearest thousandth of a step: shares like 0.3 are not exact.
            first, last = (round(share * self._num_steps, 3) for share in (request.start, request.end))
            if step < first or step + 1 > last:
                continue
            if isinstance(network, ControlNet):
                nets.append((request, network, made))
            else:
                features = made if features is None else tuple(map(_plus, features, made))
        if not nets and features is None:
            return self._pipe.unet
        return Steered(self._pipe.unet, nets, features, num_branches)


@torch.no_grad()
def _embedded(pipe: Pipeline, control: Control, size: tuple[int, int]) -> Any:
    """What a network makes of its picture once a job: a ControlNet's hint, an adapter's features times their weight."""
    network, picture = control.network, read_picture(control.request, size).to(pipe.device, pipe.dtype)
    if isinstance(network, ControlNet):
        return network.embed_hint(picture)
    spec = network.spec
    if size[0] % spec.factor or size[1] % spec.factor:
        raise ValueError(
            f"got {size[0]}x{size[1]} pixels, but {control.request.source} wants multiples of {spec.factor}"
        )
    features = network(picture[:, :1] if spec.in_channels == 1 else picture)
    return network.place(tuple(control.request.weight * each for each in features), pipe.family.unet.num_res_blocks)


def _plus(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    return b if a is None or b is None else a + b
