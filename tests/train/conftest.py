"""Fixtures of the training tests."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from ldm_lite.train import run, trainer


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Log the loss of every step, draw samples in little time, and no plots."""
    monkeypatch.setattr(trainer, "CHECK_EVERY", 1)
    monkeypatch.setattr(run, "SAMPLES", 1)
    monkeypatch.setattr(run, "SAMPLE_STEPS", 2)
    monkeypatch.setattr(run, "plot_losses", lambda folder: None)


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six captioned images."""
    path = tmp_path_factory.mktemp("data")
    random = np.random.default_rng(0)
    for i in range(6):
        Image.fromarray(random.integers(0, 255, (70, 90, 3), dtype=np.uint8)).save(path / f"{i}.png")
        (path / f"{i}.txt").write_text(f"picture {i}\n")
    return path
