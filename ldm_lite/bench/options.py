"""The benchmark's options.  Nothing here imports torch, so `--help` is instant."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from ldm_lite.cli.options import FINITE, MOST, MOST_PX, SEEDS, CheckedOptions, option


@dataclass(frozen=True)
class Options(CheckedOptions):
    """What to measure."""

    size: str | None = option(
        None, "the model: sd1 or another, with random weights, or bundled (default: sd1 on CUDA, else bundled)"
    )
    ckpt: str | None = option(None, "measure this checkpoint")
    device: str | None = option(None, "cuda, cuda:1, mps, cpu (default: the best available)")
    dtypes: str | None = option(
        None, "comma-separated: fp16, bf16, fp32 (default: fp16,fp32 on CUDA, bf16,fp32 with --train, else fp32)"
    )
    configs: str | None = option(
        None,
        "comma-separated configurations; the first is the baseline: original, original-efficient, math, efficient, "
        "compiled, compiled-sdpa, max; with --train vanilla, sdpa, channels_last, checkpointed, compiled "
        "(default: all)",
    )
    peer: str = option("", "comma-separated: diffusers, diffusers-compiled, openvino, each in its own process")
    sections: str = option("step,decode,text,image", "comma-separated: step, decode, text, image")
    train: bool = option(False, "measure training steps of the UNet instead of the sections")
    max_batch: bool = option(False, "find the largest batch that fits, instead of the sections; CUDA only")
    task: str = option("txt2img", "comma-separated tasks of the image section: txt2img, img2img, inpaint")
    batches: str = option("1,2,4", "comma-separated batch sizes")
    full: bool = option(False, "batch 16 too")
    height: int | None = option(None, "pixels (default: the model's)", "--H", within=(1, MOST_PX))
    width: int | None = option(None, "pixels (default: the model's)", "--W", within=(1, MOST_PX))
    prompt: str = option("A photo", "prompt of the image section")
    sampler: str = option("plms", "sampler of the image section")
    steps: int = option(50, "denoising steps of the image section", within=(1, 1000))
    n_iter: int = option(2, "batches of images in a sample", within=(1, MOST))
    scale: float = option(7.5, "classifier-free guidance", within=FINITE)
    seed: int = option(1, "seed of all inputs", within=SEEDS)
    memory: bool = option(False, "measure the options that save memory instead, each in its own process")
    loading: bool = option(False, "measure the time from process start to loaded networks instead")
    rounds: int = option(10, "most rounds of timing in a cell", within=(1, MOST))
    minutes: float = option(9.0, "stop after about this many minutes and keep the results so far", within=(0, MOST))
    threads: int | None = option(None, "CPU threads (default: torch's choice)", within=(1, 4096))
    out: str = option("outputs/bench", "folder for results.json, results.md and results.png")
    resume: bool = option(False, "keep the results in that folder; measure the missing cells and configurations")
    debug: bool = option(False, "show the traceback of an error")

    @property
    def folder(self) -> Path:
        """The folder for the results."""
        return Path(self.out).expanduser()


def names(flag: str, text: str, known: Iterable[str]) -> list[str]:
    """Split comma-separated names.  Raises ValueError for an unknown one."""
    found = [name.strip() for name in text.split(",") if name.strip()]
    for name in found:
        if name not in known:
            raise ValueError(f"unknown {name!r} in --{flag}: wanted some of {', '.join(known)}")
    if text and not found:
        raise ValueError(f"got --{flag} {text!r}, wanted some of {', '.join(known)}")
    return found
