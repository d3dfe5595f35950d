"""The engine: one queue, images of several requests in one run, each as it is alone."""

import gc
import itertools
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import random_checkpoint
import torch
from PIL import Image
from safetensors.torch import save_file
from serving import Full, Stopping, engine_of, finished, library_of, submit
from torch import nn

import ldm_lite
from ldm_lite import Pipeline
from ldm_lite.bench.measure import status
from ldm_lite.core.denoise import Branch, join, run_row, weighted
from ldm_lite.core.plan import device_rows
from ldm_lite.models.unet import LDMUNet
from ldm_lite.runtime.patching import is_unmodified, kernel, patch
from ldm_lite.runtime.together import Together
from ldm_lite.serve.ledger import CLIENT
from ldm_lite.serve.options import LARGEST


def options(prompt: str = "a car", seed: int = 1, **more: Any) -> dict[str, Any]:
    return {"prompt": prompt, "seed": seed, "steps": 3, "width": 32, "height": 32} | more


@pytest.fixture
def engine(library: Any) -> Iterator[Any]:
    engine = engine_of(library)
    yield engine
    engine.start() if engine._thread.ident is None else None
    engine.close()


@pytest.fixture(scope="module")
def alone(small_path: Path) -> Pipeline:
    return ldm_lite.load(small_path, device="cpu")


def test_requests_run_together_with_the_bits_that_they_have_alone(engine: Any, alone: Pipeline) -> None:
    """Prompts, negative prompts, seeds and counts differ; one has a second chunk of text and one other steps."""
    long = ", ".join(["a red apple on a blue background"] * 20)
    requests = [
        options("an apple", 1),
        options("a car", 7, batch_size=2),
        options("a dog", 9, negative_prompt="ugly", n_iter=2),
        options(long, 3, prompt_syntax="a1111"),
        options("a cat", 4, steps=2),
    ]
    tickets = [submit(engine, "txt2img", request) for request in requests]
    assert [ticket.position for ticket in tickets] == [0, 1, 3, 5, 6]
    engine.start()
    for ticket, asked in zip(tickets, requests, strict=True):
        for result in finished(ticket):
            more = {
                "steps": asked["steps"],
                "negative_prompt": asked.get("negative_prompt"),
                "prompt_syntax": asked.get("prompt_syntax", "plain"),
            }
            size = {"width": 32, "height": 32, "seed": result.seed}
            [wanted] = alone.txt2img(result.prompt, **size, **more, output="result")
            assert result.image.tobytes() == wanted.image.tobytes()
            assert result.parameters == wanted.parameters
    assert [len(ticket.results) for ticket in tickets] == [1, 2, 2, 1, 1]
    assert engine.totals["batches"] == 3
    assert engine.totals["images"] == 7


def test_images_whose_steps_take_turns_have_the_bits_that_they_have_alone(library: Any, alone: Pipeline) -> None:
    """Batches of two clients, of other counts of images and steps."""
    engine, ticks, tickets, order = engine_of(library), itertools.count(), list[Any](), list[str]()
    engine.clock = lambda: float(next(ticks))
    asked = {"a": options("an apple", 1, batch_size=3, steps=6), "b": options("a car", 7, steps=8, batch_size=2)}
    for client, request in asked.items():
        token = CLIENT.set(client)
        tickets.append(submit(engine, "txt2img", request))
        tickets[-1].listen(lambda client=client: order.append(client))
        CLIENT.reset(token)
    engine.start()
    for ticket, request in zip(tickets, asked.values(), strict=True):
        for result in finished(ticket):
            more = {"steps": request["steps"], "seed": result.seed, "width": 32, "height": 32}
            [wanted] = alone.txt2img(result.prompt, **more)
            assert result.image.tobytes() == wanted.tobytes()
    engine.close()
    assert "ab" in "".join(order)[3:-3]
    assert "ba" in "".join(order)[3:-3]


@pytest.mark.slow
def test_fast_batching_differs_by_one_of_255_at_most(bundled: Pipeline) -> None:
    engine = engine_of(library_of(batching="fast"), batching="fast")
    assert engine.library.together is None
    requests = {seed: {"prompt": f"{seed} apples", "seed": seed, "steps": 10} for seed in range(8)}
    tickets = [submit(engine, "txt2img", request) for request in requests.values()]
    engine.start()
    for seed, result in zip(requests, finished(*tickets), strict=True):
        [wanted] = bundled.txt2img(f"{seed} apples", seed=seed, steps=10, output="numpy")
        assert abs(np.asarray(result.image).astype(int) - wanted.astype(int)).max() <= 1
    assert engine.totals["batches"] == 1
    engine.close()


def test_image_to_image_and_inpainting_run_together_as_alone(engine: Any, alone: Pipeline) -> None:
    pictures = [Image.new("RGB", (32, 32), color) for color in ("red", "blue", "green")]
    mask = Image.new("L", (32, 32))
    mask.paste(255, (0, 0, 16, 32))
    more: dict[str, Any] = {"steps": 4, "strength": 0.5, "sampler": "euler_a"}
    tickets = [
        submit(engine, "img2img", {"prompt": "x", "init_img": (picture,), "seed": i} | more)
        for i, picture in enumerate(pictures)
    ]
    tickets += [
        submit(engine, "inpaint", {"prompt": "x", "init_img": (picture,), "mask": (mask,), "seed": i} | more)
        for i, picture in enumerate(pictures)
    ]
    engine.start()
    results = finished(*tickets)
    for i, picture in enumerate(pictures):
        assert results[i].image.tobytes() == alone.img2img("x", picture, seed=i, **more)[0].tobytes()
        assert results[3 + i].image.tobytes() == alone.inpaint("x", picture, mask, seed=i, **more)[0].tobytes()
    assert engine.totals["batches"] == 2


def test_a_layer_whose_bits_depend_on_the_batch_runs_image_by_image() -> None:
    @kernel
    def odd(layer: nn.Linear, x: torch.Tensor) -> torch.Tensor:
        return nn.Linear.forward(layer, x) * (1 + 2.0**-20 * (len(x) > 2))

    network, x = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), torch.randn(4, 8)  # two branches of two images
    patch(network[0], odd)
    with torch.no_grad():
        alone = [network(x[image::2]) for image in range(2)]
        assert not torch.equal(network(x)[::2], alone[0])
        together = Together(network)
        with together.images(2):
            outputs = network(x)
    assert all(torch.equal(outputs[image::2], alone[image]) for image in range(2))
    assert is_unmodified(network)


def test_a_step_whose_bits_depend_on_the_batch_runs_image_by_image(alone: Pipeline) -> None:
    calls = []

    def network(x: torch.Tensor, *inputs: object) -> torch.Tensor:
        calls.append(len(x))
        return x * len(x)

    together, [row] = Together(nn.Sequential()), device_rows(alone.plan(steps=1), torch.device("cpu"))
    registers = torch.randn(5, 3, 4, 2, 2)
    noise, guided = torch.zeros(3, 4, 2, 2), join([Branch({})], 1.0, torch.device("cpu"))
    for _ in range(2):
        outputs = together(network, registers, row, noise, guided, weighted, ())
        for image in range(3):
            of_image = registers[:, image : image + 1]
            wanted = run_row(network, of_image, row, noise[:1], guided)
            assert torch.equal(outputs[:, image : image + 1], wanted)
    assert calls.count(3) == 1  # it is tried once


def test_fairness_is_by_arrival(engine: Any) -> None:
    """A request that is alike runs with the first; of the others the oldest is next."""
    order: list[str] = []
    names = {"a": 3, "b": 2, "c": 3, "d": 2}
    tickets = [submit(engine, "txt2img", options(name, steps=steps)) for name, steps in names.items()]
    for ticket in tickets:
        name = str(ticket.options.prompt)
        ticket.listen(lambda ticket=ticket, name=name: order.append(name) if ticket.ended else None)  # type: ignore[misc]
    engine.start()
    finished(*tickets)
    assert order == ["a", "c", "b", "d"]


def test_progress_preview_and_interrupt(engine: Any) -> None:
    """What was predicted is the result; a request beside it in the batch goes on to its end."""
    first, second = (submit(engine, "txt2img", options(seed=seed, steps=30)) for seed in (1, 2))
    assert first.preview() is None
    first.listen(lambda: first.interrupt() if first.step == 5 else None)
    steps: list[int] = []
    first.listen(lambda: steps.append(first.step))
    engine.start()
    assert len(finished(first)) == 1
    assert first.preview() is not None
    assert first.interrupted
    assert finished(second)[0].image.size == (32, 32)
    assert second.step == 30
    assert max(steps) <= 6  # it heard of no step after its end


def test_an_interrupted_request_ends_though_the_first_of_its_batch_goes_on(engine: Any) -> None:
    first, second = (submit(engine, "txt2img", options(seed=seed, steps=30)) for seed in (1, 2))
    second.listen(lambda: second.interrupt() if second.step == 5 else None)
    steps: list[int] = []  # of the first, once the second has ended
    second.listen(lambda: steps.append(first.step) if second.ended else None)
    engine.start()
    assert len(finished(first, second)) == 2
    assert min(steps) == 6


def test_partial_images_are_evenly_spread(engine: Any) -> None:
    ticket = submit(engine, "txt2img", options(steps=8, batch_size=2), partials=3)
    assert ticket.results_size == (2 * (1 + 3) + 1) * 32 * 32 * 4  # and one as it is sent
    engine.start()
    finished(ticket)
    assert sorted(number for number, _ in ticket.partials) == [0, 0, 0, 1, 1, 1]


def test_a_cancelled_request_leaves_the_queue_and_stops_what_runs(engine: Any) -> None:
    running, waiting, last = (submit(engine, "txt2img", options(steps=n)) for n in (50, 40, 2))
    waiting.cancel()
    assert waiting.state == "cancelled"
    assert last.position == 1
    running.listen(lambda: running.cancel() if running.step == 2 else None)
    engine.start()
    finished(last)
    assert running.state == "cancelled"
    assert not running.results
    assert engine.totals["steps"] < 10


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"width": 256}, "got 256 x 32 pixels, expected at most 4096 of an image"),
        ({"width": 4096, "height": None}, "got 4096 x 64 pixels, expected at most 4096 of an image"),
        ({"steps": 11}, "got `steps` 11, expected at most 10"),
        ({"batch_size": 3, "n_iter": 2}, "got 6 images, expected at most 4 in a request"),
        ({"sampler": "nope"}, "unknown sampler"),
        ({"width": 33}, "expected multiples of 8"),
    ],
)
def test_limits_of_a_request(library: Any, wrong: dict[str, Any], message: str) -> None:
    """Before it waits: the engine does not run."""
    engine = engine_of(library, max_pixels=64 * 64, max_steps=10, max_images=4)
    with pytest.raises(ValueError, match=message):
        submit(engine, "txt2img", options(**wrong))


def test_the_default_size_of_images_follows_the_model(library: Any, tmp_path: Path) -> None:
    """Unless there are others."""
    assert engine_of(library).limits.max_pixels == 17 * library.facts(None).side ** 2
    assert engine_of(library, max_pixels=100).limits.max_pixels == 100
    assert engine_of(library_of(models=str(tmp_path))).limits.max_pixels == LARGEST


def test_the_queue_has_a_limit(library: Any) -> None:
    engine = engine_of(library, max_queue=5)
    submit(engine, "txt2img", options(batch_size=4))
    with pytest.raises(Full, match="the queue is full: 1 requests are waiting, at most 5 images may"):
        submit(engine, "txt2img", options(batch_size=2))
    assert submit(engine, "txt2img", options()).position == 4


def test_a_request_that_is_too_old_ends(library: Any) -> None:
    engine = engine_of(library, timeout=0.2)
    ticket = submit(engine, "txt2img", options(steps=100))
    time.sleep(0.25)
    engine.start()
    with pytest.raises(TimeoutError, match=r"not finished after 0\.2 seconds"):
        finished(ticket)
    engine.close()


def test_stopping_finishes_what_runs_and_refuses_what_waits(library: Any) -> None:
    engine = engine_of(library)
    running, waiting = (submit(engine, "txt2img", options(steps=n)) for n in (8, 4))
    started = threading.Event()
    running.listen(lambda: started.set() if running.step else None)
    engine.start()
    assert started.wait(30)
    engine.close()
    assert len(finished(running)) == 1
    assert not running.interrupted
    with pytest.raises(Stopping, match="stopped before this request began"):
        finished(waiting)
    with pytest.raises(Stopping):
        submit(engine, "txt2img", options())
    assert not engine.healthy


def test_after_the_grace_stopping_returns_what_is_there(library: Any) -> None:
    engine = engine_of(library, grace=0.0)
    ticket = submit(engine, "txt2img", options(steps=100))
    ticket.listen(lambda: engine.stop() if ticket.step == 2 else None)
    engine.start()
    assert len(finished(ticket)) == 1
    assert ticket.interrupted
    engine.close()


def test_an_error_ends_its_request_alone(engine: Any) -> None:
    """A guidance that overflows makes latents that are not finite."""
    bad = submit(engine, "txt2img", options(guidance=lambda step: 1e38, steps=2))
    good = submit(engine, "txt2img", options(steps=2))
    engine.start()
    with pytest.raises(ValueError, match="not finite"):
        finished(bad)
    assert finished(good)


@pytest.fixture
def models(tmp_path: Path, small_path: Path) -> Path:
    models = tmp_path / "models"
    (models / "more").mkdir(parents=True)
    for name, seed in (("one", 1), ("more/two", 2)):
        random_checkpoint.write(models / f"{name}.safetensors", random_checkpoint.SMALL, seed=seed)
    (tmp_path / "secret.safetensors").write_bytes(small_path.read_bytes())
    return models


@pytest.mark.slow
def test_models_are_swapped_on_request_and_named_from_their_folder_alone(models: Path, small_path: Path) -> None:
    library = library_of(small_path, models=str(models))
    assert library.names == ["small", "more/two", "one"]
    engine = engine_of(library, models=str(models))
    for name in ("../secret", "secret", "/etc/passwd", "more/../one", ""):
        with pytest.raises(ValueError, match="unknown model"):
            submit(engine, "txt2img", options(), model=name)
    tickets = [
        submit(engine, "txt2img", options(batch_size=2), model=name) for name in ("one", None, "more/two", "one")
    ]
    engine.start()
    results = finished(*tickets)
    assert engine.totals["swaps"] == 2  # those of one model run one after the other
    engine.close()
    assert results[0].image.tobytes() == results[6].image.tobytes()
    assert results[0].image.tobytes() != results[4].image.tobytes()
    path = models / "more" / "two.safetensors"
    [wanted] = ldm_lite.load(path, device="cpu").txt2img("a car", seed=1, steps=3, width=32, height=32)
    assert results[4].image.tobytes() == wanted.tobytes()


def write_lora(path: Path) -> None:
    name = "lora_unet_down_blocks_0_attentions_0_transformer_blocks_0_attn2_to_k"
    save_file({f"{name}.lora_down.weight": torch.ones(2, 64), f"{name}.lora_up.weight": torch.ones(32, 2)}, path)


def test_loras_are_merged_for_the_requests_that_name_them(library: Any, small_path: Path, tmp_path: Path) -> None:
    write_lora(tmp_path / "ones.safetensors")
    engine = engine_of(library_of(small_path, loras=str(tmp_path)), loras=str(tmp_path))
    with pytest.raises(ValueError, match="unknown LoRA 'twos': expected one of ones"):
        submit(engine, "txt2img", options(), loras=(("twos", 1.0),))
    with pytest.raises(ValueError, match=r"got `loras` .* expected a folder"):
        library_of(loras=str(tmp_path / "none"))
    lora_sets: list[Any] = [(), (("ones", 0.5),), (), (("ones", 0.5),), (("ones", 1.0),)]
    tickets = [submit(engine, "txt2img", options(), loras=loras) for loras in lora_sets]
    engine.start()
    plain, half, again, too, whole = (result.image.tobytes() for result in finished(*tickets))
    engine.close()
    assert plain == again
    assert half == too
    pipe = ldm_lite.load(small_path, device="cpu", lora=[f"{tmp_path / 'ones.safetensors'}:0.5"])
    assert half == pipe.txt2img("a car", seed=1, steps=3, width=32, height=32)[0].tobytes()
    assert half != plain
    assert half != whole


@pytest.mark.slow
def test_fifty_swaps_of_models_and_loras_do_not_grow_memory(models: Path, small_path: Path) -> None:
    """One UNet is alive, and the last 25 swaps take less memory than four of these models have."""
    write_lora(models.parent / "ones.safetensors")
    limits = {"models": str(models), "loras": str(models.parent)}
    others = sum(type(instance) is LDMUNet for instance in gc.get_objects())  # of fixtures, which live on
    engine = engine_of(library_of(small_path, **limits), **limits).start()
    sizes = []
    for swap in range(50):
        name, loras = ("one", "more/two")[swap % 2], ((("ones", 0.5),), ())[swap % 3 == 0]
        finished(submit(engine, "txt2img", options(steps=1), model=name, loras=loras))
        sizes.append(status("VmRSS") or 0)
    assert engine.totals["swaps"] == 50
    engine.close()
    gc.collect()
    assert sum(type(instance) is LDMUNet for instance in gc.get_objects()) <= others + 1
    weights = sum(parameter.numel() * parameter.element_size() for parameter in engine.library.model.unet.parameters())
    assert sizes[-1] - sizes[24] < 4 * weights
