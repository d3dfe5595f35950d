"""Vocabularies of T5 and Qwen, which are files beside the weights or named by the user."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from ldm_lite.checkpoint import hub
from ldm_lite.core.files import Tensors
from ldm_lite.text.qwen3 import Qwen3Tokenizer
from ldm_lite.text.t5 import T5Tokenizer
from ldm_lite.zoo.family import FamilyRow

T5_VOCABS = ("spiece.model", "tokenizer.json")  # the file of T5's pieces
QWEN3_VOCABS = ("tokenizer.json", "vocab.json")  # vocab.json with merges.txt beside it


def tokenizers_of(
    family: FamilyRow, parts: Mapping[str, Tensors], source: str | None, vocab: str | None
) -> tuple[Qwen3Tokenizer | None, T5Tokenizer | None]:
    """Return the tokenizers of a family's Qwen and of its T5; None where it has none.

    Without `source`, Qwen's files, and without `vocab`, T5's, are looked for beside their weights.  Raises ValueError,
    one line, if they are missing or another model's.
    """
    roles = {type(spec).__name__: role for role, spec in family.specs.items()}
    qwen = roles.get("Qwen3Spec", roles.get("Qwen25Spec"))
    if source is not None and qwen is None:
        raise ValueError(f"got `tokenizer` {source}, which {family.title} does not use: leave it out")
    t5 = None
    if vocab is not None and "T5Spec" not in roles:
        raise ValueError(f"got `t5_vocab` {vocab}, but {family.title} has no T5 here: leave it out")
    if (role := roles.get("T5Spec")) is not None:
        weights = parts[role].path
        path = hub.resolve(vocab) if vocab is not None else _beside(weights, role, T5_VOCABS)
        if path is None:
            raise ValueError(
                f"no spiece.model or tokenizer.json of T5 beside {weights}: name it with `t5_vocab=FILE`, for "
                "instance `t5_vocab=google/t5-v1_1-xxl/spiece.model`"
            )
        t5 = T5Tokenizer(512, path=path)
    return None if qwen is None else replace(_qwen_tokenizer(parts[qwen], qwen, source), thinks=family.thinks), t5


def _qwen_tokenizer(encoder: Tensors, role: str, source: str | None) -> Qwen3Tokenizer:
    path = _beside(encoder.path, role, QWEN3_VOCABS) if source is None else hub.resolve(source)
    if path is not None and path.is_dir():
        path = _beside(path, role, QWEN3_VOCABS)
    if path is None:
        where = f"beside {encoder.path}" if source is None else f"in {source}"
        raise ValueError(
            f"no tokenizer.json of Qwen3, nor vocab.json with merges.txt, {where}: name one with `tokenizer=FILE`, for "
            "instance `tokenizer=Qwen/Qwen3-4B/tokenizer.json`"
        )
    tokenizer = Qwen3Tokenizer(512, path=path)
    tokenizer = replace(tokenizer, pad_id=tokenizer.end_id)
    size = encoder.shapes["embed_tokens.weight"][0]
    if tokenizer.vocab_size > size:
        raise ValueError(f"{path}: has {tokenizer.vocab_size} tokens, but {encoder.path} only {size}: use its own")
    return tokenizer


def _beside(weights: Path, role: str, names: Sequence[str]) -> Path | None:
    """Return the first file of these names in the folder of a text encoder's weights, or the tokenizer folder there."""
    folder = weights.parent if weights.is_file() else weights
    places = [folder, *(folder / role.replace("text_encoder", "tokenizer") for folder in (folder, folder.parent))]
    files = (place / name for place in places for name in names)
    return next((file for file in files if file.is_file()), None)
