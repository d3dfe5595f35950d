"""The model families, a row each: the specs of its networks, its noise schedule, and what its users expect.

identify.py infers a file's architecture from its shapes and looks it up here: the row *is* the fingerprint.
"""

from dataclasses import dataclass, replace

from ldm_lite.diffusion.schedule import Prediction
from ldm_lite.models.unet import UNetSpec
from ldm_lite.networks import CLIP_L, KL_F8, SD1_UNET, UNETS, AutoencoderSpec, EncoderSpec, Spec


@dataclass(frozen=True)
class Family:
    """One kind of checkpoint: its networks, its noise schedule, and what its users expect by default."""

    title: str
    unet: UNetSpec
    vae: AutoencoderSpec
    text: EncoderSpec | None  # what reads the prompts (or classes, or boxes)
    text_2: EncoderSpec | None  # a second one
    conditioner: str  # how those make what the UNet reads: a name in conditioning.CONDITIONERS
    task: str  # what it is for: "txt2img" (and all that can be made of it), "inpaint" or "instruct"
    prediction: Prediction
    beta_start: float  # of 1000 betas, linear in their square roots
    beta_end: float
    scale_factor: float  # latents in the UNet's scale = scale_factor * the autoencoder's
    resolution: int  # pixels a side
    steps: int
    scale: float  # classifier-free guidance

    @property
    def networks(self) -> dict[str, Spec]:
        """The specs of its networks by their roles, which are the names of Pipeline's fields."""
        specs: dict[str, Spec | None] = {
            "unet": self.unet,
            "vae": self.vae,
            "text_encoder": self.text,
            "text_encoder_2": self.text_2,
        }
        return {role: spec for role, spec in specs.items() if spec is not None}


SD1 = Family(
    title="Stable Diffusion 1.x",
    unet=SD1_UNET,
    vae=KL_F8,
    text=CLIP_L,
    text_2=None,
    conditioner="clip",
    task="txt2img",
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
    "sd1_inpaint": replace(SD1, title="Stable Diffusion 1.x inpainting", unet=UNETS["sd1_inpaint"], task="inpaint"),
    "instruct_pix2pix": replace(SD1, title="InstructPix2Pix", unet=UNETS["instruct_pix2pix"], task="instruct"),
}
