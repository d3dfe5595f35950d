"""Signs that a prompt was written for another program: syntax that would be read as words, and what to do instead.

Ordinary text has brackets, colons, capitals and plus signs too, so a sign is something that hardly occurs otherwise.
No pattern takes quadratic time.
"""

import re
from collections.abc import Iterator
from typing import NamedTuple

from ldm_lite.core.declare import MOST_CHARACTERS

A1111 = "`prompt_syntax=a1111` reads"
_NUMBER = r"-?(?:\d?\.\d+|\d(?:\.\d+)?)"
_ARTICLE = r"(?:an?|one|two|three)\s"


class Sign(NamedTuple):
    """A pattern of another program's syntax, and the advice; with `plain` that syntax is read as a1111."""

    pattern: re.Pattern[str]
    advice: str
    plain: bool = False
    weight: bool = False  # a weight, which not every text encoder supports


SIGNS = (
    Sign(re.compile(r"<(?:lora|lyco|hypernet):[^<>]*>"), "leave it out, and give `lora=FILE:WEIGHT`"),
    Sign(  # (a cat:1.3), ((masterpiece)), \(literal\)
        re.compile(rf"\([^()]*[^\d\s()]:{_NUMBER}\)|\(\([^()]+\)\)|\\[()]"), f"{A1111} weights", plain=True, weight=True
    ),
    Sign(  # [cat:dog:0.5], [dog:10], [cat::10], [cat|dog]
        re.compile(r"\[[^\[\]|]*[^\d\s\[\]]:(?:\d*\.\d+|\d{1,3})\]|\[[^\[\]|]*\w\s*\|[^\[\]]*\]"),
        f"{A1111} prompts that change",
        plain=True,
    ),
    Sign(  # a cat AND a dog, as the only word in capitals and not in a sentence; cat :1 AND dog :0.5
        re.compile(
            rf"\A\s*{_ARTICLE}(?:(?!\b[A-Z]{{2,}})[^.?!])*\bAND\s{_ARTICLE}(?:(?!\b(?!AND)[A-Z]{{2,}})[^.?!])*\Z"
            rf"|[^\d\s]\s*:\s*{_NUMBER}\s+AND\b|\A(?=.*\bAND\b).*[^\d\s]\s*:\s*{_NUMBER}\s*\Z",
            re.DOTALL,
        ),
        f"{A1111} prompts joined by AND",
        plain=True,
    ),
    Sign(re.compile(r",\s*BREAK\s*(?:,|\n|\Z)|\n[^\S\n]*BREAK\b|,\s*BREAK\s+[a-z(]"), f"{A1111} BREAK", plain=True),
    Sign(re.compile(r"\{[^{}|]*\|[^{}]*\}"), "`dynamic=random` chooses one of them"),
    Sign(
        re.compile(r"(?<!\w)__(?!init__|main__|name__)[A-Za-z][\w/*-]{0,60}?__(?!\w)"), "`wildcards=DIR` has its lines"
    ),
    Sign(re.compile(r"(?<!\w)embedding:[\w.-]+"), "give `embedding=FILE`, and write its name alone"),
    Sign(  # compel: (cat)++, cat++, (cat)1.5, ("a", "b").blend(1, 2)
        re.compile(
            r"\([^()]*[A-Za-z]\)(?:\+{1,5}|-{2,5})(?=[\s,.;)]|\Z)|(?<![\w+])[a-z]{3,}\+{2,5}(?=[\s,]|\Z)"
            r"|\([^()]*[A-Za-z]\)\d?\.\d+|[\"']\)\.(?:and|blend|swap)\("
        ),
        "compel's weights are (cat:1.3) with `prompt_syntax=a1111`",
        weight=True,
    ),
    Sign(  # Midjourney's, and those of sd-scripts' sample prompts
        re.compile(r"(?:\A|\s)--(?:ar|v|s|q|no|niji|style|stylize|chaos|seed|n|w|h|d|l)\s+\S+"),
        "options are given beside the prompt: `width`, `height`, `seed`, `negative_prompt`",
    ),
)


def signs_in(prompt: str, syntax: str = "plain", has_weights: bool = True) -> Iterator[str]:
    """Yield a line about each kind of sign in a prompt, with the text; syntax is what the prompt is read as."""
    text = prompt[:MOST_CHARACTERS]  # longer ones are refused
    for sign in SIGNS:
        if (match := sign.pattern.search(text)) and not (sign.plain and syntax == "a1111"):
            phrase = " ".join(match[0].split())
            advice = sign.advice if has_weights or not sign.weight else "this model's text encoder cannot weight parts"
            yield f"{phrase if len(phrase) <= 60 else phrase[:57] + '...'} in the prompt is read as words: {advice}"
