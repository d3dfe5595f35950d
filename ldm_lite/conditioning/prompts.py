"""Prompts -> what the network reads beside the latents.

A family names its conditioner, one of CONDITIONERS; a new kind of conditioning is one more function there.
Shape letters: B prompts, K chunks of T tokens each, D width of the context, V of the vector.
"""

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from ldm_lite.checkpoint.model import Pipeline, tokenizer_of
from ldm_lite.conditioning import inputs
from ldm_lite.diffusion.guidance import Branches, Conditioning, classifier_free
from ldm_lite.diffusion.schedule import cosine_betas
from ldm_lite.models.clip import CLIPTextEncoder
from ldm_lite.models.open_clip import OpenCLIPTextEncoder
from ldm_lite.models.ops import guidance_embedding, timestep_embedding
from ldm_lite.text.prompt import Chunks, chunks, weighted
from ldm_lite.text.tokenizer import TextTokenizer
from ldm_lite.zoo.networks import EncoderSpec

log = logging.getLogger("ldm_lite")

Prompts = Sequence[str | None]  # None = no prompt, which to SDXL is another thing than the empty one


@dataclass(frozen=True, eq=False)
class Reading:
    """How prompts are read, and what else a family conditions its images on."""

    syntax: str = "plain"  # one of prompt.SYNTAXES
    clip_skip: int = 1  # how far from the end of the text encoder its output is taken; 1 is as it was trained
    num_chunks: int = 1  # of 77 tokens each, or more where a prompt needs them; the last ones empty; or embeddings
    negative: bool = False  # the prompts say what to keep away from
    size: tuple[int, int] | None = None  # (height, width) in pixels of the image; None = the family's resolution
    # SDXL: what the image is to look as if it had been: an original of (height, width) before it was scaled, cut at
    # (top, left) to the target's.  None = the image's own.
    original_size: tuple[int, int] | None = None
    crop_top_left: tuple[int, int] = (0, 0)
    target_size: tuple[int, int] | None = None
    # SDXL refiner: the score to look like, and that of what to keep away from.
    aesthetic_score: float = 6.0
    negative_aesthetic_score: float = 2.5
    # unCLIP: the CLIP embedding of an image (1,V/2), and the noise level of it in [0,1000).
    image_embedding: Tensor | None = None
    noise_level: int = 0
    # unCLIP of CLIP-L's: mean and standard deviation (2,V/2) of such embeddings, between which noise is added.
    image_statistics: Tensor | None = None


Conditioner = Callable[[Pipeline, Prompts, Reading], Conditioning]

PLAINLY = Reading()


@torch.no_grad()
def encode_prompts(pipe: Pipeline, prompts: Prompts, reading: Reading = PLAINLY) -> Conditioning:
    """Prompts, B of them -> what the pipeline's network reads of them, on its device.

    What does not fit into the encoder is said, once a prompt.
    """
    if reading.syntax == "plain" and pipe.tokenizer is not None:
        for prompt in dict.fromkeys(prompts):
            if dropped := pipe.tokenizer.dropped(prompt or ""):
                log.warning("prompt is too long, dropped from it: %s", dropped)
    with pipe.phase("text_encoder", "text_encoder_2"):
        return CONDITIONERS[pipe.family.conditioner](pipe, prompts, reading)


def check_heeded(pipes: Sequence[Pipeline], stated: Iterable[str]) -> None:
    """Raises ValueError for a field of a Reading that is stated in vain: none of a job's pipelines heeds it."""
    heeded = {name for pipe in pipes for name in HEEDS.get(pipe.family.conditioner, ())}
    for name in stated:
        if name not in heeded:
            title, what, flag = pipes[0].family.title, name.replace("_", " "), name.replace("_", "-")
            raise ValueError(f"got {what}, which {title} does not read: leave out --{flag}")


def guided(pipe: Pipeline, cond: Conditioning, uncond: Conditioning | None, scale: float) -> Branches:
    """Classifier-free guidance; for a network that guidance was distilled into one branch, which is told the scale."""
    dim = pipe.family.unet.guidance_dim
    if dim is None:
        return classifier_free(cond, uncond, scale)
    assert cond.context is not None
    embedded = guidance_embedding(torch.tensor([scale], dtype=torch.float64, device="cpu"), dim).to(cond.context)
    embedded = embedded.expand(len(cond.context), -1)
    y = embedded if cond.y is None else torch.cat([cond.y, embedded], dim=1)
    return classifier_free(cond._replace(y=y), None, scale)


def count_chunks(pipe: Pipeline, prompts: Iterable[str | None], syntax: str = "plain") -> int:
    """The most chunks that one of the prompts takes: what all of a job must be told to be alike."""
    if pipe.tokenizer is None:
        length = LENGTHS.get(pipe.family.conditioner)
        return max(1 if length is None or not prompt else length(pipe, prompt) for prompt in prompts)
    return max(len(chunks(pipe.tokenizer, prompt or "", syntax).ids) for prompt in prompts)


def clip(pipe: Pipeline, prompts: Prompts, reading: Reading) -> Conditioning:
    """Stable Diffusion 1.x and 2.x: CLIP's hidden states, as context (B, K * T, D)."""
    assert pipe.tokenizer is not None
    assert pipe.text_encoder is not None
    parts = _read(pipe.tokenizer, prompts, reading)
    context = pipe.text_encoder(parts.ids.to(pipe.device), reading.clip_skip, _learned(pipe, pipe.text_encoder))
    return Conditioning(_joined(weighted(context, parts.weights), len(prompts)))


def bert(pipe: Pipeline, prompts: Prompts, reading: Reading) -> Conditioning:
    """Latent diffusion's text-to-image models: the hidden states of their own encoder, as context (B, K * T, D)."""
    assert pipe.tokenizer is not None
    assert pipe.text_encoder is not None
    if reading.clip_skip != 1:
        raise ValueError(f"{pipe.family.title} has no CLIP: leave out --clip-skip")
    parts = _read(pipe.tokenizer, prompts, reading)
    context = pipe.text_encoder(parts.ids.to(pipe.device))
    return Conditioning(_joined(weighted(context, parts.weights), len(prompts)))


def sdxl(pipe: Pipeline, prompts: Prompts, reading: Reading) -> Conditioning:
    """SDXL: the hidden states of both encoders side by side, and bigG's pooled output with the sizes as y.

    The sizes go height first: (original, crop's top and left, the target's).  Where there is no prompt, context and
    pooled output are zeros.  Podell et al. 2023, sec. 2.2; GeneralConditioner of generative-models.
    """
    assert pipe.tokenizer is not None
    assert pipe.text_encoder is not None
    parts = _read(pipe.tokenizer, prompts, reading)
    context = pipe.text_encoder(parts.ids.to(pipe.device), reading.clip_skip, _learned(pipe, pipe.text_encoder))
    context = weighted(context, parts.weights)
    context_2, pooled = _big(pipe, pipe.text_encoder_2, pipe.family.text_encoders[1], prompts, reading)
    context = torch.cat([_joined(context, len(prompts)), context_2], dim=2)
    target = _size(pipe, reading) if reading.target_size is None else reading.target_size
    given = torch.tensor([prompt is not None for prompt in prompts], device=context.device)
    y = _with_numbers(pooled * given[:, None], (*_cut(pipe, reading), *target))
    return Conditioning(context * given[:, None, None], y)


def refiner(pipe: Pipeline, prompts: Prompts, reading: Reading) -> Conditioning:
    """SDXL's refiner: bigG alone, with an aesthetic score in place of the image's size."""
    context, pooled = _big(pipe, pipe.text_encoder, pipe.family.text, prompts, reading)
    score = reading.negative_aesthetic_score if reading.negative else reading.aesthetic_score
    return Conditioning(context, _with_numbers(pooled, (*_cut(pipe, reading), score)))


def unclip(pipe: Pipeline, prompts: Prompts, reading: Reading) -> Conditioning:
    """Stable Diffusion 2.1 unCLIP: an image's embedding, noised, and the noise level as y; zeros for the negative.

    The noise is the same for all images; it is added to the embedding less the mean of such embeddings, over their
    standard deviation, where these are given.  Ramesh et al. 2022, sec. 2; CLIPEmbeddingNoiseAugmentation of
    stablediffusion.
    """
    width = (pipe.family.unet.vector_dim or 0) // 2
    embedding, level, statistics = reading.image_embedding, reading.noise_level, reading.image_statistics
    if embedding is None:
        raise ValueError(
            f"{pipe.family.title} reads an image's CLIP embedding (1, {width}) beside the prompt: "
            "give one with --image-embedding FILE"
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
    sinusoid = timestep_embedding(torch.tensor([level], device="cpu"), width)
    y = torch.cat([noised * deviation + mean, sinusoid], dim=1).to(pipe.device)
    return clip(pipe, prompts, reading)._replace(y=(y * (not reading.negative)).repeat(len(prompts), 1))


def unclip_l(pipe: Pipeline, prompts: Prompts, reading: Reading) -> Conditioning:
    """unCLIP of CLIP-L's embeddings: it was trained with their statistics, which its file lacks."""
    if reading.image_statistics is None and reading.noise_level:
        raise ValueError(
            f"{pipe.family.title} adds noise by statistics that its file lacks: give karlo's ViT-L-14_stats.th with "
            "--image-statistics FILE, or take --noise-level 0"
        )
    return unclip(pipe, prompts, reading)


# ---- parts of these -------------------------------------------------------------------------------------------------


def _read(tokenizer: TextTokenizer, prompts: Prompts, reading: Reading) -> Chunks:
    """Ids and weights (B * K, T) of prompts that all have as many chunks; no prompt is an empty one."""
    parts = [chunks(tokenizer, prompt or "", reading.syntax) for prompt in prompts]
    num_chunks = max(reading.num_chunks, *(len(part.ids) for part in parts))
    empty = chunks(tokenizer, "")
    padded = [part for each in parts for part in (each, *[empty] * (num_chunks - len(each.ids)))]
    return Chunks(torch.cat([part.ids for part in padded]), torch.cat([part.weights for part in padded]))


def _learned(pipe: Pipeline, encoder: nn.Module) -> Tensor | None:
    """The vectors of textual inversion that are for an encoder (V,D)."""
    assert isinstance(encoder, CLIPTextEncoder | OpenCLIPTextEncoder)
    return pipe.learned.get(encoder.spec.width)


def _joined(context: Tensor, num_prompts: int) -> Tensor:
    """Contexts of chunks (B * K, T, D) -> of prompts (B, K * T, D)."""
    return context.reshape(num_prompts, -1, context.shape[2])


def _big(
    pipe: Pipeline, encoder: nn.Module | None, spec: EncoderSpec | None, prompts: Prompts, reading: Reading
) -> tuple[Tensor, Tensor]:
    """Context (B, K * T, D) and pooled output (B, D) of OpenCLIP; the latter of each prompt's first chunk."""
    tokenizer = tokenizer_of(spec)
    assert tokenizer is not None
    assert pipe.tokenizer is not None
    assert isinstance(encoder, OpenCLIPTextEncoder)
    parts = _read(replace(tokenizer, added=pipe.tokenizer.added), prompts, reading)
    learned = _learned(pipe, encoder)
    context, pooled = encoder.context_and_pooled(parts.ids.to(pipe.device), reading.clip_skip, learned)
    pooled = pooled.reshape(len(prompts), -1, pooled.shape[1])[:, 0]
    return _joined(weighted(context, parts.weights), len(prompts)), pooled


def _size(pipe: Pipeline, reading: Reading) -> tuple[int, int]:
    return (pipe.family.resolution, pipe.family.resolution) if reading.size is None else reading.size


def _cut(pipe: Pipeline, reading: Reading) -> tuple[int, int, int, int]:
    """Height and width of the original, top and left of what was cut from it."""
    original = _size(pipe, reading) if reading.original_size is None else reading.original_size
    return (*original, *reading.crop_top_left)


def _with_numbers(pooled: Tensor, numbers: Sequence[float]) -> Tensor:
    """Pooled outputs (B,D) and the sinusoids of some numbers, 256 each, the same for all of B -> y (B,V)."""
    sinusoids = timestep_embedding(torch.tensor(numbers, device=pooled.device), 256).flatten()
    return torch.cat([pooled, sinusoids.to(pooled.dtype).expand(len(pooled), -1)], dim=1)


CONDITIONERS: dict[str, Conditioner] = {
    "clip": clip,
    "sdxl": sdxl,
    "refiner": refiner,
    "unclip": unclip,
    "unclip_l": unclip_l,
    "bert": bert,
    "nothing": lambda pipe, prompts, reading: inputs.nothing(pipe, prompts),
    "classes": lambda pipe, prompts, reading: inputs.classes(pipe, prompts),
    "layouts": lambda pipe, prompts, reading: inputs.layouts(pipe, prompts),
    "label_maps": lambda pipe, prompts, reading: inputs.label_maps(pipe, prompts, _size(pipe, reading)),
    "embeddings": lambda pipe, prompts, reading: inputs.embeddings(pipe, prompts, reading.num_chunks),
}
# The fields of a Reading, which are also options, that only some conditioners heed.
CUT = ("original_size", "crop_top_left")
HEEDS = {
    "sdxl": (*CUT, "target_size"),
    "refiner": (*CUT, "aesthetic_score", "negative_aesthetic_score"),
    "unclip": ("image_embedding",),
    "unclip_l": ("image_embedding", "image_statistics"),
}
# How long a prompt is that is no text.
LENGTHS: dict[str, Callable[[Pipeline, str], int]] = {
    "embeddings": lambda pipe, prompt: len(inputs.read_embeddings(pipe, prompt))
}
OPTIONAL = ("nothing",)  # conditioners that read no prompt
