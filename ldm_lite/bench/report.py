"""Results as JSON, as Markdown and as a chart.

A result that fails the numerics gate is shown with its error and without a speed-up, because it did other work.
"""

import contextlib
import json
import platform
import subprocess
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path

import torch

import ldm_lite
from ldm_lite.bench.comparison import AGAIN, Table, Timing
from ldm_lite.bench.measure import spread
from ldm_lite.bench.options import Options
from ldm_lite.bench.workload import TITLES, Cell

RESULTS = "results.json"


@dataclass
class Report:
    """The results of one run."""

    about: dict[str, object]  # command, model, device, versions, date
    titles: dict[str, str]  # of the backends, by name
    ceilings: dict[str, float] = field(default_factory=dict)  # TFLOP/s of a matmul, by dtype
    largest: dict[str, dict[str, int]] = field(default_factory=dict)  # batch that fits, by dtype and backend
    tables: list[Table] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def baseline(self) -> str:
        """The first backend, with which the others are compared."""
        return next(iter(self.titles))


def describe_run(options: Options, model: str, device: torch.device, threads: int) -> dict[str, object]:
    """Describe a run well enough to repeat it."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else _cpu()
    given = {f.name: getattr(options, f.name) for f in fields(options) if f.name not in ("out", "debug")}
    flags = " ".join(
        f"--{name.replace('_', '-')}" + ("" if value is True else f" {value!r}" if " " in str(value) else f" {value}")
        for name, value in given.items()
        if value != getattr(Options(), name)
    )
    return {
        "command": f"python -m ldm_lite.bench {flags}".strip(),
        "model": model,
        "device": f"{name}, {threads} threads" if device.type == "cpu" else name,
        "versions": f"ldm_lite {ldm_lite.__version__} ({_commit()}), torch {torch.__version__}, "
        f"python {platform.python_version()}, {platform.system()}",
        "date": time.strftime("%Y-%m-%d"),
    }


def _cpu() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def _commit() -> str:
    """The commit of the git clone that this runs from."""
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--exclude=*"]
    try:
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "no clone"


# ---- files ----------------------------------------------------------------------------------------------------------


def as_json(report: Report) -> str:
    """Write a report with all its samples as JSON."""
    return json.dumps(asdict(report), indent=1)


def from_json(text: str) -> Report:
    """Read what as_json wrote.  Raises ValueError for anything else."""
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
        raise ValueError(f"not the results of a benchmark ({error})") from error


def write(report: Report, folder: Path) -> None:
    """Write results.json and results.md, atomically replacing those of an earlier call."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in ((RESULTS, as_json(report)), ("results.md", markdown(report))):
        temporary = folder / f".{name}.part"
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(folder / name)


# ---- Markdown -------------------------------------------------------------------------------------------------------

MIN_ROUNDS = 5  # for a difference to count
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
    """Format a report: what was run, and a table for each section and precision."""
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
    "original: float32 weights, autocast in half precision, the whole attention matrix in memory (or the",
    "memory-efficient kernel). time: median of the samples. spread: half the distance of the quartiles. rate: steps",
    "(of the whole batch) or images per second. speed-up: over the first row, bold if it exceeds the noise floor",
    "(one of our configurations timed twice) in at least five rounds. of matmul: share of a large matmul's rate in",
    "this run. error: relative, against a float32 forward (images: pixels, against the first row). peak: memory",
    "without the weights. first: the first call, with compilation.",
)


def table_lines(report: Report, tables: Sequence[Table]) -> list[str]:
    """Format a Markdown table with a row for each batch size and configuration."""
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
    """Format the speed-up over the baseline; empty if either fails the gate."""
    base = table.timings.get(report.baseline)
    if base is None or base.seconds is None or timing.seconds is None or timing.passes is False or base.passes is False:
        return ""
    ratio = base.seconds / timing.seconds
    real = abs(ratio - 1) > (table.noise or 0.0) and len(timing.samples) >= MIN_ROUNDS
    return f"**{ratio:.2f}x**" if real and base is not timing else f"{ratio:.2f}x"


def duration(seconds: float) -> str:
    """Format a duration with three digits and a suitable unit."""
    for unit, scale in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= scale:
            return f"{seconds / scale:.3g} {unit}"
    return f"{seconds / 1e-6:.3g} us"


# ---- the chart ------------------------------------------------------------------------------------------------------


def chart(report: Report, path: Path) -> None:
    """Draw the time of each configuration as bars, one plot for each batch size.  Needs matplotlib.

    Shows images if they were measured, otherwise steps, in the first precision; results that fail the gate are hatched.
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
