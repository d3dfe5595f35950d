"""A UNet tile by tile: where the tiles are, and that a network of single positions gives the same as without tiles."""

import pytest
import torch
import toy
from torch import Tensor, nn

from ldm_lite.runtime.tiled_unet import TiledUNet, starts, weights


class Pointwise(nn.Module):
    """A network that reads one position at a time; counts its calls and their sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[tuple[int, int]] = []

    def forward(self, x: Tensor, t: Tensor, concat: Tensor | None = None) -> Tensor:
        self.sizes.append((x.shape[2], x.shape[3]))
        return torch.sin(x[:, :3]) + t[:, None, None, None]


@pytest.mark.parametrize(
    ("size", "wanted"), [(5, [0]), (8, [0]), (9, [0, 1]), (12, [0, 4]), (13, [0, 4, 5]), (20, [0, 4, 8, 12])]
)
def test_tiles_are_half_a_tile_apart_and_end_at_the_end(size: int, wanted: list[int]) -> None:
    assert starts(size, 8) == wanted


def test_the_window_grows_from_the_border() -> None:
    window = weights(5, 9)
    assert window[0].tolist() == pytest.approx([0.01] * 9)
    assert window[2].tolist() == pytest.approx([0.01, 0.125, 0.25, 0.375, 0.5, 0.375, 0.25, 0.125, 0.01])


@pytest.mark.parametrize("size", [(8, 8), (5, 20), (17, 9), (13, 30)])
def test_a_pointwise_network_is_the_same_in_tiles(size: tuple[int, int]) -> None:
    network, x, t = Pointwise(), toy.normal(0, 2, 6, *size), torch.tensor([1.0, 2.0])
    tiled = TiledUNet(network, 8)
    assert torch.allclose(tiled(x, t), network(x, t), atol=1e-6)
    tiles = network.sizes[:-1]
    assert len(tiles) == len(starts(size[0], 8)) * len(starts(size[1], 8))
    assert set(tiles) == {(min(8, size[0]), min(8, size[1]))}


def test_too_small_a_tile_is_refused() -> None:
    with pytest.raises(ValueError, match="got a tile of 4, expected 8 or more"):
        TiledUNet(Pointwise(), 4)
