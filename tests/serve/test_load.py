"""Many clients at once, in little: scripts/load_serve.py has the numbers.  With the bundled model, in a process."""

from pathlib import Path

import pytest
from waiting import wait_for

pytest.importorskip("uvicorn")
pytest.importorskip("fastapi")
pytest.importorskip("prometheus_client")

pytestmark = [pytest.mark.extra, pytest.mark.slow]


def test_no_wrong_answer_and_no_file_though_the_server_is_killed_and_started_again(own_kernels: None) -> None:
    import load_serve  # starts processes: only here

    measured, load = load_serve.measure(clients=12, seconds=24, steps=2, kill=True)
    assert load.counts["wrong"] == 0, load.counts
    assert load.counts["image: 200"] > 0
    assert load.counts["invalid: 422"] > 0
    assert measured["files"] == []
    assert measured["exit"] == 143


def test_memory_goes_back_after_images_of_many_sizes(tmp_path: Path, own_kernels: None) -> None:
    """Nothing is kept of layers that have run: kernels for these sizes took 22 MiB."""
    import load_serve

    server, memory = load_serve.Server(tmp_path), list[float]()
    try:
        for side in (64, 96, 128, 160, 192, 256, 320):
            request = {"prompt": "a cat", "steps": 1, "width": side, "height": side}
            assert server.ask(load_serve.A1111, request)[0] == 200
            memory.append(server.memory)
        wait_for(lambda: server.memory < memory[0] + 10, "the end of freed memory")
    finally:
        server.process.terminate()
        server.process.wait()
