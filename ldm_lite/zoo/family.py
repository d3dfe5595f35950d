"""A family of checkpoints: its networks, noise process and default settings.  families/ has the rows.

build() makes the network of a spec, importing its module then.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from torch import nn

from ldm_lite.core.files import Tensors, imported
from ldm_lite.core.vae import VAESpec
from ldm_lite.diffusion.flow import Clock, FlowSchedule
from ldm_lite.diffusion.schedule import AnyPrediction, Array, NoiseSchedule, cosine_betas, scaled_linear_betas
from ldm_lite.models.pixels import PixelSpec

if TYPE_CHECKING:
    from ldm_lite.core.vae import AutoencoderKL
    from ldm_lite.models.pixels import Pixels
    from ldm_lite.models.taesd import TAESD
    from ldm_lite.models.vae_vq import VQModel

    Autoencoder = AutoencoderKL | VQModel | TAESD | Pixels
else:
    Autoencoder = Any
Spec = Any  # a frozen dataclass of sizes, of one of these classes

NETWORKS = {  # the class of a spec -> its network's, unless that is its name without "Spec", in the same module
    "IFSpec": "ldm_lite.models.unet_if:UNetIF",
    "VAESpec": "ldm_lite.core.vae:AutoencoderKL",
    "VQSpec": "ldm_lite.models.vae_vq:VQModel",
    "PixelSpec": "ldm_lite.models.pixels:Pixels",
    "CLIPTextSpec": "ldm_lite.models.clip:CLIPTextModel",
    "OpenCLIPTextSpec": "ldm_lite.models.open_clip:OpenCLIPTextEncoder",
    "T5Spec": "ldm_lite.models.t5:T5Encoder",
    "Qwen25Spec": "ldm_lite.models.qwen25_vl:Qwen25VL",
    "BERTSpec": "ldm_lite.models.bert:BERTTextEncoder",
    "ClassSpec": "ldm_lite.models.embedders:ClassEmbedder",
    "LabelMapSpec": "ldm_lite.models.embedders:LabelMapRescaler",
    "RRDBSpec": "ldm_lite.models.rrdb:RRDBNet",
}
KL_F8 = VAESpec(channels=128, channel_mult=(1, 2, 4, 4), num_res_blocks=2, z_channels=4, embed_dim=4)
KL_F8_16 = replace(KL_F8, z_channels=16, embed_dim=16, quant=False)


def build_network(spec: Spec) -> nn.Module:
    """Build the network that a spec describes, on the default device."""
    module, name = type(spec).__module__, type(spec).__name__
    network: nn.Module = imported(NETWORKS.get(name, f"{module}:{name.removesuffix('Spec')}"))(spec)
    return network


def scale_of(vae: Spec) -> dict[str, Any]:
    """Return the fields of Family that an autoencoder determines: TAESD's latents are the network's as they are."""
    return {"scale_factor": 1.0, "shift_factor": 0.0} if type(vae).__name__ == "TAESDSpec" else {}


IN_THE_FILE = math.nan  # a scale factor that is stored only in the file's buffer `scale_factor`

# ---- noise processes ------------------------------------------------------------------------------------------------

COSINE = "squaredcos_cap_v2"  # the curve of Nichol and Dhariwal 2021, which has no start and end
CURVES = ("scaled_linear", "linear", COSINE)


@dataclass(frozen=True)
class Preserving:
    """A variance-preserving noise process with 1000 betas, on a curve by its name in diffusers."""

    start: float = 0.0  # the first and the last beta
    end: float = 0.0
    curve: str = "scaled_linear"  # linear in their square roots; or "linear" themselves
    values: tuple[float, ...] | None = None  # the betas themselves, (1000,), in place of these three

    @property
    def betas(self) -> Array:
        """The betas, (1000,)."""
        if self.values is not None:
            return np.array(self.values, dtype=np.float64)
        if self.curve == COSINE:
            return cosine_betas()
        if self.curve == "linear":
            return np.linspace(self.start, self.end, 1000)
        return scaled_linear_betas(self.start, self.end)

    def schedule(self, prediction: AnyPrediction) -> NoiseSchedule:
        """The schedule of a network with this prediction type."""
        return NoiseSchedule.from_betas(self.betas, prediction)


@dataclass(frozen=True)
class Flow:
    """A rectified flow: its shift, a constant or by the image's size, and the time that the network is given."""

    clock: Clock
    spacing: str  # the default of all samplers
    shift: float = 1.0
    by_size: tuple[float, float] | None = None  # log of the shift at 256 and 4096 tokens

    def schedule(self, prediction: AnyPrediction) -> NoiseSchedule:
        """The schedule of a network with this prediction type."""
        schedule = FlowSchedule.of(self.shift, self.by_size, self.clock, prediction, self.spacing)
        return schedule.sized(4096)  # 1024 px, until the size is known


@dataclass(frozen=True)
class SkipLayers:
    """Guidance away from the prediction without some blocks, in a part of the steps: skip-layer guidance."""

    layers: tuple[int, ...]
    scale: float
    start: float  # fractions of the steps, both excluded
    end: float


class Hint(NamedTuple):
    """A family with the same weights' shapes: a message about files whose name has a word, or lacks it."""

    word: str
    family: str
    lacks: bool = False

    def text(self, title: str) -> str:
        """The message about a file that was taken for the family of this title."""
        why = f"lacks {self.word!r}" if self.lacks else f"suggests {self.word.title()}"
        return (
            f"taken for {title}, but its name {why}: weights of {self.family} have the same shapes; "
            f"if it is that, add `metadata=family={self.family}`"
        )


class Recipe(NamedTuple):
    """Defaults of networks that were distilled or trained further, which only a file's name shows."""

    word: str  # a pattern in the name of a checkpoint, in small letters
    source: str  # the source
    steps: int | None = None  # unless the name has them, as "8steps" does
    scale: float | None = None
    sampler: str | None = None
    prediction: AnyPrediction | None = None
    lora: str | None = None  # a pattern in the name of a LoRA, if it is another one

    def applied(self, family: FamilyRow, name: str) -> FamilyRow:
        """Return the family with these defaults."""
        told = re.search(r"(?<![\d.])(\d{1,2})[-_ ]?steps?(?![a-z])", name.lower())
        steps = self.steps if told is None or self.steps is None else int(told[1])
        values: dict[str, Any] = {
            "steps": steps,
            "scale": self.scale,
            "sampler": self.sampler,
            "prediction": self.prediction,
        }
        return replace(family, **{name: value for name, value in values.items() if value is not None})

    def text(self, name: str, family: FamilyRow) -> str:
        """The message about a file with such a name, of the family with these defaults."""
        steps = f"{family.steps} step{'s' * (family.steps != 1)} of {family.sampler} at scale {family.scale:g}"
        if self.steps is None:
            return f"{name}: its name says {family.prediction} prediction, which is used: `prediction` overrides that"
        return f"{name}: by its name, as {self.source}: {steps}; `steps`, `sampler` and `scale` override that"


def recipe_of(family: FamilyRow, name: str, is_lora: bool = False) -> Recipe | None:
    """Return the first of the family's recipes for a file of this name."""
    words = ((recipe.lora or recipe.word if is_lora else recipe.word, recipe) for recipe in family.recipes)
    return next((recipe for word, recipe in words if re.search(word, name.lower())), None)


class References(NamedTuple):
    """How a family takes the images that its network reads besides the noised one."""

    fit: Callable[[Any, int], Any]  # (PIL image, multiple of its sides) -> the image of which latents are read
    sized_by: int = 0  # the index of the image whose size is the default of a result
    most: int | None = None


class Folder(NamedTuple):
    """The configurations of a diffusers folder, which may say what weights do not show."""

    name: str  # of the pipeline's class
    pipeline: Mapping[str, Any]  # model_index.json
    network: Mapping[str, Any]  # of the denoising one
    scheduler: Mapping[str, Any]


Noise = Preserving | Flow


@dataclass(frozen=True)
class FamilyRow:
    """One kind of checkpoint: its networks, its noise process, and its default settings."""

    title: str
    unet: Spec  # of the network that denoises; most code that reads it is for UNets alone
    vae: Spec
    text_encoders: tuple[Spec, ...]  # encoders of the prompt: text, a class, boxes, a label map
    conditioner: str  # how their outputs become the UNet's inputs: a key of CONDITIONERS, or a file of families/
    prediction: AnyPrediction
    noise: Noise
    scale_factor: float  # UNet latents = scale_factor * (autoencoder latents - shift_factor); may be IN_THE_FILE
    sampler: str  # any name of a sampler, with its timestep spacing
    resolution: int  # pixels per side
    steps: int
    scale: float  # classifier-free guidance, or the one that a distilled network reads
    task: str = "txt2img"  # and tasks built on it; or "inpaint", ...: see job.TASKS
    sgm: bool = False  # text encoders have the key names of generative-models
    shift_factor: float = 0.0
    # Of the v-prediction variant, which only weights tell apart; None = no such variant.
    v_resolution: int | None = None
    vae_overflows: bool = False  # the autoencoder overflows in float16, so it stays in float32
    threshold: tuple[float, float] | None = None  # percentile and limit of dynamic thresholding, for pixel models
    # The original code samples with the EMA copy: `use_ema` of its config, and its ema_scope.
    original_ema: bool = False
    words: str = ""  # words of its text encoder's training, unless all: see core/words.py
    thinks: bool = True  # Qwen3's answer may begin with thoughts
    skip_layers: SkipLayers | None = None  # guidance by leaving blocks out
    ays: str = "ays"  # the spacing that Align Your Steps found for its networks
    norm_patch: int | None = None  # guidance keeps the norm of the conditional output in patches of so many positions
    references: References | None = None  # None: it reads none
    optional: tuple[Spec, ...] = ()  # text encoders that a model may lack
    dtype: str | None = None  # on a GPU, if not float16, which some values exceed
    vae_file: str = "FILE"  # one with the autoencoder, on the hub, for a file that lacks it
    text_files: tuple[str, ...] = ()  # the same with each text encoder
    scheduler: str | None = None  # in a diffusers folder, which distinguishes it from others with the same networks
    called: str = ""  # a pattern of its names at trainers and hubs, by which a LoRA's metadata name its base
    base_version: str = ""  # kohya's name for it in a LoRA's metadata
    # A pattern of a key that a network of its keys lacks.
    look_alikes: Mapping[str, str] = field(default_factory=dict, hash=False)
    of_folder: Callable[[Folder], str | None] | None = None  # the name of the row of a diffusers folder
    hints: tuple[Hint, ...] = ()
    recipes: tuple[Recipe, ...] = ()  # the first whose word is in a file's name sets its defaults
    predicts: Callable[[Tensors], tuple[AnyPrediction, str]] | None = None  # by a UNet's weights, with the reason
    with_loras: Callable[[FamilyRow, Tensors, Sequence[Any]], tuple[FamilyRow, Tensors]] | None = None  # that change it

    @property
    def distilled(self) -> bool:
        """Whether the network reads the guidance scale, so that there is no guidance by branches."""
        return self.unet.guidance_dim is not None or bool(getattr(self.unet, "guidance", False))

    @property
    def reads_images(self) -> bool:
        """Whether the network reads images besides the latents."""
        return self.task == "edit" or self.references is not None or self.unet.in_channels != self.vae.embed_dim

    @property
    def is_small(self) -> bool:
        """Whether its images are so small that other sizes are distorted."""
        return self.resolution < 256

    @property
    def text(self) -> Spec | None:
        """Spec of the first text encoder; None if there is none."""
        return self.text_encoders[0] if self.text_encoders else None

    @property
    def specs(self) -> dict[str, Spec]:
        """The sizes of its networks by role: "unet", "vae", "text_encoder", "text_encoder_2", ..."""
        specs: dict[str, Spec] = {"unet": self.unet}
        if not isinstance(self.vae, PixelSpec):
            specs["vae"] = self.vae
        return specs | self.texts

    @property
    def texts(self) -> dict[str, Spec]:
        """Specs of its text encoders by role."""
        return dict(zip(text_roles(self.text_encoders), self.text_encoders, strict=True))


def text_roles(encoders: Sequence[object]) -> list[str]:
    """Return the roles of text encoders: "text_encoder", "text_encoder_2", ..."""
    return [f"text_encoder_{i + 1}" if i else "text_encoder" for i in range(len(encoders))]
