"""Pipeline: a loaded model with the tasks as methods; load() makes one.

Each method takes its task's options by name: the same ones as the command's flags.  docs/tour.md has examples.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, TypeVar, Unpack, overload

import torch
from torch import Tensor

from ldm_lite import generate
from ldm_lite.checkpoint.loading import load_model
from ldm_lite.checkpoint.model import CheckpointModel
from ldm_lite.cli.declared import option_rows
from ldm_lite.cli.options import LoadOptions, with_features
from ldm_lite.cli.progress import step_bar
from ldm_lite.cli.task_options import (
    ConditioningOptions,
    Img2imgOptions,
    InpaintOptions,
    Txt2imgOptions,
    UpscaleOptions,
)
from ldm_lite.conditioning.inputs import with_files
from ldm_lite.conditioning.prompts import PromptOptions, check_used, encode_prompts, guided
from ldm_lite.core import features
from ldm_lite.core.denoise import Draw, InputSource, State
from ldm_lite.core.layers import AttentionFn
from ldm_lite.core.schedule import Spacing
from ldm_lite.core.tasks import noise_of
from ldm_lite.diffusion.guidance import Conditioning, ScaleOrFunction, as_conditioning, conditioning_rows
from ldm_lite.diffusion.names import named_plan
from ldm_lite.diffusion.plan import Plan
from ldm_lite.image import Images, pad, to_array, to_pil, to_pixels
from ldm_lite.runtime import attention
from ldm_lite.runtime.precision import short_name
from ldm_lite.tasks import img2img, inpaint, txt2img, upscale
from ldm_lite.tasks.image_inputs import open_source
from ldm_lite.tasks.job import Task, results, run

if TYPE_CHECKING:
    from ldm_lite.adapters.lora import Lora
    from ldm_lite.adapters.merging import MergedLora
    from ldm_lite.cli import arguments as t

log = logging.getLogger("ldm_lite")

AnyOptions = TypeVar("AnyOptions")

FIRST_ARGUMENTS = {"image": "init_img", "source": "ckpt"}  # options that are arguments of another name
OUTPUTS = ("pil", "numpy", "tensor", "result")


def load(
    source: Any = None,
    *,
    device: str | torch.device | None = None,
    dtype: str | torch.dtype | None = None,
    **options: Unpack[t.Load],
) -> Pipeline:
    """Load a checkpoint: a file, a diffusers folder, owner/repository[/file] on the hub, or None for the bundled model.

    dtype is "fp32", "fp16" or "bf16", or per network "fp16,vae=fp32".  options are the fields of LoadOptions: files for
    single networks (vae=, unet=, text_encoder=), lora=["FILE:WEIGHT"], ema=, prediction=, zero_snr=, metadata={...},
    and runtime options: attention=, compile=, compiled=, matmul_precision=, offload=, storage=, vae_tiling=.
    Raises FileNotFoundError or ValueError, one line that says what to do.
    """
    named: dict[str, Any] = dict(options) if source is None else {"source": source, **options}
    if isinstance(named.get("metadata"), Mapping):
        named["metadata"] = tuple(f"{key}={value}" for key, value in named["metadata"].items())
    place = {"device": None if device is None else str(device)}
    place["dtype"] = short_name(dtype) if isinstance(dtype, torch.dtype) else dtype
    return load_model(_options(LoadOptions, "load", {**place, **named}), Pipeline)


class Pipeline(CheckpointModel):
    """A loaded model with the tasks as methods.  Immutable: threads may share it."""

    if not TYPE_CHECKING:  # where an unknown name is an error anyway

        def __getattr__(self, name: str) -> Any:
            """Raise AttributeError: for names of other programs, with ours."""
            if instead := "" if name.startswith("_") else _elsewhere(name):
                raise AttributeError(f"a Pipeline has no {name}: {instead}")
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}", name=name, obj=self)

        def __setattr__(self, name: str, value: object) -> None:
            """Raise AttributeError: nothing would read it."""
            instead = _elsewhere(name) or "it is immutable, and threads may share it"
            raise AttributeError(f"a Pipeline takes no {name}: {instead}")

        def __call__(self, *_: object, **__: object) -> None:
            """Raise TypeError: a Pipeline has a method for each task."""
            raise TypeError("a Pipeline cannot be called: use pipe.txt2img(PROMPT, ...), pipe.img2img or pipe.inpaint")

    # ---- tasks ------------------------------------------------------------------------------------------------------

    @overload
    def txt2img(self, prompt: t.Prompt = None, *, output: t.Pil = "pil", **options: Unpack[t.Txt2img]) -> t.Images: ...
    @overload
    def txt2img(self, prompt: t.Prompt = None, *, output: t.Numpy, **options: Unpack[t.Txt2img]) -> t.Arrays: ...
    @overload
    def txt2img(self, prompt: t.Prompt = None, *, output: t.AsTensor, **options: Unpack[t.Txt2img]) -> t.Tensors: ...
    @overload
    def txt2img(self, prompt: t.Prompt = None, *, output: t.Whole, **options: Unpack[t.Txt2img]) -> t.Results: ...
    def txt2img(self, prompt: t.Prompt = None, *, output: str = "pil", **options: Unpack[t.Txt2img]) -> list[Any]:
        """Text to image: one image for each prompt, or batch_size of a single prompt.

        options are the fields of Txt2imgOptions: steps=, sampler=, scale=, seed= (one, or one for each image; -1 is a
        random one), negative_prompt=, width=, height=, batch_size=, control=[Control(...)], ...; and progress=True for
        a bar, on_step= for a function that gets the State after every step.  output is "pil" (RGB, with
        .info["parameters"]), "numpy" ((H,W,3) uint8), "tensor" ((3,H,W) float32 in [-1,1]) or "result" (a Result with
        pixels, prompt and seed).  Raises ValueError for options that do not fit.
        """
        return _outputs(txt2img, self, Txt2imgOptions, "txt2img", {"prompt": prompt, **options}, output)

    @overload
    def img2img(
        self, prompt: t.Prompt, image: Any, *, output: t.Pil = "pil", **options: Unpack[t.Img2img]
    ) -> t.Images: ...
    @overload
    def img2img(self, prompt: t.Prompt, image: Any, *, output: t.Numpy, **options: Unpack[t.Img2img]) -> t.Arrays: ...
    @overload
    def img2img(
        self, prompt: t.Prompt, image: Any, *, output: t.AsTensor, **options: Unpack[t.Img2img]
    ) -> t.Tensors: ...
    @overload
    def img2img(self, prompt: t.Prompt, image: Any, *, output: t.Whole, **options: Unpack[t.Img2img]) -> t.Results: ...
    def img2img(self, prompt: t.Prompt, image: Any, *, output: str = "pil", **options: Unpack[t.Img2img]) -> list[Any]:
        """Image to image: every prompt on every image (a path, PIL, numpy or tensor, or a list of them).

        options are the fields of Img2imgOptions: strength=, resize=, and txt2img's.  Output and errors as for txt2img.
        """
        return _outputs(img2img, self, Img2imgOptions, "img2img", {"prompt": prompt, "image": image, **options}, output)

    @overload
    def inpaint(
        self, prompt: t.Prompt, image: Any, mask: Any = None, *, output: t.Pil = "pil", **options: Unpack[t.Fill]
    ) -> t.Images: ...
    @overload
    def inpaint(
        self, prompt: t.Prompt, image: Any, mask: Any = None, *, output: t.Numpy, **options: Unpack[t.Fill]
    ) -> t.Arrays: ...
    @overload
    def inpaint(
        self, prompt: t.Prompt, image: Any, mask: Any = None, *, output: t.AsTensor, **options: Unpack[t.Fill]
    ) -> t.Tensors: ...
    @overload
    def inpaint(
        self, prompt: t.Prompt, image: Any, mask: Any = None, *, output: t.Whole, **options: Unpack[t.Fill]
    ) -> t.Results: ...
    def inpaint(
        self, prompt: t.Prompt, image: Any, mask: Any = None, *, output: str = "pil", **options: Unpack[t.Fill]
    ) -> list[Any]:
        """Repaint where the mask is white; extend= paints beyond the edges.  Images and masks are given as for img2img.

        options are the fields of InpaintOptions: feather=, strength=, and txt2img's.  Output and errors as for txt2img.
        """
        named = {"prompt": prompt, "image": image, "mask": mask, **options}
        return _outputs(inpaint, self, InpaintOptions, "inpaint", named, output)

    @overload
    def upscale(
        self, image: Any, prompt: t.Prompt = None, *, output: t.Pil = "pil", **options: Unpack[t.Enlarge]
    ) -> t.Images: ...
    @overload
    def upscale(
        self, image: Any, prompt: t.Prompt = None, *, output: t.Numpy, **options: Unpack[t.Enlarge]
    ) -> t.Arrays: ...
    @overload
    def upscale(
        self, image: Any, prompt: t.Prompt = None, *, output: t.AsTensor, **options: Unpack[t.Enlarge]
    ) -> t.Tensors: ...
    @overload
    def upscale(
        self, image: Any, prompt: t.Prompt = None, *, output: t.Whole, **options: Unpack[t.Enlarge]
    ) -> t.Results: ...
    def upscale(
        self, image: Any, prompt: t.Prompt = None, *, output: str = "pil", **options: Unpack[t.Enlarge]
    ) -> list[Any]:
        """Enlarge images four times, with an upscaler's checkpoint.

        options are the fields of UpscaleOptions: noise_level=, tile=, and txt2img's.  Output and errors as for txt2img.
        """
        return _outputs(upscale, self, UpscaleOptions, "upscale", {"prompt": prompt, "image": image, **options}, output)

    def stream(self, prompt: t.Prompt = None, **options: Unpack[t.Txt2img]) -> Iterator[State]:
        """Run txt2img step by step: yield the state after each step, with its latents and the predicted x0.

        decode() turns either into images; nothing is decoded otherwise.  Leaving the loop stops the job.
        """
        task, on_step = _prepared(txt2img, self, Txt2imgOptions, "stream", {"prompt": prompt, **options})

        def states() -> Iterator[State]:
            state: Any  # without decoding there are no results
            for state in run(task, decoding=False):
                if on_step is not None:
                    on_step(state)
                yield state

        return states()

    # ---- parts ------------------------------------------------------------------------------------------------------

    def encode_prompt(self, prompt: str | Sequence[str], *, negative: bool = False, **options: Any) -> Conditioning:
        """Return the conditioning of one prompt, or of B prompts.

        options are prompt_syntax=, clip_skip=, size=(height, width), and the fields of ConditioningOptions.
        """
        size = options.pop("size", None)
        sides = size if isinstance(size, (tuple, list)) and len(size) == 2 else (None, None)
        if size is not None and None in sides:
            raise TypeError(f"got `size` {size!r:.60}, expected (height, width) in pixels")
        names = [field.name for field in dataclasses.fields(ConditioningOptions)]
        if unknown := [name for name in options if name not in ("prompt_syntax", "clip_skip", *names)]:
            from ldm_lite.cli.synonyms import advice  # a table that is only read here

            takes = ["prompt", "negative", "size", "prompt_syntax", "clip_skip", *names]
            hint = advice(unknown[0], {name: name for name in takes}, "encode_prompt", python=True, elsewhere=False)
            raise TypeError(
                f"encode_prompt() has no argument {unknown[0]!r}: {hint or 'it takes ' + ', '.join(takes[1:])}"
            )
        read = Txt2imgOptions(prompt=prompt, height=sides[0], width=sides[1], **options)
        if not (prompts := read.prompt) and prompts != "":
            raise ValueError("no prompt: give a text, or a list of one or more")
        extra = with_files(ConditioningOptions(**{name: getattr(read, name) for name in names}))
        check_used([self], extra)
        size = None if read.height is None or read.width is None else (read.height, read.width)
        read_as = PromptOptions(read.prompt_syntax, read.clip_skip, negative=negative, size=size, extra=extra)
        return Conditioning(**encode_prompts(self, [prompts] if isinstance(prompts, str) else prompts, read_as))

    def noise(self, seed: int | Sequence[int] = 42, height: int | None = None, width: int | None = None) -> Tensor:
        """Return unit noise (B,C,h,w), float32 on the CPU, as the tasks draw it, for one seed or B seeds."""
        return self.noise_source(seed, height, width)()

    def noise_source(self, seed: int | Sequence[int] = 42, height: int | None = None, width: int | None = None) -> Draw:
        """Return a function that draws noise(...) first, then at each call the next noise of a stochastic sampler."""
        options, side = Txt2imgOptions(seed=seed, height=height, width=width), self.family.resolution
        shape = self.latent_shape(options.height or side, options.width or side)
        if not (seeds := options.seed) and seeds != 0:
            raise ValueError("no seed: give a whole number, or a list of one or more")
        return noise_of([seeds] if isinstance(seeds, int) else seeds, shape)

    def plan(
        self,
        sampler: str | None = None,
        steps: int | None = None,
        *,
        spacing: str | Spacing | None = None,
        eta: float | None = None,
        churn: float | None = None,
        last: int | None = None,
        height: int | None = None,
        width: int | None = None,
    ) -> Plan:
        """Return a sampler's plan (default: the family's sampler and steps); with `last` only that many final steps.

        height and width are those of the image in pixels, by which FLUX.1 [dev] shifts its noise levels (default: those
        that the pipeline was sized() for, else the family's).  Raises ValueError as named_plan does.
        """
        sampling: Any = {"sampler": sampler, "steps": steps, "spacing": spacing, "eta": eta, "churn": churn}
        options = Txt2imgOptions(**sampling, height=height, width=width)
        schedule, side = self.schedule, self.family.resolution
        if height is not None or width is not None:
            schedule = self.sized(self.latent_shape(options.height or side, options.width or side)).schedule
        sampler, steps = options.sampler or self.family.sampler, options.steps or self.family.steps
        return named_plan(
            sampler, schedule, steps, eta=options.eta, churn=options.churn, spacing=options.spacing, last=last
        )

    def denoise(
        self,
        noise: Tensor,
        cond: Conditioning,
        uncond: Conditioning | None,
        plan: Plan,
        scale: float | None = None,
        draw: Draw | None = None,
        *,
        guidance: ScaleOrFunction | None = None,
        on_step: Callable[[State], object] = lambda state: None,
        wrap: Callable[[InputSource], InputSource] = lambda source: source,
    ) -> Tensor:
        """Run a plan from noise (B,C,h,w) and return the latents (B,C,h,w); a single conditioning serves all B images.

        scale is that of classifier-free guidance, by default the family's.  guidance replaces it: a number, a function
        step -> scale, or a function (cond, uncond) or (cond, uncond, step) -> output of the network's raw outputs
        (B,C,h,w); steps count from 0.  draw supplies the noise of stochastic samplers: see noise_source.  on_step gets
        the state after every step.  wrap changes what the calls of the network read: docs/forking.md.
        """
        if not isinstance(noise, Tensor) or not isinstance(plan, Plan):
            raise TypeError(
                f"got {type(noise).__name__} and {type(plan).__name__}, expected a tensor of noise and a Plan"
            )
        count, positive, negative = len(noise), as_conditioning(cond), as_conditioning(uncond)
        if positive is None:
            raise TypeError("got None as conditioning, expected what encode_prompt makes")
        of_images = conditioning_rows(positive, slice(None), count)
        of_negative = None if negative is None else conditioning_rows(negative, slice(None), count)
        if guidance is not None and scale is not None:
            raise ValueError("got `guidance` and `scale`, which it replaces: give one of them")
        if callable(scale):
            raise TypeError("got a function as `scale`, which is a number: give it as `guidance`")
        scale = self.family.scale if scale is None else scale
        branches = guided(self, of_images, of_negative, scale if guidance is None else guidance)
        return generate.denoise(self, noise, branches, plan, draw=draw, wrap=wrap, on_step=on_step)

    def decode(self, latents: Tensor, *, output: str = "pil") -> list[Any]:
        """Decode latents (B,C,h,w), in the UNet's scale, to B images; output is "pil", "numpy" or "tensor"."""
        if output not in OUTPUTS[:3]:
            raise ValueError(f"got `output` {output!r}, expected one of {', '.join(OUTPUTS[:3])}")
        kinds: dict[str, Callable[[Tensor], Any]] = {"pil": to_pil, "numpy": to_array, "tensor": lambda pixels: pixels}
        shown = Images if output == "pil" else list
        return shown(kinds[output](pixels) for pixels in self.decode_pixels(latents))

    def encode(self, image: Any) -> Tensor:
        """Encode images of one size; return the mean of their latents (B,C,h,w), in the UNet's scale.

        An image is a path, PIL, numpy (H,W,3) or a tensor (3,H,W) in [-1,1].  Its right and bottom edges are repeated
        up to a size that the network takes: multiples of 8 pixels, of 16 for FLUX.1 and Stable Diffusion 3.
        """
        images = image if isinstance(image, (list, tuple)) else [image]
        factor = self.vae.spec.factor * self.family.unet.patch  # what latent_shape takes
        pixels = [pad(to_pixels(open_source(source).image), factor) for source in images]
        if len({image.shape for image in pixels}) != 1:
            sizes = " and ".join(f"{image.shape[2]}x{image.shape[1]}" for image in pixels)
            raise ValueError(f"got images of {sizes or 'no'} pixels, expected one or more of one size")
        return self.encode_pixels(torch.stack(pixels))

    def lora(self, source: str | os.PathLike[str] | Lora, weight: float | str = 1.0) -> MergedLora:
        """Merge a LoRA into the weights: `with pipe.lora(FILE, 0.8): ...`; of a file, PEFT's folder or open_lora.

        The end of the block, or remove(), restores the original weights bit for bit.  The networks change in place, for
        all threads.  Quantised weights stay so: the LoRA is added to them for each forward.  weight may be a text
        too, as behind `lora=FILE:`: "0.8", "te=0.5:unet=1" or "0.8:lbw=OUTD".
        """
        from ldm_lite.adapters import lora
        from ldm_lite.adapters.strength import strength_of

        opened = source if isinstance(source, lora.Lora) else lora.open_lora(source)
        lora.check_base(opened, self.family)
        if names := ", ".join(repr(embedding.name) for embedding in opened.embeddings):
            log.warning("%s: for prompts to use %s, which it bundles, give `embedding=FILE` too", opened.name, names)
        strength = strength_of(weight.split(":")) if isinstance(weight, str) else float(weight)
        return lora.merge_lora(self.networks, [(opened, strength)], self.offloader)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the model, with merged LoRAs and changed weights, as one .safetensors file in the original layout.

        Each weight keeps its dtype, and load() makes the same model from it: its prediction, noise schedule and sizes
        are in the file.  The file is whole or not there; vocabularies are not in it.  Raises ValueError, one line,
        before anything is written, if a file cannot hold it all: weights in 8 bits or blocks, hooks, attention or
        layers of your own, textual inversions.
        """
        from ldm_lite.checkpoint import saving

        saving.save_model(self, Path(path).expanduser())

    def attention_maps(self, pattern: str = "*") -> contextlib.AbstractContextManager[dict[str, list[Tensor]]]:
        """Within the block, collect the UNet's attention maps (K*B,H,N,M) by layer name, one for each call.

        pattern is a layer's name, with or without wildcards: "*attn2" is every cross-attention.  With guidance the
        first B rows are uncond's and the last B cond's (K = 2); rows maps[-B:] are cond's with and without it.
        """
        return attention.record(self.unet, pattern)

    def use_attention(self, name: str | AttentionFn, pattern: str = "*") -> None:
        """Set the UNet's attention: a registered name, or a function of q, k, v (K*B,H,N,D) -> (K*B,H,N,D).

        pattern chooses layers, and the order of the rows is, as for attention_maps: "*attn2" is every cross-attention.
        The network changes in place; use_attention("sdpa") undoes it.
        """
        attention.use(self.unet, name, pattern=pattern)


# ---- arguments and results ------------------------------------------------------------------------------------------


def _options(
    kind: type[AnyOptions], function: str, arguments: Mapping[str, Any], others: Sequence[str] = ()
) -> AnyOptions:
    """Make options from keyword arguments; `function` has more arguments.

    Raises TypeError, with what to use instead, for an unknown argument.
    """
    rows: Any = dataclasses.fields(kind)  # type: ignore[arg-type]
    aliases = {flag.strip("-").replace("-", "_"): row.name for row in rows for flag in row.metadata.get("flags", ())}
    names = {row.name for row in rows}
    aliases |= {name: option for name, option in FIRST_ARGUMENTS.items() if option in names}
    named: dict[str, str] = {}  # option -> as which argument it is given
    for name in arguments:
        if (before := named.setdefault(aliases.get(name, name), name)) != name:
            raise TypeError(f"{function}() got {before!r} and {name!r}, which are the same: give one of them")
    for name in named.keys() - names:
        from ldm_lite.cli.synonyms import PYTHON, advice  # a table that is only read here

        known = {PYTHON.get(row.name, row.name): PYTHON.get(row.name, row.name) for row in rows}
        known |= {option: option for option in (*others, "output")}
        listed = f"help({kind.__module__}.{kind.__name__}) lists all"
        raise TypeError(
            f"{function}() has no argument {name!r}: {advice(name, known, function, python=True) or listed}"
        )
    return kind(**{option: arguments[name] for option, name in named.items()})


def _elsewhere(name: str) -> str:
    """Return what to use in place of an attribute that other programs' pipelines have, or ""."""
    from ldm_lite.cli.synonyms import OF_PIPELINE, of_attribute  # tables that are only read here

    return of_attribute(name, OF_PIPELINE)


def _prepared(
    task: ModuleType, model: CheckpointModel, kind: type[Any], function: str, arguments: Mapping[str, Any]
) -> tuple[Task, Callable[[State], object] | None]:
    """Make a task from keyword arguments, and the functions to call after every step: `on_step`, and a bar's update.

    Arguments may include options of features from the core's register_feature.
    """
    if features.FEATURES:
        option_rows(kind)  # refuses names that clash
    theirs = {name: value for name, value in arguments.items() if name in features.FEATURES}
    rest = {name: value for name, value in arguments.items() if name not in theirs}
    on_step, progress = rest.pop("on_step", None), rest.pop("progress", False)
    options = _options(kind, function, rest, ["progress", "on_step", *features.FEATURES])
    if theirs:
        options = with_features(options, features.features_of(theirs), theirs)
    _check_devices(model)
    prepared = task.prepare(model, options)
    if not progress:
        return prepared, on_step
    from tqdm.auto import tqdm

    update = step_bar(tqdm)
    return prepared, update if on_step is None else lambda state: (update(state), on_step(state))


def _check_devices(model: CheckpointModel) -> None:
    """Raise ValueError if a network was moved away from the others, as by `pipe.unet.to`."""
    tensors = [next(network.parameters(), None) for network in model.networks.values()]
    devices = sorted({str(tensor.device) for tensor in tensors if tensor is not None})
    if len(devices) > 1 and model.offloader is None:
        raise ValueError(
            f"the networks are on {' and '.join(devices)}: leave them where `load(..., device=)` puts them"
        )


def _outputs(
    task: ModuleType, model: CheckpointModel, kind: type[Any], function: str, arguments: Mapping[str, Any], output: str
) -> list[Any]:
    """Return a task's images for these arguments."""
    if output not in OUTPUTS:
        from ldm_lite.cli.synonyms import of_value  # a table that is only read here

        raise ValueError(f"got `output` {output!r}{of_value('output', output, OUTPUTS)}")
    images: Iterator[Any] = results(*_prepared(task, model, kind, function, arguments))
    if output == "pil":
        return Images(result.image for result in images)
    if output == "numpy":
        return [result.array for result in images]
    return Images(images) if output == "result" else [result.pixels for result in images]
