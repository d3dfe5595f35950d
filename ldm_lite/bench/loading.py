"""Loading time of ldm_lite and diffusers, from the start of a process to networks that are ready."""

import json
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from ldm_lite.bench.loading_worker import CKPT, METHODS, PEER, PEER_BIN, SAFETENSORS, Ready
from ldm_lite.bench.measure import alternating, median, spread
from ldm_lite.checkpoint.reader import Checkpoint, split
from ldm_lite.zoo.detection import detect_family


@dataclass
class Timing:
    """The measurements of a method, one sample per round, in seconds from the start of its process."""

    imports: list[float] = field(default_factory=list)
    ready: list[float] = field(default_factory=list)
    peak: int | None = None
    weights: int = 0
    error: str = ""


def write(checkpoint: Checkpoint, folder: Path, methods: Iterable[str]) -> None:
    """Write the files that the methods read, in float32: the checkpoint in both formats, and diffusers' folders."""
    weights = {key: checkpoint.read(key) for key in checkpoint.shapes}
    save_file(weights, folder / SAFETENSORS, metadata=dict(checkpoint.metadata))
    wanted = {METHODS[name].file for name in methods}
    if CKPT in wanted:
        torch.save({"state_dict": weights}, folder / CKPT)
    if wanted & {PEER, PEER_BIN}:
        from ldm_lite.bench import peers

        components = split(checkpoint)
        family = detect_family({role: each.shapes for role, each in components.items()}, checkpoint.metadata)
        for role in components:
            network: Any = peers.NETWORKS[role](family, weights)
            for parameter in network.parameters():
                parameter.data = parameter.data.contiguous()
            network.save_pretrained(folder / PEER / role)
            network.save_pretrained(folder / PEER_BIN / role)
            for path in (folder / PEER_BIN / role).glob("*.safetensors"):  # newer versions write only these
                name = path.stem if "pytorch" in path.stem else f"pytorch_{path.stem}"
                torch.save(network.state_dict(), path.with_name(f"{name}.bin"))
                path.unlink()


def measure(methods: Sequence[str], folder: Path, device: str, rounds: int) -> dict[str, Timing]:
    """Time the methods in turn; a method that fails is dropped, with its error."""
    timings = {name: Timing() for name in methods}
    for number in range(-1, rounds):  # the first round brings the files into the disk cache
        for name in alternating(methods, number):
            timing = timings[name]
            if timing.error:
                continue
            start = time.time()
            done = subprocess.run(
                [sys.executable, "-m", "ldm_lite.bench.loading_worker"],
                input=json.dumps([name, str(folder), device]),
                capture_output=True,
                text=True,
            )
            if done.returncode != 0:
                lines = done.stderr.strip().splitlines() or [f"its process ended (status {done.returncode})"]
                timing.error = lines[-1][:120]
            elif number >= 0:
                made = Ready(**json.loads(done.stdout))
                timing.imports.append(made.imported - start)
                timing.ready.append(made.ready - start)
                timing.peak, timing.weights = made.peak, made.weights
    return timings


def markdown(timings: Mapping[str, Timing], title: str) -> str:
    """Format the table; ratios are to diffusers with the same kind of file and precision."""
    lines = [
        title,
        "",
        "| | ready, s | spread | imports, s | against diffusers | peak of the process, GiB | weights, GiB |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for name, timing in timings.items():
        method = METHODS[name]
        if timing.error:
            lines.append(f"| {method.title} | {timing.error} | | | | | |")
            continue
        ready, imports = median(timing.ready), median(timing.imports)
        peer = timings.get(method.peer)
        ratio = f"{ready / median(peer.ready):.2f}" if peer and peer.ready else ""
        peak = "" if timing.peak is None else f"{timing.peak / 2**30:.2f}"
        weights = f"{timing.weights / 2**30:.2f}" if method.file else ""
        cells = (f"{ready:.2f}", f"{spread(timing.ready):.1%}", f"{imports:.2f}", ratio, peak, weights)
        lines.append(f"| {method.title} | {' | '.join(cells)} |")
    return "\n".join(lines)
