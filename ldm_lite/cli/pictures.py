"""The text of a picture in its file: the settings that made it, in PNG, JPEG and WebP."""

import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from PIL import Image
from PIL.PngImagePlugin import PngInfo

from ldm_lite.cli.writing import replacing

log = logging.getLogger("ldm_lite")

TEXT = "parameters"  # the name of the settings among an image's texts, as in A1111
_FORMATS = ("PNG", "JPEG", "WEBP")  # the formats that hold them
MOST_EXIF = 2**16 - 200  # bytes of a text in a JPEG, where 16 bits hold the size of all of EXIF


def write_picture(image: Image.Image, file: Any, kind: str, texts: Mapping[str, str], **arguments: Any) -> None:
    """Write an image to a path or an open file, with its texts by name, where the format holds them.

    PNG holds all of them; JPEG and WebP hold TEXT alone, in EXIF's user comment; other formats hold none.  A text that
    is too long for a JPEG is left out, with a warning.  arguments are those of Pillow's `save`, and come first.
    """
    text = texts.get(TEXT)
    if kind == "PNG":
        info = PngInfo()
        for name, value in texts.items():
            value = value.encode(errors="replace").decode()  # names of files may have lone surrogates
            (info.add_text if value.isascii() else info.add_itxt)(name, value)  # not Latin-1, which some misread
        arguments = {"pnginfo": info, **arguments}
    elif kind in _FORMATS and text is not None:
        comment = b"UNICODE\0" + text.encode("utf-16-be", errors="replace")
        if kind == "JPEG" and len(comment) > MOST_EXIF:
            log.warning("the settings are too long for a JPEG, which is written without them: PNG and WebP hold them")
        else:
            exif = Image.Exif()
            exif.get_ifd(0x8769)[0x9286] = comment
            arguments = {"exif": exif, **arguments}
    Image.Image.save(image, file, kind, **arguments)


def text_of(image: Image.Image) -> dict[str, str]:
    """Return the texts of write_picture that an image in memory has: TEXT, or none."""
    return {TEXT: image.info[TEXT]} if isinstance(image.info.get(TEXT), str) else {}


def kind_of(path: str | os.PathLike[str]) -> str | None:
    """Return the format of a name's ending; None if there is none."""
    return Image.registered_extensions().get(os.path.splitext(os.fspath(path))[1].lower())


class Picture(Image.Image):
    """An image of which `save` writes the text in .info[TEXT]; copies of it do too, also resized or converted ones."""

    @classmethod
    def of(cls, image: Image.Image, text: str) -> Image.Image:
        """Make an image carry a text, in place."""
        image.__class__ = cls
        image.info[TEXT] = text
        return image

    def save(self, fp: Any, format: str | None = None, **params: Any) -> None:
        """Write it as Pillow does; pnginfo=None, or exif= of your own, leaves the text out."""
        path = getattr(fp, "name", None) if hasattr(fp, "write") else fp
        kind = format or (kind_of(os.fsdecode(path)) if isinstance(path, (str, bytes, os.PathLike)) else None)
        if kind is None:
            super().save(fp, format, **params)  # Pillow's error says what is wrong
        else:
            write_picture(self, fp, kind.upper(), text_of(self), **params)

    def _new(self, im: Any) -> Image.Image:
        image = super()._new(im)
        image.__class__ = Picture
        return image


def save_whole(image: Image.Image, path: Path, texts: Mapping[str, str], **arguments: Any) -> None:
    """Write an image with its texts, whole or not at all, in the format of the name's ending.

    Raises ValueError for a format that holds no text; OSError.
    """
    if (kind := kind_of(path)) not in _FORMATS or kind is None:
        raise ValueError(f"got {path}, expected a name that ends in .png, .jpg or .webp, which hold the settings")
    with replacing(path, unique=True) as part:
        write_picture(image, part, kind, texts, **arguments)
