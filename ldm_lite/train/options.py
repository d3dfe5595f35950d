"""Options of `python -m ldm_lite.train`.  Nothing here imports torch."""

import math
from collections.abc import Iterable
from dataclasses import dataclass, fields

from ldm_lite.cli.options import FINITE, MOST, CheckedOptions, LoadOptions, option


@dataclass(frozen=True)
class TrainOptions(CheckedOptions):
    """What to train, on what data, and how."""

    stage: str = option("diffusion", "what to train", choices=("autoencoder", "diffusion"))
    preset: str | None = option(None, "train a small model from scratch: emoji64, emoji128")
    data: str | None = option(None, "folder of images with captions: NAME.txt beside each, or a .jsonl")
    renderer: str | None = option(None, "Python file whose scenes(resolution, ...) draws captioned images")
    renderer_options: str = option("{}", "arguments of scenes(), as JSON")
    scenes: int | None = option(
        None, "draw this many scenes once, and keep their latents (default: new scenes at every step)", within=(1, MOST)
    )
    out: str = option("outputs/train", "folder of the run")
    resume: bool = option(False, "continue the run in that folder")
    config: str | None = option(
        None, "take the options that are not given from this file: the config.toml of a run", metavar="FILE"
    )
    steps: int = option(10_000, "optimiser steps of the whole run", within=(1, MOST))
    minutes: float | None = option(None, "stop after this many minutes; --resume continues", within=(0, MOST))
    batch: int = option(64, "images per batch, of all processes together", within=(1, 2**16))
    accumulate: int = option(1, "batches per optimiser step", within=(1, MOST))
    lr: float = option(1e-3, "peak learning rate: linear warm-up, then cosine decay to 0", within=(0, math.inf))
    warmup: int = option(200, "steps of the warm-up", within=(0, MOST))
    weight_decay: float = option(0.01, "weight decay of AdamW", within=(0, math.inf))
    ema_decay: float = option(0.999, "decay of the EMA of the weights", "--average", within=(0, 1))
    clip: float = option(1.0, "clip the norm of the gradient to this", within=(1e-9, math.inf))
    freeze_encoder: bool = option(False, "train only the decoder of the autoencoder: latents do not change")
    freeze_text: bool = option(False, "do not train the text encoder")
    lora_rank: int | None = option(
        None, "train a LoRA of this rank, with the model frozen (16 is usual)", "--network_dim", within=(1, 4096)
    )
    lora_alpha: float | None = option(
        None, "scale the LoRA by alpha / rank (default: alpha = rank)", "--network_alpha", within=FINITE
    )
    lora_text: bool = option(False, "a LoRA for the text encoder too")
    caption_dropout: float = option(0.1, "share of captions replaced by an empty one, for guidance", within=(0, 1))
    min_snr: float | None = option(None, "min-SNR weighting with this gamma (5 is usual)", within=(1e-9, math.inf))
    tokens: int | None = option(
        None, "tokens per caption (default: as many as the text encoder takes)", within=(2, MOST)
    )
    # seed * 2^32 + step must be a seed of torch.
    seed: int = option(0, "seed of weights, noise and order", within=(0, 2**31 - 1))
    save_every: int = option(1000, "steps between checkpoints", within=(1, MOST))
    samples: str = option(
        "a red apple on a blue background|rocket|cat|red heart", "prompts of the sample grid, separated by |"
    )
    workers: int = option(2, "processes that draw or read images", within=(0, 1024))
    compile_network: bool = option(False, "compile the network that is trained")
    shard: bool = option(
        False, "torchrun: divide weights, their averages and gradients among the processes (FSDP2), for large models"
    )
    checkpointing: bool = option(False, "recompute activations in the backward pass, to save memory")
    debug: bool = option(False, "show the traceback of an error")


# Options that a preset cannot use, since it does not come from a file.
_OF_CHECKPOINTS = (
    *("ckpt", "unet", "text_encoder", "lora", "ema", "zero_snr", "metadata"),
    *("attention", "matmul_precision", "vae_tiling"),
)
_OF_DIFFUSION = ("freeze_text", "lora_alpha", "lora_text", "caption_dropout", "min_snr", "tokens", "samples")


def check(options: TrainOptions, load: LoadOptions) -> None:
    """Raise ValueError, one line, for an option that this run does not use, or for data given twice or not at all."""
    for name in ("offload", "storage", "compile", "compiled"):
        if getattr(load, name) not in (None, "off"):
            instead = ", or use `compile_network`" if name == "compile" else ""
            raise ValueError(f"`{name}` has no effect on training: leave it out{instead}")
    if load.dtype not in (None, "fp32", "float32"):
        raise ValueError(f"got `dtype={load.dtype}`, but weights are trained in float32: leave it out")
    if options.lora_rank is not None and (options.stage == "autoencoder" or options.preset is not None):
        raise ValueError(
            "`lora_rank` trains a LoRA for the diffusion model of a checkpoint: leave out `stage` and `preset`"
        )
    if options.stage == "autoencoder" or options.preset is not None or options.lora_rank is not None:
        _refuse(options, ("shard",), "but on the whole diffusion model of a checkpoint")
    if options.preset is not None:
        _refuse(load, _OF_CHECKPOINTS, "with `preset`, which starts from new weights")
    if options.stage == "autoencoder":
        _refuse(options, (*_OF_DIFFUSION, "checkpointing"), "with `stage=autoencoder`")
        _refuse(load, ("lora", "zero_snr"), "with `stage=autoencoder`")
    else:
        _refuse(options, ("freeze_encoder",), "without `stage=autoencoder`")
    if options.lora_rank is None:
        _refuse(options, ("lora_alpha", "lora_text"), "without `lora_rank`")
    else:
        _refuse(options, ("freeze_text",), "with `lora_rank`, which keeps the model frozen")
    if (options.data is None) == (options.renderer is None):
        raise ValueError("wanted either `data=FOLDER` or `renderer=FILE.py`")
    if options.renderer is None:
        _refuse(options, ("renderer_options", "scenes"), "without `renderer`")


def _refuse(options: TrainOptions | LoadOptions, names: Iterable[str], when: str) -> None:
    """Raise ValueError if one of these options is not at its default."""
    defaults = {each.name: each.default for each in fields(options)}
    for name in names:
        if getattr(options, name) != defaults[name]:
            raise ValueError(f"`{name}` has no effect {when}: leave it out")
