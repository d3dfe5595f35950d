"""Tokenizers on the `tokenizers` library: CLIP's and Qwen's byte-level BPE, BERT's WordPiece, T5's SentencePiece.

Shapes: B texts, T = `length` tokens (77 for all of these).
The vocabularies of CLIP and BERT are in this folder (made by `scripts/make_vocab.py`); T5's and Qwen3's are read from
their checkpoints' files.  The ids of CLIP, BERT and Qwen3 equal those of transformers 5, T5's those of SentencePiece.
CLIP's originals first clean the text, which `clean` does: without it, typographic quotes and the like get other ids.
The Unicode version of `tokenizers` decides what a letter is.
Sources: Radford et al. 2021, sec. 2.4, and `clip/simple_tokenizer.py` of OpenAI CLIP (MIT); Devlin et al. 2019 and
bert-base-uncased (Apache-2.0); Kudo and Richardson 2018, and `sentencepiece_model.proto` of SentencePiece.
"""

import gzip
import json
import re
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import torch
from tokenizers import AddedToken, Regex, Tokenizer, normalizers, pre_tokenizers
from tokenizers.models import BPE, Unigram, WordPiece
from torch import Tensor

from ldm_lite.cli.files import read_bytes
from ldm_lite.cli.options import MOST_CHARACTERS
from ldm_lite.core.tokenizer import END, START, clip_bpe
from ldm_lite.text.clean import fix_text, unescape

_BERT_VOCAB = Path(__file__).with_name("bert_vocab.txt.gz")
_QWEN3_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SAID, ANSWERED = "<|im_start|>user\n", "<|im_end|>\n<|im_start|>assistant\n"
WITHOUT_THINKING = "<think>\n\n</think>\n\n"
QWEN3_SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
QWEN3_FURTHER = (  # which follow in Qwen's vocabulary
    *("<|object_ref_start|>", "<|object_ref_end|>", "<|box_start|>", "<|box_end|>", "<|quad_start|>", "<|quad_end|>"),
    *("<|vision_start|>", "<|vision_end|>", "<|vision_pad|>", "<|image_pad|>", "<|video_pad|>"),
)
IMAGE = "<|image_pad|>"  # a token of an image


def check_length(text: str, most: int = MOST_CHARACTERS) -> None:
    """Raises ValueError for a text of more than `most` characters."""
    if len(text) > most:
        raise ValueError(f"got a text of {len(text):,} characters, wanted at most {most:,}: shorten it")


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
                f"got length {self.length}, wanted at least {wanted}: the start and the end take a token each"
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
            raise ValueError("got a single string, wanted a list of strings: pass [text]")
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

    def units(self, text: str) -> list[tuple[tuple[int, ...], int]]:
        """Return the units of a text, a token each or the tokens of an embedding, and where in the text each begins.

        No start, end, truncation or padding.  Raises ValueError as a call does.
        """
        if not isinstance(text, str):
            raise ValueError(f"got {type(text).__name__} among the texts, wanted a list of strings")
        check_length(text)
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise ValueError(
                f"got a lone surrogate, {text[error.start]!a}, at character {error.start}, "
                "wanted valid Unicode: remove it"
            ) from None
        units: list[tuple[tuple[int, ...], int]] = []
        for first, end, name in self._pieces(text):
            if name:
                units.append((name, first))
                continue
            # encode_batch is not used: it starts threads, after which older `tokenizers` warn when a DataLoader forks
            try:
                encoding = self._backend().encode(text[first:end], add_special_tokens=False)
            except BaseException as error:
                if type(error).__name__ != "PanicException":  # a panic of Rust, which is no Exception
                    raise
                raise ValueError("the tokenizer's vocabulary is damaged: download it again") from error
            units += [
                ((token,), first + start) for token, (start, _) in zip(encoding.ids, encoding.offsets, strict=True)
            ]
        return units

    def _pieces(self, text: str) -> Iterator[tuple[int, int, tuple[int, ...]]]:
        """Yield (begin, end, tokens) of each piece of a text, without tokens unless it is the name of an embedding.

        The longest name counts, and none inside another word.
        """
        at = 0
        if self.added:
            longest = sorted(self.added, key=lambda pair: -len(pair[0]))
            edges = ((r"(?<!\w)" * name[0].isalnum(), name, r"(?!\w)" * name[-1].isalnum()) for name, _ in longest)
            pattern = "|".join(f"({before}{re.escape(name)}{after})" for before, name, after in edges)
            for match in re.finditer(pattern, text, re.IGNORECASE):
                assert match.lastindex is not None
                yield at, match.start(), ()
                at = match.end()
                yield match.start(), at, longest[match.lastindex - 1][1]
        yield at, len(text), ()


@dataclass(frozen=True)
class CLIPTokenizer(TextTokenizer):
    """CLIP's tokenizer, padded with 49407: transformers' with ftfy, as Stable Diffusion 1 installs it."""

    pad_id: int = END

    before = (START,)
    after = (END,)  # CLIP's pooled output is taken at the first of these
    _backend = staticmethod(clip_bpe)
    _fix = staticmethod(fix_text)

    def clean(self, text: str) -> str:
        """Return a prompt as ftfy fixes it, except for the names of embeddings."""
        if text.isascii() and text.isprintable() and "&" not in text:
            return text
        pieces = self._pieces(text)
        fixed = "".join(text[first:end] if name else self._fix(text[first:end]) for first, end, name in pieces)
        return fixed.lower() if "\u03a3" in fixed else fixed  # only Python knows the final sigma


@dataclass(frozen=True)
class OpenCLIPTokenizer(CLIPTokenizer):
    """OpenCLIP's tokenizer, padded with 0, which also unescapes HTML twice."""

    pad_id: int = 0

    _fix = staticmethod(unescape)


@dataclass(frozen=True)
class BERTTokenizer(TextTokenizer):
    """bert-base-uncased's tokenizer, of LDM's text-to-image models: [CLS], the text, [SEP]."""

    before = (101,)
    after = (102,)

    def _backend(self) -> Tokenizer:
        return _bert()


@dataclass(frozen=True)
class T5Tokenizer(TextTokenizer):
    """T5's tokenizer, from its checkpoint's `spiece.model` or `tokenizer.json`: the text, </s>.

    The mask for T5Encoder is `ids != pad_id`.  Raises ValueError, one line, for any other file.
    """

    path: Path | None = None

    after = (1,)

    def _backend(self) -> Tokenizer:
        if self.path is None:
            raise ValueError("T5 needs its vocabulary: wanted the path of a spiece.model or tokenizer.json")
        return _t5(self.path)


@dataclass(frozen=True)
class Qwen3Tokenizer(TextTokenizer):
    """Qwen3's tokenizer and Qwen2.5's, from its `tokenizer.json`, or `vocab.json` with `merges.txt` beside it.

    A text is put into the template of a chat, as what the user says, perhaps after what the system says and after
    images, and truncated at the end of the whole, as transformers does, with `enable_thinking` or without.  Raises
    ValueError, one line, for any other file.
    """

    path: Path | None = None
    thinks: bool = True
    system: str = ""
    images: tuple[tuple[str, int], ...] = ()  # that the user shows before the text: what is said of each, its tokens

    def _backend(self) -> Tokenizer:
        if self.path is None:
            raise ValueError("Qwen3 needs its vocabulary: wanted the path of a tokenizer.json")
        if not self.thinks and _qwen3(self.path).token_to_id("<think>") is None:
            raise ValueError(f"{self.path}: lacks <think>: wanted Qwen3's tokenizer.json")
        if self.images and _qwen3(self.path).token_to_id(IMAGE) is None:
            raise ValueError(f"{self.path}: lacks {IMAGE}: wanted the tokenizer.json of Qwen2.5-VL or Qwen3")
        return _qwen3(self.path)

    @property
    def end_id(self) -> int:
        """The id of the end of a document, which Qwen3 pads with."""
        token: int = self._backend().get_vocab()["<|endoftext|>"]
        return token

    @property
    def vocab_size(self) -> int:
        """1 + the largest id."""
        return 1 + max(self._backend().get_vocab().values())

    def units(self, text: str) -> list[tuple[tuple[int, ...], int]]:
        """Return the tokens of a text in its template, and where in the text each begins."""
        before = self.before_text
        whole = self._with_images(
            f"{before}{text}{ANSWERED}{'' if self.thinks else WITHOUT_THINKING}" if isinstance(text, str) else text
        )
        return [(tokens, min(max(start - len(before), 0), len(text))) for tokens, start in whole]

    @property
    def before_text(self) -> str:
        """The template up to the text."""
        said = f"<|im_start|>system\n{self.system}<|im_end|>\n{SAID}" if self.system else SAID
        return said + "".join(f"{name}<|vision_start|>{IMAGE}<|vision_end|>" for name, _ in self.images)

    def _with_images(self, text: str) -> list[tuple[tuple[int, ...], int]]:
        """Return the tokens of a text that begins with the template, in which each image has all of its tokens."""
        image, counts = self._backend().token_to_id(IMAGE), iter([count for _, count in self.images])
        units: list[tuple[tuple[int, ...], int]] = []
        for tokens, start in super().units(text):
            units += [(tokens, start)] * (next(counts, 1) if tokens == (image,) else 1)
        return units

    @property
    def num_before(self) -> int:
        """Number of the tokens of the template up to the text."""
        return len(self._with_images(self.before_text))

    @property
    def image_starts(self) -> list[int]:
        """The places of the first tokens of its images."""
        tokens = [token for (token,), _ in self._with_images(self.before_text)]
        image = self._backend().token_to_id(IMAGE) if self.images else None
        return [i for i, token in enumerate(tokens) if token == image != tokens[i - 1]]


# ---- backends: shared by all tokenizers, never changed --------------------------------------------------------------


@cache
def _bert() -> Tokenizer:
    """Build BERT's normalisation (lower case, no accents), word splitting and WordPiece."""
    _, *tokens = gzip.decompress(_BERT_VOCAB.read_bytes()).decode("utf-8").split("\n")[:-1]
    assert len(tokens) == 30522, "bert_vocab.txt.gz is not what scripts/make_vocab.py writes"
    vocab = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(WordPiece(vocab=vocab, unk_token="[UNK]", max_input_chars_per_word=100))
    tokenizer.add_special_tokens(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"])
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    return tokenizer


@cache
def _t5(path: Path) -> Tokenizer:
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


@cache
def _qwen3(path: Path) -> Tokenizer:
    try:
        if path.name == "vocab.json":
            tokenizer = _byte_level(path)
        else:
            tokenizer = Tokenizer.from_str(read_bytes(path, 2**26).decode("utf-8"))
        if missing := [token for token in QWEN3_SPECIAL if tokenizer.token_to_id(token) is None]:
            raise ValueError(f"lacks {missing[0]}")
    except Exception as error:  # `tokenizers` raises Exception itself
        reason = str(error)[:200]
        raise ValueError(f"{path}: is not a tokenizer of Qwen3 ({reason}): wanted its tokenizer.json") from error
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return tokenizer


def _byte_level(path: Path) -> Tokenizer:
    """Build Qwen's tokenizer of a vocab.json and the merges.txt beside it."""
    vocab = json.loads(read_bytes(path, 2**26))
    lines = read_bytes(path.with_name("merges.txt"), 2**26).decode("utf-8").split("\n")
    merges = [
        (left, right) for left, _, right in (line.partition(" ") for line in lines) if right and left != "#version:"
    ]
    tokenizer = Tokenizer(BPE(vocab=vocab, merges=merges))
    tokenizer.add_special_tokens([*QWEN3_SPECIAL, *QWEN3_FURTHER])
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_QWEN3_WORDS), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
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
