"""What the server is protected against: bodies, pictures, prompts and clients that cost more than they should."""

import contextlib
import io
import itertools
import json
import logging
import os
import socket
import subprocess
import sys
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator
from http.client import HTTPConnection
from typing import Any

import numpy as np
import pytest
from PIL import ExifTags, Image
from PIL.PngImagePlugin import PngInfo
from serving import Full, Running, engine_of, finished, form, library_of, submit
from waiting import wait_for

pytest.importorskip("fastapi")
pytest.importorskip("uvicorn")
pytest.importorskip("prometheus_client")

from ldm_lite import Control
from ldm_lite.cli.task_options import Img2imgOptions, InpaintOptions
from ldm_lite.serve import http, queue, server
from ldm_lite.serve.http import Refused, open_bytes, validated
from ldm_lite.serve.ledger import ACCOUNT, CLIENT, Account, Ledger, TooLarge
from ldm_lite.serve.ticket import Ticket, report

OPENAI, TXT2IMG, IMG2IMG = "/v1/images/generations", "/sdapi/v1/txt2img", "/sdapi/v1/img2img"
EXTRAS = "/sdapi/v1/extra-batch-images"
SMALL: dict[str, Any] = {"prompt": "x", "steps": 2, "width": 32, "height": 32}


@pytest.fixture(scope="module")
def running(library: Any) -> Iterator[Running]:
    server = Running(library)
    yield server
    server.close()


@pytest.fixture
def as_client() -> Iterator[Callable[[str], Any]]:
    token = CLIENT.set("")
    yield CLIENT.set
    CLIENT.reset(token)


@pytest.fixture
def faults(caplog: pytest.LogCaptureFixture) -> Iterator[Callable[[], list[str]]]:
    """-> a function that returns what the log calls errors of the server, uvicorn's too."""
    logging.getLogger("uvicorn").addHandler(caplog.handler)
    caplog.set_level(logging.INFO, logger="ldm_lite.access")
    yield lambda: [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR]
    logging.getLogger("uvicorn").removeHandler(caplog.handler)


def talk(port: int, *parts: bytes) -> bytes:
    """Send parts, each after some of an answer to the one before, and return all until the server closes."""
    answer = b""
    with socket.create_connection(("127.0.0.1", port), timeout=20) as client:
        for part in parts:
            client.sendall(part)
            answer += client.recv(10_000)
        while content := client.recv(10_000):
            answer += content
    return answer


def picture(side: int = 32, kind: str = "PNG", mode: str = "RGB", **more: Any) -> bytes:
    file = io.BytesIO()
    Image.new(mode, (side, side)).save(file, kind, **more)
    return file.getvalue()


# ---- bodies ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", ["0", "[]", "{}", '""', "1.5", "null", '{"a":0}'])
@pytest.mark.parametrize(("path", "name"), [(EXTRAS, "imageList"), (IMG2IMG, "init_images"), (TXT2IMG, "other")])
def test_a_list_of_wrong_values_takes_no_memory(value: str, path: str, name: str, running: Running) -> None:
    """An error was built for each of them, a kilobyte each; these bodies have up to the MiB that is allowed."""
    count = 500_000 // (len(value) + 1)
    body = f'{{"{name}":[{",".join([value] * count)}]}}'.encode()
    tracemalloc.start()
    try:
        assert running.refused(path, body)[0] == 422
        assert tracemalloc.get_traced_memory()[1] < 10 * len(body)
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    "content",
    [
        {"prompt": ["x"] * 2000},
        {"prompt": "x", "other": ["x"] * 2000},
        {"prompt": "x", "other": {str(i): 0 for i in range(2000)}},
        {"prompt": "x", "alwayson_scripts": {"a": {"args": [0] * 2000}}},
        {"prompt": "x", "k" * 1000: 1},
        {"prompt": "x", "sampler_name": "e" * 100_000, "sampler": "e" * 100_000},
        {"prompt": "x", "other": ["e" * 100_000]},
        {"prompt": "x", "other": {"a": "e" * 100_000}},
        {"prompt": "x", "other": json.loads("[" * 40 + "]" * 40)},
        {"prompt": "x", "other": 2**64},
    ],
    ids=lambda content: str(content)[:40],
)
def test_what_is_too_long_or_too_deep_is_named(content: dict[str, Any], running: Running) -> None:
    for path in (OPENAI, TXT2IMG):
        status, message = running.refused(path, content)
        assert status == 422
        assert "expected" in message


def test_a_wrong_value_is_not_sent_back(running: Running) -> None:
    for path, name in ((TXT2IMG, "steps"), (OPENAI, "steps"), (IMG2IMG, "init_images")):
        status, message = running.refused(path, {"prompt": "x", name: {"a-secret-value": "a-secret-value"}})
        assert status == 422
        assert name in message
        assert "secret" not in message
    _, answer = running.ask(TXT2IMG, SMALL | {"unknown": "a-secret-value"})
    assert "secret" not in json.dumps(answer)
    assert json.loads(answer["info"])["ignored"] == ["unknown"]


def test_pictures_may_be_long_at_any_depth() -> None:
    long = "A" * 200_000
    unit = {"controlnet": {"args": [{"image": {"image": long, "mask": long}}]}}
    assert validated(http.Body, {"init_images": [long], "alwayson_scripts": unit})
    with pytest.raises(Refused, match="prompt: expected at most 65536 characters"):
        validated(http.Body, {"prompt": long})


def test_a_body_that_does_not_come_gets_408(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "READING", 0.2)
    with socket.create_connection(("127.0.0.1", running.port), timeout=20) as client:
        client.sendall(f"POST {TXT2IMG} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n{{".encode())
        assert client.recv(1000).startswith(b"HTTP/1.1 408 ")


CHUNKED = "POST {} HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"


def test_a_client_that_goes_while_it_sends_is_no_fault(running: Running, faults: Any, caplog: Any) -> None:
    with socket.create_connection(("127.0.0.1", running.port), timeout=20) as client:
        client.sendall(f"POST {TXT2IMG} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n{{".encode())
    wait_for(lambda: any(f"POST {TXT2IMG} 499" in line for line in caplog.messages), "its line in the log")
    assert faults() == []


def test_what_is_no_http_gets_400_or_is_closed(running: Running, faults: Any) -> None:
    for content in (b"\x16\x03\x01\r\n\r\n", CHUNKED.format(TXT2IMG).encode() + b"ZZ\r\n"):
        head, _, body = talk(running.port, content).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 400 Bad Request")
        assert json.loads(body)["detail"].startswith("the request is not valid HTTP/1.1: illegal")
    both = talk(running.port, CHUNKED.format("/v1/models").encode() + b"5\r\n12345\r\n", b"ZZ\r\n")
    assert both.startswith(b"HTTP/1.1 405 ")
    assert both.count(b"HTTP/1.1") == 1
    assert faults() == []


def test_a_body_of_tiny_chunks_is_refused(running: Running) -> None:
    """The event loop reads them, which stood still for minutes; larger ones may be as many."""
    for size, status in ((1, b"400"), (100, b"422")):
        chunk = b"%x\r\n%s\r\n" % (size, b" " * size)
        answer = talk(
            running.port, CHUNKED.format(TXT2IMG).encode() + chunk * 2000 + b"0\r\n\r\nGET / HTTP/1.1\r\n\r\n"
        )
        assert answer.startswith(b"HTTP/1.1 " + status)


def test_what_is_sent_before_an_answer_has_a_limit(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    go, cancelled = threading.Event(), running.engine.totals["cancelled"]
    monkeypatch.setattr(server, "LOOK", 0.05)
    monkeypatch.setattr(running.engine, "_denoise", lambda units: go.wait(100))
    body = json.dumps(SMALL)
    with socket.create_connection(("127.0.0.1", running.port), timeout=20) as client:
        head = f"POST {TXT2IMG} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
        with contextlib.suppress(OSError):  # it may be closed while we send
            client.sendall(head.encode() + body.encode() + b"x" * 2**21)
        wait_for(lambda: running.engine.totals["cancelled"] > cancelled, "the request's end")
    go.set()


def test_stopping_does_not_wait_for_the_rest_of_a_body(start: Callable[..., Running], faults: Any) -> None:
    server = start(grace=0.0)
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as client:
        client.sendall(f"POST {TXT2IMG} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n{{".encode())
        wait_for(lambda: any(rival.cycle for rival in server.server.server_state.connections), "the request's head")
        server.close()
        answer = client.recv(10_000)
    assert answer.startswith(b"HTTP/1.1 503 ")
    assert b"the server is being stopped" in answer
    assert faults() == []


def test_a_full_queue_is_no_fault(running: Running, faults: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **more: Any) -> None:
        raise Full("the queue is full")

    monkeypatch.setattr(running.engine, "submit", refuse)
    assert running.refused(TXT2IMG, SMALL) == (429, "the queue is full")
    assert running.ask("/healthz")[0] == 200
    assert faults() == []


def test_bodies_that_come_at_once_have_a_limit(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    ledger = running.engine.ledger
    monkeypatch.setattr(ledger, "share", 8)
    status, message = running.refused(TXT2IMG, SMALL)
    assert status == 413
    assert "the request needs about 0 MiB, expected at most 0 (`max_memory`)" in message
    monkeypatch.setattr(ledger, "share", 30)
    assert running.refused("/sdapi/v1/png-info", b'{"image": "........"}')[0] == 413, "it is held twice when it is read"
    monkeypatch.undo()
    wait_for(lambda: not running.server.server_state.tasks, "the end of both requests")
    with Account(ledger, "127.0.0.1") as account:
        account.hold("body", ledger.share - 8)
        assert running.refused(TXT2IMG, SMALL)[0] == 429
    assert running.ask(TXT2IMG, SMALL)[0] == 200


def test_a_large_body_is_not_read_for_a_full_queue(start: Callable[..., Running], monkeypatch: Any) -> None:
    server = start(max_queue=2)
    monkeypatch.setattr(type(server.engine), "waiting", 2)
    monkeypatch.setattr(server.engine, "queue", [submit(engine_of(server.engine.library), "txt2img", SMALL)])
    server.engine.queue[0].client = "127.0.0.1"
    with socket.create_connection(("127.0.0.1", server.port), timeout=20) as client:  # the body does not come
        client.sendall(f"POST {TXT2IMG} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100000\r\n\r\n".encode())
        assert client.recv(1000).startswith(b"HTTP/1.1 429 ")
    server.engine.queue.clear()


# ---- pictures -------------------------------------------------------------------------------------------------------


def test_a_large_picture_is_reduced_when_it_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    for mode in ("RGB", "RGBA", "L", "P", "1", "I;16"):
        image = open_bytes(picture(200, mode=mode), "image", 100 * 100)
        assert image.size == (200, 200)
        image = open_bytes(picture(300, mode=mode), "image", 100 * 100)
        assert image.size == (150, 150)
    monkeypatch.setattr(http, "LARGEST", 100 * 100)
    with pytest.raises(ValueError, match="expected at most"):
        open_bytes(picture(500), "image", 100 * 100)


def test_a_picture_is_reduced_in_bands(monkeypatch: pytest.MonkeyPatch) -> None:
    """Upright, with 8 bits and its text, as if in one piece."""
    pixels = np.random.default_rng(0).integers(0, 255, (50, 75, 4), dtype=np.uint8)
    image = Image.fromarray(pixels).resize((301, 203))
    monkeypatch.setattr(http, "BAND", 301 * 3 * 5)
    for mode in ("RGB", "L", "RGBA"):
        file, converted = io.BytesIO(), image.convert(mode)
        exif, text = Image.Exif(), PngInfo()
        exif[ExifTags.Base.Orientation] = 6
        text.add_text("parameters", "a text")
        converted.save(file, "PNG", exif=exif, pnginfo=text)
        reduced = open_bytes(file.getvalue(), "image", 2000)
        expected = converted.reduce(3).transpose(Image.Transpose.ROTATE_270)
        assert (reduced.mode, reduced.info["parameters"]) == (mode, "a text")
        assert np.array_equal(np.asarray(reduced), np.asarray(expected))
    file = io.BytesIO()
    Image.fromarray(np.full((300, 300), 65535, dtype=np.uint16)).save(file, "PNG")
    assert open_bytes(file.getvalue(), "image", 2000).getextrema() == (255, 255)


def test_what_decoding_needs_is_held_while_it_lasts() -> None:
    """A WebP's decoder takes 22 bytes a pixel, a PNG's the 4 of the pixels."""
    account = Account(Ledger(2**20), "a")
    token = ACCOUNT.set(account)
    try:
        with account:
            open_bytes(picture(200), "image", 2**20)
            assert account.parts == {"pictures": 4 * 200 * 200, "decoding": 0}
            with pytest.raises(TooLarge, match=r"expected at most 1 \(`max_memory`\)"):
                open_bytes(picture(200, "WEBP"), "image", 2**20)
    finally:
        ACCOUNT.reset(token)


def test_decoding_has_a_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    """A progressive JPEG with scans upon scans: 33 bytes took 2 ms each."""
    content = picture(512, "JPEG", progressive=True)
    scan = content[content.rfind(b"\xff\xda") : -2]
    monkeypatch.setattr(http, "DECODING", 0.2)
    start = time.process_time()
    with pytest.raises(ValueError, match=r"image: (is not an image that can be read|.*scans)"):
        open_bytes(content[:-2] + scan * (3 * 10**6 // len(scan)) + content[-2:], "image", 2**20)
    assert time.process_time() - start < 5


def test_pictures_that_wait_have_a_limit(library: Any) -> None:
    """Of bytes: 2 MiB; a picture of 512 x 512 has 1."""
    engine = engine_of(library, max_memory=2)
    request = {"prompt": "x", "init_img": (Image.new("RGB", (512, 512)),), "width": 32, "height": 32}
    submit(engine, "img2img", request)
    with pytest.raises(Full, match=r"your other requests hold 1 MiB: try again later"):
        submit(engine, "img2img", request)
    with pytest.raises(TooLarge, match=r"needs about 3 MiB, expected at most 2"):
        submit(engine, "inpaint", request | {"init_img": request["init_img"] * 2, "mask": request["init_img"]})


def test_health_is_answered_while_all_threads_read(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, go = threading.Semaphore(0), threading.Event()

    def hang(*args: Any) -> Any:
        begun.release()
        assert go.wait(60)
        raise ValueError("the end")

    monkeypatch.setattr("ldm_lite.serve.a1111.routes.open_base64", hang)
    threads = [threading.Thread(target=running.ask, args=("/sdapi/v1/png-info", {"image": ""})) for _ in range(60)]
    for thread in threads:
        thread.start()
    for _ in range(http.READERS // 2):  # a client has no more
        assert begun.acquire(timeout=20)
    assert running.ask("/healthz")[0] == 200
    assert running.ask("/sdapi/v1/progress")[0] == 200
    assert not begun.acquire(blocking=False)
    go.set()
    for thread in threads:
        thread.join()


def test_a_thread_is_its_clients_until_it_ends(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """Though the request was answered when it took too long: a client had all of them after the second pair."""
    begun, go = list[int](), threading.Event()

    def hang(*args: Any) -> Any:
        begun.append(1)
        assert go.wait(60)
        raise ValueError("the end")

    monkeypatch.setattr("ldm_lite.serve.a1111.routes.open_base64", hang)
    monkeypatch.setattr(http, "READING", 0.5)
    for _ in range(http.READERS):
        assert running.refused("/sdapi/v1/png-info", {"image": ""})[0] in (408, 503)
    assert len(begun) == http.READERS // 2
    go.set()
    wait_for(lambda: running.refused("/sdapi/v1/png-info", {"image": ""})[1] == "the end", "a thread that is free")


def test_what_nobody_waits_for_any_more_is_not_read(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """A flood of requests that were cancelled at once was read, and kept everybody else waiting."""
    read, go, first = list[int](), threading.Event(), threading.Event()

    def submit(*args: Any) -> Any:
        read.append(1)
        first.set()
        assert go.wait(60)
        raise ValueError("the end")

    monkeypatch.setattr(running.engine, "submit", submit)
    body = json.dumps(SMALL)
    clients = [HTTPConnection("127.0.0.1", running.port, timeout=20) for _ in range(20)]
    for client in clients:
        client.request("POST", TXT2IMG, body)
    assert first.wait(20)
    for client in clients:
        client.close()
    wait_for(lambda: not running.server.server_state.connections, "the end of all connections")
    go.set()
    wait_for(lambda: not running.server.server_state.tasks, "the end of all requests")
    assert len(read) <= http.READERS


def test_many_controlnets_are_refused_before_their_images_are_read(running: Running) -> None:
    units = [{"image": "no image"}] * 11
    status, message = running.refused(TXT2IMG, SMALL | {"alwayson_scripts": {"controlnet": {"args": units}}})
    assert (status, message) == (422, "got 11 ControlNets, expected fewer than 10 (`max_branches`)")
    status, message = running.refused(TXT2IMG, SMALL | {"alwayson_scripts": {"controlnet": {"args": True}}})
    assert (status, message) == (422, "got bool as args of controlnet, expected a list of ControlNets")


def test_what_is_queued_too_late_is_given_up(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread that queues it cannot be stopped when the client has got its 503."""
    go, tickets = threading.Event(), list[Any]()
    submit_later = running.engine.submit

    def late(*args: Any, **kwargs: Any) -> Any:
        assert go.wait(60)
        tickets.append(submit_later(*args, **kwargs))
        return tickets[0]

    monkeypatch.setattr(running.engine, "submit", late)
    monkeypatch.setattr(http, "READING", 0.3)
    assert running.refused(TXT2IMG, SMALL | {"steps": 150})[0] == 503
    go.set()
    wait_for(lambda: tickets and tickets[0].state == "cancelled", "a request that is given up")


# ---- what is asked for ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"prompt": " AND ".join("x" * 400)}, r"got 401 branches in each step, for 400 parts .* \(`max_branches`\)"),
        ({"prompt": " AND ".join("x" * 10)}, r"got 11 branches .* expected at most 10 \(`max_branches`\)"),
        ({"hires": 2.0, "hires_prompt": " AND ".join("x" * 400)}, "got 401 branches"),
        ({"control": (Control("x", Image.new("L", (8, 8))),) * 9}, "got 11 branches .* and 9 ControlNets"),
        (
            {"prompt": " AND ".join("x" * 400), "regions": ";".join(["all"] * 400), "prompt_syntax": "plain"},
            "got 401 branches",
        ),
        ({"prompt": "BREAK " * 3000}, "got about 3240 chunks of 75 tokens in a text of the prompt, expected at most"),
        ({"prompt": "{" + "{a|b}" * 30 + "}", "dynamic": "all", "prompt_syntax": "plain"}, "makes more than 10000"),
        ({"prompt": "{" + "{a|b}" * 6 + "}", "dynamic": "all"}, "got 64 images, expected at most 16"),
        ({"n_iter": 10**9}, "got 1000000000 images, expected at most 16"),
        (
            {"width": 1024, "height": 1024, "steps": 150, "batch_size": 16},
            r"got 16 images x 2 branches x 1024 x 1024 pixels x 150 steps, 5,033 millions, expected .* \(`max_work`\)",
        ),
        ({"width": 512, "height": 512, "hires": 2.0, "steps": 150, "batch_size": 8}, r"and 1024 x 1024 x 150, 3,146"),
        ({"width": 8, "height": 65536}, "16384 a side"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_request_has_one_budget(library: Any, more: dict[str, Any], message: str) -> None:
    """Checked before anything is built: it takes neither time nor memory."""
    engine = engine_of(library, max_pixels=2**20)
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match=message):
            submit(engine, "txt2img", SMALL | {"prompt_syntax": "a1111"} | more)
        assert tracemalloc.get_traced_memory()[1] < 2**23
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    "more",
    [
        {"width": 65528},
        {"height": 65528},
        {"width": 2000, "height": 2000},
        {"resolution": 65536},
        {"extend": "left=65536,top=65536"},
        {"extend": "left= 60000", "width": 64, "height": 64},
        {"extend": "top=4000", "width": 1024},
    ],
    ids=str,
)
def test_the_size_of_a_picture_that_is_made_larger_is_known_before(library: Any, more: dict[str, Any]) -> None:
    """A width alone passed, and 65528 x 65528 pixels were made before they were counted."""
    kind = InpaintOptions if "extend" in more else Img2imgOptions
    task = "inpaint" if "extend" in more else "img2img"
    options = kind(prompt="x", init_img=(Image.new("RGB", (64, 64)),), **more)
    with pytest.raises(ValueError, match="pixels, expected at most"):
        engine_of(library).submit(task, options)
    with pytest.raises(ValueError, match="got 1200 x 1200 pixels, expected at most"):
        submit(engine_of(library), "upscale", {"prompt": "x", "init_img": (Image.new("RGB", (300, 300)),)})


def test_images_of_many_branches_share_no_batch(library: Any) -> None:
    """A batch of 8 has 16 branches, whatever the images."""
    engine = engine_of(library)
    many = [submit(engine, "txt2img", SMALL | {"prompt": "a AND b AND c", "prompt_syntax": "a1111"}) for _ in range(8)]
    run = engine._next_run()
    assert run is not None
    assert len(run.units) == 4
    assert many[0].branches == 4
    assert engine_of(library)._next_run() is None


def test_too_many_loras(library: Any, running: Running) -> None:
    assert "got 40 LoRAs, expected at most 32" in running.refused(TXT2IMG, SMALL | {"prompt": "<lora:a:1>" * 40})[1]


# ---- clients --------------------------------------------------------------------------------------------------------


def clock() -> Callable[[], float]:
    """A clock that goes on by a second whenever somebody looks: each step takes one."""
    ticks = itertools.count()
    return lambda: float(next(ticks))


def test_clients_take_turns(library: Any, as_client: Callable[[str], Any]) -> None:
    """Places are told as if all requests were alike: each client's first, then each one's second."""
    engine, order = engine_of(library), list[str]()
    engine.clock = clock()
    tickets = []
    for client, count in (("a", 4), ("b", 2), ("c", 1)):
        as_client(client)
        for number in range(count):  # of other sizes, so that none go together
            steps = 2 + len(tickets)
            tickets.append(submit(engine, "txt2img", SMALL | {"prompt": f"{client}{number}", "steps": steps}))
    for ticket in tickets:
        name = str(ticket.options.prompt)
        ticket.listen(lambda ticket=ticket, name=name: order.append(name) if ticket.ended else None)  # type: ignore[misc]
    assert [tickets[place].position for place in (0, 4, 6)] == [0, 1, 2]
    engine.start()
    finished(*tickets)
    engine.close()
    assert order[0] == "a0"  # the shortest
    assert order[-1] == "a3"


def test_a_clients_first_image_waits_for_at_most_one_step_of_each_other(library: Any, as_client: Any) -> None:
    """However expensive what they have asked for is, and in however many requests."""
    engine, steps, ends = engine_of(library), list[str](), list[str]()
    engine.clock = clock()

    def ask(client: str, count: int) -> Any:
        as_client(client)
        ticket = submit(engine, "txt2img", SMALL | {"prompt": client, "steps": count})
        ticket.listen(lambda: ends.append(client) if ticket.ended else steps.append(client) if ticket.step else None)
        return ticket

    tickets = [ask("a", 60), ask("a", 50), ask("b", 55)]
    late = threading.Event()
    tickets[0].listen(lambda: late.set() if tickets[0].step == 10 else None)
    denoise = engine._denoise

    def denoise_and_ask(run: Any) -> bool:
        is_going = denoise(run)
        if len(steps) == 20:
            tickets.append(ask("c", 3))
        return is_going

    engine._denoise = denoise_and_ask  # type: ignore[method-assign]
    engine.start()
    assert late.wait(60)
    wait_for(lambda: "c" in ends, "the end of the late request")
    first = steps.index("c")
    assert first <= 20 + 2  # one of a, one of b
    whole = steps[first : steps.index("c", first) + 8]
    assert whole.count("a") <= 4
    assert whole.count("b") <= 4
    assert ends == ["c"]
    for ticket in tickets[:3]:
        ticket.cancel()
    engine.close()


def test_a_step_is_charged_to_all_whose_images_it_has(library: Any, as_client: Any) -> None:
    engine = engine_of(library)
    engine.clock = clock()
    for client in ("a", "b", "b"):
        as_client(client)
        submit(engine, "txt2img", SMALL | {"prompt": client})
    engine._work()
    assert engine._seconds["b"] == pytest.approx(2 / 3)
    assert engine._seconds["a"] == pytest.approx(1 + 1 / 3)  # and what its beginning took


def test_a_client_that_holds_the_queue_makes_room_for_others(library: Any, as_client: Callable[[str], Any]) -> None:
    engine = engine_of(library, max_queue=4)
    as_client("greedy")
    first = [submit(engine, "txt2img", SMALL) for _ in range(4)]
    with pytest.raises(Full):
        submit(engine, "txt2img", SMALL)
    as_client("other")
    newcomer = submit(engine, "txt2img", SMALL)
    assert [ticket.state for ticket in first] == ["queued"] * 3 + ["failed"]
    assert isinstance(first[3].error, Full)
    second = submit(engine, "txt2img", SMALL)
    with pytest.raises(Full):  # both hold two
        submit(engine, "txt2img", SMALL)
    as_client("third")
    with pytest.raises(Full):  # so would all three
        submit(engine, "txt2img", SMALL | {"batch_size": 2})
    assert newcomer.state == second.state == "queued"


def test_ipv6_clients_are_told_by_their_network() -> None:
    from ldm_lite.serve.app import client_of

    assert client_of({"client": ("10.0.0.1", 5)}) == "10.0.0.1"
    assert client_of({"client": ("2001:db8::1", 5)}) == client_of({"client": ("2001:db8::2:3", 5)})
    assert client_of({"client": ("2001:db8:1::1", 5)}) != client_of({"client": ("2001:db8:2::1", 5)})
    assert client_of({"client": None}) == ""


def test_a_forwarded_address_is_a_proxys_alone(start: Callable[..., Running], caplog: Any) -> None:
    for options, wanted in (({}, "127.0.0.1"), ({"proxy": "127.0.0.1"}, "9.9.9.9")):
        server = start(**options)
        with caplog.at_level(logging.INFO, logger="ldm_lite.access"):
            server.ask("/healthz", **{"X-Forwarded-For": "9.9.9.9"})
            answered = lambda: any("GET /healthz 200" in message for message in caplog.messages)  # noqa: E731
            wait_for(answered, "its line, which is written after the answer")
        assert caplog.messages[-1].startswith(f"{wanted} GET /healthz 200")
        caplog.clear()


@pytest.mark.parametrize("sent", [b"", b"POST ", b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nX: "])
def test_a_connection_without_a_request_is_closed(sent: bytes, running: Running, monkeypatch: Any) -> None:
    monkeypatch.setattr(server, "IDLE", 0.1)
    monkeypatch.setattr(server, "LOOK", 0.05)
    with socket.create_connection(("127.0.0.1", running.port), timeout=20) as client:
        client.sendall(sent)
        with pytest.raises(ConnectionResetError):
            raise ConnectionResetError if client.recv(1) == b"" else AssertionError


def test_an_answer_that_nobody_takes_is_dropped(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "STALLED", 0.2)
    monkeypatch.setattr(server, "LOOK", 0.05)
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
        client.connect(("127.0.0.1", running.port))
        client.sendall(b"GET /openapi.json HTTP/1.1\r\nHost: localhost\r\n\r\n" * 200)
        wait_for(lambda: not running.server.server_state.connections, "the connection's end")


def test_connections_have_a_limit_and_those_that_ask_nothing_make_room(start: Callable[..., Running]) -> None:
    server = start(max_connections=8)
    idle = [socket.create_connection(("127.0.0.1", server.port), timeout=20) for _ in range(4)]
    assert server.ask("/healthz")[0] == 200
    assert idle[0].recv(1) == b""  # the oldest is closed
    more = [socket.create_connection(("127.0.0.1", server.port), timeout=20) for _ in range(20)]
    assert server.ask("/healthz")[0] == 200
    assert len(server.server.server_state.connections) <= 5
    for connection in (*idle, *more):
        connection.close()


def test_as_many_files_may_be_open_as_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    resource, limits, connections = pytest.importorskip("resource"), list[tuple[int, int]](), list[tuple[int, int]]()
    monkeypatch.setattr(resource, "setrlimit", lambda kind, limit: limits.append(limit))
    monkeypatch.setattr(os, "listdir", lambda path: ["file"] * 12)
    for hard in (4096, 1000, resource.RLIM_INFINITY, 64):
        monkeypatch.setattr(resource, "getrlimit", lambda kind, hard=hard: (min(hard % 2**62, 256), hard))
        connections.append(server.allow_files(1024))
    assert limits == [(1024 + server.FILES, 4096), (1000, 1000), (1024 + server.FILES, resource.RLIM_INFINITY)]
    assert [most for most, _ in connections] == [1024, 948, 1024, 12]
    for (most, backlog), limit in zip(connections, (1536, 1000, 2**62, 64), strict=True):
        assert most + backlog + 12 + server.KEPT <= limit


def test_health_is_answered_while_every_connection_is_busy(start: Callable[..., Running]) -> None:
    """Of a client, too; other requests get 503."""
    server, body = start(max_connections=8), json.dumps(SMALL | {"steps": 150, "batch_size": 3})
    streams = [HTTPConnection("127.0.0.1", server.port, timeout=20) for _ in range(4)]
    responses = []
    for stream in streams:
        stream.request("POST", "/api/images", body)
        responses.append(stream.getresponse())
        assert responses[-1].status == 200
    for _ in range(20):
        assert server.ask("/healthz")[0] == 200
    status, message = server.refused(TXT2IMG, SMALL)
    assert (status, message) == (503, "too many connections are open: try again later")
    for stream in (*responses, *streams):
        stream.close()
    wait_for(lambda: server.ask("/sdapi/v1/progress")[0] == 200, "a connection that is free")


def test_two_lengths_end_a_connection(running: Running) -> None:
    """Proxies do not agree on which of them counts: the rest would be another client's request."""
    head = f"POST {TXT2IMG} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n"
    answer = talk(running.port, head.encode() + b"0\r\n\r\nGET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert answer.count(b"HTTP/1.1 ") == 1
    assert b"Content-Length and Transfer-Encoding together" in answer


@pytest.mark.slow
def test_health_is_answered_though_few_files_may_be_open(small_path: Any) -> None:
    resource = pytest.importorskip("resource")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [
        sys.executable,
        "-m",
        "ldm_lite.serve",
        "--port",
        str(port),
        "--ckpt",
        str(small_path),
        "--device",
        "cpu",
    ]
    limit = lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))  # noqa: E731
    process = subprocess.Popen(command, preexec_fn=limit, stderr=subprocess.DEVNULL)

    def health() -> int:
        connection = HTTPConnection("127.0.0.1", port, timeout=5)
        try:
            connection.request("GET", "/healthz")
            return connection.getresponse().status
        except OSError:
            return 0
        finally:
            connection.close()

    opened = []
    try:
        wait_for(lambda: health() == 200, "a server that has started")
        for number in range(200):
            opened.append(socket.socket())
            opened[-1].bind((f"127.0.0.{2 + number}", 0))
            opened[-1].connect(("127.0.0.1", port))
            opened[-1].sendall(b"GET / HTTP/1.1\r\nX: ")
        start = time.monotonic()
        assert health() == 200
        assert time.monotonic() - start < 5
    finally:
        for connection in opened:
            connection.close()
        process.terminate()
        process.wait()


def test_heads_have_a_limit(running: Running) -> None:
    client = socket.create_connection(("127.0.0.1", running.port), timeout=20)
    with client, pytest.raises((ConnectionResetError, BrokenPipeError)):
        client.sendall(b"GET / HTTP/1.1\r\n" + (b"X: " + b"a" * 2**16 + b"\r\n") * 500)


def test_a_form_has_no_charset_but_utf8(running: Running) -> None:
    """Python's punycode took minutes for a megabyte."""
    body, _ = form(("prompt", b"a-b"))
    for charset, wanted in (("punycode", "UTF-8: leave it out"), ("UTF-8", "got 0 files as image")):
        kind = f"multipart/form-data; boundary=x; charset={charset}"
        status, message = running.refused("/v1/images/edits", body, **{"Content-Type": kind})
        assert status == 422
        assert wanted in message


@pytest.mark.parametrize(("kind", "most"), [("file", 32), ("field", 100)])
def test_a_form_has_so_many_parts_at_most(kind: str, most: int, running: Running) -> None:
    name = b'name="image"; filename="a"' if kind == "file" else b'name="prompt"'
    part = b"--x\r\nContent-Disposition: form-data; " + name + b"\r\n\r\na\r\n"
    for count, wanted in ((most, False), (most + 1, True)):
        status, message = running.refused("/v1/images/edits", part * count + b"--x--\r\n", **form()[1])
        assert status == 422
        assert (f"Too many {kind}s" in message) is wanted, message


def test_forms_are_read_in_threads_too(running: Running) -> None:
    """A body of CRs is the slowest for the parser."""
    body, head = form(("image", b"\r" * 900_000))
    status, _ = running.refused("/v1/images/edits", body, **head)
    assert status == 422


# ---- models and devices ---------------------------------------------------------------------------------------------


def test_a_swap_is_for_a_file_that_opens_and_others_are_remembered(small_path: Any, tmp_path: Any) -> None:
    (tmp_path / "broken.safetensors").write_bytes(b"x" * 100)
    (tmp_path / "cut.safetensors").write_bytes(small_path.read_bytes()[:-1000])
    library = library_of(small_path, models=str(tmp_path))
    engine, model = engine_of(library, models=str(tmp_path)), library.model
    tickets = [submit(engine, "txt2img", SMALL, model=name) for name in ("broken", "cut")]
    engine.start()
    for ticket in tickets:
        with pytest.raises(ValueError, match=r"safetensors"):
            finished(ticket)
    assert library.model is model  # it was never freed
    assert engine.totals["swaps"] == 0
    for name in ("broken", "cut"):
        with pytest.raises(ValueError, match=r"safetensors"):
            submit(engine, "txt2img", SMALL, model=name)
    (tmp_path / "cut.safetensors").write_bytes(small_path.read_bytes())
    assert finished(submit(engine, "txt2img", SMALL, model="cut"))
    engine.close()


def test_requests_for_one_model_run_one_after_the_other(library: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Alternating names would be a swap for each."""
    engine, order = engine_of(library), list[str]()
    monkeypatch.setattr(library, "check_request", lambda name, loras: name)
    tickets = [submit(engine, "txt2img", SMALL | {"steps": 2 + i}) for i in range(6)]
    for place, ticket in enumerate(tickets):
        ticket.model = ("other", "small")[place % 2]

    def use(name: str, loras: Any) -> None:
        order.append(name)
        library.loaded = name

    monkeypatch.setattr(library, "use", use)
    monkeypatch.setattr(queue, "STAY", 1000.0)
    engine.start()
    finished(*tickets)
    engine.close()
    library.loaded = "small"
    assert order == ["other"]
    assert engine.totals["swaps"] == 1


def test_a_model_is_not_kept_for_ever(library: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_of(library)
    first, _ = (submit(engine, "txt2img", SMALL | {"steps": 2 + i}) for i in range(2))
    first.model = "other"
    used = list[str]()
    monkeypatch.setattr(library, "use", lambda name, loras: used.append(name))
    monkeypatch.setattr(queue, "STAY", -1.0)
    engine._next_run()
    assert used == ["other"]


@pytest.mark.slow
def test_while_models_are_swapped_requests_are_taken(small_path: Any) -> None:
    library = library_of(small_path)
    library.unload()
    assert library.ready("small") is None
    running = Running(library)
    try:
        assert running.ask("/sdapi/v1/sd-models")[0] == 200
        assert running.ask(TXT2IMG, SMALL)[0] == 200  # it is loaded again
        assert running.ask("/sdapi/v1/unload-checkpoint", {})[0] == 200
        wait_for(lambda: not library.loaded, "a library without models")
        assert running.ask(OPENAI, {"prompt": "x", "size": "32x32", "steps": 1})[0] == 200
    finally:
        running.close()


def test_a_device_that_has_failed_ends_the_server(start: Callable[..., Running], monkeypatch: Any, caplog: Any) -> None:
    server = start()
    monkeypatch.setattr(type(server.engine.library), "works", lambda self: False)

    def fail(*args: Any) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(server.engine, "_denoise", fail)
    with caplog.at_level(logging.ERROR, logger="ldm_lite"):
        assert server.refused(TXT2IMG, SMALL) == (500, "internal error: see the server's log")
    assert "illegal memory access" in caplog.text
    assert "Traceback" in caplog.text
    assert server.refused("/healthz", None)[0] == 503
    assert server.refused(TXT2IMG, SMALL)[0] == 503


def test_a_device_works_unless_it_fails(library: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert library.works() is True

    def fail(*args: object, **kwargs: object) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr("torch.ones", fail)
    assert library.works() is False


def test_nothing_is_kept_of_requests_that_ended(running: Running) -> None:
    import gc

    for _ in range(3):
        assert running.ask(TXT2IMG, SMALL)[0] == 200
        assert running.ask(IMG2IMG, SMALL | {"steps": 0})[0] == 422

    def tickets() -> int:
        gc.collect()
        return sum(type(item) is Ticket and item._engine is running.engine for item in gc.get_objects())

    wait_for(lambda: tickets() <= 1, "the end of all requests but the last")


# ---- the log --------------------------------------------------------------------------------------------------------


def test_each_request_is_a_line_of_the_log(running: Running, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="ldm_lite.access"):
        running.ask("/healthz")
        running.refused(TXT2IMG, {"prompt": 5})
        running.ask("/a%0ab%1b" + "c" * 500)
        written = lambda: [record.getMessage() for record in caplog.records if record.name == "ldm_lite.access"]  # noqa: E731
        lines = wait_for(lambda: lines if len(lines := written()) == 3 else None, "three lines")  # after the answers
    lines.sort(key=lambda line: ("/healthz" not in line, TXT2IMG not in line))
    assert lines[0].startswith("127.0.0.1 GET /healthz 200 0.")
    assert lines[1].startswith(f"127.0.0.1 POST {TXT2IMG} 422 ")
    assert "/a\\nb\\x1bccc" in lines[2]
    assert len(lines[2]) < 300


def test_the_log_says_everything_again_with_its_time(monkeypatch: Any, capsys: Any) -> None:
    log = logging.getLogger("ldm_lite")
    monkeypatch.setattr(log, "handlers", [])
    level = log.level
    try:
        server.log_lines()
        for _ in range(2):
            log.warning("the same\n with `max_body=1`")
        logging.getLogger("ldm_lite.access").info("a request")
        try:
            raise KeyError("ours")
        except KeyError as error:
            report(error)
            report(error)  # once for each error
    finally:
        log.setLevel(level)
        logging.getLogger("ldm_lite.access").setLevel(logging.NOTSET)
    lines = capsys.readouterr().err.splitlines()
    assert [line[25:] for line in lines[:2]] == ["warning: the same\\n with --max-body 1"] * 2
    assert lines[2].endswith("+0000 a request") or lines[2].endswith(" a request")
    assert sum("KeyError: 'ours'" in line for line in lines) == 2  # the line, and the end of its traceback
    assert any(line.startswith("Traceback") for line in lines)
