"""Numbers that independent implementations computed: CompVis' code, k-diffusion, diffusers and transformers.

And the names that these tests go through: other packages may have added to the core's tables.
"""

import gzip
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike
from torch import Tensor

SAMPLERS = ("ddim", "plms", "euler", "euler_a", "dpmpp_2m")
SPACINGS = ("leading", "trailing", "linspace", "karras")
DATA = next(folder / "data" for folder in Path(__file__).parents if (folder / "data").is_dir())


def arrays(name: str) -> Mapping[str, np.ndarray]:
    """The arrays of a file."""
    return dict(np.load(DATA / name))


def manifest(name: str) -> dict[str, Any]:
    """The keys and shapes of a released network ("shapes"), and the number of its parameters ("params")."""
    content: dict[str, Any] = json.loads(gzip.decompress((DATA / "manifests.json.gz").read_bytes()))[name]
    return content


def error(ours: Tensor | ArrayLike, theirs: ArrayLike) -> float:
    """|ours - theirs| / |theirs|, in float64."""
    ours, theirs = np.asarray(ours, dtype=np.float64), np.asarray(theirs, dtype=np.float64)
    assert ours.shape == theirs.shape, f"got {ours.shape}, expected {theirs.shape}"
    return float(np.linalg.norm(ours - theirs) / np.linalg.norm(theirs))
