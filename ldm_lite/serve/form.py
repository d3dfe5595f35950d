"""The page's form without the page: its fields, and from their values to what the engine runs."""

import dataclasses
import logging
import random
import re
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

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
from ldm_lite.text.parameters import Parameters, parameters, read_parameters

log = logging.getLogger("ldm_lite")

TASKS: dict[str, type[Txt2imgOptions]] = {
    "txt2img": Txt2imgOptions,
    "img2img": Img2imgOptions,
    "inpaint": InpaintOptions,
    "upscale": UpscaleOptions,
}
TITLES = {"txt2img": "Text to image", "img2img": "Image to image", "inpaint": "Inpaint", "upscale": "Upscale"}
# Options that the form shows in another way, or not at all, besides those that name files of the server.
SHOWN = "prompt negative_prompt preprocess batch_size n_iter seed"
LEFT_OUT = {*SHOWN.split(), "compat", "refiner_start", "seamless"}
HIRES = {each.name for each in dataclasses.fields(HiresOptions)}  # of txt2img alone
NOT_FOR = {"img2img": HIRES, "inpaint": HIRES, "upscale": {"width", "height", "fixed_code", *HIRES}}
MOST_LORAS = 4
SEEDS = 2**32  # below which random seeds lie, as in A1111
MODEL, LORA_WEIGHT = "model", "lora_weight"  # axes of a plot that are no options of a task


def fields() -> dict[str, tuple[dataclasses.Field[Any], list[str]]]:
    """The options that the form has a field of its own for, by name, each with the tasks that it is for."""
    found: dict[str, tuple[dataclasses.Field[Any], list[str]]] = {}
    for task, kind in TASKS.items():
        for each in dataclasses.fields(kind):
            if not each.metadata["flag"] or names_files(each) or each.name in LEFT_OUT | NOT_FOR.get(task, set()):
                continue
            if each.name == "noise_level" and task != "upscale":  # of an image embedding
                continue
            found[each.name] = (each, [*found.get(each.name, (each, []))[1], task])
    return found


def defaults() -> dict[str, Any]:
    """The values, as their fields show them, that stand for what a picture's text does not mention."""
    named = {name: each for name, (each, _) in fields().items() if each.metadata["png"]}
    named |= {name: fields()[name][0] for name in ("sampler", "spacing", "steps", "scale", "width", "height", "eta")}
    return {name: "" if each.default is None else as_text(each.default) for name, each in named.items()}


def axes(task: str) -> list[str]:
    """The names that may be an axis of a plot."""
    own = [name for name, (_, tasks) in fields().items() if task in tasks]
    return [*own, "seed", "prompt", "negative_prompt", xy.REPLACE, MODEL, LORA_WEIGHT]


@dataclass(frozen=True)
class Request:
    """What the engine's submit takes."""

    task: str
    options: Txt2imgOptions
    model: str | None
    loras: Loras


@dataclass(frozen=True)
class Work:
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
    x, y = (_axis(task, values.get(f"{each}_option"), values.get(f"{each}_values"), engine) for each in "xy")
    if x is None and y is None:
        return Work([request])
    plain = dataclasses.replace(request, options=dataclasses.replace(request.options, batch_size=1))
    return Work([_cell(plain, cell, x, y) for cell in xy.cells(x, y)], x, y)


def _cell(request: Request, cell: dict[str, Any], *axes: xy.Axis | None) -> Request:
    model, weight = cell.pop(MODEL, request.model), cell.pop(LORA_WEIGHT, None)
    if weight is not None and not request.loras:
        raise ValueError(f"`{LORA_WEIGHT}` is an axis, but no LoRA is chosen: choose one")
    loras = request.loras if weight is None else tuple((name, weight) for name, _ in request.loras)
    return Request(request.task, xy.changed(request.options, cell, *axes), model, loras)


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
    made: dict[str, Any] = {}
    for name, (field, tasks) in fields().items():
        value = values.get(name)
        if task in tasks and value not in (None, ""):
            made[name] = _number(field, value) if is_number(field) else value
    for name in ("prompt", "negative_prompt"):
        made[name] = values.get(name) or None
    made["seed"] = _seed(values.get("seed"))
    if count := values.get("count"):
        made["batch_size"] = _whole("count", count)
    if task != "txt2img":
        made["init_img"] = (_required(values.get("source"), "an image to start from", engine),)
    if task == "inpaint" and (values.get("mask") or not values.get("extend")):
        made["mask"] = (_required(values.get("mask"), "a mask: paint over what is to be repainted", engine),)
    if values.get("control") and task != "upscale":
        image = _required(values.get("control_image"), "an image for the ControlNet", engine)
        made["control"] = (
            Control(
                engine.library.file("controlnets", values["control"]),
                image,
                weight=float(values["control_weight"]),
                start=float(values["control_start"]),
                end=float(values["control_end"]),
                preprocess=values.get("control_preprocess") or "none",
                name=values["control"],
            ),
        )
    return TASKS[task](**made)


def is_number(field: dataclasses.Field[Any]) -> bool:
    """Whether an option is a single number."""
    return "tuple" not in str(field.type) and re.search("int|float", str(field.type)) is not None


def _number(field: dataclasses.Field[Any], value: Any) -> int | float:
    return number(str(value)) if "float" in str(field.type) else _whole(field.name, value)


def _whole(name: str, value: Any) -> int:
    if not re.fullmatch(r"[+-]?\d{1,19}", text := str(value).strip()):
        raise ValueError(f"got `{name}` {text[:40]!r}, wanted a whole number")
    return int(text)


def _seed(value: Any) -> int:
    """The seed that a text states; a random one for none, and for -1 as in A1111."""
    text = str("" if value is None else value).strip()
    return random.randrange(SEEDS) if text in ("", "-1") else _whole("seed", text)


def _required(url: str | None, what: str, engine: Engine) -> Image.Image:
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
    text = read_parameters(_required(url, "a picture", engine))
    shown = parameters(text.prompt, text.negative_prompt, text.settings)
    second = [key for key in text.settings if key.startswith("Hires") or key == "Tiling"]
    kept = {key: value for key, value in text.settings.items() if key not in ("Denoising strength", *second)}
    bare = Image.new("RGB", (1, 1))
    bare.info["parameters"] = parameters(text.prompt, text.negative_prompt, kept)
    with _Remarks() as remarks:
        options = with_picture(Txt2imgOptions(from_png=bare))
    if second:
        remarks.lines.append(f"the page has no second pass and no tiling: its {', '.join(second)} are not heeded"[:300])
    names = given(options)
    values: dict[str, Any] = {name: getattr(options, name) for name in fields() if name in names}
    values |= {"prompt": options.prompt or "", "negative_prompt": options.negative_prompt or ""}
    values |= {"seed": str(options.seed)} if "Seed" in text.settings else {}
    values |= _others(text)
    values = {name: as_text(value) for name, value in values.items()}
    return values, shown, remarks.lines


def _others(text: Parameters) -> dict[str, Any]:
    """What no option of txt2img says: the model, and how much an image may change."""
    strength = text.settings.get("Denoising strength", "")
    found: dict[str, Any] = {"strength": strength} if re.fullmatch(r"[01]?\.?\d{1,6}", strength) else {}
    return found | ({MODEL: text.settings["Model"]} if "Model" in text.settings else {})


def as_text(value: Any) -> Any:
    """A value as its field shows it."""
    if isinstance(value, bool) or not isinstance(value, (int, float, tuple)):
        return value
    if isinstance(value, tuple):
        return "x".join(map(str, value))
    return str(int(value)) if value == int(value) else str(value)


class _Remarks(logging.Handler):
    """Collects the warnings of this thread while a picture is read."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.thread, self.lines = threading.get_ident(), list[str]()

    def emit(self, record: logging.LogRecord) -> None:
        if record.thread == self.thread:
            self.lines.append(record.getMessage())

    def __enter__(self) -> "_Remarks":
        log.addHandler(self)
        return self

    def __exit__(self, *_: object) -> None:
        log.removeHandler(self)
