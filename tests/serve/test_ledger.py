"""The ledger of bytes, and what requests hold in it over their whole life."""

import json
import threading
import time
from collections.abc import Callable
from http.client import HTTPConnection
from typing import Any

import numpy as np
import pytest
from PIL import Image
from serving import Full, Running, b64, engine_of, submit
from waiting import wait_for

pytest.importorskip("fastapi")
pytest.importorskip("uvicorn")
pytest.importorskip("prometheus_client")

from ldm_lite.serve import server
from ldm_lite.serve.ledger import CLIENT, Account, Ledger, TooLarge

SMALL: dict[str, Any] = {"prompt": "x", "steps": 1, "width": 32, "height": 32}


def noise(side: int) -> Image.Image:
    return Image.fromarray(np.random.default_rng(0).integers(0, 255, (side, side, 3), dtype=np.uint8))


def test_a_client_has_three_quarters_and_those_that_hold_little_the_rest() -> None:
    ledger = Ledger(1600)
    first, second, little = (Account(ledger, client) for client in "abc")
    with pytest.raises(TooLarge, match="expected at most 0"):
        first.hold("body", 1201)
    with first, second, little:
        first.hold("body", 1200)
        with pytest.raises(Full, match="your other requests hold"):
            Account(ledger, "a").hold("body", 1)
        with pytest.raises(Full, match="memory for requests is full"):
            second.hold("body", 101)
        little.hold("body", 100)
        first.hold("body", 10)  # in place of those before
        second.add("pictures", 500)
        second.add("pictures", 500)
        assert ledger.held() == {"a": 10, "b": 1000, "c": 100}
    assert not ledger.held()
    with pytest.raises(Full, match="has ended"):
        first.hold("body", 1)


def test_the_client_that_holds_most_loses_its_newest_request_that_waits() -> None:
    ledger, ended = Ledger(1600), list[str]()
    accounts = {name: Account(ledger, name[0]) for name in ("a1", "a2", "a3", "b1")}
    for name, account in accounts.items():
        account.hold("pictures", 300)
        account.drop = lambda full, name=name: ended.append(name)  # type: ignore[misc]
    accounts["a3"].drop = None  # it runs
    Account(ledger, "c").hold("pictures", 300)
    assert ended == ["a2"]
    assert ledger.held() == {"a": 600, "b": 300, "c": 300}
    with pytest.raises(Full):  # it would hold more than anybody else
        Account(ledger, "d").hold("pictures", 700)


def test_a_request_is_refused_before_its_images_are_made(library: Any) -> None:
    engine = engine_of(library, max_memory=1)
    with pytest.raises(TooLarge, match=r"needs about 1 MiB, expected at most 1 .*max_memory"):
        submit(engine, "txt2img", SMALL | {"width": 128, "height": 128, "batch_size": 16})
    assert not engine.queue
    assert not engine.ledger.held()


def test_what_waits_makes_room_for_a_client_that_holds_less(library: Any) -> None:
    engine, tickets, token = engine_of(library, max_memory=4), list[Any](), CLIENT.set("")
    request = SMALL | {"init_img": (Image.new("RGB", (512, 512)),)}
    for client in ("greedy", "greedy", "greedy", "other"):
        CLIENT.set(client)
        tickets.append(submit(engine, "img2img", request))
    CLIENT.reset(token)
    assert [ticket.state for ticket in tickets] == ["queued", "queued", "failed", "queued"]
    assert isinstance(tickets[2].error, Full)


def test_nothing_is_held_once_requests_have_ended(start: Callable[..., Running]) -> None:
    """Answered, refused, given up, and of a stream."""
    running = start()
    held = running.engine.ledger.held
    assert running.ask("/sdapi/v1/img2img", SMALL | {"init_images": [b64(noise(64))]})[0] == 200
    assert running.ask("/sdapi/v1/img2img", SMALL | {"init_images": ["AAAA"]})[0] == 422
    assert running.ask("/api/images", SMALL | {"x": {"option": "seed", "values": "1-3"}})[0] == 200
    assert running.ask("/sdapi/v1/png-info", {"image": b64(noise(64))})[0] == 200
    for path in ("/sdapi/v1/txt2img", "/api/images"):
        connection = HTTPConnection("127.0.0.1", running.port, timeout=60)
        connection.request("POST", path, json.dumps(SMALL | {"steps": 150}))
        wait_for(lambda: running.engine.running, "a request that runs")
        wait_for(lambda: held()["127.0.0.1"] > 0, "what it holds")
        connection.close()
        wait_for(lambda: not running.engine.running, "its end")
    wait_for(lambda: not held(), "an empty ledger")


def test_answers_are_held_until_they_are_read_and_end_if_nobody_does(start: Any, monkeypatch: Any) -> None:
    """One at a time is encoded."""
    monkeypatch.setattr(server, "STALLED", 0.5)
    monkeypatch.setattr(server, "LOOK", 0.05)
    running = start(max_pixels=2**20, max_body=32)
    held = running.engine.ledger.held
    body = json.dumps({"imageList": [{"data": b64(noise(1000))}] * 8})
    connection = HTTPConnection("127.0.0.1", running.port, timeout=60)
    connection.request("POST", "/sdapi/v1/extra-batch-images", body)
    assert connection.getresponse().status == 200
    assert held()["127.0.0.1"] > 8 * 4 * 10**6
    wait_for(lambda: not held(), "the end of an answer that is not read")
    connection.close()
    status, answer = running.ask("/sdapi/v1/extra-batch-images", body)
    assert (status, len(answer["images"])) == (200, 8)


@pytest.mark.slow
def test_a_slow_reader_that_reads_enough_gets_its_answer(start: Any, monkeypatch: Any) -> None:
    """Though what waits to be sent does not become less: more of the answer follows."""
    monkeypatch.setattr(server, "STALLED", 0.5)
    monkeypatch.setattr(server, "LOOK", 0.05)
    running = start(max_pixels=2**20, max_body=32)
    connection = HTTPConnection("127.0.0.1", running.port, timeout=60)
    connection.connect()
    connection.request("POST", "/sdapi/v1/extra-single-image", json.dumps({"image": b64(noise(1000))}))
    response, size = connection.getresponse(), 0
    while content := response.read(100_000):
        size += len(content)
        threading.Event().wait(0.05)
    assert size > 4 * 10**6
    connection.close()


def test_connections_of_requests_that_make_room_are_closed(start: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(server, "LOOK", 0.05)
    running = start(max_pixels=2**20, max_body=32)
    connection = HTTPConnection("127.0.0.1", running.port, timeout=60)
    body = json.dumps({"imageList": [{"data": b64(noise(1000))}] * 8})
    connection.request("POST", "/sdapi/v1/extra-batch-images", body)
    assert connection.getresponse().status == 200
    ledger = running.engine.ledger
    with Account(ledger, "other") as account:
        monkeypatch.setattr(ledger, "most", ledger.held().total() + 10)
        monkeypatch.setattr(ledger, "share", ledger.most)
        account.hold("body", 100)
        start_time = time.monotonic()
        wait_for(lambda: not running.server.server_state.connections, "the end of the answer")
        assert time.monotonic() - start_time < 30
        assert ledger.held() == {"other": 100}
    connection.close()
