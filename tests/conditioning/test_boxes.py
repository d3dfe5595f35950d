"""Boxes as tokens: against taming-transformers' builder (the goldens), and invalid boxes."""

import json
from pathlib import Path

import numpy as np
import pytest
import toy

from ldm_lite.conditioning.inputs import LabelledBox
from ldm_lite.conditioning.inputs import box_tokens as tokens
from ldm_lite.conditioning.inputs import read_boxes as read

GOLDEN = np.load(Path(__file__).parents[1] / "data" / "zoo.npz")


def test_equals_the_original() -> None:
    for number, boxes in enumerate(toy.layouts()):
        assert tokens([LabelledBox(*box) for box in boxes]) == GOLDEN[f"layout.{number}"].tolist()


def test_unused_slots_and_the_whole_image_as_crop() -> None:
    assert tokens([]) == [8191] * 90 + [0, 8099]
    assert tokens([LabelledBox(5, 0.0, 0.0, 1.0, 1.0)])[:6] == [5, 0, 8099, 8191, 8191, 8191]


@pytest.mark.parametrize(
    ("boxes", "message"),
    [
        ([LabelledBox(0, 0, 0, 1, 1)] * 31, "got 31 boxes, expected 30 or fewer"),
        ([LabelledBox(8191, 0, 0, 1, 1)], "class 8191 of a box, expected 0 to 8190"),
        ([LabelledBox(1, 0.5, 0, 0.25, 1)], "expected left < right"),
        ([LabelledBox(1, 0, 0, 64, 64)], "in 0 to 1"),
    ],
)
def test_invalid_boxes_are_refused(boxes: list[LabelledBox], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        tokens(boxes)


def test_read(tmp_path: Path) -> None:
    path = tmp_path / "boxes.json"
    path.write_text(json.dumps([{"class": 7, "box": [0, 0.25, 0.5, 1]}]))
    assert read(path) == [LabelledBox(7, 0.0, 0.25, 0.5, 1.0)]


@pytest.mark.parametrize("text", ["no JSON", "3", '[{"class": 7}]', '[{"class": 7, "box": [0, 1]}]', "[1]"])
def test_a_file_without_a_list_of_boxes_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "boxes.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"boxes\.json: is not a list of boxes .* expected \["):
        read(path)
