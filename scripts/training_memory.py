"""Count the memory of a LoRA's training step, without weights and without a GPU: `python scripts/training_memory.py`.

Networks and activations are on the meta device, in bfloat16: one image of the family's size, a LoRA of rank 16, every
block's activations recomputed.  Attention is counted as plain products, so measured memory may be less.  GB are 10^9.
"""

import torch
from torch import Tensor, nn

from ldm_lite.networks import blocks
from ldm_lite.train.additions import LoRA
from ldm_lite.zoo.families import FAMILY_ROWS
from ldm_lite.zoo.family import build_network

STATE = 16  # bytes of a trained parameter: itself, its gradient and two averages in float32


def activations(unet: nn.Module, parameters: set[int], *args: Tensor, **inputs: Tensor) -> tuple[int, int]:
    """Return the bytes of all blocks' inputs, and of what the backward pass of the largest block needs."""
    kept, current, num_inputs = dict[int, dict[int, Tensor]](), [0], [0]

    def pack(tensor: Tensor) -> Tensor:
        if id(tensor) not in parameters and id(tensor._base) not in parameters:
            kept.setdefault(current[0], {})[id(tensor.untyped_storage())] = tensor
        return tensor

    def begin(block: nn.Module, arguments: tuple[object, ...]) -> None:
        current[0] = id(block)
        num_inputs[0] += sum(value.nbytes for value in arguments if isinstance(value, Tensor))

    for block in blocks(unet):
        block.register_forward_pre_hook(begin)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        unet(*args, **inputs)
    return num_inputs[0], max(sum(t.untyped_storage().nbytes() for t in part.values()) for part in kept.values())


def main() -> None:
    """Print a row for each family."""
    print("| | network | text encoders | autoencoder | LoRA | activations | sum | with encoded data | also in 8 bits |")
    for name, tokens, width in (("sd1", 77, 768), ("sdxl_base", 77, 2048), ("flux_dev", 512, 4096)):
        family = FAMILY_ROWS[name]
        with torch.device("meta"):
            unet, vae, *texts = (build_network(spec) for spec in (family.unet, family.vae, *family.text_encoders))
            lora = LoRA({"unet": unet}, 16).to(torch.bfloat16)
            side = family.resolution // 8
            inputs = {"context": torch.empty(1, tokens, width).bfloat16()}
            if name != "sd1":
                inputs["y"] = torch.empty(1, 768 if name == "flux_dev" else family.unet.vector_dim).bfloat16()
            if name == "flux_dev":
                inputs["guidance"] = torch.empty(1)
            x, t = (
                torch.empty(1, family.unet.in_channels if name != "flux_dev" else 16, side, side).bfloat16(),
                torch.empty(1),
            )
        unet.requires_grad_(False).to(torch.bfloat16)
        lora.attach({"unet": unet})
        parameters = {id(parameter) for network in (unet, lora) for parameter in network.parameters()}
        sizes = [sum(p.numel() for net in nets for p in net.parameters()) for nets in ((unet,), texts, (vae,), (lora,))]
        moving = sum(activations(unet, parameters, x, t, **inputs))
        parts = [2 * sizes[0], 2 * sizes[1], 4 * sizes[2], STATE * sizes[3], moving]
        encoded = sum(parts) - parts[1] - parts[2]
        print(f"| {family.title} |", *(f"{n / 1e9:.1f} |" for n in (*parts, sum(parts), encoded, encoded - sizes[0])))


if __name__ == "__main__":
    main()
