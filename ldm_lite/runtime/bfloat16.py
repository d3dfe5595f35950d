"""Whether bfloat16 pays on this CPU, by measuring blocks of a UNet in it and in float32 with our kernels.

float32 has Winograd's convolutions and exact sums; bfloat16 has twice the numbers an instruction (AVX-512 BF16), or
eight times as many products (AMX).  Which is faster depends on the CPU.
"""

import logging

import torch
from torch import Tensor, nn

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
    kinds = torch.float32, torch.bfloat16
    blocks = {dtype: _Blocks(dtype) for dtype in kinds}
    results = [blocks[dtype]().float() for dtype in kinds]
    error = float((results[1] - results[0]).norm() / results[0].norm())
    ways = {"fp32": blocks[torch.float32], "bf16": blocks[torch.bfloat16]}
    faster = fastest("blocks of a UNet", f"{WIDTH} channels", ways, torch.device("cpu")) == "bf16"
    chosen = "bf16" if faster and error <= MAX_ERROR else "fp32"
    reason = "faster" if chosen == "bf16" else "not faster" if not faster else f"more than {MAX_ERROR:.0e}"
    log.info("dtype auto: %s; in blocks of a UNet bf16 is %s here, and %.1e from fp32", chosen, reason, error)
    return chosen == "bf16"


class _Blocks:
    """A residual and a transformer block on an input, with the weights of a seed."""

    def __init__(self, dtype: torch.dtype) -> None:
        generator = torch.Generator().manual_seed(0)

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator).to(dtype)

        with torch.device("meta"):
            residual = ResBlock(WIDTH, WIDTH, 2 * WIDTH)
            transformer = SpatialTransformer(WIDTH, CONTEXT, HEADS, 1)
        self.network = nn.ModuleList([residual, transformer]).to_empty(device="cpu").to(dtype).requires_grad_(False)
        for name, weight in self.network.named_parameters():
            if weight.ndim > 1:
                weight.copy_(normal(*weight.shape) * weight[0].numel() ** -0.5)
            else:  # of norms, and biases
                weight.fill_(name.endswith("weight"))
        if dtype == torch.float32:
            cpu.use(self.network)
        self.network.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.x = normal(2, WIDTH, SIDE, SIDE).contiguous(memory_format=torch.channels_last)
        self.emb, self.context = normal(2, 2 * WIDTH), normal(2, 77, CONTEXT)

    def __call__(self) -> Tensor:
        residual, transformer = self.network
        return transformer(residual(self.x, self.emb), self.context)
