"""Encode prompts: what the network reads in addition to the latents.

Each family names one of CONDITIONERS, or its own file, which then has a CONDITIONER.
Shape letters: B prompts, K chunks of T tokens each, D width of the context.
"""

import dataclasses
import logging
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ldm_lite.checkpoint.model import CheckpointModel
from ldm_lite.cli.task_options import ConditioningOptions
from ldm_lite.core.denoise import Conditioning as Parts
from ldm_lite.core.denoise import to_device
from ldm_lite.core.files import imported
from ldm_lite.core.words import unknown_words
from ldm_lite.diffusion.guidance import Guidance, ScaleOrFunction, classifier_free
from ldm_lite.models.bert import BERTTextEncoder
from ldm_lite.models.ops import guidance_embedding
from ldm_lite.text.other_syntax import signs_in
from ldm_lite.text.prompt import without_weights
from ldm_lite.text.tokenizer import TextTokenizer

log = logging.getLogger("ldm_lite")

NOTHING = ConditioningOptions()
_WEIGHTS = "ldm_lite.conditioning.weights"  # prompts in A1111's syntax

Prompts = Sequence[str | None]  # None = no prompt, which SDXL encodes differently from an empty one


@dataclass(frozen=True, eq=False)
class PromptOptions:
    """How prompts are read, and the family's other conditioning."""

    syntax: str = "plain"  # one of SYNTAXES
    clip_skip: int = 1  # which of the text encoder's layers to use, counted from the last; 1 is usual
    num_chunks: int = 1  # pad each prompt to at least this many chunks of 77 tokens (or embeddings)
    negative: bool = False  # these are negative prompts
    size: tuple[int, int] | None = None  # (height, width) of the image in pixels; None = the family's resolution
    alike: bool = False  # no other prompt of the job has more or fewer chunks than these
    extra: ConditioningOptions = NOTHING  # further conditioning of some families


DEFAULT = PromptOptions()


@dataclass(frozen=True, eq=False)
class Conditioner:
    """How the prompts of some families become their networks' inputs."""

    encode: Callable[[CheckpointModel, Prompts, PromptOptions], Parts]
    # Returns the one that reads most of a prompt.
    tokenizer: Callable[[CheckpointModel], TextTokenizer | None] = lambda model: model.tokenizer
    reads: str = "text"  # what a prompt is: "text", "files" (the name of one), or "none"
    has_weights: bool = True  # False: its text encoders, T5 and Qwen3, read plain text
    without_clip_skip: str = ""  # why clip_skip has no layers to choose from
    length: Callable[[CheckpointModel, str], int] | None = None  # of a prompt, unless CLIP's chunks count
    most: int = 1  # padded to this many, all prompts have one shape
    has_mask: bool = False  # the network reads as many positions as y (B,1) says
    with_sizes: Callable[[Tensor, Tensor], Tensor] | None = None  # y (B,V) and the numbers (B,N) of images -> y


def conditioner_of(model: CheckpointModel) -> Conditioner:
    """Return the conditioner of a model's family."""
    name = model.family.conditioner
    conditioner: Conditioner = imported(CONDITIONERS.get(name, f"ldm_lite.families.{name}:CONDITIONER"))
    return conditioner


@torch.no_grad()
def encode_prompts(model: CheckpointModel, prompts: Prompts, options: PromptOptions = DEFAULT) -> Parts:
    """Return the conditioning of B prompts, on the model's device.

    Warnings name words that do not fit into the text encoder, once per prompt, and syntax of other programs.
    """
    conditioner = conditioner_of(model)
    for prompt in dict.fromkeys(prompts):
        for line in (
            signs_in(prompt or "", options.syntax, conditioner.has_weights) if conditioner.reads == "text" else ()
        ):
            log.warning(line)
    if options.clip_skip != 1 and conditioner.without_clip_skip:
        raise ValueError(f"{model.family.title} {conditioner.without_clip_skip}: leave out `clip_skip`")
    if not conditioner.has_weights:
        prompts, options = _as_read(model, prompts, options.syntax), replace(options, syntax="plain")
    tokenizer = conditioner.tokenizer(model)
    if options.syntax == "plain" and tokenizer is not None:
        for prompt in dict.fromkeys(prompts):
            if line := tokenizer.too_long(tokenizer.clean(prompt or "")):
                log.warning("%s", line)
    for prompt in dict.fromkeys(prompts) if model.family.words else ():
        if unknown := unknown_words(_without_syntax(model, prompt or "", options.syntax), model.family.words):
            log.warning("%s %s", model.name, unknown)
    with model.phase(*model.family.texts):
        return conditioner.encode(model, prompts, options)


def check_used(models: Sequence[CheckpointModel], extra: ConditioningOptions) -> None:
    """Raises ValueError if an option is set that none of a job's models uses."""
    conditioners = {model.family.conditioner for model in models}
    for field in dataclasses.fields(ConditioningOptions):
        users = field.metadata["used_by"]
        if users is not None and getattr(extra, field.name) is not None and not conditioners & set(users):
            title, what = models[0].family.title, field.name.replace("_", " ")
            raise ValueError(f"got {what}, which {title} does not use: leave out `{field.name}`")


def guided(model: CheckpointModel, cond: Parts, uncond: Parts | None, guidance: ScaleOrFunction) -> Guidance:
    """Return classifier-free guidance, or for distilled models the one branch that reads the scale."""
    return with_scale(model, cond, guidance) if model.family.distilled else classifier_free(cond, uncond, guidance)


def with_scale(model: CheckpointModel, cond: Parts, guidance: ScaleOrFunction) -> Guidance:
    """Return one branch, with the scale as an input of the network.  Raises ValueError for a function."""
    if callable(guidance):
        raise ValueError(f"{model.family.title} reads the guidance scale itself: give a number, not a function")
    context, dim = cond["context"], model.family.unet.guidance_dim
    if dim is None:  # the network embeds it
        scales = torch.full((len(context),), guidance, dtype=torch.float32, device="cpu")
        return classifier_free({**cond, "guidance": scales}, None, 1.0)
    embedded = guidance_embedding(torch.tensor([guidance], dtype=torch.float64, device="cpu"), dim).to(context)
    embedded = embedded.expand(len(context), -1)
    y = torch.cat([cond["y"], embedded], dim=1) if "y" in cond else embedded
    return classifier_free({**cond, "y": y}, None, 1.0)


def count_chunks(model: CheckpointModel, prompts: Iterable[str | None], syntax: str = "plain") -> int:
    """Return the number of chunks of the longest prompt, to which all prompts of a job are padded."""
    length = conditioner_of(model).length
    if length is not None:
        return max(length(model, text) if text else 1 for text in _as_read(model, prompts, syntax))
    if model.tokenizer is None or syntax != "a1111":
        return 1
    divide = imported(f"{_WEIGHTS}:divide")
    return max(len(divide(model.tokenizer, prompt or "")) for prompt in prompts)


# ---- tokens ---------------------------------------------------------------------------------------------------------

SYNTAXES = ("plain", "a1111")


class Chunks(NamedTuple):
    """Prompts for a text encoder: token ids (B*K,T) int64 and their weights (B*K,T) float32; None: all are 1."""

    ids: Tensor
    weights: Tensor | None


def chunks(tokenizer: TextTokenizer, texts: Sequence[str], syntax: str = "plain", num_chunks: int = 1) -> Chunks:
    """Turn B prompts into token ids and weights, in chunks of the text encoder's length: K each, num_chunks or more.

    "plain": the text as it is, in one chunk; tokens that do not fit are dropped.  "a1111": in as many as needed.
    Raises ValueError for an unknown syntax, text that the tokenizer refuses, and too many chunks.
    """
    if syntax not in SYNTAXES:
        raise ValueError(f"unknown prompt syntax {syntax!r}: expected one of {', '.join(SYNTAXES)}")
    if syntax == "a1111":
        return Chunks(*imported(f"{_WEIGHTS}:filled")(tokenizer, texts, num_chunks))
    empty = [""] * (num_chunks - 1)
    return Chunks(tokenizer([chunk for text in texts for chunk in (tokenizer.clean(text), *empty)]), None)


# ---- CLIP ------------------------------------------------------------------------------------------------------------


def clip(model: CheckpointModel, prompts: Prompts, options: PromptOptions) -> Parts:
    """Stable Diffusion 1.x and 2.x: CLIP's hidden states, as context (B, K * T, D)."""
    context, _ = hidden(model, model.text_encoder, model.tokenizer, prompts, options)
    return {"context": context}


def hidden(
    model: CheckpointModel, encoder: Any, tokenizer: Any, prompts: Prompts, options: PromptOptions, pool: bool = False
) -> tuple[Tensor, Any]:
    """Return CLIP's context (B,K*T,D) and, if asked for, the pooled output (B,D) of each prompt's first chunk.

    BERT is read the same way.  None is an empty prompt.
    """
    parts = chunks(tokenizer, [prompt or "" for prompt in prompts], options.syntax, options.num_chunks)
    ids, pooled = to_device(parts.ids, model.device), None
    settings = (
        () if isinstance(encoder, BERTTextEncoder) else (options.clip_skip, model.learned.get(encoder.spec.width))
    )
    if pool:
        context, pooled = encoder.context_and_pooled(ids, *settings)
        pooled = pooled.reshape(len(prompts), -1, pooled.shape[1])[:, 0]
    else:
        context = encoder(ids, *settings)
    if parts.weights is not None:
        context = imported(f"{_WEIGHTS}:with_token_weights")(context, parts.weights)
    return context.reshape(len(prompts), -1, context.shape[2]), pooled


def _as_read(model: CheckpointModel, prompts: Iterable[str | None], syntax: str) -> Prompts:
    """Return prompts as plain text where the text encoder has no weights.  Raises ValueError for a prompt with some."""
    plain = syntax != "plain" and not conditioner_of(model).has_weights
    return [without_weights(prompt) if plain and prompt else prompt for prompt in prompts]


def _without_syntax(model: CheckpointModel, prompt: str, syntax: str) -> str:
    """Return the words of a prompt, without weights and the names of embeddings."""
    pieces = imported("ldm_lite.text.prompt:parse")(prompt) if syntax == "a1111" else [(prompt, 1.0)]
    text = " ".join(piece for piece, _ in pieces if isinstance(piece, str))
    for name, _ in [] if model.tokenizer is None else model.tokenizer.added:
        text = re.sub(re.escape(name), " ", text, flags=re.IGNORECASE)
    return text


def image_size(model: CheckpointModel, options: PromptOptions) -> tuple[int, int]:
    """Return the (height, width) of the image in pixels."""
    return (model.family.resolution, model.family.resolution) if options.size is None else options.size


# A name that several rows share -> their Conditioner, or where that is.
CONDITIONERS: dict[str, Any] = {
    "clip": Conditioner(clip),
    "sdxl": "ldm_lite.families.sdxl:BOTH_ENCODERS",
    "refiner": "ldm_lite.families.sdxl:REFINER",
    "unclip": "ldm_lite.families.sd2:UNCLIP_H",
    "unclip_l": "ldm_lite.families.sd2:UNCLIP_L",
    "bert": "ldm_lite.families.ldm:TEXT",
    "nothing": "ldm_lite.families.ldm:NOTHING",
    "classes": "ldm_lite.families.ldm:CLASSES",
    "layouts": "ldm_lite.families.ldm:LAYOUTS",
    "label_maps": "ldm_lite.families.ldm:LABEL_MAPS",
    "embeddings": "ldm_lite.families.ldm:EMBEDDINGS",
}
