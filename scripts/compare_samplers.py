"""Compare samplers: how far they are from the converged image after some steps, or against what a run costs.

    python scripts/compare_samplers.py --steps 5,10        # a table and, with matplotlib, a chart
    python scripts/compare_samplers.py --compare           # quality over cost

The error is that of the last latents against a long run of Heun's method from the same noise.  It is defined only for
samplers that add no noise.  All run with the same spacing, to solve the same equation.

Cost, of samplers and of options that save work, is counted in calls of the whole network on one branch of guidance,
by multiplications: a step with guidance costs 2, one of DeepCache's short calls a fraction.
scripts/evaluate_emoji.py adds the accuracy of a text-to-emoji checkpoint to the results, point by point, and the chart
then shows it too.
"""

import contextlib
import dataclasses
import importlib.util
import inspect
import io
import json
import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from PIL import Image
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from ldm_lite.checkpoint.loading import load_model
from ldm_lite.checkpoint.model import CheckpointModel
from ldm_lite.checkpoint.reader import on_meta
from ldm_lite.cli import console, flags
from ldm_lite.cli.files import read_json
from ldm_lite.cli.options import SEEDS, CheckedOptions, LoadOptions, SaveOptions, numbers, words
from ldm_lite.cli.output import Saver
from ldm_lite.cli.task_options import Txt2imgOptions
from ldm_lite.cli.writing import write_whole
from ldm_lite.core.declare import SCALES, option
from ldm_lite.core.denoise import Branch, Call, Constraint, Draw, Inputs, InputSource, join, running, unconstrained
from ldm_lite.core.job import Item, Latents, run_batches, start
from ldm_lite.core.plan import NUM_REGISTERS, Plan, Row
from ldm_lite.diffusion.adaptive import AdaptivePlan
from ldm_lite.diffusion.names import SAMPLERS, named_plan, resolve
from ldm_lite.diffusion.schedule import SPACINGS
from ldm_lite.families.sd1 import SD1
from ldm_lite.models.unet import LDMUNet, LDMUNetSpec
from ldm_lite.runtime.shortened import Run, Shortcuts
from ldm_lite.tasks import txt2img
from ldm_lite.tasks.job import TaskJob

if TYPE_CHECKING:
    from matplotlib.figure import Figure

log = logging.getLogger("ldm_lite")

ACCURACIES = ("identity", "background")  # shares of images, which scripts/evaluate_emoji.py measures
BASE = "dpmpp_2m"  # the sampler that tricks are tried with


@dataclass(frozen=True)
class CompareOptions(CheckedOptions):
    """What to compare."""

    prompt: str = option("a red apple on a blue background", "prompt of all runs", positional=True, common=True)
    samplers: tuple[str, ...] = option(
        "",
        "comma-separated names (default: all); --compare also combines them with the tricks",
        parse=words,
        common=True,
    )
    steps: tuple[int, ...] = option(
        "5,10,20,40,80", "comma-separated step counts", within=(1, 1000), parse=numbers, common=True
    )
    spacing: str = option(
        "karras", "timestep spacing of all samplers: only then do they solve the same equation", common=True
    )
    spacings: tuple[str, ...] = option(
        "leading,trailing,linspace,karras,exponential,beta", "comma-separated spacings to draw", parse=words
    )
    reference: int = option(400, "steps of the reference run", within=(1, 1000))
    scale: float | None = option(None, "classifier-free guidance scale (default: the checkpoint's)", within=SCALES)
    seed: int = option(42, "seed of the noise", within=SEEDS)
    out: str = option("samplers.png", "name of the chart", common=True)
    compare: bool = option(
        False, "chart quality over cost, of samplers and of the tricks that save network calls", common=True
    )
    results: str | None = option(
        None, "with --compare: keep results in this file; those it already holds are not run again", metavar="FILE"
    )
    debug: bool = option(False, "show the traceback of an error")


@dataclass(frozen=True)
class Case:
    """A curve of the chart."""

    name: str
    sampler: str = BASE
    spacing: str | None = None  # None: that of the command
    tricks: Mapping[str, Any] = field(default_factory=dict)  # options; {half} is half of the steps


TRICKS = (
    Case("AYS", spacing="ays"),
    Case("interval -0.6", tricks={"guidance_interval": "-0.6"}),
    Case("interval -0.4", tricks={"guidance_interval": "-0.4"}),
    Case("interval sigma 0.3-5", tricks={"guidance_interval": "sigma=0.3-5"}),
    Case("schedule cosine", tricks={"guidance_schedule": "cosine"}),
    Case("APG", tricks={"apg": "parallel=0"}),
    Case("DeepCache 2", tricks={"deep_cache": "2:1"}),
    Case("DeepCache 3", tricks={"deep_cache": "3:1"}),
    Case("T-GATE half", tricks={"gate_step": "{half}"}),
    Case("FreeU", tricks={"freeu": "1.1,1.1,0.9,0.9"}),
    Case("interval -0.6, DeepCache 2", tricks={"guidance_interval": "-0.6", "deep_cache": "2:1"}),
    Case("unipc, interval -0.6", sampler="unipc", tricks={"guidance_interval": "-0.6"}),
)


def named(samplers: Sequence[str]) -> list[str]:
    """Return samplers by the package's names; all for none.  Raises ValueError for unknown names."""
    return [resolve(name)[0] for name in samplers] or list(SAMPLERS)


def cases(model: CheckpointModel, samplers: Sequence[str] = ()) -> list[Case]:
    """Return the curves: samplers with a fixed number of calls (of those named), then tricks."""
    chosen = named(samplers)
    fixed = [name for name in chosen if not isinstance(named_plan(name, model.schedule, 20), AdaptivePlan)]
    return [*(Case(name, name) for name in fixed), *(trick for trick in TRICKS if trick.sampler in chosen)]


def job_of(model: CheckpointModel, options: Txt2imgOptions, case: Case, steps: int) -> TaskJob:
    """Return the job of a case for the prompts, seeds, scale and spacing of options, as one batch.

    It starts from the noise of its first level, whatever the sampler does.
    """
    tricks: dict[str, Any] = {name: steps // 2 if value == "{half}" else value for name, value in case.tricks.items()}
    spacing = case.spacing or options.spacing
    asked = dataclasses.replace(options, sampler=case.sampler, spacing=spacing, steps=steps, **tricks)
    [part] = txt2img.prepare(model, asked).parts

    def first_latents(job: Any, items: Sequence[Item], draw: Draw) -> tuple[Tensor, Constraint]:
        return draw() * job.plan.level[0, 1], unconstrained

    return dataclasses.replace(part.make(), items=part.items, first_latents=first_latents)


def latents(job: TaskJob) -> Tensor:
    """Return the last latents (B,C,h,w) of a job of one batch, float64."""
    return next(event for event in run_batches(job) if isinstance(event, Latents)).latents.double()


def txt2img_options(model: CheckpointModel, options: CompareOptions) -> Txt2imgOptions:
    """Return the options that all runs share."""
    scale = model.family.scale if options.scale is None else options.scale
    return Txt2imgOptions(options.prompt, negative_prompt="", scale=scale, spacing=options.spacing, seed=options.seed)


def against(model: CheckpointModel, asked: Txt2imgOptions, steps: int) -> Callable[[TaskJob], float]:
    """Return a function from a job to the relative error of its last latents, against a run of Heun's method."""
    converged = latents(job_of(model, asked, Case("", "heun"), steps))
    return lambda job: float((latents(job) - converged).norm() / converged.norm())


# ---- error over steps -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Comparison:
    """One sampler's row of the table."""

    name: str
    calls: int  # model calls of a run of 20 steps
    noise: bool
    spacing: str  # its own
    about: str  # the first line of its docstring
    errors: dict[int, float]  # by the number of steps; empty if the sampler adds noise or solves another equation


def compare(model: CheckpointModel, options: CompareOptions) -> list[Comparison]:
    """Run every sampler at every number of steps.  Raises ValueError for unknown names."""
    asked, rows = txt2img_options(model, options), []
    error_of = against(model, asked, options.reference)
    for name in named(options.samplers):
        plan = named_plan(name, model.schedule, 20)
        # With noise there is no single solution, and LCM solves another equation.
        counts = () if plan.adds_noise.any() else options.steps
        errors = {steps: error_of(job_of(model, asked, Case(name, name), steps)) for steps in counts}
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


def chart(model: CheckpointModel, rows: Sequence[Comparison], options: CompareOptions) -> "Figure":
    """Draw the noise levels of each spacing and the error of each sampler over steps.  Needs matplotlib."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 5), layout="constrained")
    left, right = figure.subplots(1, 2)
    for name in options.spacings:
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
    right.set_xticks(options.steps, labels=map(str, options.steps))
    right.minorticks_off()
    for axes in (left, right) if drawn else (left,):
        axes.grid(alpha=0.3)
        axes.legend()
    return figure


# ---- error over cost ------------------------------------------------------------------------------------------------


class Cost:
    """The multiplications of a run of a UNet, in calls of the whole network on one branch."""

    def __init__(self, spec: LDMUNetSpec, side: int) -> None:
        with on_meta():
            self._unet = LDMUNet(spec)
        self._x = torch.empty(NUM_REGISTERS, 1, spec.in_channels, side, side, device="meta")
        self._text: dict[str, Tensor] = {}
        if spec.context_dim is not None:
            self._text["context"] = torch.empty(1, 77, spec.context_dim, device="meta")
        self._kinds: dict[object, int] = {}
        self._inputs = Inputs(self._unet, (Branch(self._text),))
        self._whole = self._flops(self._inputs)

    def of(self, plan: Plan, source: InputSource, shortcuts: Shortcuts | None) -> float:
        """Return the cost of a plan's calls for one image, which run the branches that `source` gives."""
        changed, total = dataclasses.replace(shortcuts or Shortcuts(), free=None), 0
        run = Run(self._unet, changed, plan).wrapped(lambda call: self._inputs)
        for number, step in enumerate(plan.step):
            gate = 0 if changed.gate is None else int(step) - changed.gate + 1
            kind = changed.every, changed.branch, number % changed.every > 0, changed.gate and max(-1, min(1, gate))
            call = Call(number, int(step), plan.num_steps)
            if kind not in self._kinds:
                for before in range(number):  # the calls that fill what this one reads
                    self._flops(run(Call(before, int(plan.step[before]), plan.num_steps)))
                self._kinds[kind] = self._flops(run(call))
            inputs = source(call)
            total += self._kinds[kind] * len(running(inputs.branches, inputs.scale))
        return total / self._whole

    @torch.no_grad()
    def _flops(self, inputs: Inputs) -> int:
        x, row = self._x, Row(*(torch.empty(shape, device="meta") for shape in ((), 2, 2, 2, (1, NUM_REGISTERS + 2))))
        guided = join(inputs.branches, 1.0, x.device)
        with FlopCounterMode(display=False) as counter:
            inputs.run_row(inputs.network, x, row, x[0], guided, inputs.combine, inputs.adjust, inputs.arguments)
        return int(counter.get_total_flops())


def measure(model: CheckpointModel, options: CompareOptions, path: Path | None) -> dict[str, Any]:
    """Return all points, also written to the file, if given: points that it holds are not run again.

    Samplers that add noise converge to no image: their points have a cost and no error.  Raises ValueError for a file
    of another comparison, and without guidance.
    """
    if not isinstance(model.family.unet, LDMUNetSpec) or model.family.unet.vector_dim or model.family.unet.num_classes:
        raise ValueError(f"`compare` is for UNets that read text alone, not for {model.family.title}")
    side, asked = model.family.resolution, txt2img_options(model, options)
    if asked.scale == 1:
        raise ValueError("`compare` is about guidance too: use a `scale` other than 1")
    about = {name: getattr(options, name) for name in ("prompt", "spacing", "reference", "seed")}
    about |= {"model": model.name, "scale": asked.scale}
    kept: dict[str, Any] = {**about, "points": {}} if path is None else read(path, about)
    shape = model.latent_shape(side, side)
    costs = {"calls": Cost(model.family.unet, shape[-1]), "sd1": Cost(SD1.unet, 64)}
    error_of: Callable[[TaskJob], float] | None = None
    for case in cases(model, options.samplers):
        for steps in options.steps:
            key = f"{case.name}/{steps}"
            if "calls" in kept["points"].get(key, {}):
                continue
            job = job_of(model, asked, case, steps)
            assert job.plan is not None
            settings = [getattr(feature, "settings", None) for feature in job.task.features]
            shortcuts = next((setting for setting in settings if isinstance(setting, Shortcuts)), None)
            source = start(dataclasses.replace(job, wrappers=()), list(job.items))[1]
            point = {name: cost.of(job.plan, source, shortcuts) for name, cost in costs.items()} | {"steps": steps}
            if not job.plan.adds_noise.any():
                error_of = error_of or against(model, asked, options.reference)
                point["error"] = error_of(job)
            kept["points"][key] = {"name": case.name, **kept["points"].get(key, {}), **point}
            if path is not None:
                write_whole(path, json.dumps(kept, indent=1) + "\n")
    return kept


def read(path: Path, about: Mapping[str, object]) -> dict[str, Any]:
    """Return a file's points, or none for a new one.  Raises ValueError for those of another comparison."""
    if not path.exists():
        return {**about, "points": {}}
    with contextlib.suppress(ValueError, KeyError, TypeError):
        kept: dict[str, Any] = read_json(path)
        if {name: kept[name] for name in about} == about and isinstance(kept["points"], dict):
            return kept
    raise ValueError(f"{path} holds the results of another comparison: give another name with `results`")


def cost_table(points: Sequence[Mapping[str, Any]]) -> str:
    """Format the points as text, a line each."""
    lines = [f"{'':28}{'steps':>6}{'cost':>8}{'at SD1':>8}{'error':>10}{'identity':>10}{'background':>12}"]
    for point in points:
        error = f"{point['error']:.1e}" if "error" in point else "-"
        shares = [f"{point[name]:.0%}" if name in point else "-" for name in ACCURACIES]
        costs = f"{point['calls']:8.1f}{point['sd1']:8.1f}"
        lines.append(f"{point['name']:28}{point['steps']:6}{costs}{error:>10}{shares[0]:>10}{shares[1]:>12}")
    return "\n".join(lines)


def cost_chart(kept: Mapping[str, Any]) -> "Figure":
    """Draw error, and accuracy if there is any, over cost: samplers left, tricks right.  Needs matplotlib."""
    from matplotlib.figure import Figure

    points, tricks = list(kept["points"].values()), {case.name for case in TRICKS}
    names = list(dict.fromkeys(point["name"] for point in points))
    measured = ["error", *(name for name in ACCURACIES if any(name in point for point in points))]
    figure = Figure(figsize=(13, 1 + 4.5 * len(measured)), layout="constrained")
    grid = figure.subplots(len(measured), 2, sharex=True, sharey="row", squeeze=False)
    for column, (shown, title) in enumerate(
        (
            ([name for name in names if name not in tricks], f"{kept['model']}, {kept['spacing']} spacing"),
            ([BASE, *(name for name in names if name in tricks)], f"tricks, with {BASE} unless named"),
        )
    ):
        labelled: set[str] = set()  # a name stands in one legend of the column
        for axes, value in zip(grid[:, column], measured, strict=True):
            for i, name in enumerate(shown):
                mine = sorted(
                    (point["calls"], point[value]) for point in points if point["name"] == name and value in point
                )
                if mine:
                    style = {"color": f"C{i % 10}", "linestyle": ("-", "--", ":")[i // 10 % 3], "marker": "."}
                    axes.semilogx(*zip(*mine, strict=True), **style, label="_" * (name in labelled) + name)
                    labelled.add(name)
            axes.grid(alpha=0.3)
            if axes.get_legend_handles_labels()[0]:
                axes.legend(fontsize=6, ncols=2)
        grid[0, column].set(title=title, yscale="log")
        grid[-1, column].set(xlabel="cost: calls of the network on one branch of guidance")
    for axes, value in zip(grid[:, 0], measured, strict=True):
        axes.set(ylabel="relative error to the converged latents" if value == "error" else f"share of images: {value}")
    return figure


# ---- the command ----------------------------------------------------------------------------------------------------


def compare_samplers(options: CompareOptions, load: LoadOptions) -> None:
    """Load, compare, print the table, save the chart."""
    for name in () if options.compare else options.spacings:
        if name not in SPACINGS:
            raise ValueError(f"unknown spacing {name!r}: expected one of {', '.join(SPACINGS)}")
    named(options.samplers)
    if not (has_matplotlib := importlib.util.find_spec("matplotlib") is not None):
        log.warning("no chart without matplotlib: pip install matplotlib")
    saver = Saver(SaveOptions(out=options.out), "samplers")

    def check(model: CheckpointModel) -> None:
        for count in () if options.compare else (*options.steps, options.reference):
            named_plan("heun", model.schedule, count, spacing=options.spacing)

    model = load_model(load, CheckpointModel, check)
    if options.compare:
        points = measure(model, options, None if options.results is None else Path(options.results))
        print(cost_table(list(points["points"].values())))
        drawn = partial(cost_chart, points)
    else:
        rows = compare(model, options)
        print(table(rows, options.steps))
        drawn = partial(chart, model, rows, options)
    if not has_matplotlib:
        return
    file = io.BytesIO()
    drawn().savefig(file, format="png")
    print(saver.sample(Image.open(file, formats=["PNG"]).convert("RGB"), options.prompt))


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status."""
    about = (__doc__ or "").splitlines()[0]
    (options, load), _ = flags.parse(argv, "scripts/compare_samplers.py", about, (CompareOptions, LoadOptions))
    return console.run(lambda: compare_samplers(options, load), (options, load), "only the file of `results` is saved")


if __name__ == "__main__":
    sys.exit(main())
