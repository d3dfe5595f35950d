"""Text encoders that read plain text: T5 and Qwen3.

Shape letters: B prompts, T tokens, D width.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

from torch import Tensor

from ldm_lite.checkpoint.model import CheckpointModel
from ldm_lite.models.t5 import T5Spec
from ldm_lite.text.tokenizer import TextTokenizer


def t5_tokenizer(most: int) -> Callable[[CheckpointModel], TextTokenizer | None]:
    """Return the tokenizer that reads most of a prompt: T5's, with at most so many tokens, or else the other one."""

    def tokenizer(model: CheckpointModel) -> TextTokenizer | None:
        return model.tokenizer if model.t5_tokenizer is None else replace(model.t5_tokenizer, length=most)

    return tokenizer


def num_tokens(tokenizer: TextTokenizer | None, prompt: str | None) -> int:
    """Return how many tokens of a prompt are read."""
    assert tokenizer is not None
    return min(tokenizer.length, len(tokenizer.encode(prompt or "")) + len(tokenizer.after))


def t5_states(model: CheckpointModel, prompts: Sequence[str | None], length: int, mask: Tensor | None = None) -> Tensor:
    """Return T5's hidden states (B,length,D) of prompts, padded, with a mask (B,length) or without one."""
    role = next(role for role, spec in model.family.specs.items() if isinstance(spec, T5Spec))
    assert model.t5_tokenizer is not None
    ids = replace(model.t5_tokenizer, length=length)([prompt or "" for prompt in prompts])
    return model.networks[role](ids.to(model.device), mask)
