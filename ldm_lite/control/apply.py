"""Apply controls: choose the network and the conditioning of each step of a plan."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ldm_lite.checkpoint.model import Model
from ldm_lite.control.control import Control
from ldm_lite.control.loading import ImagePrompt, LoadedControl
from ldm_lite.diffusion.guidance import Conditioning
from ldm_lite.diffusion.plan import Plan
from ldm_lite.diffusion.step import Network
from ldm_lite.models.controlnet import ControlInput, ControlInputs, ControlledUNet, ControlNet, guess_scales
from ldm_lite.models.ip_adapter import Images
from ldm_lite.models.style_adapter import styled
from ldm_lite.models.t2i_adapter import T2IAdapter
from ldm_lite.models.transformer import BasicTransformerBlock, CrossAttention, SpatialTransformer
from ldm_lite.runtime.compile import is_compiled

Features = tuple[Tensor | None, ...]  # as UNet.forward takes them


class ActiveControls:
    """The controls of a plan, for images of one size: a generate.StepControl.

    A step without any control runs the UNet alone.  If steps are compiled, all other steps run all controls, with
    weight 0 outside their range, since leaving one out would need another graph.  Style adapters and Redux append
    tokens to the context, only within their range.  An IP-Adapter's image has a separate attention.  None of these
    three is for the negative prompt's branches.
    """

    def __init__(
        self,
        model: Model,
        controls: Sequence[LoadedControl],
        plan: Plan,
        size: tuple[int, int],
        num_branches: Callable[[int], int] = lambda step: 2,
        negatives: Callable[[int], int] = lambda step: 1,
    ) -> None:
        """size is (width, height) in pixels; num_branches(step) are those of the guidance that run in a step,
        negatives(step) how many of them, which come first, are of the negative prompt.

        Raises ValueError for sizes and UNets that an adapter does not fit.
        """
        self._unet, self._num_steps, self._num_branches = model.unet, plan.num_steps, num_branches
        self._compiled = is_compiled(model.step)
        nets: list[ControlNet] = []
        self._nets: list[tuple[Control, ControlInput]] = []  # with the inputs within their range of steps
        self._adapters: list[tuple[Control, Features]] = []
        self._styles: list[tuple[Control, Tensor]] = []
        self._prompts: list[tuple[Control, ImagePrompt]] = []
        self._images: tuple[object, tuple[Any, ...] | None] = None, None
        self._negatives = negatives
        for loaded in controls:
            control, network = loaded.control, loaded.network
            if isinstance(network, Tensor):
                self._styles.append((control, network))
                continue
            if isinstance(network, ImagePrompt):
                _check_layers(model, control)
                self._prompts.append((control, network))
                continue
            pixels = control.pixels(size).to(model.device, model.dtype)
            if isinstance(network, ControlNet):
                nets.append(network)
                self._nets.append((control, self._input(network, control, pixels)))
            else:
                features = _features(network, control, pixels, model.family.unet.num_res_blocks)
                self._adapters.append((control, features))
        self._controlled = ControlledUNet(model.unet, nets)

    def __call__(self, step: int, conditioning: Conditioning) -> tuple[Network, Conditioning]:
        """Return the network for a step, counted from 0, on all branches of guidance, and its conditioning."""
        tokens = [tokens for control, tokens in self._styles if self._acts(control, step)]
        if tokens and conditioning.context is not None:
            first = self._negatives(step) * len(conditioning.context) // self._num_branches(step)
            longer = styled(conditioning.context, torch.cat(tokens, dim=1), first)
            conditioning = conditioning._replace(context=longer)
        if not any(self._acts(control, step) for control, _ in (*self._nets, *self._adapters, *self._prompts)):
            return self._unet, conditioning
        inputs: list[ControlInput | None] = []
        for control, one in self._nets:
            if not self._acts(control, step):
                one = one._replace(scales=torch.zeros_like(one.scales))
            if control.guess or control.pool:
                one = one._replace(share=self._num_branches(step))
            inputs.append(one if self._compiled or self._acts(control, step) else None)
        features: Features | None = None
        for control, own in self._adapters:
            if not self._acts(control, step):
                own = tuple(None if each is None else torch.zeros_like(each) for each in own)
            features = own if features is None else tuple(map(_plus, features, own))
        images = self._image_rows(step, conditioning)
        return self._controlled, conditioning._replace(control=ControlInputs(tuple(inputs), features, images))

    def _image_rows(self, step: int, conditioning: Conditioning) -> tuple[Any, ...] | None:
        """Return the keys and values of images (K*B,T,C), by transformer, block and IP-Adapter; None without one."""
        acting = tuple(self._acts(control, step) for control, _ in self._prompts)
        if not any(acting) and not (acting and self._compiled):
            return None
        assert conditioning.context is not None
        branches, negatives, rows = self._num_branches(step), self._negatives(step), len(conditioning.context)
        key = acting, branches, negatives, rows
        if self._images[0] != key:
            count = negatives * rows // branches
            adapters = [
                _rows(prompt, (count, rows - count), acts)
                for (_, prompt), acts in zip(self._prompts, acting, strict=True)
                if acts or self._compiled
            ]
            layers = zip(*adapters, strict=True)
            self._images = key, tuple(tuple(zip(*layer, strict=True)) for layer in layers)
        return self._images[1]

    def _acts(self, control: Control, step: int) -> bool:
        # Rounded to a thousandth of a step: shares like 0.3 are not exact in binary.
        first, last = (round(share * self._num_steps, 3) for share in (control.start, control.end))
        return first <= step and step + 1 <= last

    @torch.no_grad()
    def _input(self, network: ControlNet, control: Control, pixels: Tensor) -> ControlInput:
        """Return a ControlNet's input: its image, embedded once per job, and the weights of its outputs."""
        num = len(network.zero_convs) + 1
        guess = guess_scales(num) if control.guess else [1.0] * num
        scales = torch.tensor([control.weight * scale for scale in guess], device=pixels.device)
        return ControlInput(network.embed_hint(pixels), scales, share=1, pool=control.pool)


def _rows(prompt: ImagePrompt, counts: tuple[int, int], acts: bool) -> Images:
    """Return an image's keys and values for that many rows of the negative and of the other branches."""

    def expanded(never: Tensor, given: Tensor) -> Tensor:
        return torch.cat([each.expand(count, -1, -1) for each, count in zip((never, given), counts, strict=True)])

    layers = zip(prompt.never, prompt.given, strict=True)
    return tuple(
        tuple(
            (expanded(never[0], given[0]), expanded(never[1], given[1]) * acts)
            for never, given in zip(*layer, strict=True)
        )
        for layer in layers
    )


def _check_layers(model: Model, control: Control) -> None:
    """Raises ValueError if a forward of the UNet's was replaced by one that does not know of images."""
    kinds = (SpatialTransformer, BasicTransformerBlock, CrossAttention)
    for name, layer in model.unet.named_modules():
        if isinstance(layer, kinds) and "forward" in vars(layer):
            raise ValueError(f"{control}: an IP-Adapter needs the UNet's own attention, and {name} was replaced")


@torch.no_grad()
def _features(network: T2IAdapter, control: Control, pixels: Tensor, num_res_blocks: tuple[int, ...]) -> Features:
    """Return an adapter's weighted features for the UNet's input blocks and middle, computed once per job."""
    factor, (height, width) = network.spec.factor, pixels.shape[2:]
    if width % factor or height % factor:
        raise ValueError(f"got {width}x{height} pixels, but {control.source} wants multiples of {factor}")
    features = network(pixels[:, :1] if network.spec.in_channels == 1 else pixels)
    return network.place(tuple(control.weight * each for each in features), num_res_blocks)


def _plus(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    return b if a is None else a if b is None else a + b
