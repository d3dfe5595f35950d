"""X/Y/Z plots: a job with other values of one or two options as a labelled picture, for each value of a third."""

import csv
import itertools
import math
import re
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from PIL import Image, ImageDraw, ImageFont

from ldm_lite.cli.declared import option_rows
from ldm_lite.cli.options import changed as with_changes
from ldm_lite.cli.synonyms import advice
from ldm_lite.cli.task_options import Txt2imgOptions
from ldm_lite.diffusion.schedule import number
from ldm_lite.image import MOST_PIXELS
from ldm_lite.text.parameters import parameters, parse_parameters

REPLACE = "replace"  # not an option: an axis whose first value is looked for in both prompts, and replaced by each
MOST_CELLS = 400
OF_COUNTS = ("n_iter", "batch_size", "from_file", "compat")  # options that make several images of one cell
Font = ImageFont.FreeTypeFont | ImageFont.ImageFont
GAP, INK, PAPER = 8, "black", "white"  # pixels, colours
_WORDS = {"true": True, "yes": True, "on": True, "1": True, "false": False, "no": False, "off": False, "0": False}
# A1111's ranges: 1-5, 1-5 (+2) with a step, 0-1 [5] with a number of values.
_RANGE = re.compile(r"(-?[\d.]+)\s*-\s*(-?[\d.]+)\s*(?:\(([+-]?[\d.]+)\)|\[(\d{1,6})\])?")


@dataclass(frozen=True)
class Axis:
    """An option, and the values that it takes along an axis."""

    option: str
    values: tuple[Any, ...]

    @property
    def labels(self) -> list[str]:
        """One for each value."""
        return [str(v) if self.option == REPLACE else f"{self.option}: {_short(v)}" for v in self.values]


def _short(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def names(kind: type[Txt2imgOptions]) -> list[str]:
    """The options of a task that may be an axis: all that have a flag, and REPLACE."""
    return [name for name, (row, _) in option_rows(kind).items() if row.metadata.get("flag")] + [REPLACE]


def read_axis(kind: type[Txt2imgOptions], option: str, text: str) -> Axis:
    """Read an axis: an option of a task by its name or flag, and values separated by commas, as in a line of CSV.

    Numbers may be ranges as in AUTOMATIC1111's web UI: "1-5", "1-10 (+3)" by steps of 3, "0-1 [5]" for 5 values.
    Raises ValueError, one line, for an unknown option, no values, and a value that the option cannot have.
    """
    name = option.strip().lstrip("-").replace("-", "_")
    if name not in names(kind):
        instead = advice(name.lower(), {known: known for known in names(kind)}, "", elsewhere=False)
        expected = f"expected an option, such as `scale`, or {REPLACE}"
        raise ValueError(f"got {option!r} as an axis{': ' + instead if instead else ', ' + expected}")
    rows = csv.reader(text.splitlines(), skipinitialspace=True)
    texts = [cell.strip() for row in rows for cell in row if cell.strip() or '"' in text]
    if not texts:
        raise ValueError(f"the axis of `{name}` has no values: give some, separated by commas")
    row, owner = option_rows(kind).get(name, (None, kind))
    hint = str if row is None else typing.get_type_hints(owner)[name]
    values = [value for cell in texts for value in _values(name, typing.get_args(hint) or (hint,), cell)]
    if len(values) > MOST_CELLS:
        raise ValueError(f"got {len(values)} values of `{name}`, expected at most {MOST_CELLS}")
    if name != REPLACE:
        values = [getattr(owner(**{name: value}), name) for value in values]  # checks the range
    return Axis(name, tuple(values))


def _values(name: str, kinds: Sequence[object], text: str) -> list[object]:
    """The values of an option that a text names: several for a range."""
    if bool in kinds:
        if text.lower() not in _WORDS:
            raise ValueError(f"got `{name}` {text[:60]!r}, expected yes or no")
        return [_WORDS[text.lower()]]
    if (int not in kinds and float not in kinds) or any(typing.get_origin(kind) is tuple for kind in kinds):
        return [text]
    whole = float not in kinds
    if whole and re.fullmatch(r"[+-]?\d{1,20}", text):
        return [int(text)]  # seeds have more digits than a float
    if (match := _RANGE.fullmatch(text)) is None:
        try:
            values = [number(text)]
        except ValueError as error:
            raise ValueError(f"got `{name}` {text[:60]!r}, expected a finite number, or a range such as 1-5") from error
    else:
        first, last = number(match[1]), number(match[2])
        step = number(match[3]) if match[3] else math.copysign(1, last - first)
        step = (last - first) / max(1, int(match[4]) - 1) if match[4] else step
        count = 1 + math.floor((last - first) / step + 1e-9) if step else 1
        count = min(count, int(match[4] or count))
        if not 1 <= count <= MOST_CELLS:
            raise ValueError(f"got the range {text!r} of `{name}`, expected 1 to {MOST_CELLS} values from it")
        values = [round(first + i * step, None if whole and match[4] else 9) for i in range(count)]
    if whole and any(value != int(value) for value in values):
        raise ValueError(f"got `{name}` {text[:60]!r}, expected whole numbers")
    return [int(value) if whole else value for value in values]


def read_axes(kind: type[Txt2imgOptions], texts: Mapping[str, str | None]) -> dict[str, Axis]:
    """Read axes from texts by letter, "scale=5,7.5"; None is no axis.

    Raises ValueError as read_axis does, and for a text without "=".
    """
    axes: dict[str, Axis] = {}
    for letter, text in texts.items():
        option, equals, values = (text or "").partition("=")
        if equals:
            axes[letter] = read_axis(kind, option, values)
        elif text is not None:
            raise ValueError(f"got `{letter}` {text[:60]!r}, expected OPTION=VALUES, such as scale=5,7.5,10")
    return axes


def cells(x: Axis | None, y: Axis | None, z: Axis | None = None) -> list[dict[str, Any]]:
    """The values of each cell by option, row by row from the top left, for each value of z.

    Raises ValueError for no axis, two axes of one option, and more than MOST_CELLS.
    """
    axes = [axis for axis in (z, y, x) if axis is not None]
    options = [axis.option for axis in axes]
    if not axes:
        raise ValueError("an X/Y plot has one or two axes: choose an option for X")
    if repeated := [option for option in options if options.count(option) > 1]:
        raise ValueError(f"two axes are `{repeated[0]}`: choose another option for one of them")
    if (count := math.prod(len(axis.values) for axis in axes)) > MOST_CELLS:
        raise ValueError(f"got a plot of {count} images, expected at most {MOST_CELLS}")
    return [dict(zip(options, values, strict=True)) for values in itertools.product(*(axis.values for axis in axes))]


def changed(options: Txt2imgOptions, cell: Mapping[str, object], *axes: Axis | None) -> Txt2imgOptions:
    """The options of one cell.  Raises ValueError if what REPLACE looks for is in no prompt, and as options do."""
    values = {name: value for name, value in cell.items() if name != REPLACE}
    options = with_changes(options, **values)
    for axis in axes:
        if axis is None or axis.option != REPLACE:
            continue
        before, after = axis.values[0], str(cell[REPLACE])
        texts = {name: getattr(options, name) for name in ("prompt", "negative_prompt")}
        texts = {name: text.replace(before, after) for name, text in texts.items() if before in (text or "")}
        if not texts:
            raise ValueError(f"the prompt does not have {before[:60]!r}, the first value to `{REPLACE}`")
        options = with_changes(options, **texts)
    return options


# ---- the picture ----------------------------------------------------------------------------------------------------


def draw(images: Sequence[Image.Image], x: Axis | None, y: Axis | None, z: Axis | None = None) -> Image.Image:
    """Put the images of all cells into one picture, with labels above the columns and left of the rows.

    Smaller images are centred in their cells.  All of them are made smaller if the picture would have more than
    MOST_PIXELS.  A value of z is written above all.  The text ("parameters") is the first image's, with all axes.
    """
    columns = 1 if x is None else len(x.values)
    rows = -(-len(images) // columns)
    width, height = max(image.width for image in images), max(image.height for image in images)
    ratio = min(1.0, math.sqrt(0.8 * MOST_PIXELS / (width * height * len(images))))
    width, height = max(1, int(width * ratio)), max(1, int(height * ratio))
    font = _font("".join((x.labels if x else []) + (y.labels if y else [])), min(32, max(12, width // 16)))
    above = [_wrapped(font, label, width) for label in x.labels] if x is not None else []
    beside = [_wrapped(font, label, max(96, width // 2)) for label in y.labels] if y is not None else []
    top = max((_size(font, text)[1] + 2 * GAP for text in above), default=0)
    left = max((_size(font, text)[0] + 2 * GAP for text in beside), default=0)
    title = "" if z is None else _wrapped(font, z.labels[0], max(96, left + columns * (width + GAP) - GAP))
    head = _size(font, title)[1] + 2 * GAP if title else 0
    top += head
    sheet = Image.new("RGB", (left + columns * (width + GAP) - GAP, top + rows * (height + GAP) - GAP), PAPER)
    pen = ImageDraw.Draw(sheet)
    for i, image in enumerate(images):
        small = image.resize((max(1, int(image.width * ratio)), max(1, int(image.height * ratio))))
        at = left + i % columns * (width + GAP), top + i // columns * (height + GAP)
        sheet.paste(small, (at[0] + (width - small.width) // 2, at[1] + (height - small.height) // 2))
    pen.multiline_text((sheet.width / 2, head / 2), title, INK, font, "mm", align="center")
    for i, text in enumerate(above):
        pen.multiline_text(
            (left + i * (width + GAP) + width / 2, (head + top) / 2), text, INK, font, "mm", align="center"
        )
    for i, text in enumerate(beside):
        pen.multiline_text((left / 2, top + i * (height + GAP) + height / 2), text, INK, font, "mm", align="center")
    sheet.info["parameters"] = _text(images[0].info.get("parameters"), {"X": x, "Y": y, "Z": z})
    return sheet


def _text(first: str | None, axes_by_letter: Mapping[str, Axis | None]) -> str:
    """The text of a plot, with the axes under A1111's keys."""
    axes: dict[str, object] = {"Script": "X/Y/Z plot"}
    for letter, axis in axes_by_letter.items():
        if axis is not None:
            axes |= {f"{letter} Type": axis.option, f"{letter} Values": ", ".join(_short(v) for v in axis.values)}
    if first is None:
        return parameters("", None, axes)
    text = parse_parameters(first)
    return parameters(text.prompt, text.negative_prompt, {**text.settings, **axes})


def _font(text: str, size: int) -> Font:
    """Pillow's own font, or for other than Latin letters the first of some usual ones that is installed."""
    for name in () if all(ord(letter) < 256 for letter in text) else ("NotoSansCJK-Regular.ttc", "DejaVuSans.ttf"):
        try:
            return ImageFont.truetype(name, size)
        except OSError:
            continue
    return ImageFont.load_default(size)


def _size(font: Font, text: str) -> tuple[int, int]:
    box = ImageDraw.Draw(Image.new("L", (1, 1))).multiline_textbbox((0, 0), text, font)
    return math.ceil(box[2]), math.ceil(box[3])


def _wrapped(font: Font, text: str, width: int) -> str:
    """Break a text into at most six lines of a width in pixels, words that are too long too."""
    lines = [""]
    for word in re.findall(r"\S+\s*", text):
        for part in [word] if font.getlength(word.rstrip()) <= width else list(word):
            if lines[-1] and font.getlength((lines[-1] + part).rstrip()) > width:
                lines.append("")
            lines[-1] += part
    kept = [line.rstrip() for line in lines[:6]]
    return "\n".join(kept) + ("..." if len(lines) > 6 else "")
