"""What the makers of goldens share: the folder of the originals and imports from it, versions, and files of arrays."""

import argparse
import contextlib
import importlib
import io
import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import numpy as np
import torch
from numpy.typing import NDArray

DATA = Path(__file__).resolve().parents[1] / "data"
Arrays = dict[str, Any]


def folder_of_originals(about: str | None) -> Path:
    """The command line: the folder of the cloned repositories, or of the one."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--originals", type=Path, required=True, help="the folder of what was cloned")
    return Path(parser.parse_args().originals).resolve()


def made_with(modules: Sequence[Any], folder: Path = Path(), repositories: Sequence[str] = ()) -> str:
    """Versions of modules, and commits of repositories in a folder, as JSON."""
    versions = {module.__name__: module.__version__ for module in modules}
    for name in repositories:
        git = ["git", "-C", str(folder / name), "rev-parse", "HEAD"]
        versions[name] = subprocess.run(git, capture_output=True, text=True, check=True).stdout.strip()
    return json.dumps(versions)


@contextlib.contextmanager
def repository(path: Path, packages: tuple[str, ...] = (), stubs: tuple[str, ...] = ()) -> Iterator[None]:
    """Import from a repository, then forget its modules: two of them have a package `ldm`.

    The __init__ of the packages is not run; stubs are modules that importing needs, but what is used of it does not.
    """
    before = set(sys.modules)
    sys.path.insert(0, str(path))
    for name in packages:
        package = ModuleType(name)
        package.__path__ = [str(path / name.replace(".", "/"))]
        sys.modules[name] = package
    for name in stubs:
        try:
            importlib.import_module(name)
        except ImportError:
            sys.modules[name] = mock.MagicMock()
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        yield
    sys.path.remove(str(path))
    roots = {"ldm", *(name.split(".")[0] for name in (*packages, *stubs))}
    for name in set(sys.modules) - before:
        if name.split(".")[0] in roots:
            del sys.modules[name]


def write(path: Path, arrays: Arrays, dtype: torch.dtype, about: str, **others: NDArray[Any]) -> None:
    """Write the arrays, other ones, and what they were made with, and say how large the file is."""
    for name, value in arrays.items():
        assert value.dtype == dtype, f"{name} is {value.dtype}, expected {dtype}"
        assert torch.isfinite(value).all(), f"{name} is not finite"
    np.savez_compressed(
        path, made_with=np.array(about), **others, **{name: value.numpy() for name, value in arrays.items()}
    )
    print(f"{path}: {len(arrays)} arrays, {path.stat().st_size} bytes")
