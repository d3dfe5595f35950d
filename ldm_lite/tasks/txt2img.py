"""Text to image."""

from collections.abc import Iterator

from ldm_lite.checkpoint.model import Model
from ldm_lite.cli.task_options import Txt2imgOptions
from ldm_lite.control.control import natural_size
from ldm_lite.tasks.batching import ImageInputs, OnStep, results
from ldm_lite.tasks.from_png import with_picture
from ldm_lite.tasks.hires import second_pass
from ldm_lite.tasks.job import Job, Result, check, check_task, controls_of, plan_of, read_prompts, resolve
from ldm_lite.tasks.original import as_original
from ldm_lite.tasks.settings import with_seamless
from ldm_lite.tasks.templates import with_variants


def txt2img(model: Model, options: Txt2imgOptions, on_step: OnStep | None = None) -> Iterator[Result]:
    """Yield the images of the options, each as soon as it is decoded.  Leaving the loop stops the job.

    on_step gets the state after every denoising step.  Raises ValueError, one line, for options that do not fit.
    """
    return results(*prepare(model, options), on_step)


def count(options: Txt2imgOptions) -> int:
    """The number of images.  Raises ValueError for options that are wrong whatever the model."""
    options = with_variants(with_picture(options))
    check(options)
    return len(read_prompts(options)) * options.repeats


def prepare(model: Model, options: Txt2imgOptions) -> tuple[Job, list[ImageInputs]]:
    """Return the job and its single set of inputs.  Raises ValueError as txt2img does."""
    options = with_variants(with_picture(options, model))
    check(options)
    check_task(model, "txt2img")
    model = with_seamless(model, options)
    options = as_original(model, options, "txt2img")
    width, height = model.family.resolution, model.family.resolution
    controls = controls_of(options)
    if controls and options.height is None and options.width is None:
        width, height = natural_size(controls[0], model.family.resolution)
    height = height if options.height is None else options.height
    width = width if options.width is None else options.width
    shape = model.latent_shape(height, width)
    job = resolve(model, options, plan_of(model.sized(shape), options))
    return job, [ImageInputs(shape, second=second_pass(model, options, job, shape))]
