"""Loading: from the start of a process to networks that are ready, ours and diffusers', each in a process of its own.

`python -m ldm_lite.benchmark.loading` is that process: [way, folder, device] as JSON in, a Ready as JSON out.
"""

import dataclasses
import json
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ldm_lite.checkpoint.reader import Checkpoint

SAFETENSORS, CKPT = "model.safetensors", "model.ckpt"  # in the folder
PEER, PEER_BIN = "diffusers", "diffusers-bin"  # folders in it


@dataclass(frozen=True)
class Way:
    """One way to have a checkpoint's networks."""

    title: str
    file: str  # in the folder; empty where only the imports are measured
    half: bool = False  # cast to fp16 as it is read
    peer: str = ""  # the way that it is compared with


WAYS: dict[str, Way] = {
    "torch": Way("import torch", ""),
    "imports": Way("from ldm_lite import load", ""),
    "ours": Way("ldm_lite, .safetensors", SAFETENSORS, peer="diffusers"),
    "diffusers": Way("diffusers, its folder of .safetensors", PEER),
    "ours-half": Way("ldm_lite, .safetensors to fp16", SAFETENSORS, True, "diffusers-half"),
    "diffusers-half": Way("diffusers, its folder of .safetensors to fp16", PEER, True),
    "ours-ckpt": Way("ldm_lite, .ckpt", CKPT, peer="diffusers-bin"),
    "diffusers-bin": Way("diffusers, its folder of .bin", PEER_BIN),
    "ours-ckpt-half": Way("ldm_lite, .ckpt to fp16", CKPT, True, "diffusers-bin-half"),
    "diffusers-bin-half": Way("diffusers, its folder of .bin to fp16", PEER_BIN, True),
}


@dataclass(frozen=True)
class Ready:
    """A process whose networks are ready."""

    imported: float  # time.time() after the imports
    ready: float  # and when the networks can be called
    peak: int | None  # bytes of the process so far at most; None where it cannot be known
    weights: int  # bytes of the networks


@dataclass
class Timing:
    """What a way took, a sample a round, in seconds from the start of its process."""

    imports: list[float] = field(default_factory=list)
    ready: list[float] = field(default_factory=list)
    peak: int | None = None
    weights: int = 0
    why_not: str = ""


def answer(way: str, folder: Path, device: str) -> Ready:
    """Do it here, in a process that has done nothing yet."""
    import torch

    networks: Iterable[torch.nn.Module] = ()
    dtype = torch.float16 if WAYS[way].half else torch.float32
    if WAYS[way].file in (PEER, PEER_BIN):
        from diffusers import AutoencoderKL, UNet2DConditionModel
        from transformers import CLIPTextModel

        imported = time.time()
        kinds = {"unet": UNet2DConditionModel, "vae": AutoencoderKL, "text_encoder": CLIPTextModel}
        networks = [
            kind.from_pretrained(folder / WAYS[way].file / name, torch_dtype=dtype).to(device)
            for name, kind in kinds.items()
        ]
    elif way == "torch":
        imported = time.time()
    else:
        from ldm_lite import load

        imported = time.time()
        if WAYS[way].file:
            networks = load(folder / WAYS[way].file, device=device, dtype=dtype).networks.values()
    ready = time.time()
    from ldm_lite.bench.measure import status

    weights = sum(value.nbytes for network in networks for value in network.parameters())
    return Ready(imported, ready, status("VmHWM"), weights)


def write(checkpoint: "Checkpoint", folder: Path, ways: Iterable[str]) -> None:
    """The files that the ways read, in float32: the checkpoint twice, and as diffusers writes its networks."""
    import torch
    from safetensors.torch import save_file

    from ldm_lite.checkpoint.reader import split
    from ldm_lite.zoo.detection import detect_family

    weights = {key: checkpoint.read(key) for key in checkpoint.shapes}
    save_file(weights, folder / SAFETENSORS, metadata=dict(checkpoint.metadata))
    wanted = {WAYS[way].file for way in ways}
    if CKPT in wanted:
        torch.save({"state_dict": weights}, folder / CKPT)
    if wanted & {PEER, PEER_BIN}:
        from ldm_lite.bench import peers

        components = split(checkpoint)
        family = detect_family({role: each.shapes for role, each in components.items()}, checkpoint.metadata)
        for role in components:
            network = getattr(peers, role)(family, weights)
            for parameter in network.parameters():
                parameter.data = parameter.data.contiguous()
            network.save_pretrained(folder / PEER / role)
            network.save_pretrained(folder / PEER_BIN / role)
            for path in (folder / PEER_BIN / role).glob("*.safetensors"):  # newer versions write no other kind
                name = path.stem if "pytorch" in path.stem else f"pytorch_{path.stem}"
                torch.save(network.state_dict(), path.with_name(f"{name}.bin"))
                path.unlink()


def measure(ways: Sequence[str], folder: Path, device: str, rounds: int) -> dict[str, Timing]:
    """Time them in turn, there and back; one that fails is left out from then on, with the reason."""
    from ldm_lite.bench.measure import there_and_back

    timings = {way: Timing() for way in ways}
    for number in range(-1, rounds):  # the first round brings the files into the disk cache
        for way in there_and_back(ways, number):
            timing = timings[way]
            if timing.why_not:
                continue
            question = json.dumps([way, str(folder), device])
            start = time.time()
            done = subprocess.run([sys.executable, "-m", __name__], input=question, capture_output=True, text=True)
            if done.returncode != 0:
                lines = done.stderr.strip().splitlines() or [f"its process ended (status {done.returncode})"]
                timing.why_not = lines[-1][:120]
            elif number >= 0:
                made = Ready(**json.loads(done.stdout))
                timing.imports.append(made.imported - start)
                timing.ready.append(made.ready - start)
                timing.peak, timing.weights = made.peak, made.weights
    return timings


def markdown(timings: Mapping[str, Timing], title: str) -> str:
    """The table; the ratio is that to diffusers with the same kind of file and precision."""
    from ldm_lite.bench.measure import median, spread

    lines = [
        title,
        "",
        "| | ready, s | spread | imports, s | against diffusers | peak of the process, GiB | weights, GiB |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for name, timing in timings.items():
        way = WAYS[name]
        if timing.why_not:
            lines.append(f"| {way.title} | {timing.why_not} | | | | | |")
            continue
        ready = median(timing.ready)
        peer = timings.get(way.peer)
        ratio = f"{ready / median(peer.ready):.2f}" if peer and peer.ready else ""
        peak = "" if timing.peak is None else f"{timing.peak / 2**30:.2f}"
        weights = f"{timing.weights / 2**30:.2f}" if way.file else ""
        imports = median(timing.imports)
        lines.append(
            f"| {way.title} | {ready:.2f} | {spread(timing.ready):.1%} | {imports:.2f} | {ratio} | {peak} | {weights} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    asked_way, asked_folder, asked_device = json.load(sys.stdin)
    sys.stdout.write(json.dumps(dataclasses.asdict(answer(asked_way, Path(asked_folder), asked_device))))
