"""Prompts of templates, in place of the templates."""

import dataclasses
from pathlib import Path
from typing import TypeVar

from ldm_lite.cli.task_options import Txt2imgOptions
from ldm_lite.tasks.job import read_prompts
from ldm_lite.text.variants import Prompts

Options = TypeVar("Options", bound=Txt2imgOptions)


def with_variants(options: Options) -> Options:
    """Return options with the prompts that `dynamic` makes of theirs: one for each image, by its seed, or all.

    Raises ValueError, one line, for templates that cannot be read; OSError.
    """
    if options.dynamic is None and options.wildcards is None:
        return options
    if options.compat or options.cond is not None:
        raise ValueError("`compat` and `cond` take prompts as they are: leave out `dynamic` and `wildcards`")
    prompts = Prompts(None if options.wildcards is None else Path(options.wildcards).expanduser())
    if options.dynamic == "all":
        templates = read_prompts(dataclasses.replace(options, batch_size=1, n_iter=1))
        made = [prompt for template in templates for prompt in prompts.all(template)] * options.repeats
    else:
        templates = read_prompts(options) * options.repeats
        seeds = range(options.seed, options.seed + len(templates)) if isinstance(options.seed, int) else options.seed
        made = [prompts.one(template, seed) for template, seed in zip(templates, seeds, strict=False)]
    return dataclasses.replace(options, prompt=made, from_file=None, n_iter=1, dynamic=None, wildcards=None)
