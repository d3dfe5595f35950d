"""from_file: prompts from the lines of a text file."""

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from ldm_lite.cli.files import read_text
from ldm_lite.cli.options import changed
from ldm_lite.cli.task_options import Txt2imgOptions
from ldm_lite.core.features import Feature, option

MOST_BYTES = 2**28


@dataclass(frozen=True)
class FromFile(Feature):
    """Reads the prompts, before other features change them."""

    stage: ClassVar = "prompts"
    topic: ClassVar = "prompts"
    from_file: str | None = option(None, "read prompts from a text file, one per line", metavar="FILE", common=True)

    def check(self, options: Txt2imgOptions) -> Txt2imgOptions:
        """Return options with the prompts.  Raises ValueError for a file without any, and beside `prompt`; OSError."""
        if options.prompt is not None:
            raise ValueError("got a prompt and `from_file`: give one of them")
        path = Path(self.from_file or "")
        lines = read_text(path, MOST_BYTES).splitlines()
        # The original script takes a blank line as a prompt.
        prompts = lines if options.compat else [line.strip() for line in lines if line.strip()]
        if not prompts:
            raise ValueError(f"{path}: holds no prompt, expected one in each line")
        return changed(options, prompt=prompts, from_file=None)
