"""Run the sections with ldm_lite itself, by the functions that the commands use."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ldm_lite import generate
from ldm_lite.bench.workload import CHECK_SCALE, Inputs, Job, Setting, img2img_steps, inputs
from ldm_lite.checkpoint.model import Model
from ldm_lite.conditioning.prompts import encode_prompts
from ldm_lite.diffusion.guidance import Conditioning, classifier_free
from ldm_lite.diffusion.names import make_plan
from ldm_lite.diffusion.noise import SeededNoise
from ldm_lite.diffusion.plan import H, Plan, X
from ldm_lite.image import to_array


@dataclass(frozen=True)
class OurWorkload:
    """Every section by ldm_lite."""

    model: Model
    setting: Setting
    autocast: torch.dtype | None  # what torch.autocast computes in; None turns it off

    def job(self, section: str, batch: int) -> Job:
        """Prepare a section's work."""
        return JOBS[section](self, inputs(self.model.family, self.setting, batch))

    @contextlib.contextmanager
    def precision(self) -> Iterator[None]:
        """Run without gradients and with the workload's autocast."""
        cast = torch.autocast(self.model.device.type, self.autocast, enabled=self.autocast is not None)
        with torch.no_grad(), cast:
            yield


class _OurJob(Job):
    def __init__(self, workload: OurWorkload, given: Inputs) -> None:
        self.workload, self.given = workload, given
        self.model, self.setting = workload.model, workload.setting

    def check(self) -> Tensor:
        with self.workload.precision():
            return self._once()

    def run(self, calls: int) -> None:
        with self.workload.precision():
            self._repeat(calls)

    def _once(self) -> Tensor:
        raise NotImplementedError

    def _repeat(self, calls: int) -> None:
        for _ in range(calls):
            self._once()


class _Step(_OurJob):
    def _steps(self, count: int, scale: float) -> tuple[Plan, Tensor]:
        contexts = (self.given.context, self.given.uncond)
        cond, uncond = (Conditioning(context.to(self.model.device)) for context in contexts)
        plan = make_plan("ddim", self.model.schedule, count, spacing="trailing")
        latents = generate.denoise(self.model, self.given.noise, classifier_free(cond, uncond, scale), plan)
        return plan, latents

    def _once(self) -> Tensor:
        """Return the guided prediction of one step, recovered from its latents."""
        plan, latents = self._steps(1, CHECK_SCALE)
        if (failure := getattr(self.model.step, "failure", None)) is not None:
            raise ValueError(f"could not be compiled: {failure}")
        x = self.given.noise.to(latents) * plan.initial
        return (latents - float(plan.mix[0, 0] @ X) * x) / float(plan.mix[0, 0] @ H)

    def _repeat(self, calls: int) -> None:
        self._steps(calls, self.setting.scale)


class _Decode(_OurJob):
    def __init__(self, workload: OurWorkload, given: Inputs) -> None:
        super().__init__(workload, given)
        self.latents = given.noise.to(self.model.device) * self.model.family.scale_factor

    def _once(self) -> Tensor:
        return torch.stack(list(generate.decode(self.model, self.latents)))


class _Text(_OurJob):
    def __init__(self, workload: OurWorkload, given: Inputs) -> None:
        super().__init__(workload, given)
        self.ids = given.ids.to(self.model.device)

    def _once(self) -> Tensor:
        assert self.model.text_encoder is not None
        return self.model.text_encoder(self.ids)


class _Txt2img(_OurJob):
    """From prompts to uint8 pixels."""

    def __init__(self, workload: OurWorkload, given: Inputs) -> None:
        super().__init__(workload, given)
        self.plan = self._plan()

    def _plan(self) -> Plan:
        return make_plan(self.setting.sampler, self.model.schedule, self.setting.steps)

    def _start(self, noise: Tensor) -> tuple[Tensor, generate.InpaintMask | None]:
        """Return the initial latents, in units of noise, and the inpaint mask."""
        return noise, None

    def _once(self) -> Tensor:
        model, setting, batch = self.model, self.setting, len(self.given.noise)
        for repeat in range(setting.n_iter):
            cond, uncond = (encode_prompts(model, [text] * batch) for text in (setting.prompt, ""))
            seeds = [setting.seed + repeat * batch + k for k in range(batch)]
            noise = SeededNoise(seeds, model.latent_shape(setting.height, setting.width))()
            x, mask = self._start(noise)
            branches = classifier_free(cond, uncond, setting.scale)
            extras = generate.Extras(mask=mask)
            latents = generate.denoise(model, x, branches, self.plan, extras=extras)
            pixels = list(generate.decode(model, latents))
            arrays = [to_array(each) for each in pixels]
        assert len(arrays) == batch
        return torch.stack(pixels)


class _Inpaint(_Txt2img):
    """From a noise image, keeping its left half."""

    def _start(self, noise: Tensor) -> tuple[Tensor, generate.InpaintMask | None]:
        init, _ = generate.encode(self.model, self.given.image)
        mask = torch.zeros(1, 1, *noise.shape[2:], device=self.model.device)
        mask[..., mask.shape[3] // 2 :] = 1
        return noise, generate.InpaintMask(init, mask, noise)


class _Img2img(_Txt2img):
    """From a noise image."""

    def _plan(self) -> Plan:
        steps = self.setting.steps
        return make_plan(self.setting.sampler, self.model.schedule, steps, last=img2img_steps(steps))

    def _start(self, noise: Tensor) -> tuple[Tensor, generate.InpaintMask | None]:
        init, _ = generate.encode(self.model, self.given.image)
        a, s = (float(value) for value in self.plan.level[0])
        return (a * init + s * noise.to(init)) / self.plan.initial, None


JOBS: dict[str, type[_OurJob]] = {
    "step": _Step,
    "decode": _Decode,
    "text": _Text,
    "image": _Txt2img,
    "img2img": _Img2img,
    "inpaint": _Inpaint,
}
