"""Load the server: many clients at once, valid and invalid requests, each image compared with a serial run.

    python scripts/load_serve.py --clients 200 --seconds 120
    python scripts/load_serve.py --clients 50 --seconds 60 --kill      # stopped, killed, and started again each time

Starts `python -m ldm_lite.serve` with the bundled model on a free port, in an empty folder that is also the folder for
temporary files, and reports statuses, times and images a second, then those of one client alone; beside them the times
of /healthz and the memory.  Some clients are hostile: they send requests that take time and memory, or nothing.  Fails
if an answer is not what its request deserves, if an image differs from the pipeline's, or if the server leaves a file.
"""

import argparse
import base64
import contextlib
import functools
import http.client
import io
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

from PIL import Image

import ldm_lite

OPENAI, A1111 = "/v1/images/generations", "/sdapi/v1/txt2img"
MOST_HELD = 20  # connections that a hostile client holds open
COLORS, THINGS = ("red", "blue", "green", "yellow"), ("apple", "car", "heart", "star")
INVALID: list[tuple[str, Any]] = [
    (OPENAI, {"prompt": "x", "size": "65536x65536"}),
    (OPENAI, {"prompt": "x", "steps": 0}),
    (OPENAI, {"prompt": "x", "sampler": "none"}),
    (OPENAI, b'{"prompt": "x", "scale": NaN}'),
    (A1111, b"[" * 100_000),
    (A1111, {"prompt": "x", "restore_faces": True}),
    ("/sdapi/v1/img2img", {"init_images": ["AAAA"]}),
]
HOST = "HTTP/1.1\r\nHost: localhost\r\n"
UNFINISHED = [  # what is sent of requests whose rest does not come
    "",
    "GET /healthz HTTP/1.1\r\nX: ",
    f"POST {A1111} {HOST}Content-Length: 10000\r\n\r\n{{",
    f"GET /openapi.json {HOST}\r\n" * 50,  # whose answers are not read
]


@functools.cache
def hostile() -> list[tuple[str, Any]]:
    """Requests that cost far too much if the server lets them."""
    file = io.BytesIO()
    Image.new("RGBA", (4096, 4096)).save(file, "PNG")
    large = base64.b64encode(file.getvalue()).decode()
    file = io.BytesIO()
    Image.new("RGB", (2048, 2048)).save(file, "JPEG", progressive=True)
    content = file.getvalue()
    scans = content[:-2] + content[content.rfind(b"\xff\xda") : -2] * 1000 + content[-2:]
    return [
        ("/sdapi/v1/extra-batch-images", b'{"imageList":[' + b"0," * 2**20 + b"0]}"),
        ("/sdapi/v1/img2img", {"init_images": [0] * 1000}),
        ("/sdapi/v1/img2img", {"init_images": [large], "mask": large, "steps": 1}),
        ("/sdapi/v1/png-info", {"image": base64.b64encode(scans).decode()}),
        (A1111, {"prompt": " AND ".join("x" * 400)}),
        (A1111, {"prompt": "BREAK " * 3000}),
        (A1111, {"prompt": "x", "sampler_name": "e" * 2**20}),
        (OPENAI, {"prompt": "x", "n": 16, "steps": 150, "size": "1024x1024"}),
        ("/sdapi/v1/img2img", {"init_images": [large], "width": 65528}),
    ]


class Server:
    """The server's process."""

    def __init__(self, folder: Path, *flags: str) -> None:
        self.folder, self.flags = folder, flags
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        self.start()

    def start(self) -> None:
        """Start it, and wait until it answers."""
        command = [sys.executable, "-m", "ldm_lite.serve", "--port", str(self.port), "--device", "cpu"]
        root = str(Path(__file__).resolve().parent.parent)
        environment = os.environ | {"TMPDIR": str(self.folder), "PYTHONPATH": root, "PYTHONDONTWRITEBYTECODE": "1"}
        command += self.flags
        # Its log has a line for each request.
        self.process = subprocess.Popen(command, cwd=self.folder, env=environment, stderr=subprocess.DEVNULL)
        while self.ask("/healthz", None)[0] != 200:
            if self.process.poll() is not None:
                raise SystemExit("the server has not started")
            time.sleep(0.1)

    def ask(self, path: str, content: Any, address: str = "127.0.0.1") -> tuple[int, Any]:
        """The status and the answer to a request from an address; status 0 if there is no server."""
        body = content if content is None or isinstance(content, bytes) else json.dumps(content)
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=600, source_address=(address, 0))
        try:
            connection.request("GET" if body is None else "POST", path, body)
            response = connection.getresponse()
            return response.status, json.loads(response.read())
        except (OSError, http.client.HTTPException):
            return 0, None
        finally:
            connection.close()

    @property
    def memory(self) -> float:
        """MiB that the process has."""
        try:
            return (
                int(Path(f"/proc/{self.process.pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20
            )
        except OSError:
            return 0.0

    def leave(self, path: str, content: Any) -> None:
        """Send a request and disconnect."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=600)
        try:
            connection.request("POST", path, json.dumps(content))
            time.sleep(0.05)
        except OSError:
            pass
        finally:
            connection.close()


class Load:
    """Clients that send random requests, and their answers."""

    def __init__(self, server: Server, steps: int) -> None:
        self.server = server
        self.requests = [
            {"prompt": f"a {color} {thing}", "seed": seed, "steps": steps + (seed % 2)}
            for seed, (color, thing) in enumerate((color, thing) for color in COLORS for thing in THINGS)
        ]
        pipe = ldm_lite.load(device="cpu")
        a1111 = {"prompt_syntax": "a1111", "negative_prompt": ""}
        self.wanted = {
            path: [pipe.txt2img(**request, **more)[0].tobytes() for request in self.requests]
            for path, more in ((OPENAI, {}), (A1111, a1111))
        }
        self.counts, self.seconds = Counter[str](), list[float]()
        self.health, self.memory = list[float](), list[float]()
        self.down, self.up_since, self._lock = False, 0.0, threading.Lock()

    def client(self, number: int, until: float) -> None:
        """Ask until a time: four valid requests of five, and some that nobody waits for."""
        choice = random.Random(number)
        while time.monotonic() < until:
            kind = choice.random()
            if kind < 0.15:
                path, content = choice.choice(INVALID)
                self.note("invalid", time.monotonic(), self.server.ask(path, content)[0], (422,))
            elif kind < 0.2:
                self.server.leave(OPENAI, choice.choice(self.requests))
                self.note("left", time.monotonic(), 200, (200,))
            else:
                self.valid(choice.randrange(len(self.requests)), choice.choice((OPENAI, A1111)))

    def attack(self, number: int, until: float) -> None:
        """Send hostile requests, and hold connections open."""
        choice, held = random.Random(-number), list[socket.socket]()
        while time.monotonic() < until:
            path, content = choice.choice(hostile())
            wanted = 408, 413, 422, 429, 503
            self.note("hostile", time.monotonic(), self.server.ask(path, content)[0], wanted)
            with contextlib.suppress(OSError):
                held.append(socket.create_connection(("127.0.0.1", self.server.port), timeout=5))
                held[-1].sendall(choice.choice(UNFINISHED).encode())
            if len(held) > MOST_HELD:
                held.pop(0).close()
        for connection in held:
            connection.close()

    def watch(self, until: float) -> None:
        """Ask for the server's health, and read its memory."""
        while time.monotonic() < until:
            start, down = time.monotonic(), self.down
            status, _ = self.server.ask("/healthz", None)
            if not (down or self.down):
                self.note("health", start, status, (200,))
                self.health.append(time.monotonic() - start)
                self.memory.append(self.server.memory)
            time.sleep(0.1)

    def valid(self, place: int, path: str) -> None:
        """Ask for an image, and compare it."""
        start = time.monotonic()
        status, answer = self.server.ask(path, self.requests[place])
        data = None
        if status == 200:
            data = answer["data"][0]["b64_json"] if path == OPENAI else answer["images"][0]
        self.note("valid", start, status, (200, 429))
        if data is not None:
            same = Image.open(io.BytesIO(base64.b64decode(data))).tobytes() == self.wanted[path][place]
            self.note("image", start, 200 if same else 500, (200,))
            with self._lock:
                self.seconds.append(time.monotonic() - start)

    def note(self, kind: str, start: float, status: int, right: tuple[int, ...]) -> None:
        """Count the answer to a request that was sent at `start`; if the server was down since then, none is wrong."""
        fine = status in right or (status in (0, 503) and (self.down or start < self.up_since))
        with self._lock:
            self.counts[f"{kind}: {status or 'no server'}"] += 1
            self.counts["wrong"] += not fine
        if status == 0:
            time.sleep(0.5)  # before it asks again

    def run(self, clients: int, seconds: float, kill: bool = False, attackers: int = 0) -> dict[str, float]:
        """Run so many clients; return images a second, and the median and 95th percentile of their seconds."""
        start, self.seconds = time.monotonic(), []
        threads = [threading.Thread(target=self.client, args=(i, start + seconds)) for i in range(clients)]
        threads += [threading.Thread(target=self.attack, args=(i, start + seconds)) for i in range(attackers)]
        threads.append(threading.Thread(target=self.watch, args=(start + seconds,)))
        for thread in threads:
            thread.start()
        for number in (signal.SIGTERM, signal.SIGKILL) if kill else ():
            time.sleep(seconds / 3)
            self.down = True
            self.server.process.send_signal(number)
            self.server.process.wait()
            self.server.start()
            time.sleep(1)
            self.down, self.up_since = False, time.monotonic()
        for thread in threads:
            thread.join()
        taken, times = time.monotonic() - start, sorted(self.seconds)
        share = {"p50": 0.5, "p95": 0.95}
        report = {name: times[min(len(times) - 1, int(part * len(times)))] for name, part in share.items()}
        return {"images": len(times), "images/s": len(times) / taken, **report}


def measure(clients: int, seconds: float, steps: int, kill: bool) -> tuple[dict[str, Any], Load]:
    """Start a server, load it, then ask with one client alone; return what was measured."""
    with tempfile.TemporaryDirectory() as folder:
        server = Server(Path(folder), "--max-queue", "1000", "--max-connections", "2000")
        try:
            load = Load(server, steps)
            together = load.run(clients, seconds, kill, attackers=max(1, clients // 10))
            health, memory = sorted(load.health), load.memory
            alone = load.run(1, min(20.0, seconds / 2))
        finally:
            server.process.terminate()
            status = server.process.wait()
        files = [str(path) for path in Path(folder).rglob("*") if path.is_file()]
    report: dict[str, Any] = {"together": together, "alone": alone, "answers": dict(load.counts), "files": files}
    report |= {"exit": status, "health p95 ms": 1000 * health[int(0.95 * len(health))]}
    third = memory[len(memory) // 3]
    return report | {"MiB": {"first": memory[0], "third": third, "most": max(memory), "last": memory[-1]}}, load


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--clients", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=120)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--kill", action="store_true", help="kill the server half way, and start it again")
    arguments = parser.parse_args()
    measured, load = measure(arguments.clients, arguments.seconds, arguments.steps, arguments.kill)
    print(json.dumps(measured, indent=2))
    return int(load.counts["wrong"] > 0 or bool(measured["files"]))


if __name__ == "__main__":
    sys.exit(main())
