"""The LDM zoo and the x4 upscaler in miniature, and their runs' inputs: what make_zoo_goldens.py and tests share."""

from dataclasses import dataclass, replace
from typing import Any

import torch
import toy
from torch import Tensor

from ldm_lite.models.bert import BERTSpec
from ldm_lite.zoo.families import FAMILIES, Family
from ldm_lite.zoo.networks import BERT_LARGE, OPEN_CLIP_H

VQ = replace(toy.VQ_F16, z_channels=3, embed_dim=3, attn_levels=())
KL = replace(toy.KL_F16, z_channels=4, embed_dim=4, attn_levels=())
LDM, UNCONDITIONAL = toy.UNETS["ldm_text2img256"], toy.UNETS["ldm_celeba_ffhq_beds256"]
FOUR: dict[str, Any] = {"in_channels": 4, "out_channels": 4}

SMALL: dict[str, dict[str, Any]] = {  # what differs from the rows of the same names
    "ldm_celeba_ffhq_beds256": {"unet": UNCONDITIONAL, "vae": VQ},
    "ldm_lsun_churches256": {"unet": toy.UNETS["ldm_lsun_churches256"], "vae": KL},
    "ldm_text2img_large": {
        "unet": replace(toy.SD1, context_dim=40),
        "vae": KL,
        "text": replace(BERT_LARGE, width=40, layers=2),
    },
    "ldm_text2img256": {"unet": LDM, "vae": VQ, "text": replace(BERT_LARGE, width=40, layers=2)},
    "ldm_cin256_v2": {"unet": replace(LDM, num_heads=1, head_dim=None), "vae": VQ, "text": toy.CLASSES},
    "ldm_cin256": {
        "unet": replace(LDM, **FOUR, transformer_depth=(1, 1, 1)),
        "vae": toy.VQ_F16,
        "text": replace(toy.CLASSES, num_classes=10, unconditional=None),
    },
    "ldm_layout2img": {
        "unet": toy.UNETS["ldm_layout2img"],
        "vae": VQ,
        "text": BERTSpec(vocab_size=8192, length=92, width=40, layers=2),
    },
    "ldm_semantic_synthesis": {
        "unet": replace(UNCONDITIONAL, in_channels=6, transformer_depth=(0, 0, 0), num_heads=4, head_dim=None),
        "vae": VQ,
        "text": toy.LABEL_MAP,
    },
    "rdm768": {"unet": replace(LDM, **FOUR), "vae": KL},
    "ldm_inpainting_big": {"unet": toy.UNETS["ldm_inpainting_big"], "vae": replace(VQ, mid_attn=False)},
    "ldm_bsr_sr": {"unet": replace(UNCONDITIONAL, in_channels=6), "vae": VQ},
    "x4": {
        "unet": toy.UNETS["x4"],
        "vae": KL,
        "text": replace(OPEN_CLIP_H, width=48, mlp_width=96, layers=2, heads=4),
    },
}


def small(name: str) -> Family:
    """A family in miniature, by its name in FAMILIES."""
    row = FAMILIES[name]
    return replace(row, title=f"small {row.title}", resolution=32, **SMALL[name])


@dataclass(frozen=True)
class Run:
    """A run of DDIM, the original's way, whose last latents and picture are stored."""

    steps: int = 4
    scale: float = 1.0  # of guidance
    tile: int | None = None  # of a picture that is denoised tile by tile
    decoded: bool = False  # whether the picture is stored, too


RUNS = {
    "ldm_celeba_ffhq_beds256": Run(),
    "ldm_lsun_churches256": Run(decoded=True),
    "ldm_text2img_large": Run(scale=5.0),
    "ldm_text2img256": Run(scale=5.0),
    "ldm_cin256_v2": Run(scale=3.0, decoded=True),
    "ldm_cin256": Run(),
    "ldm_layout2img": Run(),
    "ldm_semantic_synthesis": Run(),
    "rdm768": Run(scale=5.0),
    "ldm_inpainting_big": Run(decoded=True),
    "ldm_bsr_sr": Run(tile=8),
    "x4": Run(scale=9.0, decoded=True),
}
PROMPTS = ("a virus monster playing guitar", "")  # of text-to-image models, and what to keep away from
CLASS = 7
NOISE_LEVEL = 20


def latent_size(name: str) -> tuple[int, int]:
    """(h,w) of a run's latents."""
    return (8, 16) if RUNS[name].tile else (4, 8)


def noise(name: str) -> Tensor:
    """The noise that a run begins with (1,C,h,w)."""
    return toy.normal(20, 1, small(name).vae.embed_dim, *latent_size(name))


def picture(name: str) -> Tensor:
    """What is made larger (1,3,h,w), or repainted (1,3,4h,4w), in [-1,1]."""
    h, w = latent_size(name)
    size = (4 * h, 4 * w) if name == "ldm_inpainting_big" else (h, w)
    return torch.tanh(toy.normal(21, 1, 3, *size))


def hole() -> Tensor:
    """What of a picture is repainted (1,1,16,32): 1 there, and 0 elsewhere; whole latent positions of it."""
    mask = torch.zeros(1, 1, 16, 32)
    mask[:, :, 4:12, 8:20] = 1
    return mask


def upscale_noise() -> Tensor:
    """The noise on the picture that the x4 upscaler reads (1,3,4,8)."""
    return toy.normal(22, 1, 3, *latent_size("x4"))


def upscale_contexts() -> Tensor:
    """What the x4 upscaler reads of a prompt, and of none (2,5,48)."""
    return toy.normal(23, 2, 5, 48)


def neighbours() -> Tensor:
    """A text's embedding and two neighbours', normalised, as rdm reads them (1,3,40)."""
    return torch.nn.functional.normalize(toy.normal(24, 1, 3, 40), dim=2)


def labels() -> Tensor:
    """A map of labels as large as a run's picture (1,16,32)."""
    return torch.cat([toy.label_map(), toy.label_map()[:, :, :8]], dim=2)
