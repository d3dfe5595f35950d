"""Messages that say how to install more name nothing of the index that is not this package."""

import importlib.metadata
from pathlib import Path

import pytest

import ldm_lite
from ldm_lite.cli.version import pip_install


def test_an_installed_package_has_its_name_and_a_clone_its_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.1.0")
    assert pip_install("serve") == 'pip install "ldm_lite[serve]"'
    monkeypatch.setattr(importlib.metadata, "version", missing)
    assert pip_install("serve") == f'pip install "{Path(ldm_lite.__file__).parents[1]}[serve]"'
