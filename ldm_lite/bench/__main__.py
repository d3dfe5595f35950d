"""Benchmark: `python -m ldm_lite.bench` times text to image on this machine in several configurations.

Every configuration (ours.py) and every peer (theirs.py) has its own process, so that none affects another.  Each
is first compared with a plain float32 forward and then timed.  Their order is reversed in every other round, so that a
machine that slows down affects all equally.  Results are written as they come.
"""

import importlib.util
import logging
import sys
from collections.abc import Sequence

from ldm_lite.bench.options import BenchOptions
from ldm_lite.cli import console, flags

log = logging.getLogger("ldm_lite")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit status."""
    (options,), _ = flags.parse(argv, "bench", __doc__.splitlines()[0], (BenchOptions,))
    return console.run(lambda: run(options), (options,), "what was measured is kept, `resume=True` continues")


def run(options: BenchOptions) -> None:
    """Measure, write the results to the options' folder, and print them.  Raises ValueError for invalid options."""
    from ldm_lite.bench import benchmark, memory, report

    if options.memory:
        for line in memory.table(options):
            print(line, flush=True)
        return
    folder = options.folder
    if not options.resume and (folder / report.RESULTS).exists():
        raise ValueError(f"{folder}: holds results already: continue with `resume`, or use another `out`")
    folder.mkdir(parents=True, exist_ok=True)  # now, so that minutes of measuring are not lost if it fails
    results = benchmark.benchmark(options, lambda partial: report.write(partial, folder))
    print(report.markdown(results))
    print(folder / "results.md")
    if importlib.util.find_spec("matplotlib") is None:
        log.warning("no chart without matplotlib: pip install matplotlib")
    elif results.tables:
        report.chart(results, folder / "results.png")


if __name__ == "__main__":
    sys.exit(main())
