"""Prompts that change while the image is made, and prompts of several parts, in AUTOMATIC1111's syntax.

`[from:to:0.5]` becomes another text after half of the steps, `[to:10]` appears after 10 steps and `[from::10]`
disappears then; `[cow|horse]` takes turns; `a AND b :0.5` is two prompts, whose predictions are added (Liu et al.
2022).  A backslash makes the next character an ordinary one.  Everything else is ordinary text, and so is a whole
prompt with a | outside of brackets.  Equal to `prompt_parser.py` of version 1.10, whose grammar this reads in one pass.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from ldm_lite.text.prompt import MOST_DEPTH

MOST_TEXT = 10**7  # characters of a prompt's texts over all steps
_PIECES = re.compile(r"(?P<text>(?:[^\\\[\]():|]|\\.)+)|(?P<mark>[\[\]():|])")
_WHEN = re.compile(r"\s*([+-]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?)\s*")
_AND = re.compile(r"\bAND\b")
_WEIGHT = re.compile(r":\s*([-+]?(?:\d+\.?|\d*\.\d+))$")


class Part(NamedTuple):
    """A prompt of a composition, and its weight."""

    text: str
    weight: float


class Until(NamedTuple):
    """A text that is used up to and including a call of the network, counted from 0."""

    last: int
    text: str | None  # None: no prompt


@dataclass(frozen=True)
class Calls:
    """The call counts of a prompt: the network's calls in a whole run, and in the run before it, for hires fix."""

    total: int
    before: int | None = None


_Text = list[str | Callable[[int], str]]  # pieces, or functions of the network call, counted from 1, that return one


def split_at_ands(prompt: str) -> list[Part]:
    """Split a prompt at its ANDs; each part may end in its weight, `a cat :0.8`, which is 1 without."""
    parts = []
    for text in _AND.split(prompt):
        match = _WEIGHT.search(text.rstrip())
        parts.append(
            Part(text.rstrip(), 1.0) if match is None else Part(text[: match.start()].rstrip(), float(match[1]))
        )
    return parts


def schedule(prompt: str, calls: Calls) -> list[Until]:
    """Return the texts of a prompt in the order of their use; the last is used until the end.

    Whole numbers count calls, others are fractions of all calls.  In a second run, whole numbers continue the first's
    count, and 1.5 is half of the second run.  Raises ValueError for brackets deeper than MOST_DEPTH, and for too much
    text.
    """
    ends = {calls.total}
    parsed = _parse(prompt, calls, ends)
    if parsed is None:
        return [Until(calls.total, prompt)]
    if len(ends) * len(prompt) > MOST_TEXT:
        raise ValueError(f"got a prompt of {len(prompt)} characters that changes {len(ends)} times: shorten it")
    return [Until(end, _at(parsed, end)) for end in sorted(ends)]


def parts_of(prompt: str, syntax: str) -> list[Part]:
    """Return the parts of a prompt, which AND joins in the a1111 syntax."""
    if syntax != "a1111":
        return [Part(prompt, 1.0)]
    parts = split_at_ands(prompt)  # spaces around AND matter for Qwen3
    return parts if len(parts) == 1 else [part._replace(text=part.text.strip()) for part in parts]


def until_of(text: str | None, syntax: str, calls: Calls) -> list[Until]:
    """Return the texts that a text becomes over the calls of the network."""
    return [Until(calls.total, text)] if text is None or syntax != "a1111" else schedule(text, calls)


def is_constant(prompt: str | None, syntax: str) -> bool:
    """Whether a prompt is a single text of weight 1 from the first step to the last."""
    parts = parts_of(prompt or "", syntax)
    return [part.weight for part in parts] == [1.0] and len(until_of(parts[0].text, syntax, Calls(1000))) == 1


def _at(text: _Text, call: int) -> str:
    """The text of a call, counted from 1."""
    return "".join(part if isinstance(part, str) else part(call) for part in text)


# ---- reading --------------------------------------------------------------------------------------------------------


class _Open(NamedTuple):
    """An open bracket: the texts between its separators, and the separators."""

    bracket: str
    fields: list[_Text]
    marks: list[str]

    def literal(self) -> _Text:
        """The text read so far, as ordinary text."""
        marked = zip(self.marks, self.fields[1:], strict=True)
        return [self.bracket, *self.fields[0], *(part for mark, field in marked for part in (mark, *field))]


def _parse(prompt: str, calls: Calls, ends: set[int]) -> _Text | None:
    """Parse a prompt, or return None if all of it is ordinary text; the last calls of its texts are added to ends."""
    done: _Text = []
    opened: list[_Open] = []
    end = 0
    for match in _PIECES.finditer(prompt):
        if match.start() != end:
            return None  # a backslash before nothing, or before the end of a line
        end, mark = match.end(), match["mark"]
        if mark in ("[", "("):
            if len(opened) >= MOST_DEPTH:
                raise ValueError(f"got a prompt with more than {MOST_DEPTH} brackets open at a time: close some")
            opened.append(_Open(mark, [[]], []))
        elif opened and mark in (":", "|"):
            opened[-1].marks.append(mark)
            opened[-1].fields.append([])
        elif opened and mark in ("]", ")"):
            closed = _closed(opened[-1], mark, calls, ends)
            if closed is not None:
                opened.pop()
            elif (closed := _unclosed(opened)) is not None:  # brackets around an ordinary one are ordinary ones too
                opened.clear()
                closed.append(mark)
            else:
                return None
            (opened[-1].fields[-1] if opened else done).extend(closed)
        elif mark == "|":
            return None
        else:
            (opened[-1].fields[-1] if opened else done).append(match[0])
    rest = _unclosed(opened)
    return None if rest is None or end != len(prompt) else done + rest


def _unclosed(opened: list[_Open]) -> _Text | None:
    """Open brackets as ordinary text, or None if there is a | among them, which makes all of the prompt ordinary."""
    if any("|" in bracket.marks for bracket in opened):
        return None
    return [part for bracket in opened for part in bracket.literal()]


def _closed(bracket: _Open, mark: str, calls: Calls, ends: set[int]) -> _Text | None:
    """The meaning of the bracket that `mark` closes; None if it is ordinary text."""
    fields, marks = bracket.fields, "".join(bracket.marks)
    if bracket.bracket + mark not in ("[]", "()"):
        return None
    if marks == "" or (mark == ")" and marks == ":"):
        return [*bracket.literal(), mark]
    if mark == "]" and set(marks) == {"|"}:
        ends.update(range(1, calls.total + 1))
        return [lambda call: _at(fields[(call - 1) % len(fields)], call)]
    last = fields[-1]
    if mark == ")" or marks not in (":", "::") or len(last) != 1 or not isinstance(last[0], str):
        return None
    when = _WHEN.fullmatch(last[0])
    if when is None:
        return None
    before, after, is_fraction = fields[0] if marks == "::" else [], fields[-2], "." in when[1]
    value = float(when[1]) - (0 if calls.before is None else 1 if is_fraction else calls.before)
    change = int(min(calls.total, max(-1.0, value * calls.total if is_fraction else value)))  # the last call of before
    if change >= 1:
        ends.add(change)
    return [lambda call: _at(before if call <= change else after, call)]
