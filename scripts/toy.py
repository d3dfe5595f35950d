"""What make_goldens.py and the tests share: a toy denoiser, networks in miniature, and their inputs.

Weights and inputs are rebuilt from keys and seeds (numpy's PCG64), so that only the outputs of the independent
implementations need to be stored.  Needs nothing beyond ldm_lite's own dependencies.
"""

from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from random_checkpoint import SMALL, random_tensor
from torch import Tensor, nn

from ldm_lite.models.bert import BERTSpec
from ldm_lite.models.clip_vision import CLIPVisionEncoder, CLIPVisionSpec
from ldm_lite.models.controlnet import ControlNet
from ldm_lite.models.embedders import ClassSpec, LabelMapSpec
from ldm_lite.models.open_clip import OpenCLIPTextSpec
from ldm_lite.models.style_adapter import StyleAdapter, StyleAdapterSpec
from ldm_lite.models.t2i_adapter import AdapterSpec
from ldm_lite.models.t5 import T5Spec
from ldm_lite.models.taesd import TAESDSpec
from ldm_lite.models.unet import UNetSpec
from ldm_lite.models.unet_if import IFSpec
from ldm_lite.models.vae_kl import VAESpec
from ldm_lite.models.vae_vq import VQSpec

# ---- networks -------------------------------------------------------------------------------------------------------

SD1 = replace(
    SMALL.unet,
    channel_mult=(1, 2, 2),
    num_res_blocks=(2, 2, 2),
    transformer_depth=(1, 1, 0),
    cross_only=(False, False, False),
    context_dim=48,
)
LDM = replace(  # ldm_text2img256
    SD1,
    in_channels=3,
    out_channels=3,
    channel_mult=(1, 2, 3),
    num_res_blocks=(1, 1, 1),
    transformer_depth=(0, 1, 1),
    num_heads=None,
    head_dim=16,
    context_dim=40,
)
UNCONDITIONAL = replace(LDM, context_dim=None)
SD2 = replace(SD1, num_heads=None, head_dim=16, linear_proj=True)

# Every kind of LDM UNet, by the name of a family of that kind in ldm_lite.families.UNETS.
UNETS: dict[str, UNetSpec] = {
    "sd1": SD1,
    "sd1_inpaint": replace(SD1, in_channels=9),
    "ldm_text2img256": LDM,
    "ldm_layout2img": replace(
        LDM,
        channel_mult=(1, 2),
        num_res_blocks=(1, 1),
        transformer_depth=(0, 3),
        middle_depth=3,
        cross_only=(False, False),
    ),
    "ldm_celeba_ffhq_beds256": UNCONDITIONAL,
    "ldm_lsun_churches256": replace(
        UNCONDITIONAL,
        in_channels=4,
        out_channels=4,
        num_res_blocks=(2, 2, 2),
        transformer_depth=(1, 1, 0),
        num_heads=4,
        head_dim=None,
        scale_shift=True,
        resblock_updown=True,
    ),
    "ldm_inpainting_big": replace(UNCONDITIONAL, in_channels=7, num_heads=4, head_dim=None, resblock_updown=True),
    "sd2": SD2,
    "sd2_unclip_h": replace(SD2, vector_dim=24),
    "x4": replace(
        SD2,
        in_channels=7,
        transformer_depth=(0, 1, 1),
        num_heads=4,
        head_dim=None,
        cross_only=(False, True, False),
        num_classes=50,
    ),
    "sdxl_base": replace(SD2, transformer_depth=(0, 1, 2), middle_depth=2, vector_dim=24),
}

# Those that are compared in the format of diffusers too, and those that exist in no other.
DIFFUSERS_UNETS: dict[str, UNetSpec] = {
    **{name: UNETS[name] for name in ("sd1", "sd2", "sd2_unclip_h", "sdxl_base")},
    "lcm": replace(SD1, guidance_dim=32),
    "lcm_sdxl": replace(UNETS["sdxl_base"], guidance_dim=32),
}

# ControlNets that are compared in the format of diffusers, by the names of those that they are in miniature: some of
# SDXL's have fewer transformers than their UNet.
DIFFUSERS_CONTROLS: dict[str, UNetSpec] = {
    "sd15": SD1,
    "sd21": SD2,
    "sdxl": UNETS["sdxl_base"],
    "sdxl_mid": replace(UNETS["sdxl_base"], transformer_depth=(0, 1, 1), middle_depth=1),
    "sdxl_small": replace(UNETS["sdxl_base"], transformer_depth=(0, 0, 0), middle_depth=1),
}

# kl-f16 with its attention level; z_channels and embed_dim differ, as in no released autoencoder.
KL_F16 = VAESpec(
    channels=32, channel_mult=(1, 1, 2), num_res_blocks=1, z_channels=8, embed_dim=6, attn_levels=(2,), mid_attn=True
)
# vq-f16 with its attention level, and vq-f4-noattn without any; z_channels and embed_dim differ, as in none released.
VQ_F16 = VQSpec(
    channels=32,
    channel_mult=(1, 1, 2),
    num_res_blocks=1,
    z_channels=6,
    embed_dim=4,
    attn_levels=(2,),
    mid_attn=True,
    num_codes=40,
)
VQS = {"attn": VQ_F16, "noattn": replace(VQ_F16, attn_levels=(), mid_attn=False)}
TINY = TAESDSpec(embed_dim=4, encoder=True, decoder=True)
CLASSES = ClassSpec(num_classes=11, width=40, unconditional=10)
LABEL_MAP = LabelMapSpec(num_labels=6, channels=3, halvings=2)

OPEN_CLIP = OpenCLIPTextSpec(
    vocab_size=120,
    length=20,
    width=64,
    mlp_width=256,
    layers=3,
    heads=4,
    skip=1,
    norm=True,
    end_id=119,
    projection=True,
)
BERT = BERTSpec(vocab_size=120, length=20, width=48, layers=2)
T5 = T5Spec(
    vocab_size=120, width=48, mlp_width=80, layers=2, heads=4, head_dim=8, buckets=8, max_distance=12
)  # heads * head_dim is not the width, as in no released encoder

THRESHOLDS = ((100, 200), (20, 350))  # of Canny's edges
# Runs with a ControlNet: (weight, number of steps of ten that it steers, guess mode).
STEERED = {"plain": (1.0, 10, False), "half": (0.8, 5, False), "guess": (1.0, 10, True)}
# Runs of SDXL with several: (their names, weights, and shares of the steps after which they end).
STEERED_XL = {
    "one": (("sdxl",), (0.8,), (1.0,)),
    "two": (("sdxl", "sdxl_small"), (0.7, 1.2), (1.0, 0.5)),
}

# T2I-Adapters for SD1 and sdxl_base above, of every kind.
ADAPTERS = {
    "rgb": AdapterSpec(in_channels=3, factor=8, channels=(32, 64, 64), num_res_blocks=2, light=False),
    "gray": AdapterSpec(in_channels=1, factor=8, channels=(32, 64, 64), num_res_blocks=2, light=False),
    "light": AdapterSpec(in_channels=3, factor=8, channels=(32, 64, 64), num_res_blocks=2, light=True),
    "xl": AdapterSpec(in_channels=1, factor=16, channels=(32, 64, 64, 64), num_res_blocks=2, light=False),
}

IF_I = IFSpec(
    in_channels=3,
    out_channels=6,
    model_channels=32,
    channel_mult=(1, 2, 3),
    num_res_blocks=(2, 2, 2),
    transformer_depth=(0, 1, 1),
    middle_depth=1,
    num_heads=None,
    head_dim=16,
    context_dim=48,
    linear_proj=False,
    cross_only=(False, False, False),
    vector_dim=None,
    guidance_dim=None,
    num_classes=None,
    scale_shift=True,
    resblock_updown=True,
    pool_heads=4,
    super_resolution=False,
)
IF_STAGES = {
    "if_I": IF_I,
    "if_II": replace(
        IF_I,
        in_channels=6,
        num_res_blocks=(1, 2, 3),
        transformer_depth=(0, 0, 1),
        num_classes=1000,
        super_resolution=True,
    ),
}

# A cascade in miniature, of whose specs the files say all: heads 64 wide.
CASCADE = {
    name: replace(
        stage,
        model_channels=64,
        channel_mult=(1, 2),
        num_res_blocks=(1, 1),
        transformer_depth=(0, 1),
        cross_only=(False, False),
        head_dim=64,
        context_dim=192,
        pool_heads=3,
    )
    for name, stage in IF_STAGES.items()
}

LCM_RUNS = ((4, 8.0), (3, 1.7))  # steps and scale of an LCM's runs
LCM_SEED = 5  # of the noise that they add

T = torch.tensor([981.0, 1.0])  # the timesteps of the UNets' batch of two
T_FRACTIONAL = torch.tensor([437.25, 999.0])


def relative_error(ours: Tensor | NDArray[np.float64], theirs: NDArray[np.float64]) -> float:
    """|ours - theirs| / |theirs|, computed in float64."""
    ours, theirs = np.asarray(ours, dtype=np.float64), np.asarray(theirs, dtype=np.float64)
    assert ours.shape == theirs.shape, f"got {ours.shape}, wanted {theirs.shape}"
    return float(np.linalg.norm(ours - theirs) / np.linalg.norm(theirs))


def fill(network: nn.Module, prefix: str = "") -> nn.Module:
    """The network with weights that depend on its own keys (after the prefix) and their shapes alone."""
    shapes = {key: tuple(value.shape) for key, value in network.state_dict().items()}
    network.load_state_dict({key: random_tensor(prefix + key, shape) for key, shape in shapes.items()}, strict=True)
    return network.eval().requires_grad_(False)


def normal(seed: int, *shape: int) -> Tensor:
    """Unit noise, float32."""
    return torch.from_numpy(np.random.Generator(np.random.PCG64(seed)).standard_normal(shape, dtype=np.float32))


VISION = CLIPVisionSpec(size=32, patch=8, width=128, mlp_width=256, layers=2, heads=2, activation="quick_gelu")
STYLE = StyleAdapterSpec(num_tokens=3, width=128, context_dim=64, layers=2, heads=8)


def style() -> dict[str, Tensor]:
    """The weights of a style adapter for random_checkpoint.SMALL, as its file holds them."""
    return fill(StyleAdapter(STYLE), "style.").state_dict()


def vision() -> dict[str, Tensor]:
    """The weights of the image encoder that it looks through, without the prefix of its file."""
    return fill(CLIPVisionEncoder(VISION), "vision.").state_dict()


def control(spec: UNetSpec) -> dict[str, Tensor]:
    """The weights of a ControlNet for a UNet, as its file holds them."""
    return fill(ControlNet(spec), "control_model.").state_dict()


def unet_inputs(spec: UNetSpec, h: int = 8, w: int = 12) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """x (2,in_channels,h,w), and context (2,5,context_dim) and y (vector or classes), or None."""
    context = None if spec.context_dim is None else normal(2, 2, 5, spec.context_dim)
    width = (spec.vector_dim or 0) + (spec.guidance_dim or 0)
    y = normal(3, 2, width) if width else None
    if spec.num_classes is not None:
        y = torch.tensor([20, spec.num_classes - 1])
    return normal(1, 2, spec.in_channels, h, w), context, y


def label_map() -> Tensor:
    """Labels (1,16,24) of LABEL_MAP."""
    return torch.from_numpy(np.random.Generator(np.random.PCG64(9)).integers(0, LABEL_MAP.num_labels, (1, 16, 24)))


def layouts() -> list[list[tuple[int, float, float, float, float]]]:
    """Boxes (class, left, top, right, bottom) of three images: some, none, and as many as fit."""
    values = np.random.Generator(np.random.PCG64(10))
    corners = np.sort(values.random((30, 2, 2)), axis=1).reshape(30, 4)
    boxes = [(int(label), *map(float, box)) for label, box in zip(values.integers(0, 8191, 30), corners, strict=True)]
    return [[*boxes[:4], (3, 0.0, 0.0, 1.0, 1.0)], [], boxes]


def if_inputs(spec: IFSpec, h: int = 16, w: int = 24) -> tuple[Tensor, Tensor, Tensor | None]:
    """x (2,in_channels,h,w), context (2,7,48), and for a stage II the noise levels of its small images (2,)."""
    y = torch.tensor([250.0, 0.0]) if spec.super_resolution else None
    return normal(1, 2, spec.in_channels, h, w), normal(2, 2, 7, 48), y


def picture(channels: int = 3, h: int = 64, w: int = 96) -> Tensor:
    """A picture (1,channels,h,w) in [0,1]."""
    return normal(9, 1, channels, h, w).sigmoid()


def photo(h: int = 64, w: int = 64) -> NDArray[np.uint8]:
    """A smooth colourful picture (h,w,3), with edges."""
    y, x = np.mgrid[:h, :w] / 10
    waves = np.stack([np.sin(x + y), np.sin(2 * x) * np.cos(y), np.sign(np.sin(x * y / 3))], axis=2)
    return (127.5 + 127.5 * waves).astype(np.uint8)


def depth_map() -> NDArray[np.uint8]:
    """Grey values (40,48) of something round in front of a slope."""
    y, x = np.mgrid[:40, :48]
    return np.where((x - 20) ** 2 + (y - 18) ** 2 < 120, 220, 2 * x + y + 10).astype(np.uint8)


def token_ids(vocab_size: int, length: int) -> Tensor:
    """Two prompts (2,length): start, 9 or 20 random tokens, and the end repeated, as CLIP's tokenizer pads."""
    ids = np.random.Generator(np.random.PCG64(4)).integers(0, vocab_size - 2, (2, length))
    ids[:, 0], ids[0, 10:], ids[1, min(21, length - 2) :] = vocab_size - 2, vocab_size - 1, vocab_size - 1
    return torch.from_numpy(ids)


def padded_ids(vocab_size: int, length: int) -> Tensor:
    """The same prompts with one end each, and padding 0 after it, as of OpenCLIP, BERT and T5."""
    ids = token_ids(vocab_size, length)
    first = (ids == vocab_size - 1).int().argmax(dim=1, keepdim=True)
    return ids.where(torch.arange(length) <= first, 0)


# ---- pictures -------------------------------------------------------------------------------------------------------

# A miniature SD1 of each kind that begins with a picture, by its task.
PICTURE_FAMILIES = {
    "txt2img": SMALL,
    "inpaint": replace(SMALL, unet=replace(SMALL.unet, in_channels=9), task="inpaint"),
    "instruct": replace(SMALL, unet=replace(SMALL.unet, in_channels=8), task="instruct"),
}


def waves(size: int = 64) -> NDArray[np.uint8]:
    """(size, size, 3): smooth, other in every channel, without symmetry."""
    y, x = np.mgrid[:size, :size] / size
    channels = np.stack([np.sin(5 * x + 2 * y), np.cos(3 * y - x), np.sin(4 * x * y + 1)], axis=-1)
    return (127.5 + 110 * channels).round().astype(np.uint8)


def mask(size: int = 64) -> NDArray[np.uint8]:
    """(size, size), 255 on the right of the upper part: whole latent positions, on which all ways to resize agree."""
    values = np.zeros((size, size), dtype=np.uint8)
    values[: size // 8 * 5, size // 2 :] = 255
    return values


def embeddings(context_dim: int = 64) -> tuple[Tensor, Tensor]:
    """The context of a prompt and of the negative prompt, (1,5,context_dim) each."""
    return normal(11, 1, 5, context_dim), normal(12, 1, 5, context_dim)


@dataclass(frozen=True)
class PictureRun:
    """A run from waves() with seed 42 and scale 5, the last latents of which are stored."""

    task: str  # of PICTURE_FAMILIES
    command: str
    strength: float
    sampler: str = "ddim"
    spacing: str = "leading"
    steps: int = 10


PICTURE_RUNS = {
    "img2img": PictureRun("txt2img", "img2img", 0.6),
    "img2img.euler": PictureRun("txt2img", "img2img", 0.75, "euler", "linspace"),
    "img2img.dpmpp_2m": PictureRun("txt2img", "img2img", 0.6, "dpmpp_2m", "trailing"),
    "img2img.original": PictureRun("txt2img", "img2img", 0.75, "ddim", "original"),
    "inpaint": PictureRun("inpaint", "inpaint", 1.0),
    "inpaint.strength": PictureRun("inpaint", "inpaint", 0.6),
    "inpaint.blended": PictureRun("txt2img", "inpaint", 0.9),
    "inpaint.blended.euler": PictureRun("txt2img", "inpaint", 0.6, "euler", "linspace"),
    "instruct": PictureRun("instruct", "img2img", 1.0),
}


# ---- samplers -------------------------------------------------------------------------------------------------------

SHAPE = (2, 2, 3, 3)  # of a toy latent (B,C,h,w)


def denoiser(x: Tensor, t: Tensor, context: Tensor | None = None, y: Tensor | None = None) -> Tensor:
    """A smooth nonlinear network: latents x (B,C,h,w), timesteps t (B,), context (B,T,D) -> prediction (B,C,h,w).

    What is predicted (eps or v) is the caller's choice.  As of a real eps, most of it is x at high noise, so that
    trajectories stay of order 1; the sine never saturates, so that every call, and its timestep, matters.
    """
    phase = t.to(x.dtype) / 100
    if context is not None:
        phase = phase + context.mean(dim=(1, 2))
    return 0.9 * x + 0.3 * torch.sin(2 * x - x.roll(1, dims=-1) + phase[:, None, None, None])


def denoiser_with_variance(x: Tensor, t: Tensor, context: Tensor | None = None, y: Tensor | None = None) -> Tensor:
    """As denoiser, followed by as many channels of variance, in [-1,1]."""
    return torch.cat([denoiser(x, t, context), torch.cos(3 * x + t.to(x.dtype)[:, None, None, None] / 50)], dim=1)


IF_STEPS = (1, 2, 3, 7, 50, 150, 333, 999, 1000)  # of the plain respacing, whose timesteps are stored
# Runs of DeepFloyd IF: (respacing, percentile and limit of the dynamic threshold, scale of guidance).
IF_RUNS = {
    "smart27": ("smart27", 0.95, 1.5, None),
    "fast27": ("fast27", 0.9, 1.0, None),
    "guided": ("19", 0.95, 1.5, 7.0),
}


def noises(num: int) -> NDArray[np.float64]:
    """(num, *SHAPE) unit noise: the first starts a run, the others are drawn in order."""
    return np.random.Generator(np.random.PCG64(5)).standard_normal((num, *SHAPE))


def contexts() -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """The unconditional and the conditional context of guided runs, (B,4,3) each."""
    values = np.random.Generator(np.random.PCG64(6)).standard_normal((2, SHAPE[0], 4, 3))
    return values[0], values[1]


@dataclass(frozen=True)
class Run:
    """A sampler's run on the toy denoiser, whose trajectory is stored."""

    sampler: str
    steps: int
    spacing: str
    eta: float | None = None
    prediction: str = "eps"
    scale: float | None = None  # of guidance
    churn: float | None = None
    zero_snr: bool = False  # at the last timestep
    clean: bool = True  # False: their last step, to clean, is undefined, and left out


# Of 13 linspace steps every timestep is a multiple of 1/4: k-diffusion rounds them to float32, which then is exact.
RUNS = {
    "ddim": Run("ddim", 20, "leading", eta=0.0),
    "ddim.eta1": Run("ddim", 20, "leading", eta=1.0),
    "ddim.eta0.3": Run("ddim", 20, "leading", eta=0.3),
    "ddim.guided": Run("ddim", 20, "leading", eta=0.0, scale=7.5),
    "plms": Run("plms", 20, "leading"),
    "plms.guided": Run("plms", 20, "leading", scale=7.5),
    "ddim.original": Run("ddim", 30, "original", eta=0.0),
    "plms.original": Run("plms", 30, "original"),
    "euler.linspace": Run("euler", 13, "linspace"),
    "euler.karras": Run("euler", 20, "karras"),
    "euler_a.linspace": Run("euler_a", 13, "linspace"),
    "euler_a.karras": Run("euler_a", 20, "karras"),
    "euler_a.karras.eta0.3": Run("euler_a", 20, "karras", eta=0.3),
    "dpmpp_2m.linspace": Run("dpmpp_2m", 13, "linspace"),
    "dpmpp_2m.karras": Run("dpmpp_2m", 20, "karras"),
    "dpmpp_2m.karras.v": Run("dpmpp_2m", 20, "karras", prediction="v"),
    "euler_a.linspace.v": Run("euler_a", 13, "linspace", prediction="v"),
    "euler.karras.churn": Run("euler", 12, "karras", churn=3.0),
    "heun.linspace": Run("heun", 13, "linspace"),
    "heun.karras": Run("heun", 12, "karras"),
    "heun.karras.churn": Run("heun", 12, "karras", churn=3.0),
    "dpm2.linspace": Run("dpm2", 13, "linspace"),
    "dpm2.karras": Run("dpm2", 12, "karras"),
    "dpm2.karras.churn": Run("dpm2", 12, "karras", churn=6.0),
    "dpm2_a.linspace": Run("dpm2_a", 13, "linspace"),
    "dpm2_a.karras": Run("dpm2_a", 12, "karras"),
    "dpm2_a.karras.eta0.3": Run("dpm2_a", 12, "karras", eta=0.3),
    "lms.linspace": Run("lms", 13, "linspace"),
    "lms.karras": Run("lms", 12, "karras"),
    "dpmpp_2s_a.linspace": Run("dpmpp_2s_a", 13, "linspace"),
    "dpmpp_2s_a.karras": Run("dpmpp_2s_a", 12, "karras"),
    "dpmpp_2s_a.karras.eta0.3": Run("dpmpp_2s_a", 12, "karras", eta=0.3),
    "dpmpp_sde.linspace": Run("dpmpp_sde", 13, "linspace"),
    "dpmpp_sde.karras": Run("dpmpp_sde", 12, "karras"),
    "dpmpp_sde.karras.eta0.3": Run("dpmpp_sde", 12, "karras", eta=0.3),
    "dpmpp_2m_sde.linspace": Run("dpmpp_2m_sde", 13, "linspace"),
    "dpmpp_2m_sde.karras": Run("dpmpp_2m_sde", 12, "karras"),
    "dpmpp_2m_sde.karras.eta0.3": Run("dpmpp_2m_sde", 12, "karras", eta=0.3),
    "dpmpp_3m_sde.linspace": Run("dpmpp_3m_sde", 13, "linspace"),
    "dpmpp_3m_sde.karras": Run("dpmpp_3m_sde", 12, "karras"),
    "dpmpp_3m_sde.exponential.eta0.3": Run("dpmpp_3m_sde", 12, "exponential", eta=0.3),
    "unipc.linspace": Run("unipc", 13, "linspace"),
    "unipc.karras": Run("unipc", 12, "karras"),
    "unipc.karras.v": Run("unipc", 12, "karras", prediction="v"),
    "deis.leading": Run("deis", 20, "leading"),
    "deis.karras": Run("deis", 12, "karras", clean=False),
    "ddpm.leading": Run("ddpm", 10, "leading"),
    "ddpm.trailing": Run("ddpm", 12, "trailing"),
    "ddpm.trailing.v": Run("ddpm", 12, "trailing", prediction="v"),
    "lcm.4": Run("lcm", 4, "lcm"),
    "lcm.8": Run("lcm", 8, "lcm"),
    "ddim.trailing": Run("ddim", 20, "trailing", eta=0.0),
    "ddim.zero_snr.v": Run("ddim", 20, "trailing", eta=0.0, prediction="v", zero_snr=True),
    "ddim.zero_snr.eta0.5.v": Run("ddim", 20, "trailing", eta=0.5, prediction="v", zero_snr=True),
}

# Spacings and step counts whose levels are stored: sigmas, or timesteps for trailing and beta.
SPACINGS = {
    "karras": (1, 2, 12, 50),
    "exponential": (1, 2, 12, 50),
    "sgm_uniform": (4, 12, 24),  # timesteps are then multiples of 1/8, exact in float32
    "trailing": (1, 3, 7, 16, 20, 30, 48, 80, 400, 999, 1000),  # 16, 48, 80 and 400 have halves to round
    "beta": (1, 2, 10, 30, 200),
}

# ---- prompts --------------------------------------------------------------------------------------------------------

NAME = "<my-apple>"  # of three vectors of textual inversion
NAMING = "a photo of <my-apple>, and <my-apple> on a Blue table"


def embedding(width: int) -> Tensor:
    """The vectors (3,width) that NAME stands for to a text encoder."""
    return normal(13, 3, width)


CAPTIONS = (
    'A photo of a kangaroo in front of the Eiffel Tower, holding a sign that says "Very Deep Learning"',
    "An astronaut (on a horse), 4k -- \u201cquoted\u201d & \u2018single\u2019",
    "see http://www.example.com/page?a=1 now, or visit example.org/foo or mail me@site.com",
    "this-is-my-cute-cat_on_a_mat",
    "file name cat_photo.png image, IMG1234 jc6640vc 6640vc231 and 1920x1080 wallpaper",
    "<b>bold</b> &amp; &quot;x&quot; text, 1<2 and 3>2, person <person> here",
    "#123 #12345 1234567 @nick hello 192.168.0.1 host 3:45 ",
    "free shipping worldwide free shipping click for more, page 12 of 20",
    "日本語 cat — dog … end... half ½ and 10\u00d720 5.5x6",
    "caf%C3%A9+au+lait",
    "price: 5 , ok .final a.b,c/d e.g. this",
    "it's john's cat's 'toy' *** WOW *** [tag] {x} |y| ~z~",
    "  spaces   and\ttabs\nnew\\nline j2d1a2a word",
    '"all quoted"',
    "",
)
