"""The engine with FLUX.1, Stable Diffusion 3 and Z-Image in miniature."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

import ldm_lite
from ldm_lite.cli.options import LoadOptions
from ldm_lite.cli.task_options import Img2imgOptions, InpaintOptions, Txt2imgOptions
from ldm_lite.serve.library import Library
from ldm_lite.serve.options import ServeOptions
from ldm_lite.serve.queue import Engine

pytestmark = pytest.mark.slow
SIZE: dict[str, Any] = {"steps": 2, "width": 48, "height": 32}


@pytest.fixture
def engine(flow_path: Path) -> Iterator[Engine]:
    """It starts when a test has given it all its requests."""
    made = Engine(Library(LoadOptions(ckpt=flow_path, device="cpu"), ServeOptions()), ServeOptions())
    yield made
    made.start() if made._thread.ident is None else None
    made.close()


def test_requests_run_together_with_the_bits_that_they_have_alone(engine: Engine, flow_path: Path) -> None:
    """Of each task: prompts, seeds and the scale (for FLUX.1 dev an input of the network) differ."""
    pipe = ldm_lite.load(flow_path, device="cpu")
    red, hole = Image.new("RGB", (48, 32), "red"), Image.new("L", (48, 32))
    hole.paste(255, (16, 0, 32, 32))
    texts: list[dict[str, Any]] = [
        {"prompt": "a cat", "seed": 1},
        {"prompt": "a long text about a dog", "seed": 2, "scale": 2.0},
    ]
    begun: dict[str, Any] = {"steps": 4, "strength": 0.5}
    tickets = [engine.submit("txt2img", Txt2imgOptions(**each, **SIZE)) for each in texts]
    tickets += [engine.submit("img2img", Img2imgOptions(**each, init_img=(red,), **begun)) for each in texts]
    masked: dict[str, Any] = {"init_img": (red,), "mask": (hole,)}
    tickets += [engine.submit("inpaint", InpaintOptions(**each, **masked, **begun)) for each in texts]
    engine.start()
    wanted = [pipe.txt2img(**each, **SIZE, output="tensor") for each in texts]
    wanted += [pipe.img2img(image=red, **each, **begun, output="tensor") for each in texts]
    wanted += [pipe.inpaint(image=red, mask=hole, **each, **begun, output="tensor") for each in texts]
    for ticket, [pixels] in zip(tickets, wanted, strict=True):
        assert ticket.wait(60)
        assert ticket.error is None
        assert torch.equal(ticket.results[0].pixels, pixels)
