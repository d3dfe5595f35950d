"""The options of the cascade and of commands that make no images.  Nothing here imports torch."""

from dataclasses import dataclass

from ldm_lite.cli.options import MOST, MOST_PX, SEEDS, CheckedOptions, decimals, numbers, words
from ldm_lite.cli.task_options import MOST_NOISE
from ldm_lite.core.declare import SCALES, option


@dataclass(frozen=True)
class CascadeOptions(CheckedOptions):
    """What to make.  A value like "7,4,9" gives one to each stage; those without one have their default."""

    prompt: str | None = option(None, "what to make", positional=True, common=True)
    negative_prompt: str = option("", "what to avoid", common=True)
    sampler: tuple[str, ...] = option("", "sampler of the first two stages, or of each", parse=words, common=True)
    steps: tuple[int, ...] = option(
        "", "denoising steps, of the first two stages or of each", within=(1, 1000), parse=numbers, common=True
    )
    scale: tuple[float, ...] = option(
        "", "classifier-free guidance, of the first two stages or of each", within=SCALES, parse=decimals, common=True
    )
    noise_level: float = option(
        0.25,
        "noise added to the small image, below 1; with more noise the result follows it less closely",
        within=(0, 0.999),
    )
    noise_level_3: int = option(100, "noise added for the third stage, 0 to 350", within=(0, MOST_NOISE))
    tile: int = option(256, "side in pixels of the third stage's tiles for larger images", within=(8, MOST_PX))
    seed: int = option(
        42, "seed of the first image; image k has seed + k, whatever the batch size", within=SEEDS, common=True
    )
    height: int = option(64, "pixels of the first stage, a multiple of 8", "--H", within=(8, MOST_PX))
    width: int = option(64, "pixels of the first stage, a multiple of 8", "--W", within=(8, MOST_PX))
    batch_size: int = option(1, "images at a time", "--n_samples", within=(1, 4096), common=True)
    n_iter: int = option(1, "number of batches, each with new seeds", within=(1, MOST), common=True)


@dataclass(frozen=True)
class StageOptions(CheckedOptions):
    """What to load, and on which device."""

    stage_1: str | None = option(
        None, "DeepFloyd IF's first stage: a path, or owner/repository/file on the hub", metavar="FILE", common=True
    )
    stage_2: str | None = option(
        None, "its second stage; without it images are 64 px wide", metavar="FILE", common=True
    )
    stage_3: str | None = option(
        None, "Stable Diffusion's x4 upscaler; without it images are 256 px wide", metavar="FILE", common=True
    )
    t5: tuple[str, ...] = option(
        (), "T5 v1.1 XXL's encoder; repeatable for a sharded file", metavar="FILE", common=True
    )
    t5_vocab: str | None = option(
        None, "T5's spiece.model or tokenizer.json (default: the one beside --t5)", metavar="FILE"
    )
    prompt_embeds: str | None = option(
        None, "precomputed embeddings (T,D) or (N,T,D) in place of a prompt: .npy, .safetensors or .pt"
    )
    negative_embeds: str | None = option(None, "the same for the negative prompt")
    device: str | None = option(None, "cuda, cuda:1, mps, cpu (default: the best there is)", common=True)
    dtype: str | None = option(None, "fp32, fp16, bf16 (default: fp16 on CUDA, else fp32)", common=True)
    attention: str | None = option(None, "attention kernel of the stages; an unknown name lists all")


@dataclass(frozen=True)
class ExportOptions(CheckedOptions):
    """What to compile for."""

    sizes: str | None = option(None, "comma-separated sizes in pixels, WIDTHxHEIGHT (default: the model's)")
    batches: tuple[int, ...] = option(
        "1", "comma-separated numbers of images at a time", within=(1, 4096), parse=numbers
    )
    branches: int = option(
        2, "UNet evaluations of a step and image: 2 with guidance, 1 without, 3 for InstructPix2Pix", within=(1, 3)
    )
    chunks: int = option(1, "chunks of 77 tokens in a prompt", within=(1, 1000))
    out: str = option("unet.pt2", "name of the package", metavar="FILE")
    debug: bool = option(False, "show the traceback of an error")


@dataclass(frozen=True)
class ReconstructOptions(CheckedOptions):
    """What to reconstruct, and with what."""

    image: str | None = option(None, "the image", positional=True)
    ckpt: str | None = option(
        None,
        "a checkpoint, or an autoencoder's file: a path, or owner/repository/file on the hub (default: bundled)",
        metavar="FILE",
    )
    device: str | None = option(None, "cuda, cuda:1, mps, cpu (default: the best there is)")
    dtype: str | None = option(None, "fp32, fp16, bf16 (default: fp16 on CUDA, else fp32)")


@dataclass(frozen=True)
class VerifyOptions(CheckedOptions):
    """What to check."""

    whole: str | None = option(
        None,
        "also compare whole images of 50 steps: a folder with files of the data set diffusers/test-arrays, or hub",
        metavar="DIR",
        common=True,
    )
    only: str | None = option(None, "only checkpoints whose name contains this, e.g. 1.4", common=True)
    debug: bool = option(False, "show the traceback of an error")
