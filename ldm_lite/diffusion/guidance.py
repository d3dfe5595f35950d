"""What happens to the network's output before the sampler's row: everything that is not linear in it."""

from torch import Tensor


def classifier_free(out: Tensor, scale: Tensor) -> Tensor:
    """Predictions (2B,C,h,w), the unconditional half first -> guided prediction (B,C,h,w).

    uncond + scale * (cond - uncond), with scale a tensor so that a compiled step serves all scales.
    Ho and Salimans 2022, eq. 6, in the original scripts' convention (scale 1 = no guidance).
    """
    uncond, cond = out.chunk(2)
    return uncond + scale * (cond - uncond)
