"""Attack the server: peak memory and health for each kind of request, and a mixed run of good and hostile clients.

    python scripts/attack_serve.py                          # each kind from one address and from many, then 30 minutes
    python scripts/attack_serve.py --seconds 5 --minutes 5
    python scripts/attack_serve.py --only slow --minutes 0

Starts `python -m ldm_lite.serve` on its defaults, with the bundled model and two ESRGAN networks, on this machine, and
sends from the addresses 127.0.0.2 and following.  Prints the MiB above the idle server and the slowest answer of
/healthz for each kind.  Fails if one is above MOST_MIB or MOST_SECONDS, if the memory at the end of the mixed run is
more than MOST_LEFT above that at its beginning, or if an image differs from the pipeline's.
"""

import argparse
import base64
import contextlib
import http.client
import io
import itertools
import json
import random
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from load_serve import A1111, COLORS, OPENAI, THINGS, Server
from PIL import Image

import ldm_lite
from ldm_lite.models.rrdb import RRDBNet, RRDBSpec

MOST_MIB, MOST_SECONDS, MOST_LEFT = 300.0, 1.0, 60.0
IMG2IMG, EXTRAS, SINGLE = "/sdapi/v1/img2img", "/sdapi/v1/extra-batch-images", "/sdapi/v1/extra-single-image"
PNG_INFO, EDITS, PAGE = "/sdapi/v1/png-info", "/v1/images/edits", "/api/images"
SMALL: dict[str, Any] = {"prompt": "x", "steps": 2, "width": 64, "height": 64}
PARALLEL = 24  # requests at a time
HEAD = "HTTP/1.1\r\nHost: localhost\r\n"


class Kind(NamedTuple):
    """Requests of one kind."""

    path: str
    make: Callable[[int], Any]  # number of the request -> its body
    how: str = "ask"  # or "leave", once it is sent; "slow": read 2.5 KB a second; "drip": send as slowly; "raw"
    headers: dict[str, str] | None = None
    parallel: int = PARALLEL


def noise(side: int, mode: str = "RGB") -> Image.Image:
    """A picture that does not compress."""
    pixels = np.random.default_rng(side).integers(0, 255, (side, side, 4), dtype=np.uint8)
    return Image.fromarray(pixels, "RGBA").convert(mode)


def packed(image: Image.Image, kind: str = "PNG", **how: Any) -> str:
    """A picture's file in base64."""
    file = io.BytesIO()
    image.save(file, kind, **how)
    return base64.b64encode(file.getvalue()).decode()


def deep(side: int) -> str:
    """A grey picture with 16 bits."""
    return packed(Image.fromarray(np.arange(side * side, dtype=np.uint16).reshape(side, side)))


def form(*fields: tuple[str, bytes]) -> bytes:
    """A multipart form; images are files."""
    parts = []
    for name, content in fields:
        file = b'; filename="a.png"' if name in ("image", "image[]", "mask") else b""
        parts.append(b'--x\r\nContent-Disposition: form-data; name="%s"%s\r\n\r\n' % (name.encode(), file))
        parts += [content, b"\r\n"]
    return b"".join([*parts, b"--x--\r\n"])


def scans(side: int, count: int) -> str:
    """A progressive JPEG with many scans."""
    content = base64.b64decode(packed(noise(side), "JPEG", progressive=True))
    last = content[content.rfind(b"\xff\xda") : -2]
    return base64.b64encode(content[:-2] + last * count + content[-2:]).decode()


def kinds() -> dict[str, Kind]:
    """All kinds of requests, good ones first."""
    large, photo = packed(Image.new("RGB", (4096, 4096), "red")), packed(noise(2048), "JPEG", quality=90)
    clear, grey = packed(Image.new("RGBA", (4096, 4096))), deep(4096)
    webp = packed(noise(1500), "WEBP", lossless=True, method=0)
    sixteen, medium, small = packed(Image.new("I;16", (2000, 2000))), packed(noise(1000)), packed(noise(64))
    words, text = ", " + "Aa aA " * 3300, "x, " * 6000
    multipart = {"Content-Type": "multipart/form-data; boundary=x"}

    def asking(path: str, how: str = "ask", parallel: int = PARALLEL, **fields: Any) -> Kind:
        body = json.dumps(SMALL | fields)
        return Kind(path, lambda number: body, how, None, parallel)

    def raw(content: str | bytes) -> Kind:
        whole = content.encode() if isinstance(content, str) else content
        return Kind("", lambda number: whole, "raw")

    def plain(path: str, fields: Any, how: str = "ask") -> Kind:
        body = fields if isinstance(fields, bytes) else json.dumps(fields)
        return Kind(path, lambda number: body, how)

    second: dict[str, Any] = {"enable_hr": True, "hr_scale": 2, "denoising_strength": 0.7}
    upscalers = ("first", "second")
    whole = json.dumps
    return {
        "small images": asking(A1111),
        "small images, OpenAI": plain(OPENAI, {"prompt": "x", "steps": 2, "size": "64x64"}),
        "small images, streams": plain(OPENAI, {"prompt": "x", "steps": 2, "stream": True, "partial_images": 3}),
        "small images, the page": asking(PAGE),
        "small images, given up": asking(A1111, "leave", steps=50),
        "16 images": asking(A1111, batch_size=16),
        "a second pass in latents": asking(A1111, **second),
        "second passes by two networks in turn": Kind(
            A1111, lambda number: whole(SMALL | second | {"hr_upscaler": upscalers[number % 2]}), parallel=30
        ),
        "extras by two networks in turn": Kind(
            SINGLE, lambda number: whole({"image": small, "upscaler_1": upscalers[number % 2]}), parallel=30
        ),
        "extras that do nothing, ten photos": plain(EXTRAS, {"imageList": [{"data": photo}] * 10}),
        "extras that do nothing, two photos": plain(EXTRAS, {"imageList": [{"data": photo}] * 2}),
        "extras that do nothing, read slowly": plain(EXTRAS, {"imageList": [{"data": photo}] * 2}, "slow"),
        "extras by Lanczos, 16 images": plain(
            EXTRAS, {"imageList": [{"data": small}] * 16, "upscaler_1": "Lanczos", "upscaling_resize": 8}
        ),
        "extras of no picture": plain(EXTRAS, {"imageList": [{"data": "AAAA"}] * 16}),
        "answers read slowly": asking(A1111, "slow", width=512, height=512, steps=1),
        "events read slowly": asking(PAGE, "slow", width=256, height=256, batch_size=8),
        "the description, read slowly": Kind("/openapi.json", lambda number: None, "slow"),
        "img2img of a small picture": asking(IMG2IMG, init_images=[small]),
        "img2img of a photo": asking(IMG2IMG, init_images=[photo]),
        "img2img of 4096 px": asking(IMG2IMG, init_images=[large]),
        "img2img of 4096 px, transparent": asking(IMG2IMG, init_images=[clear]),
        "img2img of 4096 px, 16 bits": asking(IMG2IMG, init_images=[grey]),
        "img2img of 2000 px, 16 bits": asking(IMG2IMG, init_images=[sixteen]),
        "img2img of a lossless WebP, as mask too": asking(IMG2IMG, init_images=[webp], mask=webp),
        "img2img, given up": asking(IMG2IMG, "leave", 150, init_images=[medium]),
        "img2img of 4096 px, given up": asking(IMG2IMG, "leave", init_images=[large]),
        "inpainting of 4096 px": asking(IMG2IMG, init_images=[large], mask=large),
        "inpainting, extended beyond all": asking(PAGE, task="inpaint", init_img=small, extend="left=9999,top=9999"),
        "a picture at the limit of a body": asking(IMG2IMG, init_images=["A" * (31 * 2**20)]),
        "a JPEG of many scans": plain(PNG_INFO, {"image": scans(2048, 1000)}),
        "text of pictures": plain(PNG_INFO, {"image": large}),
        "settings of pictures": plain("/api/settings", {"image": photo}),
        "edges": plain("/api/hint", {"image": photo, "preprocess": "canny"}),
        "edges of 16 pictures": plain(
            "/controlnet/detect", {"controlnet_module": "canny", "controlnet_input_images": [medium] * 8}
        ),
        "a form with a picture": Kind(
            EDITS, lambda number: form(("prompt", b"x"), ("image", base64.b64decode(photo))), headers=multipart
        ),
        "a form with 30 pictures": Kind(
            EDITS,
            lambda number: form(("prompt", b"x"), *[("image[]", base64.b64decode(medium))] * 10),
            headers=multipart,
        ),
        "a form of CRs": Kind(EDITS, lambda number: form(("image", b"\r" * 2**24)), headers=multipart),
        "a form of boundaries": Kind(EDITS, lambda number: b"\r\n--" * 2**21, headers=multipart),
        "large images wait": asking(A1111, width=1024, height=1024, steps=1, parallel=12),
        "512 px": asking(A1111, width=512, height=512, steps=1),
        "a plot": asking(PAGE, x={"option": "seed", "values": "1-16"}),
        "a plot of 256 cells": asking(PAGE, x={"option": "seed", "values": "1-256"}, steps=1),
        "a plot that replaces": asking(PAGE, prompt="a" * 9000, x={"option": "replace", "values": "a," + "b" * 9000}),
        "more work than is allowed": asking(A1111, batch_size=16, width=1024, height=1024, steps=150),
        "a side of 65528": asking(IMG2IMG, init_images=[small], width=65528),
        "a long prompt": asking(A1111, prompt=text, negative_prompt=text),
        "a long prompt of the second pass": asking(A1111, hr_prompt=words, **second | {"hr_scale": 1}),
        "parts of many chunks": asking(A1111, prompt=" AND ".join([text[:2000]] * 8), steps=20),
        "more parts than are allowed": asking(A1111, prompt=" AND ".join("x" * 400)),
        "BREAKs": asking(A1111, prompt="BREAK " * 3000),
        "brackets": asking(A1111, prompt="(" * 9000 + ":1" + ")" * 9000),
        "LoRAs": asking(A1111, prompt="<lora:a:1>" * 1500),
        "a sampler of 60 KB": asking(A1111, sampler_name="e" * 60_000),
        "a sampler of 1 MB": asking(A1111, sampler_name="e" * 2**20),
        "a million zeros": plain(EXTRAS, b'{"imageList":[' + b"0," * 2**20 + b"0]}"),
        "open brackets": plain(A1111, b"[" * 2**20),
        "many fields": plain(A1111, SMALL | {f"{'k' * 150}{place}": "v" * 20_000 for place in range(1000)}),
        "fields of wrong types": plain(IMG2IMG, {"init_images": [0] * 1000}),
        "32 MiB of spaces": plain(A1111, b" " * (2**25 - 100)),
        "33 MiB": plain(A1111, b" " * (33 * 2**20)),
        "bodies that drip": asking(A1111, "drip", prompt="x" * 10_000),
        "large bodies that stop": raw(f"POST {A1111} {HEAD}Content-Length: 30000000\r\n\r\n".encode() + b" " * 2**24),
        "chunks of one byte": raw(
            f"POST {A1111} {HEAD}Transfer-Encoding: chunked\r\n\r\n".encode() + b"1\r\n \r\n" * 9**5
        ),
        "both lengths": raw(f"POST {A1111} {HEAD}Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"),
        "no HTTP": raw("\x16\x03\x01" * 1000 + "\r\n\r\n"),
        "half a head": raw("GET /healthz HTTP/1.1\r\nX: "),
        "a head without an end": raw("GET / HTTP/1.1\r\n" + "X: a\r\n" * 20_000),
        "nothing": raw(""),
        "200 requests in one connection": raw(f"GET /openapi.json {HEAD}\r\n" * 200),
        "a request and 2 MiB": raw(f"GET /sdapi/v1/loras {HEAD}\r\n".encode() + b"x" * 2**21),
        "progress": Kind("/sdapi/v1/progress", lambda number: None),
        "the form's fields": Kind("/api/form", lambda number: None),
        "numbers": Kind("/metrics", lambda number: None),
        "the page's files": Kind("/", lambda number: None),
        "addresses that there are not": Kind("/" + "a/" * 4000, lambda number: None),
    }


WATCHING = """
import http.client, sys, threading, time
ended, slowest = threading.Event(), 0.0
threading.Thread(target=lambda: (sys.stdin.read(), ended.set())).start()
while not ended.wait(0.05):
    start, connection = time.monotonic(), http.client.HTTPConnection("127.0.0.1", int(sys.argv[1]), timeout=100)
    try:
        connection.request("GET", "/healthz")
        status = connection.getresponse().status
    except (OSError, http.client.HTTPException):
        status = 0
    connection.close()
    slowest = max(slowest, time.monotonic() - start if status == 200 else 1000.0)
print(slowest)
"""  # in a process of its own, whose times the threads of this one do not change


class Watch:
    """Memory and health of a server while something is sent."""

    def __init__(self, server: Server) -> None:
        self.server = server
        Path(f"/proc/{server.process.pid}/clear_refs").write_text("5")  # the peak begins anew
        command = [sys.executable, "-c", WATCHING, str(server.port)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def end(self) -> tuple[float, float]:
        """Return the peak of the memory in MiB, and the slowest answer in seconds."""
        seconds, _ = self.process.communicate()
        return peak(self.server), float(seconds)


def peak(server: Server) -> float:
    """The most memory that the process had, in MiB."""
    lines = Path(f"/proc/{server.process.pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) / 1024


def send(server: Server, kind: Kind, number: int, address: str, until: float) -> str:
    """Send one request of a kind from an address, and return its status; what takes longer than until is left."""
    body = kind.make(number)
    left = max(0.5, until - time.monotonic())
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=left, source_address=(address, 0))
    try:
        if kind.how in ("raw", "drip"):
            connection.connect()
            assert connection.sock is not None
            if kind.how == "raw":
                connection.sock.sendall(body)
                return "closed" if connection.sock.recv(100) == b"" else "answered"
            connection.putrequest("POST", kind.path)
            connection.putheader("Content-Length", str(len(body)))
            connection.endheaders()
            for start in range(0, len(body), 1250):
                connection.send(body[start : start + 1250].encode())
                time.sleep(min(0.5, max(0.0, until - time.monotonic())))
            return str(connection.getresponse().status)
        if kind.how == "slow":
            connection.connect()
            assert connection.sock is not None
            connection.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        connection.request("GET" if body is None else "POST", kind.path, body, kind.headers or {})
        if kind.how == "leave":
            time.sleep(0.05)
            return "left"
        response = connection.getresponse()
        while response.read(1250 if kind.how == "slow" else 2**16):
            if kind.how == "slow":
                time.sleep(0.5)
            if time.monotonic() > until:
                return f"{response.status}, left"
        return str(response.status)
    except TimeoutError:
        return "left"
    except (OSError, http.client.HTTPException):
        return "closed"
    finally:
        connection.close()


def attack(server: Server, kind: Kind, many: bool, seconds: float) -> Counter[str]:
    """Send requests of a kind for some seconds, from one address or many; return how many got which status."""
    until, statuses, numbers, lock = time.monotonic() + seconds, Counter[str](), itertools.count(), threading.Lock()

    def run(place: int) -> None:
        address = f"127.0.{1 + place // 250}.{2 + place % 250}" if many else "127.0.0.2"
        while time.monotonic() < until:
            status = send(server, kind, next(numbers), address, until)
            with lock:
                statuses[status] += 1
            time.sleep(0.02)

    threads = [threading.Thread(target=run, args=(place,)) for place in range(kind.parallel)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return statuses


def settle(server: Server, least: float = 5.0) -> float:
    """Wait until nothing runs and freed memory has gone back to the system; return the MiB."""
    end, quiet = time.monotonic() + 180, time.monotonic()
    while time.monotonic() < end and time.monotonic() < quiet + least:
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=10)
        with contextlib.suppress(OSError, http.client.HTTPException):
            connection.request("GET", "/metrics")
            lines = connection.getresponse().read().decode().splitlines()
            busy = sum(
                float(line.split()[1]) for line in lines if line.startswith(("ldm_lite_running", "ldm_lite_wait"))
            )
            quiet = time.monotonic() if busy else quiet
        connection.close()
        time.sleep(0.5)
    return server.memory


def mixed(server: Server, minutes: float, attackers: dict[str, Kind]) -> dict[str, Any]:
    """Good clients beside hostile ones; return the memory, the health, and what the good ones got."""
    requests = [
        {"prompt": f"a {color} {thing}", "seed": seed, "steps": 2 + seed % 3}
        for seed, (color, thing) in enumerate(itertools.product(COLORS, THINGS))
    ]
    pipe = ldm_lite.load(device="cpu")
    wanted = [pipe.txt2img(**asked, prompt_syntax="a1111", negative_prompt="")[0].tobytes() for asked in requests]
    until, counts, lock = time.monotonic() + 60 * minutes, Counter[str](), threading.Lock()
    before, watch = settle(server), Watch(server)

    def good(place: int) -> None:
        choice = random.Random(place)
        while time.monotonic() < until:
            number = choice.randrange(len(requests))
            status, answer = server.ask(A1111, requests[number], address=f"127.0.100.{2 + place}")
            if status == 200:
                image = Image.open(io.BytesIO(base64.b64decode(answer["images"][0])))
                status = 200 if image.tobytes() == wanted[number] else 999
            with lock:
                counts[f"good {status}"] += 1
            time.sleep(choice.random())

    def hostile(place: int) -> None:
        choice, numbers = random.Random(-place), itertools.count()
        while time.monotonic() < until:
            kind = attackers[choice.choice(list(attackers))]
            end = min(until, time.monotonic() + choice.uniform(1, 20))
            status = send(server, kind, next(numbers), f"127.0.0.{choice.randrange(2, 250)}", end)
            with lock:
                counts[f"hostile {status}"] += 1

    threads = [threading.Thread(target=good, args=(place,)) for place in range(6)]
    threads += [threading.Thread(target=hostile, args=(place,)) for place in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    most, slowest = watch.end()
    after = settle(server)
    return {"before": before, "most": most, "after": after, "slowest": slowest, "counts": dict(sorted(counts.items()))}


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=10, help="of each kind")
    parser.add_argument("--minutes", type=float, default=30, help="of the mixed run")
    parser.add_argument("--only", default="", help="kinds with this in their names")
    arguments = parser.parse_args()
    chosen, failures = {name: kind for name, kind in kinds().items() if arguments.only in name}, list[str]()
    with tempfile.TemporaryDirectory() as folder:
        networks = Path(folder) / "networks"
        networks.mkdir()
        for name in ("first", "second"):
            network = RRDBNet(RRDBSpec(fold=1, width=64, grown=32, blocks=6))  # 18 MiB
            torch.save({"params": network.state_dict()}, networks / f"{name}.pth")
        (Path(folder) / "empty").mkdir()
        server = Server(Path(folder) / "empty", "--upscalers", str(networks))
        try:
            attack(server, chosen[next(iter(chosen))], False, 5)
            idle = settle(server)
            print(f"idle: {idle:.0f} MiB; kinds: {len(chosen)}")
            for name, kind in chosen.items():
                for many in (False, True):
                    watch = Watch(server)
                    statuses = attack(server, kind, many, arguments.seconds)
                    most, slowest = watch.end()
                    left = settle(server, 2.5) - idle
                    row = f"{name}, {'many addresses' if many else 'one address'}"
                    told = f"+{most - idle:.0f} MiB, {left:+.0f} left, health {slowest:.2f} s, {dict(statuses)}"
                    print(f"{row}: {told}", flush=True)
                    if most - idle > MOST_MIB or slowest > MOST_SECONDS:
                        failures.append(f"{row}: {told}")
            if arguments.minutes:
                report = mixed(server, arguments.minutes, kinds())
                print(json.dumps(report, indent=2))
                failures += ["memory is left"] * (report["after"] - report["before"] > MOST_LEFT)
                failures += ["an image differs"] * ("good 999" in report["counts"])
        finally:
            server.process.terminate()
            server.process.wait()
    print("\n".join(["", f"{len(failures)} failures", *failures]))
    return int(bool(failures))


if __name__ == "__main__":
    sys.exit(main())
