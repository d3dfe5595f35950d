"""Fixtures of families in miniature.  `toys`, the module that describes one, is a parameter, or the TOYS of a file."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ldm_lite
from ldm_lite import Pipeline

DATA = Path(__file__).parents[1] / "data"


@pytest.fixture(scope="module")
def toys(request: pytest.FixtureRequest) -> Any:
    return getattr(request, "param", None) or request.module.TOYS


@pytest.fixture(scope="module")
def golden(toys: Any) -> dict[str, Any]:
    """What the original and diffusers compute, and the shapes of their weights."""
    arrays = dict(np.load(DATA / f"{toys.GOLDEN}.npz"))
    return arrays | {"shapes": json.loads(str(arrays["shapes"]))}


@pytest.fixture(scope="module")
def shapes(golden: dict[str, Any]) -> dict[str, Any]:
    """Shapes by key of the networks of diffusers' folder."""
    return {name: golden["shapes"][name] for name in ("transformer", "text_encoder", "vae")}


@pytest.fixture(scope="module")
def pipe(toys: Any, shapes: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Pipeline:
    """diffusers' folder, with the goldens' weights."""
    return ldm_lite.load(toys.write_diffusers(tmp_path_factory.mktemp("diffusers") / "d", shapes), device="cpu")


@pytest.fixture(scope="module")
def folder(toys: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("files")


@pytest.fixture(scope="module")
def files(toys: Any, folder: Path) -> dict[str, Any]:
    """A file for each network, as ComfyUI has them: the arguments of load."""
    return toys.write(folder)
