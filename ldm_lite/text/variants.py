"""Templates of prompts: `{red|blue} car`, `{2$$a|b|c}`, `__colour__`.

Variants stand in braces: `{3::a|b}` takes a three times as often, `{2$$a|b|c}` takes two of them, `{1-2$$ and $$a|b|c}`
one or two with " and " between (default ","), and variants may hold others.  `__name__` is a line of name.txt in the
folder of wildcards, which may be a template too; `*` in a name stands for any text, `#` begins a comment.  A backslash
before a brace or an underscore makes it an ordinary character.

The syntax is that of adieyal's dynamicprompts, which has more (variables, samplers).
"""

import itertools
import math
import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from ldm_lite.cli.files import read_text

MOST_PROMPTS = 10_000  # of one template
MOST_DEPTH = 20  # braces and wildcards inside each other
MOST_TEXT = 10**7  # characters of all prompts of a template
MOST_BYTES = 2**24  # of a file of wildcards
_HEAD = re.compile(r"(?!\$)\s*(\d{0,4})(?:(-)(\d{0,4}))?\s*\$\$(?:((?:\\.|[^\\{}|$]|\$(?!\$))*)\$\$)?")
_WEIGHT = re.compile(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*::")
_PIECE = re.compile(r"\\[{}|\\_$]|[{}|]|__((?:(?!__)[\w*/.-])+)__|[^\\{}|_]+|.", re.DOTALL)


class Wildcard(NamedTuple):
    """A line of a file."""

    name: str


@dataclass(frozen=True)
class Variants:
    """`least` to `most` of the options, with `between` between them."""

    options: tuple[tuple[float, "Template"], ...]  # with their weights
    least: int
    most: int
    between: str


Template = tuple[str | Wildcard | Variants, ...]


# ---- reading --------------------------------------------------------------------------------------------------------


def parse(text: str) -> Template:
    """Parse a template.  Raises ValueError, one line, for braces that do not match and counts that fit no variants."""
    template, end = _sequence(text, 0, 0)
    if end < len(text):
        raise ValueError(f"{_shown(text)}: has a closing brace without its opening one (a literal one is \\}})")
    return template


def _shown(text: str) -> str:
    return f"the template {text[:60]!r}"


def _sequence(text: str, at: int, depth: int) -> tuple[Template, int]:
    """Parse up to the end of an option, and return where that is."""
    parts: list[str | Wildcard | Variants] = []
    while at < len(text) and not (text[at] == "}" or (depth and text[at] == "|")):
        match = _PIECE.match(text, at)
        assert match is not None
        piece, at = match[0], match.end()
        if piece == "{":
            variants, at = _variants(text, at, depth + 1)
            parts.append(variants)
        elif match[1] is not None:
            parts.append(Wildcard(match[1]))
        else:
            parts.append(piece[1:] if piece[0] == "\\" and len(piece) == 2 else piece)
    return tuple(parts), at


def _variants(text: str, start: int, depth: int) -> tuple[Variants, int]:
    """Parse what follows an opening brace, and return where its closing one ends."""
    if depth > MOST_DEPTH:
        raise ValueError(f"a template has braces {depth} deep, wanted at most {MOST_DEPTH}")
    options, head = [], _HEAD.match(text, start)
    at = start if head is None else head.end()
    while True:
        weight = _WEIGHT.match(text, at)
        option, at = _sequence(text, at if weight is None else weight.end(), depth)
        if weight is not None and option and not isinstance(option[0], str):
            option = ("", *option)  # a wildcard with a weight is one option: its lines are none of their own
        options.append((1.0 if weight is None else float(weight[1]), option))
        if at == len(text):
            opened = _shown(text[start - 1 :])
            raise ValueError(f"{opened}: has an opening brace without its closing one (a literal one is \\{{)")
        at += 1
        if text[at - 1] == "}":
            break
    if head is None:
        return Variants(tuple(options), 1, 1, ","), at
    first, dash, last, between = head.groups()
    count = MOST_PROMPTS if _wildcard(options) else len(options)
    least = int(first) if first else 1
    most = (int(last) if last else count) if dash else least
    if least > most:
        wanted = "wanted a number, or from a smaller to a larger one"
        raise ValueError(f"a template takes {first}-{last} variants, {wanted}")
    between = "," if between is None else re.sub(r"\\(.)", r"\1", between)
    return Variants(tuple(options), min(least, count), min(most, count), between), at


def _wildcard(options: Sequence[tuple[float, Template]]) -> Wildcard | None:
    """Return the wildcard that is all there is to choose from, whose lines are the options then."""
    only = options[0][1]
    return only[0] if len(options) == 1 and len(only) == 1 and isinstance(only[0], Wildcard) else None


# ---- making prompts -------------------------------------------------------------------------------------------------


class Prompts:
    """Makes prompts of templates, with the wildcards of a folder."""

    def __init__(self, folder: Path | None) -> None:
        """Raises ValueError if the folder is not one."""
        if folder is not None and not folder.is_dir():
            raise ValueError(f"{folder}: is no folder, wanted one with wildcards NAME.txt")
        self.folder = folder
        self._lines: dict[str, list[Template]] = {}
        self._sizes: dict[tuple[str, int], tuple[int, int]] = {}  # of wildcards, by the depth: see _measure

    def one(self, text: str, seed: int) -> str:
        """Return the prompt that a seed takes of a template.  Raises ValueError, one line; OSError."""
        template = parse(text)
        self._check(text, 1, self._measure(template, 0)[1])
        return self._draw(template, random.Random(seed), 0)

    def all(self, text: str) -> list[str]:
        """Return every prompt of a template.  Raises ValueError, one line, for more than MOST_PROMPTS; OSError."""
        template = parse(text)
        self._check(text, *self._measure(template, 0))
        return list(self._every(template, 0))

    def _check(self, text: str, count: int, length: int) -> None:
        if count > MOST_PROMPTS:
            raise ValueError(f"{_shown(text)}: makes more than {MOST_PROMPTS} prompts: draw some, `dynamic=random`")
        if count * length > MOST_TEXT:
            raise ValueError(f"{_shown(text)}: makes more than {MOST_TEXT:,} characters: shorten it")

    def _measure(self, template: Template, depth: int) -> tuple[int, int]:
        """How many prompts a template makes, up to one beyond MOST_PROMPTS, and the length of the longest, at most."""
        count, length = 1, 0
        for part in template:
            if isinstance(part, str):
                length += len(part)
                continue
            if isinstance(part, Wildcard) and (part.name, depth) in self._sizes:
                number, longest = self._sizes[part.name, depth]
            else:
                options, least, most, between = self._options(part, depth)
                sizes = [self._measure(option, depth + 1) for _, option in options]
                # Ordered choices of n options: n! times the n-th elementary symmetric polynomial of their counts.
                # From n = 8 on there are more than MOST_PROMPTS.
                first, last = min(least, 8), min(most, 8)
                choices = [1] + [0] * last
                for size, _ in sizes:
                    for n in range(last, 0, -1):
                        choices[n] = min(choices[n] + choices[n - 1] * size, MOST_PROMPTS + 1)
                number = sum(choices[n] * math.factorial(n) for n in range(first, last + 1))
                several = sorted((size for _, size in sizes), reverse=True)[:most]
                longest = sum(several) + len(between) * max(0, most - 1)
                if isinstance(part, Wildcard):
                    self._sizes[part.name, depth] = number, longest
            count, length = min(count * number, MOST_PROMPTS + 1), min(length + longest, MOST_TEXT + 1)
        return count, length

    def _draw(self, template: Template, source: random.Random, depth: int) -> str:
        texts = []
        for part in template:
            if isinstance(part, str):
                texts.append(part)
                continue
            options, least, most, between = self._options(part, depth)
            left, taken = list(options), []
            for _ in range(source.randint(least, most)):
                weights = [weight for weight, _ in left] if any(weight for weight, _ in left) else None
                [place] = source.choices(range(len(left)), weights)
                taken.append(left.pop(place)[1])
            texts.append(between.join(self._draw(option, source, depth + 1) for option in taken))
        return "".join(texts)

    def _every(self, template: Template, depth: int) -> Iterator[str]:
        parts = [[part] if isinstance(part, str) else list(self._choices(part, depth)) for part in template]
        yield from map("".join, itertools.product(*parts))

    def _choices(self, part: Wildcard | Variants, depth: int) -> Iterator[str]:
        options, least, most, between = self._options(part, depth)
        for number in range(least, most + 1):
            for taken in itertools.permutations([option for _, option in options], number):
                for texts in itertools.product(*(list(self._every(option, depth + 1)) for option in taken)):
                    yield between.join(texts)

    def _options(self, part: Wildcard | Variants, depth: int) -> tuple[Sequence[tuple[float, Template]], int, int, str]:
        if depth > MOST_DEPTH:
            raise ValueError(f"a template goes more than {MOST_DEPTH} deep: does a wildcard hold itself?")
        if isinstance(part, Wildcard):
            return [(1.0, line) for line in self.lines(part.name)], 1, 1, ""
        options: Sequence[tuple[float, Template]] = part.options
        if wildcard := _wildcard(options):
            options = [(1.0, line) for line in self.lines(wildcard.name)]
        return options, min(part.least, len(options)), min(part.most, len(options)), part.between

    def lines(self, name: str) -> list[Template]:
        """Return the lines of a wildcard, parsed.  Raises ValueError if there is none; OSError."""
        if name not in self._lines:
            if self.folder is None:
                raise ValueError(f"got the wildcard __{name}__ but no folder: give one with `wildcards=DIR`")
            if ".." in Path(name).parts or Path(name).is_absolute():
                raise ValueError(f"got the wildcard __{name}__, wanted a name inside {self.folder}")
            templates: list[Template] = []
            for path in sorted(self.folder.glob(f"{name}.txt")):
                for line in read_text(path, MOST_BYTES).splitlines():
                    if text := line.partition("#")[0].strip():
                        templates.append(parse(text))
            if not templates:
                raise ValueError(f"{self.folder}: holds no line for the wildcard __{name}__, wanted {name}.txt")
            self._lines[name] = templates
        return self._lines[name]
