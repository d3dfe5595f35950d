"""Peak memory with the memory-saving options; each makes one image in its own process.

`python -m ldm_lite.bench.memory` is that process: a Request as JSON in, a Result as JSON out.
"""

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ldm_lite import generate
from ldm_lite.bench.checkpoints import load, open_model
from ldm_lite.bench.measure import status
from ldm_lite.bench.workload import Target
from ldm_lite.conditioning.prompts import encode_prompts, guided
from ldm_lite.diffusion.names import make_plan
from ldm_lite.diffusion.noise import SeededNoise

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
class Request:
    """The work of a process."""

    target: Target
    dtype: str
    runtime: Mapping[str, object]  # fields of RuntimeOptions
    image: str  # the .npy file to write


@dataclass(frozen=True)
class Result:
    """The memory and time that one image took."""

    peak: int | None  # bytes: on CUDA of all tensors, otherwise of the process
    weights: int  # bytes as they are stored
    step_s: float  # seconds per step, the median without the first
    decode_s: float


@dataclass(frozen=True)
class Row:
    """A mode with its result or its error."""

    mode: str
    result: Result | None
    psnr: float | None  # dB, against the first mode's image; infinite if they are equal
    error: str = ""


@torch.no_grad()
def make_image(request: Request) -> Result:
    """Load, make one image, write it as float32 pixels (3,H,W), and measure."""
    target, setting = request.target, request.target.setting
    device = torch.device(target.device)
    if target.threads is not None:
        torch.set_num_threads(target.threads)
    checkpoint = open_model(target.size, target.ckpt)
    model = load(checkpoint, target.device, request.dtype, **request.runtime)
    plan = make_plan(setting.sampler, model.schedule, setting.steps)
    draw = SeededNoise([setting.seed], model.latent_shape(setting.height, setting.width))
    branches = guided(model, encode_prompts(model, [setting.prompt]), encode_prompts(model, [""]), setting.scale)
    noise = latents = draw()
    times = []
    for state in generate.stream(model, noise, branches, plan, draw=draw):
        latents = state.latents
        times.append(_now(device))
    [pixels] = generate.decode(model, latents)
    end = _now(device)
    np.save(request.image, pixels.numpy())
    peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else status("VmHWM")
    weights = sum(value.nbytes for network in model.networks.values() for value in network.state_dict().values())
    return Result(peak, weights, float(np.median(np.diff(times))) if len(times) > 1 else 0.0, end - times[-1])


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def measure(request: Request, modes: Iterable[str]) -> Iterator[Row]:
    """Run the request in every mode, each in a process of its own, and yield its row."""
    first: np.ndarray[Any, Any] | None = None
    with tempfile.TemporaryDirectory() as folder:
        for mode in modes:
            request = replace(request, runtime=MODES[mode], image=str(Path(folder, "image.npy")))
            done = subprocess.run(
                [sys.executable, "-m", "ldm_lite.bench.memory"],
                input=json.dumps(asdict(request)),
                capture_output=True,
                text=True,
            )
            if done.returncode != 0:
                lines = done.stderr.strip().splitlines() or [f"its process ended (status {done.returncode})"]
                yield Row(mode, None, None, lines[-1][:120])
                continue
            image = np.load(request.image)
            first = image if first is None else first
            error = float(np.square((image - first) / 2).mean())
            yield Row(mode, Result(**json.loads(done.stdout)), -10 * np.log10(error) if error else float("inf"))


def markdown(rows: Iterable[Row], title: str) -> str:
    """Format the table."""
    lines = [
        title,
        "",
        "| mode | peak, GiB | beyond the weights, GiB | s/step | decode, s | PSNR against the first, dB |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for row in rows:
        if (made := row.result) is None:
            lines.append(f"| {row.mode} | {row.error} | | | | |")
            continue
        sizes = () if made.peak is None else (made.peak, made.peak - made.weights)
        peak, beyond = (f"{size / 2**30:.2f}" for size in sizes) if sizes else ("", "")
        lines.append(f"| {row.mode} | {peak} | {beyond} | {made.step_s:.3g} | {made.decode_s:.3g} | {row.psnr:.1f} |")
    return "\n".join(lines)


if __name__ == "__main__":
    asked = json.load(sys.stdin)
    made = make_image(Request(**{**asked, "target": Target.from_dict(asked["target"])}))
    sys.stdout.write(json.dumps(asdict(made)))
