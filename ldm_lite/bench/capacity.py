"""The largest batch that fits into a GPU's memory."""

from ldm_lite.bench.backends import Backend, Unavailable
from ldm_lite.bench.workload import Cell

MAX_BATCH = 1024


def largest_batch(backend: Backend, section: str, dtype: str) -> int:
    """Find the largest batch size that fits for a section, by doubling, then bisection; 0 if none fits.

    The answer is exact below 16 and within a sixteenth above.  Raises Unavailable for failures other than memory.
    """

    def fits(batch: int) -> bool:
        try:
            backend.first(Cell(section, dtype, batch))
        except Unavailable as error:
            if "out of memory" not in str(error):
                raise
            return False
        return True

    good, bad = 0, 1
    while bad <= MAX_BATCH and fits(bad):
        good, bad = bad, 2 * bad
    while bad - good > max(1, good // 16):
        middle = (good + bad) // 2
        good, bad = (middle, bad) if fits(middle) else (good, middle)
    return min(good, MAX_BATCH)
