"""The server on Ray Serve, with a cluster of this machine."""

import base64
import contextlib
import http.client
import io
import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from waiting import at_once, free_port

import ldm_lite
from ldm_lite.cli.options import LoadOptions
from ldm_lite.serve.options import ServeOptions

pytest.importorskip("fastapi")
pytest.importorskip("prometheus_client")
ray = pytest.importorskip("ray")
serve = pytest.importorskip("ray.serve")

pytestmark = [pytest.mark.extra, pytest.mark.slow]


def test_replicas_answer_with_the_images_of_one_process_and_are_healthy(
    small_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ldm_lite.serve import ray as on_ray

    monkeypatch.setenv("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")
    monkeypatch.setenv("PYTHONPATH", str(Path(ldm_lite.__file__).parents[1]))
    port = free_port()
    options = ServeOptions(replicas=2, port=port)
    ray.init(address="local", num_cpus=2, object_store_memory=2**27, include_dashboard=False, log_to_driver=False)
    try:
        serve.start(http_options={"host": "127.0.0.1", "port": port})
        application = on_ray.application(options, LoadOptions(ckpt=str(small_path), device="cpu"), None)
        serve.run(application, name="ldm_lite", route_prefix="/")
        status = serve.status().applications["ldm_lite"].deployments["ldm_lite"]
        assert status.replica_states == {"RUNNING": 2}

        def ask(path: str, content: Any) -> tuple[int, bytes]:
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
            connection.request("POST" if content else "GET", path, content and json.dumps(content))
            with contextlib.closing(connection):
                response = connection.getresponse()
                return response.status, response.read()

        assert ask("/healthz", None)[0] == 200
        assert ask("/v1/images/generations", {"prompt": "x", "size": "1x"})[0] == 422

        def make(seed: int) -> bytes:
            arguments = {"prompt": "an apple", "size": "32x32", "steps": 3, "seed": seed}
            return ask("/v1/images/generations", arguments)[1]

        pipe = ldm_lite.load(small_path, device="cpu")
        for seed, answer in enumerate(at_once(*(partial(make, seed) for seed in range(6)))):
            [wanted] = pipe.txt2img("an apple", width=32, height=32, steps=3, seed=seed)
            content = base64.b64decode(json.loads(answer)["data"][0]["b64_json"])
            assert Image.open(io.BytesIO(content)).tobytes() == wanted.tobytes()
        events = ask("/v1/images/generations", {"prompt": "x", "size": "32x32", "steps": 4, "stream": True})[1]
        assert events.startswith(b"event: image_generation.completed")
    finally:
        serve.shutdown()
        ray.shutdown()


def test_a_replica_whose_engine_has_ended_is_not_healthy(small_path: Path) -> None:
    from ldm_lite.serve.ray import Replica

    replica = Replica(ServeOptions(), LoadOptions(ckpt=small_path, device="cpu"), None)
    replica.check_health()
    replica.engine.close()
    with pytest.raises(RuntimeError, match="has ended"):
        replica.check_health()
