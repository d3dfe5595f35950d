"""The words that a text encoder was trained on, as a file's metadata list them: `python -m ldm_lite.core.words [FILE]`.

Other words mean nothing to it, and a model warns about them.  This prints those that it knows, a line for each thing.
"""

import argparse
import difflib
import functools
import itertools
import re
import sys
from dataclasses import replace
from pathlib import Path

from torch import Tensor

from ldm_lite.core.family import PREFIX
from ldm_lite.core.files import Tensors, bundled, open_tensors

# Letters, a number, or one other character that is not punctuation, such as an emoji.
WORD = re.compile(r"[^\W\d_]+|\d+|[^\w\s\x00-\x7f\ufe0f\u200d\u2010-\u2027]")
MOST_UNKNOWN = 5
NUMBER_WORD = re.compile(r"\d+|one|two|three|four|five|six|seven|eight|nine|ten|eleven|twelve|dozen")


@functools.lru_cache(maxsize=8)
def _known(words: str) -> frozenset[str]:
    """Return the words of a list; of numbers those that stand alone, and others with the word after them: "8 ball"."""
    known = set(WORD.findall(words.lower()))
    for number in filter(NUMBER_WORD.fullmatch, tuple(known)):
        known |= {f"{number} {word}" for word in re.findall(rf"\b{number}\W+(\w+)", words.lower())}
        if not re.search(rf"(^|[,:\n] *){number} *(,|\n|$)", words.lower()):
            known.remove(number)
    return frozenset(known)


def unknown_words(text: str, words: str) -> str:
    """Say which words of a text are not in a list, and which are spelled like them; "" if there is no list, or none."""
    known = _known(words)
    pairs = itertools.pairwise([*WORD.findall(text), ""])
    outside = (word for word, after in pairs if known.isdisjoint({word.lower(), f"{word} {after}".lower()}))
    unknown = list(dict.fromkeys(outside))
    if not known or not unknown:
        return ""
    named = ", ".join(map(repr, unknown[:MOST_UNKNOWN])) + ", ..." * (len(unknown) > MOST_UNKNOWN)
    words_alone = [word for word in known if " " not in word]
    spelled = [word.lower() for word in unknown[:MOST_UNKNOWN] if not NUMBER_WORD.fullmatch(word.lower())]
    alike = (difflib.get_close_matches(word, words_alone, n=2, cutoff=0.75) for word in spelled)
    nearest = ", ".join(dict.fromkeys(word for words_alike in alike for word in words_alike))
    hint = f"; nearest: {nearest}" if nearest else ""
    advice = f"`python -m {__package__}.words` lists what it knows"
    return f"was not trained with {named}, which mean nothing to it{hint}; {advice}"


def main() -> int:
    """Print the words of a file, or of the bundled model; return the exit code."""
    parser = argparse.ArgumentParser(f"python -m {__package__}.words", description=__doc__)
    parser.add_argument("file", nargs="?", type=Path, help="checkpoint (default: the bundled model)")
    path = parser.parse_args().file or bundled()
    try:
        metadata = open_tensors(path).metadata
    except (ValueError, OSError) as error:
        print(f"{__package__}.words: {error}", file=sys.stderr)
        return 1
    print(metadata.get(f"{PREFIX}words") or metadata.get("words") or f"{path}: lists no words: it may know any")
    return 0


# ---- tables of which a file holds the learned rows ------------------------------------------------------------------
# A model that was trained on few words has learned few of CLIP's 49408 token vectors: its file holds these rows alone,
# and their numbers.

# (N,): the numbers of the rows that token_embedding.weight (N,D) holds; others are zero.
ROW_NUMBERS = "token_embedding.rows"
MOST_ROWS = 2**20


def whole_tables(tensors: Tensors) -> Tensors:
    """Return a file's tensors with its token tables as networks have them, up to the last row that the file holds.

    Raises ValueError, one line, unless the rows' numbers are there and ascend from 0 or more.
    """
    shapes, numbers = dict(tensors.shapes), {}
    for key in [key for key in tensors if key.endswith(ROW_NUMBERS)]:
        table, rows = key.removesuffix("rows") + "weight", tensors[key].long()
        height, *width = shapes.get(table) or (0,)
        is_rising = rows.shape == (height,) and height > 0 and rows[0] >= 0 and bool((rows.diff() > 0).all())
        if len(width) != 1 or not is_rising or rows[-1] >= MOST_ROWS:
            raise ValueError(f"in {tensors.path.name} the row numbers of {table} do not ascend: download it again")
        del shapes[key]
        shapes[table], numbers[table] = (int(rows[-1]) + 1, *width), rows

    def read(key: str) -> Tensor:
        values = tensors.read(key)
        return values.new_zeros(shapes[key]).index_copy(0, numbers[key], values) if key in numbers else values

    return replace(tensors, shapes=shapes, read=read)


if __name__ == "__main__":
    sys.exit(main())
