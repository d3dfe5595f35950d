"""The README is correct: CI runs its commands, its files exist, its Python runs."""

import importlib
import re
import shlex
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import registries

from ldm_lite import Pipeline

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def test_ci_runs_the_first_commands() -> None:
    """Those to install, to make an image and to test, each a line that can be read without scrolling."""
    [line] = [line for line in (ROOT / ".ci" / "run").read_text().splitlines() if line.startswith("eval ")]
    first, last = re.findall(r"/\^?(.+?)/", line[: line.index("README.md")])
    lines, block = README.splitlines(), re.findall(r"```\n(.*?)```", README, re.DOTALL)[0].splitlines()
    start, end = (next(i for i, line in enumerate(lines) if word in line) for word in (first, last))
    assert lines[start : end + 1] == block
    assert all(word in line for word, line in zip(("pip install", "txt2img", "pytest"), block, strict=True))
    assert max(map(len, block)) < 90


def test_every_folder_and_file_has_its_place() -> None:
    """In the architecture."""
    inside = [path.relative_to(ROOT / "ldm_lite") for path in (ROOT / "ldm_lite").rglob("*.py")]
    architecture = (ROOT / "docs" / "architecture.md").read_text()
    for folder in {path.parts[0] for path in inside if len(path.parts) > 1}:
        assert f"`{folder}/`" in architecture
    for path in inside:
        if path.parts[0] in ("cli", "zoo", "runtime", "checkpoint", "tasks", "control", "diffusion"):
            assert path.name in architecture or path.name == "__init__.py" or path.parts[1] == "cpu", path


PAGES = [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), ROOT / "weights" / "README.md", ROOT / "ldm_lite/core/README.md"]


def _anchors(page: Path) -> set[str]:
    """Those of its headings, as GitHub and mkdocs make them."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links(page: Path) -> None:
    """To files of the repository, and to headings of its pages."""
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    for name, anchor in re.findall(r"(?:\]\(|src=\")([^)\s#:\"]*)(?:#([\w-]+))?[)\"]", text):
        target = page.parent / name if name else page
        assert target.exists(), name
        assert not anchor or anchor in _anchors(target), f"{name}#{anchor}"


def test_the_python_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    [code] = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    monkeypatch.chdir(tmp_path)
    exec(code)
    assert (tmp_path / "apple.png").exists()


def test_an_index_can_show_the_page() -> None:
    """Where the repository's address is known, no link and no picture is relative."""
    page = importlib.import_module("package_page")
    assert page.with_addresses(README, page.repository({})) == README
    address = page.repository({"GITHUB_REPOSITORY": "somebody/ldm_lite"})
    text = page.with_addresses(README, address)
    assert f'src="{address}/raw/main/docs/grid.png"' in text
    assert f"]({address}/blob/main/docs/tour.md)" in text
    assert not re.search(r'(\]\(|src=")(?!https?:)', text)


def _commands() -> list[str]:
    """The command lines of this package in the documents, as they would be typed: in blocks, or inline with flags."""
    pages = [README, *(path.read_text() for path in [*ROOT.glob("docs/*.md"), ROOT / "weights" / "README.md"])]
    pages = [re.sub(r"```diff\n.*?```", "", page, flags=re.DOTALL) for page in pages]  # tests/test_forking.py
    pages = [page.replace(" \\\n", " ") for page in pages]
    commands = (
        re.findall(r"(?:python|torchrun[^`]*?) -m (ldm_lite\.\w+[^`\n]*(?:\n[^`\n]*(?=`))?)", page) for page in pages
    )
    return sorted(
        {
            " ".join(command.split())
            for page in commands
            for command in page
            if " -" in command and "--help" not in command
        }
    )


@pytest.mark.parametrize("command", _commands())
def test_the_commands_have_these_flags(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name, *arguments = shlex.split(command, comments=True)
    monkeypatch.setattr("ldm_lite.cli.console.run", lambda *args, **kwargs: 0)
    name += ".__main__" * (name.count(".") == 1 and name.split(".")[1] in ("train", "bench", "batch", "serve"))
    assert importlib.import_module(name).main(arguments) == 0


def test_the_sampler_of_the_docs(predicting: Callable[..., Pipeline]) -> None:
    """The worked example runs, is of second order, and takes fewer than 20 lines."""
    [code] = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "samplers.md").read_text(), re.DOTALL)
    assert len(code[code.index("@register") :].strip().splitlines()) < 20
    with registries.restored():
        exec(code, {})
        plans = [predicting("x0").plan("ralston", steps) for steps in (50, 100)]
    errors = []
    for plan in plans:
        x = plan.level[0, 0] * 0.3 + plan.level[0, 1] * 1.7
        registers = np.array([x, 0, 0, 0, 0])
        for (a, s), mix in zip(plan.level[:-1], plan.mix[:-1], strict=True):  # data N(0, 1/4): x0 = a x / (a^2 + 4 s^2)
            prediction = a * registers[0] / (a**2 + 4 * s**2)
            registers = mix @ [*registers, prediction, 0]
        a, s = plan.level[-1]
        exact = x * np.hypot(a / 2, s) / np.hypot(plan.level[0, 0] / 2, plan.level[0, 1])
        errors.append(abs(registers[0] - exact))
    assert np.log2(errors[0] / errors[1]) > 1.9
