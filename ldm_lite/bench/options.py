"""The benchmark's options.  Nothing here imports torch, so `--help` is instant."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from ldm_lite.cli.options import MOST, MOST_PX, SCALES, SEEDS, CheckedOptions, option


@dataclass(frozen=True)
class Options(CheckedOptions):
    """What to measure."""

    size: str = option(
        "", "the model: sd1 or another, with random weights, or bundled (default: sd1 on CUDA, else bundled)"
    )
    ckpt: str | None = option(None, "measure this checkpoint")
    device: str = option("", "cuda, cuda:1, mps, cpu (default: the best available)")
    dtypes: str = option("", "comma-separated: fp16, bf16, fp32 (default: fp16,fp32 on CUDA, else fp32)")
    configs: str = option(
        "original,original-efficient,math,efficient,compiled",
        "comma-separated configurations; the first is the baseline: original, original-efficient, math, efficient, "
        "compiled, compiled-sdpa, max; max+pdl or efficient+cudnn adds a kernel or takes another attention",
    )
    peer: str = option("", "comma-separated: diffusers, diffusers-compiled, openvino")
    sections: str = option("step,decode,image", "comma-separated: step, decode, image")
    batches: str = option("1,2,4", "comma-separated batch sizes")
    height: int | None = option(None, "pixels (default: the model's)", "--H", within=(1, MOST_PX))
    width: int | None = option(None, "pixels (default: the model's)", "--W", within=(1, MOST_PX))
    prompt: str = option("A photo", "prompt of the image section")
    sampler: str = option("plms", "sampler of the image section")
    steps: int = option(50, "denoising steps of the image section", within=(1, 1000))
    n_iter: int = option(2, "batches of images in a sample", within=(1, MOST))
    scale: float = option(7.5, "classifier-free guidance", within=SCALES)
    seed: int = option(1, "seed of all inputs", within=SEEDS)
    memory: bool = option(False, "measure the options that save memory instead")
    rounds: int = option(10, "most rounds of timing in a cell", within=(1, MOST))
    minutes: float = option(9.0, "stop after this many minutes; what was measured is kept", within=(0, MOST))
    threads: int | None = option(None, "CPU threads (default: torch's choice)", within=(1, 4096))
    out: str = option("outputs/bench", "folder for results.json, results.md and results.png")
    resume: bool = option(False, "keep the results that the folder holds; measure the missing cells and configurations")
    debug: bool = option(False, "show the traceback of an error")

    @property
    def folder(self) -> Path:
        """The folder for the results."""
        return Path(self.out).expanduser()


def names(flag: str, text: str, known: Iterable[str]) -> list[str]:
    """Split comma-separated names.  Raises ValueError for an unknown one."""
    split = [name.strip() for name in text.split(",") if name.strip()]
    for name in split:
        if name not in known:
            raise ValueError(f"unknown {name!r} in --{flag}: wanted some of {', '.join(known)}")
    if text and not split:
        raise ValueError(f"got --{flag} {text!r}, wanted some of {', '.join(known)}")
    return split
