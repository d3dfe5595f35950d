"""Quality over cost: how far samplers and tricks are from the converged image, against the work of the network.

Cost is counted in calls of the whole network on one branch of guidance, by the multiplications that a run does: a step
with guidance costs 2, one of DeepCache's short calls a share.  scripts/evaluate_emoji.py adds the accuracy of a
text-to-emoji checkpoint to the results, point by point, and then it is drawn too.
"""

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from ldm_lite.checkpoint.model import Model
from ldm_lite.checkpoint.reader import on_meta
from ldm_lite.cli.command_options import CompareOptions
from ldm_lite.cli.files import read_json
from ldm_lite.cli.options import numbers
from ldm_lite.cli.task_options import Txt2imgOptions
from ldm_lite.cli.writing import write_whole
from ldm_lite.core.denoise import Branch, Call, Constraint, Draw, Inputs, InputSource, running, unconstrained
from ldm_lite.core.job import Item, Latents, start
from ldm_lite.core.job import run as run_batches
from ldm_lite.diffusion.adaptive import AdaptivePlan
from ldm_lite.diffusion.names import SAMPLERS, make_plan, resolve
from ldm_lite.diffusion.plan import Plan
from ldm_lite.families.sd1 import SD1
from ldm_lite.models.unet import UNet, UNetSpec
from ldm_lite.runtime.shortened import Shortcuts, ShortenedUNet
from ldm_lite.tasks import txt2img
from ldm_lite.tasks.job import Job

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ACCURACIES = ("identity", "background")  # shares of images, which scripts/evaluate_emoji.py measures
BASE = "dpmpp_2m"  # the sampler that tricks are tried with


@dataclass(frozen=True)
class Case:
    """A curve of the chart."""

    name: str
    sampler: str = BASE
    spacing: str | None = None  # None: that of the command
    tricks: Mapping[str, Any] = field(default_factory=dict)  # options; {half} is half of the steps

    def options(self, steps: int) -> dict[str, Any]:
        """Return the options of its tricks for a number of steps."""
        return {name: steps // 2 if value == "{half}" else value for name, value in self.tricks.items()}


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


def cases(model: Model, samplers: str | None = None) -> list[Case]:
    """Return the curves: samplers with a fixed number of calls (of those named, separated by commas), then tricks."""
    chosen = list(SAMPLERS) if samplers is None else [resolve(name)[0] for name in samplers.split(",")]
    fixed = [name for name in chosen if not isinstance(make_plan(name, model.schedule, 20), AdaptivePlan)]
    return [*(Case(name, name) for name in fixed), *(trick for trick in TRICKS if trick.sampler in chosen)]


def job_of(model: Model, options: Txt2imgOptions, case: Case, steps: int) -> Job:
    """Return the job of a case for the prompts, seeds, scale and spacing of options, as one batch.

    It starts from the noise of its first level, whatever the sampler does.
    """
    spacing, tricks = case.spacing or options.spacing, case.options(steps)
    asked = dataclasses.replace(options, sampler=case.sampler, spacing=spacing, steps=steps, **tricks)
    task = txt2img.prepare(model, asked)
    [part] = task.parts

    def begin(job: Any, items: Sequence[Item], draw: Draw) -> tuple[Tensor, Constraint]:
        return draw() * job.plan.level[0, 1], unconstrained

    return dataclasses.replace(part.make(), items=part.items, begin=begin)


def latents(job: Job) -> Tensor:
    """Return the last latents (B,C,h,w) of a job of one batch, float64."""
    return next(event for event in run_batches(job) if isinstance(event, Latents)).latents.double()


def txt2img_options(model: Model, options: CompareOptions) -> Txt2imgOptions:
    """Return what all runs have in common."""
    scale = model.family.scale if options.scale is None else options.scale
    return Txt2imgOptions(options.prompt, negative_prompt="", scale=scale, spacing=options.spacing, seed=options.seed)


def against(model: Model, asked: Txt2imgOptions, steps: int) -> Callable[[Job], float]:
    """Return what tells the relative error of a job's last latents against a run of Heun's method."""
    truth = latents(job_of(model, asked, Case("", "heun"), steps))
    return lambda job: float((latents(job) - truth).norm() / truth.norm())


class Cost:
    """The multiplications of a run of a UNet, in calls of the whole network on one branch."""

    def __init__(self, spec: UNetSpec, side: int) -> None:
        with on_meta():
            self._unet = UNet(spec)
        self._x = torch.empty(1, spec.in_channels, side, side, device="meta")
        self._text: dict[str, Tensor] = {}
        if spec.context_dim is not None:
            self._text["context"] = torch.empty(1, 77, spec.context_dim, device="meta")
        self._kinds: dict[object, int] = {}
        self._whole = self._flops(self._unet)

    def of(self, plan: Plan, source: InputSource, shortcuts: Shortcuts | None) -> float:
        """Return the cost of a plan's calls for one image, which run the branches that `source` gives."""
        changed, total = dataclasses.replace(shortcuts or Shortcuts(), free=None), 0
        run = ShortenedUNet(self._unet, changed, plan).wrapped(lambda call: Inputs(self._unet, (Branch(self._text),)))
        for number, step in enumerate(plan.step):
            gate = 0 if changed.gate is None else int(step) - changed.gate + 1
            kind = changed.every, changed.branch, number % changed.every > 0, changed.gate and max(-1, min(1, gate))
            call = Call(number, int(step), plan.num_steps)
            if kind not in self._kinds:
                for before in range(number):  # the calls that fill what this one reads
                    self._flops(run(Call(before, int(plan.step[before]), plan.num_steps)).network)
                self._kinds[kind] = self._flops(run(call).network)
            inputs = source(call)
            total += self._kinds[kind] * len(running(inputs.branches, inputs.scale))
        return total / self._whole

    @torch.no_grad()
    def _flops(self, network: Any) -> int:
        with FlopCounterMode(display=False) as counter:
            network(self._x, torch.zeros(1, device="meta"), **self._text)
        return int(counter.get_total_flops())


def measure(model: Model, options: CompareOptions, path: Path | None) -> dict[str, Any]:
    """Return all points, in the file too, if there is one: those that it holds are not run again.

    Samplers that add noise converge to no image: their points have a cost and no error.  Raises ValueError for a file
    of another comparison, and without guidance.
    """
    if not isinstance(model.family.unet, UNetSpec) or model.family.unet.vector_dim or model.family.unet.num_classes:
        raise ValueError(f"`compare` is for UNets that read text alone, not for {model.family.title}")
    side, asked = model.family.resolution, txt2img_options(model, options)
    if asked.scale == 1:
        raise ValueError("`compare` is about guidance too: take a `scale` other than 1")
    about = {name: getattr(options, name) for name in ("prompt", "spacing", "reference", "seed")}
    about |= {"model": model.name, "scale": asked.scale}
    kept: dict[str, Any] = {**about, "points": {}} if path is None else read(path, about)
    shape = model.latent_shape(side, side)
    costs = {"calls": Cost(model.family.unet, shape[-1]), "sd1": Cost(SD1.unet, 64)}
    error_of: Callable[[Job], float] | None = None
    for case in cases(model, options.samplers):
        for steps in numbers(options.steps, "`steps`"):
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
    try:
        kept = read_json(path)
        same = {name: kept[name] for name in about} == about and isinstance(kept["points"], dict)
    except (ValueError, KeyError, TypeError):
        same = False
    if not same:
        raise ValueError(f"{path} holds the results of another comparison: give another name with `results`")
    return dict(kept)


def table(points: Sequence[Mapping[str, Any]]) -> str:
    """Format the points as text, a line each."""
    lines = [f"{'':28}{'steps':>6}{'cost':>8}{'at SD1':>8}{'error':>10}{'identity':>10}{'background':>12}"]
    for each in points:
        error = f"{each['error']:.1e}" if "error" in each else "-"
        shares = [f"{each[name]:.0%}" if name in each else "-" for name in ACCURACIES]
        costs = f"{each['calls']:8.1f}{each['sd1']:8.1f}"
        lines.append(f"{each['name']:28}{each['steps']:6}{costs}{error:>10}{shares[0]:>10}{shares[1]:>12}")
    return "\n".join(lines)


def chart(kept: Mapping[str, Any]) -> "Figure":
    """Draw error, and accuracy if there is any, over cost: samplers left, tricks right.  Needs matplotlib."""
    from matplotlib.figure import Figure

    points, tricks = list(kept["points"].values()), {case.name for case in TRICKS}
    names = list(dict.fromkeys(each["name"] for each in points))
    measured = ["error", *(name for name in ACCURACIES if any(name in each for each in points))]
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
                mine = sorted((each["calls"], each[value]) for each in points if each["name"] == name and value in each)
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
