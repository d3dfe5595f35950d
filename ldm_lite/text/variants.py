"""Templates of prompts: `{red|blue} car`, `{2$$a|b|c}`, `__colour__`.

Variants are in braces: `{3::a|b}` takes a three times as often, `{2$$a|b|c}` takes two of them, `{1-2$$ and $$a|b|c}`
one or two with " and " between (default ","), and variants may hold others.  `__name__` is a line of name.txt in the
folder of wildcards, which may be a template too; `*` in a name matches any text, `#` begins a comment.  A backslash
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
from ldm_lite.core.declare import MOST_CHARACTERS

MOST_PROMPTS = 10_000  # of one template
MOST_TEXT = 10**7  # characters of them all
MOST_DEPTH = 20  # braces and wildcards inside each other
MOST_BYTES = 2**24  # of a wildcard's files
MOST_LINES = 250_000
MOST_NAME = 100  # characters, of a wildcard
_HEAD = re.compile(r"(?!\$)\s*+(\d{0,4})(?:(-)(\d{0,4}))?\s*+\$\$(?:((?:\\.|[^\\{}|$]|\$(?!\$))*)\$\$)?")
_WEIGHT = re.compile(r"\s*+(\d{1,9}(?:\.\d*)?|\.\d+)\s*+::")
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
AnyOptions = Sequence[tuple[float, Template]]  # with their weights


# ---- reading --------------------------------------------------------------------------------------------------------


def parse(text: str) -> Template:
    """Parse a template.  Raises ValueError, one line, for braces that do not match and counts that fit no variants."""
    template, end = _sequence(text, 0, 0)
    if end < len(text):
        raise ValueError(f"{_shown(text)}: has a closing brace without an opening one (a literal one is \\}})")
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
        raise ValueError(f"a template has braces {depth} deep, expected at most {MOST_DEPTH}")
    options, head = [], _HEAD.match(text, start)
    at = start if head is None else head.end()
    while True:
        weight = _WEIGHT.match(text, at)
        option, at = _sequence(text, at if weight is None else weight.end(), depth)
        if weight is not None and option and not isinstance(option[0], str):
            option = ("", *option)  # a wildcard with a weight is one option: its lines are not separate ones
        options.append((1.0 if weight is None else float(weight[1]), option))
        if at == len(text):
            opened = _shown(text[start - 1 :])
            raise ValueError(f"{opened}: has an opening brace without a closing one (a literal one is \\{{)")
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
        wanted = "expected a number, or from a smaller to a larger one"
        raise ValueError(f"a template takes {first}-{last} variants, {wanted}")
    between = "," if between is None else re.sub(r"\\(.)", r"\1", between)
    return Variants(tuple(options), min(least, count), min(most, count), between), at


def _wildcard(options: AnyOptions) -> Wildcard | None:
    """Return the only option if it is a wildcard, whose lines are then the options."""
    only = options[0][1]
    return only[0] if len(options) == 1 and len(only) == 1 and isinstance(only[0], Wildcard) else None


# ---- making prompts -------------------------------------------------------------------------------------------------


class Prompts:
    """Makes prompts from templates, with the wildcards of a folder."""

    def __init__(self, folder: Path | None) -> None:
        """Raises ValueError if the folder is not one."""
        if folder is not None and not folder.is_dir():
            raise ValueError(f"{folder}: is not a folder: give one with files NAME.txt")
        self.folder = folder
        self._lines: dict[str, AnyOptions] = {}
        self._sizes: dict[tuple[str, int], tuple[int, int]] = {}

    def one(self, text: str, seed: int) -> str:
        """Return the prompt that a seed draws from a template.

        Raises ValueError, one line, for one of more than MOST_CHARACTERS; OSError.
        """
        texts, length = [], 0
        for piece in self._draw(parse(text), random.Random(seed), 0):
            texts.append(piece)
            length += 1 + len(piece)
            if length > 2 * MOST_CHARACTERS:  # and as many pieces
                raise ValueError(
                    f"{_shown(text)}: makes a prompt of more than {MOST_CHARACTERS} characters: shorten it"
                )
        return "".join(texts)

    def all(self, text: str) -> list[str]:
        """Return every prompt of a template, counted before any is made.

        Raises ValueError, one line, for more than MOST_PROMPTS or MOST_TEXT; OSError.
        """
        template = parse(text)
        try:
            self._size(template, 0)
        except OverflowError:
            raise ValueError(
                f"{_shown(text)}: makes more than {MOST_PROMPTS} prompts, or {MOST_TEXT} characters: draw some, "
                "`dynamic=random`"
            ) from None
        return list(self._every(template, 0))

    def _draw(self, template: Template, source: random.Random, depth: int) -> Iterator[str]:
        for part in template:
            if isinstance(part, str):
                yield part
                continue
            options, least, most, between = self._options(part, depth)
            number = source.randint(least, most)
            if number > MOST_CHARACTERS:
                raise ValueError(f"a template takes {number} variants, expected at most {MOST_CHARACTERS}")
            left, taken = [*options], list[Template]()
            has_weights = isinstance(part, Variants) and options is part.options  # lines of wildcards have no weights
            weights = [weight for weight, _ in options] if has_weights else []
            for _ in range(number):
                [place] = source.choices(range(len(left)), weights if any(weights) else None)
                taken.append(left.pop(place)[1])
                del weights[place : place + 1]
            for i, option in enumerate(taken):
                yield between if i else ""
                yield from self._draw(option, source, depth + 1)

    def _size(self, template: Template, depth: int) -> tuple[int, int]:
        """How many prompts a template makes, and their characters in all.  Raises OverflowError if these are too many.

        No part makes more than the whole: each is used in at least one prompt.
        """
        prompts, characters = 1, 0
        for part in template:
            size = (1, len(part)) if isinstance(part, str) else self._size_of_choices(part, depth)
            prompts, characters = _product((prompts, characters), size)
        return prompts, characters

    def _size_of_choices(self, part: Wildcard | Variants, depth: int) -> tuple[int, int]:
        if isinstance(part, Wildcard) and (part.name, depth) in self._sizes:
            return self._sizes[part.name, depth]
        options, least, most, between = self._options(part, depth)
        _checked(math.perm(len(options), min(most, MOST_DEPTH)), 0)
        sums = [(1, 0)] + [(0, 0)] * most  # of the products of so many options
        for _, option in options if most else ():
            size = self._size(option, depth + 1)
            for number in range(most, 0, -1):
                more = _product(sums[number - 1], size)
                sums[number] = _checked(sums[number][0] + more[0], sums[number][1] + more[1])
        prompts = characters = 0
        for number in range(least, most + 1):  # in every order
            orders, (count, length) = math.factorial(number), sums[number]
            length += count * len(between) * max(0, number - 1)
            prompts, characters = _checked(prompts + orders * count, characters + orders * length)
        if isinstance(part, Wildcard):
            self._sizes[part.name, depth] = prompts, characters
        return prompts, characters

    def _every(self, template: Template, depth: int) -> Iterator[str]:
        parts = [[part] if isinstance(part, str) else list(self._choices(part, depth)) for part in template]
        yield from map("".join, itertools.product(*parts))

    def _choices(self, part: Wildcard | Variants, depth: int) -> Iterator[str]:
        options, least, most, between = self._options(part, depth)
        for number in range(least, most + 1):
            for taken in itertools.permutations([option for _, option in options], number):
                for texts in itertools.product(*(list(self._every(option, depth + 1)) for option in taken)):
                    yield between.join(texts)

    def _options(self, part: Wildcard | Variants, depth: int) -> tuple[AnyOptions, int, int, str]:
        if depth > MOST_DEPTH:
            raise ValueError(f"a template is nested more than {MOST_DEPTH} deep: does a wildcard contain itself?")
        if isinstance(part, Wildcard):
            return self.lines(part.name), 1, 1, ""
        options: AnyOptions = part.options
        if wildcard := _wildcard(options):
            options = self.lines(wildcard.name)
        return options, min(part.least, len(options)), min(part.most, len(options)), part.between

    def lines(self, name: str) -> AnyOptions:
        """Return the lines of a wildcard, parsed, of weight 1.

        Raises ValueError if there is none, or for more than MOST_BYTES or MOST_LINES; OSError.
        """
        if name not in self._lines:
            if len(name) > MOST_NAME:
                raise ValueError(f"got the wildcard __{name[:40]}..., expected at most {MOST_NAME} characters")
            if self.folder is None:
                raise ValueError(f"got the wildcard __{name}__ but no folder: give one with `wildcards=DIR`")
            if ".." in Path(name).parts or Path(name).is_absolute():
                raise ValueError(f"got the wildcard __{name}__, expected a name inside {self.folder}")
            options: list[tuple[float, Template]] = []
            left = MOST_BYTES
            pattern = re.sub(r"(\*\*/)+", "**/", name)  # several of them would take quadratic time
            for path in sorted(self.folder.glob(f"{pattern}.txt")):
                content = read_text(path, left)
                left -= len(content)
                options += [
                    (1.0, parse(text)) for line in content.splitlines() if (text := line.partition("#")[0].strip())
                ]
                if len(options) > MOST_LINES:
                    raise ValueError(f"{path}: has more than {MOST_LINES} lines for the wildcard __{name}__")
            if not options:
                raise ValueError(f"{self.folder}: holds no line for the wildcard __{name}__, expected {name}.txt")
            self._lines[name] = options
        return self._lines[name]


def _product(first: tuple[int, int], second: tuple[int, int]) -> tuple[int, int]:
    """The prompts and characters of each text of the first followed by each of the second."""
    return _checked(first[0] * second[0], first[1] * second[0] + first[0] * second[1])


def _checked(prompts: int, characters: int) -> tuple[int, int]:
    if prompts > MOST_PROMPTS or characters > MOST_TEXT:
        raise OverflowError
    return prompts, characters
