"""Compare samplers: `python -m ldm_lite.samplers` prints their table and writes a picture of it.

The error is that of the last latents on a checkpoint (the bundled one, if none is named) against a long run of Heun's
method from the same noise, relative, for the samplers that add none.  The picture needs matplotlib (extra "plot").
"""

import importlib.util
import inspect
import io
import logging
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import ldm_lite
from ldm_lite.cli import console, flags
from ldm_lite.cli.options import FINITE, SEEDS, LoadOptions, Ranged, SaveOptions, numbers, option
from ldm_lite.cli.output import Saver

if TYPE_CHECKING:
    from PIL.Image import Image
    from torch import Tensor

    from ldm_lite.checkpoint.model import Pipeline

log = logging.getLogger("ldm_lite")


@dataclass(frozen=True)
class Options(Ranged):
    """What to compare."""

    prompt: str = option("a red apple on a blue background", "what the runs are of", positional=True)
    samplers: str | None = option(None, "comma-separated names (default: all)")
    steps: str = option("5,10,20,40,80", "comma-separated step counts")
    spacing: str = option("karras", "what all samplers run with: only then do they solve the same equation")
    spacings: str = option("leading,trailing,linspace,karras,exponential,beta", "comma-separated, to be drawn")
    reference: int = option(400, "steps of the reference run", within=(1, 1000))
    scale: float | None = option(None, "classifier-free guidance (default: the checkpoint's)", within=FINITE)
    seed: int = option(42, "seed of the noise", within=SEEDS)
    out: str = option("samplers.png", "name of the picture")
    debug: bool = option(False, "show the traceback of an error")


@dataclass(frozen=True)
class Comparison:
    """One sampler's row of the table."""

    name: str
    calls: int  # model calls of a run of 20 steps
    noise: bool
    spacing: str  # its own
    about: str  # the first line of its docstring
    errors: dict[int, float]  # by the number of steps; empty where there is no one solution to come near


def compare(pipe: "Pipeline", options: Options, on_run: Callable[[], None] = lambda: None) -> list[Comparison]:
    """Run every sampler at every number of steps; on_run is called after each.  Raises ValueError for unknown names."""
    from ldm_lite import generate
    from ldm_lite.conditioning.prompts import encode_prompts, guided
    from ldm_lite.diffusion.names import make_plan, resolve
    from ldm_lite.diffusion.samplers import SAMPLERS

    names = list(SAMPLERS) if options.samplers is None else [resolve(name)[0] for name in options.samplers.split(",")]
    noise = generate.seeded_noise([options.seed], pipe.latent_shape(pipe.family.resolution, pipe.family.resolution))()
    scale = pipe.family.scale if options.scale is None else options.scale
    branches = guided(pipe, encode_prompts(pipe, [options.prompt]), encode_prompts(pipe, [""]), scale)

    def run(name: str, steps: int) -> "Tensor":
        plan = make_plan(name, pipe.schedule, steps, spacing=options.spacing)
        # DDIM and PLMS start from unit noise, the others from as much as belongs to their first level.
        start = noise / plan.initial * plan.level[0, 1]
        *_, latents = generate.denoise(pipe, start, branches, plan)
        on_run()
        return latents.double()

    truth, rows = run("heun", options.reference), []
    for name in names:
        plan = make_plan(name, pipe.schedule, 20)
        # With noise there is no one solution; an LCM's answers are not this equation's.
        counts = [] if plan.draws.any() else numbers(options.steps, "--steps")
        errors = {steps: float((run(name, steps) - truth).norm() / truth.norm()) for steps in counts}
        spacing = inspect.signature(SAMPLERS[name]).parameters["spacing"].default
        about = (SAMPLERS[name].__doc__ or "").splitlines()[0]
        rows.append(Comparison(name, len(plan.t), bool(plan.draws.any()), spacing, about, errors))
    return rows


def table(rows: Sequence[Comparison], steps: Sequence[int]) -> str:
    """The rows as text, with the relative error at each number of steps."""
    heads = ["sampler", "calls/20", "noise", "spacing", *(f"err@{count}" for count in steps), ""]
    lines = [heads]
    for row in rows:
        errors = [f"{row.errors[count]:.1e}" if count in row.errors else "-" for count in steps]
        lines.append([row.name, str(row.calls), "yes" if row.noise else "no", row.spacing, *errors, row.about])
    widths = [max(len(line[i]) for line in lines) for i in range(len(heads))]
    padded = ("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) for line in lines)
    return "\n".join(line.rstrip() for line in padded)


def picture(pipe: "Pipeline", rows: Sequence[Comparison], options: Options) -> "Image":
    """Noise level over steps for each spacing, and error against steps for each sampler.  Needs matplotlib."""
    from matplotlib.figure import Figure
    from PIL import Image

    from ldm_lite.diffusion.schedule import SPACINGS

    figure = Figure(figsize=(13, 5), layout="constrained")
    left, right = figure.subplots(1, 2)
    for name in options.spacings.split(","):
        levels = [level for level in SPACINGS[name](pipe.schedule, 20) if level.s > 0]
        left.semilogy([level.sigma for level in levels], marker=".", label=name)
    left.set(title="Spacings, 20 steps", xlabel="step", ylabel="sigma = sqrt((1 - alpha_bar) / alpha_bar)")
    drawn = [row for row in rows if row.errors]
    for i, row in enumerate(drawn):
        right.loglog(
            *zip(*row.errors.items(), strict=True), marker=".", linestyle="-" if i < 10 else "--", label=row.name
        )
    right.set(
        title=f"{pipe.name}, {options.spacing} spacing", xlabel="steps", ylabel="relative error of the last latents"
    )
    counts = numbers(options.steps, "--steps")
    right.set_xticks(counts, labels=map(str, counts))
    right.minorticks_off()
    for axes in (left, right) if drawn else (left,):
        axes.grid(alpha=0.3)
        axes.legend()
    file = io.BytesIO()
    figure.savefig(file, format="png")
    return Image.open(file).convert("RGB")


def run(options: Options, load: LoadOptions) -> None:
    """Load, compare, print the table, save the picture."""
    from ldm_lite.diffusion.names import make_plan, resolve
    from ldm_lite.diffusion.schedule import SPACINGS

    for name in options.spacings.split(","):
        if name not in SPACINGS:
            raise ValueError(f"unknown spacing {name!r}: wanted one of {', '.join(SPACINGS)}")
    for name in () if options.samplers is None else options.samplers.split(","):
        resolve(name)
    steps, saver = numbers(options.steps, "--steps"), Saver(SaveOptions(out=options.out), "samplers")
    pipe = ldm_lite.load(**load.arguments())
    for count in (*steps, options.reference):
        make_plan("heun", pipe.schedule, count, spacing=options.spacing)
    rows = compare(pipe, options)
    print(table(rows, steps))
    if importlib.util.find_spec("matplotlib") is None:
        log.warning("no picture without matplotlib: pip install matplotlib")
        return
    print(saver.sample(picture(pipe, rows, options), options.prompt))


def main(argv: Sequence[str] | None = None) -> int:
    """The command line -> its exit status."""
    (options, load), _ = flags.parse(argv, "samplers", __doc__.splitlines()[0], (Options, LoadOptions))
    return console.run(lambda: run(options, load), (options, load))


if __name__ == "__main__":
    sys.exit(main())
