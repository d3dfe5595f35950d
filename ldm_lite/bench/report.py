"""Results as JSON, as Markdown and as a chart.

A result that fails the numerics gate is shown with its error, and without a speed-up: it did other work.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from ldm_lite.bench.jobs import TITLES, Cell
from ldm_lite.bench.measure import spread
from ldm_lite.bench.run import AGAIN, Table, Timing

RESULTS = "results.json"


@dataclass
class Report:
    """Everything of one run."""

    about: dict[str, object]  # what was run, on what, with what
    titles: dict[str, str]  # of the contenders, by name
    ceilings: dict[str, float] = field(default_factory=dict)  # TFLOP/s of a matmul, by dtype
    largest: dict[str, dict[str, int]] = field(default_factory=dict)  # batch that fits, by dtype and contender
    tables: list[Table] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def baseline(self) -> str:
        """The contender that the others are compared with: the first."""
        return next(iter(self.titles))


def as_json(report: Report) -> str:
    """All samples and what they were taken with."""
    return json.dumps(asdict(report), indent=1)


def from_json(text: str) -> Report:
    """What as_json wrote.  Raises ValueError if it is no such thing."""
    try:
        values = json.loads(text)
        tables = [
            Table(
                Cell(**table["cell"]),
                table["flops"],
                table["items"],
                table["calls"],
                {name: Timing(**timing) for name, timing in table["timings"].items()},
            )
            for table in values.pop("tables")
        ]
        return Report(**values, tables=tables)
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"these are no results of a benchmark ({error})") from error


def write(report: Report, folder: Path) -> None:
    """Write results.json and results.md, whole, over what an earlier call wrote."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in ((RESULTS, as_json(report)), ("results.md", markdown(report))):
        temporary = folder / f".{name}.part"
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(folder / name)


# ---- Markdown -------------------------------------------------------------------------------------------------------

FEWEST = 5  # rounds, for a difference to count
COLUMNS = (
    "batch",
    "configuration",
    "time",
    "spread",
    "rate",
    "speed-up",
    "TFLOP/s",
    "of matmul",
    "error",
    "peak",
    "first",
)


def markdown(report: Report) -> str:
    """A heading, what was run, and a table for each section and precision."""
    lines = ["# Benchmark", ""]
    lines += [f"- {key}: {value}" for key, value in report.about.items()]
    if report.ceilings:
        rates = ", ".join(f"{rate:.3g} TFLOP/s in {dtype}" for dtype, rate in report.ceilings.items())
        lines.append(f"- matmul, measured in this run: {rates}")
    lines += [f"- {note}" for note in report.notes]
    for dtype, sizes in report.largest.items():
        lines += [
            "",
            f"## Largest batch that fits, {dtype}",
            "",
            _row(["configuration", "images"]),
            _row(["---", "---:"]),
        ]
        lines += [_row([report.titles.get(name, name), str(size)]) for name, size in sizes.items()]
    groups: dict[tuple[str, str], list[Table]] = {}
    for table in report.tables:
        groups.setdefault((table.cell.section, table.cell.dtype), []).append(table)
    for (section, dtype), tables in groups.items():
        lines += ["", f"## {TITLES[section]}, {dtype}", "", *table_lines(report, tables)]
    lines += ["", *LEGEND]
    return "\n".join(lines) + "\n"


LEGEND = (
    "original: float32 weights, autocast in half precision, attention with all of its weights in memory (or by the",
    "memory-efficient kernel). time: median of the samples. spread: half the distance of the quartiles. rate: steps",
    "(of the whole batch) or images a second. speed-up: over the first row, bold where it exceeds the noise floor",
    "(one of our configurations timed twice) in at least five rounds. of matmul: share of a large matmul's rate in",
    "this run. error: relative, to a float32 forward (whole images: pixels, to the first row's). peak: memory",
    "beside the weights. first: the first call, with compilation.",
)


def table_lines(report: Report, tables: Sequence[Table]) -> list[str]:
    """The lines of a Markdown table, a row for each configuration and batch size."""
    lines = [_row(COLUMNS), _row(["---:" if name != "configuration" else "---" for name in COLUMNS])]
    for table in tables:
        for name, timing in table.timings.items():
            if not name.endswith(AGAIN):
                title = report.titles.get(name, name)
                lines.append(_row([str(table.cell.batch), title, *_cells(report, table, timing)]))
        if table.noise is not None:
            lines.append(_row([str(table.cell.batch), "noise floor", "", f"{table.noise:.1%}", *[""] * 7]))
    return lines


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _cells(report: Report, table: Table, timing: Timing) -> list[str]:
    if timing.unable is not None or timing.seconds is None:
        return [timing.unable or "-", *[""] * 8]
    seconds, rate = timing.seconds, table.flops / timing.seconds / 1e12
    top = report.ceilings.get(table.cell.dtype)
    error = "" if timing.error is None else f"{timing.error:.0e}"
    return [
        duration(seconds),
        f"{spread(timing.samples):.1%}",
        f"{table.items / seconds:.3g}/s",
        _speed_up(report, table, timing),
        f"{rate:.3g}",
        f"{rate / top:.0%}" if top else "",
        error if timing.passes is not False else f"**fails: {error}**",
        "" if timing.peak is None else f"{timing.peak / 2**20:,.0f} MiB",
        "" if timing.first_s is None else duration(timing.first_s),
    ]


def _speed_up(report: Report, table: Table, timing: Timing) -> str:
    """Over the baseline; nothing if either fails the gate."""
    base = table.timings.get(report.baseline)
    if base is None or base.seconds is None or timing.seconds is None or timing.passes is False or base.passes is False:
        return ""
    ratio = base.seconds / timing.seconds
    real = abs(ratio - 1) > (table.noise or 0.0) and len(timing.samples) >= FEWEST
    return f"**{ratio:.2f}x**" if real and base is not timing else f"{ratio:.2f}x"


def duration(seconds: float) -> str:
    """A duration with three digits and the unit that suits it."""
    for unit, scale in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= scale:
            return f"{seconds / scale:.3g} {unit}"
    return f"{seconds / 1e-6:.3g} us"


# ---- the chart ------------------------------------------------------------------------------------------------------


def chart(report: Report, path: Path) -> None:
    """Bars: the time of each configuration, by batch size, as the article drew them.  Needs matplotlib.

    Drawn are whole images if they were measured, else steps, in the first precision; what fails the gate is hatched.
    """
    from matplotlib.figure import Figure

    section = next(
        s for s in ("image", "img2img", "inpaint", "step", *TITLES) if any(t.cell.section == s for t in report.tables)
    )
    tables = [table for table in report.tables if table.cell.section == section]
    tables = [table for table in tables if table.cell.dtype == tables[0].cell.dtype]
    figure = Figure(figsize=(4 * len(tables) + 2, 4), layout="constrained")
    names = [name for name in report.titles if any(_drawn(table, name) for table in tables)]
    for axes, table in zip(figure.subplots(1, len(tables), squeeze=False)[0], tables, strict=True):
        for i, name in enumerate(names):
            timing = table.timings.get(name)
            if timing is None or timing.seconds is None:
                continue
            hatch = "//" if timing.passes is False else None
            bars = axes.bar(i, timing.seconds, color=f"C{i}", hatch=hatch, label=report.titles[name])
            axes.bar_label(bars, [duration(timing.seconds)], fontsize=8)
        axes.set(title=f"batch {table.cell.batch}", ylabel="seconds", xticks=[])
    figure.suptitle(f"{TITLES[section]}, {tables[0].cell.dtype}: {report.about.get('device', '')}")
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", fontsize=8, ncols=2)
    figure.savefig(path, dpi=80)


def _drawn(table: Table, name: str) -> bool:
    timing = table.timings.get(name)
    return timing is not None and timing.seconds is not None
