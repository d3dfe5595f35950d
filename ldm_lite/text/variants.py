"""Templates of prompts: `{red|blue} car`, `{2$$a|b|c}`, `__colour__`.

Variants stand in braces: `{3::a|b}` takes a three times as often, `{2$$a|b|c}` takes two of them, `{1-2$$ and $$a|b|c}`
one or two with " and " between (default ","), and variants may hold others.  `__name__` is a line of name.txt in the
folder of wildcards, which may be a template too; `*` in a name stands for any text, `#` begins a comment.  A backslash
before a brace or an underscore makes it an ordinary character.

The syntax is that of adieyal's dynamicprompts, which has more (variables, samplers).
"""

import itertools
import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from ldm_lite.cli.files import read_text

MOST_PROMPTS = 10_000  # of one template
MOST_DEPTH = 20  # braces and wildcards inside each other
MOST_BYTES = 2**24  # of a file of wildcards
_COUNT = re.compile(r"\s*(\d{0,4})(?:(-)(\d{0,4}))?\s*")
_WEIGHT = re.compile(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*::")
_PIECES = re.compile(r"\\[{}|\\_$]|\$\$|[{}|]|__((?:(?!__)[\w*/.-])+)__|[^\\{}|_$]+|.", re.DOTALL)


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
    pieces = [(match[0], match[1]) for match in _PIECES.finditer(text)]
    found, end = _sequence(pieces, 0, 0)
    if end < len(pieces):
        raise ValueError(f"{_shown(text)}: has a closing brace without its opening one (a literal one is \\}})")
    return found


def _shown(text: str) -> str:
    return f"the template {text[:60]!r}"


def _sequence(pieces: Sequence[tuple[str, str | None]], at: int, depth: int) -> tuple[Template, int]:
    """Parse up to the end of an option, and return where that is."""
    parts: list[str | Wildcard | Variants] = []
    while at < len(pieces):
        piece, name = pieces[at]
        if depth and piece in ("|", "}"):
            break
        if piece == "}":
            break
        at += 1
        if piece == "{":
            part, at = _variants(pieces, at, depth + 1)
            parts.append(part)
        elif name is not None:
            parts.append(Wildcard(name))
        else:
            parts.append(piece[1:] if piece[0] == "\\" and len(piece) == 2 else piece)
    return tuple(parts), at


def _variants(pieces: Sequence[tuple[str, str | None]], at: int, depth: int) -> tuple[Variants, int]:
    if depth > MOST_DEPTH:
        raise ValueError(f"a template has braces {depth} deep, wanted at most {MOST_DEPTH}")
    options, head, first = [], [], at
    while True:
        option, at = _sequence(pieces, at, depth)
        options.append(option)
        if at == len(pieces):
            text = "".join(piece for piece, _ in pieces[first - 1 :])
            raise ValueError(f"{_shown(text)}: has an opening brace without its closing one (a literal one is \\{{)")
        at += 1
        if pieces[at - 1][0] == "}":
            break
    whole = options[0]
    if "$$" in whole and isinstance(whole[0], str) and _COUNT.fullmatch(str(whole[0])):
        head = ["".join(map(str, each)) for each in _split(whole, "$$")[:-1]][:2]
        options[0] = _split(whole, "$$")[-1]
    least, most = _bounds(head[0], len(options), options) if head else (1, 1)
    return Variants(tuple(map(_weighted, options)), least, most, head[1] if len(head) > 1 else ","), at


def _split(parts: Template, mark: str) -> list[Template]:
    """Split at the first two marks."""
    places = [i for i, part in enumerate(parts) if part == mark][:2]
    edges = zip([-1, *places], [*places, len(parts)], strict=True)
    return [parts[begin + 1 : end] for begin, end in edges]


def _bounds(text: str, count: int, options: Sequence[Template]) -> tuple[int, int]:
    match = _COUNT.fullmatch(text)
    assert match is not None
    first, dash, last = match.groups()
    all_of_them = MOST_PROMPTS if _is_wildcard(options) else count
    least = int(first) if first else 1
    most = (int(last) if last else all_of_them) if dash else least
    if least > most:
        raise ValueError(
            f"a template takes {text.strip()} variants, wanted a number, or from a smaller to a larger one"
        )
    return min(least, all_of_them), min(most, all_of_them)


def _is_wildcard(options: Sequence[Template]) -> bool:
    return len(options) == 1 and len(options[0]) == 1 and isinstance(options[0][0], Wildcard)


def _weighted(option: Template) -> tuple[float, Template]:
    if option and isinstance(option[0], str) and (match := _WEIGHT.match(option[0])):
        return float(match[1]), (option[0][match.end() :], *option[1:])
    return 1.0, option


# ---- making prompts -------------------------------------------------------------------------------------------------


class Prompts:
    """Makes prompts of templates, with the wildcards of a folder."""

    def __init__(self, folder: Path | None) -> None:
        """Raises ValueError if the folder is not one."""
        if folder is not None and not folder.is_dir():
            raise ValueError(f"{folder}: is no folder, wanted one with wildcards NAME.txt")
        self.folder = folder
        self._lines: dict[str, list[Template]] = {}

    def one(self, text: str, seed: int) -> str:
        """Return the prompt that a seed takes of a template.  Raises ValueError, one line; OSError."""
        return self._draw(parse(text), random.Random(seed), 0)

    def all(self, text: str) -> list[str]:
        """Return every prompt of a template.  Raises ValueError, one line, for more than MOST_PROMPTS; OSError."""
        found = list(itertools.islice(self._every(parse(text), 0), MOST_PROMPTS + 1))
        if len(found) > MOST_PROMPTS:
            raise ValueError(f"{_shown(text)}: makes more than {MOST_PROMPTS} prompts: draw some, `dynamic=random`")
        return found

    def _draw(self, template: Template, source: random.Random, depth: int) -> str:
        made = []
        for part in template:
            if isinstance(part, str):
                made.append(part)
                continue
            options, least, most, between = self._options(part, depth)
            left, taken = list(options), []
            for _ in range(source.randint(least, most)):
                weights = [weight for weight, _ in left] if any(weight for weight, _ in left) else None
                [place] = source.choices(range(len(left)), weights)
                taken.append(left.pop(place)[1])
            made.append(between.join(self._draw(each, source, depth + 1) for each in taken))
        return "".join(made)

    def _every(self, template: Template, depth: int) -> Iterator[str]:
        parts = [
            [part] if isinstance(part, str) else list(itertools.islice(self._choices(part, depth), MOST_PROMPTS + 1))
            for part in template
        ]
        yield from map("".join, itertools.product(*parts))

    def _choices(self, part: Wildcard | Variants, depth: int) -> Iterator[str]:
        options, least, most, between = self._options(part, depth)
        for number in range(least, most + 1):
            for taken in itertools.permutations([option for _, option in options], number):
                for texts in itertools.product(*(list(self._every(each, depth + 1)) for each in taken)):
                    yield between.join(texts)

    def _options(self, part: Wildcard | Variants, depth: int) -> tuple[Sequence[tuple[float, Template]], int, int, str]:
        if depth > MOST_DEPTH:
            raise ValueError(f"a template goes more than {MOST_DEPTH} deep: does a wildcard hold itself?")
        if isinstance(part, Wildcard):
            return [(1.0, line) for line in self.lines(part.name)], 1, 1, ""
        options: Sequence[tuple[float, Template]] = part.options
        inner = options[0][1]
        if len(options) == 1 and len(inner) == 1 and isinstance(inner[0], Wildcard):
            options = [(1.0, line) for line in self.lines(inner[0].name)]
        return options, min(part.least, len(options)), min(part.most, len(options)), part.between

    def lines(self, name: str) -> list[Template]:
        """Return the lines of a wildcard, parsed.  Raises ValueError if there is none; OSError."""
        if name not in self._lines:
            if self.folder is None:
                raise ValueError(f"got the wildcard __{name}__ but no folder: give one with `wildcards=DIR`")
            if ".." in Path(name).parts or Path(name).is_absolute():
                raise ValueError(f"got the wildcard __{name}__, wanted a name inside {self.folder}")
            found: list[Template] = []
            for path in sorted(self.folder.glob(f"{name}.txt")):
                for line in read_text(path, MOST_BYTES).splitlines():
                    if text := line.partition("#")[0].strip():
                        found.append(parse(text))
            if not found:
                raise ValueError(f"{self.folder}: holds no line for the wildcard __{name}__, wanted {name}.txt")
            self._lines[name] = found
        return self._lines[name]
