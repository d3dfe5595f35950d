"""Read a network's sizes from the keys and shapes of its weights."""

import re
from collections.abc import Mapping

Shapes = Mapping[str, tuple[int, ...]]  # by key, without prefix


def count(shapes: Shapes, pattern: str) -> int:
    """Count blocks: 1 + the largest index that the group of `pattern` matches in a key, 0 without a match."""
    return max((1 + int(m[1]) for key in shapes if (m := re.match(pattern, key))), default=0)
