"""Apply controls: which network runs in each call, and what it reads besides the text."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ldm_lite.checkpoint.model import CheckpointModel
from ldm_lite.control.control import Control
from ldm_lite.control.loading import ImagePrompt, LoadedControl
from ldm_lite.core.denoise import Branch, Call, Inputs, InputSource, running
from ldm_lite.diffusion.guidance import IdentityKey
from ldm_lite.diffusion.plan import Plan
from ldm_lite.models.controlnet import ControlInput, ControlInputs, ControlledUNet, ControlNet, guess_scales
from ldm_lite.models.ip_adapter import UNetWithImages, cross_attentions
from ldm_lite.models.style_adapter import styled
from ldm_lite.runtime.compile import is_compiled
from ldm_lite.runtime.patching import twin

Features = tuple[Tensor | None, ...]  # as UNet.forward takes them


class ActiveControls:
    """The controls of a plan, for images of one size.

    A step without any control runs the UNet alone.  If steps are compiled, all other steps run all controls, with
    weight 0 outside their range, since leaving one out would need another graph.  Style adapters and Redux append
    tokens to the context, only within their range.  An IP-Adapter's image has a separate attention.  None of these
    three is for the negative prompt's branches.
    """

    def __init__(
        self, model: CheckpointModel, controls: Sequence[LoadedControl], plan: Plan, size: tuple[int, int]
    ) -> None:
        """size is (width, height) in pixels.  Raises ValueError for sizes and UNets that an adapter does not fit."""
        self._num_steps = plan.num_steps
        self._compiled = is_compiled(model.run_row)
        nets: list[ControlNet] = []
        self._nets: list[tuple[Control, ControlInput]] = []  # with the inputs within their range of steps
        self._adapters: list[tuple[Control, Features]] = []
        self._styles: list[tuple[Control, Tensor]] = []
        self._prompts: list[tuple[Control, ImagePrompt]] = []
        for loaded in controls:
            control, network = loaded.control, loaded.network
            if isinstance(network, Tensor):
                self._styles.append((control, network))
                continue
            if isinstance(network, ImagePrompt):
                names = {layer: name for name, layer in model.unet.named_modules()}
                for layer in cross_attentions(model.unet):
                    if "forward" in vars(layer):  # one that does not read images
                        raise ValueError(
                            f"{control}: an IP-Adapter needs the UNet's own attention, and {names[layer]} was replaced"
                        )
                self._prompts.append((control, network))
                continue
            pixels = control.pixels(size).to(model.device, model.dtype)
            with torch.no_grad():  # what depends on the image alone is computed once
                if isinstance(network, ControlNet):
                    nets.append(network)
                    num = len(network.zero_convs) + 1
                    guess = guess_scales(num) if control.guess else [1.0] * num
                    scales = torch.tensor([control.weight * scale for scale in guess], device=pixels.device)
                    hint = ControlInput(network.embed_hint(pixels), scales, num_branches=1, pool=control.pool)
                    self._nets.append((control, hint))
                else:
                    factor, (width, height) = network.spec.factor, size
                    if width % factor or height % factor:
                        raise ValueError(
                            f"got {width}x{height} pixels, but {control.source} needs multiples of {factor}"
                        )
                    features = network(pixels[:, :1] if network.spec.in_channels == 1 else pixels)
                    weighted = tuple(control.weight * feature for feature in features)
                    placed = network.place(weighted, model.family.unet.num_res_blocks)
                    self._adapters.append((control, placed))
        self._controlled = ControlledUNet(model.unet, nets) if nets or self._adapters else None
        inner = model.unet if self._controlled is None else self._controlled
        self._with_images = UNetWithImages(twin(inner)) if self._prompts else None
        self._longer: dict[tuple[IdentityKey, tuple[bool, ...]], tuple[Branch, ...]] = {}
        self._images: tuple[object, Any] = None, None

    def wrapped(self, source: InputSource) -> InputSource:
        """Return inputs with the controls."""

        def inputs_of(call: Call) -> Inputs:
            inputs = source(call)
            inputs = inputs._replace(branches=self._with_tokens(inputs.branches, call.step))
            if not any(self._acts(control, call.step) for control, _ in (*self._nets, *self._adapters, *self._prompts)):
                return inputs
            signs = tuple(branch.positive for branch in running(inputs.branches, inputs.scale))
            rows = len(next(iter(inputs.branches[0].conditioning.values())))
            arguments: dict[str, Any] = dict(inputs.arguments or {})
            network: Any = inputs.network
            if self._controlled is not None:
                network, arguments["control"] = self._controlled, self._control(call.step, signs)
            if self._with_images is not None:
                images = self._image_rows(call.step, signs, rows)
                if images is not None:
                    network, arguments["images"] = self._with_images, images
            return inputs._replace(network=network, arguments=arguments)

        return inputs_of

    def _with_tokens(self, branches: tuple[Branch, ...], step: int) -> tuple[Branch, ...]:
        """Append the tokens of the styles that act in a step to the text of each branch."""
        acting = tuple(self._acts(control, step) for control, _ in self._styles)
        if not any(acting):
            return branches
        key = IdentityKey(branches), acting
        if key not in self._longer:
            tokens = torch.cat([tokens for (_, tokens), acts in zip(self._styles, acting, strict=True) if acts], dim=1)
            self._longer[key] = tuple(
                branch._replace(
                    conditioning={
                        **branch.conditioning,
                        "context": styled(branch.conditioning["context"], tokens, branch.positive),
                    }
                )
                for branch in branches
            )
        return self._longer[key]

    def _control(self, step: int, signs: tuple[bool, ...]) -> ControlInputs:
        """Return the inputs of a step; signs says which of the branches that run, negative ones first, are positive."""
        inputs: list[ControlInput | None] = []
        for control, control_input in self._nets:
            acts = self._acts(control, step)
            if not acts:
                control_input = control_input._replace(scales=torch.zeros_like(control_input.scales))
            if control.guess or control.pool:
                control_input = control_input._replace(num_branches=len(signs), positive=sum(signs))
            inputs.append(control_input if self._compiled or acts else None)
        features: Features | None = None
        for control, added in self._adapters:
            if not self._acts(control, step):
                added = tuple(None if feature is None else torch.zeros_like(feature) for feature in added)
            features = added if features is None else tuple(map(_plus, features, added))
        return ControlInputs(tuple(inputs), features)

    def _image_rows(self, step: int, signs: tuple[bool, ...], rows: int) -> Any:
        """Return the keys and values (K*B,T,C) of images, for every cross-attention; None without one.

        signs says of each of the K branches that run whether it is positive; each has B rows.
        """
        acting = tuple(self._acts(control, step) for control, _ in self._prompts)
        if not any(acting) and not self._compiled:
            return None
        key = acting, signs, rows
        if self._images[0] != key:

            def expanded(negative: Tensor, positive: Tensor) -> Tensor:
                return torch.cat([(positive if sign else negative).expand(rows, -1, -1) for sign in signs])

            adapters = [
                tuple(
                    (expanded(negative[0], positive[0]), expanded(negative[1], positive[1]) * acts)
                    for negative, positive in zip(prompt.negative, prompt.positive, strict=True)
                )
                for (_, prompt), acts in zip(self._prompts, acting, strict=True)
                if acts or self._compiled
            ]
            self._images = key, tuple(zip(*adapters, strict=True))
        return self._images[1]

    def _acts(self, control: Control, step: int) -> bool:
        # Rounded to a thousandth of a step: fractions like 0.3 are not exact in binary.
        first, last = (round(fraction * self._num_steps, 3) for fraction in (control.start, control.end))
        return first <= step and step + 1 <= last


def _plus(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    return b if a is None else a if b is None else a + b
