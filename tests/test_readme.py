"""The README is true: its commands are those that CI runs, its files exist, its Python runs."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def test_ci_runs_the_test_command() -> None:
    command = next(line for line in README.splitlines() if "-m pytest" in line)
    assert command in (ROOT / ".ci" / "run").read_text().splitlines()


def test_the_file_map_is_complete() -> None:
    inside = {path.relative_to(ROOT / "ldm_lite").as_posix() for path in (ROOT / "ldm_lite").rglob("*.py")}
    inside = {name for name in inside if not name.endswith("/__init__.py")}
    for text in (README, (ROOT / "docs" / "architecture.md").read_text()):
        missing = [name for name in inside if not re.search(rf"\b{re.escape(Path(name).name)}", text)]
        assert not missing


@pytest.mark.parametrize("name", re.findall(r"\]\(([\w./]+)\)", README))
def test_links(name: str) -> None:
    assert (ROOT / name).exists()


def test_the_python_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    [code] = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    code = code.replace('"v1-5-pruned-emaonly.safetensors"', "device='cpu'")
    monkeypatch.chdir(tmp_path)
    exec(code)
    assert (tmp_path / "astronaut.png").exists()
