"""Convert boxes with classes to the tokens that layout-to-image models read.

Source: taming-transformers' conditional_builder/objects_bbox.py, which the layout model of latent diffusion was trained
with: up to 30 objects of three tokens each (class, upper left and lower right corner), then the corners of the crop.
"""

import json
import os
from collections.abc import Sequence
from typing import NamedTuple

from ldm_lite.cli.files import read_text

NUM_TOKENS = 8192
MOST_OBJECTS = 30
SECTIONS = 90  # a corner is one of 90 x 90 places: the square root of NUM_TOKENS
NONE = NUM_TOKENS - 1  # stands in for a missing object


class Box(NamedTuple):
    """An object: its class token, and its corners in [0,1], the origin being the upper left of the image."""

    label: int
    left: float
    top: float
    right: float
    bottom: float


WHOLE = Box(NONE, 0.0, 0.0, 1.0, 1.0)


def tokens(boxes: Sequence[Box]) -> list[int]:
    """Convert up to 30 boxes to 92 token ids in [0,8192), for an image that is not cropped.

    Raises ValueError for more boxes, labels that are not tokens, and corners outside [0,1] or in the wrong order.
    """
    if len(boxes) > MOST_OBJECTS:
        raise ValueError(f"got {len(boxes)} boxes, wanted {MOST_OBJECTS} or fewer")
    ids: list[int] = []
    for box in boxes:
        if not 0 <= box.label < NONE:
            raise ValueError(f"got the class {box.label} of a box, wanted 0 to {NONE - 1}")
        if not (0 <= box.left < box.right <= 1 and 0 <= box.top < box.bottom <= 1):
            raise ValueError(f"got the box {list(box[1:])}, wanted left < right and top < bottom in 0 to 1")
        ids += [box.label, *_corners(box)]
    return [*ids, *[NONE] * (3 * (MOST_OBJECTS - len(boxes))), *_corners(WHOLE)]


def _corners(box: Box) -> tuple[int, int]:
    def place(x: float, y: float) -> int:
        return round(y * (SECTIONS - 1)) * SECTIONS + round(x * (SECTIONS - 1))

    return place(box.left, box.top), place(box.right, box.bottom)


def read(path: str | os.PathLike[str]) -> list[Box]:
    """Read the boxes of a JSON file, [{"class": 12, "box": [left, top, right, bottom]}, ...].

    Raises ValueError, one line, for any other file.
    """
    try:
        entries = json.loads(read_text(path, 2**20))
        return [Box(int(entry["class"]), *map(float, entry["box"])) for entry in entries]
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError) as error:
        wanted = '[{"class": 12, "box": [left, top, right, bottom]}, ...]'
        raise ValueError(f"{os.fspath(path)}: is not a list of boxes ({error}), wanted {wanted}") from error
