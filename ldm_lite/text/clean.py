"""Clean texts as CLIP's and T5's were for training: ftfy.fix_text, and for some html.unescape, twice.

With the package ftfy (`pip install ldm-lite[text]`) all of it is ftfy's work.  Without, the same fixes are made here
except for one: text that was decoded with the wrong encoding ("sch\u00c3\u00b6n") stays as it is, with a warning.
Source: the documentation of ftfy 6 and of its fixes.
"""

import functools
import html
import importlib
import logging
import re
import unicodedata
from collections.abc import Callable, Mapping
from html.entities import html5
from types import MappingProxyType

log = logging.getLogger("ldm_lite")

# Latin ligatures, by their compatibility decomposition: \ufb01 is "fi".
_LIGATURES = "\u0132\u0133\u0149\u01c4\u01c5\u01c6\u01c7\u01c8\u01c9\u01ca\u01cb\u01cc\u01f1\u01f2\u01f3"
_LIGATURES += "\ufb00\ufb01\ufb02\ufb03\ufb04\ufb05\ufb06"
_PARTS = {
    each: "".join(chr(int(part, 16)) for part in unicodedata.decomposition(each).split()[1:]) for each in _LIGATURES
}
_WIDE = {chr(code): unicodedata.normalize("NFKC", chr(code)) for code in range(0xFF01, 0xFFF0)}
_SINGLE, _DOUBLE = "\u02bc\u2018\u2019\u201a\u201b", "\u201c\u201d\u201e\u201f"
_REPLACED = str.maketrans(
    {**_PARTS, **_WIDE, "\u3000": " ", **dict.fromkeys(_SINGLE, "'"), **dict.fromkeys(_DOUBLE, '"')}
    | dict.fromkeys("\r\u2028\u2029\x85", "\n")
)
_CONTROLS = dict.fromkeys(
    [*range(9), 0x0B, *range(0x0E, 0x20), 0x7F, *range(0x206A, 0x2070), 0xFEFF, *range(0xFFF9, 0xFFFD)]
)
_ESCAPE = re.compile("\x1b\\[[\\d;]*[a-zA-Z]")  # of terminals
_ENTITY = re.compile("&#?[0-9A-Za-z]{1,24};")
_C1 = re.compile("[\x80-\x9f]")
_A_GRAVE = re.compile("(?<!\\w)\u00c3 ")  # "\u00e0", whose second byte became a space
_FOREIGN = re.compile("[^\x00-\x7f]+")
_UTF8 = re.compile(rb"[\xc2-\xdf][\x80-\xbf]|[\xe0-\xef][\x80-\xbf]{2}|[\xf0-\xf4][\x80-\xbf]{3}")
# What text is decoded with by mistake, most often first.
_ENCODINGS = ("latin-1", "cp1252", "cp1251", "cp1250", "cp1253", "cp1254", "cp1257", "iso8859-2", "mac-roman", "cp437")


def fix_text(text: str) -> str:
    """Return the text with straight quotes, without HTML entities, ligatures, full-width letters, control characters.

    Equals ftfy.fix_text unless ftfy is missing and would decode the text again: a warning says so.
    """
    if text.isascii() and text.isprintable() and "&" not in text:
        return text
    if (ftfy := _ftfy()) is not None:
        return ftfy(text)
    fixed, escaped = [], True
    for line in re.findall("[^\n]*\n|[^\n]+", text):
        escaped = escaped and "<" not in line  # from the first tag on, the text is taken for HTML
        fixed.append(_fix_line(line, escaped))
    result = "".join(fixed)
    if _may_be_misread(text):
        log.warning("%r may have been decoded with a wrong encoding: the package ftfy mends such prompts", text[:60])
    return result


def unescape(text: str) -> str:
    """Return fix_text of the text without HTML entities of any kind, even &amp without a semicolon."""
    return html.unescape(html.unescape(fix_text(text)))


@functools.cache
def _ftfy() -> Callable[[str], str] | None:
    try:
        fix: Callable[[str], str] = importlib.import_module("ftfy").fix_text
    except ImportError:
        return None
    return fix


def _fix_line(text: str, escaped: bool) -> str:
    """Apply all fixes until none changes anything."""
    before = None
    while text != before:
        before = text
        if escaped:
            text = _ENTITY.sub(lambda match: _unescaped(match[0]), text)
        text = _C1.sub(lambda match: _windows(match[0]), text)
        text = _ESCAPE.sub("", text.replace("\r\n", "\n").translate(_REPLACED))
        text = unicodedata.normalize("NFC", text.translate(_CONTROLS))
    return text


def _unescaped(entity: str) -> str:
    """Return the character of an HTML entity that ends with a semicolon, or the entity if there is none."""
    if not entity.startswith("&#"):
        return _entities().get(entity[1:], entity)
    character = html.unescape(entity)
    return entity if ";" in character else character


@functools.cache
def _entities() -> Mapping[str, str]:
    """HTML's entities, and those of lower case also in capitals where that is no other entity: EACUTE; is \u00c9."""
    known = {name: value for name, value in html5.items() if name.endswith(";")}
    capitals = {name.upper(): value.upper() for name, value in known.items() if name == name.lower()}
    return MappingProxyType(
        {name: v for name, v in capitals.items() if html.unescape(f"&{name}") == f"&{name}"} | known
    )


def _windows(character: str) -> str:
    """Return what Windows-1252 has in the place of a C1 control character, or the character."""
    try:
        return character.encode("latin-1").decode("cp1252")
    except UnicodeDecodeError:
        return character


def _may_be_misread(text: str) -> bool:
    """Whether letters are UTF-8 once encoded: a part of them in Latin-1 or Windows-1252, all of them in others."""
    if _A_GRAVE.search(text):
        return True
    return any(_is_utf8(letters, encoding) for letters in _FOREIGN.findall(text) for encoding in _ENCODINGS)


def _is_utf8(letters: str, encoding: str) -> bool:
    if encoding in _ENCODINGS[:2]:
        return _UTF8.search(letters.encode(encoding, "replace")) is not None
    try:
        return bool(letters.encode(encoding).decode("utf-8"))
    except UnicodeError:
        return False
