"""from_png: options from the text of a picture, of AUTOMATIC1111's web UI ("A1111") or ldm_lite."""

import dataclasses
import logging
import re
import typing
from collections.abc import Mapping
from typing import Any

from PIL import Image

from ldm_lite.cli.options import given
from ldm_lite.cli.task_options import UPSCALERS, Txt2imgOptions
from ldm_lite.diffusion.names import OURS, has, resolve
from ldm_lite.diffusion.noise import PROGRAMS, is_brownian
from ldm_lite.diffusion.schedule import number
from ldm_lite.diffusion.webui import DISCARD, SETTINGS, from_webui
from ldm_lite.image import PIXEL_UPSCALERS
from ldm_lite.tasks.features import Feature
from ldm_lite.text.parameters import Parameters, read_parameters

log = logging.getLogger("ldm_lite")

PLAIN = {  # besides the options' `png`
    "Steps": "steps",
    "CFG scale": "scale",
    "Seed": "seed",
    "Eta DDIM": "eta",
    "Variation seed": "variation_seed",
    "Hires upscaler": "hires_upscaler",
    "Denoising strength": "hires_strength",  # of img2img too, which is not made again
}
LINES = ("Version", "Model", "Model hash")  # not settings
_NETWORK = re.compile(r"<(?:lora|lyco|hypernet):[^<>]{0,200}>")  # which A1111 takes out of the prompt


class FromPng(Feature):
    """Puts what a picture says in place of the options that were not given."""

    def check(self, options: Any) -> Any:
        """Return the options.  Raises ValueError as with_picture does."""
        if type(options) is not Txt2imgOptions:
            raise ValueError("`from_png` is an option of txt2img: give the settings of the picture one by one")
        self.text, self.name = read_parameters(options.from_png), name_of(options.from_png)
        return with_picture(options)

    def change_options(self, model: Any, options: Any) -> tuple[Any, Any]:
        """Warn if the picture is another model's."""
        settings = self.text.settings
        if (theirs := settings.get("Model")) not in (None, model.name):
            hashed = settings.get("Model hash")
            theirs = f"{theirs} ({hashed})" if hashed else theirs
            log.warning("%s: was made with %s, not %s", self.name, theirs, model.name)
        return model, options


def name_of(picture: Any) -> str:
    """Return how messages call a picture."""
    return "the picture" if isinstance(picture, Image.Image) else f"{picture}"[:300]


def with_picture(options: Txt2imgOptions) -> Txt2imgOptions:
    """Return options with what their `from_png` says in place of those that were not given.

    One warning names what is ignored.  Raises ValueError, with the key, for a picture without a text or with a wrong
    value; OSError.
    """
    text, name = read_parameters(options.from_png), name_of(options.from_png)
    ours = text.settings.get("Version", "").startswith("ldm_lite")
    explicit = given(options) - {"from_png"}
    try:
        values, left = _values(text, ours, explicit)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error
    if left:
        ignored = ", ".join(setting[:60] for setting in left[:40])
        log.warning("%s: ignored settings: %s", name, ignored)
    unset = {option: value for option, value in values.items() if option not in explicit}
    return dataclasses.replace(options, **unset, from_png=None)


def _values(text: Parameters, ours: bool, explicit: set[str]) -> tuple[dict[str, Any], list[str]]:
    """Return the options that a text names, and the keys of the text that none of them uses."""
    values: dict[str, Any] = {}
    settings, used = text.settings, {*LINES}
    if not explicit & {"prompt", "from_file", "cond"}:
        values["prompt"] = text.prompt if ours else _NETWORK.sub("", text.prompt)
    values["negative_prompt"] = text.negative_prompt
    if not ours:
        values["prompt_syntax"] = "a1111"
    networks = [] if ours or "prompt" in explicit else _NETWORK.findall(text.prompt)
    if not explicit & {"sampler", "plan"} and "Sampler" in settings:
        values["sampler"], values["spacing"], of_sampler = _sampler(settings, ours)
        used |= of_sampler
    if "sampler" in explicit or "plan" in explicit:
        used |= {"Sampler", "Schedule type", DISCARD, *SETTINGS}
    if not explicit & {"noise", "compat"}:
        values["noise"] = _program(settings, ours)
        if not ours and is_brownian(values.get("sampler", "")):
            values["brownian"] = True
        used.add("RNG")
    if "Size" in settings:
        values["width"], values["height"] = _sides(settings["Size"])
        used.add("Size")
    fields = {
        field.metadata["png"]: field.name for field in dataclasses.fields(Txt2imgOptions) if field.metadata["png"]
    }
    for key, name in (fields | PLAIN).items():
        if (
            key not in settings
            or not _has_effect(name, values, explicit)
            or (name.startswith("hires_") and "Hires upscale" not in settings)
        ):
            continue
        used.add(key)
        if name not in explicit:
            values[name] = _hires(name, settings, explicit, ours) or _converted(key, name, settings[key])
    if "control" in explicit:
        used.add("Control")
    if "refiner" in explicit:
        used |= {"Refiner", "Refiner from step", "Refiner switch at"}
        if "Refiner switch at" in settings:
            values["refiner_start"] = _converted("Refiner switch at", "refiner_start", settings["Refiner switch at"])
        elif "Refiner from step" in settings and {"steps"} & set(values):
            first = _converted("Refiner from step", "steps", settings["Refiner from step"]) - 1
            values["refiner_start"] = min(1.0, first / values["steps"])
    if explicit & {"plan"}:
        values = {name: value for name, value in values.items() if name not in ("steps", "eta", "churn")}
    return values, [key for key in settings if key not in used] + networks


def _hires(name: str, settings: Mapping[str, str], explicit: set[str], ours: bool) -> str | None:
    """The upscaler or the sampler of a second pass; None for other options.  Raises ValueError for a network's name."""
    if name == "hires_sampler" and not ours:
        kind = settings.get("Hires schedule type", "")
        return " ".join(["webui", settings["Hires sampler"], kind]).strip()
    if name != "hires_upscaler" or settings["Hires upscaler"] in (*UPSCALERS, *PIXEL_UPSCALERS):
        return None
    if "hires_esrgan" not in explicit:
        raise ValueError(f"was enlarged by {settings['Hires upscaler']!r:.60}: give that network, `hires_esrgan=FILE`")
    return "Latent"  # not used beside a network


def _has_effect(name: str, values: Mapping[str, Any], explicit: set[str]) -> bool:
    """Whether an option has a meaning beside the others."""
    if name in ("eta", "churn") and "sampler" in values:
        return has(resolve(values["sampler"])[0], name)
    return name != "preprocess" or "control" in explicit


def _sampler(settings: Mapping[str, str], ours: bool) -> tuple[str, str | None, set[str]]:
    """Return the sampler and the spacing of a text, and the keys that they use."""
    name, kind = settings["Sampler"], settings.get("Schedule type")
    used = {"Sampler", "Schedule type"}
    try:
        key, spacing = from_webui(name, settings)
    except ValueError as error:
        if not ours:
            raise ValueError(f"{error}; or give `sampler=NAME`") from error
        key, named = resolve(name.removesuffix(OURS))
        return key, kind or named, used
    used |= {name for name, (setting, _) in SETTINGS.items() if f":{setting}=" in spacing or settings.get(name) == "0"}
    return key, spacing, used | ({DISCARD} if spacing.endswith(":discard") else set())


def _program(settings: Mapping[str, str], ours: bool) -> str:
    """Return whose noise it is.  A1111 names its source unless it is the GPU."""
    names = {name: program for program, name in PROGRAMS.items()} | {"GPU": "a1111"}
    source = settings.get("RNG", "CPU" if ours else "GPU")
    if source not in names:
        raise ValueError(f"its RNG is {source!r}, expected one of {', '.join(names)}; or give `noise=PROGRAM`")
    return names[source]


def _sides(size: str) -> tuple[int, int]:
    match = re.fullmatch(r"(\d{1,6})x(\d{1,6})", size)
    if match is None:
        raise ValueError(f"Size: got {size[:60]!r}, expected WIDTHxHEIGHT")
    return int(match[1]), int(match[2])


def _converted(key: str, name: str, text: str) -> Any:
    """The value of an option that a text states.  Raises ValueError, with the key, for a wrong one."""
    kinds = typing.get_args(typing.get_type_hints(Txt2imgOptions)[name])
    kinds = kinds or (typing.get_type_hints(Txt2imgOptions)[name],)
    try:
        value: Any = "xy" if (name, text) == ("seamless", "True") else text
        if bool in kinds:
            value = text == "True"
        elif int in kinds:
            value = int(text) if re.fullmatch(r"-?[0-9]{1,20}", text) else number("")
        elif float in kinds:
            value = number(text)
        return getattr(Txt2imgOptions(**{name: value}), name)
    except ValueError as error:
        why = f"got {text[:60]!r}, expected a whole number" if str(error).startswith("got ''") else str(error)
        raise ValueError(f"{key}: {why}") from error
