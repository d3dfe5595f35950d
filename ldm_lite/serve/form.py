"""The options of all tasks as fields of a form; a form's values to the engine's options, and back."""

import contextlib
import dataclasses
import functools
import logging
import re
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from PIL import Image

from ldm_lite import Control
from ldm_lite.cli.declared import option_rows, registered
from ldm_lite.cli.flags import sections
from ldm_lite.cli.options import changed, names_files
from ldm_lite.cli.task_options import HiresOptions, Img2imgOptions, InpaintOptions, Txt2imgOptions, UpscaleOptions
from ldm_lite.diffusion.names import SAMPLERS, label
from ldm_lite.diffusion.schedule import SPACINGS, number
from ldm_lite.serve.http import Refused, open_base64, refusal
from ldm_lite.serve.library import Loras
from ldm_lite.serve.options import LimitOptions
from ldm_lite.serve.queue import Engine
from ldm_lite.tasks import xy
from ldm_lite.tasks.picture_text import options_of
from ldm_lite.text.parameters import parameters, read_parameters
from ldm_lite.toolkit import lora_weight

log = logging.getLogger("ldm_lite")

TASKS: dict[str, type[Txt2imgOptions]] = {
    "txt2img": Txt2imgOptions,
    "img2img": Img2imgOptions,
    "inpaint": InpaintOptions,
    "upscale": UpscaleOptions,
}
# Options that a form lacks, besides those that name files of the server; `preprocess` belongs to a control.
LEFT_OUT = {"preprocess", "n_iter", "compat", "refiner_start", "seamless"}
HIRES = {field.name for field in dataclasses.fields(HiresOptions)}  # of txt2img alone
EMBEDDING = {"noise_level"}  # in all tasks except upscaling, it is that of an image embedding
NOT_FOR = {
    "txt2img": EMBEDDING,
    "img2img": HIRES | EMBEDDING,
    "inpaint": HIRES | EMBEDDING,
    "upscale": HIRES | {"width", "height", "fixed_code"},
}
SERVER_LIMITS = {"steps": "max_steps", "batch_size": "max_images"}  # limits of the server -> of the fields
MOST_NAMED = 12  # things that a model knows
EXAMPLES = 6  # of prompts
BESIDE = ("task", "model", "loras", "init_img", "reference", "mask", "control", "x", "y")  # besides those fields
MOST_REPLACED = 2**17  # characters that replace others in the prompts of a cell
MODEL, LORA_WEIGHT = "model", "lora_weight"  # axes of a plot that are not options of a task


class Field(NamedTuple):
    """A field of the form."""

    option: dataclasses.Field[Any]
    group: str  # the topic of --help that it is in
    tasks: list[str]  # the tasks that have the field


@functools.cache
def fields() -> dict[str, Field]:
    """The options that are fields of the form, by name, in the order of --help."""
    by_name: dict[str, Field] = {}
    for task, kind in TASKS.items():
        for owner, options in sections(kind):
            for option in options:
                if option.metadata["flag"] and not names_files(option) and option.name not in LEFT_OUT | NOT_FOR[task]:
                    group = str(owner.__doc__).partition(".")[0]
                    by_name.setdefault(option.name, Field(option, group, [])).tasks.append(task)
        for name, (option, owner) in option_rows(kind).items():  # of the user's features
            if owner is not kind and not names_files(option) and task in (getattr(owner, "tasks", ()) or TASKS):
                group = str(owner.__doc__).partition(".")[0]
                by_name.setdefault(name, Field(option, group, [])).tasks.append(task)
    return by_name


def _within(option: dataclasses.Field[Any], limits: LimitOptions) -> list[str] | None:
    """The least and the greatest value of an option, for this server."""
    within = option.metadata["within"]
    if option.name in SERVER_LIMITS:
        within = within[0], min(within[1], getattr(limits, SERVER_LIMITS[option.name]))
    return [as_text(limit) for limit in within or () if abs(limit) < 1e9] or None


def described(engine: Engine) -> dict[str, Any]:
    """What a form needs: the fields as they are declared, and the names that the folders hold now."""
    library = engine.library
    names = {kind: list(library.files(kind)) for kind in ("loras", "controlnets", "upscalers")}
    # Fields that take other texts than those they suggest.
    suggested = {"sampler": {key: label(key) for key in SAMPLERS}, "spacing": {key: key for key in SPACINGS}}
    about = []
    for name, (field, group, tasks) in fields().items():
        text, choices = field.metadata["png"] or "", {choice: choice for choice in field.metadata["choices"] or ()}
        if choices and field.default is None:
            choices = {"": "none", **choices}
        if name == "hires_upscaler":
            choices |= {network: network for network in names["upscalers"]}
        is_text = text.lower().replace(" ", "") == name.replace("_", "")
        about.append(
            {
                "name": name,
                "title": text if is_text else name.capitalize().replace("_", " "),
                "help": field.metadata["help"],
                "kind": _kind(field),
                "default": as_text(field.default),
                "within": _within(field, engine.limits),
                "choices": {"": "auto", **suggested[name]} if name in suggested else choices or None,
                "is_open": name in suggested,
                "tasks": tasks,
                "group": group,
            }
        )
    facts = library.facts(None)
    known = _things(facts.words)
    usual = {"steps": facts.steps, "scale": facts.scale, "width": facts.side, "height": facts.side}
    usual["strength"] = 1.0 if facts.tasks[0] == "img2img" else 0.75
    return {
        "models": library.names,
        **names,
        "fields": about,
        "axes": {task: axes(task) for task in TASKS},
        # of the first model
        "usual": {name: as_text(value) for name, value in usual.items()} | {"sampler": label(facts.sampler)},
        "examples": known[:EXAMPLES],
        "understands": f"This model draws {len(known)} things: {', '.join(known[:MOST_NAMED])}, ..." if known else "",
        "max_pixels": engine.limits.max_pixels,
    }


def _kind(field: dataclasses.Field[Any]) -> str:
    kind = str(field.type)
    if field.metadata["choices"]:
        return "choice"
    if "bool" in kind:
        return "flag"
    return "text" if "tuple" in kind else "number" if "float" in kind else "integer" if "int" in kind else "text"


def _things(words: str) -> list[str]:
    """Return what a model draws: the first name, without a symbol before it, of each line that has no heading."""
    names = (line.partition(",")[0] for line in words.splitlines() if ":" not in line)
    return [name for line in names if (name := re.sub(r"^\W+", "", line))]


def axes(task: str) -> list[str]:
    """The names that may be an axis of a plot."""
    options = [name for name, field in fields().items() if task in field.tasks and name != "batch_size"]
    return [*options, xy.REPLACE, MODEL, LORA_WEIGHT]


class Request(NamedTuple):
    """The arguments of the engine's submit."""

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


def read_form(values: Mapping[str, Any], engine: Engine) -> Work:
    """Read a form: its values by name, as api.ImagesRequest has them.  Raises Refused, which names the field."""
    task = values["task"]
    for name in values:
        if name not in fields() and name not in BESIDE:
            raise Refused(422, f"unknown field {name!r:.60}: GET /api/form lists them", param=name[:60])
    with about("loras"):
        loras: Loras = tuple((lora["name"], lora_weight(str(lora["weight"]))) for lora in values.get("loras") or ())
        engine.library.check_request(None, loras)
    with about(MODEL):
        model = engine.library.check_request(values.get(MODEL) or None, ())
    request = Request(task, _options(task, values, engine), model, loras)
    x, y = (_axis(task, name, values.get(name), engine) for name in ("x", "y"))
    if x is None and y is None:
        return Work([request])
    options, requests = dataclasses.replace(request.options, batch_size=1), list[Request]()
    with about("x" if x is not None else "y"):
        for axis in (x, y):
            if axis is not None and axis.option == xy.REPLACE:  # a request of a few KiB made texts of GiB
                texts = [str(text or "") for text in (options.prompt, *options.negative_prompts)]
                count, most = sum(text.count(axis.values[0]) for text in texts), max(map(len, axis.values))
                if count * most > MOST_REPLACED:
                    raise ValueError(f"got {count} places for replace, and a value of {most} characters: shorten it")
        for cell in xy.cells(x, y):
            chosen, changed = cell.pop(MODEL, model), loras
            if (weight := cell.pop(LORA_WEIGHT, None)) is not None:
                if not loras:
                    raise ValueError(f"`{LORA_WEIGHT}` is an axis, but no LoRA is chosen: choose one")
                changed = tuple((name, weight) for name, _ in loras)
            requests.append(Request(task, xy.changed(options, cell, x, y), chosen, changed))
    return Work(requests, x, y)


@contextlib.contextmanager
def about(field: str) -> Iterator[None]:
    """Errors within the block are refused as this field's."""
    try:
        yield
    except (ValueError, TypeError) as error:
        refused = refusal(error)
        raise Refused(refused.status, refused.message, param=field) from error


def _axis(task: str, letter: str, asked: Mapping[str, str] | None, engine: Engine) -> xy.Axis | None:
    if not asked:
        return None
    with about(letter):
        if (name := asked["option"]) not in axes(task):
            raise ValueError(f"got {name!r:.60} as an axis, expected one of {', '.join(axes(task))}")
        like = {MODEL: "prompt", LORA_WEIGHT: "scale"}.get(name, name)
        axis = dataclasses.replace(xy.read_axis(TASKS[task], like, asked["values"]), option=name)
        for value in axis.values if name == MODEL else ():
            engine.library.check_request(value, ())
    return axis


def _options(task: str, values: Mapping[str, Any], engine: Engine) -> Txt2imgOptions:
    library, options = engine.library, dict[str, Any]()
    for name, (field, _, tasks) in fields().items():
        value, kind = values.get(name), _kind(field)
        if task not in tasks or value in (None, ""):
            continue
        text = str(value).strip()
        if kind == "number":
            with about(name):
                options[name] = number(text)
        elif kind == "integer" and re.fullmatch(r"[+-]?\d{1,20}", text) is None:
            raise Refused(422, f"got `{name}` {text[:40]!r}, expected a whole number", param=name)
        else:
            options[name] = int(text) if kind == "integer" else value
    options.setdefault("seed", -1)
    network = options.get("hires_upscaler")
    if isinstance(network, str) and network in library.files("upscalers"):
        options |= {"hires_upscaler": "Latent", "hires_esrgan": library.upscaler(network)}
    if task != "txt2img":
        options["init_img"] = (_picture(values, "init_img", "an image to start from", engine),)
    if task != "upscale" and (texts := values.get("reference")):
        options["reference"] = tuple(_picture({"reference": text}, "reference", "an image", engine) for text in texts)
    if task == "inpaint" and (values.get("mask") or not values.get("extend")):
        options["mask"] = (_picture(values, "mask", "a mask: paint over what to repaint", engine),)
    if (control := values.get("control")) and task != "upscale":
        with about("control"):
            image = _picture(control, "image", "an image for the ControlNet", engine)
            more = {name: control[name] for name in ("weight", "start", "end", "preprocess")}
            network = library.file("controlnets", control["name"])
            options["control"] = (Control(network, image, name=control["name"], **more),)
    of_features = {name: options.pop(name) for name in registered() if name in options}
    return changed(TASKS[task](**options), **of_features)


def _picture(values: Mapping[str, Any], name: str, what: str, engine: Engine) -> Image.Image:
    with about(name):
        if not values.get(name):
            raise ValueError(f"give {what}")
        return open_base64(values[name], "the picture", engine.limits.max_pixels)


def settings(image: Image.Image) -> tuple[dict[str, Any], str, list[str]]:
    """Return the values of the form that a picture's text names, the text, and remarks on what is ignored.

    Options that the text would mention, but does not, have their defaults.  Raises ValueError, one line,
    for a picture without such a text, and for a wrong value in it.
    """
    text = read_parameters(image)
    kept = {key: value for key, value in text.settings.items() if key != "Tiling"}
    if is_first := "Hires upscale" not in kept:  # the strength is that of an image to start from
        kept.pop("Denoising strength", None)
    named, ignored = options_of(text._replace(settings=kept), set())
    of_features = {name: value for name, value in named.items() if name in registered()}
    options = Txt2imgOptions(**{name: value for name, value in named.items() if name not in of_features})
    remarks = [f"ignored settings: {', '.join(key[:60] for key in ignored[:40])}"] if ignored else []
    if "Tiling" in text.settings:
        remarks.append("the server makes no seamless images: ignored settings: Tiling")
    always = ("sampler", "spacing", "steps", "scale", "width", "height", "eta")
    values: dict[str, Any] = {
        name: getattr(options, name, named[name]) if name in named else field.default
        for name, (field, *_) in fields().items()
        if name in named or field.metadata["png"] or name in always
    }
    values |= {"prompt": options.prompt, "negative_prompt": options.negative_prompt}
    if "Seed" not in text.settings:
        values.pop("seed", None)
    if is_first and re.fullmatch(r"[01]?\.?\d{1,6}", strength := text.settings.get("Denoising strength", "")):
        values["strength"] = strength
    if "Model" in text.settings:
        values[MODEL] = text.settings["Model"]
    shown = parameters(text.prompt, text.negative_prompt, text.settings)
    return {name: as_text(value) for name, value in values.items()}, shown, remarks


def as_text(value: Any) -> Any:
    """A value as its field shows it: numbers as texts, since a browser rounds large ones; nothing as "auto"."""
    if isinstance(value, tuple):
        return "x".join(map(str, value))
    if value is None or isinstance(value, (bool, str)):
        return "" if value is None else value
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
