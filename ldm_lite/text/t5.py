"""T5's tokenizer, whose vocabulary is read from its checkpoint's files.  Its ids equal those of SentencePiece.

Source: Kudo and Richardson 2018, and `sentencepiece_model.proto` of SentencePiece.
"""

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, normalizers, pre_tokenizers
from tokenizers.models import Unigram

from ldm_lite.cli.files import read_bytes
from ldm_lite.text.tokenizer import TextTokenizer


@dataclass(frozen=True)
class T5Tokenizer(TextTokenizer):
    """T5's tokenizer, from its checkpoint's `spiece.model` or `tokenizer.json`: the text, </s>.

    The mask for T5Encoder is `ids != pad_id`.  Raises ValueError, one line, for any other file.
    """

    path: Path | None = None

    after = (1,)

    def _backend(self) -> Tokenizer:
        if self.path is None:
            raise ValueError("T5 needs its vocabulary: expected the path of a spiece.model or tokenizer.json")
        return _backend_of(self.path)


@cache
def _backend_of(path: Path) -> Tokenizer:
    content = read_bytes(path, 2**26)
    try:
        is_json = content[:1] == b"{"
        tokenizer = Tokenizer.from_str(content.decode("utf-8")) if is_json else _sentencepiece(content)
        if (tokenizer.token_to_id("<pad>"), tokenizer.token_to_id("</s>")) != (0, 1):
            raise ValueError("<pad> and </s> are not its first two pieces")
    except Exception as error:  # `tokenizers` raises Exception itself
        reason = str(error)[:200]
        raise ValueError(
            f"{path}: is not a spiece.model or tokenizer.json of T5 ({reason}): download it again"
        ) from error
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return tokenizer


def _sentencepiece(content: bytes) -> Tokenizer:
    """Build the tokenizer of a serialised sentencepiece ModelProto.  Raises ValueError if it is not a unigram model."""
    pieces: list[tuple[str, float]] = []
    special: list[str] = []
    unknown, charsmap = 0, b""
    for field, value in _fields(content):
        if field == 1:
            piece = dict(_fields(value))
            text, (score,), kind = piece[1].decode("utf-8"), struct.unpack("<f", piece[2]), piece.get(3, 1)
            if kind == 2:
                unknown = len(pieces)
            if kind in (2, 3):
                special.append(text)
            pieces.append((text, score))
        elif field == 2 and dict(_fields(value)).get(3, 1) != 1:
            raise ValueError("not a unigram model")
        elif field == 3:
            charsmap = dict(_fields(value)).get(2, b"")
    if not pieces:
        raise ValueError("no pieces in it")
    tokenizer = Tokenizer(Unigram(pieces, unk_id=unknown, byte_fallback=False))
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in special])
    mapped = [normalizers.Precompiled(charsmap)] if charsmap else []
    tokenizer.normalizer = normalizers.Sequence(
        [*mapped, normalizers.Replace(Regex("^ +| +$"), ""), normalizers.Replace(Regex(" {2,}"), " ")]
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always", split=True)
    return tokenizer


def _fields(message: bytes) -> Iterator[tuple[int, Any]]:
    """Yield the fields of a protobuf message: (number, int or bytes), fixed-width ones as bytes."""
    at = 0

    def varint() -> int:
        nonlocal at
        value, shift = 0, 0
        while True:
            byte = message[at]
            value, shift, at = value | (byte & 127) << shift, shift + 7, at + 1
            if byte < 128:
                return value
            if shift > 63:
                raise ValueError("a number of more than 64 bits")

    while at < len(message):
        key = varint()
        field, wire = key >> 3, key & 7
        if wire == 0:
            yield field, varint()
            continue
        size = {1: 8, 5: 4}[wire] if wire != 2 else varint()
        if at + size > len(message):
            raise ValueError("truncated")
        yield field, message[at : at + size]
        at += size
