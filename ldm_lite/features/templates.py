"""dynamic, wildcards: prompts of templates, in place of the templates."""

import dataclasses
from pathlib import Path
from typing import Any

from ldm_lite.tasks.features import Feature
from ldm_lite.tasks.job import read_prompts
from ldm_lite.text.variants import Prompts


class Templates(Feature):
    """Makes prompts: one for each image, by its seed, or all of a template."""

    def check(self, options: Any) -> Any:
        """Return options with the prompts.  Raises ValueError, one line, for templates that cannot be read; OSError."""
        if options.compat or options.cond is not None:
            raise ValueError("`compat` and `cond` take prompts as they are: leave out `dynamic` and `wildcards`")
        prompts = Prompts(None if options.wildcards is None else Path(options.wildcards).expanduser())
        negative = options.negative_prompts
        if options.dynamic == "all":
            if len(negative) > 1:
                raise ValueError("`dynamic` all makes more prompts than there are negative ones: give a single one")
            templates = read_prompts(dataclasses.replace(options, batch_size=1, n_iter=1))
            texts = [prompt for template in templates for prompt in prompts.all(template)] * options.repeats
        else:
            templates = read_prompts(options) * options.repeats
            first = options.seed
            seeds = range(first, first + len(templates)) if isinstance(first, int) else first
            texts = [prompts.one(template, seed) for template, seed in zip(templates, seeds, strict=False)]
        if len(negative) > 1:
            options = dataclasses.replace(options, negative_prompt=negative * (len(texts) // len(negative)))
        return dataclasses.replace(options, prompt=texts, n_iter=1, dynamic=None, wildcards=None)
