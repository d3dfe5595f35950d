"""The page's form without the page: its fields, and from their values to what the engine runs."""

import contextlib
import dataclasses
import functools
import logging
import random
import re
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from PIL import Image

from ldm_lite import Control
from ldm_lite.cli.options import given, names_files
from ldm_lite.cli.task_options import HiresOptions, Img2imgOptions, InpaintOptions, Txt2imgOptions, UpscaleOptions
from ldm_lite.diffusion.schedule import number
from ldm_lite.features.from_png import with_picture
from ldm_lite.serve.http import encoded, open_base64
from ldm_lite.serve.library import Loras
from ldm_lite.serve.queue import Engine
from ldm_lite.tasks import xy
from ldm_lite.text.parameters import parameters, read_parameters

log = logging.getLogger("ldm_lite")

TASKS: dict[str, type[Txt2imgOptions]] = {
    "txt2img": Txt2imgOptions,
    "img2img": Img2imgOptions,
    "inpaint": InpaintOptions,
    "upscale": UpscaleOptions,
}
TITLES = {"txt2img": "Text to image", "img2img": "Image to image", "inpaint": "Inpaint", "upscale": "Upscale"}
# Options that the form shows in another way, or not at all, besides those that name files of the server.
LEFT_OUT = {"prompt", "negative_prompt", "preprocess", "batch_size", "n_iter", "seed"}
LEFT_OUT |= {"compat", "refiner_start", "seamless"}
HIRES = {field.name for field in dataclasses.fields(HiresOptions)}  # of txt2img alone
EMBEDDING = {"noise_level"}  # of an image embedding, in all tasks but upscaling
NOT_FOR = {
    "txt2img": EMBEDDING,
    "img2img": HIRES | EMBEDDING,
    "inpaint": HIRES | EMBEDDING,
    "upscale": HIRES | {"width", "height", "fixed_code"},
}
MOST_LORAS = 4
SEEDS = 2**32  # below which random seeds lie, as in A1111
MODEL, LORA_WEIGHT = "model", "lora_weight"  # axes of a plot that are no options of a task


@functools.cache
def fields() -> dict[str, tuple[dataclasses.Field[Any], list[str]]]:
    """The options that the form has a field of its own for, by name, each with the tasks that it is for."""
    by_name: dict[str, tuple[dataclasses.Field[Any], list[str]]] = {}
    for task, kind in TASKS.items():
        for field in dataclasses.fields(kind):
            if not field.metadata["flag"] or names_files(field) or field.name in LEFT_OUT | NOT_FOR[task]:
                continue
            tasks = by_name[field.name][1] if field.name in by_name else []
            by_name[field.name] = (field, [*tasks, task])
    return by_name


def defaults() -> dict[str, Any]:
    """The values, as their fields show them, that stand for what a picture's text does not mention."""
    always = ("sampler", "spacing", "steps", "scale", "width", "height", "eta")
    named = [field for field, _ in fields().values() if field.metadata["png"] or field.name in always]
    return {field.name: "" if field.default is None else as_text(field.default) for field in named}


def axes(task: str) -> list[str]:
    """The names that may be an axis of a plot."""
    options = [name for name, (_, tasks) in fields().items() if task in tasks]
    return [*options, "seed", "prompt", "negative_prompt", xy.REPLACE, MODEL, LORA_WEIGHT]


class Request(NamedTuple):
    """What the engine's submit takes."""

    task: str
    options: Txt2imgOptions
    model: str | None
    loras: Loras


class Work(NamedTuple):
    """The requests of a form: one, or one for each cell of a plot."""

    requests: Sequence[Request]
    x: xy.Axis | None = None
    y: xy.Axis | None = None

    @property
    def is_plot(self) -> bool:
        """Whether the images are cells of a plot."""
        return self.x is not None or self.y is not None


def read(values: Mapping[str, Any], engine: Engine) -> Work:
    """Read a form: its values by name, with pictures as data URLs.  Raises ValueError, TypeError: one line."""
    task = values["task"]
    if task not in TASKS:
        raise ValueError(f"got task {task!r:.40}, wanted one of {', '.join(TASKS)}")
    chosen = values.get("loras") or []
    loras: Loras = tuple((name, float(values[f"lora_{i}"])) for i, name in enumerate(chosen[:MOST_LORAS]))
    request = Request(task, _options(task, values, engine), values.get("model") or None, loras)
    x, y = (_axis(task, values.get(f"{axis}_option"), values.get(f"{axis}_values"), engine) for axis in "xy")
    if x is None and y is None:
        return Work([request])
    options, requests = dataclasses.replace(request.options, batch_size=1), list[Request]()
    for cell in xy.cells(x, y):
        model = cell.pop(MODEL, request.model)
        if (weight := cell.pop(LORA_WEIGHT, None)) is not None:
            if not request.loras:
                raise ValueError(f"`{LORA_WEIGHT}` is an axis, but no LoRA is chosen: choose one")
            loras = tuple((name, weight) for name, _ in request.loras)
        requests.append(Request(task, xy.changed(options, cell, x, y), model, loras))
    return Work(requests, x, y)


def _axis(task: str, name: str | None, text: str | None, engine: Engine) -> xy.Axis | None:
    if not name:
        return None
    if name not in axes(task):
        raise ValueError(f"got {name!r:.60} as an axis, wanted one of {', '.join(axes(task))}")
    like = {MODEL: "prompt", LORA_WEIGHT: "scale"}.get(name, name)
    axis = dataclasses.replace(xy.read_axis(TASKS[task], like, text or ""), option=name)
    for value in axis.values if name == MODEL else ():
        engine.library.check(value, ())
    return axis


def _options(task: str, values: Mapping[str, Any], engine: Engine) -> Txt2imgOptions:
    options: dict[str, Any] = {name: values.get(name) or None for name in ("prompt", "negative_prompt")}
    for name, (field, tasks) in fields().items():
        value, kind = values.get(name), str(field.type)
        if task not in tasks or value in (None, ""):
            continue
        if "tuple" in kind or not re.search("int|float", kind):
            options[name] = value
        else:
            options[name] = number(str(value)) if "float" in kind else _whole(name, value)
    seed = "" if values.get("seed") is None else str(values["seed"]).strip()
    options["seed"] = random.randrange(SEEDS) if seed in ("", "-1") else _whole("seed", seed)  # -1 as in A1111
    if count := values.get("count"):
        options["batch_size"] = _whole("count", count)
    if task != "txt2img":
        options["init_img"] = (_picture(values.get("source"), "an image to start from", engine),)
    if task == "inpaint" and (values.get("mask") or not values.get("extend")):
        options["mask"] = (_picture(values.get("mask"), "a mask: paint over what is to be repainted", engine),)
    if values.get("control") and task != "upscale":
        image = _picture(values.get("control_image"), "an image for the ControlNet", engine)
        control = Control(
            engine.library.file("controlnets", values["control"]),
            image,
            weight=float(values["control_weight"]),
            start=float(values["control_start"]),
            end=float(values["control_end"]),
            preprocess=values.get("control_preprocess") or "none",
            name=values["control"],
        )
        options["control"] = (control,)
    return TASKS[task](**options)


def _whole(name: str, value: Any) -> int:
    if not re.fullmatch(r"[+-]?\d{1,19}", text := str(value).strip()):
        raise ValueError(f"got `{name}` {text[:40]!r}, wanted a whole number")
    return int(text)


def _picture(url: str | None, what: str, engine: Engine) -> Image.Image:
    if not url:
        raise ValueError(f"give {what}")
    return open_base64(url, "picture", engine.limits.max_pixels)


def data_url(image: Image.Image, kind: str = "png") -> str:
    """Return an image, with its text, as a data URL."""
    return f"data:image/{kind};base64,{encoded(image, kind)}"


# ---- from a picture back into the form ------------------------------------------------------------------------------


def settings(url: str, engine: Engine) -> tuple[dict[str, Any], str, list[str]]:
    """Return the values of the form that a picture's text names, the text, and remarks on what is not heeded.

    Raises ValueError, one line, for a picture without such a text, and for a wrong value in it.
    """
    text = read_parameters(_picture(url, "a picture", engine))
    second = [key for key in text.settings if key.startswith("Hires") or key == "Tiling"]
    kept = {key: value for key, value in text.settings.items() if key not in ("Denoising strength", *second)}
    bare = Image.new("RGB", (1, 1))
    bare.info["parameters"] = parameters(text.prompt, text.negative_prompt, kept)
    with _warnings() as remarks:
        options = with_picture(Txt2imgOptions(from_png=bare))
    if second:
        remarks.append(f"the page has no second pass and no tiling: its {', '.join(second)} are not heeded"[:300])
    named = given(options)
    values: dict[str, Any] = {name: getattr(options, name) for name in fields() if name in named}
    values |= {"prompt": options.prompt or "", "negative_prompt": options.negative_prompt or ""}
    values |= {"seed": str(options.seed)} if "Seed" in text.settings else {}
    if re.fullmatch(r"[01]?\.?\d{1,6}", strength := text.settings.get("Denoising strength", "")):
        values["strength"] = strength
    if "Model" in text.settings:
        values[MODEL] = text.settings["Model"]
    shown = parameters(text.prompt, text.negative_prompt, text.settings)
    return {name: as_text(value) for name, value in values.items()}, shown, remarks


def as_text(value: Any) -> Any:
    """A value as its field shows it."""
    if isinstance(value, bool) or not isinstance(value, (int, float, tuple)):
        return value
    if isinstance(value, tuple):
        return "x".join(map(str, value))
    return str(int(value)) if value == int(value) else str(value)


@contextlib.contextmanager
def _warnings() -> Iterator[list[str]]:
    """Collect the warnings of this thread."""
    lines, thread, handler = list[str](), threading.get_ident(), logging.Handler(logging.WARNING)

    def emit(record: logging.LogRecord) -> None:
        if record.thread == thread:
            lines.append(record.getMessage())

    handler.emit = emit  # type: ignore[method-assign]
    log.addHandler(handler)
    try:
        yield lines
    finally:
        log.removeHandler(handler)
