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
# For each name: the package without this file, in a process of its own, which begins after torch has been imported.
CODE = """
import os, sys
import numpy as np, torch
for name in sys.argv[1:]:
    os.path.exists(name) and os.rename(name, "away")
    child = os.fork()
    if child == 0:
        import ldm_lite, ldm_lite.networks, ldm_lite.toolkit
        image = ldm_lite.load(device="cpu", kernels="plain").txt2img("a red apple", steps=2)[0]
        np.save(name.replace("/", "-"), np.asarray(image))
        os._exit(0)
    os.waitpid(child, 0)
    os.path.exists("away") and os.rename("away", name)
"""


def images(folder: Path, names: Sequence[str]) -> dict[str, np.ndarray]:
    """The images that a copy of the package makes without each of these files, by its name."""
    if not (folder / "ldm_lite").exists():
        shutil.copytree(ROOT / "ldm_lite", folder / "ldm_lite", ignore=shutil.ignore_patterns("__pycache__"))
        (folder / "weights").symlink_to(ROOT / "weights")
    environment = os.environ | {"PYTHONPATH": str(folder)}
    command = [sys.executable, "-c", CODE, *names]
    run = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert run.stderr == ""
    return {name: np.load(folder / f"{name.replace('/', '-')}.npy") for name in names}


def test_without_all_of_them(tmp_path: Path) -> None:
    assert len(FILES) >= 20
    whole = images(tmp_path, ["nothing"])["nothing"]
    for name in FILES:
        (tmp_path / name).unlink()
    assert np.array_equal(images(tmp_path, ["all"])["all"], whole)


@pytest.mark.slow
def test_without_one(tmp_path: Path) -> None:
    without = images(tmp_path, ["nothing", *FILES])
    changed = [name for name, image in without.items() if not np.array_equal(image, without["nothing"])]
    assert changed == []
