"""Files of four folders can be deleted: the rest imports, loads the bundled model and makes the same image."""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from ldm_lite.zoo.families import MODULES

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


# A family with a network of its own -> how people call it.
NAMES = {
    "chroma": "chroma",
    "flux2": r"flux[-_. ]?2|klein",
    "z_image": r"z[-_ ]?image",
    "qwen_image": r"qwen[-_ ]?image",
}
DETECT = """
import sys
from ldm_lite.zoo import families
print(*families.FAMILY_ROWS)
for key in sys.argv[1:]:
    try:
        print(families.detect_family({"unet": {key: (8, 8)}}, {}).title)
    except (ValueError, ImportError) as error:
        print(type(error).__name__)
"""


@pytest.mark.parametrize("name", NAMES)
def test_a_family_is_known_in_two_files_and_one_table(name: str) -> None:
    package = ROOT / "ldm_lite"
    files = [path for path in package.rglob("*") if path.suffix in (".py", ".pyi", ".html", ".js")]
    having = [path for path in files if re.search(NAMES[name], path.read_text(), re.IGNORECASE)]
    known = {path.relative_to(package).as_posix() for path in having}
    assert known == {f"families/{name}.py", f"models/{name}.py", "zoo/families.py"}


def test_without_its_two_files_a_family_is_gone(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "ldm_lite", tmp_path / "ldm_lite", ignore=shutil.ignore_patterns("__pycache__"))
    rows = [row for name in NAMES for row in MODULES[name].rows]
    for name in NAMES:
        for folder in ("families", "models"):
            (tmp_path / "ldm_lite" / folder / f"{name}.py").unlink()
    command = [sys.executable, "-c", DETECT, *(MODULES[name].key for name in NAMES)]
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    lines = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True).stdout.splitlines()
    assert not set(rows) & set(lines[0].split())
    assert {"sd1", "flux_dev"} <= set(lines[0].split())
    assert lines[1:] == ["ValueError"] * len(NAMES)
