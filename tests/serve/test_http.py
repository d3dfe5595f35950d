"""The server over a real socket: what its clients get, and what it refuses."""

import asyncio
import base64
import hashlib
import http.client
import io
import json
import re
import shutil
import struct
import tempfile
import threading
import typing
import urllib.request
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import toy_flux2
from PIL import Image
from serving import Full, Running, Stopping, b64, engine_of, finished, form, library_of, opened, submit
from waiting import wait_for

import ldm_lite

pytest.importorskip("uvicorn")
pytest.importorskip("fastapi")
pytest.importorskip("prometheus_client")

from ldm_lite.cli.options import LoadOptions
from ldm_lite.runtime import compile as compilation
from ldm_lite.serve.http import answer, changes
from ldm_lite.serve.ledger import TooLarge
from ldm_lite.serve.library import Library
from ldm_lite.serve.options import ServeOptions

KEY = "a-key-of-the-test"
Start = Callable[..., Running]


@pytest.fixture(scope="module")
def server(library: Any) -> Iterator[Running]:
    running = Running(library)
    yield running
    running.close()


def picture(color: Any = "red", mode: str = "RGB", side: int = 32) -> bytes:
    file = io.BytesIO()
    Image.new(mode, (side, side), color).save(file, "PNG")
    return file.getvalue()


SMALL = {"seed": 3, "steps": 3, "width": 32, "height": 32}
OPENAI, TXT2IMG, IMG2IMG = "/v1/images/generations", "/sdapi/v1/txt2img", "/sdapi/v1/img2img"


# ---- the real clients -----------------------------------------------------------------------------------------------


def test_openais_client_generates_edits_and_streams(server: Running, small_path: Path) -> None:
    openai = pytest.importorskip("openai")
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    assert [model.id for model in client.models.list()] == ["small"]
    assert client.models.retrieve("small").object == "model"
    more: dict[str, Any] = {"extra_body": {"seed": 3, "steps": 3, "negative_prompt": "ugly"}}
    response = client.images.generate(prompt="an apple", model="small", n=2, size="32x32", **more)
    assert (response.size, response.output_format, len(response.data)) == ("32x32", "png", 2)
    pipe = ldm_lite.load(small_path, device="cpu")
    for generated, seed in zip(response.data, (3, 4), strict=True):
        wanted = pipe.txt2img("an apple", negative_prompt="ugly", **SMALL | {"seed": seed})[0]
        assert opened(generated.b64_json).tobytes() == wanted.tobytes()
        assert opened(generated.b64_json).info["parameters"] == wanted.info["parameters"]

    events = list(client.images.generate(prompt="an apple", size="32x32", stream=True, partial_images=2, **more))
    assert [event.type.split(".")[1] for event in events] == ["partial_image", "partial_image", "completed"]
    assert [event.partial_image_index for event in events[:2]] == [0, 1]
    assert opened(events[2].b64_json).tobytes() == opened(response.data[0].b64_json).tobytes()
    assert all(opened(event.b64_json).size == (32, 32) for event in events)

    image, hole = ("a.png", picture()), ("b.png", picture((0, 0, 0, 0), "RGBA"))
    edited = client.images.edit(image=image, prompt="a car", output_format="webp", extra_body={"steps": 4})
    assert opened(edited.data[0].b64_json).format == "WEBP"
    masked = client.images.edit(image=image, mask=hole, prompt="a car", extra_body={"steps": 4, "seed": 1})
    assert opened(masked.data[0].b64_json).size == (32, 32)
    events = list(client.images.edit(image=image, prompt="a car", stream=True, extra_body={"steps": 4}))
    assert [event.type for event in events] == ["image_edit.completed"]

    for status, wrong in (
        (404, {"model": "other"}),
        (422, {"size": "32"}),
        (422, {"size": "1024x1024"}),
        (422, {"n": 0}),
        (422, {"response_format": "uri"}),
        (422, {"output_format": "gif"}),
        (422, {"extra_body": {"steps": 5000}}),
        (422, {"extra_body": {"sampler": "eulerr"}}),
    ):
        with pytest.raises(openai.APIStatusError) as caught:
            client.images.generate(**{"prompt": "x", **wrong})
        assert caught.value.status_code == status


def test_a1111s_client_at_work(server: Running, small_path: Path) -> None:
    webuiapi = pytest.importorskip("webuiapi")
    client = webuiapi.WebUIApi(host="127.0.0.1", port=server.port)
    size = {"width": 32, "height": 32}
    response = client.txt2img(prompt="(an apple:1.2)", seed=3, steps=3, batch_size=2, sampler_name="DPM++ 2M", **size)
    assert response.info["all_seeds"] == [3, 4]
    more = {"sampler": "webui DPM++ 2M", "scale": 7.0, "prompt_syntax": "a1111", "negative_prompt": ""}
    pipe = ldm_lite.load(small_path, device="cpu")
    [wanted] = pipe.txt2img("(an apple:1.2)", **SMALL | more)
    assert response.images[0].tobytes() == wanted.tobytes()
    varied = client.txt2img(prompt="x", seed=3, steps=3, subseed=9, subseed_strength=0.5, sampler_name="DDIM", **size)
    more |= {"sampler": "webui DDIM", "eta": 1.0, "variation_seed": 9, "variation_strength": 0.5}
    assert varied.image.tobytes() == pipe.txt2img("x", **SMALL | more)[0].tobytes()
    about = client.png_info(response.images[0])
    assert about.info == response.info["infotexts"][0]
    assert about.parameters["Sampler"] == "DPM++ 2M"
    assert client.png_info(Image.new("RGB", (8, 8))).info == ""

    mask = Image.new("L", (32, 32))
    mask.paste(255, (0, 0, 16, 32))
    arguments = {"images": [Image.new("RGB", (32, 32), "red")], "prompt": "x", "steps": 4, **size}
    plain = client.img2img(**arguments, denoising_strength=0.5)
    assert plain.info["ignored"] == client.img2img(**arguments).info["ignored"]
    painted = client.img2img(**arguments, mask_image=mask, mask_blur=0, inpainting_fill=1)
    assert painted.image.crop((16, 0, 32, 32)).getcolors() == [(16 * 32, (255, 0, 0))]

    assert "Euler a" in client.util_get_sampler_names()
    assert "karras" in client.util_get_scheduler_names()
    for name in client.util_get_scheduler_names():
        client.txt2img(prompt="x", steps=2, scheduler=name, sampler_name="Euler", **size)
    [title] = client.util_get_model_names()
    assert re.fullmatch(r"small\.safetensors \[[0-9a-f]{8}\]", title)
    client.util_set_model("small")
    assert client.util_get_current_model() == title
    assert client.get_loras() == client.get_sd_vae() == []
    client.util_wait_for_ready(0.1)
    for wrong in (
        {"restore_faces": True},
        {"styles": ["x"]},
        {"steps": 5000},
        {"sampler_name": "nope"},
        {"width": 2**20},
    ):
        with pytest.raises(RuntimeError, match="422"):
            client.txt2img(**{"prompt": "x", **size, **wrong})


def test_a1111s_progress_and_interrupt(server: Running) -> None:
    """The answer is what was predicted; another interface's request beside it is not touched."""
    answers: dict[str, Any] = {}

    def ask(path: str, **more: Any) -> threading.Thread:
        thread = threading.Thread(
            target=lambda: answers.update({path: server.ask(path, {"prompt": "x", **SMALL, **more})})
        )
        thread.start()
        return thread

    first = ask(TXT2IMG, steps=150)
    progress = lambda: server.ask("/sdapi/v1/progress")[1]  # noqa: E731
    about = wait_for(lambda: about if (about := progress())["state"]["sampling_step"] >= 2 else None, "a second step")
    assert about["state"]["sampling_steps"] == 150
    assert 0 < about["progress"] < 1
    assert about["state"]["job_count"] == 1
    second = ask(OPENAI, size="32x32")
    wait_for(lambda: progress()["current_image"], "a preview")
    server.ask("/sdapi/v1/interrupt", {})
    first.join()
    second.join()
    status, answer = answers[TXT2IMG]
    assert status == 200
    assert json.loads(answer["info"])["interrupted"]
    assert opened(answer["images"][0]).size == (32, 32)
    assert answers[OPENAI][0] == 200
    assert server.ask("/sdapi/v1/progress")[1]["progress"] == 0


@pytest.mark.slow
def test_the_clients_with_rectified_flow(flow_path: Path, small_path: Path, tmp_path: Path) -> None:
    """FLUX.1, Stable Diffusion 3 and Z-Image: each task gives the pipeline's bits, and models take turns."""
    openai, webuiapi = pytest.importorskip("openai"), pytest.importorskip("webuiapi")
    shutil.copy(small_path, tmp_path / "other.safetensors")
    server, pipe = Running(library_of(flow_path, models=str(tmp_path))), ldm_lite.load(flow_path, device="cpu")
    try:
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
        arguments: dict[str, Any] = {"prompt": "an apple", "extra_body": {"seed": 3, "steps": 3}}
        response = client.images.generate(n=2, size="48x32", **arguments)
        size: dict[str, Any] = {"steps": 3, "width": 48, "height": 32}
        for generated, seed in zip(response.data, (3, 4), strict=True):
            [wanted] = pipe.txt2img("an apple", seed=seed, **size)
            assert opened(generated.b64_json).tobytes() == wanted.tobytes()
            assert opened(generated.b64_json).info["parameters"] == wanted.info["parameters"]
        events = list(client.images.generate(size="48x32", stream=True, partial_images=1, **arguments))
        assert [event.type.split(".")[1] for event in events] == ["partial_image", "completed"]
        assert opened(events[1].b64_json).tobytes() == opened(response.data[0].b64_json).tobytes()
        hole = ("b.png", picture((0, 0, 0, 0), "RGBA"))
        edited = client.images.edit(image=("a.png", picture()), mask=hole, **arguments)
        assert opened(edited.data[0].b64_json).size == (32, 32)

        webui = webuiapi.WebUIApi(host="127.0.0.1", port=server.port)
        asked: dict[str, Any] = {"prompt": "a cat", "seed": 3, "steps": 3, "width": 48, "height": 32}
        for name in ("Euler", "DPM++ 2M"):
            image = webui.txt2img(sampler_name=name, cfg_scale=3.0, **asked).image
            options: dict[str, Any] = {"sampler": f"webui {name}", "scale": 3.0, "negative_prompt": ""}
            assert image.tobytes() == pipe.txt2img("a cat", seed=3, **size, **options)[0].tobytes()
        red = Image.new("RGB", (48, 32), "red")
        again = webui.img2img(images=[red], denoising_strength=0.7, sampler_name="Euler", **asked)
        assert again.image.size == (48, 32)
        status, message = server.refused(TXT2IMG, {**asked, "prompt": "a (cat:1.2)"})
        assert status == 422
        assert "cannot weight parts: got 'cat' with the weight 1.2" in message
        assert server.ask(TXT2IMG, {**asked, "override_settings": {"sd_model_checkpoint": "other"}})[0] == 200
        assert server.ask(TXT2IMG, asked)[0] == 200
        assert server.engine.totals["swaps"] == 2
        assert server.refused(OPENAI, {"prompt": "x", "size": "40x40"})[0] == 422
        numbers = server.ask("/metrics")[1]
        assert f"ldm_lite_images_total {server.engine.totals['images']}.0" in numbers
    finally:
        server.close()


def test_the_quality_of_a_jpeg_is_what_is_asked_for(server: Running) -> None:
    asked = {"prompt": "x", "size": "32x32", "steps": 1, "seed": 1, "output_format": "jpeg"}
    answers = (server.ask(OPENAI, asked | more)[1] for more in ({}, *({"output_compression": n} for n in (100, 10))))
    plain, best, small = (answer["data"][0]["b64_json"] for answer in answers)
    assert plain == best
    assert len(small) < len(best)


def test_partial_images_are_of_streams_alone(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    submit_later, partials = server.engine.submit, list[int]()

    def submit_now(*args: Any, **more: Any) -> Any:
        partials.append(more["partials"])
        return submit_later(*args, **more)

    monkeypatch.setattr(server.engine, "submit", submit_now)
    for stream in (False, True):
        asked = {"prompt": "x", "size": "32x32", "steps": 1, "partial_images": 2, "stream": stream}
        assert server.ask(OPENAI, asked)[0] == 200
    assert partials == [0, 2]


@pytest.mark.parametrize("name", ["gpt-image-1", "gpt-image-9-any", "dall-e-3", "small.safetensors"])
def test_the_names_that_clients_give_by_default(server: Running, name: str) -> None:
    asked = {"prompt": "x", "size": "32x32", "steps": 1, "seed": 1}
    status, answer = server.ask(OPENAI, asked | {"model": name})
    assert status == 200
    assert answer["data"][0]["b64_json"] == server.ask(OPENAI, asked)[1]["data"][0]["b64_json"]
    assert ("url" in answer["data"][0]) == name.startswith("dall-e")
    assert server.ask(f"/v1/models/{name}")[1]["id"] == name


def test_all_image_models_of_openais_client_are_the_default_model(server: Running) -> None:
    openai = pytest.importorskip("openai")
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    names = typing.get_args(openai.types.ImageModel)
    assert "dall-e-3" in names
    for name in names:
        assert client.models.retrieve(name).id == name
    for name in ("gpt-5", "gpt-image-", "dall-e-3/../x", "my-gpt-image-1"):
        assert server.refused(OPENAI, {"prompt": "x", "model": name})[0] == 404


@pytest.mark.filterwarnings("ignore:deprecated:DeprecationWarning")  # OpenAI retired variations
def test_urls_and_variations(start: Start, small_path: Path) -> None:
    openai = pytest.importorskip("openai")
    server = start(api_key=KEY)
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key=KEY, max_retries=0)
    size: dict[str, Any] = {"size": "32x32", "extra_body": {"seed": 3, "steps": 3}}
    links = client.images.generate(prompt="an apple", n=2, response_format="url", **size)
    expected = client.images.generate(prompt="an apple", n=2, **size)
    for linked, image in zip(links.data, expected.data, strict=True):
        assert linked.b64_json is None
        with urllib.request.urlopen(linked.url) as answer:  # as any client, without the key
            assert answer.headers["content-type"] == "image/png"
            assert answer.read() == base64.b64decode(image.b64_json)
    assert server.refused(f"/v1/images/{'0' * 32}.png", None)[0] == 404
    assert server.refused(OPENAI.replace("generations", "x.png"), None)[0] == 401

    pipe = ldm_lite.load(small_path, device="cpu")
    [wanted] = pipe.img2img("", Image.new("RGB", (32, 32), "red"), seed=3, steps=3, width=32, height=32)
    varied = client.images.create_variation(image=("a.png", picture()), response_format="b64_json", **size)
    assert opened(varied.data[0].b64_json).tobytes() == wanted.tobytes()
    varied = client.images.create_variation(image=("a.png", picture()), model="dall-e-2", **size)
    assert varied.data[0].url.startswith(server.url)


def test_images_with_urls_give_way_to_requests_and_expire(monkeypatch: pytest.MonkeyPatch) -> None:
    from ldm_lite.serve import openai
    from ldm_lite.serve.http import Refused
    from ldm_lite.serve.ledger import CLIENT, Account, Full, Ledger, TooLarge

    ledger = Ledger(80)  # of which a client has 60
    links, token = openai.Links(ledger), CLIENT.set("a")

    def add(client: str, count: int) -> str:
        CLIENT.set(client)
        return links.add([bytes(count)], "png")[0]

    def is_there(*names: str) -> list[bool]:
        return [name in links._links for name in names]

    try:
        first, second, third = (add("a", 25) for _ in range(3))
        assert is_there(first, second, third) == [False, True, True]  # a client's own make room, the oldest first
        assert links.read(second) == bytes(25)
        with pytest.raises(TooLarge, match="expected at most"):
            add("a", 61)
        small = add("b", 4)
        assert ledger.held() == {"a": 50, "b": 4}
        with Account(ledger, "c") as account:
            account.hold("body", 30)  # those of who has most go before
            assert is_there(second, third, small) == [False, True, True]
            account.hold("body", 60)
            assert is_there(third, small) == [False, False]
            with pytest.raises(Full):
                add("d", 20)
        assert links._links == {}
        monkeypatch.setattr(openai, "LIFETIME", -1.0)
        with pytest.raises(Refused, match="no image"):
            links.read(add("a", 5))
        add("a", 5)
        assert ledger.held() == {"a": 5}
    finally:
        CLIENT.reset(token)


def test_what_is_transparent_is_white_as_for_the_command(server: Running, small_path: Path) -> None:
    clear = picture((0, 0, 0, 0), "RGBA")
    body, head = form(
        ("prompt", b"x"), ("steps", b"4"), ("seed", b"1"), ("strength", b"0.3"), ("image", clear), ("mask", clear)
    )
    status, answer = server.ask("/v1/images/edits", body, **head)
    assert status == 200, answer
    pipe = ldm_lite.load(small_path, device="cpu")
    white, mask = Image.new("RGB", (32, 32), "white"), Image.new("L", (32, 32), 255)
    [wanted] = pipe.inpaint("x", white, mask, steps=4, seed=1, strength=0.3)
    assert opened(answer["data"][0]["b64_json"]).tobytes() == wanted.tobytes()


@pytest.fixture(scope="module")
def editor(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A server with FLUX.2 [klein] in miniature, which reads reference images."""
    running = Running(library_of(toy_flux2.write_whole(tmp_path_factory.mktemp("klein"))), max_pixels=2**20)
    yield running
    running.close()


def png(image: Image.Image) -> bytes:
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


def edited(server: Running, *images: Image.Image) -> Image.Image:
    """The result of OpenAI's edits, one step with seed 1."""
    parts = [("prompt", b"x"), ("steps", b"1"), ("seed", b"1"), *(("image[]", png(image)) for image in images)]
    body, head = form(*parts)
    status, answer = server.ask("/v1/images/edits", body, **head)
    assert status == 200, answer
    return opened(answer["data"][0]["b64_json"])


def test_a_model_that_reads_references_gets_all_images(editor: Running) -> None:
    """Of OpenAI's edits, and of the page's interface; the size is the first one's."""
    pictures = toy_flux2.pictures()
    image = edited(editor, *pictures)
    [wanted] = editor.engine.library.model.txt2img("x", reference=pictures, steps=1, seed=1)
    assert wanted.size == pictures[0].size
    assert image.tobytes() == wanted.tobytes()
    texts = [base64.b64encode(png(picture)).decode() for picture in pictures]
    fields = {"prompt": "x", "steps": "1", "seed": "1", "reference": texts}
    status, stream = editor.ask("/api/images", fields)
    assert status == 200, stream
    [content] = re.findall(r'"image": ?"([^"]{100,})"', stream)
    assert opened(content).tobytes() == wanted.tobytes()


def test_the_transparent_part_of_one_image_is_repainted_whatever_the_model_reads(editor: Running) -> None:
    image = toy_flux2.pictures()[0].convert("RGBA")
    image.paste((0, 0, 0, 0), (0, 0, 16, 16))
    before, after = (np.asarray(picture.convert("RGB"), dtype=int) for picture in (image, edited(editor, image)))
    changed = (before != after).any(axis=2)
    assert changed[:16, :16].any()
    assert not changed[32:, 32:].any()


def test_references_are_work(editor: Running) -> None:
    """As much as an image of the model's size, in every step, of the second pass too."""
    asked: dict[str, Any] = {"prompt": "x", "steps": 2, "width": 32, "height": 32}
    for second_pass, steps in (({}, 2), ({"hires": 1.5, "hires_steps": 3}, 5)):
        plain, more = (
            submit(editor.engine, "txt2img", {**asked, **second_pass, "reference": tuple(pictures)}).work
            for pictures in ((), toy_flux2.pictures())
        )
        assert more - plain == pytest.approx(2 * 2 * steps * 1024**2 / 1e6)  # branches, references and steps


def test_requests_with_other_references_at_the_same_time(editor: Running) -> None:
    """Each has the image that it has alone."""
    first, second = toy_flux2.pictures()
    asked: dict[str, Any] = {"steps": 2, "width": 32, "height": 32, "seed": 1}
    all_references = [(first,), (second,), (first, second), ()]
    tickets = [
        submit(editor.engine, "txt2img", {"prompt": "x", **asked, "reference": pictures}) for pictures in all_references
    ]
    for pictures, result in zip(all_references, finished(*tickets), strict=True):
        [wanted] = editor.engine.library.model.txt2img("x", reference=pictures, **asked)
        assert np.abs(np.asarray(result.image, dtype=int) - np.asarray(wanted, dtype=int)).max() <= 1


def test_an_edit_by_a_model_that_was_never_loaded(small_path: Path, tmp_path: Path) -> None:
    """Whether it reads references is told by the header of its file; a file that changes is read again."""
    library = library_of(small_path, models=str(tmp_path))
    klein = toy_flux2.write_whole(tmp_path)
    assert [library.inputs(name).references for name in (None, klein.stem)] == [False, True]
    klein.write_bytes(b"no checkpoint")
    assert not library.inputs(klein.stem).references


def test_a_hash_is_of_a_files_second_mebibyte_as_in_a1111(small_path: Path, tmp_path: Path) -> None:
    content = b"".join(number.to_bytes(4) for number in range(2**20))
    (tmp_path / "large.safetensors").write_bytes(content)
    digest = hashlib.sha256(content[2**20 : 2**20 + 2**16]).hexdigest()[:8]
    title = library_of(small_path, models=str(tmp_path)).title("models", "large")
    assert title == (f"large.safetensors [{digest}]", digest)


# ---- what is refused ------------------------------------------------------------------------------------------------


def test_an_error_has_its_status_and_tells_when_to_try_again() -> None:
    errors = {Full: 429, TooLarge: 413, Stopping: 503, TimeoutError: 504, ValueError: 422, MemoryError: 503}
    for kind, status in (*errors.items(), (KeyError, 500)):
        response = answer(kind("x"))
        about = json.loads(bytes(response.body))["error"]
        assert response.status_code == status
        assert response.headers.get("retry-after") == ("1" if status in (429, 503) else None)
        assert about["type"] == ("invalid_request_error" if status < 500 else "server_error")


def bomb(side: int) -> bytes:
    """A PNG of a few kilobytes that says it has side x side pixels."""

    def chunk(name: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))

    head = struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(bytes(10**6))) + chunk(b"IEND", b"")
    )


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"[]",
        b"null",
        b"\xff\xfe",
        b'{"prompt": "x", "scale": NaN, "cfg_scale": NaN}',
        b'{"prompt": "x", "scale": 1e999, "cfg_scale": 1e999}',
        b'{"prompt": "x", "steps": -Infinity}',
        b'{"prompt": "x", "seed": ' + b"9" * 5000 + b"}",
        b'{"prompt": "x", "seed": ' + b"9" * 400 + b"}",
        b'{"prompt": "x", "seed": -2}',
        b'{"prompt": "x", "steps": 1.5}',
        b'{"prompt": ["x"]}',
        b'{"prompt": {"a": ' + b"[" * 100_000 + b"]" * 100_000 + b"}}",
        b'{"prompt": "' + b"x " * 200_000 + b'"}',
        b'{"prompt": "\\ud800"}',
        b'{"prompt": "x", "negative_prompt": "\\udfff"}',
        b'{"prompt": "x", "steps": 0}',
        b'{"prompt": "x", "n": 99, "batch_size": 99}',
        b'{"prompt": "x", "width": 1000000, "size": "65536x65536"}',
        b'{"prompt": "x", "width": 7, "size": "7x7"}',
    ],
    ids=lambda content: repr(content[:40]),
)
@pytest.mark.parametrize("path", [OPENAI, TXT2IMG])
def test_hostile_json_is_refused_in_one_line(server: Running, path: str, content: bytes) -> None:
    assert server.refused(path, content)[0] == 422


@pytest.mark.parametrize(
    "image",
    [
        "",
        "x",
        "http://127.0.0.1/a.png",
        "/etc/passwd",
        "file:///etc/passwd",
        b64(b"GIF89a"),
        b64(picture()[:50]),
        b64(bomb(20_000)),
        b64(bomb(2**31 - 1)),
        "data:image/png;base64,!!!",
        5,
    ],
    ids=lambda image: str(image)[:30],
)
def test_hostile_images_are_refused_in_one_line(server: Running, image: Any) -> None:
    for path, fields in ((IMG2IMG, {"init_images": [image]}), ("/sdapi/v1/png-info", {"image": image})):
        assert server.refused(path, {"prompt": "x", **fields})[0] == 422
    assert server.refused(IMG2IMG, {"init_images": [b64(picture())], "mask": image, **SMALL})[0] == 422


def test_forms_that_are_none_and_uploads_stay_in_memory(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file of a form that is larger than what Starlette keeps in memory does not reach the disk."""
    assert server.refused("/v1/images/edits", b"{}")[0] == 422
    assert server.refused("/v1/images/edits", b"--x\r\n", **{"Content-Type": "multipart/form-data"})[0] == 422

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("a file was made")

    monkeypatch.setattr(tempfile, "TemporaryFile", refuse)
    monkeypatch.setattr(tempfile, "NamedTemporaryFile", refuse)
    monkeypatch.setattr(tempfile, "mkstemp", refuse)
    noise = io.BytesIO()
    Image.effect_noise((32, 32), 100).convert("RGB").save(noise, "PNG")
    upload = noise.getvalue() + bytes(2**20 - 2**16)  # the decoder stops at the image's end
    body, head = form(("prompt", b"x"), ("steps", b"2"), ("image", upload))
    status, answer = server.ask("/v1/images/edits", body, **head)
    assert status == 200, answer


def test_a_body_that_is_too_large_gets_413(server: Running) -> None:
    status, message = server.refused(TXT2IMG, b" " * (2**20 + 1))
    assert (status, message) == (413, "the request is too large, expected at most 1 MiB")
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    connection.request("POST", TXT2IMG, iter([b" " * 2**19] * 4), encode_chunked=True)  # without a length
    assert connection.getresponse().status == 413
    connection.close()


def test_other_sites_and_other_names_are_refused(server: Running, start: Start) -> None:
    """DNS rebinding comes with another name, a page of another site with its origin."""
    assert server.ask("/v1/models", Host="evil.example")[0] == 403
    assert server.ask("/v1/models", Host="localhost.evil.example:1")[0] == 403
    assert server.ask("/v1/models", Host="[")[0] == 403
    for host in ("localhost", "127.0.0.1:1", "[::1]:7860", "192.168.1.5"):
        assert server.ask("/v1/models", Host=host)[0] == 200
    for origin in ("http://evil.example", "null", f"http://127.0.0.1:{server.port + 1}"):
        assert server.ask(TXT2IMG, {}, Origin=origin)[0] == 403
    assert server.ask(TXT2IMG, {}, **{"Sec-Fetch-Site": "cross-site"})[0] == 403
    assert server.ask("/sdapi/v1/options", {}, Origin=server.url)[0] == 200
    status, _ = server.ask(TXT2IMG, method="OPTIONS", Origin="http://evil.example")
    assert status in (404, 405)  # no CORS: 404 is the page's answer, where there is one
    assert start(allow_host="images.example").ask("/v1/models", Host="images.example")[0] == 200


def test_who_waits_is_told_when_the_time_is_over_though_nothing_runs(library: Library) -> None:
    engine = engine_of(library, timeout=0.1)  # whose thread is not started
    ticket = submit(engine, "txt2img", {"prompt": "an apple", **SMALL})

    async def wait() -> None:
        async for _ in changes([ticket], silence=0.02):
            pass

    asyncio.run(asyncio.wait_for(wait(), 30))
    assert isinstance(ticket.error, TimeoutError)
    assert engine.queue == []


def test_health_says_when_a_step_is_compiled(small_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answers: list[Any] = []

    def timed(*args: Any) -> float:  # in the compilation, which ends here
        answers.append(server.ask("/healthz"))
        raise RuntimeError("no compiler")

    monkeypatch.setattr(compilation, "_timed", timed)
    server = Running(Library(LoadOptions(ckpt=small_path, device="cpu", compile="step"), ServeOptions()))
    try:
        assert server.ask("/healthz") == (200, {"status": "ok"})
        assert server.ask(TXT2IMG, {"prompt": "an apple", **SMALL})[0] == 200
        assert answers == [(200, {"status": "ok", "engine": "compiling"})]
        assert server.ask("/healthz") == (200, {"status": "ok"})
    finally:
        server.close()


def test_the_key(start: Start) -> None:
    server = start(api_key=KEY)
    basic = base64.b64encode(f"me:{KEY}".encode()).decode()
    assert server.ask("/healthz") == (200, {"status": "ok"})
    for path in ("/v1/models", "/metrics", "/docs", "/openapi.json", "/sdapi/v1/options", "/"):
        assert server.refused(path, None)[0] == 401
    for header in ("Bearer x", KEY, f"Token {KEY}", "Basic !", "Basic " + base64.b64encode(KEY.encode()).decode()):
        assert server.ask("/v1/models", Authorization=header)[0] == 401
    for header in (f"Bearer {KEY}", f"Basic {basic}"):
        assert server.ask("/v1/models", Authorization=header)[0] == 200
    openai = pytest.importorskip("openai")
    assert list(openai.OpenAI(base_url=f"{server.url}/v1", api_key=KEY).models.list())


def test_metrics_and_the_description_of_the_api(server: Running) -> None:
    assert server.ask(OPENAI, {"prompt": "x", "size": "32x32", "steps": 1})[0] == 200
    server.ask("/a/random/path")
    _, text = server.ask("/metrics")
    numbers = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    assert float(numbers["ldm_lite_images_total"]) == server.engine.totals["images"] > 0
    assert float(numbers["ldm_lite_done_total"]) > 0
    assert float(numbers[f'ldm_lite_http_requests_total{{path="{OPENAI}",status="200"}}']) > 0
    assert "random" not in text
    described = server.ask("/openapi.json")[1]["paths"]
    assert "steps" in described[OPENAI]["post"]["requestBody"]["content"]["application/json"]["schema"]["properties"]
    assert {"/v1/images/edits", TXT2IMG, IMG2IMG, "/sdapi/v1/png-info"} <= set(described)
    assert server.ask("/docs")[0] == 200


def test_stopping_answers_what_runs_and_what_waits(start: Start) -> None:
    server, statuses = start(), dict[int, int]()

    def ask(steps: int) -> None:
        statuses[steps] = server.ask(TXT2IMG, {"prompt": "x", **SMALL, "steps": steps})[0]

    threads = [threading.Thread(target=ask, args=(steps,)) for steps in (150, 149)]
    for thread in threads:
        thread.start()
        wait_for(lambda: [t for t in server.engine.running if t.state == "running"], "a request that runs")
    wait_for(lambda: server.engine.waiting, "a request that waits")
    server.engine.stop()
    server.close()
    for thread in threads:
        thread.join()
    assert statuses == {150: 200, 149: 503}
