"""The body of the commands that make images: load, generate, save each image when it is ready, print its path."""

import logging
import math
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from types import ModuleType

from PIL import Image

from ldm_lite.checkpoint.loading import load_model
from ldm_lite.checkpoint.model import CheckpointModel
from ldm_lite.checkpoint.parts import is_upscaler, open_autoencoder, with_autoencoder
from ldm_lite.cli.command_options import CascadeOptions, StageOptions
from ldm_lite.cli.options import LoadOptions, SaveOptions, given
from ldm_lite.cli.output import Saver
from ldm_lite.cli.progress import memory, step_bar
from ldm_lite.cli.task_options import Img2imgOptions, InpaintOptions, Txt2imgOptions, UpscaleOptions
from ldm_lite.cli.version import __version__
from ldm_lite.core.denoise import State
from ldm_lite.image import grid, read_image, to_pil
from ldm_lite.tasks import img2img, inpaint, txt2img, upscale, xy
from ldm_lite.tasks.cascade import cascade, check, embeddings, stages_of
from ldm_lite.tasks.enlarge import Upscaler, named_results
from ldm_lite.tasks.existing import Existing
from ldm_lite.tasks.features import check_files, without_loading
from ldm_lite.tasks.job import OnStep, Task, results
from ldm_lite.text.parameters import parameters
from ldm_lite.zoo.families import with_vae

log = logging.getLogger("ldm_lite")

MOST_IN_GRID = 100  # a grid needs all of its images in memory


def previews(model: CheckpointModel, source: str, show: Callable[[Image.Image], None]) -> OnStep:
    """Return a function that previews a batch after each step: x0, or the last latents, by a small autoencoder.

    source is the autoencoder's file.  Raises ValueError if its latents are not the model's.
    """
    small = with_autoencoder(model, source)

    def on_step(state: State) -> None:
        latents = state.x0 if state.step < state.num_steps else state.latents
        images = [to_pil(pixels) for pixels in small.decode_pixels(latents)]
        show(grid(images, columns=math.ceil(len(images) ** 0.5)))

    return on_step


_TASKS: dict[type[Txt2imgOptions], ModuleType] = {
    Txt2imgOptions: txt2img,
    Img2imgOptions: img2img,
    InpaintOptions: inpaint,
    UpscaleOptions: upscale,
}


def make(options: Txt2imgOptions, load: LoadOptions, save: SaveOptions, original: Mapping[str, object]) -> None:
    """Load a model, run the options' task, and save its images and a grid of them.

    original are the values of the original scripts' own flags.
    """
    module = _TASKS[type(options)]
    count, saver = module.count(options), Saver(save, options.task)
    if isinstance(options, UpscaleOptions) and is_upscaler(load.ckpt):
        return _enlarge(options, load, saver)
    if save.skip_existing and options.compat:
        raise ValueError("`compat` draws the noise of all images in order: leave out `skip_existing`")
    if "config" in original:
        log.info("`config` is not needed: the checkpoint says what it is")
    if "laion400m" in original:
        load = replace(load, ckpt="models/ldm/text2img-large/model.ckpt")
    if original.get("precision") == "full" and load.dtype is None:
        load = replace(load, dtype="fp32")
    if options.compat and load.ema == "auto":
        load = replace(load, ema="original")
    with_grid = not save.skip_grid and count <= MOST_IN_GRID and (count > 1 or options.compat)
    if save.skip_save and not with_grid and save.preview is None and not (save.x or save.y or save.z):
        log.warning("`skip_save` without a grid of several images: nothing will be saved")
    axes = xy.read_axes(type(options), {letter: getattr(save, letter) for letter in "xyz"})
    sheets = _cells(axes, options, module.count, saver) if axes else []

    def check_outline(model: CheckpointModel) -> None:
        for name, value in (("C", model.vae.spec.embed_dim), ("f", model.vae.spec.factor)):
            if original.get(name, value) != value:
                raise ValueError(f"got --{name} {original[name]}, but this checkpoint has {value}: leave it out")
        if save.preview is not None:
            with_vae(model.family, open_autoencoder(save.preview)[1], save.preview)
        for cell in [cell for sheet in sheets for cell in sheet] or [options]:
            _check_before_loading(module.prepare, model, cell)

    model = load_model(load, CheckpointModel, check_outline)
    if axes:
        return _plot(axes, module.prepare, sheets, model, saver)
    start, in_grid, text, count_made = time.perf_counter(), [], "", 0
    preview = None if save.preview is None else previews(model, save.preview, saver.preview)
    bar = step_bar()

    def on_step(state: State) -> None:
        if preview is not None:
            preview(state)
        bar(state)

    task = module.prepare(model, options)
    existing = None if options.compat else Existing(task, saver.keys())
    for result in results(task, on_step, None if existing is None else existing.missing):
        text, count_made = result.parameters, count_made + 1
        if not save.skip_save:
            print(saver.sample(result.image, text, result.key), flush=True)
        if with_grid:
            in_grid.append(result.image)
    if skipped := 0 if existing is None else existing.skipped:
        log.info("%d of %d images exist in %s: they are skipped, and there is no grid", skipped, count, saver.out)
    elif len({image.size for image in in_grid}) == 1:
        columns = save.n_rows or options.images_at_a_time
        print(saver.grid(grid(in_grid, columns=columns), text), flush=True)
    elif in_grid:
        log.warning("the images differ in size: there is no grid%s", ", and nothing is saved" * save.skip_save)
    _log_end(count_made, start)


def _check_before_loading(prepare: Callable[..., Task], model: CheckpointModel, options: Txt2imgOptions) -> None:
    """Check a task's options and files with the outline of a model, before weights are read; raise what is wrong.

    Features that load networks of other files are left out: only the existence of these files is checked.
    """
    check_files(options)
    try:
        for part in prepare(model, without_loading(options)).parts:
            for source in part.sources:
                if isinstance(source, (str, os.PathLike)):
                    read_image(source, lambda image: None)
    except (NotImplementedError, RuntimeError) as error:  # of torch, for what needs the weights
        log.debug("not all of the options were checked before loading: %s", error)


def _cells(
    axes: Mapping[str, xy.Axis], options: Txt2imgOptions, count_images: Callable[[Txt2imgOptions], int], saver: Saver
) -> list[list[Txt2imgOptions]]:
    """Return the options of each image of an X/Y plot, for each value of Z."""
    if saver.options.skip_grid:
        raise ValueError("a plot is a grid: leave out `skip_grid`, or the plot")
    if count_images(options) != 1 or options.compat or saver.options.skip_existing:
        raise ValueError(
            "a plot has one image a cell, and makes all of them: leave out `n_iter`, `batch_size`, `from_file`, "
            "`compat` and `skip_existing`"
        )
    x, y, z = (axes.get(letter) for letter in "xyz")
    cells = [xy.changed(options, cell, *axes.values()) for cell in xy.cells(x, y, z)]
    if any(count_images(cell) != 1 for cell in cells):
        raise ValueError(f"a plot has one image a cell: no axis is {', '.join(xy.OF_COUNTS)}")
    size = len(cells) if z is None else len(cells) // len(z.values)
    return [cells[first : first + size] for first in range(0, len(cells), size)]


def _plot(
    axes: Mapping[str, xy.Axis],
    prepare: Callable[[CheckpointModel, Txt2imgOptions], Task],
    sheets: list[list[Txt2imgOptions]],
    model: CheckpointModel,
    saver: Saver,
) -> None:
    """Save the images of an X/Y plot, and the plot; one for each value of Z."""
    x, y, z = (axes.get(letter) for letter in "xyz")
    on_step = step_bar()
    for number, jobs in enumerate(sheets):
        images = []
        for options in jobs:
            result = next(iter(results(prepare(model, options), on_step)))
            images.append(result.image)
            if not saver.options.skip_save:
                print(saver.sample(result.image, result.parameters), flush=True)
        plot = xy.draw(images, x, y, None if z is None else replace(z, values=(z.values[number],)))
        print(saver.grid(plot, plot.info["parameters"]), flush=True)


def _enlarge(options: UpscaleOptions, load: LoadOptions, saver: Saver) -> None:
    """Save the images that an ESRGAN network enlarges.  Raises ValueError for an option that it does not use."""
    used = {"init_img", "tile", "ckpt", "device", "dtype", "out", "skip_save", "skip_grid", "debug"}
    if unused := sorted((given(options) | given(load) | given(saver.options)) - used):
        raise ValueError(f"an ESRGAN network reads the image alone: leave out `{unused[0]}`")
    tile = {"tile": options.tile} if "tile" in given(options) else {}
    upscaler = Upscaler(load.ckpt, device=load.device, dtype=load.dtype, **tile)
    for image, text in named_results(upscaler, options.init_img):
        if not saver.options.skip_save:
            print(saver.sample(image, text), flush=True)


def make_cascade(options: CascadeOptions, stages: StageOptions, save: SaveOptions) -> None:
    """Encode the prompt, run the stages, save each image when it is ready and a grid of them."""
    saver, start = Saver(save, "cascade"), time.perf_counter()
    loads = stages_of(stages)
    check(options, len(loads))
    context, uncond = embeddings(options, stages)
    images, text = [], ""
    for pixels, seed in cascade(loads, options, context, uncond, step_bar()):
        about = {"Seed": seed, "Size": f"{pixels.shape[2]}x{pixels.shape[1]}"}
        about |= {"Model": " + ".join(str(load.ckpt) for load in loads), "Version": f"ldm_lite {__version__}"}
        text = parameters(options.prompt or "", options.negative_prompt, about)
        images.append(to_pil(pixels))
        if not save.skip_save:
            print(saver.sample(images[-1], text), flush=True)
    if not save.skip_grid and len(images) > 1:
        print(saver.grid(grid(images, columns=save.n_rows or math.ceil(len(images) ** 0.5)), text), flush=True)
    _log_end(len(images), start)


def _log_end(count: int, start: float) -> None:
    log.info("%d image%s in %.1f s; %s", count, "s" * (count != 1), time.perf_counter() - start, memory())
