"""The loss of images that are not learned, always at the same noise and noise levels: no draws disturb its curve."""

from collections.abc import Iterator

import torch

from ldm_lite.train import distributed
from ldm_lite.train.batches import Batch, Draws, in_order
from ldm_lite.train.examples import Buckets, Dataset
from ldm_lite.train.losses import DiffusionLoss

LEVELS = 4  # noise levels of each example
FIRST = 2**41  # number of the first example: its noise is no training example's
GOLDEN = 0.618034  # fractions of its multiples are spread evenly


class Validation:
    """Measures a loss on a dataset."""

    def __init__(self, loss: DiffusionLoss, dataset: Dataset, batch: int, every: int) -> None:
        """every: steps between measurements."""
        self.loss, self.dataset, self.batch, self.every = loss, dataset, batch, every

    @torch.no_grad()
    def __call__(self) -> float:
        """Return the mean of the squared errors, unweighted, of all examples at LEVELS noise levels each.

        The levels of an example are one in each quarter of those that training draws.  Raises ValueError, OSError.
        """
        sums = torch.zeros(2, dtype=torch.float64)
        for number, batch in enumerate(self._batches()):
            if number % distributed.world_size() != distributed.rank():
                continue
            for level in range(LEVELS):
                numbers = [LEVELS * example + level for example in batch.numbers]
                places = [(level + GOLDEN * (example - FIRST) % 1) / LEVELS for example in batch.numbers]
                errors = self.loss.errors(batch, Draws(0, numbers), torch.tensor(places, dtype=torch.float64))
                sums += torch.tensor([float(errors.double().sum()), len(errors)], dtype=torch.float64)
        total, count = distributed.all_reduce_sum(sums).tolist()
        return total / count

    def _batches(self) -> Iterator[Batch]:
        """Yield all examples, in batches of one size; their numbers go through all of them."""
        parts = self.dataset.parts if isinstance(self.dataset, Buckets) else (self.dataset,)
        first = FIRST
        for part in parts:
            for batch in in_order(part, self.batch, workers=0):
                numbers = tuple(range(first, first + len(batch.numbers)))
                first += len(numbers)
                yield Batch(**{**vars(batch), "numbers": numbers})
