"""Write the core as a separate package: python scripts/fork.py ../mylab --name mylab

The folder gets the package with the bundled weights, its tests, a README of one page, pyproject.toml and the licence.
`pip install ../mylab` and `python -m mylab "a red apple"` work without ldm_lite.
"""

import argparse
import ast
import importlib.util
import keyword
import re
import shlex
import shutil
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CORE, TESTS = ROOT / "ldm_lite" / "core", ROOT / "tests" / "core"
# Numbers of other implementations, which these tests compare with.
DATA = ("bundled.npz", "networks.npz", "samplers.npz", "manifests.json.gz", "tokenizer.json", "clean.json")
PYPROJECT = """\
[build-system]
requires = ["setuptools>=77"]
build-backend = "setuptools.build_meta"

[project]
name = "NAME"
version = "0.1.0"
description = "Stable Diffusion from scratch, in one small package."
readme = "README.md"
license = "Apache-2.0"
license-files = ["LICENSE", "NAME/clip_merges.LICENSE.txt"]
requires-python = ">=3.11"
dependencies = ["torch>=2.6", "numpy", "pillow", "safetensors", "tokenizers"]

[project.optional-dependencies]
test = ["pytest"]
dev = ["pytest", "ruff", "mypy"]

[tool.setuptools]
packages = ["NAME"]

[tool.setuptools.package-data]
NAME = ["*.gz", "*.txt", "py.typed", "weights/*.safetensors"]

[tool.pytest.ini_options]
testpaths = ["tests"]
addopts = "-ra --strict-markers -m 'not slow'"
markers = ["slow: long runs and compilations, which `python -m pytest -m slow` runs"]

[tool.ruff]
line-length = 120

[tool.ruff.lint]
select = ["E", "F", "W", "I", "B", "UP", "C4", "SIM", "PT", "RUF"]
ignore = ["RUF002", "RUF003"]

[tool.ruff.lint.per-file-ignores]
"**/options.py" = ["RUF009"]  # option() is dataclasses.field

[tool.mypy]
strict = true
packages = ["NAME"]
warn_return_any = false  # every call of an nn.Module returns Any

[[tool.mypy.overrides]]
module = ["safetensors.*", "tokenizers.*"]
ignore_missing_imports = true
"""


def imports(paths: Iterable[Path]) -> set[str]:
    """The modules outside of ldm_lite that files import, by their first names."""
    names = set[str]()
    for path in paths:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                names |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                names.add(node.module.partition(".")[0])
    return names - {"ldm_lite"}


def check_name(name: str) -> None:
    """Raises ValueError for a name that a package cannot have, or that another module has."""
    if not re.fullmatch("[A-Za-z]([A-Za-z0-9_]*[A-Za-z0-9])?", name) or keyword.iskeyword(name):
        raise ValueError(f"got the name {name!r}, expected letters, digits and underscores, as in mylab")
    files = [*CORE.glob("*.py"), *TESTS.glob("*.py")]
    taken = {*sys.stdlib_module_names, *imports(files), *(path.stem for path in TESTS.glob("*.py")), "ldm_lite"}
    if name.lower() in {module.lower() for module in taken} or importlib.util.find_spec(name) is not None:
        raise ValueError(f"there is a module {name} already, which the package would hide: use another name")


def fork(folder: Path, name: str) -> None:
    """Write the package `name` into a folder, which is made, or is empty.

    Raises ValueError, one line, for a folder with files in it, and for a name that cannot be used.
    """
    check_name(name)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"{folder} is not an empty folder: use another one")

    def copy(source: Path, target: Path) -> None:
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.suffix in (".py", ".md"):
            text = source.read_text(encoding="utf-8").replace("ldm_lite.core", name).replace('"ldm_lite"', f'"{name}"')
            text = text.replace(f'ORIGIN = "{name}"', 'ORIGIN = "ldm_lite.core"')  # in files that people write for both
            target.write_text(text, encoding="utf-8")
        else:
            shutil.copyfile(source, target)

    for path in [*CORE.glob("*.py"), *CORE.glob("clip_merges*")]:
        copy(path, folder / name / path.name)
    for path in TESTS.glob("*.py"):
        copy(path, folder / "tests" / path.name)
    for file in DATA:
        copy(ROOT / "tests" / "data" / file, folder / "tests" / "data" / file)
    copy(ROOT / "weights" / "emoji.safetensors", folder / name / "weights" / "emoji.safetensors")
    copy(CORE / "README.md", folder / "README.md")
    copy(ROOT / "LICENSE", folder / "LICENSE")
    (folder / name / "py.typed").touch()
    (folder / "pyproject.toml").write_text(PYPROJECT.replace("NAME", name), encoding="utf-8")
    (folder / ".gitignore").write_text("__pycache__/\n*.egg-info/\nbuild/\n", encoding="utf-8")


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns its exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where to write it: a new folder")
    parser.add_argument("--name", required=True, help="of the package, as it is imported")
    options = parser.parse_args(argv)
    try:
        fork(options.folder, options.name)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    path = shlex.quote(str(options.folder.resolve()))  # pip takes a name without a slash for a package of the index
    print(f'pip install {path} && python -m {options.name} "a red apple"')
    return 0


if __name__ == "__main__":
    sys.exit(main())
