"""Options of `python -m ldm_lite.batch`, and the columns of its table.  Nothing here imports torch."""

import dataclasses
import re
import typing
from dataclasses import dataclass
from typing import Any

from ldm_lite.cli.declared import option_rows
from ldm_lite.cli.options import MOST, CheckedOptions
from ldm_lite.cli.task_options import Img2imgOptions, InpaintOptions
from ldm_lite.core.declare import option, types_of

# Options of one image, each of which may be a column of the table and, for rows without a value, a flag.
SHARED = (
    *("negative_prompt", "seed", "steps", "scale", "sampler", "spacing", "eta", "churn", "width", "height"),
    *("guidance_rescale", "mimic_scale", "dynamic_threshold", "prompt_syntax", "clip_skip", "strength", "exact_steps"),
    *("image_scale", "resize", "sample_posterior", "invert_mask", "feather", "no_paste"),
    *("noise", "ensd", "variation_seed", "variation_strength"),
    *("original_size", "crop_top_left", "target_size", "aesthetic_score", "negative_aesthetic_score"),
    *("control", "preprocess", "clip_vision"),
    *("hires", "hires_strength", "hires_steps", "hires_upscaler", "hires_esrgan", "hires_sampler"),
    *("hires_prompt", "hires_negative_prompt"),
)
LISTS = ("control", "lora")  # columns of one or several: a list, or a text with ; between
FILES = {"init_image": "init_img", "init_img": "init_img", "mask": "mask"}  # columns that name files
COLUMNS = ("id", "prompt", "lora", *SHARED, *FILES)

_ALL = {field.name: field for kind in (InpaintOptions, Img2imgOptions) for field in dataclasses.fields(kind)}
_HINTS = typing.get_type_hints(InpaintOptions) | typing.get_type_hints(Img2imgOptions)

RowOptions = dataclasses.make_dataclass(
    "RowOptions",
    [
        (name, _HINTS[name], dataclasses.field(default=_ALL[name].default, metadata=_ALL[name].metadata))
        for name in (*SHARED, "embedding")
    ],
    bases=(CheckedOptions,),
    frozen=True,
    namespace={"__doc__": "For rows of the table that have no value of their own."},
)


@dataclass(frozen=True)
class BatchOptions(CheckedOptions):
    """What to make, and who makes it."""

    prompts: str | None = option(
        None, "table of prompts: .parquet, .jsonl, .csv or .txt; with --encode, captioned images", positional=True
    )
    out: str | None = option(
        None, "folder of the results; the same command continues it (default: outputs/batch)", metavar="DIR"
    )
    format: str = option("shards", "shards: tar files as WebDataset reads them", choices=("shards", "folder"))
    manifest: str = option("parquet", "format of the list of all images", choices=("parquet", "jsonl"))
    shard_size: int = option(
        1000, "rows of a shard, which one process makes; only complete ones are kept", within=(1, MOST)
    )
    batch_size: int = option(8, "images at a time, of rows with the same settings", within=(1, 4096))
    feature: tuple[str, ...] = option(
        (), "a Python file of features of your own, whose options may be columns; repeat it for several", metavar="FILE"
    )
    most_pixels: int | None = option(
        None, "rows of more pixels fail (default: 16 times those of the model, or 2048 x 2048)", within=(1, MOST)
    )
    shard: str | None = option(
        None, "make only every N-th shard, from the I-th: 1/8 to 8/8 in a Slurm array of 8", metavar="I/N"
    )
    encode: bool = option(False, "encode the images and captions of a folder for training, into memory-mapped files")
    engine: str = option("process", "process: this one; ray: a cluster of Ray", choices=("process", "ray"))
    workers: str | None = option(None, "processes of the engine, or MIN:MAX, between which Ray scales (default: 1)")
    gpus_per_worker: float | None = option(
        None, "GPUs of each worker; 0.5 lets two share one (default: 1, or 0 if the cluster has none)", within=(0, 64)
    )
    cpus_per_worker: float = option(1.0, "CPU cores of each worker", within=(0.01, 4096))
    address: str | None = option(None, "address of a running Ray cluster, or auto (default: a new one on this machine)")
    debug: bool = option(False, "show the traceback of an error")

    @property
    def turn(self) -> tuple[int, int]:
        """Which process this is, counted from 0, and of how many.  Raises ValueError for text that is not I/N."""
        match = re.fullmatch(r"(\d{1,6})/(\d{1,6})", "1/1" if self.shard is None else self.shard)
        if match is None or not 1 <= int(match[1]) <= int(match[2]):
            raise ValueError(f"got `shard` {self.shard!r}, expected I/N with I from 1 to N, 1/8 for instance")
        return int(match[1]) - 1, int(match[2])

    @property
    def pool(self) -> tuple[int, int]:
        """The least and the greatest number of workers.  Raises ValueError for text that is not such bounds."""
        match = re.fullmatch(r"(\d{1,5})(?::(\d{1,5}))?", "1" if self.workers is None else self.workers)
        if match is None or not 1 <= int(match[1]) <= int(match[2] or match[1]):
            raise ValueError(f"got `workers` {self.workers!r}, expected a number from 1, or MIN:MAX, 2:8 for instance")
        return int(match[1]), int(match[2] or match[1])


def check_options(options: BatchOptions) -> None:
    """Raises ValueError, one line, for options that do not fit each other."""
    if options.prompts is None:
        raise ValueError("no table of prompts: give a .parquet, .jsonl, .csv or .txt, or with `encode` a folder")
    if options.engine != "ray":
        names = ("workers", "gpus_per_worker", "address")
        if used := [name for name in names if getattr(options, name) is not None]:
            raise ValueError(f"`{used[0]}` is for the engine Ray: add `engine=ray`, or leave it out")
    assert options.turn
    assert options.pool


def column_type(name: str) -> Any:
    """The type of a column's values: int, float, bool or str, or None if the option parses them itself."""
    if name in ("id", "prompt", "noise", "hires_esrgan", *LISTS, *FILES):
        return str
    if name == "seed":  # of a row, one
        return int
    row, kind = option_rows(InpaintOptions).get(name) or (_ALL[name], Img2imgOptions)
    if row.metadata["parse"] is not None:
        return None
    hint = _HINTS[name] if name in _HINTS else types_of(kind)[name]
    return next(kind for kind in (int, float, bool, str) if kind in (hint, *typing.get_args(hint)))
