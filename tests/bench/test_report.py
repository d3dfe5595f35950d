"""Reports: speed-ups only of results that pass, and in bold only above the noise floor."""

from pathlib import Path

import pytest

from ldm_lite.bench.report import AGAIN, Report, Table, Timing, as_json, chart, duration, from_json, markdown, write
from ldm_lite.bench.work import Cell


def timing(seconds: float, passes: bool = True) -> Timing:
    return Timing(error=1e-6, passes=passes, first_s=2.0, peak=3 * 2**20, samples=[seconds] * 5)


def report() -> Report:
    timings = {
        "a": timing(0.5),
        "a" + AGAIN: timing(0.55),
        "b": timing(0.25),
        "c": timing(0.49),
        "d": timing(0.01, passes=False),
        "e": Timing(unable="out of memory"),
    }
    return Report(
        about={"command": "python -m ldm_lite.bench", "device": "a CPU"},
        titles={name: f"way {name}" for name in "abcde"},
        ceilings={"fp32": 2.0},
        tables=[Table(Cell("step", "fp32", 2), 5 * 10**11, 1, 3, timings)],
        notes=["left out: much"],
    )


def row(text: str, title: str) -> list[str]:
    [line] = [line for line in text.splitlines() if f"| {title} |" in line]
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_markdown() -> None:
    text = markdown(report())
    assert "## UNet step, guided, fp32" in text
    assert "- matmul, measured in this run: 2 TFLOP/s in fp32" in text
    assert "- left out: much" in text
    columns = ["2", "way b", "250 ms", "0.0%", "4/s", "**2.00x**", "2", "100%", "1e-06", "3 MiB", "2 s"]
    assert row(text, "way b") == columns
    assert row(text, "way a")[5] == "1.00x"
    assert row(text, "way c")[5] == "1.02x"  # within the noise of 10 %
    assert row(text, "noise floor")[3] == "10.0%"
    assert row(text, "way d")[5] == ""
    assert row(text, "way d")[8] == "**fails: 1e-06**"
    assert row(text, "way e")[2] == "out of memory"
    assert AGAIN not in text
    lines = [line for line in text.splitlines() if line.startswith("|")]
    assert len({line.count("|") for line in lines}) == 1


def test_a_few_rounds_prove_nothing() -> None:
    few = report()
    few.tables[0].timings["b"].samples = [0.25] * 4
    assert row(markdown(few), "way b")[5] == "2.00x"


def test_no_speed_up_over_a_wrong_baseline() -> None:
    wrong = report()
    wrong.tables[0].timings["a"].passes = False
    assert row(markdown(wrong), "way b")[5] == ""


def test_json_keeps_everything(tmp_path: Path) -> None:
    results = report()
    assert from_json(as_json(results)) == results
    write(results, tmp_path / "new")
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == ["results.json", "results.md"]
    with pytest.raises(ValueError, match="not the results of a benchmark"):
        from_json("[1]")


@pytest.mark.extra
def test_results_of_earlier_versions_are_read() -> None:
    timing = '{"error": 1e-6, "passes": true, "first_s": 2.0, "peak": null, "samples": [0.5], "unable": null}'
    cell = '{"section": "step", "dtype": "fp32", "batch": 1}'
    table = f'{{"cell": {cell}, "flops": 7, "items": 1, "calls": 3, "timings": {{"math": {timing}}}}}'
    about = '"about": {"command": "c"}, "titles": {"math": "ours"}, "ceilings": {"fp32": 1.0}, "largest": {}'
    read = from_json(f'{{{about}, "tables": [{table}], "notes": ["n"]}}')
    math_timing = Timing(error=1e-6, passes=True, first_s=2.0, samples=[0.5])
    assert read.tables == [Table(Cell("step", "fp32", 1), 7, 1, 3, {"math": math_timing})]
    assert (read.titles, read.notes) == ({"math": "ours"}, ["n"])


def test_the_chart(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    chart(report(), tmp_path / "chart.png")
    assert (tmp_path / "chart.png").stat().st_size > 1000


@pytest.mark.parametrize(
    ("seconds", "text"), [(12.345, "12.3 s"), (0.5, "500 ms"), (0.00123, "1.23 ms"), (2e-5, "20 us")]
)
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text
