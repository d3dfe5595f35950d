"""What enlarges images over A1111's API: the second pass of txt2img, and extras, against the same from Python."""

import base64
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import esrgan
import numpy as np
import pytest
import torch
from PIL import Image
from serving import Running, b64, engine_of, finished, library_of, submit

import ldm_lite
from ldm_lite import Pipeline
from ldm_lite.cli.task_options import Txt2imgOptions
from ldm_lite.serve.ticket import RUNNING, Ticket

pytest.importorskip("fastapi")
pytest.importorskip("uvicorn")
pytest.importorskip("prometheus_client")

FIRST = {"prompt": "a red cat", "steps": 3, "seed": 5, "width": 32, "height": 32, "sampler_name": "Euler"}
OURS = FIRST | {"sampler": "webui Euler", "prompt_syntax": "a1111", "output": "numpy"}
del OURS["sampler_name"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("upscalers")
    torch.save({"params": esrgan.weights(2)}, path / "x2net.pth")
    return path


@pytest.fixture(scope="module")
def server(small_path: Path, folder: Path) -> Iterator[Any]:
    options = {"upscalers": str(folder), "max_steps": 20}
    running = Running(library_of(small_path, **options), **options)
    yield running
    running.close()


def pixels(text: str) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(text))).convert("RGB"))


def photo(width: int = 20, height: int = 12) -> Image.Image:
    y, x = np.mgrid[:height, :width]
    return Image.fromarray(np.stack([9 * x, 15 * y, 200 - 5 * (x + y)], axis=-1).astype(np.uint8))


@pytest.mark.parametrize(
    ("asked", "ours"),
    [
        ({}, {"hires": 2, "hires_strength": 0.75}),
        (
            {"hr_scale": 1.5, "hr_upscaler": "Lanczos", "hr_second_pass_steps": 2, "denoising_strength": 0.5},
            {"hires": 1.5, "hires_upscaler": "Lanczos", "hires_steps": 2, "hires_strength": 0.5},
        ),
        (
            # 120 / 88 * 88 is below 120
            {"width": 88, "hr_resize_x": 120, "hr_upscaler": "x2net", "hr_prompt": "a dog"},
            {"width": 88, "hires": 1.364, "hires_strength": 0.75, "hires_esrgan": "x2net.pth", "hires_prompt": "a dog"},
        ),
        (
            {"hr_sampler_name": "DPM++ 2M", "hr_scheduler": "Karras", "hr_negative_prompt": "blue"},
            {"hires": 2, "hires_strength": 0.75, "hires_sampler": "webui DPM++ 2M Karras"}
            | {"hires_negative_prompt": "blue"},
        ),
    ],
)
def test_a_second_pass_is_that_of_python(
    server: Any, pipe: Pipeline, folder: Path, asked: dict[str, Any], ours: dict[str, Any]
) -> None:
    """Both images of a request, in order."""
    status, answer = server.ask("/sdapi/v1/txt2img", FIRST | {"enable_hr": True, "batch_size": 2} | asked)
    assert status == 200, answer
    if "hires_esrgan" in ours:
        ours = ours | {"hires_esrgan": folder / ours["hires_esrgan"]}
    wanted = pipe.txt2img(**OURS | {"batch_size": 2} | ours)
    for image, ours_too in zip(answer["images"], wanted, strict=True):
        enlarged = pixels(image)
        assert enlarged.shape == ours_too.shape
        assert np.abs(enlarged.astype(int) - ours_too).max() <= 1  # of a batch of two, or of one


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"hr_upscaler": "R-ESRGAN 4x+"}, "unknown hr_upscaler 'R-ESRGAN 4x+': expected one of Latent"),
        ({"hr_resize_x": 64, "hr_resize_y": 48}, "64x48, do not have the shape of 32x32: give only one"),
        ({"hr_scale": 8}, "got 256 x 256 pixels, expected at most 16384"),
        ({"hr_second_pass_steps": 21}, "got steps of a later pass: 21, expected at most 20"),
        ({"hr_checkpoint_name": "another"}, "hr_checkpoint_name is not supported"),
        ({"denoising_strength": 0}, "hires_strength"),
    ],
)
def test_a_wrong_second_pass_is_one_line(server: Any, asked: dict[str, Any], message: str) -> None:
    status, got = server.refused("/sdapi/v1/txt2img", FIRST | {"enable_hr": True} | asked)
    assert status == 422
    assert message in got


def test_progress_is_that_of_both_passes(server: Any) -> None:
    ticket = Ticket(server.engine, "txt2img", Txt2imgOptions(), "small", ())
    ticket.state, ticket.count, ticket.step, ticket.num_steps = RUNNING, 1, 2, 4
    for passes, share in (((0, 1), 0.5), ((0, 2), 0.25), ((1, 2), 0.75)):
        ticket.passes = passes
        assert ticket.progress == share


def test_extras_enlarge_as_python(server: Any, folder: Path) -> None:
    """Sides are multiples of 8, as there; a second upscaler is mixed in; a size is filled, and cut."""
    image, network = photo(), ldm_lite.Upscaler(folder / "x2net.pth", device="cpu")

    def enlarged(**fields: Any) -> np.ndarray:
        status, answer = server.ask("/sdapi/v1/extra-single-image", {"image": b64(image), **fields})
        assert status == 200, answer
        return pixels(answer["image"])

    by_network = network(image).resize((40, 24), Image.Resampling.LANCZOS)
    assert np.array_equal(enlarged(upscaler_1="x2net", upscaling_resize=2), np.asarray(by_network))
    lanczos = image.resize((40, 24), Image.Resampling.LANCZOS)
    assert np.array_equal(enlarged(upscaler_1="Lanczos", upscaling_resize=2), np.asarray(lanczos))
    mixed = enlarged(upscaler_1="x2net", upscaler_2="Lanczos", extras_upscaler_2_visibility=0.25)
    assert np.array_equal(mixed, np.asarray(Image.blend(by_network, lanczos, 0.25)))
    three = network(network(image)).resize((56, 32), Image.Resampling.LANCZOS)  # 60 x 36, in multiples of 8
    assert np.array_equal(enlarged(upscaler_1="x2net", upscaling_resize=3), np.asarray(three))
    size = {"resize_mode": 1, "upscaling_resize_w": 24, "upscaling_resize_h": 24}
    assert np.array_equal(enlarged(upscaler_1="x2net", **size), np.asarray(by_network)[:, 8:32])
    assert enlarged(upscaler_1="x2net", **size, upscaling_crop=False).shape == (24, 40, 3)
    assert np.array_equal(enlarged(), np.asarray(image))
    several = {"imageList": [{"data": b64(image)}, {"data": b64(image)}], "upscaler_1": "x2net"}
    status, answer = server.ask("/sdapi/v1/extra-batch-images", several)
    assert (status, len(answer["images"])) == (200, 2)
    names = [upscaler["name"] for upscaler in server.ask("/sdapi/v1/upscalers")[1]]
    assert names == ["None", "Lanczos", "Nearest", "x2net"]
    assert "Latent (nearest)" in [mode["name"] for mode in server.ask("/sdapi/v1/latent-upscale-modes")[1]]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"upscaler_1": "4x"}, "unknown upscaler '4x': expected one of x2net"),
        ({"upscaler_1": "x2net", "upscaling_resize": 8, "image": b64(photo(100, 100))}, "got 800 x 800 pixels"),
        ({"upscaler_1": "x2net", "upscaling_resize": 9}, "upscaling_resize: Input should be less than or equal to 8"),
        ({"upscaler_1": "x2net", "gfpgan_visibility": 1}, "gfpgan_visibility is not supported"),
        ({"image": "no"}, "image"),
    ],
)
def test_wrong_extras_are_one_line(server: Any, fields: dict[str, Any], message: str) -> None:
    status, got = server.refused("/sdapi/v1/extra-single-image", {"image": b64(photo())} | fields)
    assert status == 422
    assert message in got


def test_no_picture_is_none_to_enlarge(server: Any) -> None:
    status, message = server.refused("/sdapi/v1/extra-batch-images", {"imageList": []})
    assert (status, message) == (422, "got 0 images, expected 1 to 16")


def test_requests_that_wait_hold_no_network(small_path: Path, folder: Path) -> None:
    """They hold its name; a file that fails is refused from then on."""
    torch.save({"params": esrgan.weights(4)}, folder / "second.pth")
    torch.save({"params": {}}, folder / "broken.pth")
    library = library_of(small_path, upscalers=str(folder))
    engine = engine_of(library, upscalers=str(folder))
    request = {"prompt": "x", "steps": 1, "width": 32, "height": 32, "hires": 2.0}
    names = ["x2net", "second", "x2net", "broken"]
    tickets = [submit(engine, "txt2img", request | {"hires_esrgan": library.upscaler(name)}) for name in names]
    assert library._upscaler is None
    shares = list[float]()
    tickets[0].listen(lambda: shares.append(tickets[0].progress))
    engine.start()
    first, second, third = (result.image.tobytes() for result in finished(*tickets[:3]))
    assert first == third != second
    assert shares == sorted(shares)  # over both passes
    with pytest.raises(ValueError, match="broken"):
        finished(tickets[3])
    engine.close()
    with pytest.raises(ValueError, match="broken"):
        library.upscaler("broken")
