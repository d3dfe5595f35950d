"""The page's form: from its values to requests, without a browser."""

from typing import Any

import pytest
from PIL import Image
from serving import engine_of

pytestmark = pytest.mark.extra
pytest.importorskip("fastapi")
pytest.importorskip("multipart")


@pytest.fixture
def engine(library: Any) -> Any:
    return engine_of(library)


def values(**given: Any) -> dict[str, Any]:
    return {"task": "txt2img", "prompt": "a cat", "seed": "3", "steps": "5"} | given


def test_values_become_options(engine: Any) -> None:
    from ldm_lite.serve import form

    work = form.read(values(scale="2.5", count="2", sampler="euler", width="", strength="0.5", tile="64"), engine)
    (request,) = work.requests
    assert not work.is_plot
    assert (request.options.steps, request.options.scale, request.options.batch_size) == (5, 2.5, 2)
    assert (request.options.sampler, request.options.width, request.options.seed) == ("euler", None, 3)
    seeds = {form.read(values(seed=each), engine).requests[0].options.seed for each in ("", "-1", "-1 ", None)}
    assert len(seeds) == 4
    second = form.read(values(hires="1.5", hires_steps="3", hires_upscaler="Lanczos"), engine).requests[0].options
    assert (second.hires, second.hires_steps, second.hires_upscaler) == (1.5, 3, "Lanczos")
    image = form.data_url(Image.new("RGB", (8, 8), "red"))
    assert form.read(values(task="img2img", source=image, hires="2"), engine).requests[0].options.hires is None
    made = form.read(values(task="inpaint", source=image, mask=image, feather="4"), engine).requests[0].options
    assert made.init_img[0].size == (8, 8)  # type: ignore[attr-defined]
    assert form.read(values(task="inpaint", source=image, extend="left=8"), engine).requests[0].options.mask == ()  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"task": "print"}, "got task"),
        ({"steps": "1e3"}, "wanted a whole number"),
        ({"scale": "inf"}, "finite number"),
        ({"seed": "99999999999999999999"}, "wanted a whole number"),
        ({"count": "two"}, "`count` 'two'"),
        ({"task": "img2img"}, "give an image"),
        ({"task": "img2img", "source": "data:image/png;base64,!!"}, "base64"),
        ({"task": "img2img", "source": "/etc/passwd"}, "base64|image"),
        ({"control": "../x", "control_image": "", "control_weight": 1}, "give an image for the ControlNet"),
        ({"x_option": "from_file", "x_values": "/etc/passwd"}, "as an axis"),
        ({"x_option": "control", "x_values": "a:b"}, "as an axis"),
        ({"x_option": "model", "x_values": "other"}, "unknown model"),
        ({"x_option": "lora_weight", "x_values": "1, 2"}, "no LoRA is chosen"),
        ({"x_option": "steps", "x_values": ""}, "no values"),
        ({"hires": "0.5"}, "`hires`"),
    ],
)
def test_wrong_values_are_one_line(engine: Any, given: dict[str, Any], message: str) -> None:
    from ldm_lite.serve import form

    with pytest.raises((ValueError, TypeError), match=message) as caught:
        form.read(values(**given), engine)
    assert "\n" not in str(caught.value)


def test_a_plot_has_a_request_for_each_cell(engine: Any) -> None:
    from ldm_lite.serve import form

    loras = {"loras": ["one", "two"], "lora_0": 1, "lora_1": 0.5}
    axes = {"x_option": "lora_weight", "x_values": "0-1 [3]", "y_option": "steps", "y_values": "2, 4"}
    work = form.read(values(count="4", **loras, **axes), engine)
    assert work.is_plot
    assert [request.options.steps for request in work.requests] == [2, 2, 2, 4, 4, 4]
    assert [request.loras[1] for request in work.requests][:3] == [("two", 0.0), ("two", 0.5), ("two", 1.0)]
    assert {request.options.batch_size for request in work.requests} == {1}
    assert len({request.options.seed for request in work.requests}) == 1
    assert form.read(values(**loras), engine).requests[0].loras == (("one", 1.0), ("two", 0.5))
    files = {"from_file", "wildcards", "embedding", "refiner", "depth", "control", "init_img", "mask", "indir"}
    assert not files & {name for task in form.TASKS for name in (*form.axes(task), *form.fields())}


def test_a_picture_of_another_pictures_settings_resets_the_form(engine: Any) -> None:
    from ldm_lite.serve import form

    image = Image.new("RGB", (8, 8))
    image.info["parameters"] = (
        "a cat\nSteps: 7, Sampler: Euler, CFG scale: 7, Seed: 1, Model: x, Denoising strength: 0.3"
    )
    found, text, _ = form.settings(form.data_url(image), engine)
    assert text == image.info["parameters"]
    assert (found["steps"], found["scale"], found["strength"], found["model"]) == ("7", "7", "0.3", "x")
    assert form.defaults()["eta"] == ""
    read = form.read(values(**form.defaults() | found | {"task": "txt2img"}), engine).requests[0].options
    assert (read.steps, read.eta, read.clip_skip) == (7, None, 1)
