"""`python -m ldm_lite.serve`: what it says before it listens."""

import sys
from pathlib import Path

import pytest

from ldm_lite.cli.version import pip_install
from ldm_lite.serve.__main__ import key_of, main
from ldm_lite.serve.options import ServeOptions


def test_a_missing_extra_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for flags, module, extras in (([], "uvicorn", "serve"), (["--replicas", "2"], "ray", "serve,serve-ray")):
        monkeypatch.setitem(sys.modules, module, None)
        monkeypatch.delitem(sys.modules, "ldm_lite.serve.server", raising=False)
        monkeypatch.delitem(sys.modules, "ldm_lite.serve.ray", raising=False)
        assert main(flags) == 2
        assert capsys.readouterr().err == f"error: the server needs {module}: {pip_install(extras)}\n"


def test_the_key_is_a_text_or_in_a_file(tmp_path: Path) -> None:
    (tmp_path / "key").write_text("a-long-enough-key\n")
    assert key_of(ServeOptions(api_key=f"@{tmp_path / 'key'}")) == "a-long-enough-key"
    assert key_of(ServeOptions()) is None
    for key in ("short", "ein-schlüssel-mit-umlaut"):
        with pytest.raises(ValueError, match="expected 8 or more of ASCII"):
            key_of(ServeOptions(api_key=key))
    with pytest.raises(FileNotFoundError):
        key_of(ServeOptions(api_key="@/none"))
