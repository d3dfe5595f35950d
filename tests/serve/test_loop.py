"""The event loop: no request of a client keeps it for long, since everybody else would wait."""

import asyncio
import base64
import io
import json
import sys
import time
from typing import Any

import numpy as np
import pytest
from PIL import Image
from PIL.PngImagePlugin import PngInfo
from serving import Running, form

pytest.importorskip("fastapi")
pytest.importorskip("uvicorn")
pytest.importorskip("prometheus_client")

MOST = 0.05  # seconds of the loop's thread
TXT2IMG, IMG2IMG = "/sdapi/v1/txt2img", "/sdapi/v1/img2img"
SMALL: dict[str, Any] = {"prompt": "x", "steps": 1, "width": 32, "height": 32}
FINE = {"a long prompt", "a long prompt of the second pass", "fields", "the text of a picture", "a picture's settings"}
FINE |= {
    "pictures",
    "edges",
    "extras",
    "a plot",
    "numbers",
    "the description",
    "OpenAI's",
}  # requests that are answered


@pytest.fixture
def longest(monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """-> the seconds of its thread that each kind of callback took at most; those of other processes do not count."""
    monkeypatch.setitem(sys.modules, "uvloop", None)  # which calls no Handle
    seconds, run = dict[str, float](), asyncio.Handle._run

    def timed(handle: asyncio.Handle) -> None:
        start = time.thread_time()
        run(handle)
        taken = time.thread_time() - start
        name = repr(handle)[:300]
        if taken > MOST / 5:
            seconds[name] = max(seconds.get(name, 0.0), taken)

    monkeypatch.setattr(asyncio.Handle, "_run", timed)
    return seconds


def picture(side: int = 128, text: str = "") -> str:
    """A picture of noise in base64, whose text has the name of its settings."""
    about, file = PngInfo(), io.BytesIO()
    about.add_text("parameters", text)
    noise = np.random.default_rng(0).integers(0, 255, (side, side, 3), dtype=np.uint8)
    Image.fromarray(noise).save(file, "PNG", pnginfo=about)
    return base64.b64encode(file.getvalue()).decode()


def requests() -> dict[str, tuple[str, Any, dict[str, str]]]:
    """Requests at the limits of what is read: a path, a body, headers."""
    words, text = ", " + "Aa aA " * 3300, "Aa aA " * 10_000  # what a search for settings read again and again
    about = f"{words}\nSteps: 1, {', '.join(f'A{word}: ' + 'a ' * 2000 for word in range(15))}"
    second = {"enable_hr": True, "hr_scale": 1, "denoising_strength": 0.5}
    return {
        "a long prompt of the second pass": (TXT2IMG, SMALL | second | {"hr_prompt": words}, {}),
        "a long prompt": (TXT2IMG, SMALL | {"prompt": words, "negative_prompt": words}, {}),
        "a text at its limit": (TXT2IMG, SMALL | {"prompt": text}, {}),
        "brackets": (TXT2IMG, SMALL | {"prompt": "(" * 9_900 + ":" * 9_900}, {}),
        "parts": (TXT2IMG, SMALL | {"prompt": " AND ".join("x" * 3000)}, {}),
        "LoRAs": (TXT2IMG, SMALL | {"prompt": "<lora:a:" * 2400}, {}),
        "a sampler": (TXT2IMG, SMALL | {"sampler_name": text}, {}),
        "fields": (TXT2IMG, SMALL | {f"{'k' * 190}{place}": "v" * 500 for place in range(1000)}, {}),
        "settings": ("/sdapi/v1/options", {"sd_model_checkpoint": text}, {}),
        "the text of a picture": ("/sdapi/v1/png-info", {"image": picture(8, about)}, {}),
        "a picture's settings": ("/api/settings", {"image": picture(8, about)}, {}),
        "pictures": (IMG2IMG, SMALL | {"init_images": [picture(500)], "denoising_strength": 1}, {}),
        "edges": ("/api/hint", {"image": picture(500), "preprocess": "canny"}, {}),
        "extras": ("/sdapi/v1/extra-batch-images", {"imageList": [{"data": picture(100)}] * 12}, {}),
        "extend": (
            "/api/images",
            {"task": "inpaint", "init_img": picture(8), "extend": "a" * 19_000, "steps": 1, "width": 32},
            {},
        ),
        "a plot": ("/api/images", SMALL | {"x": {"option": "seed", "values": "1-12"}}, {}),
        "a field of the form": ("/api/images", SMALL | {"scale": "1" * 60_000}, {}),
        "OpenAI's": ("/v1/images/generations", {"prompt": words, "size": "128x128", "n": 12, "steps": 1}, {}),
        "a form": ("/v1/images/edits", *form(("prompt", text.encode()), ("image", b"\r" * 900_000))),
        "a boundary": ("/v1/images/edits", b"\r\n--" * 200_000, form()[1]),
        "marks": (TXT2IMG, b"[" * 60_000, {}),
        "numbers": (TXT2IMG, b'{"prompt":"x","other":[' + b"1e300," * 1000 + b"1]}", {}),
        "the description": ("/openapi.json", None, {}),
    }


def test_no_request_keeps_the_event_loop(library: Any, longest: dict[str, float]) -> None:
    """A search in a text of 21 KB took 4.9 seconds."""
    server = Running(library, timeout=30.0)
    taken = dict[str, dict[str, float]]()
    try:
        server.ask("/openapi.json")  # which is made once
        for name, (path, content, headers) in requests().items():
            longest.clear()
            body = json.dumps(content) if isinstance(content, dict) else content
            status, answer = server.ask(path, body, **headers)
            assert status == 200 or (status == 422 and name not in FINE), (name, status, answer)
            taken[name] = dict(longest)
    finally:
        server.close()
    slow = {name: handles for name, handles in taken.items() if max(handles.values(), default=0.0) > MOST}
    assert not slow, slow
