"""Canny's edges against OpenCV's (the goldens)."""

import time
from pathlib import Path

import numpy as np
import pytest
import toy
from PIL import Image

from ldm_lite import Control

GOLDEN = np.load(Path(__file__).parents[1] / "data" / "control.npz")


def canny(image: np.ndarray, preprocess: str = "canny") -> np.ndarray:
    """An image's edges (H,W,3), 0 or 255, as a ControlNet is given them."""
    height, width = image.shape[:2]
    pixels = Control("", Image.fromarray(image), preprocess=preprocess).pixels((width, height))
    return (255 * pixels[0]).permute(1, 2, 0).numpy()


@pytest.mark.parametrize(("low", "high"), toy.THRESHOLDS)
def test_equals_opencv_bit_for_bit(low: int, high: int) -> None:
    edges = canny(toy.photo(45, 70), f"canny:{low}:{high}")
    assert np.array_equal(edges, np.repeat(GOLDEN[f"canny.{low}"][..., None], 3, axis=2))
    assert 0.01 < (edges > 0).mean() < 0.5


def test_a_flat_image_has_no_edges_and_a_step_has_one() -> None:
    flat = np.zeros((9, 12, 3), np.uint8)
    assert not canny(flat).any()
    flat[:, 6:] = 200
    edges = canny(flat)[..., 0]
    assert (np.count_nonzero(edges, axis=1) == 1).all()
    assert edges.any(axis=0).nonzero()[0] in (5, 6)


def test_thresholds_in_the_wrong_order_are_refused() -> None:
    with pytest.raises(ValueError, match="got canny thresholds 200 and 100, expected the lower one first"):
        canny(np.zeros((4, 4, 3), np.uint8), "canny:200:100")


def test_a_winding_edge_takes_no_longer_than_its_length() -> None:
    """A weak edge that is connected to a strong one by all of its length was followed image by image."""
    from ldm_lite.control.canny import _grown

    weak = np.zeros((301, 300), bool)
    weak[::2] = True
    weak[1::4, -1] = weak[3::4, 0] = True  # from row to row, at alternate ends
    strong = np.zeros_like(weak)
    strong[0, 0] = True
    start = time.process_time()
    assert np.array_equal(_grown(strong, weak), weak)
    assert time.process_time() - start < 5
