"""Compare samplers: the error of the final latents against a long run of Heun's method from the same noise.

It is defined only for samplers that add no noise.  All run with the same spacing, to solve the same equation.
"""

import importlib.util
import inspect
import io
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from PIL import Image

from ldm_lite.checkpoint.model import Model, load_model
from ldm_lite.cli.command_options import CompareOptions
from ldm_lite.cli.options import LoadOptions, SaveOptions, numbers
from ldm_lite.cli.output import Saver
from ldm_lite.diffusion.names import SAMPLERS, make_plan, resolve
from ldm_lite.diffusion.schedule import SPACINGS
from ldm_lite.tasks import quality

if TYPE_CHECKING:
    from matplotlib.figure import Figure

log = logging.getLogger("ldm_lite")


@dataclass(frozen=True)
class Comparison:
    """One sampler's row of the table."""

    name: str
    calls: int  # model calls of a run of 20 steps
    noise: bool
    spacing: str  # its own
    about: str  # the first line of its docstring
    errors: dict[int, float]  # by the number of steps; empty if the sampler adds noise or solves another equation


def compare(model: Model, options: CompareOptions) -> list[Comparison]:
    """Run every sampler at every number of steps.  Raises ValueError for unknown names."""
    names = list(SAMPLERS) if options.samplers is None else [resolve(name)[0] for name in options.samplers.split(",")]
    asked, rows = quality.txt2img_options(model, options), []
    error_of = quality.against(model, asked, options.reference)
    for name in names:
        plan = make_plan(name, model.schedule, 20)
        # With noise there is no single solution, and LCM solves another equation.
        counts = [] if plan.adds_noise.any() else numbers(options.steps, "`steps`")
        case = quality.Case(name, name)
        errors = {steps: error_of(quality.job_of(model, asked, case, steps)) for steps in counts}
        spacing = inspect.signature(SAMPLERS[name]).parameters["spacing"].default
        about = (SAMPLERS[name].__doc__ or "").splitlines()[0]
        rows.append(Comparison(name, len(plan.t), bool(plan.adds_noise.any()), spacing, about, errors))
    return rows


def table(rows: Sequence[Comparison], steps: Sequence[int]) -> str:
    """Format the rows as text, with the relative error at each number of steps."""
    heads = ["sampler", "calls/20", "noise", "spacing", *(f"err@{count}" for count in steps), ""]
    lines = [heads]
    for row in rows:
        errors = [f"{row.errors[count]:.1e}" if count in row.errors else "-" for count in steps]
        lines.append([row.name, str(row.calls), "yes" if row.noise else "no", row.spacing, *errors, row.about])
    widths = [max(len(line[i]) for line in lines) for i in range(len(heads))]
    padded = ("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) for line in lines)
    return "\n".join(line.rstrip() for line in padded)


def chart(model: Model, rows: Sequence[Comparison], options: CompareOptions) -> "Figure":
    """Draw the noise levels of each spacing and the error of each sampler over steps.  Needs matplotlib."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 5), layout="constrained")
    left, right = figure.subplots(1, 2)
    for name in options.spacings.split(","):
        levels = [level for level in SPACINGS[name](model.schedule, 20) if level.s > 0]
        left.semilogy([level.sigma for level in levels], marker=".", label=name)
    left.set(title="Spacings, 20 steps", xlabel="step", ylabel="sigma = sqrt((1 - alpha_bar) / alpha_bar)")
    drawn = [row for row in rows if row.errors]
    for i, row in enumerate(drawn):
        right.loglog(
            *zip(*row.errors.items(), strict=True), marker=".", linestyle="-" if i < 10 else "--", label=row.name
        )
    title = f"{model.name}, {options.spacing} spacing"
    right.set(title=title, xlabel="steps", ylabel="relative error of the last latents")
    counts = numbers(options.steps, "`steps`")
    right.set_xticks(counts, labels=map(str, counts))
    right.minorticks_off()
    for axes in (left, right) if drawn else (left,):
        axes.grid(alpha=0.3)
        axes.legend()
    return figure


def run(options: CompareOptions, load: LoadOptions) -> None:
    """Load, compare, print the table, save the chart."""
    for name in () if options.compare else options.spacings.split(","):
        if name not in SPACINGS:
            raise ValueError(f"unknown spacing {name!r}: wanted one of {', '.join(SPACINGS)}")
    for name in () if options.samplers is None else options.samplers.split(","):
        resolve(name)
    if not (has_matplotlib := importlib.util.find_spec("matplotlib") is not None):
        log.warning("no chart without matplotlib: pip install matplotlib")
    steps, saver = numbers(options.steps, "`steps`"), Saver(SaveOptions(out=options.out), "samplers")
    model = load_model(load, Model)
    if options.compare:
        points = quality.measure(model, options, None if options.results is None else Path(options.results))
        print(quality.table(list(points["points"].values())))
        drawn = partial(quality.chart, points)
    else:
        for count in (*steps, options.reference):
            make_plan("heun", model.schedule, count, spacing=options.spacing)
        rows = compare(model, options)
        print(table(rows, steps))
        drawn = partial(chart, model, rows, options)
    if not has_matplotlib:
        return
    file = io.BytesIO()
    drawn().savefig(file, format="png")
    print(saver.sample(Image.open(file, formats=["PNG"]).convert("RGB"), options.prompt))
