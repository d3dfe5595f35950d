"""A UNet that skips some of its work: DeepCache, T-GATE and FreeU, on the network as it is.

- DeepCache (Ma et al. 2024): the deep blocks run only in every n-th call; between, their last output is used again.
  They also run where a text changes, a branch of guidance begins again, the noise rises again (Restart), or T-GATE
  records.
- T-GATE (Zhang et al. 2024): from a step on, cross-attention reuses the previous step's result, the mean over the
  branches of guidance; only the conditional branch runs then: diffusion.guidance.gated.  Regions have one branch
  each, which continues, with the mean of its own result and the unconditional one.
- FreeU (Si et al. 2024) saves nothing but changes the image: features that come up are amplified, and the low
  frequencies of the skips weakened.

A `Run` remembers the values that later calls reuse.  Its networks are functions of tensors, so that they are compiled
like any other: DeepCache's pass with all blocks, its pass with few, and FreeU's.  T-GATE's steps run uncompiled.
"""

import inspect
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ldm_lite.core.denoise import Call, Conditioning, Inputs, InputSource, run_row, running
from ldm_lite.core.layers import channels_last
from ldm_lite.diffusion.adaptive import AdaptivePlan
from ldm_lite.diffusion.plan import Plan, rises_before
from ldm_lite.models.controlnet import ControlledUNet
from ldm_lite.models.ip_adapter import UNetWithImages, cross_attentions
from ldm_lite.models.unet import LDMUNet, plus
from ldm_lite.runtime.compile import CompiledStep, in_two_parts
from ldm_lite.runtime.cuda_graphs import Step
from ldm_lite.runtime.patching import patch, patch_of, twin


@dataclass(frozen=True)
class Shortcuts:
    """The settings of DeepCache, T-GATE and FreeU."""

    every: int = 1  # DeepCache: all blocks run in calls 0, every, 2 every, ...
    branch: int = 0  # and in the others only the first 1 + branch input blocks and as many last output blocks
    gate: int | None = None  # T-GATE: the first step that uses the cross-attention of the step before
    free: tuple[float, float, float, float] | None = None  # FreeU: b1, b2, s1, s2


class _Now(NamedTuple):
    """A call of the network in a run, and its inputs."""

    number: int  # from 0
    step: int  # the step of the call, from 0
    texts: list[Conditioning]  # of all branches of the guidance
    used: tuple[int, ...]  # the branches that run
    rises: int  # how often the noise has risen before


class ShortenedUNet(nn.Module):
    """A UNet that runs few blocks, or whose features are weighted, as its further inputs say."""

    def __init__(self, unet: nn.Module) -> None:
        super().__init__()
        self.unet: Any = unet

    def forward(
        self,
        x: Tensor,
        t: Tensor,
        context: Tensor | None = None,
        y: Tensor | None = None,
        concat: Tensor | None = None,
        residuals: Sequence[Tensor] | None = None,
        features: Sequence[Tensor | None] | None = None,
        kept: int = 0,
        deep: Tensor | None = None,
        free: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Run as UNet.forward.

        kept, if not 0, is how many of the first input blocks and of the last output blocks always run.  deep is the
        input of the first of these output blocks: with it, only the kept blocks run.  Without it all blocks run, and
        deep is returned along with the prediction.  free (4,) are b1, b2, s1, s2 of FreeU.
        """
        unet = self.unet
        emb = unet.embed(t, y)  # (B, E)
        text = None if context is None else context.to(emb.dtype)
        x = x if concat is None else torch.cat([x, concat.to(x.dtype)], dim=1)
        x = channels_last(x.to(emb.dtype))
        skips: list[Tensor] = []
        runs_all, first = deep is None, len(unet.output_blocks) - kept

        for i, block in enumerate(unet.input_blocks):
            if runs_all or i < kept:
                x = plus(block(x, emb, text), None if features is None else features[i])
                skips.append(x if residuals is None else x + residuals[i])
        if runs_all:
            x = plus(unet.middle_block(x, emb, text), None if features is None else features[-1])
            x = x if residuals is None else x + residuals[-1]

        for i, block in enumerate(unet.output_blocks):
            if i == first:
                deep = x = x if deep is None else deep
            if runs_all or i >= first:
                skip = skips.pop()
                if free is not None:
                    x, skip = self._freed(x, skip, i, free)
                x = block(torch.cat([x, skip], dim=1), emb, text, skips[-1].shape[2:] if skips else None)
        out = unet.out(x)
        return (out, deep) if runs_all and deep is not None else out

    def _freed(self, x: Tensor, skip: Tensor, block: int, free: Tensor) -> tuple[Tensor, Tensor]:
        """Change what an output block on one of the two lowest resolutions reads, as in diffusers.

        Half of the channels of x times b; of the skip the lowest frequencies, 0 and -1 of each side, times s.
        """
        counts = [count + 1 for count in reversed(self.unet.spec.num_res_blocks)][:2]  # of blocks of these two
        if block >= sum(counts):
            return x, skip
        level = int(block >= counts[0])
        half, kept = x.shape[1] // 2, skip.float()
        # The real part of a Fourier transform back and forth, as products with the two frequencies' waves of each side.
        (cos_h, sin_h), (cos_w, sin_w) = (_low_frequencies(side, kept.device) for side in kept.shape[2:])
        low = cos_h @ kept @ cos_w + sin_h @ kept @ sin_w
        skip = (kept + (free[2 + level] - 1) * low).to(skip.dtype)
        return torch.cat([x[:, :half] * free[level], x[:, half:]], dim=1), skip


def _low_frequencies(side: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the projection of `side` values onto the frequencies 0 and -1: its real and its imaginary part."""
    places = torch.arange(side, dtype=torch.float32, device=device)
    angles = (places[:, None] - places) * (2 * math.pi / side)
    first = 1 if side > 1 else 0  # of one value both are the same
    return (first + angles.cos()) / side, angles.sin() / side


# ---- a run ----------------------------------------------------------------------------------------------------------


class Run:
    """Shortcuts in one run of a UNet: `wrapped` gives its inputs."""

    def __init__(self, unet: nn.Module, shortcuts: Shortcuts, plan: Plan | None = None) -> None:
        """Raises ValueError for a network other than a UNet, a branch that it lacks, and an adaptive plan."""
        if type(unet) is not LDMUNet:
            raise ValueError(f"DeepCache, T-GATE and FreeU are for UNets, not for {type(unet).__name__}")
        if isinstance(plan, AdaptivePlan):
            raise ValueError("DPM adaptive has no fixed steps for DeepCache, T-GATE or FreeU: use another sampler")
        if not 0 <= shortcuts.branch < len(unet.input_blocks) - 1:
            raise ValueError(f"got branch {shortcuts.branch}, expected 0 to {len(unet.input_blocks) - 2}")
        if shortcuts.gate is not None and unet.spec.context_dim is None:
            raise ValueError("T-GATE needs cross-attention, and this UNet reads no text")
        self.shortcuts, self.plan = shortcuts, plan
        self.now = _Now(0, 0, [], (0,), 0)
        device = next(unet.parameters()).device
        self._free = (
            None if shortcuts.free is None else torch.tensor(shortcuts.free, dtype=torch.float32, device=device)
        )
        self._deep: tuple[Tensor, _Now] | None = None  # DeepCache: what the first of the last output blocks read
        self._mode = ""  # of T-GATE: "record", "reuse" or neither
        self._crossed: dict[int, Tensor] = {}  # results of the cross-attentions (K*B,N,C), in their order
        self._crossed_branches: tuple[int, ...] = ()  # the branches of these results
        self._shortened: dict[Any, nn.Module] = {}  # network -> the same of a shortened UNet

    def wrapped(self, source: InputSource) -> InputSource:
        """Return the inputs of a run with a shortened UNet in place of its UNet; controls stay around it."""

        def inputs_of(call: Call) -> Inputs:
            inputs = source(call)
            assert self.plan is not None
            texts = [branch.conditioning for branch in inputs.branches]
            if {id(text) for text in texts} <= {id(text) for text in self.now.texts}:
                texts = self.now.texts  # after T-GATE's step there is only the last branch
            places = {id(text): place for place, text in enumerate(texts)}
            used = tuple(places[id(branch.conditioning)] for branch in running(inputs.branches, inputs.scale))
            self.now = _Now(call.number, call.step, texts, used, rises_before(self.plan, call.number))
            self._mode = self._gate_mode()
            if inputs.network not in self._shortened:
                self._shortened[inputs.network] = self._around(inputs.network)
            network: Any = self._shortened[inputs.network]
            step = inspect.unwrap(inputs.run_row)
            if self.shortcuts.gate is not None or not isinstance(step, CompiledStep):
                step = run_row
            more: dict[str, Any] = {"free": self._free}
            if self.shortcuts.every > 1:
                more |= {"deep": self._remembered(), "kept": 1 + self.shortcuts.branch}
                if more["deep"] is None:
                    network, step = self._remembering(network, step)
            return inputs._replace(network=network, run_row=step, arguments={**(inputs.arguments or {}), **more})

        return inputs_of

    def _around(self, network: Any) -> nn.Module:
        """Return a network with a shortened UNet in place of its UNet."""
        if type(network) is ControlledUNet:
            return ControlledUNet(self._around(network.unet), network.nets)
        if type(network) is UNetWithImages:
            return UNetWithImages(self._around(network.unet))
        return ShortenedUNet(network if self.shortcuts.gate is None else self._recording(network))

    # ---- DeepCache --------------------------------------------------------------------------------------------------

    def _remembering(self, network: Any, step: Step) -> tuple[Any, Step]:
        """Return a network and its step, one of which stores the deep features: the step if it is compiled."""
        now = self.now

        def predict(*args: Any, **conditioning: Any) -> Tensor:
            out, deep = network(*args, **conditioning)
            self._deep = deep, now
            return out

        def run(*args: Any) -> Tensor:
            registers, deep = in_two_parts(step, *args)
            self._deep = deep, now
            return registers

        return (network, run) if isinstance(step, CompiledStep) else (predict, step)

    def _remembered(self) -> Tensor | None:
        """Return the deep features of the branches that run now; None if the deep blocks have to run."""
        if self._deep is None or self.now.number % self.shortcuts.every == 0 or self._mode == "record":
            return None
        (features, then), now = self._deep, self.now
        if then.texts is not now.texts or then.rises != now.rises or not set(now.used) <= set(then.used):
            return None
        if now.used == then.used:
            return features
        parts = features.view(len(then.used), -1, *features.shape[1:])  # (K, B, C, h, w)
        return parts[[then.used.index(k) for k in now.used]].flatten(0, 1)

    # ---- T-GATE -----------------------------------------------------------------------------------------------------

    def _gate_mode(self) -> str:
        """Whether this call records the results of cross-attention, of all blocks, or uses them, or neither."""
        gate, step = self.shortcuts.gate, self.now.step
        if gate is None or step < gate - 1:
            return ""
        if step >= gate and self._crossed:
            return "reuse"
        self._crossed_branches = self.now.used
        return "record"

    def _recording(self, unet: nn.Module) -> nn.Module:
        """Return a copy of a UNet whose cross-attentions record their results, and use them."""
        unet = twin(unet)
        for place, layer in enumerate(cross_attentions(unet)):
            inner = patch_of(layer) or type(layer).forward

            def forward(layer: Any, x: Tensor, context: Tensor, place: int = place, inner: Any = inner) -> Tensor:
                if self._mode == "reuse":
                    return self._mean(self._crossed[place])
                out: Tensor = inner(layer, x, context)
                if self._mode == "record":
                    self._crossed[place] = out
                return out

            patch(layer, forward)
        return unet

    def _mean(self, results: Tensor) -> Tensor:
        """Return stored results of cross-attention (K*B,N,C) for the branches that run now.

        A single branch uses the mean over all; each of several uses the mean of its own result and branch 0's, the
        unconditional one.
        """
        then, now = self._crossed_branches, self.now.used
        if then == now:
            return results
        parts = results.view(len(then), -1, *results.shape[1:])  # (K, B, N, C)
        if len(now) == 1:
            return parts.mean(dim=0)
        alone = parts[[then.index(branch) for branch in now]]
        return ((alone + parts[:1]) / 2).flatten(0, 1)
