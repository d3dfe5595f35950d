"""The benchmark's options.  Nothing here imports torch, so `--help` is instant."""

from dataclasses import dataclass
from pathlib import Path

from ldm_lite.cli.options import MOST, MOST_PX, SEEDS, CheckedOptions, numbers, words
from ldm_lite.core.declare import SCALES, option

# Largest relative error against the reference.  Whole runs amplify rounding, so they have no gate in half precision.
GATES = {"fp32": 1e-4, "fp16": 1e-2, "bf16": 3e-2}
SECTIONS = {"step": "UNet step, guided", "decode": "VAE decode", "image": "prompt to pixels"}
PEERS = {  # and the packages that they need
    "diffusers": ("diffusers", "transformers"),
    "diffusers-compiled": ("diffusers", "transformers"),
    "openvino": ("openvino", "diffusers", "transformers"),
}


@dataclass(frozen=True)
class BenchOptions(CheckedOptions):
    """What to measure."""

    size: str = option(
        "", "the model: sd1 or another, with random weights, or bundled (default: sd1 on CUDA, else bundled)"
    )
    ckpt: str | None = option(None, "measure this checkpoint", metavar="FILE")
    device: str = option("", "cuda, cuda:1, mps, cpu (default: the best available)")
    dtypes: tuple[str, ...] = option(
        "", "separated by commas (default: fp16,fp32 on CUDA, else fp32)", parse=words, choices=tuple(GATES)
    )
    configs: tuple[str, ...] = option(
        "original,original-efficient,math,efficient,compiled",
        "comma-separated configurations; the first is the baseline: original, original-efficient, math, efficient, "
        "compiled, compiled-sdpa, max; max+pdl or efficient+cudnn adds a kernel or takes another attention",
        parse=words,
    )
    peer: tuple[str, ...] = option(
        "", "other programs to compare with, separated by commas", parse=words, choices=tuple(PEERS)
    )
    sections: tuple[str, ...] = option(
        "step,decode,image", "what is measured, separated by commas", parse=words, choices=tuple(SECTIONS)
    )
    batches: tuple[int, ...] = option("1,2,4", "comma-separated batch sizes", parse=numbers, within=(1, 4096))
    height: int | None = option(None, "pixels (default: the model's)", "--H", within=(1, MOST_PX))
    width: int | None = option(None, "pixels (default: the model's)", "--W", within=(1, MOST_PX))
    prompt: str = option("A photo", "prompt of the image section")
    sampler: str = option("plms", "sampler of the image section")
    steps: int = option(50, "denoising steps of the image section", within=(1, 1000))
    n_iter: int = option(2, "batches of images in a timing", within=(1, MOST))
    scale: float = option(7.5, "classifier-free guidance", within=SCALES)
    seed: int = option(1, "seed of all inputs", within=SEEDS)
    memory: bool = option(False, "measure the options that save memory instead")
    modes: tuple[str, ...] = option(
        "plain,lowest,others",
        "what --memory measures, separated by commas",
        parse=words,
        choices=("plain", "lowest", "others"),
    )
    rounds: int = option(10, "rounds of timing in a cell, at most", within=(1, MOST))
    minutes: float = option(9.0, "stop after this many minutes; what was measured is kept", within=(0, MOST))
    first_minutes: float = option(
        60.0,
        "limit in minutes of a first call, with compilation: one that takes longer is stopped",
        within=(0, MOST),
    )
    threads: int | None = option(None, "CPU threads (default: torch's choice)", within=(1, 4096))
    out: str = option("outputs/bench", "folder for results.json, results.md and results.png", metavar="DIR")
    resume: bool = option(False, "keep the results that the folder holds; measure the missing cells and configurations")
    debug: bool = option(False, "show the traceback of an error")

    @property
    def folder(self) -> Path:
        """The folder for the results."""
        return Path(self.out).expanduser()
