"""What load and the methods of Pipeline take by name.  Made of the options by scripts/make_arguments.py."""

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypeAlias, TypedDict

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from ldm_lite.core.denoise import State
from ldm_lite.core.plan import Plan
from ldm_lite.tasks.results import Result

Prompt: TypeAlias = str | Sequence[str] | None
Pil: TypeAlias = Literal["pil"]  # the values of `output`, and what they return
Images: TypeAlias = list[Image.Image]
Numpy: TypeAlias = Literal["numpy"]
Arrays: TypeAlias = list[NDArray[np.uint8]]
AsTensor: TypeAlias = Literal["tensor"]
Tensors: TypeAlias = list[Tensor]
Whole: TypeAlias = Literal["result"]
Results: TypeAlias = list[Result]

class Run(TypedDict, total=False):
    progress: bool
    on_step: Callable[[State], object]

class Runtime(TypedDict, total=False):
    attention: str | Callable[[Tensor, Tensor, Tensor], Tensor] | None
    compile: str | None
    compiled: str | os.PathLike[str] | None
    kernels: str | None
    matmul_precision: Literal["highest", "high", "medium"] | None
    offload: Literal["model", "sequential"] | None
    storage: Literal["fp8", "int8"] | None
    vae_tiling: bool

class Load(Runtime, total=False):
    vae: str | os.PathLike[str] | None
    unet: str | os.PathLike[str] | None
    text_encoder: str | os.PathLike[str] | Sequence[str | os.PathLike[str]]
    tokenizer: str | os.PathLike[str] | None
    t5_vocab: str | os.PathLike[str] | None
    lora: str | os.PathLike[str] | Sequence[str | os.PathLike[str]]
    ema: Literal["auto", "yes", "no", "original"]
    prediction: Literal["eps", "v", "x0"] | None
    zero_snr: bool
    metadata: Mapping[str, str] | Sequence[str]

class Conditioned(TypedDict, total=False):
    original_size: tuple[int, int] | str | None
    crop_top_left: tuple[int, int] | str | None
    target_size: tuple[int, int] | str | None
    aesthetic_score: float | None
    negative_aesthetic_score: float | None
    image_embedding: Any
    noise_level: int
    image_statistics: Any

class Txt2img(Conditioned, Run, total=False):
    deep_cache: str | None
    gate_step: int | None
    freeu: str | None
    scale: float | None
    guidance: float | Callable[..., Any] | None
    apg: str | None
    guidance_interval: str | None
    guidance_schedule: str | None
    guidance_rescale: float
    mimic_scale: float | None
    dynamic_threshold: float | None
    skip_layer_scale: float | None
    sampler: str | None
    spacing: str | Callable[..., Any] | None
    steps: int | None
    eta: float | None
    churn: float | None
    plan: Plan | None
    refiner: Any
    refiner_start: float | None
    hires: float | None
    hires_strength: float
    hires_steps: int | None
    hires_upscaler: str
    hires_esrgan: Any
    hires_sampler: str | None
    hires_prompt: str | None
    hires_negative_prompt: str | None
    prompt_syntax: Literal["plain", "a1111"]
    clip_skip: int
    embedding: str | os.PathLike[str] | Sequence[str | os.PathLike[str]]
    from_file: str | os.PathLike[str] | None
    from_png: Any
    regions: str | None
    dynamic: Literal["random", "all"] | None
    wildcards: str | os.PathLike[str] | None
    control: Any
    preprocess: str | None
    clip_vision: str | os.PathLike[str] | None
    depth: Any
    reference: Any
    noise: Any
    ensd: int
    variation_seed: int | None
    variation_strength: float
    fixed_code: bool
    brownian: bool
    negative_prompt: str | Sequence[str] | None
    seed: int | Sequence[int]
    height: int | None
    width: int | None
    batch_size: int | None
    n_iter: int | None
    compat: bool
    features: Any
    cond: Any
    uncond: Any
    seamless: Literal["x", "y", "xy"] | None

class Img2img(Txt2img, total=False):
    exact_steps: bool
    resize: Literal["crop", "fit", "stretch"]
    sample_posterior: bool
    strength: float | None
    image_scale: float | None
    resolution: int | None

class Fill(Txt2img, total=False):
    exact_steps: bool
    resize: Literal["crop", "fit", "stretch"]
    sample_posterior: bool
    invert_mask: bool
    extend: str | None
    indir: str | os.PathLike[str] | None
    feather: float
    only_masked: int | None
    masked_content: Literal["original", "fill", "noise", "nothing"]
    no_paste: bool
    strength: float | None

class Enlarge(Txt2img, total=False):
    tile: int
