"""Draw docs/performance.png from the first table in docs/performance.md: `python scripts/plot_performance.py`."""

import re
import sys
from pathlib import Path

DOCS = Path(__file__).resolve().parents[1] / "docs"


def rows(text: str) -> list[tuple[str, float]]:
    """The names and seconds of the table whose head begins with "| float32 | time |"."""
    table = text.split("| float32 | time |")[1].split("\n\n")[0]
    return [(name, float(seconds)) for name, seconds in re.findall(r"^\| ([^|]+) \| ([\d.]+) s \|", table, re.M)]


def main() -> None:
    """Draw a bar for each row."""
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError:
        sys.exit("no picture without matplotlib: pip install matplotlib")
    names, seconds = zip(*rows((DOCS / "performance.md").read_text(encoding="utf-8")), strict=True)
    figure = Figure(figsize=(7, 2.2), layout="constrained")
    axes = figure.subplots()
    colors = ["#3b6fb6" if name.startswith("ours") else "#b8bfc9" for name in names]
    bars = axes.barh(range(len(names)), seconds, color=colors, height=0.7)
    axes.bar_label(bars, [f"{number:.3g} s" for number in seconds], padding=4)
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.set_xlim(0, 1.12 * max(seconds))
    axes.set_xticks([])
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0)
    axes.set_title("Guided UNet step, Stable Diffusion 1.x, 512 px, float32, two CPU cores", fontsize=10, loc="left")
    figure.savefig(DOCS / "performance.png", dpi=110)


if __name__ == "__main__":
    main()
