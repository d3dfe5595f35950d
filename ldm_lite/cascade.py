"""DeepFloyd IF: `python -m ldm_lite.cascade "a red apple" --t5 ... --stage-1 ... --stage-2 ...`.

T5 reads the prompt; the stages make images of 64, 256 and (with Stable Diffusion's upscaler) 1024 pixels.  Each stage
is loaded when it is its turn.
"""

import sys
from collections.abc import Sequence

from ldm_lite.cli import console
from ldm_lite.cli.command_options import CascadeOptions, StageOptions
from ldm_lite.cli.flags import parse
from ldm_lite.cli.options import SaveOptions
from ldm_lite.cli.output import Saver


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns its exit status."""
    groups = (CascadeOptions, StageOptions, SaveOptions)
    (options, stages, save), _ = parse(argv, "cascade", __doc__.splitlines()[0], groups)
    return console.run(lambda: run(options, stages, save), (options, stages, save))


def run(options: CascadeOptions, stages: StageOptions, save: SaveOptions) -> None:
    """Run the stages and save the images."""
    from ldm_lite.tasks.command import make_cascade

    make_cascade(options, stages, Saver(save, "cascade"))


if __name__ == "__main__":
    sys.exit(main())
