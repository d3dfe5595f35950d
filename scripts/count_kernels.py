"""Operators of a forward of Stable Diffusion 1's UNet that compute or copy, a kernel each or a few: ours, diffusers'.

python scripts/count_kernels.py

Nothing is computed (the meta device): attention counts as one, as its kernels are, and norms leave their result as they
do on CUDA.  Views are not counted.  Needs diffusers for its line.
"""

import importlib
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ldm_lite.models.unet import UNet
from ldm_lite.zoo.families import FAMILIES


class Counted(TorchDispatchMode):
    """Counts operators by name, but for those whose result lies in their input's memory."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not func.is_view and func is not torch.ops.aten._unsafe_view.default:
            self.calls[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


def attention(q: Tensor, k: Tensor, v: Tensor, **_: object) -> Tensor:
    """One operator, whose result lies in memory as that of the fused kernels does."""
    return q.transpose(1, 2).clone(memory_format=torch.contiguous_format).transpose(1, 2)


def report(name: str, forward: Callable[[], object]) -> None:
    with torch.no_grad(), Counted() as counted:
        forward()
    most = ", ".join(f"{count} {operator}" for operator, count in counted.calls.most_common(8))
    print(f"{name}: {counted.calls.total()} ({most}, ...)")


def main() -> None:
    torch.nn.functional.scaled_dot_product_attention = attention
    with torch.device("meta"):
        x, t, context = torch.empty(2, 4, 64, 64), torch.empty(2), torch.empty(2, 77, 768)
        unet = UNet(FAMILIES["sd1"].unet).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        report("ours, every step by itself", lambda: unet(x, t, context))
        with torch.no_grad():
            cache = unet.text_cache(context)
        report("ours, the text's keys and values cached", lambda: unet(x, t, context, cache=cache))
        diffusers = importlib.import_module("diffusers")
        peer = diffusers.UNet2DConditionModel(cross_attention_dim=768).to(memory_format=torch.channels_last)
        report(f"diffusers {diffusers.__version__}", lambda: peer(x, t, context))


if __name__ == "__main__":
    main()
