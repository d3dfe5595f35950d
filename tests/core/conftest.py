"""What the tests of several files use."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported: small networks are faster on one thread

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from unittest import mock

import pytest
import random_sd1
from PIL import Image

from ldm_lite.core import FEATURES, SAMPLERS, Pipeline, load
from ldm_lite.core.schedule import SPACINGS


@pytest.fixture(scope="session")
def pipe() -> Pipeline:
    """The bundled model, in float32 on the CPU."""
    return load(device="cpu")


@pytest.fixture(scope="session")
def small_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A miniature Stable Diffusion 1.x with random weights, as .safetensors."""
    return random_sd1.write(tmp_path_factory.mktemp("small") / "small.safetensors", random_sd1.weights())


@pytest.fixture(scope="session")
def small(small_path: Path) -> Pipeline:
    """The miniature, loaded."""
    return load(small_path, device="cpu")


@pytest.fixture(scope="session")
def apple(pipe: Pipeline) -> Image.Image:
    """An image that the bundled model made."""
    return pipe.txt2img("a red apple on a blue background", steps=8)[0]


@pytest.fixture
def tables() -> Iterator[None]:
    """A test may add samplers, spacings and features: they are taken out again."""
    with ExitStack() as stack:
        for table in (SAMPLERS, SPACINGS, FEATURES):
            stack.enter_context(mock.patch.dict(table))
        yield
