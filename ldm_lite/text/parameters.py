"""The text that AUTOMATIC1111's web UI and ldm_lite store in a picture: prompt, negative prompt and settings."""

import contextlib
import json
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from PIL import Image

from ldm_lite.cli.files import open_file
from ldm_lite.image_headers import check_exif, check_image


def parameters(prompt: str, negative_prompt: str | None, settings: Mapping[str, object]) -> str:
    """Format the text that AUTOMATIC1111's web UI stores in a PNG under "parameters", so that its readers parse it."""
    lines = [prompt]
    if negative_prompt is not None:
        lines.append(f"Negative prompt: {negative_prompt}")
    texts = {key: str(value) for key, value in settings.items()}
    for key, text in texts.items():
        if any(mark in text for mark in ',\n\r"'):
            texts[key] = json.dumps(text, ensure_ascii=False)
    lines.append(", ".join(f"{key}: {text}" for key, text in texts.items()))
    return "\n".join(lines)


class Parameters(NamedTuple):
    """The content of a picture's text."""

    prompt: str
    negative_prompt: str | None
    settings: Mapping[str, str]  # "Steps", "Sampler", ... in the text's order


MOST_TEXT = 100_000  # characters of a picture's text
MOST_BYTES = 2**28  # of a picture
# A key of the settings, and its value: a JSON string, or all up to the next comma.
_SETTING = re.compile(r'\s*(\w[\w \-/+]{0,99}):\s*("(?:\\.|[^\\"])*"(?=\s*(?:,|$))|[^,]*)(?:,|$)')


def parse_parameters(text: str) -> Parameters:
    """Parse the text that AUTOMATIC1111's web UI, or parameters(), stored in a picture.

    A prompt of some lines, "Negative prompt: " and more lines, and a last line of settings, "Steps: 20, ...".  Raises
    ValueError for a text that is too long, and for one whose last line is not settings.
    """
    if len(text) > MOST_TEXT:
        raise ValueError(f"got a text of {len(text)} characters, expected at most {MOST_TEXT}")
    *lines, last = text.rstrip("\r\n \0").split("\n")
    settings, at = {}, 0
    while 0 <= at < len(last):
        if (match := _SETTING.match(last, at)) is not None:
            key, value, at = match[1].strip(), match[2].strip(), match.end()
            with contextlib.suppress(ValueError):
                value = str(json.loads(value)) if value.startswith('"') else value
            settings[key] = value
        else:
            at = last.find(",", at) + 1 or -1
    if len(settings) < 2:
        raise ValueError("has no settings in its last line, such as 'Steps: 20, Sampler: Euler a, Seed: 1'")
    start = next((i for i, line in enumerate(lines) if line.lstrip().startswith("Negative prompt:")), len(lines))
    negative = None
    if start < len(lines):
        first = lines[start].lstrip().removeprefix("Negative prompt:")
        negative = "\n".join([first.removeprefix(" "), *lines[start + 1 :]])
    return Parameters("\n".join(lines[:start]), negative, settings)


def read_parameters(source: Any) -> Parameters:
    """Parse the text of a picture (a path, or PIL), without decoding its pixels.

    PNG holds it under "parameters", JPEG and WebP in EXIF's user comment.  Raises ValueError, with the path, if there
    is none; OSError.
    """
    name = "the picture" if isinstance(source, Image.Image) else f"{source}"
    if isinstance(source, Image.Image):
        text = text_of(source)
    else:
        with open_file(source, MOST_BYTES) as file:
            try:
                check_image(file)
                with Image.open(file, formats=("PNG", "JPEG", "WEBP")) as image:
                    text = text_of(image)
            except Exception as error:  # Pillow raises many types for damaged files
                why = f" ({error})" if "expected" in str(error) else ""
                raise ValueError(f"{name}: is not a PNG, JPEG or WebP that can be read{why}") from error
    if text is None:
        raise ValueError(f"{name}: holds no text of AUTOMATIC1111's web UI or of ldm_lite")
    try:
        return parse_parameters(text)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error


def text_of(image: Image.Image) -> str | None:
    """The text that a picture holds, as it is."""
    text = image.info.get("parameters")
    if text is None:
        check_exif(image.info)
        comment = image.getexif().get_ifd(0x8769).get(0x9286, b"")  # EXIF, UserComment
        comment = comment if isinstance(comment, bytes) else b""
        if comment.startswith(b"UNICODE\0"):
            return comment[8:].decode("utf-16-be" if comment[8:9] == b"\0" else "utf-16-le", errors="replace")
        return comment[8:].decode("utf-8", errors="replace") if comment.startswith(b"ASCII\0\0\0") else None
    return text if isinstance(text, str) else None
