"""Text to image."""

from collections.abc import Iterator
from dataclasses import replace

from ldm_lite.checkpoint.model import CheckpointModel
from ldm_lite.cli.task_options import Txt2imgOptions
from ldm_lite.tasks import job
from ldm_lite.tasks.checks import check_counts, read_prompts
from ldm_lite.tasks.features import check_options
from ldm_lite.tasks.job import OnStep, Part, Task, results
from ldm_lite.tasks.plans import plan_of_options
from ldm_lite.tasks.results import Result


def txt2img(model: CheckpointModel, options: Txt2imgOptions, on_step: OnStep | None = None) -> Iterator[Result]:
    """Yield the images of the options, each as soon as it is decoded.  Leaving the loop stops the job.

    on_step gets the state after every denoising step.  Raises ValueError, one line, for options that do not fit.
    """
    return results(prepare(model, options), on_step)


def count(options: Txt2imgOptions) -> int:
    """The number of images.  Raises ValueError for options that are wrong whatever the model."""
    options, _ = check_options(options)
    return len(read_prompts(options)) * options.repeats


def prepare(model: CheckpointModel, options: Txt2imgOptions) -> Task:
    """Return the task, whose images start from noise.  Raises ValueError as txt2img does."""
    task = job.prepare(model, options, "txt2img", check_options)
    check_counts(task.options, task.prompts)
    model, options, side = task.model, task.options, task.model.family.resolution
    shape = model.latent_shape(options.height or side, options.width or side)
    task = replace(task, plan=plan_of_options(model.sized(shape), options))
    begun = task.job(shape, task.plan)
    return replace(task, parts=[Part(task.items(), lambda: begun)])
