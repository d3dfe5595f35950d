"""Classes and label maps as conditioning, against CompVis' (the goldens)."""

from pathlib import Path

import numpy as np
import torch
import toy

from ldm_lite.models.embedders import ClassEmbedder, ClassSpec, LabelMapRescaler, LabelMapSpec

GOLDEN = np.load(Path(__file__).parents[1] / "data" / "zoo.npz")


def test_equals_the_original() -> None:
    embedder = toy.network(toy.CLASSES)
    assert toy.relative_error(embedder(torch.tensor([0, 10])), GOLDEN["classes"]) < 1e-5
    rescaler = toy.network(toy.LABEL_MAP)
    assert toy.relative_error(rescaler(toy.label_map()), GOLDEN["label_map"]) < 1e-5


def test_parameters_are_those_of_the_released_models() -> None:
    """1001 and 1000 classes of 512, and 182 labels to 3 channels."""
    with torch.device("meta"):
        networks = (
            ClassEmbedder(ClassSpec(1001, 512, guided=True)),
            ClassEmbedder(ClassSpec(1000, 512)),
            LabelMapRescaler(LabelMapSpec(182, 3, 2)),
        )
    assert [sum(p.numel() for p in network.parameters()) for network in networks] == [512512, 512000, 546]
