"""A family: one kind of checkpoint, with its networks, noise schedule and default settings; Stable Diffusion 1.x.

Further families add a function to FAMILIES that says whether a file is theirs, and with which sizes.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from ldm_lite.core.clip import CLIPSpec
from ldm_lite.core.denoise import Conditioning
from ldm_lite.core.files import Tensors, imported
from ldm_lite.core.networks import KINDS
from ldm_lite.core.schedule import Prediction, Schedule, scaled_linear_betas
from ldm_lite.core.tokenizer import CLIPTokenizer
from ldm_lite.core.unet import UNetSpec
from ldm_lite.core.vae import VAESpec

Facts = Mapping[str, str]  # what a file's own metadata says, or the user
PREFIX = "ldm_lite."  # of our names in a file's metadata, where other programs write too
SIGNATURE = {"family", "scale_factor", "resolution", "num_timesteps"}  # files of earlier versions have no prefix
Specs = Mapping[str, Any]  # by kind, as the weights show them: without heads


@dataclass(frozen=True)
class Family:
    """One kind of checkpoint."""

    title: str
    specs: Mapping[str, Any]  # of its networks, by kind
    tokenizer: CLIPTokenizer  # texts -> ids (B,T)
    condition: Callable[[Any, Sequence[str]], Conditioning]  # of a Model and B prompts: what the UNet reads
    prediction: Prediction
    beta_start: float  # betas are linear in their square roots
    beta_end: float
    scale_factor: float  # the UNet's latents are the autoencoder's times this
    sampler: str
    resolution: int  # pixels per side
    steps: int
    scale: float  # of classifier-free guidance
    words: str = ""  # words of the text encoder's training, unless all: see words.py

    @property
    def schedule(self) -> Schedule:
        """The noise schedule of its betas."""
        betas = scaled_linear_betas(self.beta_start, self.beta_end)
        return Schedule.from_betas(betas, self.prediction)


# What metadata may say about a family: fact -> field of Family, and its type.
FACTS: dict[str, tuple[str, Any]] = {
    "title": ("title", str),
    "prediction": ("prediction", str),
    "beta_start": ("beta_start", float),
    "beta_end": ("beta_end", float),
    "scale_factor": ("scale_factor", float),
    "resolution": ("resolution", int),
    "sampler": ("sampler", str),
    "steps": ("steps", int),
    "guidance": ("scale", float),
    "words": ("words", str),
}
# And about a network, whose shapes do not show its heads: kind -> fact, and the size in its spec that heads divide.
HEADS = {"unet": ("unet_num_heads", "model_channels"), "clip": ("text_num_heads", "width")}


def clip_context(model: Any, prompts: Sequence[str]) -> Conditioning:
    """CLIP's hidden states of B prompts, as context (B,T,D)."""
    return {"context": model.networks["clip"](model.family.tokenizer(prompts).to(model.device))}


SD1 = Family(
    title="Stable Diffusion 1.x",
    specs={
        "unet": UNetSpec(
            in_channels=4,
            out_channels=4,
            model_channels=320,
            channel_mult=(1, 2, 4, 4),
            num_res_blocks=(2, 2, 2, 2),
            transformer_depth=(1, 1, 1, 0),
            middle_depth=1,
            context_dim=768,
            heads=8,
        ),
        "vae": VAESpec(
            channels=128,
            channel_mult=(1, 2, 4, 4),
            num_res_blocks=2,
            z_channels=4,
            embed_dim=4,
        ),
        "clip": CLIPSpec(
            vocab_size=49408,
            length=77,
            width=768,
            mlp_width=3072,
            layers=12,
            heads=12,
        ),
    },
    tokenizer=CLIPTokenizer(),
    condition=clip_context,
    prediction="eps",
    beta_start=0.00085,
    beta_end=0.012,
    scale_factor=0.18215,
    sampler="ddim",
    resolution=512,
    steps=50,
    scale=7.5,
)


def stable_diffusion_1(specs: Specs, parts: Mapping[str, Tensors], facts: Facts) -> Family | None:
    """Stable Diffusion 1.x, and networks of other sizes whose metadata has the rest."""
    if facts.get("family", "sd1") != "sd1" or not matches(specs, SD1, told="family" in facts):
        return None
    return with_facts(SD1, specs, facts)


# A kind of network that identifies the family -> (specs, parts, facts) -> Family or None, or its name,
# "module:function".
FAMILIES: list[tuple[str, Any]] = [("clip", stable_diffusion_1)]


def recognise(parts: Mapping[str, Tensors], metadata: Mapping[str, str], told: Facts) -> Family:
    """Return the family of a file, by its networks' shapes, its metadata and what the user says.

    Raises ValueError, one line, if these do not determine it, and for an unknown name in the user's metadata.
    """
    names = ["family", *FACTS, *(fact for fact, _ in HEADS.values())]
    for name in told.keys() - set(names):
        near = difflib.get_close_matches(name, names, n=1)
        hint = f"did you mean {near[0]}? " if near else ""
        raise ValueError(f"no metadata {name!r}: {hint}expected some of {', '.join(names)}")
    facts: dict[str, str] = {}
    if metadata.keys() >= SIGNATURE:
        facts |= metadata
    for name, value in metadata.items():
        if name.startswith(PREFIX):
            facts[name.removeprefix(PREFIX)] = value
    facts |= told
    specs = {}
    for kind, tensors in parts.items():
        specs[kind] = imported(KINDS[kind].spec).from_shapes(tensors.shapes)
    for kind, family_of in FAMILIES:
        if kind in parts and (family := imported(family_of)(specs, parts, facts)) is not None:
            return family
    raise ValueError(
        f"unknown model, with {' and '.join(specs)}: its metadata, or `metadata=`, must name the family and tell "
        "unet_num_heads, text_num_heads, scale_factor, resolution"
    )


def matches(specs: Specs, known: Family, told: bool) -> bool:
    """Whether the networks of a file are those of a known family: in kind and, unless metadata says so, in size."""
    if not known.specs.keys() <= specs.keys():
        return False
    if told:
        return True
    for kind, spec in known.specs.items():
        for name, size in vars(specs[kind]).items():
            if size is not None and size != getattr(spec, name):  # None: shapes do not show it
                return False
    return True


def with_facts(known: Family, specs: Specs, facts: Facts) -> Family:
    """Return a known family with the sizes of a file's networks, and its facts.  Raises ValueError for nonsense."""
    values = {}
    for fact, (field, value_type) in FACTS.items():
        if fact in facts:
            values[field] = _fact(facts, fact, value_type)
    if values.get("prediction", "eps") not in ("eps", "v"):
        raise ValueError(f"the metadata name the prediction {values['prediction']!r}, expected eps or v")
    complete = dict(specs)
    for kind, (fact, width) in HEADS.items():
        heads = _fact(facts, fact, int) if fact in facts else known.specs[kind].heads
        size = getattr(specs[kind], width)
        if heads < 1 or size % heads:
            raise ValueError(f"{heads} heads do not divide the width {size} of the {kind}: give metadata {fact}=NUMBER")
        complete[kind] = replace(specs[kind], heads=heads)
    tokenizer = replace(known.tokenizer, length=specs["clip"].length)
    return replace(known, specs=complete, tokenizer=tokenizer, **values)


def _fact(facts: Facts, name: str, value_type: Any) -> Any:
    """Return a fact as a str, int or float, from 0 on.  Raises ValueError, naming the fact, for any other value."""
    try:
        value = value_type(facts[name])
        is_valid = value_type is str or 0 <= value < math.inf
    except (ValueError, TypeError):
        is_valid = False
    if not is_valid:
        expected = "a whole number" if value_type is int else "a number"
        raise ValueError(f"got metadata {name}={facts[name]!r}, expected {expected}")
    return value


def schedule_of(file: Tensors, family: Family) -> Schedule:
    """Return the noise schedule of a file's buffer, or the family's, if the buffer is that, rounded, or missing.

    Original files hold the family's schedule in float32 or float16; save() writes it exactly, in float64.
    """
    if "alphas_cumprod" not in file:
        return family.schedule
    stored, known = file["alphas_cumprod"], family.schedule.alpha_bar
    values = stored.double().numpy()
    is_rounded = stored.dtype != torch.float64 and stored.shape == known.shape
    if is_rounded and np.allclose(values, known, rtol=2e-3, atol=1e-4):
        return family.schedule
    return Schedule(values, family.prediction)


def facts_of(family: Family) -> dict[str, str]:
    """Return the metadata of which with_facts() makes the same family again: see saving.save."""
    values = {fact: value for fact, (field, _) in FACTS.items() if (value := getattr(family, field)) != ""}
    heads = {fact: family.specs[kind].heads for kind, (fact, _) in HEADS.items()}
    facts = {"family": "sd1", **values, **heads}
    return {PREFIX + fact: str(value) for fact, value in facts.items()}
