"""Canny's edge detector: white edges on black, for canny ControlNets and T2I-Adapters.

Equals OpenCV's Canny with its defaults (3x3 Sobel, L1 norm), which made their training data, bit for bit.
Source: Canny 1986; its steps are gradients, thinning to the ridge across the edge, and hysteresis.
"""

import functools

import numpy as np
from numpy.typing import NDArray
from PIL import Image

Grid = NDArray[np.int64]


def canny(image: Image.Image, low: float = 100, high: float = 200) -> Image.Image:
    """Return an RGB image of the same size as an RGB image, 255 on its edges and 0 elsewhere.

    Edges start where the gradient (of 8-bit values, |dx| + |dy|) is above `high`, and continue while it is above `low`.
    Raises ValueError if low is above high.
    """
    if low > high:
        raise ValueError(f"got canny thresholds {low:g} and {high:g}, expected the lower one first")
    dx, dy = _gradient(np.asarray(image.convert("RGB")).astype(np.int64))
    size = abs(dx) + abs(dy)
    ridge = _ridge(size, dx, dy)
    weak, strong = ridge & (size > np.floor(low)), ridge & (size > np.floor(high))
    edges = _grown(strong, weak)
    return Image.fromarray((255 * edges).astype(np.uint8)).convert("RGB")


def _shifted(padded: Grid, y: int, x: int) -> Grid:
    """Return the pixels y below and x to the right of each, from a grid with one more on all sides."""
    return padded[1 + y : len(padded) - 1 + y, 1 + x : padded.shape[1] - 1 + x]


def _gradient(pixels: Grid) -> tuple[Grid, Grid]:
    """Return Sobel derivatives (H,W) in x and y of pixels (H,W,3), each from the channel that changes most there."""
    at = functools.partial(_shifted, np.pad(pixels, ((1, 1), (1, 1), (0, 0)), mode="edge"))
    dx = at(-1, 1) + 2 * at(0, 1) + at(1, 1) - at(-1, -1) - 2 * at(0, -1) - at(1, -1)
    dy = at(1, -1) + 2 * at(1, 0) + at(1, 1) - at(-1, -1) - 2 * at(-1, 0) - at(-1, 1)
    most = np.argmax(abs(dx) + abs(dy), axis=2)[..., None]
    return np.take_along_axis(dx, most, axis=2)[..., 0], np.take_along_axis(dy, most, axis=2)[..., 0]


def _ridge(size: Grid, dx: Grid, dy: Grid) -> NDArray[np.bool_]:
    """Return where the gradient (H,W) exceeds both neighbours across the edge, in one of four directions."""
    at = functools.partial(_shifted, np.pad(size, 1))
    # In fixed point, as OpenCV does it: tan 22.5 degrees, and tan 67.5 = tan 22.5 + 2.
    x, y = abs(dx), abs(dy) << 15
    flat = x * int(np.tan(np.pi / 8) * (1 << 15) + 0.5)
    steep = flat + (x << 16)
    across = (size > at(0, -1)) & (size >= at(0, 1))
    along = (size > at(-1, 0)) & (size >= at(1, 0))
    falling = (size > at(-1, -1)) & (size > at(1, 1))
    rising = (size > at(-1, 1)) & (size > at(1, -1))
    diagonal = np.where((dx < 0) != (dy < 0), rising, falling)
    return np.where(y < flat, across, np.where(y > steep, along, diagonal))


def _grown(strong: NDArray[np.bool_], weak: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Return the strong edges (H,W), and the weak ones connected to them, diagonally too."""
    allowed, edges = np.pad(weak & ~strong, 1).ravel(), np.pad(strong, 1).ravel()
    row, places = strong.shape[1] + 2, np.flatnonzero(edges)
    around = np.array([y * row + x for y in (-1, 0, 1) for x in (-1, 0, 1)])
    while len(places):  # of the edges that were found last: a whole image for each would take hours for a spiral
        near = np.unique(places[:, None] + around)
        places = near[allowed[near]]
        allowed[places], edges[places] = False, True
    return edges.reshape(-1, row)[1:-1, 1:-1]
