"""Clean prompts like DeepFloyd IF's training texts: lower case, without addresses, tags, codes and file names.

The tables hold the rules of its deepfloyd_if/modules/t5.py in their order, applied twice.  A pattern finds tags, not a
parser.
"""

import html
import re
from urllib.parse import unquote_plus

from ldm_lite.text.clean import unescape
from ldm_lite.text.tokenizer import check_length

_MOST_CHARACTERS = 2000  # T5 reads 77 tokens of them; some rules take quadratic time

_SITE = r"[a-z0-9.\-]+[.](?:com|co|ru|net|org|edu|gov|it)[\w/-]*\b/?(?!@)"
_FILES = "png|jpg|jpeg|bmp|webp|eps|pdf|apk|mp4"
# All kinds of dashes: hyphen, Armenian, Hebrew, Canadian, Mongolian, the general ones, CJK, small and full width.
_DASHES = (
    "-\u058a\u05be\u1400\u1806\u2010-\u2015\u2e17\u2e1a\u2e3a\u2e3b\u2e40\u301c\u3030\u30a0"
    "\ufe31\ufe32\ufe58\ufe63\uff0d"
)
_EARLY = (
    ("<person>", "person"),
    (rf"\b(?:https?:(?:/{{1,3}}|[a-z0-9%])|{_SITE})", ""),
    (rf"\b(?:www:(?:/{{1,3}}|[a-z0-9%])|{_SITE})", ""),
    (r"<[a-z/!?][^<>]*>", ""),  # tags
)
_MIDDLE = (
    (r"@\w+\b", ""),  # nicknames
    ("[\u31c0-\u4dff]+|[\u4e00-\u9fff]+", ""),  # CJK
    (f"[{_DASHES}]+", "-"),
    ("[`\u00b4\u00ab\u00bb\u201c\u201d\u00a8]", '"'),
    ("[\u2018\u2019]", "'"),
    (r"&quot;?|&amp", ""),
    (r"\d{1,3}\.\d{1,3}\.\d{1,3}\.\d{1,3}", " "),  # IP addresses
    (r"\d:\d\d\s+$", ""),
    (r"\\n", " "),
    (r"#\d{1,3}\b", ""),
    (r"#\d{5,}\b", ""),
    (r"\b\d{6,}\b", ""),
    (rf"\S+\.(?:{_FILES})", ""),
    (r"[\"']{2,}", '"'),
    (r"\.{2,}", " "),
    (r"[#®•©™&@·º½¾¿¡§~)(\]\[}{|\\/*]+", " "),
    (r"\s+\.\s+", " "),
)
_LATE = (
    (r"\b[a-zA-Z]{1,3}\d{3,15}\b", ""),  # codes: jc6640, jc6640vc, 6640vc231
    (r"\b[a-zA-Z]+\d+[a-zA-Z]+\b", ""),
    (r"\b\d+[a-zA-Z]+\d+\b", ""),
    (r"(worldwide\s+)?(free\s+)?shipping", ""),
    (r"(free\s)?download(\sfree)?", ""),
    (r"\bclick\b\s(?:for|on)\s\w+", ""),
    (rf"\b(?:{_FILES})(\simages?)?", ""),
    (r"\bpage\s+\d+\b", ""),
    (r"\b\d*[a-zA-Z]+\d+[a-zA-Z]+\d+[a-zA-Z\d]*\b", " "),
    (r"\b\d+\.?\d*[x\u0445\u00d7]\d+\.?\d*\b", ""),  # sizes
    (r"\b\s+:\s+", ": "),
    (r"(\D[,./])\b", r"\1 "),
    (r"\s+", " "),
    (r"^[\"']([\w\W]+)[\"']$", r"\1"),
    (r"^['_,\-:;]", ""),
    (r"['_,\-:+]$", ""),
    (r"^\.\S+$", ""),
)


def clean(text: str) -> str:
    """Return the cleaned prompt for T5.  Raises ValueError for more than MOST_CHARACTERS."""
    check_length(text, _MOST_CHARACTERS)
    return _once(_once(text))


def _once(text: str) -> str:
    text = _apply(_EARLY, unquote_plus(text).strip().lower())
    text = _apply(_MIDDLE, html.unescape(text))
    if len(re.findall("[-_]", text)) > 3:  # this-is-my-cute-cat
        text = re.sub("[-_]", " ", text)
    text = unescape(text).strip()
    return _apply(_LATE, text).strip()


def _apply(rules: tuple[tuple[str, str], ...], text: str) -> str:
    for pattern, replacement in rules:
        text = re.sub(pattern, replacement, text)
    return text
