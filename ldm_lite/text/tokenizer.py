"""Tokenizers on the `tokenizers` library: their common base, and CLIP's.  bert.py, t5.py and qwen3.py have others.

Shapes: B texts, T = `length` tokens (77 for CLIP).
CLIP's ids equal those of transformers 5.  The originals first clean the text, which `clean` does: without it,
typographic quotes and the like get other ids.  The Unicode version of `tokenizers` decides what a letter is.
Sources: Radford et al. 2021, sec. 2.4, and `clip/simple_tokenizer.py` of OpenAI CLIP (MIT).
"""

import re
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar

import torch
from tokenizers import Tokenizer
from torch import Tensor

from ldm_lite.core.declare import MOST_CHARACTERS
from ldm_lite.core.tokenizer import END, START, clip_bpe
from ldm_lite.text.clean import fix_as_ftfy, unescape

MOST_SHOWN, LONGEST_WORD = 100, 30  # characters of the message about a text that is too long


def check_length(text: str, most: int = MOST_CHARACTERS) -> None:
    """Raises ValueError for a text of more than `most` characters."""
    if len(text) > most:
        raise ValueError(f"got a text of {len(text):,} characters, expected at most {most:,}: shorten it")


@dataclass(frozen=True)
class TextTokenizer:
    """Turns texts into rows of `length` ids: start tokens, the text's tokens, end tokens, padding.

    Immutable, so threads may share one.  Raises ValueError if `length` is too small for the start and end tokens.
    """

    length: int = 77
    pad_id: int = 0
    # Names of embeddings, case-insensitive, with their token ids, which lie beyond the vocabulary.
    added: tuple[tuple[str, tuple[int, ...]], ...] = ()

    before: ClassVar[tuple[int, ...]] = ()
    after: ClassVar[tuple[int, ...]] = ()

    def __post_init__(self) -> None:
        if self.room < 0:
            wanted = self.length - self.room
            raise ValueError(
                f"got length {self.length}, expected at least {wanted}: the start and the end take a token each"
            )
        self._backend()  # built now, so that the first image is not slower

    def _backend(self) -> Tokenizer:
        raise NotImplementedError

    def clean(self, text: str) -> str:
        """Return a prompt as the original tokenizer cleans it before anything else."""
        return text

    @property
    def room(self) -> int:
        """Number of tokens of a text that fit."""
        return self.length - len(self.before) - len(self.after)

    def __call__(self, texts: Sequence[str]) -> Tensor:
        """Return the ids (B,T) int64 of B texts; a text that is too long loses its last tokens.

        Raises ValueError for a single string, for items that are not strings, for text that is not valid Unicode, and
        for more than MOST_CHARACTERS.
        """
        if isinstance(texts, str):
            raise ValueError("got a single string, expected a list of strings: pass [text]")
        ids = torch.full((len(texts), self.length), self.pad_id, dtype=torch.int64, device="cpu")  # (B, T)
        for row, text in zip(ids, texts, strict=True):
            tokens = [*self.before, *self.encode(text)[: self.room], *self.after]
            row[: len(tokens)] = torch.tensor(tokens, device="cpu")
        return ids

    def encode(self, text: str) -> list[int]:
        """Return only a text's tokens: no start, end, truncation or padding.  Raises ValueError as a call does."""
        return [token for tokens, _ in self.units(text) for token in tokens]

    def dropped(self, text: str) -> str:
        """Return the end of the text that does not fit into `length` tokens; '' if all of it fits.

        It starts at the first character that lost a token, which may lie inside a word: in a script without spaces or
        in a row of emoji, a whole word would be most of the text.  Raises ValueError as a call does.
        """
        starts = [start for tokens, start in self.units(text) for _ in tokens]
        if len(starts) <= self.room:
            return ""
        first = starts[self.room]
        # Python strips some control characters that are tokens; the result must not be empty if tokens were dropped.
        return text[first:].strip() or text[first:]

    def too_long(self, text: str) -> str:
        """Return the message about a text that does not fit, from the cut word on; '' if all of it fits."""
        dropped = self.dropped(text)
        if not dropped:
            return ""
        start = text.rfind(dropped)
        word = max(text.rfind(space, 0, start) for space in " \n") + 1
        shown = text[word:].strip() if start - word < LONGEST_WORD else dropped
        rest = f"... ({len(shown):,} characters)" if len(shown) > MOST_SHOWN else ""
        return f"the prompt is too long, dropped: {shown[:MOST_SHOWN]}{rest}"

    def units(self, text: str) -> list[tuple[tuple[int, ...], int]]:
        """Return the units of a text, a token each or the tokens of an embedding, and where in the text each begins.

        No start, end, truncation or padding.  Raises ValueError as a call does.
        """
        if not isinstance(text, str):
            raise ValueError(f"got {type(text).__name__} among the texts, expected a list of strings")
        check_length(text)
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise ValueError(
                f"got a lone surrogate, {text[error.start]!a}, at character {error.start}, "
                "expected valid Unicode: remove it"
            ) from None
        units: list[tuple[tuple[int, ...], int]] = []
        for first, end, name in self._pieces(text) if self.added else [(0, len(text), ())]:
            if name:
                units.append((name, first))
                continue
            # encode_batch is not used: it starts threads, after which older `tokenizers` warn when a DataLoader forks
            try:
                encoding = self._backend().encode(text[first:end], add_special_tokens=False)
            except BaseException as error:
                if type(error).__name__ != "PanicException":  # a panic of Rust, which is not an Exception
                    raise
                raise ValueError("the tokenizer's vocabulary is damaged: download it again") from error
            units += [
                ((token,), first + start) for token, (start, _) in zip(encoding.ids, encoding.offsets, strict=True)
            ]
        return units

    def _pieces(self, text: str) -> Iterator[tuple[int, int, tuple[int, ...]]]:
        """Yield (begin, end, tokens) of each piece of a text, without tokens unless it is the name of an embedding.

        The longest name wins; names inside other words do not count.
        """
        longest, at = sorted(self.added, key=lambda pair: -len(pair[0])), 0
        edges = ((r"(?<!\w)" * name[0].isalnum(), name, r"(?!\w)" * name[-1].isalnum()) for name, _ in longest)
        pattern = "|".join(f"({before}{re.escape(name)}{after})" for before, name, after in edges)
        for match in re.finditer(pattern, text, re.IGNORECASE):
            assert match.lastindex is not None
            yield at, match.start(), ()
            at = match.end()
            yield match.start(), at, longest[match.lastindex - 1][1]
        yield at, len(text), ()


@dataclass(frozen=True)
class FixingCLIPTokenizer(TextTokenizer):
    """CLIP's tokenizer, padded with 49407: transformers' with ftfy, as Stable Diffusion 1 installs it."""

    pad_id: int = END

    before = (START,)
    after = (END,)  # CLIP's pooled output is taken at the first of these
    _backend = staticmethod(clip_bpe)
    _fix = staticmethod(fix_as_ftfy)

    def encode(self, text: str) -> list[int]:
        """Return only a text's tokens; tokens of short texts are cached, since training rereads captions."""
        if isinstance(text, str) and len(text) <= SHORT and text.isascii() and not self.added:
            return _encoded(self, text).tolist()
        return super().encode(text)

    def clean(self, text: str) -> str:
        """Return a prompt as ftfy fixes it, except for the names of embeddings."""
        if text.isascii() and text.isprintable() and "&" not in text:
            return text
        pieces = self._pieces(text) if self.added else [(0, len(text), ())]
        fixed = "".join(text[first:end] if name else self._fix(text[first:end]) for first, end, name in pieces)
        return fixed.lower() if "\u03a3" in fixed else fixed  # only Python knows the final sigma


SHORT = 200  # characters, of a token each at most: 100 MB for all that are remembered, 30 MB for usual captions


@lru_cache(2**16)
def _encoded(tokenizer: FixingCLIPTokenizer, text: str) -> "array[int]":
    return array("i", TextTokenizer.encode(tokenizer, text))


@dataclass(frozen=True)
class OpenCLIPTokenizer(FixingCLIPTokenizer):
    """OpenCLIP's tokenizer, padded with 0, which also unescapes HTML twice."""

    pad_id: int = 0

    _fix = staticmethod(unescape)
