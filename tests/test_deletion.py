"""Files of four folders can be deleted: the rest imports, loads the bundled model and makes the same image."""

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = ("adapters", "features", "formats", "families")
NEEDED = {"sd1"}  # by the bundled model
FILES = sorted(
    path.relative_to(ROOT).as_posix()
    for folder in FOLDERS
    for path in (ROOT / "ldm_lite" / folder).glob("*.py")
    if path.stem not in {"__init__", *NEEDED}
)
CODE = """
import numpy as np, ldm_lite, ldm_lite.networks, ldm_lite.toolkit
pipe = ldm_lite.load(device="cpu")
np.save("image.npy", np.asarray(pipe.txt2img("a red apple", steps=2)[0]))
"""


def image(package: Path) -> np.ndarray:
    """The image that a copy of the package makes, in a process of its own."""
    environment = os.environ | {"PYTHONPATH": str(package)}
    run = subprocess.run([sys.executable, "-c", CODE], cwd=package, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    return np.load(package / "image.npy")  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> np.ndarray:
    return image(copied(tmp_path_factory.mktemp("whole"), []))


def copied(folder: Path, without: Sequence[str]) -> Path:
    shutil.copytree(ROOT / "ldm_lite", folder / "ldm_lite", ignore=shutil.ignore_patterns("__pycache__"))
    (folder / "weights").symlink_to(ROOT / "weights")
    for name in without:
        (folder / name).unlink()
    return folder


def test_without_all_of_them(tmp_path: Path, whole: np.ndarray) -> None:
    assert len(FILES) >= 20
    assert np.array_equal(image(copied(tmp_path, FILES)), whole)


@pytest.mark.slow
@pytest.mark.parametrize("name", FILES)
def test_without_one(name: str, tmp_path: Path, whole: np.ndarray) -> None:
    assert np.array_equal(image(copied(tmp_path, [name])), whole)
