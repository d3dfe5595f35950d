"""BERT's tokenizer, a WordPiece.  Its vocabulary comes with the package, and its ids equal those of transformers 5.

Source: Devlin et al. 2019; bert-base-uncased (Apache-2.0).
"""

import gzip
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from tokenizers import Tokenizer, normalizers, pre_tokenizers
from tokenizers.models import WordPiece

from ldm_lite.text.tokenizer import TextTokenizer

_VOCAB = Path(__file__).with_name("bert_vocab.txt.gz")  # made by scripts/make_vocab.py


@dataclass(frozen=True)
class BERTTokenizer(TextTokenizer):
    """bert-base-uncased's tokenizer, of LDM's text-to-image models: [CLS], the text, [SEP]."""

    before = (101,)
    after = (102,)

    def _backend(self) -> Tokenizer:
        return _bert()


@cache
def _bert() -> Tokenizer:
    """Build BERT's normalisation (lower case, no accents), word splitting and WordPiece."""
    _, *tokens = gzip.decompress(_VOCAB.read_bytes()).decode("utf-8").split("\n")[:-1]
    assert len(tokens) == 30522, "bert_vocab.txt.gz is not what scripts/make_vocab.py writes"
    vocab = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(WordPiece(vocab=vocab, unk_token="[UNK]", max_input_chars_per_word=100))
    tokenizer.add_special_tokens(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"])
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    return tokenizer
