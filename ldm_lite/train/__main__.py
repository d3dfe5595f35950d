"""Train a latent diffusion model, or additions to one: `python -m ldm_lite.train --ckpt FILE --data FOLDER`.

Starts from a checkpoint, on a folder of captioned images (--data) or on images that a Python file draws (--renderer).
Writes files in the original layout, whose weights are the EMA weights.
"""

import atexit
import os
import sys
from collections.abc import Sequence

from ldm_lite.cli import console, flags
from ldm_lite.cli.options import LoadOptions
from ldm_lite.cli.progress import TrainingBar
from ldm_lite.train.options import TrainOptions, resolved, with_config


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status."""
    (options, load), _ = flags.parse(argv, "train", __doc__.splitlines()[0], (TrainOptions, LoadOptions))

    kept = "the state of the last save is kept, `resume=True` continues"
    status: list[int] = []
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        atexit.register(_end, status)  # first, so that it is called after all others
    status.append(console.run(lambda: run(options, load), (options, load), kept))
    return status[0]


def _end(status: list[int]) -> None:
    """End one of several processes at once: while Python shuts down, a thread of torch sometimes aborts it."""
    if status:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status[0])


def run(options: TrainOptions, load: LoadOptions) -> None:
    """Train, and print the path of the checkpoint, with several processes only in the first."""
    from ldm_lite.train import distributed
    from ldm_lite.train.run import train

    options, load = with_config(options, load)
    path = train(options, load, TrainingBar(resolved(options).steps))
    if distributed.rank() == 0:
        print(path)


if __name__ == "__main__":
    sys.exit(main())
