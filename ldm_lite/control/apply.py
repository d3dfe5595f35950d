"""Apply controls: choose the network and the conditioning of each step of a plan."""

import inspect
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ldm_lite.checkpoint.model import Model
from ldm_lite.control.control import Control
from ldm_lite.control.loading import LoadedControl
from ldm_lite.diffusion.guidance import Conditioning
from ldm_lite.diffusion.plan import Plan
from ldm_lite.diffusion.step import Network, denoise_step
from ldm_lite.models.controlnet import ControlInput, ControlInputs, ControlledUNet, ControlNet, guess_scales
from ldm_lite.models.style_adapter import styled
from ldm_lite.models.t2i_adapter import T2IAdapter

Features = tuple[Tensor | None, ...]  # as UNet.forward takes them


class ActiveControls:
    """The controls of a plan, for images of one size: a generate.StepControl.

    A step without any control runs the UNet alone.  If steps are compiled, all other steps run all controls, with
    weight 0 outside their range, since leaving one out would need another graph.  Style adapters append tokens to the
    context, only within their range.
    """

    def __init__(
        self,
        model: Model,
        controls: Sequence[LoadedControl],
        plan: Plan,
        size: tuple[int, int],
        num_branches: Callable[[int], int] = lambda step: 2,
    ) -> None:
        """size is (width, height) in pixels; num_branches(step) are those of the guidance that run in a step.

        Raises ValueError for sizes and UNets that an adapter does not fit.
        """
        self._unet, self._num_steps, self._num_branches = model.unet, plan.num_steps, num_branches
        self._compiled = inspect.unwrap(model.step) is not denoise_step
        nets: list[ControlNet] = []
        self._nets: list[tuple[Control, ControlInput]] = []  # with the inputs within their range of steps
        self._adapters: list[tuple[Control, Features]] = []
        self._styles: list[tuple[Control, Tensor]] = []
        for loaded in controls:
            control, network = loaded.control, loaded.network
            if isinstance(network, Tensor):
                self._styles.append((control, network))
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
            longer = styled(conditioning.context, torch.cat(tokens, dim=1), self._num_branches(step))
            conditioning = conditioning._replace(context=longer)
        if not any(self._acts(control, step) for control, _ in (*self._nets, *self._adapters)):
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
        return self._controlled, conditioning._replace(control=ControlInputs(tuple(inputs), features))

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
