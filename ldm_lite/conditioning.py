"""Prompts -> what the network reads beside the latents.

A family names its conditioner, one of CONDITIONERS; a new kind of conditioning is one more function there.
"""

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ldm_lite.diffusion.guidance import Conditioning
from ldm_lite.pipeline import Pipeline
from ldm_lite.prompt import chunks, weighted

log = logging.getLogger("ldm_lite")


@dataclass(frozen=True)
class Reading:
    """How prompts are read."""

    syntax: str = "plain"  # one of prompt.SYNTAXES
    clip_skip: int = 1  # which of the text encoder's last layers is taken; 1 is the last
    num_chunks: int = 1  # of 77 tokens each, or more where a prompt needs them; the last ones empty


Conditioner = Callable[[Pipeline, Sequence[str], Reading], Conditioning]

PLAINLY = Reading()


@torch.no_grad()
def encode_prompts(pipe: Pipeline, prompts: Sequence[str], reading: Reading = PLAINLY) -> Conditioning:
    """Prompts, B of them -> what the pipeline's network reads of them, on its device and in its dtype.

    What does not fit into the encoder is said, once a prompt.
    """
    return CONDITIONERS[pipe.family.conditioner](pipe, prompts, reading)


def count_chunks(pipe: Pipeline, prompts: Iterable[str], syntax: str = "plain") -> int:
    """The most chunks that one of the prompts takes: what all of a job must be told to be alike."""
    assert pipe.tokenizer is not None
    return max(len(chunks(pipe.tokenizer, prompt, syntax).ids) for prompt in prompts)


def clip(pipe: Pipeline, prompts: Sequence[str], reading: Reading) -> Conditioning:
    """Stable Diffusion 1.x: CLIP's last hidden states, as context (B, 77 * chunks, D)."""
    assert pipe.tokenizer is not None
    assert pipe.text_encoder is not None
    if reading.syntax == "plain":
        for prompt in dict.fromkeys(prompts):
            if dropped := pipe.tokenizer.dropped(prompt):
                log.warning("prompt is too long, dropped from it: %s", dropped)
    ids, weights = _padded(pipe, prompts, reading)
    context = weighted(pipe.text_encoder(ids.to(pipe.device), reading.clip_skip), weights)  # (B * chunks, 77, D)
    return Conditioning(context.reshape(len(prompts), -1, context.shape[2]))


def _padded(pipe: Pipeline, prompts: Sequence[str], reading: Reading) -> tuple[Tensor, Tensor]:
    """Token ids and weights (B * chunks, 77) of prompts that all have as many chunks."""
    assert pipe.tokenizer is not None
    parts = [chunks(pipe.tokenizer, prompt, reading.syntax) for prompt in prompts]
    num_chunks = max(reading.num_chunks, *(len(part.ids) for part in parts))
    empty = chunks(pipe.tokenizer, "")
    padded = [part for prompt in parts for part in (prompt, *[empty] * (num_chunks - len(prompt.ids)))]
    return torch.cat([part.ids for part in padded]), torch.cat([part.weights for part in padded])


CONDITIONERS: dict[str, Conditioner] = {"clip": clip}
