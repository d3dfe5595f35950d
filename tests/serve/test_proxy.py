"""The server behind nginx, with the configuration of docs/serve.md."""

import http.client
import json
import logging
import os
import re
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import machine
import pytest
from serving import Running
from waiting import free_port, wait_for

pytest.importorskip("fastapi")
pytest.importorskip("uvicorn")
pytest.importorskip("prometheus_client")
pytestmark = pytest.mark.needs("nginx")

NAME = "images.example.org"
MAIN = """
{user} daemon off; pid {folder}/pid; error_log {folder}/errors; events {{}}
http {{
    access_log off;
    client_body_temp_path {folder}/body; proxy_temp_path {folder}/proxy; fastcgi_temp_path {folder}/fastcgi;
    uwsgi_temp_path {folder}/uwsgi; scgi_temp_path {folder}/scgi;
    {site}
}}
"""


def answers(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port)).close()
    except ConnectionRefusedError:
        return False
    return True


@pytest.fixture(scope="module")
def proxy(library: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    """The port of nginx in front of a server: without TLS, and with other ports than in the page's configuration."""
    server = Running(library, proxy="127.0.0.1", allow_host=(NAME,), max_body=32)
    folder, port = tmp_path_factory.mktemp("nginx"), free_port()
    text = (Path(__file__).parents[2] / "docs/serve.md").read_text()
    site = re.search(r"```\n(limit_req_zone.*?)```", text, re.DOTALL)
    assert site is not None
    lines = [line for line in site[1].splitlines() if "ssl_certificate" not in line]
    changed = "\n".join(lines).replace("listen 443 ssl", f"listen 127.0.0.1:{port}").replace("7860", str(server.port))
    user = "user root;" if os.geteuid() == 0 else ""  # whose folder it writes to
    (folder / "nginx.conf").write_text(MAIN.format(folder=folder, site=changed, user=user))
    with subprocess.Popen([str(machine.program("nginx")), "-p", folder, "-c", folder / "nginx.conf"]) as nginx:
        try:
            wait_for(lambda: answers(port), "an answer of nginx", process=nginx)
            yield port
        finally:
            nginx.terminate()
            server.close()


def ask(port: int, path: str, body: str | None = None, **headers: str) -> http.client.HTTPResponse:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    host = {"Host": f"{NAME}:{port}", "X-Forwarded-For": "9.9.9.9", "Connection": "close"}
    connection.request("GET" if body is None else "POST", path, body, host | headers)
    return connection.getresponse()


def test_the_page_and_other_clients_reach_the_server(proxy: int, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="ldm_lite.access"):
        assert ask(proxy, "/").status == 200
        assert ask(proxy, "/sdapi/v1/options", "{}", Origin=f"http://{NAME}:{proxy}").status == 200
        assert ask(proxy, "/sdapi/v1/options", "{}", Origin="http://evil.example").status == 403
        assert ask(proxy, "/healthz", Host="evil.example").status == 403
        lines = wait_for(
            lambda: [message for message in caplog.messages if "/healthz" in message], "the last one's line"
        )
    assert lines[0].startswith("127.0.0.1 GET /healthz 403")  # not what the client says of itself


def test_events_come_as_they_are_made(proxy: int) -> None:
    about = {"prompt": "x", "steps": 100, "size": "32x32", "stream": True, "partial_images": 1}
    with ask(proxy, "/v1/images/generations", json.dumps(about)) as answer:
        times = {line: time.monotonic() for line in answer if line.startswith(b"event")}
    partial, completed = times.values()
    assert completed > partial + 0.05


def test_bodies_are_as_large_as_the_server_takes(proxy: int) -> None:
    assert ask(proxy, "/sdapi/v1/options", " " * (32 * 2**20 - 2) + "{}").status == 200
    assert ask(proxy, "/sdapi/v1/options", " " * (32 * 2**20) + "{}").status == 413


def test_floods_are_answered_by_the_proxy(proxy: int) -> None:
    statuses = {ask(proxy, "/healthz").status for _ in range(80)}
    assert statuses == {200, 429}
