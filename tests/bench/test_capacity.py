"""The search for the largest batch, with a backend whose memory is a number."""

import pytest
import torch

from ldm_lite.bench.backends import FirstCall, Unavailable
from ldm_lite.bench.capacity import MAX_BATCH, largest_batch
from ldm_lite.bench.workload import Cell


class Sized:
    name = "sized"

    def __init__(self, room: int, reason: str = "out of memory") -> None:
        self.room, self.reason, self.asked = room, reason, list[int]()

    def first(self, cell: Cell) -> FirstCall:
        self.asked.append(cell.batch)
        if cell.batch > self.room:
            raise Unavailable(self.reason)
        return FirstCall(torch.zeros(1), 0.0, None)

    def seconds(self, cell: Cell, calls: int) -> float:
        raise AssertionError


@pytest.mark.parametrize(("room", "found"), [(0, 0), (1, 1), (2, 2), (3, 3), (13, 13), (16, 16), (10**6, MAX_BATCH)])
def test_the_largest_batch(room: int, found: int) -> None:
    assert largest_batch(Sized(room), "image", "fp16") == found


def test_large_ones_are_found_to_a_sixteenth() -> None:
    backend = Sized(427)
    assert 427 * 15 / 16 <= largest_batch(backend, "image", "fp16") <= 427
    assert len(backend.asked) <= 14


def test_another_failure_is_not_taken_for_memory() -> None:
    with pytest.raises(Unavailable, match="is not installed"):
        largest_batch(Sized(2, "is not installed"), "image", "fp16")
