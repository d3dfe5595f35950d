"""Draw plans as heat maps: `python scripts/draw_plan.py dpmpp_2m euler_a heun --steps 8 --out docs/plan.png`.

One panel for each sampler: a row for each model call, a column for each of its inputs, and in the cells the
coefficients of the next latent.  Needs matplotlib (extra "plot").
"""

import argparse
import io
import sys
from typing import Any

import numpy as np
from PIL import Image

from ldm_lite.diffusion.names import label, named_plan
from ldm_lite.diffusion.plan import Plan
from ldm_lite.diffusion.schedule import NoiseSchedule, scaled_linear_betas

COLUMNS = ["x", "aside", "H1", "H2", "H3", "H", "noise"]
LIMIT = 1.5  # where the colours end


def draw(axes: Any, plan: Plan, title: str) -> None:
    """Draw the rows of `mix` that make the next latent, (N,7)."""
    table = plan.mix[:, 0]
    axes.imshow(np.where(table == 0, np.nan, table), cmap="RdBu_r", vmin=-LIMIT, vmax=LIMIT, aspect="auto")
    for (row, column), value in np.ndenumerate(table):
        if value != 0:
            colour = "white" if abs(value) > 0.7 * LIMIT else "black"
            axes.text(column, row, f"{value:.2f}", ha="center", va="center", color=colour, fontsize=8)
    axes.set(title=title, ylabel="model call: timestep")
    axes.set_xticks(range(len(COLUMNS)), COLUMNS)
    axes.set_yticks(range(len(plan.t)), [f"{call}: {t:.0f}" for call, t in enumerate(plan.t)])
    axes.tick_params(length=0)
    axes.set_xticks(np.arange(len(COLUMNS) + 1) - 0.5, minor=True)
    axes.set_yticks(np.arange(len(table) + 1) - 0.5, minor=True)
    axes.grid(which="minor", color="0.9", linewidth=0.8)
    axes.tick_params(which="minor", length=0)


def main() -> None:
    """Draw the samplers named on the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("samplers", nargs="+", help="names, with a spacing if you like: 'DPM++ 2M Karras'")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--out", default="plan.png")
    options = parser.parse_args()
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError:
        sys.exit("no picture without matplotlib: pip install matplotlib")
    schedule = NoiseSchedule.from_betas(scaled_linear_betas(0.00085, 0.012), "eps")  # Stable Diffusion's
    figure = Figure(figsize=(4.3 * len(options.samplers), 4.2), layout="constrained")
    panels = figure.subplots(1, len(options.samplers), squeeze=False)[0]
    for axes, name in zip(panels, options.samplers, strict=True):
        draw(axes, named_plan(name, schedule, options.steps), f"{label(name)}, {options.steps} steps")
    file = io.BytesIO()
    figure.savefig(file, dpi=80)
    Image.open(file).convert("RGB").quantize(64).save(options.out, optimize=True)  # a third of the size


if __name__ == "__main__":
    main()
