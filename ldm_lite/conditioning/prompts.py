"""Encode prompts: what the network reads in addition to the latents.

Each family names one of CONDITIONERS; a new kind of conditioning is one more function there.
Shape letters: B prompts, K chunks of T tokens each, D width of the context, V of the vector.
"""

import dataclasses
import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from ldm_lite.checkpoint.model import Model
from ldm_lite.checkpoint.vocabularies import tokenizer_of
from ldm_lite.cli.task_options import ConditioningOptions
from ldm_lite.conditioning import inputs
from ldm_lite.core.denoise import Conditioning as Parts
from ldm_lite.core.layers import sinusoids
from ldm_lite.diffusion.guidance import Conditioning, Guidance, classifier_free
from ldm_lite.diffusion.schedule import cosine_betas
from ldm_lite.models.bert import BERTTextEncoder
from ldm_lite.models.ops import guidance_embedding, inside
from ldm_lite.models.t5 import T5Spec
from ldm_lite.models.z_image import MULTIPLE
from ldm_lite.text.prompt import STOP, parse, without_weights
from ldm_lite.text.tokenizer import TextTokenizer, check_length
from ldm_lite.zoo.family import text_roles

log = logging.getLogger("ldm_lite")

NOTHING = ConditioningOptions()

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


Conditioner = Callable[[Model, Prompts, PromptOptions], Parts]

DEFAULT = PromptOptions()


@torch.no_grad()
def encode_prompts(model: Model, prompts: Prompts, options: PromptOptions = DEFAULT) -> Conditioning:
    """Return the conditioning of B prompts, on the model's device.

    A warning names the words that do not fit into the text encoder, once per prompt.
    """
    if model.family.conditioner in UNWEIGHTED:
        prompts, options = _as_read(model, prompts, options.syntax), replace(options, syntax="plain")
    tokenizer = model.tokenizer
    if model.t5_tokenizer is not None:  # which reads more of a prompt
        tokenizer = replace(model.t5_tokenizer, length=T5_LENGTHS[model.family.conditioner](model))
    if options.syntax == "plain" and tokenizer is not None:
        for prompt in dict.fromkeys(prompts):
            if dropped := tokenizer.dropped(tokenizer.clean(prompt or "")):
                log.warning("prompt is too long, dropped from it: %s", dropped)
    with model.phase(*text_roles(model.family.text_encoders)):
        return Conditioning(**CONDITIONERS[model.family.conditioner](model, prompts, options))


def check_used(models: Sequence[Model], extra: ConditioningOptions) -> None:
    """Raises ValueError if an option is set that none of a job's models uses."""
    conditioners = {model.family.conditioner for model in models}
    for field in dataclasses.fields(ConditioningOptions):
        users = field.metadata["used_by"]
        if users is not None and getattr(extra, field.name) is not None and not conditioners & set(users):
            title, what = models[0].family.title, field.name.replace("_", " ")
            raise ValueError(f"got {what}, which {title} does not use: leave out `{field.name}`")


def guided(model: Model, cond: Parts, uncond: Parts | None, guidance: float | Callable[..., Any]) -> Guidance:
    """Return the branches of classifier-free guidance, or one branch with the scale as input for distilled models.

    guidance is a scale or a function, as classifier_free takes it.  Raises ValueError for a function if the network
    reads the scale.
    """
    if not model.family.distilled:
        return classifier_free(cond, uncond, guidance)
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


def count_chunks(model: Model, prompts: Iterable[str | None], syntax: str = "plain") -> int:
    """Return the number of chunks of the longest prompt, to which all prompts of a job are padded."""
    length = LENGTHS.get(model.family.conditioner)
    if length is not None:
        return max(length(model, text) if text else 1 for text in _as_read(model, prompts, syntax))
    if model.tokenizer is None or syntax != "a1111":
        return 1
    return max(len(_divide(model.tokenizer, prompt or "")) for prompt in prompts)


def most_chunks(model: Model) -> int:
    """Return the number of chunks that every prompt fits into: padded to it, all have one shape."""
    return MOST.get(model.family.conditioner, 1)


def clip(model: Model, prompts: Prompts, options: PromptOptions) -> Parts:
    """Stable Diffusion 1.x and 2.x: CLIP's hidden states, as context (B, K * T, D)."""
    context, _ = _hidden(model, model.text_encoder, model.tokenizer, prompts, options)
    return {"context": context}


def bert(model: Model, prompts: Prompts, options: PromptOptions) -> Parts:
    """Latent diffusion's text-to-image models: the hidden states of their own encoder, as context (B, K * T, D)."""
    if options.clip_skip != 1:
        raise ValueError(f"{model.family.title} has no CLIP: leave out `clip_skip`")
    return clip(model, prompts, options)


def sdxl(model: Model, prompts: Prompts, options: PromptOptions) -> Parts:
    """SDXL: both encoders' hidden states, concatenated by channel; y is bigG's pooled output followed by the sizes.

    Sizes are height first: (original, top and left of the crop, target).  Without a prompt, context and pooled output
    are zeros.  Podell et al. 2023, sec. 2.2; GeneralConditioner of generative-models.
    """
    context, _ = _hidden(model, model.text_encoder, model.tokenizer, prompts, options)
    context_2, pooled = _hidden(model, model.text_encoder_2, _second_tokenizer(model), prompts, options, pool=True)
    context = torch.cat([context, context_2], dim=2)
    target = _size(model, options) if options.extra.target_size is None else options.extra.target_size
    has_text = torch.tensor([prompt is not None for prompt in prompts], device=context.device)
    y = with_numbers(pooled * has_text[:, None], torch.tensor((*_cut(model, options), *target)))
    return {"context": context * has_text[:, None, None], "y": y}


def refiner(model: Model, prompts: Prompts, options: PromptOptions) -> Parts:
    """SDXL's refiner: bigG alone, with an aesthetic score in place of the image's size."""
    context, pooled = _hidden(model, model.text_encoder, model.tokenizer, prompts, options, pool=True)
    score = options.extra.negative_aesthetic_score if options.negative else options.extra.aesthetic_score
    if score is None:
        score = 2.5 if options.negative else 6.0
    return {"context": context, "y": with_numbers(pooled, torch.tensor((*_cut(model, options), score)))}


def flux(model: Model, prompts: Prompts, options: PromptOptions) -> Parts:
    """FLUX.1: T5's hidden states (B,512,D) as context, padding included; y is CLIP's pooled output, without projection.

    schnell was trained with 256 tokens.  black-forest-labs/flux conditioner.py.
    """
    if options.clip_skip != 1:
        raise ValueError(f"{model.family.title} reads only CLIP's pooled output: leave out `clip_skip`")
    _, pooled = _hidden(model, model.text_encoder, model.tokenizer, prompts, options, pool=True)
    return {"context": _t5(model, prompts, T5_LENGTHS["flux"](model)), "y": pooled}


def chroma(model: Model, prompts: Prompts, options: PromptOptions) -> Parts:
    """Chroma: T5's hidden states (B,T,D) with its mask, of which the first y (B,1) are read: a text and one padding.

    lodestone-rock/flow train_chroma.py.
    """
    if options.clip_skip != 1:
        raise ValueError(f"{model.family.title} has no CLIP: leave out `clip_skip`")
    most = T5_LENGTHS["chroma"](model)
    counts = torch.tensor([[_t5_tokens(model, prompt)] for prompt in prompts], device=model.device)
    length = min(most, max(int(counts.max()), options.num_chunks) + 1)
    context = _t5(model, prompts, length, mask=inside(counts, length))
    text = {"context": context, "y": (counts + 1).clamp(max=most)}
    return {**text, "full": torch.ones(len(prompts))} if options.alike else text


def flux2(model: Model, prompts: Prompts, options: PromptOptions) -> Parts:
    """FLUX.2 [klein]: three of Qwen3's states (B,512,D) of a chat, with its mask; the network reads the padding too."""
    if options.clip_skip != 1:
        raise ValueError(f"{model.family.title} has no CLIP: leave out `clip_skip`")
    assert model.tokenizer is not None
    assert model.text_encoder is not None
    ids = model.tokenizer([prompt or "" for prompt in prompts]).to(model.device)
    counts = torch.tensor([[_num_tokens(model.tokenizer, prompt)] for prompt in prompts], device=model.device)
    return {"context": model.text_encoder(ids, inside(counts, ids.shape[1]))}


def sd3(model: Model, prompts: Prompts, options: PromptOptions) -> Parts:
    """Stable Diffusion 3: CLIP-L's and bigG's hidden states by channel, zeros up to T5's width, then T5's tokens.

    T5 has at least 77 tokens, at most 256; without T5 they are 77 zeros.  y is both pooled outputs, of which only
    bigG's is projected.  Stability-AI/sd3.5, sd3_infer.py, get_cond; Esser et al. 2024, sec. 4 and appendix B.3.
    """
    one_chunk = replace(options, num_chunks=1)
    context, pooled = _hidden(model, model.text_encoder, model.tokenizer, prompts, one_chunk, pool=True)
    context_2, pooled_2 = _hidden(model, model.text_encoder_2, _second_tokenizer(model), prompts, one_chunk, pool=True)
    both = torch.cat([context, context_2], dim=2)
    both = F.pad(both, (0, model.family.unet.context_dim - both.shape[2]))  # (B, 77, D)
    tokens = torch.zeros_like(both)
    if model.t5_tokenizer is not None:
        tokens = _t5(model, prompts, max(TOKENS, options.num_chunks)).to(both)
    return {"context": torch.cat([both, tokens], dim=1), "y": torch.cat([pooled, pooled_2], dim=1)}


def z_image(model: Model, prompts: Prompts, options: PromptOptions) -> Parts:
    """Z-Image: Qwen3's second to last hidden states (B,T,D) of a chat, without a mask; y (B,1) is its number of tokens.

    T is a multiple of 32, at most 512.  Tongyi-MAI/Z-Image pipeline.py.
    """
    if options.clip_skip != 1:
        raise ValueError(f"{model.family.title} has no CLIP: leave out `clip_skip`")
    assert model.tokenizer is not None
    assert model.text_encoder is not None
    counts = [_num_tokens(model.tokenizer, prompt) for prompt in prompts]
    length = MULTIPLE * max(options.num_chunks, *(-(-count // MULTIPLE) for count in counts))
    ids = replace(model.tokenizer, length=length)([prompt or "" for prompt in prompts])
    context = model.text_encoder(ids.to(model.device))
    text = {"context": context, "y": torch.tensor(counts, device=model.device)[:, None]}
    return {**text, "full": torch.ones(len(prompts))} if options.alike else text


def unclip(model: Model, prompts: Prompts, options: PromptOptions) -> Parts:
    """Stable Diffusion 2.1 unCLIP: an image's embedding, noised, and the noise level as y; zeros for the negative.

    The noise is the same for all images.  With embedding statistics, it is added to the standardised embedding.
    Ramesh et al. 2022, sec. 2; CLIPEmbeddingNoiseAugmentation of stablediffusion.
    """
    width = (model.family.unet.vector_dim or 0) // 2
    extra = options.extra
    embedding, level, statistics = extra.image_embedding, extra.noise_level, extra.image_statistics
    if embedding is None:
        raise ValueError(
            f"{model.family.title} reads an image's CLIP embedding (1, {width}) besides the prompt: "
            "give one with `image_embedding=FILE`"
        )
    if embedding.shape != (1, width) or not 0 <= level < 1000:
        raise ValueError(
            f"got an image embedding {tuple(embedding.shape)} and noise level {level}, wanted (1, {width}) and 0 to 999"
        )
    if statistics is not None and statistics.shape != (2, width):
        raise ValueError(f"got image statistics {tuple(statistics.shape)}, wanted mean and deviation, (2, {width})")
    mean, deviation = (0.0, 1.0) if statistics is None else (statistics[:1].float(), statistics[1:].float())
    kept = float((1 - cosine_betas())[: level + 1].prod())
    noise = torch.randn(1, width, generator=torch.Generator("cpu").manual_seed(0), dtype=torch.float32, device="cpu")
    noised = kept**0.5 * (embedding.cpu().float() - mean) / deviation + (1 - kept) ** 0.5 * noise
    embedded = sinusoids(torch.tensor([level], device="cpu"), width)
    y = torch.cat([noised * deviation + mean, embedded], dim=1).to(model.device)
    return {**clip(model, prompts, options), "y": (y * (not options.negative)).repeat(len(prompts), 1)}


def unclip_l(model: Model, prompts: Prompts, options: PromptOptions) -> Parts:
    """unCLIP with CLIP-L embeddings; its checkpoint lacks the statistics that it was trained with."""
    if options.extra.image_statistics is None and options.extra.noise_level:
        raise ValueError(
            f"{model.family.title} adds noise by statistics that its file lacks: give karlo's ViT-L-14_stats.th with "
            "`image_statistics=FILE`, or take `noise_level=0`"
        )
    return unclip(model, prompts, options)


TOKENS = 77  # of CLIP
T5_LENGTHS: dict[str, Callable[[Model], int]] = {  # the most tokens of T5, by conditioner
    "flux": lambda model: 512 if model.family.distilled else 256,
    "chroma": lambda model: 512,
    "sd3": lambda model: 256,
}

# ---- tokens and weights ---------------------------------------------------------------------------------------------

SYNTAXES = ("plain", "a1111")
MAX_CARRIED = 20  # tokens after the last comma that may move to the next chunk
MOST_CHUNKS = 100


class Chunks(NamedTuple):
    """Prompts for a text encoder: token ids (B*K,T) int64 and their weights (B*K,T) float32."""

    ids: Tensor
    weights: Tensor


def chunks(tokenizer: TextTokenizer, texts: Sequence[str], syntax: str = "plain", num_chunks: int = 1) -> Chunks:
    """Turn B prompts into token ids and weights, in chunks of the text encoder's length: K each, num_chunks or more.

    "plain": the text as it is, in one chunk; tokens that do not fit are dropped.  "a1111": in as many as needed.
    Raises ValueError for an unknown syntax, text that the tokenizer refuses, and more than MOST_CHUNKS.
    """
    if syntax not in SYNTAXES:
        raise ValueError(f"unknown prompt syntax {syntax!r}: wanted one of {', '.join(SYNTAXES)}")
    if syntax == "a1111":
        divided = [_divide(tokenizer, text) for text in texts]
    else:
        room = tokenizer.room
        divided = [[[(token, 1.0) for token in tokenizer.encode(tokenizer.clean(text))[:room]]] for text in texts]
    num_chunks = max(num_chunks, *map(len, divided))
    shape = (len(texts) * num_chunks, tokenizer.length)
    ids = torch.full(shape, tokenizer.pad_id, dtype=torch.int64, device="cpu")
    weights = torch.ones(shape, dtype=torch.float32, device="cpu")
    filled = [chunk for text_chunks in divided for chunk in text_chunks + [[]] * (num_chunks - len(text_chunks))]
    for id_row, weight_row, chunk in zip(ids, weights, filled, strict=True):
        tokens = [*tokenizer.before, *(token for token, _ in chunk), *tokenizer.after]
        id_row[: len(tokens)] = torch.tensor(tokens, device="cpu")
        values = torch.tensor([weight for _, weight in chunk], dtype=torch.float32, device="cpu")
        weight_row[len(tokenizer.before) :][: len(chunk)] = values
    return Chunks(ids, weights)


def _divide(tokenizer: TextTokenizer, text: str) -> list[list[tuple[int, float]]]:
    """Divide a prompt in A1111's syntax into chunks of tokens with their weights.

    A full chunk ends at its last comma if that is among its last 20 tokens.  The vectors of an embedding stay together:
    where they do not fit, a chunk starts with them.
    """
    check_length(text)
    room, comma = tokenizer.room, tokenizer.encode(",")[0]
    full: list[list[tuple[int, float]]] = [[]]
    for piece in parse(text):
        if piece is STOP:
            full.append([])
            continue
        for tokens, _ in tokenizer.units(tokenizer.clean(piece[0])):
            if len(chunk := full[-1]) == room:
                last = max((i for i, (token, _) in enumerate(chunk) if token == comma), default=-1)
                moves = tokens != (comma,) and last >= 0 and room - last <= MAX_CARRIED
                full.append(chunk[last + 1 :] if moves else [])
                del chunk[last + 1 if moves else room :]
            if len(full[-1]) + len(tokens) > room:  # an embedding that does not fit
                full.append([])
            full[-1] += [(token, piece[1]) for token in tokens]
    if not full[-1] and len(full) > 1:
        full.pop()  # nothing came after the last BREAK
    if len(full) > MOST_CHUNKS:
        raise ValueError(f"got a prompt of {len(full)} chunks of {room} tokens, wanted at most {MOST_CHUNKS}")
    return full


def weighted(context: Tensor, weights: Tensor) -> Tensor:
    """Multiply contexts (n,T,D) by their tokens' weights (n,T), then restore the mean of each."""
    if bool((weights == 1).all()):
        return context
    scaled = context.float() * weights.to(context.device)[:, :, None]
    mean, new = (x.float().mean(dim=(1, 2), keepdim=True) for x in (context, scaled))
    return (scaled * (mean / new)).to(context.dtype)


# ---- parts of these -------------------------------------------------------------------------------------------------


def _hidden(
    model: Model, encoder: Any, tokenizer: Any, prompts: Prompts, options: PromptOptions, pool: bool = False
) -> tuple[Tensor, Any]:
    """Return CLIP's context (B,K*T,D) and, if asked for, the pooled output (B,D) of each prompt's first chunk.

    BERT is read the same way.  None is an empty prompt.
    """
    parts = chunks(tokenizer, [prompt or "" for prompt in prompts], options.syntax, options.num_chunks)
    ids, pooled = parts.ids.to(model.device), None
    settings = (
        () if isinstance(encoder, BERTTextEncoder) else (options.clip_skip, model.learned.get(encoder.spec.width))
    )
    if pool:
        context, pooled = encoder.context_and_pooled(ids, *settings)
        pooled = pooled.reshape(len(prompts), -1, pooled.shape[1])[:, 0]
    else:
        context = encoder(ids, *settings)
    return weighted(context, parts.weights).reshape(len(prompts), -1, context.shape[2]), pooled


def _second_tokenizer(model: Model) -> TextTokenizer:
    """Return the tokenizer of a model's second text encoder, with the names of embeddings."""
    tokenizer = tokenizer_of(model.family.text_encoders[1])
    assert tokenizer is not None
    assert model.tokenizer is not None
    return replace(tokenizer, added=model.tokenizer.added)


def _num_tokens(tokenizer: TextTokenizer | None, prompt: str | None) -> int:
    """Return the number of tokens of a prompt, as far as they are read."""
    assert tokenizer is not None
    return min(tokenizer.length, len(tokenizer.encode(prompt or "")) + len(tokenizer.after))


def _t5_tokens(model: Model, prompt: str | None) -> int:
    """Return the number of T5's tokens of a prompt, as far as they are read; 1 without T5."""
    if model.t5_tokenizer is None:
        return 1
    return _num_tokens(replace(model.t5_tokenizer, length=T5_LENGTHS[model.family.conditioner](model)), prompt)


def _t5(model: Model, prompts: Prompts, length: int, mask: Tensor | None = None) -> Tensor:
    """Return T5's hidden states (B,length,D) of prompts, padded, with a mask (B,length) or without one."""
    role = next(role for role, spec in model.family.networks.items() if isinstance(spec, T5Spec))
    assert model.t5_tokenizer is not None
    ids = replace(model.t5_tokenizer, length=length)([prompt or "" for prompt in prompts])
    return getattr(model, role)(ids.to(model.device), mask)


def _as_read(model: Model, prompts: Iterable[str | None], syntax: str) -> Prompts:
    """Return prompts as plain text where the text encoder has no weights.  Raises ValueError for a prompt with some."""
    plain = syntax != "plain" and model.family.conditioner in UNWEIGHTED
    return [without_weights(prompt) if plain and prompt else prompt for prompt in prompts]


def _size(model: Model, options: PromptOptions) -> tuple[int, int]:
    return (model.family.resolution, model.family.resolution) if options.size is None else options.size


def _cut(model: Model, options: PromptOptions) -> tuple[int, int, int, int]:
    """Return height and width of the original image, top and left of the crop."""
    original = _size(model, options) if options.extra.original_size is None else options.extra.original_size
    return (*original, *(options.extra.crop_top_left or (0, 0)))


def with_numbers(pooled: Tensor, numbers: Tensor) -> Tensor:
    """Append the sinusoids of N numbers, (N,) or (B,N), 256 each, to pooled outputs (B,D): y (B, D + 256 * N)."""
    embedded = sinusoids(numbers.flatten().to(pooled.device), 256).view(*numbers.shape[:-1], -1)
    return torch.cat([pooled, embedded.to(pooled.dtype).expand(len(pooled), -1)], dim=1)


CONDITIONERS: dict[str, Conditioner] = {
    "clip": clip,
    "sdxl": sdxl,
    "flux": flux,
    "chroma": chroma,
    "flux2": flux2,
    "sd3": sd3,
    "z_image": z_image,
    "refiner": refiner,
    "unclip": unclip,
    "unclip_l": unclip_l,
    "bert": bert,
    "nothing": lambda model, prompts, options: inputs.nothing(model, prompts),
    "classes": lambda model, prompts, options: inputs.classes(model, prompts),
    "layouts": lambda model, prompts, options: inputs.layouts(model, prompts),
    "label_maps": lambda model, prompts, options: inputs.label_maps(model, prompts, _size(model, options)),
    "embeddings": lambda model, prompts, options: inputs.embeddings(model, prompts, options.num_chunks),
}
UNWEIGHTED = (
    "flux",
    "chroma",
    "flux2",
    "sd3",
    "z_image",
)  # conditioners whose text encoders, T5 and Qwen3, read plain text
# Number of tokens, or of 32 tokens, of a prompt, of which CLIP's chunks are not what counts.
LENGTHS: dict[str, Callable[[Model, str], int]] = {
    "embeddings": lambda model, prompt: len(inputs.read_embeddings(model, prompt)),
    "flux": lambda model, prompt: 1,
    "flux2": lambda model, prompt: 1,
    "chroma": _t5_tokens,
    "sd3": _t5_tokens,
    "z_image": lambda model, prompt: -(-_num_tokens(model.tokenizer, prompt) // MULTIPLE),
}
MOST = {"chroma": 512, "sd3": 256, "z_image": 512 // MULTIPLE}  # of these numbers, where they vary
OPTIONAL = ("nothing",)  # conditioners that read no prompt
FROM_FILES = ("layouts", "label_maps", "embeddings")  # conditioners whose prompts are names of files
