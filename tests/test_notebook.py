"""The notebook runs, cell by cell, as a reader would run it."""

import ast
import json
from pathlib import Path
from typing import Any

import pytest
import registries
from PIL import Image

NOTEBOOK = Path(__file__).parent.parent / "docs" / "examples" / "first_steps.ipynb"


def test_the_names_that_it_imports_exist() -> None:
    cells = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    code = "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")
    imports = [node for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Import | ast.ImportFrom)]
    exec(compile(ast.Module(imports, []), "imports", "exec"), {})


def test_it_shows_the_outputs_of_a_run_without_errors_and_folders() -> None:
    text = NOTEBOOK.read_text(encoding="utf-8")
    cells = [cell for cell in json.loads(text)["cells"] if cell["cell_type"] == "code"]
    assert all("image/png" in cell["outputs"][0]["data"] for cell in cells if "main(" not in cell["source"][-1])
    kinds = {output["output_type"] for cell in cells for output in cell["outputs"]}
    assert kinds <= {"execute_result", "stream"}
    assert not any(folder in text for folder in ("/root/", "/home/", "/tmp/"))
    assert len(text) < 2**20


@pytest.mark.slow
def test_first_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"__name__": "notebook"}
    shown = []
    cells = [cell for cell in json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"] if cell["cell_type"] == "code"]
    with registries.restored():
        _run(cells, names, shown)
    assert len(shown) == 7
    assert shown.pop(-2) == 0, "the training's exit status"
    assert all(isinstance(image, Image.Image) for image in shown)
    assert names["before"][0].tobytes() != names["after"][0].tobytes()


def _run(cells: list[Any], names: dict[str, Any], shown: list[Any]) -> None:
    for cell in cells:
        lines = ast.parse(
            "".join(cell["source"]).replace("--steps 400 --batch-size 4", "--steps 4 --batch-size 2")
        ).body
        shows = isinstance(lines[-1], ast.Expr)
        exec(compile(ast.Module(lines[:-1] if shows else lines, []), "cell", "exec"), names)
        if shows:
            shown.append(eval(compile(ast.Expression(lines[-1].value), "cell", "eval"), names))  # type: ignore[attr-defined]
