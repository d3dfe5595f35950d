"""The engine with FLUX.1, Stable Diffusion 3 and Z-Image in miniature."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from serving import engine_of, library_of, submit, wait

import ldm_lite

pytestmark = pytest.mark.slow
SIZE: dict[str, Any] = {"steps": 2, "width": 48, "height": 32}


@pytest.fixture
def engine(flow_path: Path) -> Iterator[Any]:
    """It starts when a test has given it all its requests."""
    engine = engine_of(library_of(flow_path))
    yield engine
    engine.start() if engine._thread.ident is None else None
    engine.close()


def test_requests_run_together_with_the_bits_that_they_have_alone(engine: Any, flow_path: Path) -> None:
    """Of each task: prompts, seeds and the scale (for FLUX.1 dev an input of the network) differ."""
    pipe = ldm_lite.load(flow_path, device="cpu")
    red, hole = Image.new("RGB", (48, 32), "red"), Image.new("L", (48, 32))
    hole.paste(255, (16, 0, 32, 32))
    texts: list[dict[str, Any]] = [
        {"prompt": "a cat", "seed": 1},
        {"prompt": "a long text about a dog", "seed": 2, "scale": 2.0},
    ]
    begun: dict[str, Any] = {"steps": 4, "strength": 0.5}
    tickets = [submit(engine, "txt2img", text | SIZE) for text in texts]
    tickets += [submit(engine, "img2img", text | {"init_img": (red,)} | begun) for text in texts]
    tickets += [submit(engine, "inpaint", text | {"init_img": (red,), "mask": (hole,)} | begun) for text in texts]
    engine.start()
    wanted = [pipe.txt2img(**text, **SIZE) for text in texts]
    wanted += [pipe.img2img(image=red, **text, **begun) for text in texts]
    wanted += [pipe.inpaint(image=red, mask=hole, **text, **begun) for text in texts]
    for ticket, [image] in zip(tickets, wanted, strict=True):
        assert wait(ticket)
        assert ticket.error is None
        assert ticket.results[0].image.tobytes() == image.tobytes()
