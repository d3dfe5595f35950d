"""A family: one kind of checkpoint, with its networks, noise schedule and default settings; Stable Diffusion 1.x.

Further families add a function to FAMILIES that says whether a file is theirs, and with which sizes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ldm_lite.core.clip import CLIPSpec
from ldm_lite.core.denoise import Conditioning
from ldm_lite.core.files import Tensors, imported
from ldm_lite.core.networks import KINDS
from ldm_lite.core.schedule import Prediction
from ldm_lite.core.tokenizer import CLIPTokenizer
from ldm_lite.core.unet import UNetSpec
from ldm_lite.core.vae import VAESpec

Facts = Mapping[str, str]  # what a file's own metadata tell, or the user
PREFIX = "ldm_lite."  # of our names in a file's metadata, where other programs write too
SIGNATURE = {"family", "scale_factor", "resolution", "num_timesteps"}  # files of earlier versions have no prefix
Specs = Mapping[str, Any]  # by kind, as weights tell them: without heads


@dataclass(frozen=True)
class Family:
    """One kind of checkpoint."""

    title: str
    networks: Mapping[str, Any]  # kind -> spec
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


# What metadata may tell: fact -> field of Family, and its type; and of networks, whose weights do not tell their heads:
# kind -> fact, and the size that heads divide.
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
}
HEADS = {"unet": ("unet_num_heads", "model_channels"), "clip": ("text_num_heads", "width")}


def clip_context(model: Any, prompts: Sequence[str]) -> Conditioning:
    """CLIP's hidden states of B prompts, as context (B,T,D)."""
    return {"context": model.networks["clip"](model.family.tokenizer(prompts).to(model.device))}


SD1 = Family(
    title="Stable Diffusion 1.x",
    networks={
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
        "vae": VAESpec(channels=128, channel_mult=(1, 2, 4, 4), num_res_blocks=2, z_channels=4, embed_dim=4),
        "clip": CLIPSpec(vocab_size=49408, length=77, width=768, mlp_width=3072, layers=12, heads=12),
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
    """Stable Diffusion 1.x, and networks of other sizes whose metadata tell the rest."""
    if facts.get("family", "sd1") != "sd1" or not matches(specs, SD1, told="family" in facts):
        return None
    return with_facts(SD1, specs, facts)


# A kind of network that tells the family -> (specs, parts, facts) -> Family or None, or its name, "module:function".
FAMILIES: list[tuple[str, Any]] = [("clip", stable_diffusion_1)]


def recognise(parts: Mapping[str, Tensors], metadata: Mapping[str, str], told: Facts) -> Family:
    """Return the family of a file, by its networks' shapes, its metadata and what the user says; else ValueError."""
    facts = {name.removeprefix(PREFIX): value for name, value in metadata.items() if name.startswith(PREFIX)}
    facts = {**(metadata if metadata.keys() >= SIGNATURE else {}), **facts, **told}
    specs = {kind: imported(KINDS[kind].spec).from_shapes(tensors.shapes) for kind, tensors in parts.items()}
    for kind, family_of in FAMILIES:
        if kind in parts and (family := imported(family_of)(specs, parts, facts)) is not None:
            return family
    raise ValueError(
        f"unknown model, with {' and '.join(specs)}: its metadata, or `metadata=`, must name the family and tell "
        "unet_num_heads, text_num_heads, scale_factor, resolution"
    )


def matches(specs: Specs, row: Family, told: bool) -> bool:
    """Whether the networks of a file are those of a row: in kind and, unless the family is told, in size."""
    if not row.networks.keys() <= specs.keys():
        return False
    differing = [vars(specs[kind]).items() - vars(spec).items() for kind, spec in row.networks.items()]
    return told or all(value is None for items in differing for _, value in items)  # None: weights do not tell


def with_facts(row: Family, specs: Specs, facts: Facts) -> Family:
    """Return a row with the sizes of a file's networks, and with its facts.  Raises ValueError for nonsense."""
    values = {field: kind(facts[fact]) for fact, (field, kind) in FACTS.items() if fact in facts}
    if values.get("prediction", "eps") not in ("eps", "v"):
        raise ValueError(f"the metadata name the prediction {values['prediction']!r}, wanted eps or v")
    networks = dict(specs)
    for kind, (fact, width) in HEADS.items():
        heads = int(facts.get(fact, row.networks[kind].heads))
        if heads < 1 or getattr(specs[kind], width) % heads:
            size = getattr(specs[kind], width)
            raise ValueError(f"{heads} heads do not divide the width {size} of the {kind}: give metadata {fact}=NUMBER")
        networks[kind] = replace(specs[kind], heads=heads)
    tokenizer = replace(row.tokenizer, length=specs["clip"].length)
    return replace(row, networks=networks, tokenizer=tokenizer, **values)


def facts_of(family: Family) -> dict[str, str]:
    """Return the metadata of which with_facts() makes the same family again: see networks.save_networks."""
    values = {fact: getattr(family, field) for fact, (field, _) in FACTS.items()}
    heads = {fact: family.networks[kind].heads for kind, (fact, _) in HEADS.items()}
    return {PREFIX + fact: str(value) for fact, value in {"family": "sd1", **values, **heads}.items()}
