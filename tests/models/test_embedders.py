"""Classes and label maps as conditioning, against CompVis' (the goldens)."""

from pathlib import Path

import numpy as np
import torch
import toy

GOLDEN = np.load(Path(__file__).parents[1] / "data" / "zoo.npz")


def test_equals_the_original() -> None:
    embedder = toy.network(toy.CLASSES)
    assert toy.relative_error(embedder(torch.tensor([0, 10])), GOLDEN["classes"]) < 1e-5
    rescaler = toy.network(toy.LABEL_MAP)
    assert toy.relative_error(rescaler(toy.label_map()), GOLDEN["label_map"]) < 1e-5
