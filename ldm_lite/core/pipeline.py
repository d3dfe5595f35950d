"""Pipeline: a loaded model with the tasks as methods; load() makes one."""

from __future__ import annotations

import logging
import numbers
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from ldm_lite.core import features, saving
from ldm_lite.core.denoise import Branch, Conditioning, Draw, Inputs, State, run_plan, run_row
from ldm_lite.core.family import recognise, schedule_of
from ldm_lite.core.files import Tensors, bundled, open_tensors
from ldm_lite.core.image import open_image, pad, to_pil, to_pixels
from ldm_lite.core.job import Result, results_of
from ldm_lite.core.model import Model
from ldm_lite.core.networks import DTYPES, load_network, pick_device, split
from ldm_lite.core.plan import Plan
from ldm_lite.core.samplers import make_plan
from ldm_lite.core.tasks import noise_of

log = logging.getLogger("ldm_lite")


class Pipeline(Model):
    """A loaded model with the tasks as methods.  Its fields, with_networks and with_attention are model.Model's.

    `options` are the fields of options.Options, by name, and the options of features.  Raises ValueError, one line,
    for options that do not fit.
    """

    # ---- tasks ------------------------------------------------------------------------------------------------------

    def txt2img(self, prompt: str | Sequence[str], **options: Any) -> list[Image.Image]:
        """Text to image: one image for each prompt, or batch_size of a single prompt."""
        return [result.image for result in self.results(prompt=prompt, **options)]

    def img2img(self, prompt: str | Sequence[str], image: Any, **options: Any) -> list[Image.Image]:
        """Image to image; an image is a path, PIL, an array (H,W,3) uint8 or a tensor (3,H,W) in [-1,1]."""
        if image is None:
            raise ValueError("got no image to start from")
        return [result.image for result in self.results(prompt=prompt, image=image, **options)]

    def inpaint(self, prompt: str | Sequence[str], image: Any, mask: Any, **options: Any) -> list[Image.Image]:
        """Repaint an image where the mask is white."""
        if mask is None:
            raise ValueError("got no mask: it is white where the image is repainted")
        return [result.image for result in self.results(prompt=prompt, image=image, mask=mask, **options)]

    def results(self, **options: Any) -> Iterator[Result]:
        """Yield the results of a task, each as soon as it is decoded: pixels, with the prompt and the seed."""
        events = features.events_of(self, *features.read_arguments(options))
        return results_of(events)  # a generator: each step runs when its result is asked for

    def stream(self, prompt: str | Sequence[str], **options: Any) -> Iterator[State]:
        """Yield the state after each step; leaving the loop stops it.  pipe.decode(state.latents), or .x0, shows it."""
        arguments = {"prompt": prompt, **options}
        events = features.events_of(self, *features.read_arguments(arguments))
        return (event for event in events if isinstance(event, State))

    # ---- parts ------------------------------------------------------------------------------------------------------
    # For loops of your own: tasks call none of them, and features do not apply in them.

    def noise(
        self,
        seed: int | Sequence[int] = 42,
        height: int | None = None,
        width: int | None = None,
    ) -> Tensor:
        """Return unit noise (B,C,h,w), float32 on the CPU, as the tasks draw it first, for one seed or B seeds."""
        seeds: Any = seed if np.ndim(seed) else [seed]
        if not len(seeds) or not all(isinstance(number, numbers.Integral) for number in seeds):
            raise ValueError(f"got seed={seed!r}, expected a whole number, or a list of them")
        height = self.family.resolution if height is None else height
        width = self.family.resolution if width is None else width
        shape = self.latent_shape(height, width)
        return noise_of([int(number) for number in seeds], shape)()

    def plan(self, sampler: str | None = None, steps: int | None = None, **options: Any) -> Plan:
        """Return a sampler's plan (default: the family's sampler); options are spacing=, eta= and last=."""
        steps = self.family.steps if steps is None else steps
        return make_plan(sampler or self.family.sampler, self.schedule, steps, **options)

    def denoise(
        self,
        noise: Tensor,
        cond: Conditioning,
        uncond: Conditioning | None,
        plan: Plan,
        scale: float | None = None,
        draw: Draw | None = None,
    ) -> Tensor:
        """Run a plan from unit noise (B,C,h,w) and return the latents (B,C,h,w); one conditioning serves all B images.

        scale is that of classifier-free guidance, by default the family's; without uncond there is none.  draw makes
        the noise of samplers that add some: tasks.noise_of(seeds, shape), say.
        """
        self.check_latents(noise, "noise")
        self.check_plan(plan)
        scale = self.family.scale if scale is None else scale
        if draw is None and plan.adds_noise.any():
            raise ValueError("this sampler adds noise at every step: pass `draw=`, as tasks.noise_of makes it")

        branches: tuple[Branch, ...] = (Branch(_for_images(cond, len(noise))),)
        if uncond is not None and scale != 1:
            branches = Branch(_for_images(uncond, len(noise)), positive=False), *branches
        inputs = Inputs(self.unet, branches, scale, run_row=self.run_row)
        x = noise.to(self.device, torch.float32)
        draw = draw or (lambda: noise)  # never called: no row of the plan adds noise
        for state in run_plan(x * plan.initial, plan, lambda call: inputs, draw):
            x = state.latents
        return x

    def decode(self, latents: Tensor) -> list[Image.Image]:
        """Decode latents (B,C,h,w) to B images."""
        self.check_latents(latents, "latents")
        return [to_pil(pixels) for pixels in self.decode_pixels(latents)]

    def encode(self, image: Any) -> Tensor:
        """Encode an image, or a list of images of one size, to the mean of their latents (B,C,h,w)."""
        images = image if isinstance(image, (list, tuple)) else [image]
        pixels = [pad(to_pixels(open_image(source)), self.vae.spec.factor) for source in images]
        sizes = {(width, height) for _, height, width in (part.shape for part in pixels)}
        if len(sizes) != 1:
            raise ValueError(f"got images of sizes {sorted(sizes)}, expected one or more images of the same size")
        return self.encode_pixels(torch.stack(pixels))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write all networks, in their dtype, with what load() needs to know, into one .safetensors file.

        Raises ValueError, one line, before anything is written, for a pipeline that load() would not make again, as
        with an attention function, hooks, or a schedule or condition of your own.
        """
        saving.save(self, Path(path))


def _for_images(conditioning: Conditioning, count: int) -> Conditioning:
    """Return a conditioning of one prompt, or of as many as there are images, for each of the images."""
    for name, part in conditioning.items():
        if len(part) not in (1, count):
            raise ValueError(f"got {name} of {len(part)} prompts for {count} images, expected one or as many")
    return {name: part.expand(count, *part.shape[1:]) for name, part in conditioning.items()}


def load(
    *sources: str | os.PathLike[str],
    device: str | torch.device | None = None,
    dtype: str | torch.dtype | None = None,
    ema: bool = True,
    compile: bool = False,
    trainable: bool = False,
    metadata: Mapping[str, str] | None = None,
) -> Pipeline:
    """Load a checkpoint; networks of further files replace the first's; without a file, the bundled model.

    The device is by default a CUDA GPU, else Apple's, else the CPU.  dtype is "fp32", "fp16" or "bf16"; by default
    float16 on CUDA, float32 elsewhere and for what is `trainable`; other weights are frozen.  With `ema` the UNet is
    the EMA copy, if a file has one.  metadata overrides the file's: {"prediction": "v"}, ...

    Raises FileNotFoundError, and ValueError, one line, for files that are damaged, would run code, or hold an unknown
    model, for unknown metadata, and for a device that is not there.
    """
    began = time.perf_counter()
    device = pick_device(device)
    if dtype is None:
        dtype = "fp16" if device.type == "cuda" and not trainable else "fp32"
    precision = DTYPES.get(dtype) if isinstance(dtype, str) else dtype
    if not isinstance(precision, torch.dtype) or not precision.is_floating_point:
        raise ValueError(f"got dtype {dtype!r}, expected one of {', '.join(DTYPES)}")
    files = [open_tensors(Path(source)) for source in sources or (bundled(),)]
    parts: dict[str, Tensors] = {}
    for file in files:
        parts |= split(file, ema)
    try:
        family = recognise(parts, files[0].metadata, metadata or {})
        schedule = schedule_of(files[0], family)
    except ValueError as error:
        raise ValueError(f"{files[0].path}: {error}") from error
    values, usual = schedule.alpha_bar, family.schedule.alpha_bar
    if values.shape != usual.shape or not np.allclose(values, usual, rtol=1e-9, atol=0):
        log.warning("%s: using the noise schedule in the file, which is not %s's", files[0].path.name, family.title)
    networks: dict[str, Any] = {}
    for kind, spec in family.specs.items():
        network: Any = load_network(kind, spec, parts[kind], device, precision).requires_grad_(trainable)
        if device.type == "cuda":
            network.to(memory_format=torch.channels_last)
        networks[kind] = network
    log.info("%s: %s, loaded in %.1f s", files[0].path, family.title, time.perf_counter() - began)
    return Pipeline(
        name=files[0].path.stem,
        family=family,
        schedule=schedule,
        networks=networks,
        run_row=torch.compile(run_row) if compile else run_row,
    )
