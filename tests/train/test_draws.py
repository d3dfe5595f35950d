"""What a run draws is of its seed and its examples: not of a global generator, nor of how batches are divided."""

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import toy
from PIL import Image
from safetensors.torch import load_file
from torch.utils._python_dispatch import TorchDispatchMode
from training import load_options, losses, options, train

import ldm_lite
from ldm_lite.train.additions import LowRank
from ldm_lite.train.batches import Batch, Draws, bits_of, fraction
from ldm_lite.train.losses import DiffusionLoss

LORA: dict[str, Any] = {"lora_rank": 2}
KINDS: dict[str, dict[str, Any]] = {
    "whole": {"train_text": True, "caption_dropout": 0.5, "weighting": "learned", "noise_offset": 0.1},
    "lora": LORA | {"lora_text": True, "lora_conv": 2, "lora_dropout": 0.5, "checkpointing": True},
    "dora": LORA | {"lora_kind": "dora", "class_prompt": "a picture"},
    "loha": LORA | {"lora_kind": "loha", "validation": "0.5"},
    "lokr": LORA | {"lora_kind": "lokr", "buckets": True, "flip": True},
    "embedding": {"stage": "embedding", "token": "picture", "vectors": 2},
    "control": {"stage": "control"},
    "lcm": LORA | {"lcm": True},
    "workers": LORA | {"data_workers": 1},
}


class NoGlobalGenerator(TorchDispatchMode):
    """Within it, what draws from torch's global generator is an error."""

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        draws = torch.Tag.nondeterministic_seeded in func.tags and "attention" not in str(func)
        tensors = [value for value in args if isinstance(value, torch.Tensor)]
        if draws and (kwargs or {}).get("generator") is None and not any(value.is_meta for value in tensors):
            raise AssertionError(f"{func} draws from the global generator")
        return func(*args, **(kwargs or {}))


@pytest.fixture(scope="module")
def hinted(tmp_path_factory: pytest.TempPathFactory, folder: Path) -> Path:
    """Six captioned images, each with one for a ControlNet."""
    path = tmp_path_factory.mktemp("hinted")
    for image in folder.iterdir():
        (path / image.name).symlink_to(image)
        if image.suffix == ".png":
            Image.open(image).transpose(Image.Transpose.FLIP_LEFT_RIGHT).save(path / f"{image.stem}.hint.png")
    return path


def test_a_draw_from_the_global_generator_is_an_error() -> None:
    """Of the fixture itself."""
    for draw in (
        lambda: torch.randn(2),
        lambda: torch.nn.functional.dropout(torch.ones(2)),
        lambda: torch.nn.Linear(2, 2),
    ):
        with NoGlobalGenerator(), pytest.raises(AssertionError, match="draws from the global generator"):
            draw()
    with NoGlobalGenerator():
        torch.randn(2, generator=torch.Generator())


@pytest.mark.parametrize("kind", KINDS)
def test_no_run_draws_from_a_global_generator(kind: str, hinted: Path, small_path: Path, tmp_path: Path) -> None:
    before = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()  # type: ignore[index]
    with NoGlobalGenerator():
        train(options(hinted, tmp_path, **KINDS[kind] | {"steps": 1}), load_options(small_path))
    after = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()  # type: ignore[index]
    assert torch.equal(before[0], after[0])
    assert before[1:] == after[1:]


@pytest.mark.parametrize("kind", ["lora", "loha", "lokr", "control"])
def test_what_a_run_begins_with_is_of_its_seed(kind: str, hinted: Path, small_path: Path, tmp_path: Path) -> None:
    """Also after a run that was stopped before its first save, whose images are encoded: it had drawn less."""
    more = {name: value for name, value in KINDS[kind].items() if name != "lora_dropout"} | {"ema_decay": 0.0}

    def weights(name: str, stop: bool = False, **changes: object) -> dict[str, torch.Tensor]:
        train_options = options(hinted, tmp_path / name, **more | {"steps": 1, "lr": 0.0, "sample_every": 0} | changes)

        def end(step: int, loss: float | None) -> None:
            raise KeyboardInterrupt

        if stop:
            with pytest.raises(KeyboardInterrupt):
                train(train_options, load_options(small_path), end)
            assert not (tmp_path / name / "state.pt").exists()
        return load_file(train(train_options, load_options(small_path)))

    first, again, state = weights("a"), weights("b", stop=True), weights("c", seed=1)
    assert all(torch.equal(first[key], again[key]) for key in first)
    drawn = [key for key in first if not torch.equal(first[key], state[key])]
    assert len(drawn) >= (7 if kind == "control" else 20)


@pytest.mark.slow
def test_dropout_is_of_examples_however_they_are_divided(folder: Path, small_path: Path, tmp_path: Path) -> None:
    """Of four in one batch, of two and two, and of four whose activations are recomputed."""
    arguments = LORA | {"lora_dropout": 0.5, "lora_text": True, "steps": 3, "lr": 0.05, "sample_every": 0}
    runs: dict[str, dict[str, Any]] = {
        "one": {"batch_size": 4},
        "two": {"batch_size": 2, "accumulate": 2},
        "recomputed": {"batch_size": 4, "checkpointing": True},
        "none": {"batch_size": 4, "lora_dropout": 0.0},
    }
    for name, more in runs.items():
        train(options(folder, tmp_path / name, **arguments | more), load_options(small_path, dtype="fp32"))
    first, two, recomputed, none = (losses(tmp_path / name) for name in runs)
    assert two == pytest.approx(first, rel=1e-5)
    assert recomputed == pytest.approx(first, rel=1e-5)
    assert none[2] != pytest.approx(first[2], rel=1e-5)


def test_dropout_leaves_out_its_share_and_keeps_the_mean() -> None:
    change = LowRank(torch.zeros(4, 4), 2, 2.0, torch.Generator())
    change.dropout, change.keys = 0.3, Draws(0, range(50)).keys("dropout")
    values = change.dropped(torch.ones(50, 40, 10))
    assert float((values == 0).float().mean()) == pytest.approx(0.3, abs=0.02)
    assert float(values.mean()) == pytest.approx(1.0, abs=0.02)
    assert not torch.equal(values[0], values[1])
    odd = change.dropped(torch.ones(7, 3, 10))
    assert odd.shape == (7, 3, 10), "rows that are no examples, as of text in parts"
    with torch.no_grad():
        assert torch.equal(change.dropped(torch.ones(50, 2)), torch.ones(50, 2))
    assert float(fraction(bits_of(Draws(1, (5,)).keys("dropout"), 1000)).mean()) == pytest.approx(0.5, abs=0.05)


def test_what_is_drawn_for_one_purpose_changes_no_other(small_path: Path) -> None:
    """With an offset of the noise, timesteps are the same; at other timesteps, the noise."""
    pipe = ldm_lite.load(small_path, device="cpu")
    batch = Batch(toy.normal(1, 8, 8, 8, 8), ["a"] * 8, None, tuple(range(8)))
    draws = Draws(0, batch.numbers)
    plain = DiffusionLoss(pipe, {})._noised(batch, draws)
    offset = DiffusionLoss(pipe, {}, noise_offset=0.3)._noised(batch, draws)
    narrow = DiffusionLoss(pipe, {}, timesteps=(200, 300))._noised(batch, draws)
    assert torch.equal(offset.t, plain.t)
    assert not torch.equal(offset.target, plain.target)
    assert torch.equal(narrow.target, plain.target)
    assert not torch.equal(narrow.t, plain.t)
