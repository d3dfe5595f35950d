"""Many clients at once, in little: scripts/load_serve.py has the numbers.  With the bundled model, in a process."""

import pytest

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
