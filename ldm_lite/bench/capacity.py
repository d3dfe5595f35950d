"""The largest batch that fits into a GPU's memory."""

from ldm_lite.bench.contender import Contender, Unable
from ldm_lite.bench.jobs import Cell

MOST = 1024


def largest_batch(contender: Contender, section: str, dtype: str) -> int:
    """The largest batch size for which a section is done, found by doubling and then by halving the gap; 0 if none is.

    Raises Unable where something other than the memory is at fault.
    """

    def fits(batch: int) -> bool:
        try:
            contender.first(Cell(section, dtype, batch))
        except Unable as error:
            if "out of memory" not in str(error):
                raise
            return False
        return True

    good, bad = 0, 1
    while bad <= MOST and fits(bad):
        good, bad = bad, 2 * bad
    while bad - good > max(1, good // 16):  # to a sixteenth: the last image costs more to find than it tells
        middle = (good + bad) // 2
        good, bad = (middle, bad) if fits(middle) else (good, middle)
    return min(good, MOST)
