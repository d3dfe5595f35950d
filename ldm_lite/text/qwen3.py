"""The tokenizer of Qwen3 and Qwen2.5, whose vocabulary is read from their checkpoints' files.

Its ids equal those of transformers 5.
"""

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from tokenizers import Regex, Tokenizer, normalizers, pre_tokenizers
from tokenizers.models import BPE

from ldm_lite.cli.files import read_bytes
from ldm_lite.text.tokenizer import TextTokenizer

_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
CHAT_PREFIX, CHAT_SUFFIX = "<|im_start|>user\n", "<|im_end|>\n<|im_start|>assistant\n"
WITHOUT_THINKING = "<think>\n\n</think>\n\n"
_SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
FURTHER = (  # tokens after those in Qwen's vocabulary
    *("<|object_ref_start|>", "<|object_ref_end|>", "<|box_start|>", "<|box_end|>", "<|quad_start|>", "<|quad_end|>"),
    *("<|vision_start|>", "<|vision_end|>", "<|vision_pad|>", "<|image_pad|>", "<|video_pad|>"),
)
IMAGE = "<|image_pad|>"  # a token of an image


@dataclass(frozen=True)
class Qwen3Tokenizer(TextTokenizer):
    """Qwen3's tokenizer and Qwen2.5's, from its `tokenizer.json`, or `vocab.json` with `merges.txt` beside it.

    A text is put into the template of a chat, as the user's message, optionally after a system message and
    images, and truncated at the end of the whole, as transformers does, with `enable_thinking` or without.  Raises
    ValueError, one line, for any other file.
    """

    path: Path | None = None
    thinks: bool = True
    system: str = ""
    images: tuple[tuple[str, int], ...] = ()  # shown before the text: what precedes each, and its number of tokens

    def _backend(self) -> Tokenizer:
        if self.path is None:
            raise ValueError("Qwen3 needs its vocabulary: expected the path of a tokenizer.json")
        if not self.thinks and _backend_of(self.path).token_to_id("<think>") is None:
            raise ValueError(f"{self.path}: lacks <think>: expected Qwen3's tokenizer.json")
        if self.images and _backend_of(self.path).token_to_id(IMAGE) is None:
            raise ValueError(f"{self.path}: lacks {IMAGE}: expected the tokenizer.json of Qwen2.5-VL or Qwen3")
        return _backend_of(self.path)

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
            f"{before}{text}{CHAT_SUFFIX}{'' if self.thinks else WITHOUT_THINKING}" if isinstance(text, str) else text
        )
        return [(tokens, min(max(start - len(before), 0), len(text))) for tokens, start in whole]

    @property
    def before_text(self) -> str:
        """The template up to the text."""
        said = f"<|im_start|>system\n{self.system}<|im_end|>\n{CHAT_PREFIX}" if self.system else CHAT_PREFIX
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
        """The indices of the first tokens of its images."""
        tokens = [token for (token,), _ in self._with_images(self.before_text)]
        image = self._backend().token_to_id(IMAGE) if self.images else None
        return [i for i, token in enumerate(tokens) if token == image != tokens[i - 1]]


@cache
def _backend_of(path: Path) -> Tokenizer:
    try:
        if path.name == "vocab.json":
            tokenizer = _byte_level(path)
        else:
            tokenizer = Tokenizer.from_str(read_bytes(path, 2**26).decode("utf-8"))
        if missing := [token for token in _SPECIAL if tokenizer.token_to_id(token) is None]:
            raise ValueError(f"lacks {missing[0]}")
    except Exception as error:  # `tokenizers` raises Exception itself
        reason = str(error)[:200]
        raise ValueError(f"{path}: is not a tokenizer of Qwen3 ({reason}): expected its tokenizer.json") from error
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
    tokenizer.add_special_tokens([*_SPECIAL, *FURTHER])
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_WORDS), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    return tokenizer
