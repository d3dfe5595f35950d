"""Options: frozen dataclasses whose fields are arguments in Python and flags on the command line.

Each option is declared once, here or in task_options.py: its name, default, range, help, and name in a PNG's text; for
type checkers scripts/make_arguments.py writes it into arguments.pyi.
Nothing here imports torch, so `--help` is instant.
"""

import dataclasses
import functools
import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from ldm_lite.cli.declared import differ, registered
from ldm_lite.core.declare import (
    check_values,
    option,
)

MOST = 10**9  # limit of counts with no other limit
MOST_PX = 2**16  # limit of an image's side
AnyOptions = TypeVar("AnyOptions", bound="CheckedOptions")
SEEDS = (0, 2**64 - 1)  # as ComfyUI has them
RANDOM_SEEDS = 2**32  # below which random seeds lie, as in A1111


@dataclass(frozen=True)
class CheckedOptions:
    """Options that raise ValueError for a number out of range, or text that does not parse.

    They raise TypeError for a value of another type; numbers of numpy and torch become Python's.
    """

    def __new__(cls, *values: Any, **named: Any) -> Any:
        """Remember the names of the arguments, for `given`."""
        options = super().__new__(cls)
        positional = [field.name for field in dataclasses.fields(cls) if not field.kw_only][: len(values)]
        object.__setattr__(options, "_given", {*positional, *named})
        return options

    def __post_init__(self) -> None:
        check_values(self, _expected)


def _expected(name: str, value: Any, choices: Sequence[str]) -> str:
    from ldm_lite.cli.synonyms import of_value  # a table that is only read for an error

    return of_value(name, value, choices)


def given(options: CheckedOptions) -> set[str]:
    """The names of the options that were given, whatever their values, except None."""
    of_features = {
        row.name
        for feature in getattr(options, "features", ())
        for row in dataclasses.fields(feature)
        if differ(getattr(feature, row.name), row.default)
    }
    return {name for name in getattr(options, "_given", ()) if getattr(options, name, name) is not None} | of_features


def changed(options: AnyOptions, **changes: Any) -> AnyOptions:
    """Return a copy of the options with changes, which may be those of the user's features; `given` also names them.

    dataclasses.replace would make it name all of them.
    """
    known = registered()
    for name in changes.keys() & known.keys() - {row.name for row in dataclasses.fields(options)}:
        kind, features = known[name], changes.get("features", getattr(options, "features", ()))
        mine = next((feature for feature in features if type(feature) is kind), None)
        value = {name: changes.pop(name)}
        feature = kind(**value) if mine is None else dataclasses.replace(mine, **value)
        changes["features"] = (*filter(lambda kept: kept is not mine, features), feature)
    replaced = dataclasses.replace(options, **changes)
    object.__setattr__(replaced, "_given", getattr(options, "_given", set()) | changes.keys())
    return replaced


def with_features(options: AnyOptions, features: Sequence[Any], names: Iterable[str]) -> AnyOptions:
    """Return options with the user's features; `names` are the features' options that were given, even as default."""
    replaced = changed(options, features=tuple(features))
    object.__setattr__(replaced, "_given", {*getattr(replaced, "_given"), *names})  # noqa: B009
    return replaced


def names_files(field: dataclasses.Field[Any]) -> bool:
    """Whether an option's text is the name of a file or a folder."""
    return any(word in (field.metadata.get("metavar") or "") for word in ("FILE", "PATH", "DIR"))


def random_seeds(name: str, value: Any) -> Any:
    """Parse a seed or several: -1 is a random one, as in AUTOMATIC1111's web UI."""
    if hasattr(value, "__iter__") and not isinstance(value, (str, bytes)) and getattr(value, "ndim", True):
        return [random_seeds(name, seed) for seed in value]
    return secrets.randbelow(RANDOM_SEEDS) if value == -1 else value


def pair(name: str, value: Any) -> tuple[int, int]:
    """Parse two whole numbers, or their text: "HxW" or "Y,X".  Raises ValueError for anything else."""
    between, least = (",", 0) if name == "crop_top_left" else ("x", 1)
    text = between.join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)
    first, _, second = text.replace("X", "x").partition(between)
    numbers = [int(side) if side.strip().isdecimal() else -1 for side in (first, second)]
    if not least <= min(numbers) <= max(numbers) <= MOST_PX:
        wanted = "HxW, height first, 1024x768 for instance" if between == "x" else "Y,X, 0,128 for instance"
        raise ValueError(f"got `{name}` {value!r}, expected {wanted}")
    return numbers[0], numbers[1]


def _listed(kind: type, what: str, name: str, value: Any) -> tuple[Any, ...]:
    """Parse values separated by commas.  Raises ValueError for a text with other values."""
    parts = value if isinstance(value, (list, tuple)) else [value]
    if isinstance(value, str):
        parts = [part.strip() for part in value.split(",") if value and (kind is not str or part.strip())]
    try:
        values = tuple(kind(part) if isinstance(part, str) else part for part in parts)
    except ValueError:
        values = ()
    if not values and value not in ("", (), []):
        raise ValueError(f"got `{name}` {value!r:.60}, expected {what} separated by commas")
    return values


words = functools.partial(_listed, str, "names")
numbers = functools.partial(_listed, int, "whole numbers")
decimals = functools.partial(_listed, float, "numbers")


@dataclass(frozen=True)
class RuntimeOptions(CheckedOptions):
    """How the networks run."""

    attention: str | None = option(
        None, "attention kernel: sdpa (PyTorch chooses), fastest, flash, sliced:8, ...; an unknown name lists all"
    )
    compile: str | None = option(
        None,
        "compile the step: off, graph, auto, regional, step, max (default on CUDA: graph, a CUDA graph of uncompiled "
        "steps, for networks below a billion parameters; else off)",
        common=True,
    )
    compiled: str | None = option(
        None, "run the UNet of this package, written by `python -m ldm_lite.export`", metavar="FILE"
    )
    kernels: str | None = option(
        None,
        "plain: only PyTorch's own kernels, and nothing is timed; on a GPU also all, or a comma-separated list of the "
        "ones to use: qkv, pdl, tma (default: qkv)",
    )
    matmul_precision: str | None = option(
        None,
        "precision of float32 matmuls on a GPU, in this process: high is TF32 "
        "(default: PyTorch's, TF32 only in convolutions)",
        choices=("highest", "high", "medium"),
    )
    offload: str | None = option(
        None,
        "save GPU memory: networks (model) or blocks (sequential) take turns on the device",
        common=True,
        choices=("model", "sequential"),
    )
    storage: str | None = option(None, "keep weights in 8 bits, computing in --dtype", choices=("fp8", "int8"))
    vae_tiling: bool = option(
        False, "encode and decode in strips: less memory, the same image (always, if large, in fp32 on a CPU)"
    )


@dataclass(frozen=True)
class LoadOptions(RuntimeOptions):
    """What to load, and on which device; the arguments of ldm_lite.load."""

    ckpt: Any = option(
        None,
        "checkpoint: a file, a diffusers folder, or owner/repository[/file] on the hub (default: the bundled model)",
        "--pretrained_model_name_or_path",
        metavar="FILE",
        common=True,
    )
    vae: str | None = option(None, "load the autoencoder from this file", metavar="FILE", common=True)
    unet: str | None = option(None, "load the UNet from this file", metavar="FILE")
    text_encoder: tuple[str, ...] = option(
        (), "load a text encoder (CLIP-L, bigG, T5, Qwen3, ...) from this file; repeatable", metavar="FILE"
    )
    tokenizer: str | None = option(
        None,
        "Qwen's tokenizer.json, or a folder with it or with vocab.json and merges.txt (default: beside the weights)",
        metavar="FILE",
    )
    t5_vocab: str | None = option(
        None, "T5's spiece.model or tokenizer.json (default: the one beside its weights)", metavar="FILE"
    )
    lora: tuple[str, ...] = option(
        (),
        "merge a LoRA, a file or PEFT's folder; WEIGHT may have parts: 0.8:lbw=OUTD, te=0.5:unet=1; repeatable",
        metavar="FILE[:WEIGHT]",
        common=True,
    )
    ema: str = option(
        "auto",
        "use the UNet's EMA weights, if the file has them; original: only for families whose original code does",
        choices=("auto", "yes", "no", "original"),
    )
    prediction: str | None = option(None, "what the UNet predicts, if the file is wrong", choices=("eps", "v", "x0"))
    zero_snr: bool = option(False, "shift the noise schedule to zero terminal SNR, for v models trained with it")
    metadata: tuple[str, ...] = option(
        (), "add to the file's metadata, for an unknown network; repeatable", metavar="KEY=VALUE"
    )
    device: str | None = option(None, "cuda, cuda:1, mps, cpu (default: the best there is)", common=True)
    dtype: str | None = option(
        None,
        "fp32, fp16, bf16, auto (bf16 on a CPU that has it in hardware), or by network: fp16,vae=fp32 "
        "(default on CUDA: fp16, or bf16 for transformers; else fp32)",
        common=True,
    )

    @property
    def parts(self) -> dict[str, tuple[str, ...]]:
        """The files that single networks are taken from, by role."""
        files = {role: getattr(self, role) for role in ("vae", "unet", "text_encoder")}
        return {role: file if isinstance(file, tuple) else (file,) for role, file in files.items() if file}

    @property
    def added_metadata(self) -> Mapping[str, str]:
        """`metadata` as a mapping.  Raises ValueError for an item without "="."""
        if bad := [item for item in self.metadata if "=" not in item]:
            raise ValueError(f"got `metadata` {bad[0]!r}, expected KEY=VALUE")
        return dict(item.split("=", 1) for item in self.metadata)


@dataclass(frozen=True)
class SaveOptions(CheckedOptions):
    """Where the images go."""

    out: str | None = option(
        None,
        "folder for the images, or a name ending in .png (default: outputs/COMMAND-samples)",
        "--outdir",
        metavar="PATH",
        common=True,
    )
    skip_save: bool = option(False, "do not save single images")
    skip_grid: bool = option(False, "do not save a grid of all images")
    skip_existing: bool = option(
        False, "continue a job: skip images that the folder has, by prompt, seed, settings, weights and inputs"
    )
    x: str | None = option(
        None,
        "plot: values of an option from left to right, such as scale=5,7.5,10 or steps=10-30 (+10)",
        metavar="OPTION=VALUES",
    )
    y: str | None = option(None, "values of another option from top to bottom", metavar="OPTION=VALUES")
    z: str | None = option(None, "values of a third option: a plot for each", metavar="OPTION=VALUES")
    n_rows: int = option(0, "images in a row of the grid (default: the batch size)", within=(0, MOST))
    preview: str | None = option(
        None,
        "write a preview of the images to preview.png at every step, with this small autoencoder: taesd, taesdxl, ...",
        metavar="FILE",
    )
    debug: bool = option(False, "show the traceback of an error")
