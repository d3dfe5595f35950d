"""Write the tables of docs/coming-from.md between comments: names in other programs, and ours.

    python scripts/make_coming_from.py

They come from ldm_lite/cli/synonyms.py and the options' further spellings.  A test compares.
"""

import dataclasses
import re
from collections.abc import Iterable
from pathlib import Path

from ldm_lite.cli.console import as_flags
from ldm_lite.cli.options import CheckedOptions, LoadOptions, SaveOptions
from ldm_lite.cli.synonyms import NOTHING, TABLES, TRAINING
from ldm_lite.cli.task_options import Img2imgOptions
from ldm_lite.train.options import TrainOptions

PATH = Path(__file__).parents[1] / "docs" / "coming-from.md"
LAUNCH = "Launch flags (AUTOMATIC1111, Forge, ComfyUI)"
TABLE = re.compile(r"(?<=<!-- table: )(.+?)( -->\n).*?(?=<!-- end -->)", re.DOTALL)


def page(text: str) -> str:
    """Return the page's text with up-to-date tables."""
    return TABLE.sub(lambda match: f"{match[1]}{match[2]}{table(match[1])}\n", text)


def table(title: str) -> str:
    """Return a table of TABLES, or of spellings that the options themselves declare."""
    if title == "taken":
        return _table("there", "here", spellings((TrainOptions, LoadOptions), as_flag=True))
    if title == "original":
        return _table("flag", "argument", spellings((Img2imgOptions, SaveOptions), as_flag=False))
    as_flag = title in (TRAINING, LAUNCH)
    by_text: dict[str, list[str]] = {}
    for names, text in sorted(TABLES[title].items(), key=lambda row: row[1] == NOTHING):  # what is not here comes last
        shown = names.replace("_", "-") if title == LAUNCH else names
        by_text.setdefault("not here" if text == NOTHING else text, []).extend(shown.split())
    rows = [(_names(names, as_flag), _here(text) if as_flag else text) for text, names in by_text.items()]
    return _table("there", "here", rows)


def spellings(groups: Iterable[type[CheckedOptions]], as_flag: bool) -> list[tuple[str, str]]:
    """Return the further spellings of the options of some groups, and the options."""
    fields = [field for group in groups for field in dataclasses.fields(group) if field.metadata.get("flags")]
    return [
        (_names(field.metadata["flags"], as_flag), _here(f"`{field.name}`") if as_flag else f"`{field.name}`")
        for field in fields
    ]


def _names(names: Iterable[str], as_flag: bool) -> str:
    return ", ".join(f"`--{name}`" if as_flag and not name.startswith("--") else f"`{name}`" for name in names)


def _here(text: str) -> str:
    """A row's text with flags in place of options."""
    return re.sub(r"`[a-z]\w*(?:=[^`]*)?`", lambda match: f"`{as_flags(match[0])}`", text)


def _table(there: str, here: str, rows: Iterable[tuple[str, str]]) -> str:
    return "\n".join(
        [
            f"| {there} | {here} |",
            "|---|---|",
            *(f"| {left} | {right.replace('|', chr(92) + '|')} |" for left, right in rows),
        ]
    )


if __name__ == "__main__":
    PATH.write_text(page(PATH.read_text(encoding="utf-8")), encoding="utf-8")
