"""The model families: which networks a checkpoint holds, told from its keys and shapes alone.

A family is a row: the specs of its networks, its schedule and its defaults.  fingerprint.py infers the architecture
from the file's shapes, and it is looked up in these rows: the row *is* the fingerprint.  What shapes cannot tell (head
counts, prediction type, scale factor) is the row's, or for a network that no row describes its file's metadata's.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from ldm_lite.diffusion.schedule import Prediction
from ldm_lite.fingerprint import Shapes, infer_text, infer_unet, infer_vae
from ldm_lite.models.clip import CLIPTextSpec
from ldm_lite.models.unet import UNet, UNetSpec
from ldm_lite.models.vae_kl import VAESpec


@dataclass(frozen=True)
class Family:
    """One kind of checkpoint: its networks, its noise schedule, and what its users expect by default."""

    title: str
    unet: UNetSpec
    vae: VAESpec
    text: CLIPTextSpec
    conditioning: str  # what the UNet reads beside the text: "text" (nothing), "inpaint" or "instruct"
    prediction: Prediction
    beta_start: float  # of 1000 betas, linear in their square roots
    beta_end: float
    scale_factor: float  # latents in the UNet's scale = scale_factor * the autoencoder's
    resolution: int  # pixels a side
    steps: int
    scale: float  # classifier-free guidance


# ---- networks -------------------------------------------------------------------------------------------------------

SD1_UNET = UNetSpec(
    in_channels=4,
    out_channels=4,
    model_channels=320,
    channel_mult=(1, 2, 4, 4),
    num_res_blocks=(2, 2, 2, 2),
    transformer_depth=(1, 1, 1, 0),
    middle_depth=1,
    num_heads=8,
    head_dim=None,
    context_dim=768,
    linear_proj=False,
    cross_only=(False, False, False, False),
    vector_dim=None,
    num_classes=None,
    scale_shift=False,
    resblock_updown=False,
)
SD2_UNET = replace(SD1_UNET, num_heads=None, head_dim=64, context_dim=1024, linear_proj=True)
SDXL_UNET = replace(
    SD2_UNET,
    channel_mult=(1, 2, 4),
    num_res_blocks=(2, 2, 2),
    transformer_depth=(0, 2, 10),
    middle_depth=10,
    context_dim=2048,
    cross_only=(False, False, False),
    vector_dim=2816,
)
LDM_UNET = replace(  # text2img256; most of the LDM zoo states its difference from this row
    SD1_UNET,
    in_channels=3,
    out_channels=3,
    model_channels=192,
    channel_mult=(1, 2, 3, 5),
    transformer_depth=(0, 1, 1, 1),
    num_heads=None,
    head_dim=32,
    context_dim=640,
)
UNCONDITIONAL_UNET = replace(LDM_UNET, model_channels=224, channel_mult=(1, 2, 3, 4), context_dim=None)

# Every LDM UNet by the name of its original.  One without a row in FAMILIES is recognised, and refused by name.
UNETS = {
    "sd1": SD1_UNET,
    "sd1_inpaint": replace(SD1_UNET, in_channels=9),
    "instruct_pix2pix": replace(SD1_UNET, in_channels=8),
    "sd2": SD2_UNET,
    "sd2_inpaint": replace(SD2_UNET, in_channels=9),
    "sd2_depth": replace(SD2_UNET, in_channels=5),
    "sd2_unclip_h": replace(SD2_UNET, vector_dim=2048),
    "sd2_unclip_l": replace(SD2_UNET, vector_dim=1536),
    "x4": replace(
        SD2_UNET,
        in_channels=7,
        model_channels=256,
        channel_mult=(1, 2, 2, 4),
        transformer_depth=(0, 1, 1, 1),
        num_heads=8,
        head_dim=None,
        cross_only=(False, True, True, False),
        num_classes=1000,
    ),
    "sdxl_base": SDXL_UNET,
    "sdxl_inpaint": replace(SDXL_UNET, in_channels=9),
    "sdxl_refiner": replace(
        SD2_UNET,
        model_channels=384,
        transformer_depth=(0, 4, 4, 0),
        middle_depth=4,
        context_dim=1280,
        vector_dim=2560,
    ),
    "ldm_text2img_large": replace(SD1_UNET, context_dim=1280),
    "ldm_text2img256": LDM_UNET,
    "ldm_cin256_v2": replace(LDM_UNET, num_heads=1, head_dim=None, context_dim=512),
    "ldm_cin256": replace(
        LDM_UNET,
        in_channels=4,
        out_channels=4,
        model_channels=256,
        channel_mult=(1, 2, 4),
        num_res_blocks=(2, 2, 2),
        transformer_depth=(1, 1, 1),
        context_dim=512,
        cross_only=(False, False, False),
    ),
    "ldm_layout2img": replace(
        LDM_UNET,
        model_channels=128,
        channel_mult=(1, 2, 3, 4),
        transformer_depth=(0, 3, 3, 3),
        middle_depth=3,
        context_dim=512,
    ),
    "rdm768": replace(
        LDM_UNET,
        in_channels=16,
        out_channels=16,
        model_channels=448,
        channel_mult=(1, 2, 3, 4),
        transformer_depth=(1, 1, 1, 0),
        context_dim=768,
    ),
    "ldm_celeba_ffhq_beds256": UNCONDITIONAL_UNET,
    "ldm_lsun_churches256": replace(
        UNCONDITIONAL_UNET,
        in_channels=4,
        out_channels=4,
        model_channels=192,
        channel_mult=(1, 2, 2, 4, 4),
        num_res_blocks=(2, 2, 2, 2, 2),
        transformer_depth=(1, 1, 1, 1, 0),
        num_heads=8,
        head_dim=None,
        cross_only=(False, False, False, False, False),
        scale_shift=True,
        resblock_updown=True,
    ),
    "ldm_inpainting_big": replace(
        UNCONDITIONAL_UNET, in_channels=7, model_channels=256, num_heads=8, head_dim=None, resblock_updown=True
    ),
    "ldm_bsr_sr": replace(
        UNCONDITIONAL_UNET,
        in_channels=6,
        model_channels=160,
        channel_mult=(1, 2, 2, 4),
        transformer_depth=(0, 0, 0, 1),
    ),
    "ldm_semantic_synthesis": replace(
        UNCONDITIONAL_UNET,
        in_channels=6,
        model_channels=128,
        channel_mult=(1, 4, 8),
        num_res_blocks=(2, 2, 2),
        transformer_depth=(0, 0, 0),
        num_heads=8,
        head_dim=None,
        cross_only=(False, False, False),
    ),
}

KL_F8 = VAESpec(
    channels=128,
    channel_mult=(1, 2, 4, 4),
    num_res_blocks=2,
    z_channels=4,
    embed_dim=4,
    attn_levels=(),
    mid_attn=True,
)
CLIP_L = CLIPTextSpec(
    vocab_size=49408, length=77, width=768, mlp_width=3072, layers=12, heads=12, activation="quick_gelu"
)

# ---- families -------------------------------------------------------------------------------------------------------

SD1 = Family(
    title="Stable Diffusion 1.x",
    unet=SD1_UNET,
    vae=KL_F8,
    text=CLIP_L,
    conditioning="text",
    prediction="eps",
    beta_start=0.00085,
    beta_end=0.012,
    scale_factor=0.18215,
    resolution=512,
    steps=50,
    scale=7.5,
)


FAMILIES = {
    "sd1": SD1,
    "sd1_inpaint": replace(
        SD1, title="Stable Diffusion 1.x inpainting", unet=UNETS["sd1_inpaint"], conditioning="inpaint"
    ),
    "instruct_pix2pix": replace(SD1, title="InstructPix2Pix", unet=UNETS["instruct_pix2pix"], conditioning="instruct"),
}

# ---- identification -------------------------------------------------------------------------------------------------


def identify(unet: Shapes, vae: Shapes, text: Shapes, metadata: Mapping[str, str]) -> Family:
    """Shapes of the three networks, keys without prefixes, and the file's metadata -> the family.

    A UNet that no row describes is taken at its metadata's word, if that is complete.  Raises ValueError, one line,
    for a recognised family that is not supported, for an unknown network, and for contradictory metadata.
    """
    try:
        spec = infer_unet(unet)
        name = next((n for n, row in UNETS.items() if replace(row, num_heads=None, head_dim=None) == spec), None)
        if name in FAMILIES:
            family = FAMILIES[name]
        elif name is not None:
            raise ValueError(
                f"this is a checkpoint of {name}, which is not supported yet: take a Stable Diffusion 1.x one"
            )
        else:
            family = _described(spec, infer_vae(vae), infer_text(text, heads=1, activation="gelu"), unet, metadata)
    except KeyError as error:
        raise ValueError(f"a tensor that every such network has is missing: {error.args[0]}") from error
    stated = metadata.get("prediction", metadata.get("modelspec.prediction_type"))
    return family if stated is None else replace(family, prediction=parse_prediction(stated))


def parse_prediction(name: str) -> Prediction:
    """A prediction type as people write it ("epsilon", "v_prediction") -> eps, v or x0.  Raises ValueError."""
    short = {"epsilon": "eps", "v_prediction": "v", "sample": "x0"}.get(name, name)
    if short not in ("eps", "v", "x0"):
        raise ValueError(f"unknown prediction type {name!r}: wanted eps, v or x0")
    return short  # type: ignore[return-value]


NEEDED = ("unet_num_heads", "text_num_heads", "text_activation", "scale_factor", "beta_start", "beta_end", "resolution")


def _described(unet: UNetSpec, vae: VAESpec, text: CLIPTextSpec, shapes: Shapes, metadata: Mapping[str, str]) -> Family:
    """The family that a file's own metadata describes; ValueError naming the nearest row if it is incomplete."""
    lacks = [key for key in (*NEEDED, "prediction") if key not in metadata]
    if lacks:
        name, key = nearest(shapes)
        raise ValueError(
            f"unknown UNet: the nearest is {name}, from which it differs at {key}; to load it as what it is, "
            f"its metadata (or --metadata KEY=VALUE) must say {', '.join(lacks)}"
        )
    if (
        metadata.get("beta_schedule", "scaled_linear") != "scaled_linear"
        or metadata.get("num_timesteps", "1000") != "1000"
    ):
        raise ValueError(
            "the metadata's beta_schedule or num_timesteps is not scaled_linear and 1000, all that is known here"
        )
    try:
        return Family(
            title=metadata.get("title", "unnamed model"),
            unet=replace(unet, num_heads=int(metadata["unet_num_heads"])),
            vae=vae,
            text=replace(text, heads=int(metadata["text_num_heads"]), activation=metadata["text_activation"]),
            conditioning="text",
            prediction=parse_prediction(metadata["prediction"]),
            beta_start=float(metadata["beta_start"]),
            beta_end=float(metadata["beta_end"]),
            scale_factor=float(metadata["scale_factor"]),
            resolution=int(metadata["resolution"]),
            steps=int(metadata.get("steps", SD1.steps)),
            scale=float(metadata.get("guidance", SD1.scale)),
        )
    except ValueError as error:
        raise ValueError(f"the metadata does not describe a model: {error}") from error


def describe(family: Family) -> dict[str, str]:
    """The metadata that identify() needs to know a family again that no row describes."""
    about = {
        "title": family.title,
        "prediction": family.prediction,
        "scale_factor": family.scale_factor,
        "beta_start": family.beta_start,
        "beta_end": family.beta_end,
        "beta_schedule": "scaled_linear",
        "num_timesteps": 1000,
        "resolution": family.resolution,
        "steps": family.steps,
        "guidance": family.scale,
        "unet_num_heads": family.unet.num_heads,
        "text_num_heads": family.text.heads,
        "text_activation": family.text.activation,
    }
    return {key: str(value) for key, value in about.items()}


def nearest(shapes: Shapes) -> tuple[str, str]:
    """(name of the known UNet that shares most tensors with these shapes, the first key that differs)."""

    def of(spec: UNetSpec) -> dict[str, tuple[int, ...]]:
        with torch.device("meta"):
            return {key: tuple(value.shape) for key, value in UNet(spec).state_dict().items()}

    known = {name: of(spec) for name, spec in UNETS.items()}
    name = max(known, key=lambda name: len(known[name].items() & shapes.items()))
    differing = (key for key in known[name] if shapes.get(key) != known[name][key])
    return name, next(differing, next((key for key in shapes if key not in known[name]), "nothing"))
