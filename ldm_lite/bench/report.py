"""Results as JSON, as Markdown and as a chart.

A result that fails the numerics gate is shown with its error and without a speed-up, because it did other work.
"""

import json
import platform
import shutil
import statistics
import subprocess
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch

import ldm_lite
from ldm_lite.bench.measure import spread
from ldm_lite.bench.options import SECTIONS, BenchOptions
from ldm_lite.bench.work import Cell
from ldm_lite.cli.writing import write_whole
from ldm_lite.runtime.timing import machine

RESULTS = "results.json"
AGAIN = " (again)"  # the backend that is timed twice, for the noise floor
MIN_ROUNDS = 5  # for a difference to count


@dataclass
class Timing:
    """How a backend did in a cell."""

    error: float | None = None  # relative, against the reference
    passes: bool | None = None  # the numerics gate; None if there is none
    first_s: float | None = None
    peak: int | None = None  # bytes without the weights, on CUDA
    samples: list[float] = field(default_factory=list)  # seconds per call
    unable: str | None = None  # why it could not run
    cut: str | None = None  # why it was not timed; a resumed run times it

    @property
    def seconds(self) -> float | None:
        """The median; None without samples."""
        return statistics.median(self.samples) if self.samples else None


@dataclass
class Table:
    """The results of a cell."""

    cell: Cell
    flops: int
    items: int  # steps or images per call
    calls: int  # per sample
    timings: dict[str, Timing]

    @property
    def noise(self) -> float | None:
        """The noise floor: the difference of two timings of one backend, or its spread if larger."""
        for name, timing in self.timings.items():
            again = self.timings.get(name + AGAIN)
            if again is not None and timing.seconds and again.seconds:
                return max(abs(again.seconds / timing.seconds - 1), spread(timing.samples))
        return None


@dataclass
class Report:
    """The results of one run."""

    about: dict[str, object]  # command, model, device, versions, date
    titles: dict[str, str]  # of the backends, by name; the first is the baseline
    ceilings: dict[str, float] = field(default_factory=dict)  # TFLOP/s of a matmul, by dtype
    tables: list[Table] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def describe_run(asked: BenchOptions, options: BenchOptions) -> dict[str, object]:
    """Describe a run well enough to repeat it: the options given, and those filled in."""
    flags = ""
    for name, default in vars(BenchOptions()).items():
        if name not in ("out", "debug", "_given") and (value := getattr(asked, name)) != default:
            value = ",".join(map(str, value)) if isinstance(value, tuple) else value
            text = "" if value is True else f" {value!r}" if " " in str(value) else f" {value}"
            flags += f" --{name.replace('_', '-')}{text}"
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--exclude=*"]
    commit = subprocess.run(command, capture_output=True, text=True).stdout.strip() if shutil.which("git") else ""
    on_cuda = options.device.startswith("cuda")
    return {
        "command": f"python -m ldm_lite.bench{flags}",
        "model": options.ckpt or options.size,
        "device": torch.cuda.get_device_name(options.device) if on_cuda else machine(),
        "versions": f"ldm_lite {ldm_lite.__version__} ({commit or 'no clone'}), torch {torch.__version__}, "
        f"python {platform.python_version()}, {platform.system()}",
        "date": time.strftime("%Y-%m-%d"),
    }


# ---- files ----------------------------------------------------------------------------------------------------------


def as_json(report: Report) -> str:
    """Write a report with all its samples as JSON."""
    return json.dumps(asdict(report), indent=1)


def from_json(text: str) -> Report:
    """Read what as_json wrote, here or in an earlier version.  Raises ValueError for anything else."""
    try:
        values = json.loads(text)
        values.pop("largest", None)
        for table in values["tables"]:
            table["cell"] = Cell(**table["cell"])
            table["timings"] = {name: Timing(**timing) for name, timing in table["timings"].items()}
        return Report(**values | {"tables": [Table(**table) for table in values["tables"]]})
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"not the results of a benchmark ({error})") from error


def write(report: Report, folder: Path) -> None:
    """Write results.json and results.md, atomically replacing those of an earlier call."""
    folder.mkdir(parents=True, exist_ok=True)
    write_whole(folder / RESULTS, as_json(report))
    write_whole(folder / "results.md", markdown(report))


# ---- Markdown -------------------------------------------------------------------------------------------------------

HEAD = "| batch | configuration | time | spread | rate | speed-up | TFLOP/s | of matmul | error | peak | first |"
LEGEND = (
    "original: float32 weights, autocast in half precision, the whole attention matrix in memory (or the",
    "memory-efficient kernel). time: median of the samples. spread: half the distance of the quartiles. rate: steps",
    "(of the whole batch) or images per second. speed-up: over the first row, bold if it exceeds the noise floor",
    "(one of our configurations timed twice) in at least five rounds. of matmul: share of a large matmul's rate in",
    "this run. error: relative, against a float32 forward (images: pixels, against the first row). peak: memory",
    "without the weights, on CUDA. first: the first call, with compilation.",
)


def markdown(report: Report) -> str:
    """Format a report: what was run, and a table for each section and precision."""
    lines = ["# Benchmark", "", *(f"- {key}: {value}" for key, value in report.about.items())]
    if report.ceilings:
        rates = ", ".join(f"{rate:.3g} TFLOP/s in {dtype}" for dtype, rate in report.ceilings.items())
        lines.append(f"- matmul, measured in this run: {rates}")
    lines += [f"- {note}" for note in report.notes]
    groups: dict[tuple[str, str], list[Table]] = {}
    for table in report.tables:
        groups.setdefault((table.cell.section, table.cell.dtype), []).append(table)
    for (section, dtype), tables in groups.items():
        lines += ["", f"## {SECTIONS.get(section, section)}, {dtype}", "", HEAD, "|---:|---|" + "---:|" * 9]
        for table in tables:
            lines += [_row(report, table, name) for name in table.timings if not name.endswith(AGAIN)]
            if table.noise is not None:
                lines.append(f"| {table.cell.batch} | noise floor | | {table.noise:.1%} |" + " |" * 7)
    return "\n".join([*lines, "", *LEGEND]) + "\n"


def _row(report: Report, table: Table, name: str) -> str:
    timing, base = table.timings[name], table.timings.get(next(iter(report.titles)))
    head = f"| {table.cell.batch} | {report.titles.get(name, name)} |"
    first_s = "" if timing.first_s is None else duration(timing.first_s)
    if timing.unable is not None or timing.seconds is None:
        return f"{head} {timing.unable or timing.cut or '-'} |" + " |" * 7 + f" {first_s} |"
    speed_up = ""  # only over and of results that pass
    if base is not None and base.seconds is not None and timing.passes is not False and base.passes is not False:
        ratio = base.seconds / timing.seconds
        real = abs(ratio - 1) > (table.noise or 0.0) and len(timing.samples) >= MIN_ROUNDS and base is not timing
        speed_up = f"**{ratio:.2f}x**" if real else f"{ratio:.2f}x"
    rate, top = table.flops / timing.seconds / 1e12, report.ceilings.get(table.cell.dtype)
    error = "" if timing.error is None else f"{timing.error:.0e}"
    cells = [
        duration(timing.seconds),
        f"{spread(timing.samples):.1%}",
        f"{table.items / timing.seconds:.3g}/s",
        speed_up,
        f"{rate:.3g}",
        f"{rate / top:.0%}" if top else "",
        error if timing.passes is not False else f"**fails: {error}**",
        "" if timing.peak is None else f"{timing.peak / 2**20:,.0f} MiB",
        first_s,
    ]
    return f"{head} {' | '.join(cells)} |"


def duration(seconds: float) -> str:
    """Format a duration with three digits and a suitable unit."""
    unit, scale = next((pair for pair in (("s", 1.0), ("ms", 1e-3)) if seconds >= pair[1]), ("us", 1e-6))
    return f"{seconds / scale:.3g} {unit}"


# ---- the chart ------------------------------------------------------------------------------------------------------


def chart(report: Report, path: Path) -> None:
    """Draw the time of each configuration as bars, one plot for each batch size.  Needs matplotlib.

    Shows images if they were measured, otherwise steps, in the first precision; results that fail the gate are hatched.
    """
    from matplotlib.figure import Figure

    section = next(s for s in ("image", *SECTIONS) if any(table.cell.section == s for table in report.tables))
    tables = [table for table in report.tables if table.cell.section == section]
    tables = [table for table in tables if table.cell.dtype == tables[0].cell.dtype]
    figure = Figure(figsize=(4 * len(tables) + 2, 4), layout="constrained")
    for axes, table in zip(figure.subplots(1, len(tables), squeeze=False)[0], tables, strict=True):
        for i, (name, title) in enumerate(report.titles.items()):
            timing = table.timings.get(name)
            if timing is not None and timing.seconds is not None:
                hatch = "//" if timing.passes is False else None
                bars = axes.bar(i, timing.seconds, color=f"C{i}", hatch=hatch, label=title)
                axes.bar_label(bars, [duration(timing.seconds)], fontsize=8)
        axes.set(title=f"batch {table.cell.batch}", ylabel="seconds", xticks=[])
    figure.suptitle(f"{SECTIONS[section]}, {tables[0].cell.dtype}: {report.about.get('device', '')}")
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", fontsize=8, ncols=2)
    figure.savefig(path, dpi=80)
