"""Seconds per image on a busy machine, by how long OpenMP's threads spin.

    python scripts/busy_machine.py [--rounds 2] [--seconds 15] [--ckpt FILE] [--steps 20] [SETTING ...]

A setting is NAME=VALUE,NAME=VALUE of the environment, for instance LD_PRELOAD=.../libiomp5.so,KMP_BLOCKTIME=0; without
any, the settings of the table in docs/performance.md.  Timing starts when our processes have loaded and made an image;
settings take turns, so that other work on the machine affects all.  A cell is the median of all images of all rounds.
"""

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Sequence

SETTINGS = [f"GOMP_SPINCOUNT={count}" for count in (300_000, 0, 300, 1000, 3000, 10_000)]  # the first is libgomp's own
CONDITIONS = {  # processes of ours, plain loops beside them
    "idle": (1, 0),
    "two at once": (2, 0),
    "three at once": (3, 0),
    "beside a loop": (1, 1),
    "beside two": (1, 2),
}


def work(args: argparse.Namespace) -> None:
    """In a separate process: make images for some seconds, and print how long each took."""
    import ldm_lite

    pipe = ldm_lite.load(*args.ckpt, device="cpu")
    pipe.txt2img("a red apple", steps=args.steps)
    print("ready", flush=True)
    input()
    end = time.perf_counter() + args.seconds
    while (start := time.perf_counter()) < end:
        pipe.txt2img("a red apple", steps=args.steps)
        print(time.perf_counter() - start)


def measure(setting: str, ours: int, loops: int, arguments: Sequence[str]) -> list[float]:
    """Seconds of each image, of all processes."""
    environment = os.environ | dict(pair.split("=", 1) for pair in setting.split(","))
    command = [sys.executable, __file__, "--work", *arguments]
    workers = [
        subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in range(ours)
    ]
    for worker in workers:
        assert worker.stdout is not None
        if worker.stdout.readline() != "ready\n":
            sys.exit("error: a process has not begun")
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(loops)]
    try:
        for worker in workers:
            assert worker.stdin is not None
            worker.stdin.write("\n")
            worker.stdin.flush()
        return [float(line) for worker in workers for line in worker.communicate()[0].split()]
    finally:
        for process in (*busy, *workers):
            process.kill()
            process.wait()


def main() -> None:
    """Print the table, anew after each round."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("settings", nargs="*", default=SETTINGS, metavar="SETTING")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=15, help="of a measurement (default: %(default)s)")
    parser.add_argument("--ckpt", nargs="*", default=(), help="default: the bundled model")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--conditions", nargs="*", default=list(CONDITIONS), choices=CONDITIONS)
    parser.add_argument("--work", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.work:
        work(args)
        return
    arguments = ["--seconds", str(args.seconds), "--steps", str(args.steps), "--ckpt", *args.ckpt]
    times = defaultdict[tuple[str, str], list[float]](list)
    for turn in range(args.rounds):
        for name in args.conditions:
            for setting in args.settings[:: -1 if turn % 2 else 1]:
                times[setting, name] += measure(setting, *CONDITIONS[name], arguments)
        print(f"\n| {turn + 1} rounds |", " | ".join(args.conditions), "|")
        print("|---|" + "---:|" * len(args.conditions))
        for setting in args.settings:
            medians = (f"{statistics.median(times[setting, name]):.2f}" for name in args.conditions)
            print(f"| `{setting}` |", " | ".join(medians), "|", flush=True)


if __name__ == "__main__":
    main()
