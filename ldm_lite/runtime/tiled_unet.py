"""Run a UNet tile by tile at every step, for images larger than its training size, in the memory of one tile.

All tiles share one noise and are blended after every step, so there are no seams; but attention does not reach beyond a
tile.  Tiles and window are those of latent diffusion's super-resolution notebook (ddpm.py, get_fold_unfold).
"""

import torch
from torch import Tensor, nn


class TiledUNet(nn.Module):
    """A UNet in square tiles of `tile` latent positions that overlap by half; smaller inputs are one tile.

    Inputs and outputs are those of the UNet.  Concatenated input channels are tiled too.
    """

    def __init__(self, unet: nn.Module, tile: int) -> None:
        """Raises ValueError for a tile below 8."""
        super().__init__()
        if tile < 8:
            raise ValueError(f"got a tile of {tile}, expected 8 or more")
        self.unet = unet
        self.tile = tile

    def forward(self, x: Tensor, t: Tensor, concat: Tensor | None = None, **inputs: Tensor) -> Tensor:
        """Compute UNet.forward as the mean of the tiles' outputs (B,C,h,w), weighted by the distance from borders."""
        height, width = x.shape[2:]
        rows, columns = starts(height, self.tile), starts(width, self.tile)
        if len(rows) == len(columns) == 1:
            return self.unet(x, t, concat=concat, **inputs)
        places = [(..., slice(top, top + self.tile), slice(left, left + self.tile)) for top in rows for left in columns]
        outs = [self.unet(x[place], t, concat=None if concat is None else concat[place], **inputs) for place in places]
        # The mean is computed in float32, whatever the dtype of the network.
        window = weights(min(self.tile, height), min(self.tile, width), x.device)
        total = torch.zeros(*outs[0].shape[:2], height, width, dtype=torch.float32, device=x.device)
        norm = torch.zeros(height, width, dtype=torch.float32, device=x.device)
        for place, out in zip(places, outs, strict=True):
            total[place] += out * window
            norm[place] += window
        return (total / norm).to(outs[0].dtype)


def starts(size: int, tile: int) -> list[int]:
    """Return where the tiles begin along one side: half a tile apart, the last one at the end."""
    if size <= tile:
        return [0]
    return [*range(0, size - tile, tile // 2), size - tile]


def weights(height: int, width: int, device: torch.device | None = None) -> Tensor:
    """Return the window (h,w): the distance from the border as a share of the side, clamped to [0.01, 0.5]."""

    def distance(size: int) -> Tensor:
        at = torch.linspace(0, 1, size, dtype=torch.float32, device=device)
        return torch.minimum(at, 1 - at)

    return torch.minimum(distance(height)[:, None], distance(width)[None]).clamp(0.01, 0.5)
