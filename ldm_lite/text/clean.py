"""Clean texts as CLIP's and T5's training texts were: by ftfy.fix_text, and for some by html.unescape, twice.

With the package ftfy (`pip install ldm-lite[text]`) ftfy does all of it.  Without, the same fixes are made here
except for one: text that was decoded with the wrong encoding ("sch\u00c3\u00b6n") stays as it is, with a warning.
Source: the documentation of ftfy 6 and of its fixes.
"""

import functools
import html
import importlib
import logging
import re
import unicodedata
from collections.abc import Callable
from html.entities import html5

from ldm_lite.core.tokenizer import REPLACED, WINDOWS

log = logging.getLogger("ldm_lite")

_LETTERS = {code: text for code, text in REPLACED.items() if text is not None}  # without the control characters
_ESCAPE = re.compile("\x1b\\[[\\d;]*[a-zA-Z]")  # of terminals
_ENTITY = re.compile("&#?[0-9A-Za-z]{1,24};")
_A_GRAVE = re.compile("(?<!\\w)\u00c3 ")  # "\u00e0", whose second byte became a space
_FOREIGN = re.compile("[^\x00-\x7f]+")
_UTF8 = re.compile(rb"[\xc2-\xdf][\x80-\xbf]|[\xe0-\xef][\x80-\xbf]{2}|[\xf0-\xf4][\x80-\xbf]{3}")
# What text is decoded with by mistake, most often first.
_ENCODINGS = ("latin-1", "cp1252", "cp1251", "cp1250", "cp1253", "cp1254", "cp1257", "iso8859-2", "mac-roman", "cp437")


def fix_as_ftfy(text: str) -> str:
    """Return the text with straight quotes, without HTML entities, ligatures, full-width letters, control characters.

    Equals ftfy.fix_text unless ftfy is missing and would decode the text again: a warning says so.
    """
    if (ftfy := _ftfy()) is not None:
        return ftfy(text)
    fixed, escaped = "", True
    for line in re.findall("[^\n]*\n|[^\n]+", text):
        escaped = escaped and "<" not in line  # from the first tag on, the text is taken for HTML
        before = None
        while line != before:  # until no fix changes anything
            before = line
            if escaped:
                line = _ENTITY.sub(lambda match: _character(match[0]), line)
            line = _ESCAPE.sub("", line.replace("\r\n", "\n").translate(WINDOWS).translate(_LETTERS))
            line = unicodedata.normalize("NFC", line.translate(REPLACED))
        fixed += line
    if _may_be_misread(text):
        log.warning("%r may have been decoded with a wrong encoding: install ftfy to repair such prompts", text[:60])
    return fixed


def unescape(text: str) -> str:
    """Return fix_as_ftfy of the text without HTML entities of any kind, even &amp without a semicolon."""
    return html.unescape(html.unescape(fix_as_ftfy(text)))


@functools.cache
def _ftfy() -> Callable[[str], str] | None:
    try:
        fix: Callable[[str], str] = importlib.import_module("ftfy").fix_text
    except ImportError:
        return None
    return fix


def _character(entity: str) -> str:
    """Return the character of an HTML entity that ends with a semicolon, or the entity if there is none.

    Lower-case entities are recognised in capitals too, unless those are other entities: &EACUTE; is \u00c9.
    """
    name = entity[1:]
    if name in html5:
        return html5[name]
    if name == name.upper() and name.lower() in html5 and html.unescape(entity) == entity:
        return html5[name.lower()].upper()
    character = html.unescape(entity) if name.startswith("#") else entity
    return entity if ";" in character else character


def _may_be_misread(text: str) -> bool:
    """Whether letters are UTF-8 when encoded again: some in Latin-1 or Windows-1252, all in other encodings."""

    def is_utf8(letters: str, encoding: str) -> bool:
        if encoding in _ENCODINGS[:2]:
            return _UTF8.search(letters.encode(encoding, "replace")) is not None
        try:
            return bool(letters.encode(encoding).decode("utf-8"))
        except UnicodeError:
            return False

    if _A_GRAVE.search(text):
        return True
    return any(is_utf8(letters, encoding) for letters in _FOREIGN.findall(text) for encoding in _ENCODINGS)
