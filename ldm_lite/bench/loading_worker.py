"""The process that loads a model once: `python -m ldm_lite.bench.loading_worker`, a request in, a Ready out, as JSON.

Imports are part of the measurement, so they are inside functions.
"""

import dataclasses
import json
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

SAFETENSORS, CKPT = "model.safetensors", "model.ckpt"  # in the folder
PEER, PEER_BIN = "diffusers", "diffusers-bin"  # folders in it


@dataclass(frozen=True)
class Method:
    """One way to load a checkpoint's networks."""

    title: str
    file: str  # in the folder; empty if only the imports are measured
    half: bool = False  # cast to fp16 while reading
    peer: str = ""  # the method to compare with


METHODS: dict[str, Method] = {
    "torch": Method("import torch", ""),
    "imports": Method("from ldm_lite import load", ""),
    "ours": Method("ldm_lite, .safetensors", SAFETENSORS, peer="diffusers"),
    "diffusers": Method("diffusers, its folder of .safetensors", PEER),
    "ours-half": Method("ldm_lite, .safetensors to fp16", SAFETENSORS, True, "diffusers-half"),
    "diffusers-half": Method("diffusers, its folder of .safetensors to fp16", PEER, True),
    "ours-ckpt": Method("ldm_lite, .ckpt", CKPT, peer="diffusers-bin"),
    "diffusers-bin": Method("diffusers, its folder of .bin", PEER_BIN),
    "ours-ckpt-half": Method("ldm_lite, .ckpt to fp16", CKPT, True, "diffusers-bin-half"),
    "diffusers-bin-half": Method("diffusers, its folder of .bin to fp16", PEER_BIN, True),
}


@dataclass(frozen=True)
class Ready:
    """The times and memory of a process whose networks are ready."""

    imported: float  # time.time() after the imports
    ready: float  # time.time() when the networks can be called
    peak: int | None  # bytes, the process's peak; None if unknown
    weights: int  # bytes of the networks


def load_once(name: str, folder: Path, device: str) -> Ready:
    """Load by a method of METHODS in this process, which has imported nothing yet."""
    import torch

    networks: Iterable[torch.nn.Module] = ()
    method = METHODS[name]
    dtype = torch.float16 if method.half else torch.float32
    if method.file in (PEER, PEER_BIN):
        from diffusers import AutoencoderKL, UNet2DConditionModel
        from transformers import CLIPTextModel

        imported = time.time()
        kinds = {"unet": UNet2DConditionModel, "vae": AutoencoderKL, "text_encoder": CLIPTextModel}
        networks = [
            kind.from_pretrained(folder / method.file / role, torch_dtype=dtype).to(device)
            for role, kind in kinds.items()
        ]
    elif name == "torch":
        imported = time.time()
    else:
        from ldm_lite import load

        imported = time.time()
        if method.file:
            networks = load(folder / method.file, device=device, dtype=dtype).networks.values()
    ready = time.time()
    from ldm_lite.bench.measure import status

    weights = sum(value.nbytes for network in networks for value in network.parameters())
    return Ready(imported, ready, status("VmHWM"), weights)


if __name__ == "__main__":
    asked_method, asked_folder, asked_device = json.load(sys.stdin)
    sys.stdout.write(json.dumps(dataclasses.asdict(load_once(asked_method, Path(asked_folder), asked_device))))
