"""Count the GPU memory that an image takes, by family and options: the tables of docs/memory.md.

    python scripts/count_memory.py             # writes them

Nothing is computed: networks of full size run on PyTorch's meta device, and the bytes of the tensors that are alive are
counted.  Weights are in half precision, the image has the family's own size, and guidance runs both branches at once.
Attention counts its inputs and its output, as with a kernel that keeps no scores.
"""

import re
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ldm_lite.runtime import offload
from ldm_lite.runtime.tiling import tiled
from ldm_lite.zoo.families import FAMILY_ROWS
from ldm_lite.zoo.family import FamilyRow, build_network

CARDS = (4, 6, 8, 12, 16, 24)  # GiB
RESERVED = 0.8  # GiB: CUDA's context and libraries, and what the desktop takes
SLACK = 1.1  # the allocator rounds up, and its memory has gaps
ROWS = [
    "sd1",
    "sd2",
    "sdxl_base",
    "sd35_medium",
    "sd35_large",
    "flux_dev",
    "flux2_klein",
    "z_image_turbo",
    "chroma",
    "qwen_image",
]
LADDER = {  # options, the fastest first, and how the table of cards calls them
    "": "nothing",
    "--offload model": "model",
    "--offload model --storage int8": "model, int8",
    "--offload sequential": "sequential",
}
GIB = 2**30
BETWEEN = (
    "GiB on the GPU with these options; the last column is all weights, which `--offload` keeps in the CPU's memory "
    "(half of that with int8):"
)
PAGE = Path(__file__).parents[1] / "docs" / "memory.md"


class Memory(NamedTuple):
    """Bytes of a network: of its weights, its largest blocks in pairs, its largest block, and its activations."""

    weights: float
    pair: float
    block: float
    activations: float


class Alive(TorchDispatchMode):
    """Counts the bytes of the storages that operators make, while they live."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.peak = 0
        self._weights = {tensor.untyped_storage()._cdata for tensor in _tensors(network)}
        self._storages = dict[int, tuple[StorageWeakRef, int]]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor) and tensor.untyped_storage()._cdata not in self._weights:
                storage = tensor.untyped_storage()
                self._storages[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self._storages = {key: kept for key, kept in self._storages.items() if not kept[0].expired()}
        self.peak = max(self.peak, sum(size for _, size in self._storages.values()))
        return result


def attend(q: Tensor, k: Tensor, v: Tensor, *args: object, **kwargs: object) -> Tensor:
    """Stand in for a kernel of attention: (B,H,N,D), (B,H,M,D), (B,H,M,E) -> (B,H,N,E)."""
    return q.new_empty(*q.shape[:-1], v.shape[-1])


def network_memory(spec: Any, dtype: torch.dtype, *inputs: Tensor, tile: bool = False, **named: Tensor) -> Memory:
    """Count a network's memory in a forward of these inputs; without inputs, only its weights'."""
    with torch.device("meta"):
        network = build_network(spec).to(dtype).eval().requires_grad_(False)
        forward = tiled(network).decode if tile else getattr(network, "decode", network)
        sizes = [sum(tensor.nbytes for tensor in _tensors(block)) for block in offload._blocks(network)]
        alive = Alive(network)
        if inputs:
            with torch.no_grad(), mock.patch.object(F, "scaled_dot_product_attention", attend), alive:
                forward(*inputs, **named)
    weights = sum(tensor.nbytes for tensor in _tensors(network))
    pair = weights - sum(sizes) + sum(sorted(sizes)[-2:])  # what belongs to no block stays during the phase
    return Memory(weights, pair, max(sizes, default=0), alive.peak)


def family_memory(family: FamilyRow) -> dict[str, Memory]:
    """Count the memory of each network of a family while it makes one image."""
    half = torch.bfloat16 if type(family.unet).__name__ != "UNetSpec" else torch.float16
    with torch.device("meta"):
        unet, side = family.unet, family.resolution
        branches = 2 if family.scale != 1 and not getattr(unet, "guidance", False) else 1
        factor = 16 if type(unet).__name__ == "Flux2Spec" else 8
        length = 77 if type(unet).__name__ == "UNetSpec" else 512
        latents = torch.empty(branches, unet.in_channels, side // factor, side // factor, dtype=half)
        named = {"guidance": torch.empty(branches)} if getattr(unet, "guidance", False) else {}
        context = torch.empty(branches, length, unet.context_dim, dtype=half)
        vector = getattr(unet, "vector_dim", None)
        y = None if vector is None else torch.empty(branches, vector, dtype=half)
        precise = torch.float32 if family.vae_overflows else half
        image = torch.empty(1, unet.in_channels, side // factor, side // factor, dtype=precise)
        networks = {"unet": network_memory(unet, half, latents, torch.empty(branches), context, y, **named)}
        networks["vae"] = network_memory(family.vae, precise, image, tile=True)
    for number, spec in enumerate(family.text_encoders):
        networks[f"text {number}"] = network_memory(spec, half)
    return networks


def peak(networks: dict[str, Memory], options: str) -> float:
    """Return the most bytes on the GPU with these options."""
    texts = [memory for role, memory in networks.items() if role.startswith("text")]
    phases = [[networks["unet"]], [networks["vae"]], texts]
    weights = []
    for phase in phases:
        if "sequential" in options:
            weights.append(sum(memory.pair for memory in phase))
        elif "int8" in options and phase != [networks["vae"]]:
            weights.append(sum(memory.weights / 2 for memory in phase) + max(memory.block for memory in phase))
        else:
            weights.append(sum(memory.weights for memory in phase))
    if not options:
        weights = [sum(memory.weights for memory in networks.values())] * len(phases)
    actives = [max((memory.activations for memory in phase), default=0) for phase in phases]
    return max(weight + active for weight, active in zip(weights, actives, strict=True))


def page(text: str) -> str:
    """Return the page's text with up-to-date tables."""
    return re.sub(r"(?<=<!-- counted -->\n).*?(?=\n<!-- end -->)", lambda _: tables(), text, flags=re.DOTALL)


def tables() -> str:
    """Return the two tables: options by card, and their memory."""
    cards = ["| | " + " | ".join(f"{card} GB" for card in CARDS) + " |", "|---|" + "---|" * len(CARDS)]
    needs = [f"| | px | {' | '.join(f'`{options}`' if options else 'nothing' for options in LADDER)} | weights |"]
    needs.append("|---|---:|" + "---:|" * len(LADDER) + "---:|")
    for name in ROWS:
        family = FAMILY_ROWS[name]
        networks = family_memory(family)
        takes = {options: SLACK * peak(networks, options) / GIB + RESERVED for options in LADDER}
        fitting = [next((LADDER[options] for options in LADDER if takes[options] <= card), "-") for card in CARDS]
        weights = sum(memory.weights for memory in networks.values()) / GIB
        cards.append(f"| {family.title} | " + " | ".join(fitting) + " |")
        numbers = " | ".join(f"{number:.1f}" for number in (*takes.values(), weights))
        needs.append(f"| {family.title} | {family.resolution} | {numbers} |")
    return "\n".join(cards) + "\n\n" + BETWEEN + "\n\n" + "\n".join(needs)


def _tensors(module: nn.Module) -> list[Tensor]:
    return [*module.parameters(), *module.buffers()]


def main() -> None:
    """Write the tables."""
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
