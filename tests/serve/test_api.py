"""The API of the page, over a real socket: streams of events, interrupting, settings, hints."""

import contextlib
import http.client
import itertools
import json
import re
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from PIL import Image, ImageDraw
from PIL.PngImagePlugin import PngInfo
from serving import Running, b64, opened, wait
from waiting import wait_for

pytestmark = pytest.mark.extra
pytest.importorskip("uvicorn")
pytest.importorskip("fastapi")
pytest.importorskip("prometheus_client")

SMALL = {"prompt": "a cat", "seed": "3", "steps": 2, "width": 32, "height": "32"}
Events = list[tuple[str, dict[str, Any]]]


@pytest.fixture(scope="module")
def server(library: Any) -> Iterator[Running]:
    running = Running(library, max_steps=1000)
    yield running
    running.close()


def events(text: str) -> Events:
    blocks = [block for block in text.split("\n\n") if block and not block.startswith(":")]
    matches = [re.fullmatch(r"event: (\w+)\ndata: (.*)", block) for block in blocks]
    return [(match[1], json.loads(match[2])) for match in matches if match]


def make(server: Running, **values: Any) -> Events:
    status, text = server.ask("/api/images", SMALL | values)
    assert status == 200, text
    return events(text)


class Stream:
    """A request whose events are read one by one."""

    def __init__(self, server: Running, **values: Any) -> None:
        self.connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
        self.connection.request("POST", "/api/images", json.dumps(SMALL | values))
        self.response = self.connection.getresponse()
        assert self.response.getheader("content-type", "").startswith("text/event-stream")
        self.key = self.until(lambda kind, _: kind == "queued")["id"]

    def until(self, wanted: Callable[[str, dict[str, Any]], bool]) -> dict[str, Any]:
        while line := self.response.readline().decode():
            if line.startswith("event: "):
                kind, content = line[7:].strip(), json.loads(self.response.readline()[6:])
                if wanted(kind, content):
                    return dict(content)
        raise AssertionError("the stream has ended")

    def close(self) -> None:
        self.response.close()
        self.connection.close()


@pytest.fixture
def open_stream(server: Running) -> Iterator[Callable[..., Stream]]:
    """-> a function of a request's values that sends it; the streams are closed at the end."""
    with contextlib.ExitStack() as stack:
        yield lambda **values: stack.enter_context(contextlib.closing(Stream(server, **values)))


def test_images_are_those_of_the_other_interfaces(server: Running) -> None:
    stream = make(server, batch_size=2)
    kinds = [kind for kind, _ in stream]
    assert kinds[0] == "queued"
    assert kinds[-1] == "done"
    assert stream[0][1]["images"] == 2
    images = [content for kind, content in stream if kind == "image"]
    assert [image["seed"] for image in images] == ["3", "4"]
    assert (images[0]["width"], images[0]["height"]) == (32, 32)
    assert opened(images[0]["image"]).info["parameters"] == images[0]["parameters"]
    arguments = {"prompt": "a cat", "seed": 3, "steps": 2, "width": 32, "height": 32, "batch_size": 2}
    _, answer = server.ask("/sdapi/v1/txt2img", arguments)
    assert [opened(image["image"]).tobytes() for image in images] == [
        opened(text).tobytes() for text in answer["images"]
    ]


def test_every_progress_is_told_once(server: Running) -> None:
    steps = [content for kind, content in make(server, steps=8) if kind == "progress"]
    assert all(first != second for first, second in itertools.pairwise(steps))
    shares = [content["share"] for content in steps if content["state"] == "running"]
    assert shares == sorted(shares)


def test_a_plot_ends_with_its_sheet(server: Running) -> None:
    stream = make(server, x={"option": "scale", "values": "1, 3"}, y={"option": "replace", "values": "cat, dog"})
    assert [kind for kind, _ in stream if kind in ("image", "plot", "done")] == [*["image"] * 4, "plot", "done"]
    sheet = next(content for kind, content in stream if kind == "plot")
    assert 'X Type: scale, X Values: "1, 3"' in sheet["parameters"]
    assert sheet["width"] > 64


def test_interrupting_keeps_what_is_there_and_closing_gives_up(
    server: Running, open_stream: Callable[..., Stream]
) -> None:
    stream = open_stream(steps=1000)
    waiting = open_stream(batch_size=2, height=64)
    assert waiting.until(lambda kind, _: kind == "progress") == {"state": "queued", "before": 1}
    stream.until(lambda kind, content: kind == "progress" and content["state"] == "running")
    picture = opened(stream.until(lambda kind, _: kind == "preview")["image"])
    assert (picture.format, picture.size) == ("JPEG", (32, 32))
    assert server.refused("/api/images/nothing/interrupt", {})[0] == 404
    assert server.ask(f"/api/images/{stream.key}/interrupt", {}) == (200, {})
    assert stream.until(lambda kind, _: kind == "image")["seed"] == "3"
    assert stream.until(lambda kind, _: kind == "done")["interrupted"] is True
    assert waiting.until(lambda kind, _: kind == "done")["images"] == 2
    assert server.refused(f"/api/images/{stream.key}/interrupt", {})[0] == 404  # it has ended
    stream = open_stream(steps=1000)
    stream.until(lambda kind, content: kind == "progress" and content["state"] == "running")
    before = server.engine.totals["cancelled"]
    stream.close()
    assert make(server, batch_size=2)[-1][1]["images"] == 2
    assert server.engine.totals["cancelled"] == before + 1


def test_streams_that_wait_are_not_looked_at(start: Callable[..., Running], monkeypatch: pytest.MonkeyPatch) -> None:
    """240 of them took a third of a processor, looking ten times a second."""
    from ldm_lite.serve import api

    server, go, looks, progress = start(), threading.Event(), list[int](), api._progress
    monkeypatch.setattr(server.engine, "_denoise", lambda run: not go.wait(60))
    monkeypatch.setattr(api, "_progress", lambda *args: looks.append(1) or progress(*args))
    connections = [http.client.HTTPConnection("127.0.0.1", server.port, timeout=60) for _ in range(6)]
    for connection in connections:
        connection.request(
            "POST", "/api/images", json.dumps({"prompt": "x", "steps": "2", "width": "32", "height": "32"})
        )
    responses = [connection.getresponse() for connection in connections]
    wait_for(lambda: len(server.engine.queue) == 6 and len(looks) >= 6, "all requests")
    time.sleep(3 * api.LOOK)
    before = len(looks)
    time.sleep(6 * api.LOOK)
    assert len(looks) == before
    go.set()
    assert all(b"event: done" in response.read() for response in responses)
    for connection in connections:
        connection.close()


def test_a_silent_stream_is_kept_open(
    server: Running, open_stream: Callable[..., Stream], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ldm_lite.serve.http.KEEP_ALIVE", 0.3)
    stream, start = open_stream(steps=1000), time.monotonic()
    waiting = open_stream(height=64)
    lines = (line for line in waiting.response if line.startswith(b":"))
    assert len(list(itertools.islice(lines, 3))) == 3
    assert time.monotonic() - start > 0.9  # one after each silence, not one after each look
    server.ask(f"/api/images/{stream.key}/interrupt", {})
    waiting.until(lambda kind, _: kind == "done")


def test_a_plot_ends_with_the_first_error(server: Running, open_stream: Callable[..., Stream]) -> None:
    stream = open_stream(steps=1000)  # behind which the plot waits
    plot = open_stream(x={"option": "seed", "values": "1-4"})
    plot.until(lambda kind, content: kind == "progress" and content["state"] == "queued")
    server.engine.cancel(server.engine.queue[2], ValueError("got `steps`, expected none"))
    error = {"message": "got `steps`, expected none", "param": "steps", "status": 422}
    assert plot.until(lambda kind, _: kind == "error") == error
    server.ask(f"/api/images/{stream.key}/interrupt", {})
    stream.until(lambda kind, _: kind == "done")
    assert server.engine.waiting == 0


@pytest.mark.parametrize(
    ("values", "field"),
    [
        ({"steps": 0}, "steps"),
        ({"steps": "many"}, "steps"),
        ({"width": 4096, "height": 4096}, "width"),
        ({"batch_size": 100}, "batch_size"),
        ({"prompt": ""}, "prompt"),
        ({"task": "img2img"}, "init_img"),
        ({"task": "print"}, "task"),
        ({"loras": [0] * 17}, "loras"),
        ({"x": {"option": "steps", "values": "1, x"}}, "x"),
        ({"x": {"option": "steps", "values": "1-300"}}, None),  # more than the queue takes
    ],
)
def test_errors_name_their_field(server: Running, values: dict[str, Any], field: str | None) -> None:
    status, message = server.refused("/api/images", SMALL | values)
    assert status == (422 if field else 429), message
    assert server.ask("/api/images", SMALL | values)[1]["error"]["param"] == field
    assert server.engine.waiting == 0  # nothing of a plot stays behind


def test_a_plot_is_one_request_for_the_budget(library: Any) -> None:
    server = Running(library, max_work=1, max_steps=1000)
    try:
        size = {"width": 64, "height": 64, "steps": 100}
        assert server.ask("/api/images", SMALL | size | {"y": {"option": "seed", "values": "1"}})[0] == 200
        asked = SMALL | size | {"y": {"option": "seed", "values": "1, 2"}}
        status, answer = server.ask("/api/images", asked)
        assert (status, answer["error"]["param"]) == (422, "y")
        assert "max_work" in answer["detail"]
        assert server.engine.waiting == 0
    finally:
        server.close()


@pytest.mark.slow
def test_a_plot_that_is_not_read_in_time_leaves_nothing(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    submit, refused, submitted = server.engine.submit, threading.Event(), list[Any]()

    def slow(*wanted: Any) -> Any:
        submitted.append(submit(*wanted))
        assert refused.wait(30)
        return submitted[-1]

    monkeypatch.setattr(server.engine, "submit", slow)
    monkeypatch.setattr("ldm_lite.serve.http.READING", 2.0)
    axes = {"x": {"option": "seed", "values": "1-4"}, "steps": 1000}
    assert server.refused("/api/images", SMALL | axes)[0] == 503
    refused.set()
    assert wait(submitted[0])
    assert [ticket.state for ticket in submitted] == ["cancelled"]


def test_settings_and_hints(server: Running) -> None:
    [image] = [content for kind, content in make(server, negative_prompt="red") if kind == "image"]
    status, answer = server.ask("/api/settings", {"image": image["image"]})
    assert status == 200
    assert answer["text"] == image["parameters"]
    expected = {"prompt": "a cat", "negative_prompt": "red", "seed": "3", "steps": "2", "width": "32", "model": "small"}
    assert expected.items() <= answer["values"].items()
    info = PngInfo()
    info.add_text("parameters", image["parameters"].replace("Model: small", "Model: another"))
    of_other_program = b64(Image.new("RGB", (8, 8)), pnginfo=info)
    assert "model" not in server.ask("/api/settings", {"image": of_other_program})[1]["values"]
    assert "holds no text" in server.refused("/api/settings", {"image": b64(Image.new("RGB", (8, 8)))})[1]
    square = Image.new("RGB", (64, 48), "white")
    ImageDraw.Draw(square).rectangle((16, 16, 48, 32), "black")
    status, answer = server.ask("/api/hint", {"image": b64(square), "preprocess": "canny:50:100"})
    hint = opened(answer["image"])
    assert (hint.size, hint.getpixel((4, 4))) == ((64, 48), (0, 0, 0))
    assert 60 < hint.convert("L").histogram()[255] < 200  # the square's edges
    for preprocess in ("../x", "inpaint"):  # which needs a transparent part
        assert server.refused("/api/hint", {"image": b64(square), "preprocess": preprocess})[0] == 422


def test_the_page_is_served_with_a_strict_policy(server: Running) -> None:
    def get(path: str) -> tuple[http.client.HTTPResponse, str]:
        with contextlib.closing(http.client.HTTPConnection("127.0.0.1", server.port)) as connection:
            connection.request("GET", path)
            response = connection.getresponse()
            return response, response.read().decode()

    response, page = get("/")
    policy = response.getheader("content-security-policy", "")
    assert policy.startswith("default-src 'none'; script-src 'self'; style-src 'self';")
    assert "unsafe" not in policy
    assert "http" not in policy
    assert response.getheader("cache-control") == "no-cache"
    assert not re.search(r"<style|<script(?! [^>]*src=)|\bstyle=|\bon\w+=|https?://", page)
    files = re.findall(r'"(page/[^"]+)"', page)
    assert len(files) >= 6
    for path in files:
        response, content = get("/" + path)
        assert response.status == 200, path
        assert "immutable" in response.getheader("cache-control", "")
        assert response.getheader("content-security-policy") == policy
        assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)", content)
    folder = "/" + files[0].rpartition("/")[0]
    for path in ("/page/old/main.js", f"{folder}/..%2fapi.py", f"{folder}/index.html", "/page/index.html"):
        assert get(path)[0].status == 404
