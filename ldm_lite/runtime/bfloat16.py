"""Whether bfloat16 pays on this CPU, by measuring blocks of a UNet in it and in float32 with our kernels.

float32 has Winograd's convolutions and exact sums; bfloat16 has twice the numbers an instruction (AVX-512 BF16), or
eight times as many products (AMX).  Which is faster depends on the CPU.
"""

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ldm_lite.core.layers import channels_last
from ldm_lite.core.unet import ResBlock, SpatialTransformer
from ldm_lite.runtime import cpu
from ldm_lite.runtime.timing import fastest

MAX_ERROR = 2e-2  # relative, of the blocks; a whole step of Stable Diffusion has 1.6e-2
WIDTH, SIDE, HEADS, CONTEXT = 640, 32, 8, 768  # Stable Diffusion's second level at 512 px

log = logging.getLogger("ldm_lite")


@torch.no_grad()
def pays() -> bool:
    """Whether blocks of a UNet are faster in bfloat16, with a relative error of at most MAX_ERROR, on this CPU.

    It is timed once a machine, which takes some seconds; the log gives the error.
    """
    exact, half = _blocks(torch.float32), _blocks(torch.bfloat16)
    wanted = exact()
    error = float((half().float() - wanted).norm() / wanted.norm())
    ways = {"fp32": exact, "bf16": half}
    faster = fastest("blocks of a UNet", f"{WIDTH} channels", ways, torch.device("cpu")) == "bf16"
    chosen = "bf16" if faster and error <= MAX_ERROR else "fp32"
    reason = "faster" if chosen == "bf16" else "not faster" if not faster else f"more than {MAX_ERROR:.0e}"
    log.info("dtype auto: %s; in blocks of a UNet bf16 is %s here, and %.1e from fp32", chosen, reason, error)
    return chosen == "bf16"


def _blocks(dtype: torch.dtype) -> Callable[[], Tensor]:
    """Return a residual and a transformer block with an input, and the weights of a seed."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    with torch.device("meta"):
        residual, transformer = ResBlock(WIDTH, WIDTH, 2 * WIDTH), SpatialTransformer(WIDTH, CONTEXT, HEADS, 1)
    network: Any = nn.ModuleList([residual, transformer]).to_empty(device="cpu").to(dtype).requires_grad_(False)
    for name, weight in network.named_parameters():
        if weight.ndim > 1:
            weight.copy_(normal(*weight.shape) * weight[0].numel() ** -0.5)
        else:  # of norms, and biases
            weight.fill_(name.endswith("weight"))
    cpu.use(network)
    network.to(memory_format=torch.channels_last)
    x = channels_last(normal(2, WIDTH, SIDE, SIDE))
    emb, context = normal(2, 2 * WIDTH), normal(2, 77, CONTEXT)
    return lambda: transformer(residual(x, emb), context)
