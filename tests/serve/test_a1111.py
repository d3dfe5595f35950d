"""AUTOMATIC1111's API: from its fields to options, without a server."""

from typing import Any

import pytest
from PIL import Image

from ldm_lite.cli.task_options import InpaintOptions
from ldm_lite.serve.library import Library
from ldm_lite.serve.options import ServeOptions
from ldm_lite.serve.queue import Engine

pytestmark = pytest.mark.extra
pytest.importorskip("fastapi")


def inpainting(library: Library, **given: Any) -> InpaintOptions:
    from ldm_lite.serve import a1111
    from ldm_lite.serve.http import encoded

    mask = Image.new("L", (32, 32))
    mask.paste(255, (4, 4, 12, 12))
    images = {"init_images": [encoded(Image.new("RGB", (32, 32), "red"))], "mask": encoded(mask)}
    state = a1111.State(Engine(library, ServeOptions()))
    options = a1111._submit(state, a1111.Img2imgRequest(**images, **given))[0].options
    assert isinstance(options, InpaintOptions)
    return options


@pytest.mark.parametrize(("fill", "content"), list(enumerate(["fill", "original", "noise", "nothing"])))
def test_masked_content(library: Library, fill: int, content: str) -> None:
    assert inpainting(library, inpainting_fill=fill).masked_content == content


def test_only_masked(library: Library) -> None:
    """By default, as there, with no padding."""
    assert inpainting(library).only_masked == 0
    assert inpainting(library, inpaint_full_res=True, inpaint_full_res_padding=32).only_masked == 32
    assert inpainting(library, inpaint_full_res=False, inpaint_full_res_padding=32).only_masked is None
    assert inpainting(library).masked_content == "fill"


def test_tags_weigh_networks_and_blocks() -> None:
    from ldm_lite.adapters.strength import Strength
    from ldm_lite.serve.a1111 import _loras

    prompt, found = _loras("a <lora:one:0.5:lbw=OUTD>car<lyco:two:te=0.5:unet=1> <lora:three>")
    assert prompt == "a car "
    assert found == (("one", Strength(0.5, 0.5, "OUTD")), ("two", Strength(0.5, 1)), ("three", Strength()))
    with pytest.raises(ValueError, match="the LoRA 'one': got the weight 'much', wanted a number"):
        _loras("<lora:one:much>")
    with pytest.raises(ValueError, match="hypernetworks are not supported"):
        _loras("a cat <hypernet:three:0.5>")
