"""Measure batch jobs: images a second of processes and of Ray's workers, in turn, and memory over a long job.

    python scripts/batch_scale.py                        # one process, also on one core, two, Ray; three rounds
    python scripts/batch_scale.py --engines "one process" "two processes"  # without Ray
    python scripts/batch_scale.py --memory --rows 10000  # the memory of one process, while it makes many images

The bundled model on the CPU, one thread for each process.  A rate is that of the shards after the first, so that
starting Python, Ray and the model does not count.
"""

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ENGINES = {  # the workers of each, and the arguments of each process
    "one process": (1, [[]]),
    "one process on one core": (1, [[]]),
    "two processes": (2, [["--shard", "1/2"], ["--shard", "2/2"]]),
    "Ray, 1 worker": (1, [["--engine", "ray", "--workers", "1"]]),
    "Ray, 2 workers": (2, [["--engine", "ray", "--workers", "2"]]),
}


def start(folder: Path, options: argparse.Namespace, more: list[str]) -> "subprocess.Popen[bytes]":
    """Start a job in folder/out."""
    table = folder / "prompts.jsonl"
    table.write_text("".join(json.dumps({"prompt": f"a red apple, number {i}"}) + "\n" for i in range(options.rows)))
    argv = [sys.executable, "-m", "ldm_lite.batch", table, "--out", folder / "out", "--manifest", "jsonl"]
    argv += ["--device", "cpu", "--steps", options.steps, "--shard-size", options.shard_size, "--batch-size", 8]
    argv += ["--width", options.side, "--height", options.side, *more]
    threads = {"OMP_NUM_THREADS": "1", "RAY_USAGE_STATS_ENABLED": "0"}
    return subprocess.Popen(list(map(str, argv)), stderr=subprocess.PIPE, env={**os.environ, **threads})


def rate(options: argparse.Namespace, engine: str) -> tuple[float, float]:
    """Run a job, and return its images a second, and the milliseconds of a core that each took, the start included."""
    first, processes = ENGINES[engine]  # the workers' first shards, whose time includes their start
    before, cores = resource.getrusage(resource.RUSAGE_CHILDREN), os.sched_getaffinity(0)
    with tempfile.TemporaryDirectory() as name:
        if engine.endswith("one core"):
            os.sched_setaffinity(0, [min(cores)])  # of those that it starts, too
        jobs = [start(Path(name), options, more) for more in processes]
        os.sched_setaffinity(0, cores)
        for job in jobs:
            _, errors = job.communicate()
            assert job.returncode == 0, errors.decode()
        times = sorted(path.stat().st_mtime for path in (Path(name) / "out").glob("*.tar"))
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    images = (len(times) - first) * options.shard_size
    return images / (times[-1] - times[first - 1]), 1000 * seconds / options.rows


def speed(options: argparse.Namespace) -> None:
    """Print the rates of all engines, their medians, and the ratios."""
    rates: dict[str, list[float]] = {name: [] for name in options.engines}
    for number in range(options.rounds):
        for name in options.engines if number % 2 == 0 else reversed(options.engines):
            images_s, cost = rate(options, name)
            rates[name].append(images_s)
            print(f"{name}: {images_s:.2f} images/s, {cost:.0f} ms of a core an image", flush=True)
    alone = statistics.median(rates["one process"])
    print("\n| engine | images/s, median | of linear |\n|---|---:|---:|")
    for name, engine_rates in rates.items():
        median = statistics.median(engine_rates)
        print(f"| {name} | {median:.2f} | {median / (ENGINES[name][0] * alone):.2f} |")
    if "Ray, 1 worker" in rates:
        costs = [1000 / a - 1000 / b for a, b in zip(rates["Ray, 1 worker"], rates["one process"], strict=True)]
        print(f"\nRay costs {statistics.median(costs):.1f} ms an image (median of the rounds' differences)")


def memory(options: argparse.Namespace) -> None:
    """Print the resident memory of one process after each tenth of its shards."""
    with tempfile.TemporaryDirectory() as name:
        job, shown = start(Path(name), options, ["--scale", "1"]), -1
        while job.poll() is None:
            done = len(list((Path(name) / "out").glob("[!.]*.tar")))
            tenth = 10 * done * options.shard_size // options.rows
            if tenth != shown and done:
                status = Path(f"/proc/{job.pid}/status").read_text()
                kib = int(status.partition("VmRSS:")[2].split()[0])
                print(f"{done * options.shard_size} images: {kib / 1024:.0f} MiB", flush=True)
                shown = tenth
            time.sleep(0.5)
        assert job.returncode == 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--memory", action="store_true")
    parser.add_argument("--rows", type=int, default=160)
    parser.add_argument("--shard-size", type=int, default=16)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--side", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--engines", nargs="+", choices=list(ENGINES), default=list(ENGINES), help="one process first")
    arguments = parser.parse_args()
    memory(arguments) if arguments.memory else speed(arguments)
