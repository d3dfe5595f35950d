"""Text -> token ids: CLIP's byte-level BPE, on the `tokenizers` library.

Shapes: B texts, T = `length` tokens (77 for every CLIP).
The ids are those of transformers 5's CLIPTokenizer. The tokenizers of the original scripts first run ftfy, `str.split`
and `str.lower` over the text, and so straighten typographic quotes, unescape HTML, fold full-width letters, repair
mojibake, drop control characters and know the final sigma; here the text is taken as it is, so that texts with such
characters get other ids. Which characters are letters is decided by the Unicode version of `tokenizers`.
Sources: Radford et al. 2021, sec. 2.4; `clip/simple_tokenizer.py` of OpenAI CLIP (MIT), whose merges are
`clip_merges.txt.gz` (made by `scripts/make_vocab.py`).
"""

import gzip
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from tokenizers import Encoding, Regex, Tokenizer, normalizers, pre_tokenizers
from tokenizers.models import BPE
from torch import Tensor

SOT = 49406  # start of text
EOT = 49407  # end of text: CLIP reads its pooled output at the first of these

_MERGES = Path(__file__).with_name("clip_merges.txt.gz")
_SPECIAL = ["<|startoftext|>", "<|endoftext|>"]
_WORDS = r"<\|startoftext\|>|<\|endoftext\|>|'s|'t|'re|'ve|'m|'ll|'d|[\p{L}]+|[\p{N}]|[^\s\p{L}\p{N}]+"


@dataclass(frozen=True)
class CLIPTokenizer:
    """CLIP's tokenizer: texts -> rows of `length` ids, padded with `pad_id` (49407 for CLIP-L, 0 for OpenCLIP).

    Immutable, so threads may share one.  Raises ValueError if there is no room for the start and the end.
    """

    length: int = 77
    pad_id: int = EOT

    def __post_init__(self) -> None:
        if self.length < 2:
            raise ValueError(f"got length {self.length}, wanted at least 2: the start and the end take a token each")
        _load()  # here, and not inside the first call, so that the first image is not the slow one

    def __call__(self, texts: Sequence[str]) -> Tensor:
        """B texts -> ids (B,T) int64: start, tokens, end, padding; a text that is too long loses its last tokens.

        Raises ValueError for a single string, for what is no string, and for text that is not valid Unicode.
        """
        if isinstance(texts, str):
            raise ValueError("got a single string, wanted a list of strings: pass [text]")
        ids = torch.full((len(texts), self.length), self.pad_id, dtype=torch.int64)  # (B, T)
        for row, text in zip(ids, texts, strict=True):
            tokens = [SOT, *_encode(text).ids[: self.length - 2], EOT]
            row[: len(tokens)] = torch.tensor(tokens)
        return ids

    def encode(self, text: str) -> list[int]:
        """A text's tokens alone: no start, end, truncation or padding.  Raises ValueError as a call does."""
        return list(_encode(text).ids)

    def dropped(self, text: str) -> str:
        """The end of the text, as it was written, that does not fit into `length` tokens; '' if all of it fits.

        It begins with the first character that lost a token, which may lie inside a word: in a script without spaces
        or in a row of emoji a whole word would be most of the text.  Raises ValueError as a call does.
        """
        encoding = _encode(text)
        room = self.length - 2
        if len(encoding.ids) <= room:
            return ""
        first, _ = encoding.offsets[room]
        # Python strips some control characters that are tokens: what was dropped must not look as if all had fitted.
        return text[first:].strip() or text[first:]


def _encode(text: str) -> Encoding:
    """One text -> its tokens and their offsets in it, without start, end, truncation or padding.

    One text at a time: encode_batch starts threads, after which older `tokenizers` warn at a fork (a DataLoader's).
    """
    if not isinstance(text, str):
        raise ValueError(f"got {type(text).__name__} among the texts, wanted a list of strings")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError(
            f"got a lone surrogate, {text[error.start]!a}, at character {error.start}, wanted valid Unicode: remove it"
        ) from None
    return _load().encode(text, add_special_tokens=False)


@cache
def _load() -> Tokenizer:
    """CLIP's normalisation, word splitting and BPE, in 0.1 s; nothing may change it, for everyone shares it."""
    _, *lines = gzip.decompress(_MERGES.read_bytes()).decode("utf-8").splitlines()  # the first line is the licence
    # By code point: OpenAI's order, because bytes that are no printable character stand at 256 and above.
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = [*alphabet, *(f"{byte}</w>" for byte in alphabet), *(line.replace(" ", "") for line in lines), *_SPECIAL]
    vocab = {token: index for index, token in enumerate(tokens)}
    assert len(vocab) == EOT + 1, "clip_merges.txt.gz is not what scripts/make_vocab.py writes"

    merges = [(left, right) for left, right in map(str.split, lines)]
    tokenizer = Tokenizer(BPE(vocab=vocab, merges=merges, end_of_word_suffix="</w>"))
    tokenizer.add_special_tokens(_SPECIAL)  # found in the text as written, before it is normalised
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.NFC(), normalizers.Replace(Regex(r"\s+"), " "), normalizers.Lowercase()]
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            # Inverted: the matches are kept and what lies between them, white space, is removed.
            pre_tokenizers.Split(Regex(_WORDS), behavior="removed", invert=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    return tokenizer
