"""Read a network's sizes from the keys and shapes of its weights, which may make no sense: here they are checked."""

import re
from collections.abc import Mapping

Shapes = Mapping[str, tuple[int, ...]]  # by key, without prefix

MOST_BLOCKS = 100  # of one kind in a row: released networks have at most 64
LARGEST = 2**24  # size of one dimension: vocabularies have about 250,000


def count(shapes: Shapes, pattern: str) -> int:
    """Count blocks: 1 + the largest index that the group of `pattern` matches in a key, 0 without a match.

    Raises ValueError if an index is left out, or if there are more blocks than a network has.
    """
    found = {int(match[1]): match[0] for key in shapes if (match := re.match(pattern, key))}
    if not found:
        return 0
    if max(found) >= MOST_BLOCKS:
        raise ValueError(f"has {found[max(found)]}*, wanted at most {MOST_BLOCKS} such blocks")
    if gaps := set(range(max(found))) - set(found):
        raise ValueError(f"has {found[max(found)]}*, but not number {min(gaps)} of these blocks")
    return max(found) + 1


def size(shapes: Shapes, key: str, *ranks: int) -> tuple[int, ...]:
    """Return the shape of a tensor that must be there, with one of these numbers of dimensions, none of them empty.

    Raises ValueError, which names the key.
    """
    if key not in shapes:
        raise ValueError(f"a tensor that every such network has is missing: {key}")
    shape = tuple(shapes[key])
    if len(shape) not in ranks or not all(0 < length <= LARGEST for length in shape):
        raise ValueError(f"{key} has the shape {shape}, wanted {' or '.join(map(str, ranks))} dimensions, none empty")
    return shape


def multiple(width: int, base: int, what: str) -> int:
    """Return width / base.  Raises ValueError unless it is a whole number above 0."""
    if width % base or width < base:
        raise ValueError(f"{what} is {width}, wanted a multiple of {base}")
    return width // base
