"""AUTOMATIC1111's syntax of prompts: the weights of their parts.

(more) and [less] attention by a factor of 1.1, (this much:1.3), \\( for a literal bracket, BREAK for a new chunk.
"""

import re

BREAK = "BREAK"
STOP = (BREAK, -1.0)  # BREAK's piece, which equals no text's
MOST_DEPTH = 100  # brackets open at a time
MOST_WEIGHT = 10**6

_TOKENS = re.compile(
    r"(?P<escaped>\\[\\()\[\]])|(?P<open>[(\[])|:\s*(?P<weight>[+-]?(\d+(\.\d*)?|\.\d+))\s*\)|(?P<close>[)\]])"
    r"|\s*\b(?P<stop>BREAK)\b\s*|(?P<text>(?:[^\\()\[\]:B\s]|\s+(?!BREAK\b|\s))+|.)",
    re.DOTALL,
)


def parse(text: str) -> list[tuple[str, float]]:
    """Parse A1111's syntax into (text, weight) pieces.  BREAK is a separate piece: STOP.

    As in A1111, an unclosed bracket extends to the end, and an unopened one is text.  Raises ValueError for brackets
    deeper than MOST_DEPTH, and for weights beyond MOST_WEIGHT.
    """
    pieces: list[tuple[str, float]] = []
    opened: dict[str, list[int]] = {"(": [], "[": []}  # index of each open bracket's first piece

    def multiply(first: int, factor: float) -> None:
        pieces[first:] = [piece if piece is STOP else (piece[0], piece[1] * factor) for piece in pieces[first:]]

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
            pieces.append(STOP)
        else:  # as in A1111, a backslash that escapes nothing is dropped
            pieces.append((token.removeprefix("\\"), 1.0))
    for first in opened["("]:
        multiply(first, 1.1)
    for first in opened["["]:
        multiply(first, 1 / 1.1)
    if beyond := [weight for _, weight in pieces if abs(weight) > MOST_WEIGHT]:
        raise ValueError(f"got a prompt with the weight {beyond[0]:g}, expected at most {MOST_WEIGHT}")
    merged: list[tuple[str, float]] = []
    for piece in pieces:
        if merged and merged[-1][1] == piece[1] and piece is not STOP and merged[-1] is not STOP:
            merged[-1] = (merged[-1][0] + piece[0], piece[1])
        else:
            merged.append(piece)
    return merged or [("", 1.0)]


def without_weights(text: str) -> str:
    """Return a prompt in A1111's syntax as plain text, for T5 and Qwen3, which have no chunks to BREAK into either.

    Raises ValueError for a prompt with weights.
    """
    pieces = [(" ", 1.0) if piece is STOP else piece for piece in parse(text)]
    for piece, weight in pieces:
        if weight != 1:
            raise ValueError(
                f"this model's text encoder cannot weight parts: got {piece!r:.60} with the weight {weight:g}: remove "
                "its brackets, or leave out `prompt_syntax`"
            )
    return "".join(piece for piece, _ in pieces)
