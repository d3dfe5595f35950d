"""Options of `python -m ldm_lite.train`, and a run's config.toml.  Nothing here imports torch."""

import dataclasses
import importlib.util
import json
import math
import os
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ldm_lite.cli.files import read_text
from ldm_lite.cli.options import MOST, CheckedOptions, LoadOptions, given
from ldm_lite.cli.version import __version__, pip_install
from ldm_lite.core.declare import FINITE, option


@dataclass(frozen=True)
class DataOptions(CheckedOptions):
    """Data."""

    data: str | None = option(
        None,
        "folder of images with captions: NAME.txt beside each, or a .jsonl; or .tar files",
        *("--train_data_dir", "--instance_data_dir"),
        metavar="PATH",
        common=True,
    )
    caption: str | None = option(None, "caption of images without one")
    resolution: int | None = option(None, "pixels per side (default: the model's)", within=(8, 2**14))
    buckets: bool = option(
        False, "sizes by the images' aspect ratios, of about the same area: little is cropped", "--enable_bucket"
    )
    bucket_no_upscale: bool = option(False, "an image smaller than its bucket gets a bucket of about its own size")
    flip: bool = option(False, "train on each image and its mirror image", "--flip_aug", "--random_flip")
    shuffle_caption: bool = option(False, "shuffle the parts of captions between commas, anew at each step")
    keep_tokens: int = option(0, "number of parts that stay at the beginning of captions", within=(0, 1000))
    masked: bool = option(False, "train only on what masks show: NAME.mask.png beside an image, or its alpha")
    class_data: str | None = option(
        None,
        "DreamBooth: images of the class, to train on beside those of --data",
        *("--class_data_dir", "--reg_data_dir"),
        metavar="DIR",
    )
    class_prompt: str | None = option(
        None, "DreamBooth: caption of the class images; without --class-data, keep the base model's prediction for it"
    )
    prior_weight: float = option(1.0, "weight of the class's loss", "--prior_loss_weight", within=(0, math.inf))
    validation: str | None = option(
        None,
        "folder of images, or a fraction of the data such as 0.1, to measure the loss on, not to train on",
        "--validation_split",
        metavar="PATH",
        common=True,
    )
    validate_every: int | None = option(
        None, "steps between validations (default: --save-every)", "--validate_every_n_steps", within=(1, MOST)
    )
    renderer: str | None = option(
        None, "Python file whose scenes(resolution, ...) draws captioned images", metavar="FILE"
    )
    renderer_options: str = option("{}", "arguments of scenes(), as JSON", metavar="JSON")
    scenes: int | None = option(
        None, "draw this many scenes once, and keep their latents (default: new scenes at every step)", within=(1, MOST)
    )
    caption_dropout: float = option(
        0.0,
        "fraction of captions replaced by an empty one, for guidance (0.1 is usual for a whole model)",
        *("--caption_dropout_rate", "--proportion_empty_prompts"),
        within=(0, 1),
    )
    tokens: int | None = option(
        None, "tokens per caption (default: as many as the text encoder takes)", within=(2, MOST)
    )
    data_workers: int = option(
        2,
        "processes that draw or read images",
        *("--dataloader_num_workers", "--max_data_loader_n_workers"),
        within=(0, 1024),
    )


@dataclass(frozen=True)
class LearnedOptions(CheckedOptions):
    """What is trained."""

    stage: str = option(
        "diffusion",
        "what to train: the diffusion model, vectors for a name (textual inversion), or a ControlNet",
        choices=("diffusion", "embedding", "control"),
        common=True,
    )
    train_text: bool = option(False, "train the text encoders of a whole model too")
    freeze_text: bool = option(False, "do not train the text encoders: the default")
    lora_rank: int | None = option(
        None,
        "train a LoRA of this rank, with the model frozen (16 is usual)",
        *("--rank", "--network_dim"),
        within=(1, 4096),
        common=True,
    )
    lora_alpha: float | None = option(
        None, "scale the LoRA by alpha / rank (default: alpha = rank)", "--network_alpha", within=FINITE
    )
    lora_text: bool = option(False, "a LoRA for the text encoders too")
    lora_kind: str = option("lora", "kind of the LoRA", choices=("lora", "dora", "loha", "lokr"))
    lokr_factor: int = option(
        -1, "size of LoKr's first factor; -1: as near to a square as possible", within=(-1, 2**16)
    )
    lora_conv: int | None = option(
        None, "also a LoRA of this rank for 3x3 convolutions, and the LoRA in all residual blocks", within=(1, 4096)
    )
    lora_dropout: float = option(
        0.0, "fraction of a LoRA's inner values left out", "--network_dropout", within=(0, 0.99)
    )
    lora_weights: str | None = option(
        None, "start from this LoRA, of the same kind and rank", "--network_weights", metavar="FILE"
    )
    lcm: bool = option(
        False, "distil the model into the LoRA: images in 4 steps with --sampler lcm --scale 1 (LCM-LoRA)"
    )
    lcm_guidance: float = option(7.5, "guidance w that is distilled: --scale minus 1", within=FINITE)
    token: str | None = option(
        None, "textual inversion: the name in captions that is learned", "--placeholder_token", "--token_string"
    )
    init_word: str = option("image", "textual inversion: the word whose vectors it starts from", "--initializer_token")
    vectors: int = option(
        1, "textual inversion: number of vectors", "--num_vectors", "--num_vectors_per_token", within=(1, 75)
    )


@dataclass(frozen=True)
class OptimiserOptions(CheckedOptions):
    """How it is trained."""

    steps: int | None = option(
        None,
        "optimiser steps of the whole run (default: 10,000; a LoRA: 2,000; textual inversion: 3,000)",
        "--max_train_steps",
        within=(1, MOST),
        common=True,
    )
    epochs: float | None = option(
        None,
        "passes over the data, in place of --steps",
        *("--num_train_epochs", "--max_train_epochs"),
        within=(1e-9, MOST),
    )
    minutes: float | None = option(None, "stop after this many minutes; --resume continues", within=(0, MOST))
    batch_size: int = option(1, "images per batch, of all processes together", within=(1, 2**16), common=True)
    accumulate: int = option(1, "batches per optimiser step", "--gradient_accumulation_steps", within=(1, MOST))
    lr: float | None = option(
        None,
        "peak learning rate (default: 1e-5; a LoRA: 1e-4; textual inversion: 5e-3; prodigy: 1)",
        "--learning_rate",
        within=(0, math.inf),
        common=True,
    )
    text_lr: float | None = option(
        None, "learning rate of the text encoders (default: --lr)", "--text_encoder_lr", within=(0, math.inf)
    )
    warmup: float = option(
        0.05, "steps of the linear warm-up; below 1: a fraction of all steps", "--lr_warmup_steps", within=(0, MOST)
    )
    lr_schedule: str = option(
        "cosine", "learning rate after the warm-up", "--lr_scheduler", choices=("constant", "linear", "cosine")
    )
    lr_cycles: int = option(
        1,
        "number of cosines, each of which starts at the peak",
        *("--lr_num_cycles", "--lr_scheduler_num_cycles"),
        within=(1, MOST),
    )
    lr_by_time: bool = option(
        False, "end the learning rate schedule with --minutes, counted over the whole run, unless --steps end first"
    )
    optimizer: str = option(
        "adamw",
        "adamw8bit and prodigy, which finds the learning rate, need the extra [optimizers]",
        choices=("adamw", "adamw8bit", "prodigy"),
    )
    weight_decay: float = option(0.01, "weight decay of the optimiser", "--adam_weight_decay", within=(0, math.inf))
    beta1: float = option(0.9, "decay of the optimiser's mean of gradients", "--adam_beta1", within=(0, 0.999999))
    beta2: float = option(0.99, "decay of the optimiser's mean of their squares", "--adam_beta2", within=(0, 0.999999))
    ema_decay: float | None = option(
        None,
        "decay of the EMA of the weights, 0 for none (default: 0.999; distillation: 0.95; else additions have none)",
        "--average",
        within=(0, 0.999999),
    )
    ema_lengths: bool = option(
        False, "keep averages from which python -m ldm_lite.train.averages makes any length afterwards (EDM2)"
    )
    max_grad_norm: float = option(1.0, "clip the norm of the gradient to this", within=(1e-9, math.inf))
    min_snr: float | None = option(
        None,
        "min-SNR weighting with this gamma (5 is usual)",
        *("--snr_gamma", "--min_snr_gamma"),
        within=(1e-9, math.inf),
    )
    weighting: str | None = option(
        None,
        "weight noise levels by SNR, its root (debiased), or by learned weights (EDM2)",
        choices=("snr", "debiased", "learned"),
    )
    noise_offset: float = option(0.0, "add to the noise a random value for each channel, times this", within=(0, 10))
    min_timestep: int = option(0, "train on timesteps from this one on", within=(0, 999))
    max_timestep: int = option(1000, "train on timesteps below this one", within=(1, 1000))
    flow_shift: float | None = option(
        None,
        "shift of a rectified flow's timesteps (default: as in sampling)",
        "--discrete_flow_shift",
        within=(1e-3, 100),
    )
    flow_sampling: str = option(
        "logit_normal",
        "how timesteps of a rectified flow are drawn, before the shift",
        choices=("logit_normal", "uniform"),
    )
    # seed * 2^32 + number is the index of a renderer's scene.
    seed: int = option(0, "seed of weights, noise and order", within=(0, 2**31 - 1))
    compile_network: bool = option(False, "compile the network that is trained")
    fsdp: bool = option(
        False, "torchrun: divide weights, their averages and gradients among the processes (FSDP2), for large models"
    )
    checkpointing: bool = option(
        False,
        "recompute activations in the backward pass, to save memory: needed for large networks",
        "--gradient_checkpointing",
        common=True,
    )


@dataclass(frozen=True)
class TrainOptions(DataOptions, LearnedOptions, OptimiserOptions):
    """The run."""

    out: str = option("outputs/train", "folder of the run", "--output_dir", metavar="DIR", common=True)
    resume: bool = option(False, "continue the run in that folder", common=True)
    config: str | None = option(
        None,
        "read the options that are not given from this file: the config.toml of a run",
        metavar="FILE",
        common=True,
    )
    save_every: int = option(
        1000, "steps between checkpoints", "--checkpointing_steps", "--save_every_n_steps", within=(1, MOST)
    )
    keep: int = option(0, "also keep the checkpoints of this many last saves, named by their steps", within=(0, MOST))
    sample_every: int | None = option(
        None,
        "steps between sample grids, a multiple of --save-every; 0 for none (default: --save-every)",
        "--sample_every_n_steps",
        within=(0, MOST),
    )
    samples: str | None = option(
        None, "prompts of the sample grid, separated by | (default: the data's first captions)"
    )
    log_to: tuple[str, ...] = option(
        (),
        "log to tensorboard or wandb too (extra [loggers]); repeatable",
        *("--report_to", "--log_with"),
        metavar="NAME",
    )
    debug: bool = option(False, "show the traceback of an error")

    @property
    def held_out_fraction(self) -> float | None:
        """The fraction of the data that is held out for validation, if `validation` is a number."""
        try:
            return None if self.validation is None else float(self.validation)
        except ValueError:
            return None


# What optimisers and logs need.
PACKAGES = {"adamw8bit": "bitsandbytes", "prodigy": "prodigyopt", "tensorboard": "tensorboard", "wandb": "wandb"}
PRECISIONS = {
    "fp32": "float32", "float32": "float32", "fp16": "float16", "float16": "float16",
    "bf16": "bfloat16", "bfloat16": "bfloat16",
}  # fmt: skip
# What is trained -> steps, learning rate, decay of the EMA.
DEFAULTS = {
    "diffusion": (10_000, 1e-5, 0.999), "lora": (2_000, 1e-4, 0.0), "lcm": (2_000, 1e-4, 0.95),
    "embedding": (3_000, 5e-3, 0.0), "control": (10_000, 1e-5, 0.999),
}  # fmt: skip


def resolved(options: TrainOptions) -> TrainOptions:
    """Return the options with defaults for the kind of training instead of None."""
    kind = "lcm" if options.lcm else "lora" if options.lora_rank is not None else options.stage
    steps, lr, decay = DEFAULTS[kind]
    defaults: dict[str, Any] = {
        "steps": None if options.epochs else steps,
        "lr": 1.0 if options.optimizer == "prodigy" else lr,
        "ema_decay": decay,
    }
    return dataclasses.replace(
        options, **{name: value for name, value in defaults.items() if getattr(options, name) is None}
    )


def check(options: TrainOptions, load: LoadOptions) -> None:
    """Raise ValueError, one line, for an option that this run does not use, or for data given twice or not at all."""
    is_whole = options.stage == "diffusion" and options.lora_rank is None
    for name in ("compile", "compiled", *("offload", "storage") * is_whole):
        if getattr(load, name) not in (None, "off"):
            of, instead = " of a whole model" * (name in ("offload", "storage")), ", or use `compile_network`"
            raise ValueError(f"`{name}` has no effect on training{of}: leave it out{instead * (name == 'compile')}")
    if load.dtype is not None and load.dtype not in PRECISIONS:
        raise ValueError(f"got `dtype={load.dtype}`, expected fp32, bf16 or fp16: trained weights are always float32")
    if load.storage is not None and options.lora_kind == "dora":
        raise ValueError("`lora_kind=dora` measures weights, which `storage` rounds: leave one of them out")
    if options.min_timestep >= options.max_timestep:
        raise ValueError(f"got timesteps from {options.min_timestep} to {options.max_timestep}, expected one or more")
    if options.sample_every and options.sample_every % options.save_every:
        raise ValueError(f"got `sample_every` {options.sample_every}, expected a multiple of `save_every`")
    if options.lora_rank is not None and options.stage != "diffusion":
        raise ValueError("`lora_rank` trains a LoRA for the diffusion model: leave out `stage`")
    if unknown := sorted(set(options.log_to) - {"tensorboard", "wandb"}):
        raise ValueError(f"got `log_to` {unknown[0]!r}, expected tensorboard or wandb")
    if options.stage == "embedding" and not options.token:
        raise ValueError("`stage=embedding` learns a name in captions: give it as `token`, such as '<my-cat>'")
    if (options.data is None) == (options.renderer is None):
        raise ValueError("expected either `data=FOLDER` or `renderer=FILE.py`")
    stage, fraction, has_lora = options.stage, options.held_out_fraction, options.lora_rank is not None
    has_class = options.class_data is not None or options.class_prompt is not None
    not_of_lcm = "lora_text caption_dropout masked min_snr weighting class_data class_prompt validation"
    defaults = {field.name: field.default for field in dataclasses.fields(options)}
    for unused, when, names in (
        (stage != "diffusion" or has_lora, "but on the whole diffusion model", "fsdp"),
        (options.optimizer != "adamw", f"with `optimizer={options.optimizer}`", "fsdp"),
        (options.fsdp, "with `fsdp`", "ema_lengths"),
        (stage != "embedding", "without `stage=embedding`", "token init_word vectors"),
        (stage != "diffusion", f"with `stage={stage}`, which keeps the model frozen", "freeze_text train_text"),
        (stage == "control", "with `stage=control`", "class_data class_prompt renderer"),
        (not has_lora, "without `lora_rank`", "lora_alpha lora_text lora_kind lokr_factor lcm lora_conv"),
        (not has_lora, "without `lora_rank`", "lora_dropout lora_weights"),
        (options.lora_kind != "lora", f"with `lora_kind={options.lora_kind}`", "lora_conv lora_dropout"),
        (options.lcm, "with `lcm`", "min_timestep max_timestep"),
        (not options.buckets, "without `buckets`", "bucket_no_upscale"),
        (not options.shuffle_caption, "without `shuffle_caption`", "keep_tokens"),
        (options.optimizer == "prodigy", "with `optimizer=prodigy`, which finds one rate", "text_lr"),
        (not (options.lora_text if has_lora else options.train_text), "unless text encoders are trained", "text_lr"),
        (options.epochs is not None, "with `epochs`", "steps"),
        (has_lora, "with `lora_rank`, which keeps the model frozen: `lora_text`", "train_text"),
        (has_lora, "with `lora_rank`, which keeps the model frozen", "freeze_text"),
        (options.freeze_text, "with `freeze_text`", "train_text"),
        (options.lcm, "with `lcm`", not_of_lcm),
        (not options.lcm, "without `lcm`", "lcm_guidance"),
        (options.lora_kind != "lokr", "without `lora_kind=lokr`", "lokr_factor"),
        (options.renderer is None, "without `renderer`", "renderer_options scenes"),
        (options.renderer is not None, "with `renderer`", "caption buckets masked flip"),
        (not has_class, "without `class_data` or `class_prompt`", "prior_weight"),
        (options.validation is None, "without `validation`", "validate_every"),
        (options.lr_schedule != "cosine", "without `lr_schedule=cosine`", "lr_cycles"),
        (options.minutes is None, "without `minutes`", "lr_by_time"),
        (options.lr_schedule == "constant", "with `lr_schedule=constant`", "lr_by_time"),
    ):
        for name in names.split():
            if getattr(options, name) != defaults[name] and unused:
                raise ValueError(f"`{name}` has no effect {when}: leave it out")
    if options.lora_alpha == 0:
        raise ValueError("got `lora_alpha` 0, by which the LoRA would change nothing: expected another number")
    if options.optimizer == "prodigy" and options.weighting == "learned":
        raise ValueError(
            "`weighting=learned` has its own learning rate, which prodigy does not allow: use `optimizer=adamw`"
        )
    if options.min_snr is not None and options.weighting is not None:
        raise ValueError(f"got `min_snr` and `weighting={options.weighting}`: expected one of them")
    if fraction is not None and not 0 < fraction < 1:
        raise ValueError(f"got `validation` {options.validation}, expected a folder, or a fraction between 0 and 1")
    if fraction is not None and options.renderer is not None and options.scenes is None:
        raise ValueError("`validation` as a fraction needs finite data: give `scenes`, or a folder")


def check_here(options: TrainOptions) -> None:
    """Raise ValueError, one line, for files that are not there, or a missing package."""
    files = ["data", "class_data", "renderer", "lora_weights", *["validation"] * (options.held_out_fraction is None)]
    for name in files:
        if (path := getattr(options, name)) is not None and not os.path.exists(path):
            raise ValueError(f"{path}: no such file or folder, which `{name}` names")
    packages = {options.optimizer: "optimizers", **dict.fromkeys(options.log_to, "loggers")}
    for name, extra in packages.items():
        if (package := PACKAGES.get(name)) is not None and importlib.util.find_spec(package) is None:
            raise ValueError(f"{name} needs {package}, which is not installed: {pip_install(extra)}")


# ---- resuming -------------------------------------------------------------------------------------------------------

_OF_A_CALL = ("out", "resume", "config", "debug")  # they do not change what a run computes
# Options that may change when a run is resumed.
MAY_CHANGE = {
    "steps", "epochs", "minutes", "lr", "lr_schedule", "lr_cycles", "lr_by_time", "warmup", "weight_decay",
    "max_grad_norm", "save_every", "keep", "sample_every", "samples", "validate_every", "data_workers",
    "compile_network", "fsdp", "checkpointing", "log_to",
}  # fmt: skip
_INPUTS = ("data", "class_data", "renderer")  # compared by digests, not by names


def settings_of(options: TrainOptions) -> dict[str, Any]:
    """Return the options that the state of a run records: a batch may be divided differently (`accumulate`)."""
    settings = {name: value for name, value in dataclasses.asdict(options).items() if name not in _OF_A_CALL + _INPUTS}
    settings["validation"] = options.held_out_fraction  # else a folder, of which there is a digest
    settings["batch_size"] = options.batch_size * settings.pop("accumulate")
    return settings


# ---- config.toml ----------------------------------------------------------------------------------------------------

CONFIG = "config.toml"


def as_toml(options: TrainOptions, load: LoadOptions) -> str:
    """Return the text of a config.toml: every option of a run that has a value."""
    lines = [f"# Of a run of ldm_lite {__version__}: `python -m ldm_lite.train --config FILE --out FOLDER` repeats it."]
    for title, group in (("train", options), ("load", load)):
        lines += ["", f"[{title}]"]
        for field in dataclasses.fields(group):
            value = getattr(group, field.name)
            if value is not None and field.name not in _OF_A_CALL:
                line = f"{field.name} = {_toml(value)}"
                has_no_text = any("\ud800" <= character <= "\udfff" for character in line)  # a name that is not UTF-8
                lines.append("# not text: " + ascii(line) if has_no_text else line)
    return "\n".join(lines) + "\n"


def _toml(value: Any) -> str:
    if isinstance(value, tuple):
        return f"[{', '.join(map(_toml, value))}]"
    if isinstance(value, (bool, int, float)):
        return json.dumps(value)
    text = str(getattr(value, "path", value))  # an open checkpoint has a path
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")  # as JSON, but for this one


def with_config(options: TrainOptions, load: LoadOptions) -> tuple[TrainOptions, LoadOptions]:
    """Return the options, with those that were not given from the file `options.config`, if there is one.

    Raises ValueError, one line, for a file that is not a config.toml, and for options that do not exist; OSError.
    """
    if options.config is None:
        return options, load
    path = Path(options.config)
    try:
        tables = tomllib.loads(read_text(path))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: is not a config.toml ({error})") from error
    for title, table in tables.items():
        if title not in ("train", "load") or not isinstance(table, dict):
            raise ValueError(f"{path}: has {title!r:.50}, expected the tables [train] and [load]")
    return _filled(options, tables.get("train", {}), path), _filled(load, tables.get("load", {}), path)


def _filled(options: Any, table: dict[str, Any], path: Path) -> Any:
    names = {field.name for field in dataclasses.fields(options)} - set(_OF_A_CALL)
    if unknown := sorted(table.keys() - names):
        from ldm_lite.cli.synonyms import advice  # a table that is only read here

        spellings = {flag[2:]: field.name for field in dataclasses.fields(options) for flag in field.metadata["flags"]}
        known = {name: name for name in names} | spellings
        hint = advice(unknown[0], known, "train", python=True, elsewhere=False).replace("`", "")
        raise ValueError(f"{path}: {unknown[0]!r:.50} is not an option of training{': ' + hint if hint else ''}")
    assert isinstance(options, CheckedOptions)
    explicit = {name: getattr(options, name) for name in given(options) if name != "config"}
    try:
        return type(options)(**{**table, **explicit})
    except TypeError as error:
        raise ValueError(f"{os.fspath(path)}: {error}") from error
