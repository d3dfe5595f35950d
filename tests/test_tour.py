"""docs/tour.md, executed block by block on the bundled model."""

import re
from pathlib import Path
from typing import Any

import page_files
import pytest
import registries
import torch

pytestmark = pytest.mark.slow  # some twenty seconds
TOUR = Path(__file__).parents[1] / "docs" / "tour.md"
BLOCKS = re.findall(r"```python\n(.*?)```", TOUR.read_text(encoding="utf-8"), re.DOTALL)


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The names that all blocks leave behind, run in order as a reader would."""
    folder, space = tmp_path_factory.mktemp("tour"), {"__name__": "tour"}
    text = TOUR.read_text(encoding="utf-8")
    with registries.restored(), pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for block in BLOCKS:
            if text.index(block) > text.index("## Files of your own") and not (folder / "style.safetensors").exists():
                page_files.write(folder)  # no block before needs them
            start = text.split(block)[0].count("\n")
            exec(compile("\n" * start + block, str(TOUR), "exec"), space)  # line numbers of the page
    return space


def test_the_page_has_its_blocks(done: dict[str, Any]) -> None:
    assert len(BLOCKS) >= 10


def test_images_come_in_the_kinds_and_numbers_that_are_asked_for(done: dict[str, Any]) -> None:
    assert [image.size for image in done["images"]] == [(128, 128)] * 2
    assert len(done["four"]) == 4
    assert done["arrays"][0].shape == (128, 128, 3)
    assert done["large"].size == (512, 512)
    assert done["styled"][0].tobytes() != done["plain"][0].tobytes()
    assert done["sharp"][0].tobytes() != done["plain"][0].tobytes()


def test_the_lora_is_gone_after_its_block(done: dict[str, Any]) -> None:
    pipe = done["pipe"]
    again = pipe.txt2img("a cat", steps=10)[0]
    assert again.tobytes() == done["plain"][0].tobytes()


def test_guidance_by_number_schedule_and_function_agree(done: dict[str, Any]) -> None:
    pipe, noise, cond, uncond, plan = (done[name] for name in ("pipe", "noise", "cond", "uncond", "plan"))
    number = pipe.denoise(noise, cond, uncond, plan, scale=2.5)
    assert torch.equal(number, pipe.denoise(noise, cond, uncond, plan, guidance=lambda step: 2.5))
    both = pipe.denoise(noise, cond, uncond, plan, guidance=lambda c, u: u + 2.5 * (c - u))
    assert torch.allclose(number, both, atol=1e-5)
    assert not torch.allclose(number, done["late"], atol=1e-2)
    assert not torch.allclose(number, done["mine"], atol=1e-2)


def test_a_registered_sampler_is_in_the_png_text(done: dict[str, Any]) -> None:
    assert "Sampler: Half Euler" in done["image"].info["parameters"]
