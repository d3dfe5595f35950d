"""Turn prompts into token ids and weights, in chunks of the text encoder's length.

"plain": the text as it is, in one chunk; tokens that do not fit are dropped.  "a1111": AUTOMATIC1111's syntax, in as
many chunks as needed: (more) and [less] attention by a factor of 1.1, (this much:1.3), \\( for a literal bracket,
BREAK for a new chunk.  A full chunk ends at its last comma if that is among its last 20 tokens.  The vectors of an
embedding stay together.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ldm_lite.text.tokenizer import TextTokenizer, check_length

SYNTAXES = ("plain", "a1111")
BREAK = "BREAK"
MAX_CARRIED = 20  # tokens after the last comma that may move to the next chunk
MOST_CHUNKS = 100
MOST_DEPTH = 100  # brackets open at a time
MOST_WEIGHT = 10**6

_TOKENS = re.compile(
    r"(?P<escaped>\\[\\()\[\]])|(?P<open>[(\[])|:\s*(?P<weight>[+-]?(\d+(\.\d*)?|\.\d+))\s*\)|(?P<close>[)\]])"
    r"|\s*\b(?P<stop>BREAK)\b\s*|(?P<text>(?:[^\\()\[\]:B\s]|\s+(?!BREAK\b|\s))+|.)",
    re.DOTALL,
)


def parse(text: str) -> list[tuple[str, float]]:
    """Parse A1111's syntax into (text, weight) pieces.  BREAK is a piece of its own, with weight -1.

    As in A1111, an unclosed bracket extends to the end, and an unopened one is text.  Raises ValueError for brackets
    deeper than MOST_DEPTH, and for weights beyond MOST_WEIGHT.
    """
    pieces: list[tuple[str, float]] = []
    opened: dict[str, list[int]] = {"(": [], "[": []}  # index of each open bracket's first piece

    def multiply(first: int, factor: float) -> None:
        pieces[first:] = [(piece, weight if piece == BREAK else weight * factor) for piece, weight in pieces[first:]]

    for match in _TOKENS.finditer(text):
        token, kind = match[0], match.lastgroup
        if kind == "open":
            if len(opened["("]) + len(opened["["]) >= MOST_DEPTH:
                raise ValueError(f"got a prompt with more than {MOST_DEPTH} brackets open at a time: close some")
            opened[token].append(len(pieces))
        elif match["weight"] is not None and opened["("]:
            multiply(opened["("].pop(), float(match["weight"]))
        elif token == ")" and opened["("]:
            multiply(opened["("].pop(), 1.1)
        elif token == "]" and opened["["]:
            multiply(opened["["].pop(), 1 / 1.1)
        elif kind == "stop":
            pieces.append((BREAK, -1.0))
        else:  # as in A1111, a backslash that escapes nothing is dropped
            pieces.append((token.removeprefix("\\"), 1.0))
    for first in opened["("]:
        multiply(first, 1.1)
    for first in opened["["]:
        multiply(first, 1 / 1.1)
    if beyond := [weight for _, weight in pieces if abs(weight) > MOST_WEIGHT]:
        raise ValueError(f"got a prompt with the weight {beyond[0]:g}, wanted at most {MOST_WEIGHT}")
    return _merged(pieces) or [("", 1.0)]


def without_weights(text: str) -> str:
    """Return a prompt in A1111's syntax as plain text, for T5 and Qwen3, which have no chunks to BREAK into either.

    Raises ValueError for a prompt with weights.
    """
    pieces = [(" ", 1.0) if piece == BREAK else (piece, weight) for piece, weight in parse(text)]
    for piece, weight in pieces:
        if weight != 1:
            raise ValueError(
                f"this model's text encoder has no weights: got {piece!r:.60} with the weight {weight:g}, take its "
                "brackets out, or leave out `prompt_syntax`"
            )
    return "".join(piece for piece, _ in pieces)


def _merged(pieces: Sequence[tuple[str, float]]) -> list[tuple[str, float]]:
    merged: list[tuple[str, float]] = []
    for piece, weight in pieces:
        if merged and merged[-1][1] == weight and BREAK not in (piece, merged[-1][0]):
            merged[-1] = (merged[-1][0] + piece, weight)
        else:
            merged.append((piece, weight))
    return merged


@dataclass(frozen=True)
class Chunks:
    """A prompt for the text encoder: token ids (n,T) int64 and their weights (n,T) float32, in n chunks."""

    ids: Tensor
    weights: Tensor


def chunks(tokenizer: TextTokenizer, text: str, syntax: str = "plain") -> Chunks:
    """Split a prompt into chunks.

    Raises ValueError for an unknown syntax, text that the tokenizer refuses, and more than MOST_CHUNKS.
    """
    if syntax not in SYNTAXES:
        raise ValueError(f"unknown prompt syntax {syntax!r}: wanted one of {', '.join(SYNTAXES)}")
    if syntax == "plain":
        ids = tokenizer([tokenizer.clean(text)])
        return Chunks(ids, torch.ones(ids.shape, dtype=torch.float32, device="cpu"))
    check_length(text)
    room, comma = tokenizer.room, tokenizer.encode(",")[0]
    full: list[list[tuple[int, float]]] = [[]]
    for piece, weight in parse(text):
        if piece == BREAK:
            full.append([])
            continue
        for unit in tokenizer.units(tokenizer.clean(piece)):
            if len(full[-1]) + len(unit) > room:
                most = min(MAX_CARRIED, room - len(unit) + 1)  # fewer if an embedding needs more room
                full.append([] if unit == (comma,) else _carry(full[-1], comma, most))
            full[-1] += [(token, weight) for token in unit]
    if not full[-1] and len(full) > 1:
        full.pop()  # nothing came after the last BREAK
    if len(full) > MOST_CHUNKS:
        raise ValueError(f"got a prompt of {len(full)} chunks of {room} tokens, wanted at most {MOST_CHUNKS}")
    shape = (len(full), tokenizer.length)
    ids = torch.full(shape, tokenizer.pad_id, dtype=torch.int64, device="cpu")
    weights = torch.ones(shape, dtype=torch.float32, device="cpu")
    for i, row in enumerate(full):
        tokens = [*tokenizer.before, *(token for token, _ in row), *tokenizer.after]
        ids[i, : len(tokens)] = torch.tensor(tokens, device="cpu")
        first = len(tokenizer.before)
        weights[i, first : first + len(row)] = torch.tensor(
            [weight for _, weight in row], dtype=torch.float32, device="cpu"
        )
    return Chunks(ids, weights)


def _carry(chunk: list[tuple[int, float]], comma: int, most: int) -> list[tuple[int, float]]:
    """Remove from a full chunk the tokens after its last comma, if they are at most `most`, and return them."""
    commas = [i for i, (token, _) in enumerate(chunk) if token == comma]
    if not commas or len(chunk) - commas[-1] > most:
        return []
    carried = chunk[commas[-1] + 1 :]
    del chunk[commas[-1] + 1 :]
    return carried


def weighted(context: Tensor, weights: Tensor) -> Tensor:
    """Multiply contexts (n,T,D) by their tokens' weights (n,T), then restore the mean of each."""
    if bool((weights == 1).all()):
        return context
    scaled = context.float() * weights.to(context.device)[:, :, None]
    mean, new = (x.float().mean(dim=(1, 2), keepdim=True) for x in (context, scaled))
    return (scaled * (mean / new)).to(context.dtype)
