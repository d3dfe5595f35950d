"""The text of a picture: settings by A1111's names where it has them, written from a task and read into options.

An option's row (core/declare.py) has its key, and how it is written and read; here are the keys of several options, or
of none.
"""

from __future__ import annotations

import dataclasses
import re
import typing
from collections.abc import Mapping, Sequence
from typing import Any

from ldm_lite.checkpoint.model import CheckpointModel
from ldm_lite.cli.declared import declared, differ, option_rows
from ldm_lite.cli.options import CheckedOptions, names_files
from ldm_lite.cli.task_options import Txt2imgOptions
from ldm_lite.core.declare import types_of
from ldm_lite.core.features import Feature
from ldm_lite.core.files import imported
from ldm_lite.diffusion.names import OURS, has, resolve, written
from ldm_lite.diffusion.noise import PROGRAMS, is_brownian
from ldm_lite.diffusion.plan import Plan
from ldm_lite.diffusion.schedule import number
from ldm_lite.diffusion.webui import DISCARD, SETTINGS, from_webui
from ldm_lite.text.parameters import Parameters

OptionRow = dataclasses.Field[object]

# ---- written --------------------------------------------------------------------------------------------------------


def settings_of(
    model: CheckpointModel, options: Txt2imgOptions, features: Sequence[Feature], plan: Plan | None
) -> dict[str, object]:
    """Return the settings of all images of a plan, by their names in a picture's text."""
    steps = 0 if plan is None else plan.num_steps  # of an image's, those that run
    if plan is not None and options.plan is None and options.task == "txt2img":
        steps = options.steps or model.family.steps  # all: some of A1111's timesteps are fewer than it was asked for
    scale: object = model.family.scale if options.scale is None else options.scale
    if options.guidance is not None:
        scale = "a function" if callable(options.guidance) else options.guidance
    settings: dict[str, object] = {
        "Steps": steps,
        "Sampler": "custom plan",
        "CFG scale": scale,
        "Model": model.name,
    }
    settings |= texts_of(options)
    for feature in features:  # whose rows say how their options are written
        settings |= texts_of(feature)
    if options.plan is None:
        sampler, is_flow = options.sampler or model.family.sampler, model.schedule.is_flow
        spacing = options.spacing
        if spacing is None and is_flow and resolve(sampler)[1] is None:
            spacing = model.schedule.spacing  # a rectified flow's replaces the sampler's own
        settings |= written(sampler, spacing, not is_flow)
        for key, name in (("Eta", "eta"), ("Sigma churn", "churn")):
            if key in settings and not has(resolve(sampler)[0], name):
                del settings[key]
        if settings["Sampler"] in ("DDIM", "DDIM CFG++") and "Eta" in settings:
            settings["Eta DDIM"] = settings.pop("Eta")  # its name in A1111
    return settings


def texts_of(options: CheckedOptions | Feature) -> dict[str, object]:
    """Return the entries of a picture's text for options, or for a feature's: key -> value."""
    settings: dict[str, object] = {}
    for row in dataclasses.fields(options):
        value, about = getattr(options, row.name), row.metadata
        if about.get("png") and differ(value, row.default) and not about["always"]:
            value = about["written"](value) if about.get("written") else value
            between = "," if "," in (about["metavar"] or "") else "x"  # Y,X or HxW
            settings[about["png"]] = between.join(map(str, value)) if isinstance(value, tuple) else value
    return settings


# ---- read -----------------------------------------------------------------------------------------------------------

PLAIN = {"Steps": "steps", "CFG scale": "scale", "Seed": "seed", "Eta DDIM": "eta", "Variation seed": "variation_seed"}
LINES = ("Version", "Model", "Model hash")  # not settings
_NETWORK = re.compile(r"<(?:lora|lyco|hypernet):[^<>]{0,200}>")  # A1111 removes these from the prompt


def options_of(text: Parameters, explicit: set[str]) -> tuple[dict[str, Any], list[str]]:
    """Return the options that a picture's text names, and the keys of the text that are ignored.

    explicit are the options that the user gives, which replace those of the text.  Raises ValueError, with the key, for
    a wrong value.
    """
    values: dict[str, Any] = {}
    settings, used = text.settings, {*LINES}
    ours = settings.get("Version", "").startswith("ldm_lite")
    if not explicit & {"prompt", "from_file", "cond"}:
        values["prompt"] = text.prompt if ours else _NETWORK.sub("", text.prompt)
    values["negative_prompt"] = text.negative_prompt
    if not ours:
        values["prompt_syntax"] = "a1111"
    networks = [] if ours or "prompt" in explicit else _NETWORK.findall(text.prompt)
    if not explicit & {"sampler", "plan"} and "Sampler" in settings:
        values["sampler"], values["spacing"], keys = _sampler(settings, ours)
        used |= keys
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
    rows = _rows({*settings})
    named = {row.name for row, _ in rows.values() if not names_files(row)} | explicit
    for key, (row, kind) in rows.items():
        whole = getattr(kind, "part_of", ("", ""))[0]
        if names_files(row) and row.name not in explicit:
            continue  # a text opens no files
        if (not whole or whole in named) and _has_meaning(row.name, values.get("sampler")):
            used |= {key, *row.metadata.get("keys", ())}
            if row.name not in explicit:
                values[row.name] = _value(key, row, kind, settings, explicit)
    if explicit & {"plan"}:
        values = {name: value for name, value in values.items() if name not in ("steps", "eta", "churn")}
    return values, [key for key in settings if key not in used] + networks


def _rows(keys: set[str]) -> dict[str, tuple[OptionRow, type]]:
    """Return the options that the keys of a text name, each with its class.

    Features are imported if the text has their options.
    """
    rows = option_rows(Txt2imgOptions)
    for known in declared():
        if any({row.metadata["png"], *row.metadata["keys"]} & keys for _, row in known.rows.values()):
            kind = imported(known.place)
            rows |= {row.name: (row, kind) for row in dataclasses.fields(kind)}
    by_key = {key: rows[name] for key, name in PLAIN.items()}
    for row, kind in rows.values():
        by_key |= dict.fromkeys(filter(None, (row.metadata["png"], *row.metadata["keys"])), (row, kind))
    return {key: by_key[key] for key in by_key if key in keys}


def _has_meaning(name: str, sampler: str | None) -> bool:
    """Whether the text's sampler takes an option."""
    return name not in ("eta", "churn") or sampler is None or has(resolve(sampler)[0], name)


def _sampler(settings: Mapping[str, str], ours: bool) -> tuple[str, str | None, set[str]]:
    """Return the sampler and the spacing of a text, and the keys that say them."""
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
    """Return the program whose noise a text names.  A1111 names its source unless it is the GPU."""
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


def _value(key: str, row: OptionRow, kind: type, settings: Mapping[str, str], explicit: set[str]) -> object:
    """Return the value of an option that a text states.  Raises ValueError, with the key, for a wrong one."""
    if (from_text := row.metadata.get("from_text")) is not None:
        return from_text(settings, explicit)
    text, kinds = settings[key], typing.get_args(types_of(kind)[row.name]) or (types_of(kind)[row.name],)
    try:
        value: object = (row.metadata["restored"] or {}).get(text, text)
        if bool in kinds:
            value = text == "True"
        elif int in kinds:
            value = int(text) if re.fullmatch(r"-?[0-9]{1,20}", text) else number("")
        elif float in kinds:
            value = number(text)
        return getattr(kind(**{row.name: value}), row.name)
    except ValueError as error:
        reason = f"got {text[:60]!r}, expected a whole number" if str(error).startswith("got ''") else str(error)
        raise ValueError(f"{key}: {reason}") from error
