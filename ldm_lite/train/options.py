"""Options of `python -m ldm_lite.train`.  Nothing here imports torch."""

import math
from collections.abc import Iterable
from dataclasses import dataclass, fields

from ldm_lite.cli.options import FINITE, MOST, CheckedOptions, LoadOptions, option


@dataclass(frozen=True)
class DataOptions(CheckedOptions):
    """Data."""

    data: str | None = option(
        None, "folder of images with captions: NAME.txt beside each, or a .jsonl; or .tar files", common=True
    )
    caption: str | None = option(None, "caption of images without one")
    resolution: int | None = option(None, "pixels per side (default: the model's)", within=(8, 2**14))
    buckets: bool = option(False, "sizes by the images' aspect ratios, of about the same area: little is cropped")
    masked: bool = option(False, "learn only what masks show: NAME.mask.png beside an image, or its alpha")
    class_data: str | None = option(None, "DreamBooth: images of the class, to be learned beside those of --data")
    class_prompt: str | None = option(
        None, "DreamBooth: caption of the class images; without --class-data, keep the base model's prediction for it"
    )
    prior_weight: float = option(1.0, "weight of the class's loss", within=(0, math.inf))
    validation: str | None = option(
        None, "folder of images, or a share of the data such as 0.1, whose loss is measured, not learned", common=True
    )
    validate_every: int | None = option(None, "steps between validations (default: --save-every)", within=(1, MOST))
    renderer: str | None = option(None, "Python file whose scenes(resolution, ...) draws captioned images")
    renderer_options: str = option("{}", "arguments of scenes(), as JSON")
    scenes: int | None = option(
        None, "draw this many scenes once, and keep their latents (default: new scenes at every step)", within=(1, MOST)
    )
    caption_dropout: float = option(0.1, "share of captions replaced by an empty one, for guidance", within=(0, 1))
    tokens: int | None = option(
        None, "tokens per caption (default: as many as the text encoder takes)", within=(2, MOST)
    )
    workers: int = option(2, "processes that draw or read images", within=(0, 1024))


@dataclass(frozen=True)
class LearnedOptions(CheckedOptions):
    """What is trained."""

    stage: str = option(
        "diffusion",
        "what to train: the diffusion model, vectors for a name (textual inversion), or a ControlNet",
        choices=("diffusion", "embedding", "control"),
        common=True,
    )
    freeze_text: bool = option(False, "do not train the text encoders")
    lora_rank: int | None = option(
        None,
        "train a LoRA of this rank, with the model frozen (16 is usual)",
        "--network_dim",
        within=(1, 4096),
        common=True,
    )
    lora_alpha: float | None = option(
        None, "scale the LoRA by alpha / rank (default: alpha = rank)", "--network_alpha", within=FINITE
    )
    lora_text: bool = option(False, "a LoRA for the text encoders too")
    lora_kind: str = option("lora", "kind of the LoRA", choices=("lora", "dora", "loha", "lokr"))
    lokr_factor: int = option(
        -1, "size of LoKr's first factor (default: as near to a square as possible)", within=(-1, 2**16)
    )
    lcm: bool = option(
        False, "distil the model into the LoRA: images in 4 steps with --sampler lcm --scale 1 (LCM-LoRA)"
    )
    lcm_guidance: float = option(7.5, "guidance w of what is distilled: --scale less 1", within=FINITE)
    token: str | None = option(None, "textual inversion: the name in captions that is learned")
    init_word: str = option("image", "textual inversion: the word that it begins as")
    vectors: int = option(1, "textual inversion: number of vectors", within=(1, 75))


@dataclass(frozen=True)
class OptimiserOptions(CheckedOptions):
    """How it is trained."""

    steps: int = option(10_000, "optimiser steps of the whole run", within=(1, MOST), common=True)
    minutes: float | None = option(None, "stop after this many minutes; --resume continues", within=(0, MOST))
    batch: int = option(64, "images per batch, of all processes together", within=(1, 2**16), common=True)
    accumulate: int = option(1, "batches per optimiser step", within=(1, MOST))
    lr: float = option(
        1e-3, "peak learning rate: linear warm-up, then cosine decay to 0", within=(0, math.inf), common=True
    )
    warmup: int = option(200, "steps of the warm-up", within=(0, MOST))
    optimizer: str = option(
        "adamw",
        "adamw8bit and prodigy (with --lr 1) need the extra [optimizers]",
        choices=("adamw", "adamw8bit", "prodigy"),
    )
    weight_decay: float = option(0.01, "weight decay of the optimiser", within=(0, math.inf))
    ema_decay: float = option(0.999, "decay of the EMA of the weights", "--average", within=(0, 1))
    ema_lengths: bool = option(
        False, "keep averages from which python -m ldm_lite.train.averages makes any length afterwards (EDM2)"
    )
    clip: float = option(1.0, "clip the norm of the gradient to this", within=(1e-9, math.inf))
    min_snr: float | None = option(None, "min-SNR weighting with this gamma (5 is usual)", within=(1e-9, math.inf))
    weighting: str | None = option(
        None,
        "weight noise levels by SNR, its root (debiased), or as is learned (EDM2)",
        choices=("snr", "debiased", "learned"),
    )
    # seed * 2^32 + step must be a seed of torch.
    seed: int = option(0, "seed of weights, noise and order", within=(0, 2**31 - 1))
    compile_network: bool = option(False, "compile the network that is trained")
    shard: bool = option(
        False, "torchrun: divide weights, their averages and gradients among the processes (FSDP2), for large models"
    )
    checkpointing: bool = option(
        False, "recompute activations in the backward pass, to save memory: needed for large networks", common=True
    )


@dataclass(frozen=True)
class TrainOptions(DataOptions, LearnedOptions, OptimiserOptions):
    """The run."""

    out: str = option("outputs/train", "folder of the run", common=True)
    resume: bool = option(False, "continue the run in that folder", common=True)
    config: str | None = option(
        None,
        "take the options that are not given from this file: the config.toml of a run",
        metavar="FILE",
        common=True,
    )
    save_every: int = option(1000, "steps between checkpoints", within=(1, MOST))
    samples: str = option(
        "a red apple on a blue background|rocket|cat|red heart", "prompts of the sample grid, separated by |"
    )
    log_to: tuple[str, ...] = option(
        (), "log to tensorboard or wandb too (extra [loggers]); repeatable", metavar="NAME"
    )
    debug: bool = option(False, "show the traceback of an error")

    @property
    def share(self) -> float | None:
        """The share of the data that is held out for validation, if `validation` is a number."""
        try:
            return None if self.validation is None else float(self.validation)
        except ValueError:
            return None


_OF_LORA = ("lora_alpha", "lora_text", "lora_kind", "lokr_factor", "lcm")
_NOT_OF_LCM = (
    *("lora_text", "caption_dropout", "masked"),
    *("min_snr", "weighting", "class_data", "class_prompt", "validation"),
)
_OF_EMBEDDING = ("token", "init_word", "vectors")
_OF_FOLDERS = ("caption", "buckets", "masked")


def check(options: TrainOptions, load: LoadOptions) -> None:
    """Raise ValueError, one line, for an option that this run does not use, or for data given twice or not at all."""
    for name in ("offload", "storage", "compile", "compiled"):
        if getattr(load, name) not in (None, "off"):
            instead = ", or use `compile_network`" if name == "compile" else ""
            raise ValueError(f"`{name}` has no effect on training: leave it out{instead}")
    if load.dtype not in (None, "fp32", "float32"):
        raise ValueError(f"got `dtype={load.dtype}`, but weights are trained in float32: leave it out")
    if options.lora_rank is not None and options.stage != "diffusion":
        raise ValueError("`lora_rank` trains a LoRA for the diffusion model: leave out `stage`")
    if options.stage != "diffusion" or options.lora_rank is not None:
        _refuse(options, ("shard",), "but on the whole diffusion model")
    if unknown := sorted(set(options.log_to) - {"tensorboard", "wandb"}):
        raise ValueError(f"got `log_to` {unknown[0]!r}, wanted tensorboard or wandb")
    if options.optimizer != "adamw":
        _refuse(options, ("shard",), f"with `optimizer={options.optimizer}`")
    if options.shard:
        _refuse(options, ("ema_lengths",), "with `shard`")
    _check_stage(options)
    _check_data(options)


def _check_stage(options: TrainOptions) -> None:
    """Raise ValueError for options that what is trained does not use."""
    if options.stage == "embedding":
        if not options.token:
            raise ValueError("`stage=embedding` learns a name in captions: give it as `token`, such as '<my-cat>'")
    else:
        _refuse(options, _OF_EMBEDDING, "without `stage=embedding`")
    if options.stage in ("embedding", "control"):
        _refuse(options, ("freeze_text",), f"with `stage={options.stage}`, which keeps the model frozen")
    if options.stage == "control":
        _refuse(options, ("class_data", "class_prompt", "renderer"), "with `stage=control`")
    if options.lora_rank is None:
        _refuse(options, _OF_LORA, "without `lora_rank`")
    else:
        _refuse(options, ("freeze_text",), "with `lora_rank`, which keeps the model frozen")
    if options.lcm:
        _refuse(options, _NOT_OF_LCM, "with `lcm`")
    else:
        _refuse(options, ("lcm_guidance",), "without `lcm`")
    if options.lora_kind != "lokr":
        _refuse(options, ("lokr_factor",), "without `lora_kind=lokr`")
    if options.min_snr is not None and options.weighting is not None:
        raise ValueError(f"got `min_snr` and `weighting={options.weighting}`: wanted one of them")


def _check_data(options: TrainOptions) -> None:
    """Raise ValueError for data given twice or not at all, and for options that they do not use."""
    if (options.data is None) == (options.renderer is None):
        raise ValueError("wanted either `data=FOLDER` or `renderer=FILE.py`")
    if options.renderer is None:
        _refuse(options, ("renderer_options", "scenes"), "without `renderer`")
    else:
        _refuse(options, _OF_FOLDERS, "with `renderer`")
    if options.class_data is None and options.class_prompt is None:
        _refuse(options, ("prior_weight",), "without `class_data` or `class_prompt`")
    if options.validation is None:
        _refuse(options, ("validate_every",), "without `validation`")
    if options.share is not None and not 0 < options.share < 1:
        raise ValueError(f"got `validation` {options.validation}, wanted a folder, or a share between 0 and 1")
    if options.share is not None and options.renderer is not None and options.scenes is None:
        raise ValueError("`validation` as a share needs finite data: give `scenes`, or a folder")


def _refuse(options: TrainOptions, names: Iterable[str], when: str) -> None:
    """Raise ValueError if one of these options is not at its default."""
    defaults = {field.name: field.default for field in fields(options)}
    for name in names:
        if getattr(options, name) != defaults[name]:
            raise ValueError(f"`{name}` has no effect {when}: leave it out")
