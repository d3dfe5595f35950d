"""The options of the image tasks, for Python and for the command line.  Nothing here imports torch.

None means the default of the checkpoint's family.  In Python some options also take objects: images as PIL, numpy or
tensors, a list of prompts or seeds, a `Control`, a loaded refiner.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from ldm_lite.cli.declared import with_rows
from ldm_lite.cli.options import MOST, MOST_PX, SEEDS, CheckedOptions, pair, random_seeds
from ldm_lite.core.declare import FINITE, SCALES, WHY_SCALES, argument, option


@dataclass(frozen=True, kw_only=True)  # the prompt comes first
@with_rows
class ShortcutsOptions(CheckedOptions):
    """Fewer network calls, for nearly the same picture.  All are off by default."""


@dataclass(frozen=True, kw_only=True)  # the prompt comes first
@with_rows
class GuidanceOptions(CheckedOptions):
    """How strongly the prompt is followed, and when."""

    scale: float | None = option(
        None,
        "classifier-free guidance scale; 1 is none, and twice as fast (default: the model's)",
        within=SCALES,
        reason=WHY_SCALES,
        common=True,
    )
    guidance: Any = argument(
        "a number, or a function: step -> number, (cond, uncond) or (cond, uncond, step) -> guided output"
    )


@dataclass(frozen=True, kw_only=True)  # the prompt comes first
class NoiseOptions(CheckedOptions):
    """Which noise a seed stands for."""

    noise: Any = option(
        None,
        "the program whose noise a seed gives: own, a1111 (the web UI's on an NVIDIA GPU), diffusers, comfy; in Python "
        "also the initial noise itself (N,C,h,w), of unit variance",
        metavar="PROGRAM",
    )
    ensd: int = option(
        0, "A1111's eta noise seed delta: added to the seeds of the steps' noise", within=SEEDS, png="ENSD"
    )
    variation_seed: int | None = option(
        None, "mix in the noise of this seed, plus k for image k; the seed itself stays the same", within=SEEDS
    )
    variation_strength: float = option(0.0, "its weight, 0 to 1", within=(0, 1), png="Variation seed strength")
    fixed_code: bool = option(False, "start every batch from the same noise")
    brownian: bool = option(
        False,
        "draw the noise of dpmpp_sde, dpmpp_2m_sde and dpmpp_3m_sde from a Brownian tree, so that the image converges "
        "as steps increase; --noise a1111 and comfy always do",
        png="Brownian tree",
    )


@dataclass(frozen=True, kw_only=True)  # the prompt comes first
@with_rows
class SamplingOptions(CheckedOptions):
    """How to sample."""

    sampler: str | None = option(
        None,
        "any usual name of a sampler, e.g. 'DPM++ 2M Karras'; an unknown name lists all (default: the model's)",
        common=True,
    )
    spacing: str | None = option(
        None,
        "timestep spacing: leading, trailing, linspace, karras, exponential, sgm_uniform, simple, ays, beta, lcm, ... "
        "(default: the sampler's own)",
        "--scheduler",
    )
    steps: int | None = option(
        None, "denoising steps, 1 to 1000 (default: the model's)", "--ddim_steps", within=(1, 1000), common=True
    )
    eta: float | None = option(
        None, "noise added at every step, 0 to 1, for samplers that have it", "--ddim_eta", within=(0, 1), png="Eta"
    )
    churn: float | None = option(
        None,
        "noise added and removed again over all steps, for euler, heun and dpm2",
        within=(0, 1000),
        png="Sigma churn",
    )
    plan: Any = argument("a Plan of your own, in place of sampler, spacing, steps, eta and churn")


@dataclass(frozen=True, kw_only=True)  # the prompt comes first
class ConditioningOptions(CheckedOptions):
    """Further conditioning of some families."""

    original_size: tuple[int, int] | None = option(
        None,
        "SDXL: original size to condition on; small sizes look blurred (default: the image's own)",
        metavar="HxW",
        parse=pair,
        png="Original size",
        used_by=("sdxl", "refiner"),
    )
    crop_top_left: tuple[int, int] | None = option(
        None,
        "SDXL: top left of the crop to condition on (default: 0,0)",
        metavar="Y,X",
        parse=pair,
        png="Crop top left",
        used_by=("sdxl", "refiner"),
    )
    target_size: tuple[int, int] | None = option(
        None,
        "SDXL: target size to condition on (default: the image's own)",
        metavar="HxW",
        parse=pair,
        png="Target size",
        used_by=("sdxl",),
    )
    aesthetic_score: float | None = option(
        None,
        "SDXL refiner: aesthetic score, 1 to 10 (default: 6)",
        within=FINITE,
        png="Aesthetic score",
        used_by=("refiner",),
    )
    negative_aesthetic_score: float | None = option(
        None,
        "SDXL refiner: aesthetic score of the negative prompt (default: 2.5)",
        within=FINITE,
        png="Negative aesthetic score",
        used_by=("refiner",),
    )
    image_embedding: Any = option(
        None,
        "unCLIP: CLIP embedding of an image to follow (.npy or .safetensors)",
        metavar="FILE",
        used_by=("unclip", "unclip_l"),
    )
    noise_level: int = option(
        0, "unCLIP: noise added to that embedding, 0 to 999; higher follows it less closely", within=(0, 999)
    )
    image_statistics: Any = option(
        None,
        "unCLIP L: mean and deviation of such embeddings: karlo's ViT-L-14_stats.th, or diffusers' file",
        metavar="FILE",
        used_by=("unclip_l",),
    )


@dataclass(frozen=True, kw_only=True)  # the prompt comes first
@with_rows
class ControlOptions(CheckedOptions):
    """Images that guide the shape, or the style."""


@dataclass(frozen=True, kw_only=True)  # the prompt comes first
@with_rows
class HiresOptions(CheckedOptions):
    """The second pass of txt2img, hires fix."""


@dataclass(frozen=True, kw_only=True)  # the prompt comes first
@with_rows
class PromptsOptions(CheckedOptions):
    """Where prompts come from, and how they are read."""

    prompt_syntax: str = option(
        "plain",
        "plain, or a1111: (more), [less], (this much:1.3), [from:to:0.5], [a|b], a AND b:0.5, BREAK, any length",
        choices=("plain", "a1111"),
        png="Prompt syntax",
    )
    clip_skip: int = option(
        1, "layer of the text encoder, counted from the last; 1 is usual", within=(1, 100), png="Clip skip"
    )


@dataclass(frozen=True)
@with_rows
class Txt2imgOptions(
    NoiseOptions,
    ControlOptions,
    PromptsOptions,
    HiresOptions,
    ConditioningOptions,
    SamplingOptions,
    GuidanceOptions,
    ShortcutsOptions,
):
    """What to make.  None is the default of the checkpoint's family."""

    task: ClassVar[str] = "txt2img"
    original_counts: ClassVar[tuple[int, int]] = (3, 2)  # n_samples and n_iter of the original script
    original_samplers: ClassVar[tuple[str, ...]] = ("ddim", "plms", "dpmpp_2m")

    prompt: str | Sequence[str] | None = option(
        None,
        "what to make; for models that read no text: a class, or a file of boxes, labels or embeddings",
        *("--class", "--boxes", "--label-map", "--embeddings"),
        positional=True,
        common=True,
    )
    negative_prompt: str | Sequence[str] | None = option(
        None, "what to avoid (SDXL: '' encodes an empty prompt; leaving it out uses zeros)", common=True
    )
    seed: int | Sequence[int] = option(
        42,
        "seed of the first image; image k has seed + k, whatever the batch size; -1 is a random one",
        within=(-1, SEEDS[1]),
        parse=random_seeds,
        common=True,
    )
    height: int | None = option(
        None, "pixels, a multiple of 8 (default: the model's)", "--H", within=(1, MOST_PX), common=True
    )
    width: int | None = option(
        None, "pixels, a multiple of 8 (default: the model's)", "--W", within=(1, MOST_PX), common=True
    )
    batch_size: int | None = option(
        None,
        "images at a time; with --from-file: prompts at a time (default: 1)",
        "--n_samples",
        within=(1, 4096),
        common=True,
    )
    n_iter: int | None = option(
        None, "number of batches, each with new seeds: A1111's batch count (default: 1)", within=(1, MOST), common=True
    )
    compat: bool = option(
        False, "make the original script's pixels: its noise, steps, weights and defaults (2 x 3 images)"
    )
    features: tuple[Any, ...] = argument("the user's features, which register_feature knows", ())
    cond: Any = argument("precomputed conditioning of N prompts: a Conditioning, or embeddings (N,T,D)")
    uncond: Any = argument("the same for the negative prompt, N or one")

    @property
    def images_at_a_time(self) -> int:
        """The batch size, or its default."""
        return (self.original_counts[0] if self.compat else 1) if self.batch_size is None else self.batch_size

    @property
    def repeats(self) -> int:
        """How many times the job runs."""
        return (self.original_counts[1] if self.compat else 1) if self.n_iter is None else self.n_iter

    @property
    def negative_prompts(self) -> tuple[str | None, ...]:
        """The negative prompts, which the images take in turn: a single one, or one for each prompt or image."""
        texts: Any = self.negative_prompt
        return texts if isinstance(texts, tuple) else (texts,)

    def seeds_of(self, number: int, num_prompts: int) -> tuple[int, int]:
        """Return the seed and the variation seed, 0 without, of the image with a number, counted from 0.

        With `fixed_code` every batch starts from the first's.  With a variation seed, that is counted up instead of the
        seed.
        """
        further = number % num_prompts % self.images_at_a_time if self.fixed_code else number
        has_variation = self.variation_seed is not None and self.variation_strength != 0
        variation = ((self.variation_seed or 0) + further) % 2**64 if has_variation else 0
        if not isinstance(self.seed, int):
            return self.seed[number], variation
        return (self.seed + (0 if self.variation_strength else further)) % 2**64, variation


@dataclass(frozen=True)
class ImageOptions(Txt2imgOptions):
    """What to start from, and how much of it may change."""

    init_img: tuple[Any, ...] = option(
        (), "image to start from; a folder means all images in it; repeatable", "--input", metavar="PATH", common=True
    )
    exact_steps: bool = option(False, "run all steps from the strength's noise level, not just that fraction")
    resize: str = option("crop", "how an image is fitted to the height and width", choices=("crop", "fit", "stretch"))
    height: int | None = option(
        None, "pixels (default: the image's own, or by the width)", "--H", within=(1, MOST_PX), common=True
    )
    width: int | None = option(
        None, "pixels (default: the image's own, or by the height)", "--W", within=(1, MOST_PX), common=True
    )
    sample_posterior: bool = option(False, "sample the autoencoder's latents instead of taking their mean")

    @property
    def samples_posterior(self) -> bool:
        """Whether the autoencoder's latents are sampled: also in the original scripts and diffusers."""
        return self.sample_posterior or self.compat or (isinstance(self.noise, str) and self.noise == "diffusers")


@dataclass(frozen=True)
class Img2imgOptions(ImageOptions):
    """How to go from image to image.  None is the default of the checkpoint's family."""

    task: ClassVar[str] = "img2img"
    original_counts: ClassVar[tuple[int, int]] = (2, 1)
    original_samplers: ClassVar[tuple[str, ...]] = ("ddim",)

    strength: float | None = option(
        None,
        "how much noise to start with: 0 keeps the image, 1 forgets it (default: 0.75; 1 for InstructPix2Pix)",
        within=(0, 1),
        common=True,
    )
    image_scale: float | None = option(
        None,
        "guidance by the image, for InstructPix2Pix; higher stays closer to it (default: 1.5)",
        "--cfg-image",
        within=SCALES,
        reason=WHY_SCALES,
    )
    resolution: int | None = option(
        None,
        "size as in InstructPix2Pix's edit_cli.py: about this many pixels on the long side, in multiples of 64",
        within=(64, MOST_PX),
    )
    compat: bool = option(False, "make the original script's pixels: its noise, steps, weights, defaults (2 images)")


@dataclass(frozen=True)
class InpaintOptions(ImageOptions):
    """What to repaint.  None is the default of the checkpoint's family."""

    task: ClassVar[str] = "inpaint"
    original_counts: ClassVar[tuple[int, int]] = (1, 1)
    original_samplers: ClassVar[tuple[str, ...]] = ("ddim", "plms")

    mask: tuple[Any, ...] = option(
        (), "white is repainted; one for all images or, repeated, one for each", metavar="PATH", common=True
    )
    invert_mask: bool = option(False, "repaint what is black")
    extend: str | None = option(None, "paint beyond the edges: left=128,top=64; or right, bottom", metavar="PIXELS")
    indir: str | None = option(None, "folder of images NAME.png, each with its NAME_mask.png", metavar="PATH")
    feather: float = option(
        0.0, "pixels around the mask over which the new image blends into the old", within=(0, 1000), png="Mask blur"
    )
    only_masked: int | None = option(
        None,
        "repaint only the area around the mask, with this many more pixels on each side, at the size of --width and "
        "--height (default: the model's), and put it back into the image",
        within=(0, MOST_PX),
        metavar="PADDING",
        png="Masked area padding",
    )
    masked_content: str = option(
        "original",
        "what is under the mask at the start, for a strength below 1: original, fill (the colours around it), noise or "
        "nothing (both in the latents)",
        choices=("original", "fill", "noise", "nothing"),
        png="Masked content",
    )
    no_paste: bool = option(False, "keep the decoded pixels outside the mask, not the original ones")
    strength: float | None = option(
        None,
        "how much noise to start with where the image is repainted; below 1 builds on what is there (default: 1)",
        within=(0, 1),
        common=True,
    )
    compat: bool = option(
        False, "do what the original samplers do with `mask` and `x0`, for networks of 4 input channels"
    )


MOST_NOISE = 350  # the x4 upscaler was trained up to this noise level


@dataclass(frozen=True, kw_only=True)  # noise_level would come before the prompt
class UpscaleOptions(Txt2imgOptions):
    """What to enlarge.  None is the default of the checkpoint's family."""

    task: ClassVar[str] = "upscale"
    init_img: tuple[Any, ...] = option(
        (), "image to enlarge; a folder means all images in it; repeatable", "--input", metavar="PATH", common=True
    )
    height: int | None = option(None, "not used: the result is four times the image's size", "--H")
    width: int | None = option(None, "not used", "--W")
    noise_level: int = option(
        20, "noise added to the image, 0 to 350; more lets the upscaler invent more", within=(0, MOST_NOISE)
    )
    tile: int = option(128, "side in pixels of the tiles that larger images are denoised in", within=(8, MOST_PX))
