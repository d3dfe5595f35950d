"""Options: dataclasses whose fields are arguments in Python and flags on the command line, without torch."""

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

T = TypeVar("T")

MOST = 10**9  # of a count that nothing else limits
MOST_PX = 2**16  # of a picture's side
SEEDS = (0, 2**63 - 1)
FINITE = (-math.inf, math.inf)


def option(
    default: T,
    help: str,
    *flags: str,
    positional: bool = False,
    choices: Sequence[str] | None = None,
    metavar: str | None = None,
    within: tuple[float, float] | None = None,
) -> T:
    """A dataclass field that is also a flag: --its-name, and any further spellings in `flags`.

    A flag whose field is a tuple may be repeated.  metavar is what --help calls the value.  within are the least and
    the most that a number may be, finite in any case.
    """
    about = {"help": help, "flags": flags, "positional": positional, "choices": choices, "metavar": metavar}
    return field(default=default, metadata={**about, "within": within})


@dataclass(frozen=True)
class Ranged:
    """Options, which cannot be made with a number out of its range: that is a ValueError."""

    def __post_init__(self) -> None:
        for each in dataclasses.fields(self):
            value, within = getattr(self, each.name), each.metadata["within"]
            if value is None or within is None or (within[0] <= value <= within[1] and abs(value) != math.inf):
                continue
            least, most = within
            wanted = f"{least} or more" if most == math.inf else f"{least} to {most}"
            raise ValueError(f"got {each.name} {value}, wanted {'a finite number' if within == FINITE else wanted}")


@dataclass(frozen=True)
class RuntimeOptions(Ranged):
    """How networks run."""

    attention: str | None = option(
        None, "sdpa (PyTorch chooses), flash, sliced:8 and others; an unknown name lists all (default: sdpa)"
    )
    compile: str | None = option(None, "compile the step: off, auto, regional, step, max (default: off)")
    compiled: str | None = option(None, "run the UNet of this package, which `python -m ldm_lite.export` has written")
    matmul_precision: str | None = option(
        None, "of float32 on a GPU: high is TF32 (default: highest)", choices=("highest", "high", "medium")
    )
    offload: str | None = option(None, "networks, or blocks, take turns on the device", choices=("model", "sequential"))
    storage: str | None = option(None, "keep weights in 8 bits, computing in --dtype", choices=("fp8", "int8"))
    vae_tiling: bool = option(
        False, "encode and decode strip by strip, as in fp32 on a CPU always: less memory, the same picture"
    )


@dataclass(frozen=True)
class LoadOptions(RuntimeOptions):
    """What to load, and onto what; the arguments of ldm_lite.load."""

    ckpt: str | None = option(
        None,
        "checkpoint: a file, a folder of diffusers, or owner/repository[/file] on the hub (default: the bundled model)",
    )
    vae: str | None = option(None, "take the autoencoder from this file")
    unet: str | None = option(None, "take the UNet from this file")
    text_encoder: str | None = option(None, "take the text encoder from this file")
    lora: tuple[str, ...] = option((), "merge a LoRA file; repeatable", metavar="FILE[:WEIGHT]")
    ema: str = option("auto", "use the UNet's EMA copy, if the file has one", choices=("auto", "yes", "no"))
    prediction: str | None = option(None, "what the UNet predicts, if the file is wrong", choices=("eps", "v", "x0"))
    zero_snr: bool = option(False, "shift the noise schedule to zero terminal SNR, for v models trained so")
    metadata: tuple[str, ...] = option(
        (), "add to the file's metadata, for an unknown network; repeatable", metavar="KEY=VALUE"
    )
    device: str | None = option(None, "cuda, cuda:1, mps, cpu (default: the best there is)")
    dtype: str | None = option(
        None, "fp32, fp16, bf16, or with others for some networks fp16,vae=fp32 (default: fp16 on CUDA, else fp32)"
    )

    def arguments(self) -> dict[str, Any]:
        """As ldm_lite.load takes them.  Raises ValueError for metadata without a "="."""
        values = dataclasses.asdict(self)
        values["source"] = values.pop("ckpt")
        parts = {role: values.pop(role) for role in ("vae", "unet", "text_encoder")}
        values["parts"] = {role: file for role, file in parts.items() if file is not None}
        if bad := [item for item in self.metadata if "=" not in item]:
            raise ValueError(f"got --metadata {bad[0]}, wanted KEY=VALUE")
        values["metadata"] = dict(item.split("=", 1) for item in self.metadata)
        names = ("attention", "compile", "compiled", "matmul_precision", "offload", "storage", "vae_tiling")
        tuning = {name: values.pop(name) for name in names}
        values["tuning"] = {name: value for name, value in tuning.items() if value}
        return values


@dataclass(frozen=True)
class SaveOptions(Ranged):
    """Where results go."""

    out: str | None = option(
        None, "folder for the images, or the name of a .png (default: outputs/COMMAND-samples)", "--outdir"
    )
    skip_save: bool = option(False, "do not save single images")
    skip_grid: bool = option(False, "do not save a grid of all images")
    n_rows: int = option(0, "images in a row of the grid (default: the batch size)", within=(0, MOST))
    preview: str | None = option(
        None,
        "show at every step what the pictures will be, in preview.png beside the results, by this file's autoencoder: "
        "taesd, taesdxl or any that fits",
        metavar="FILE",
    )
    debug: bool = option(False, "show the traceback of an error")


def numbers(text: str, what: str) -> list[int]:
    """Whole numbers from 1 on, with commas between.  Raises ValueError, which says what they are, for anything else."""
    try:
        found = [int(number) for number in text.split(",")]
    except ValueError as error:
        raise ValueError(f"got {what} {text!r}, wanted whole numbers with commas between") from error
    if min(found) < 1:
        raise ValueError(f"got {what} {text!r}, wanted 1 or more")
    return found
