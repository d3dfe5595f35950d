"""The ways to need less memory: each makes one picture in a process of its own, and says what that took.

`python -m ldm_lite.benchmark.memory` is that process: a Question as JSON in, an Answer as JSON out.
"""

import dataclasses
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ldm_lite import generate
from ldm_lite.bench.jobs import Setting
from ldm_lite.bench.measure import status
from ldm_lite.bench.subjects import subject
from ldm_lite.checkpoint.model import load
from ldm_lite.conditioning.prompts import encode_prompts, guided
from ldm_lite.diffusion.names import make_plan

MODES: dict[str, dict[str, object]] = {
    "plain": {},
    "--vae-tiling": {"vae_tiling": True},
    "--attention sliced:8": {"attention": "sliced:8"},
    "--storage fp8": {"storage": "fp8"},
    "--storage int8": {"storage": "int8"},
    "--offload model": {"offload": "model"},
    "--offload model --vae-tiling": {"offload": "model", "vae_tiling": True},
    "--offload sequential --vae-tiling": {"offload": "sequential", "vae_tiling": True},
    "--offload sequential --storage int8 --vae-tiling": {
        "offload": "sequential",
        "storage": "int8",
        "vae_tiling": True,
    },
}


@dataclass(frozen=True)
class Question:
    """What a process is to do."""

    size: str
    ckpt: str | None
    device: str
    dtype: str
    tuning: Mapping[str, object]
    setting: Mapping[str, Any]  # of a Setting
    picture: str  # the .npy that it is to write


@dataclass(frozen=True)
class Answer:
    """What it took."""

    peak: int | None  # bytes: on CUDA of all tensors, else the whole process's
    weights: int  # bytes as they are kept
    step_s: float  # seconds a step, the median without the first
    decode_s: float


@dataclass(frozen=True)
class Row:
    """A mode, and what it took or why it could not be had."""

    mode: str
    answer: Answer | None
    psnr: float | None  # of its picture against the first mode's, dB; infinite where they are the same
    why_not: str = ""


@torch.no_grad()
def answer(question: Question) -> Answer:
    """Load, make one picture, write it as float32 pixels (3,H,W), and measure."""
    device, setting = torch.device(question.device), Setting(**question.setting)
    pipe = load(subject(question.size, question.ckpt), device=device, dtype=question.dtype, tuning=question.tuning)
    plan = make_plan(setting.sampler, pipe.schedule, setting.steps)
    draw = generate.SeededNoise([setting.seed], pipe.latent_shape(setting.height, setting.width))
    branches = guided(pipe, encode_prompts(pipe, [setting.prompt]), encode_prompts(pipe, [""]), setting.scale)
    noise = latents = draw()
    times = []
    for x in generate.denoise(pipe, noise, branches, plan, draw=draw):
        latents = x
        times.append(_now(device))
    [pixels] = generate.decode(pipe, latents)
    end = _now(device)
    np.save(question.picture, pixels.numpy())
    peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else status("VmHWM")
    weights = sum(value.nbytes for network in pipe.networks.values() for value in network.state_dict().values())
    return Answer(peak, weights, float(np.median(np.diff(times))) if len(times) > 1 else 0.0, end - times[-1])


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def measure(question: Question, modes: Iterable[str]) -> Iterable[Row]:
    """Ask the question in every mode, each in a process of its own -> its row, as it comes."""
    first: np.ndarray[Any, Any] | None = None
    with tempfile.TemporaryDirectory() as folder:
        for mode in modes:
            question = dataclasses.replace(question, tuning=MODES[mode], picture=str(Path(folder, "picture.npy")))
            done = subprocess.run(
                [sys.executable, "-m", "ldm_lite.bench.memory"],
                input=json.dumps(dataclasses.asdict(question)),
                capture_output=True,
                text=True,
            )
            if done.returncode != 0:
                lines = done.stderr.strip().splitlines() or [f"its process ended (status {done.returncode})"]
                yield Row(mode, None, None, lines[-1][:120])
                continue
            picture = np.load(question.picture)
            first = picture if first is None else first
            error = float(np.square((picture - first) / 2).mean())
            yield Row(mode, Answer(**json.loads(done.stdout)), -10 * np.log10(error) if error else float("inf"))


def markdown(rows: Iterable[Row], title: str) -> str:
    """The table."""
    lines = [
        title,
        "",
        "| mode | peak, GiB | beyond the weights kept, GiB | s/step | decode, s | PSNR against the first, dB |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for row in rows:
        if (made := row.answer) is None:
            lines.append(f"| {row.mode} | {row.why_not} | | | | |")
            continue
        peak, beyond = ("", "") if made.peak is None else (f"{made.peak / 2**30:.2f}", _beyond(made))
        lines.append(f"| {row.mode} | {peak} | {beyond} | {made.step_s:.3g} | {made.decode_s:.3g} | {row.psnr:.1f} |")
    return "\n".join(lines)


def _beyond(made: Answer) -> str:
    assert made.peak is not None
    return f"{(made.peak - made.weights) / 2**30:.2f}"


if __name__ == "__main__":
    sys.stdout.write(json.dumps(dataclasses.asdict(answer(Question(**json.load(sys.stdin))))))
