"""A server for the tests: connections to this machine alone are allowed."""

import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import serving

LOCAL = {"127.0.0.1", "localhost", "::1"}


@pytest.fixture(autouse=True)
def _no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """In place of the suite's, which refuses every connection."""
    connect, lookup = socket.socket.connect, socket.getaddrinfo

    def connect_here(self: socket.socket, address: Any) -> None:
        assert self.family == socket.AF_UNIX or address[0] in LOCAL, f"a test tried to reach {address}"
        connect(self, address)

    def lookup_here(host: Any, *args: Any, **kwargs: Any) -> Any:
        assert host in (None, *LOCAL), f"a test asked for {host}"
        return lookup(host, *args, **kwargs)

    monkeypatch.setattr(socket.socket, "connect", connect_here)
    monkeypatch.setattr(socket, "getaddrinfo", lookup_here)


@pytest.fixture(scope="session")
def library(small_path: Path) -> Any:
    """The miniature model; tests that change models make their own."""
    return serving.library_of(small_path)


@pytest.fixture
def start(library: Any) -> Iterator[Callable[..., serving.Running]]:
    """-> a function of options that starts a server; it is stopped after the test."""
    servers: list[serving.Running] = []

    def run(**options: Any) -> serving.Running:
        servers.append(serving.Running(library, **options))
        return servers[-1]

    yield run
    for server in servers:
        server.close()
