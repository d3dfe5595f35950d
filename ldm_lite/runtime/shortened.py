"""A UNet that leaves out work it can do without: DeepCache, T-GATE and FreeU, on the network as it is.

- DeepCache (Ma et al. 2024): the deep blocks run only in every n-th call; between, their last output is used again.
  They also run where a text changes, a branch of guidance begins again, the noise rises again (Restart), or T-GATE
  records.
- T-GATE (Zhang et al. 2024): from a step on, the result of cross-attention is that of the step before, the mean over
  the branches of guidance; only the conditional branch runs then, which is guidance_steps.Within's part.  Regions have
  a branch each that runs on: with the mean of its own result and the unconditional one.
- FreeU (Si et al. 2024) saves nothing but changes the image: features that come up are amplified, and the low
  frequencies of the skips weakened.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ldm_lite.core.layers import channels_last
from ldm_lite.diffusion.guidance import Branches, Conditioning
from ldm_lite.diffusion.plan import Plan, rises_before
from ldm_lite.models.controlnet import ControlledUNet
from ldm_lite.models.transformer import Recorded, TextCache
from ldm_lite.models.unet import UNet, plus


class Call(NamedTuple):
    """A call of the network in a run, and what it reads besides latents."""

    number: int  # from 0
    step: int  # that it belongs to, from 0
    texts: tuple[Conditioning, ...] = ()  # of all branches of guidance
    used: tuple[int, ...] = (0,)  # which of them run
    descent: int = 0  # how often the noise has risen before

    @staticmethod
    def of(plan: Plan, number: int, branches: Branches) -> "Call":
        """Return a call of a plan."""
        step = int(plan.step[number])
        return Call(number, step, branches.at(number), branches.used_at(step), rises_before(plan, number))


@dataclass(frozen=True)
class Shortcuts:
    """What is left out, or changed."""

    every: int = 1  # DeepCache: all blocks run in calls 0, every, 2 every, ...
    branch: int = 0  # and in the others only the first 1 + branch input blocks and as many last output blocks
    gate: int | None = None  # T-GATE: the first step that uses the cross-attention of the step before
    free: tuple[float, float, float, float] | None = None  # FreeU: b1, b2, s1, s2


class ShortenedUNet(nn.Module):
    """A UNet with shortcuts in one run; call at() before each call.  It remembers features of the run."""

    def __init__(self, unet: nn.Module, shortcuts: Shortcuts) -> None:
        """Raises ValueError for another network than a UNet, and a branch that it does not have."""
        super().__init__()
        if type(unet) is not UNet:
            raise ValueError(f"DeepCache, T-GATE and FreeU are for UNets, not for {type(unet).__name__}")
        if not 0 <= shortcuts.branch < len(unet.input_blocks) - 1:
            raise ValueError(f"got branch {shortcuts.branch}, wanted 0 to {len(unet.input_blocks) - 2}")
        if shortcuts.gate is not None and unet.spec.context_dim is None:
            raise ValueError("T-GATE needs cross-attention, and this UNet reads no text")
        self.unet, self.shortcuts = unet, shortcuts
        self._call = Call(0, 0)
        self._deep: tuple[Tensor, Call] | None = None  # the input of the first output block that always runs
        self._crossed: tuple[TextCache, tuple[int, ...]] | None = None  # cross-attention's results, of which branches

    def at(self, call: Call, network: Any) -> nn.Module:
        """Return the network for a call: this one, or `network`'s ControlNets on it."""
        self._call = call
        return ControlledUNet(self, network.nets) if isinstance(network, ControlledUNet) else self

    def forward(
        self,
        x: Tensor,
        t: Tensor,
        context: Tensor | None = None,
        y: Tensor | None = None,
        *,
        cache: TextCache | None = None,
        control: tuple[Tensor, ...] | None = None,
        features: tuple[Tensor | None, ...] | None = None,
    ) -> Tensor:
        """Run as UNet.forward."""
        gate = self.shortcuts.gate
        if gate is None or self._call.step < gate - 1 or context is None:
            return self._run(x, (t, context, y), cache, control, features)
        if not self._records and self._crossed is not None:
            results, had = self._crossed
            crossed = _map(results, lambda each: _mean(each, had, self._call.used))
            return self._run(x, (t, context, y), crossed, control, features)
        # Without a cache the layers compute their keys and values: their weights may be elsewhere, or in 8 bits, now.
        recorded = _map(self.unet.text_cache(None) if cache is None else cache, Recorded)
        out = self._run(x, (t, context, y), recorded, control, features)
        self._crossed = _map(recorded, lambda each: each.out), self._call.used
        return out

    def _run(
        self,
        x: Tensor,
        inputs: tuple[Tensor, Tensor | None, Tensor | None],
        cache: TextCache | None,
        control: tuple[Tensor, ...] | None,
        features: tuple[Tensor | None, ...] | None,
    ) -> Tensor:
        unet, (t, context, y) = self.unet, inputs
        whole, kept = len(unet.input_blocks), 1 + self.shortcuts.branch
        deep, x = self._kept(), channels_last(x)
        emb, skips = unet.embed(t, y, x.dtype), []  # (B, E)
        for i, block in enumerate(unet.input_blocks[: whole if deep is None else kept]):
            x = block(x, emb, context, None, cache)
            x = plus(x, None if features is None else features[i])
            skips.append(x if control is None else x + control[i])
        if deep is not None:
            x = deep
        else:
            x = plus(unet.middle_block(x, emb, context, None, cache), None if features is None else features[-1])
            x = x if control is None else x + control[-1]
        for i, block in enumerate(unet.output_blocks):
            if deep is not None and i < whole - kept:
                continue
            if i == whole - kept and self.shortcuts.every > 1 and deep is None:
                self._deep = x, self._call
            skip = skips.pop()
            if self.shortcuts.free is not None:
                x, skip = self._freed(x, skip, self._levels[i])
            x = block(torch.cat([x, skip], dim=1), emb, context, skips[-1].shape[2:] if skips else None, cache)
        return unet.out(x)

    @property
    def _records(self) -> bool:
        """Whether this call keeps the results of cross-attention: of all blocks."""
        gate = self.shortcuts.gate
        return gate is not None and self._call.step >= gate - 1 and (self._call.step < gate or self._crossed is None)

    def _kept(self) -> Tensor | None:
        """Return the deep features of the branches that run now; None if the deep blocks have to run."""
        if self._deep is None or self._call.number % self.shortcuts.every == 0 or self._records:
            return None
        (features, had), now = self._deep, self._call
        if had.texts is not now.texts or had.descent != now.descent or not set(now.used) <= set(had.used):
            return None
        each = features.view(len(had.used), -1, *features.shape[1:])  # (K, B, C, h, w)
        return features if now.used == had.used else each[[had.used.index(k) for k in now.used]].flatten(0, 1)

    @property
    def _levels(self) -> list[int]:
        """The level of each output block, 0 for the lowest resolution."""
        counts = [count + 1 for count in reversed(self.unet.spec.num_res_blocks)]
        return [level for level, count in enumerate(counts) for _ in range(count)]

    def _freed(self, x: Tensor, skip: Tensor, level: int) -> tuple[Tensor, Tensor]:
        """FreeU, on the two lowest resolutions, as in diffusers: half of the channels times b, low frequencies s."""
        if self.shortcuts.free is None or level > 1:
            return x, skip
        b, s = self.shortcuts.free[level], self.shortcuts.free[2 + level]
        half = x.shape[1] // 2
        return torch.cat([x[:, :half] * b, x[:, half:]], dim=1), _fewer_low(skip, s)


def _fewer_low(x: Tensor, scale: float) -> Tensor:
    """Multiply the lowest frequencies of features (B,C,h,w) by scale: 0 and -1 of each side."""
    frequencies = torch.fft.fftn(x.float(), dim=(-2, -1))
    low = [torch.zeros(side, device=x.device) for side in x.shape[2:]]
    for each in low:
        each[[0, -1]] = 1
    mask = 1 + (scale - 1) * low[0][:, None] * low[1]
    return torch.fft.ifftn(frequencies * mask, dim=(-2, -1)).real.to(x.dtype)


def _map(cache: TextCache, make: Callable[[Any], Any]) -> TextCache:
    """Replace the entry of each cross-attention of text; attn1 keeps its own."""
    return tuple(
        None if layer is None else tuple((None if each is None else (each[0], make(each[1]))) for each in layer)
        for layer in cache
    )


def _mean(results: Tensor, had: tuple[int, ...], now: tuple[int, ...]) -> Tensor:
    """Return results of cross-attention (K*B,N,C) of the branches `had`, as the branches that run now use them.

    One branch uses the mean over all; several, each the mean of its own and the unconditional one, the branch 0.
    """
    if had == now:
        return results
    each = results.view(len(had), -1, *results.shape[1:])  # (K, B, N, C)
    if len(now) == 1:
        return each.mean(dim=0)
    own = each[[had.index(branch) for branch in now]]
    return ((own + each[:1]) / 2).flatten(0, 1)
