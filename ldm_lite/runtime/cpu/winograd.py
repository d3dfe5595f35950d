"""3x3 convolutions by Winograd's minimal filtering: the same sums with 2.25 or 4 times fewer multiplications.

PyTorch's CPU convolutions (oneDNN) do not use it on x86.  An output tile of m by m is computed from an input tile of
m+2 by m+2: Y = A^T [(G w G^T) * (B^T d B)] A.  Over all channels the product * is a matrix product for each of the
(m+2)^2 positions.  Weights are transformed at every call, a part at a time: nothing is cached, so nothing can be out of
date.  Those with channels last are read as they lie, others are copied first.

The gradient of the input is such a convolution too, with the same weights turned around.  Relative errors in float32
against float64, with 640 channels: 6e-7 for m = 2 and 1.1e-6 for m = 4; the plain convolution has 2e-7.

Shape letters: B batch, C channels in, K channels out, T tiles.  Source: Lavin and Gray 2016, secs. 4.1 and 4.3;
the choice of points: Barabasz et al. 2018.
"""

import numpy as np
import torch
from torch import Tensor

from ldm_lite.runtime.cpu.products import multiply_each

# The points, by m, at which polynomials are evaluated, besides infinity.  For m = 4 the usual 0, 1, -1, 2, -2 have 1.7
# times the error; the best of 700 sets of eighths and sixteenths is better by less than 1 %.  The second must be 1.
POINTS = {2: (0.0, 1.0, -1.0), 4: (0.0, 1.0, -0.5, 2.0, -1.25)}
TILES = 512  # computed at a time: enough to pay for reading the weights, few enough for the cache
PART = 2**25  # numbers of transformed weights at a time: 128 MiB


def _transforms(points: tuple[float, ...]) -> tuple[Tensor, Tensor, Tensor]:
    """Return the transforms of input tiles (n*n,n*n), weights (n*n,9) and products (m*m,n*n), for flattened tiles.

    A filter of 3 on n = m+2 values is the transposed product of polynomials by their values at n points (Toom-Cook).
    """
    n = len(points) + 1
    powers = np.vander(points, n, increasing=True)
    to_input, to_weight, to_output = np.zeros((n, n)), np.zeros((n, 3)), np.zeros((n - 2, n))
    for i, point in enumerate(points):
        others = [other for other in points if other != point]
        to_input[i, :-1] = np.poly(others)[::-1]
        to_weight[i] = powers[i, :3] / np.prod(point - np.array(others))
        to_output[:, i] = powers[i, : n - 2]
    to_input[-1] = np.poly(points)[::-1]
    to_weight[-1, -1] = to_output[-1, -1] = 1  # infinity: the highest coefficients
    to_input_2, to_weight_2, to_output_2 = (
        torch.from_numpy(np.kron(once, once)).float() for once in (to_input, to_weight, to_output)
    )
    return to_input_2, to_weight_2, to_output_2


TRANSFORMS = {m: _transforms(points) for m, points in POINTS.items()}


def convolve(x: Tensor, weight: Tensor, bias: Tensor | None, m: int) -> Tensor:
    """Convolve x (B,C,h,w) with weight (K,C,3,3), padding 1, in tiles of m by m (2 or 4): (B,K,h,w), channels last."""
    return _convolve(x, weight, bias, m)


def gradient(grad: Tensor, weight: Tensor, m: int) -> Tensor:
    """Return the gradient (B,C,h,w) of the input of such a convolution from that of its output (B,K,h,w)."""
    return _convolve(grad, weight, None, m, of_input=True)


def _transformed(weight: Tensor, to_weight: Tensor) -> Tensor:
    """Transform weight (K,C,3,3) by (n*n,9): (n*n,K,C)."""
    rows = weight.permute(0, 2, 3, 1).reshape(len(weight), 9, -1)  # a view, if channels are last
    return torch.bmm(to_weight.expand(len(weight), -1, -1), rows).transpose(0, 1)


def _convolve(x: Tensor, weight: Tensor, bias: Tensor | None, m: int, of_input: bool = False) -> Tensor:
    """As convolve; of_input: with the weights turned around, for the gradient of the input."""
    (batch, channels, h, w), num_out, n = x.shape, weight.shape[1 if of_input else 0], m + 2
    to_input, to_weight, to_output = TRANSFORMS[m]
    rows, columns = -(-h // m), -(-w // m)
    pixels = x.permute(0, 2, 3, 1)
    out = x.new_empty(batch, rows * m, columns * m, num_out)
    together = min(rows, max(1, TILES // (batch * columns)))  # rows of tiles
    strip = x.new_empty(batch, together * m + 2, columns * m + 2, channels)  # their pixels, and the padding
    strip[:, 0], strip[:, :, 0], strip[:, :, w + 1 :] = 0, 0, 0
    image, line, pixel, _ = strip.stride()

    def transformed(outputs: slice) -> Tensor:
        """Return the weights of some channels out: (n*n, K, C)."""
        if of_input:
            return _transformed(weight[:, outputs], to_weight.flip(1)).transpose(1, 2)
        return _transformed(weight[outputs], to_weight)

    step = -(-num_out // -(-n * n * channels * num_out // PART))
    whole = transformed(slice(None)) if together < rows else None  # several strips of tiles read them
    for first in range(0, rows, together):
        count = min(together, rows - first)
        top = first * m - 1  # the line of the image that is the strip's first
        begin, end = max(0, top), min(h, top + count * m + 2)
        strip[:, begin - top : end - top, 1 : w + 1] = pixels[:, begin:end]
        strip[:, end - top :] = 0
        # input tiles, which overlap by two: a view of the strip, copied and transformed
        tiles = strip.as_strided((n, n, batch, count, columns, channels), (line, pixel, image, m * line, m * pixel, 1))
        inputs = (to_input @ tiles.reshape(n * n, -1)).view(n * n, -1, channels)  # (n*n, T, C)
        products = x.new_empty(*inputs.shape[:2], num_out)  # (n*n, T, K)
        for k in range(0, num_out, step):
            part = slice(k, k + step)
            multiply_each(inputs, transformed(part) if whole is None else whole[:, part], products[:, :, part])
        if bias is not None:
            products[n + 1] += bias  # this position goes to each output of its tile with weight 1
        made = (to_output @ products.view(n * n, -1)).view(m, m, batch, count, columns, num_out)
        part_of_out = out[:, first * m : (first + count) * m]
        part_of_out.view(batch, count, m, columns, m, num_out).copy_(made.permute(2, 3, 0, 4, 1, 5))
    return out[:, :h, :w].permute(0, 3, 1, 2)  # (B, K, h, w)
