"""Prompts -> token ids and weights, in chunks of what the text encoder takes at a time.

"plain": the text is the text, one chunk, and what does not fit is dropped.  "a1111": AUTOMATIC1111's syntax, with as
many chunks as needed: (more) and [less] attention by 1.1, (this much:1.3), \\( for a bracket itself, BREAK for a new
chunk; a chunk that ends within 20 tokens of a comma ends there.  The vectors of an embedding stay together.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ldm_lite.text.tokenizer import TextTokenizer

SYNTAXES = ("plain", "a1111")
BREAK = "BREAK"
MOST_BACK = 20  # tokens from a comma to the end of a chunk

_TOKENS = re.compile(
    r"(?P<escaped>\\[\\()\[\]])|(?P<open>[(\[])|:\s*(?P<weight>[+-]?(\d+\.?\d*|\.\d+))\s*\)|(?P<close>[)\]])"
    r"|\s*\b(?P<stop>BREAK)\b\s*|(?P<text>[^\\()\[\]:B]+|.)",
    re.DOTALL,
)


def parse(text: str) -> list[tuple[str, float]]:
    """A1111's syntax -> pieces of text with their weights; BREAK is a piece of its own, with weight -1.

    A bracket that is never closed counts to the end, as there; one that was never opened is text.
    """
    pieces: list[tuple[str, float]] = []
    opened: dict[str, list[int]] = {"(": [], "[": []}  # where each open bracket's first piece is

    def multiply(first: int, factor: float) -> None:
        pieces[first:] = [(piece, weight if piece == BREAK else weight * factor) for piece, weight in pieces[first:]]

    for match in _TOKENS.finditer(text):
        token, kind = match[0], match.lastgroup
        if kind == "open":
            opened[token].append(len(pieces))
        elif match["weight"] is not None and opened["("]:
            multiply(opened["("].pop(), float(match["weight"]))
        elif token == ")" and opened["("]:
            multiply(opened["("].pop(), 1.1)
        elif token == "]" and opened["["]:
            multiply(opened["["].pop(), 1 / 1.1)
        elif kind == "stop":
            pieces.append((BREAK, -1.0))
        else:  # a backslash that escapes nothing is left out, as there
            pieces.append((token.removeprefix("\\"), 1.0))
    for first in opened["("]:
        multiply(first, 1.1)
    for first in opened["["]:
        multiply(first, 1 / 1.1)
    return _merged(pieces) or [("", 1.0)]


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
    """A prompt for the text encoder: ids (n,T) and the weight of each token (n,T)."""

    ids: Tensor
    weights: Tensor


def chunks(tokenizer: TextTokenizer, text: str, syntax: str = "plain") -> Chunks:
    """A prompt -> its chunks.  Raises ValueError for an unknown syntax, and for text that the tokenizer refuses."""
    if syntax not in SYNTAXES:
        raise ValueError(f"unknown prompt syntax {syntax!r}: wanted one of {', '.join(SYNTAXES)}")
    if syntax == "plain":
        ids = tokenizer([text])
        return Chunks(ids, torch.ones(ids.shape, dtype=torch.float32, device="cpu"))
    room, comma = tokenizer.room, tokenizer.encode(",")[0]
    full: list[list[tuple[int, float]]] = [[]]
    for piece, weight in parse(text):
        if piece == BREAK:
            full.append([])
            continue
        for unit in tokenizer.units(piece):
            if len(full[-1]) + len(unit) > room:
                most = min(MOST_BACK, room - len(unit) + 1)  # less, if an embedding needs more of the chunk
                full.append([] if unit == (comma,) else _carried(full[-1], comma, most))
            full[-1] += [(token, weight) for token in unit]
    if not full[-1] and len(full) > 1:
        full.pop()  # nothing came after the last BREAK
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


def _carried(chunk: list[tuple[int, float]], comma: int, most: int) -> list[tuple[int, float]]:
    """What a full chunk hands to the next: all after its last comma, if that is near enough to its end."""
    commas = [i for i, (token, _) in enumerate(chunk) if token == comma]
    if not commas or len(chunk) - commas[-1] > most:
        return []
    carried = chunk[commas[-1] + 1 :]
    del chunk[commas[-1] + 1 :]
    return carried


def weighted(context: Tensor, weights: Tensor) -> Tensor:
    """Contexts (n,T,D) times their tokens' weights (n,T), scaled back to the mean that each had."""
    if bool((weights == 1).all()):
        return context
    scaled = context.float() * weights.to(context.device)[:, :, None]
    mean, new = (x.float().mean(dim=(1, 2), keepdim=True) for x in (context, scaled))
    return (scaled * (mean / new)).to(context.dtype)
