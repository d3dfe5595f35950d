"""dynamic, wildcards: prompts made from templates."""

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from ldm_lite.cli.options import changed
from ldm_lite.cli.task_options import Txt2imgOptions
from ldm_lite.core.features import Feature, option
from ldm_lite.tasks.checks import read_prompts
from ldm_lite.text.variants import Prompts


@dataclass(frozen=True)
class Templates(Feature):
    """Makes one prompt for each image, by its seed, or all of a template."""

    stage: ClassVar = "prompts"
    topic: ClassVar = "prompts"
    dynamic: str | None = option(
        None,
        "prompts are templates, {red|blue} car and __colour__: random draws a text for each image by its seed, all "
        "makes every text (default: random with --wildcards)",
        choices=("random", "all"),
    )
    wildcards: str | None = option(None, "folder of files NAME.txt; __NAME__ is one of the lines", metavar="DIR")

    def check(self, options: Txt2imgOptions) -> Txt2imgOptions:
        """Return options with the prompts.  Raises ValueError, one line, for templates that cannot be read; OSError."""
        if options.compat or options.cond is not None:
            raise ValueError("`compat` and `cond` take prompts as they are: leave out `dynamic` and `wildcards`")
        prompts = Prompts(None if self.wildcards is None else Path(self.wildcards).expanduser())
        negative = options.negative_prompts
        if self.dynamic == "all":
            if len(negative) > 1:
                raise ValueError("`dynamic` all makes more prompts than there are negative prompts: give just one")
            templates = read_prompts(dataclasses.replace(options, batch_size=1, n_iter=1))
            texts = [prompt for template in templates for prompt in prompts.all(template)] * options.repeats
        else:
            templates = read_prompts(options) * options.repeats
            first = options.seed
            seeds = range(first, first + len(templates)) if isinstance(first, int) else first
            texts = [prompts.one(template, seed) for template, seed in zip(templates, seeds, strict=False)]
        if len(negative) > 1:
            options = changed(options, negative_prompt=negative * (len(texts) // len(negative)))
        return changed(options, prompt=texts, n_iter=1, dynamic=None, wildcards=None)
