"""Model: the networks, tokenizer and schedule of one checkpoint.  loading.py makes one."""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, fields, replace
from typing import Any, Self

import torch
from torch import Tensor, nn

from ldm_lite.checkpoint.reader import broken_weights
from ldm_lite.core.model import Model
from ldm_lite.diffusion.schedule import NoiseSchedule
from ldm_lite.image import MOST_PIXELS
from ldm_lite.runtime import pickling
from ldm_lite.runtime.attention import in_float32
from ldm_lite.runtime.offload import Offloader
from ldm_lite.runtime.tiling import is_tiled, out_of_memory, tiled
from ldm_lite.text.tokenizer import TextTokenizer
from ldm_lite.zoo.family import Autoencoder, FamilyRow

log = logging.getLogger("ldm_lite")


@dataclass(frozen=True, eq=False, repr=False)
class CheckpointModel(Model):
    """The core's model, of any family.  Pipeline adds how prompts are encoded.

    Latents are in the network's scale: those of the autoencoder less family.shift_factor, times family.scale_factor.
    """

    family: FamilyRow  # type: ignore[assignment]  # with more than the core's
    schedule: NoiseSchedule
    networks: Mapping[str, Any]  # by role: "unet" (any network that denoises), "vae", "text_encoder", ...
    tokenizer: TextTokenizer | None = None
    t5_tokenizer: TextTokenizer | None = None  # of the text encoder that is a T5, if there is one
    description: str = ""  # what was loaded, from where, in one line
    offloader: Offloader | None = None  # None: the networks are on the device all the time, in their own dtype
    learned: Mapping[int, Tensor] = field(default_factory=dict)  # width D -> textual inversion vectors (V,D)
    ema: bool = False  # the UNet is the EMA copy of a file that has both

    def __repr__(self) -> str:
        """Return what was loaded, and the defaults of its tasks, in one line."""
        family, title = self.family, self.description.partition(", loaded in")[0]
        default = f"{family.steps} steps of {family.sampler} at scale {family.scale:g}, {family.resolution} px"
        return f"{type(self).__name__}({title}; by default {default})"

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle it, or raise PicklingError, one line, before a byte is written."""
        others = {name: value for name, value in vars(self).items() if name not in ("networks", "offloader")}
        pickling.check(self.networks, self.offloader, others)
        return pickling.packed(self) if pickling.needs_packing(self.networks) else super().__reduce_ex__(protocol)

    def __copy__(self) -> Self:
        return replace(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Return a copy with separate networks; it may contain functions that cannot be pickled."""
        values = {field.name: copy.deepcopy(getattr(self, field.name), memo) for field in fields(self)}
        return replace(self, **values)

    @property
    def text_encoder(self) -> Any:
        """The encoder of prompts (or classes, or boxes), the first of several; None without one."""
        return self.networks.get("text_encoder")

    @property
    def text_encoder_2(self) -> Any:
        """The second of several."""
        return self.networks.get("text_encoder_2")

    @property
    def text_encoders(self) -> tuple[nn.Module, ...]:
        """The text encoders, in the family's order."""
        return tuple(self.networks[role] for role in self.family.texts)

    @property
    def device(self) -> torch.device:
        """The device that the networks compute on."""
        if self.offloader is not None:
            return self.offloader.device
        return next(self.unet.parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        """The dtype that the UNet computes in."""
        if self.offloader is not None:
            return self.offloader.dtypes["unet"]
        return next(self.unet.parameters()).dtype

    def phase(self, *roles: str) -> AbstractContextManager[None]:
        """Keep the networks of these roles on the device within the block, so that they can compute."""
        return nullcontext() if self.offloader is None else self.offloader.phase(*roles)

    def sized(self, latent_shape: tuple[int, int, int]) -> Self:
        """Return it with the noise schedule of images of a latent shape, which FLUX.1 [dev] shifts by their size."""
        patch, (_, h, w) = self.family.unet.patch, latent_shape
        return replace(self, schedule=self.schedule.sized((h // patch) * (w // patch)))

    def latent_shape(self, height: int, width: int) -> tuple[int, int, int]:
        """Return the latent shape (C,h,w) of an image, from its size in pixels.

        Raises ValueError if a side is not a multiple of a token's side in pixels: 8 for Stable Diffusion, 16
        for FLUX.1 and Stable Diffusion 3; and for more than MOST_PIXELS in all, before memory runs out.
        """
        factor = self.vae.spec.factor
        f = factor * self.family.unet.patch
        if height <= 0 or width <= 0 or height % f or width % f:
            legal = [max(f, round(side / f) * f) for side in (height, width)]
            raise ValueError(
                f"got `height={height}` and `width={width}`, expected multiples of {f}: use `height={legal[0]}` and "
                f"`width={legal[1]}`"
            )
        if height * width > MOST_PIXELS:
            raise ValueError(
                f"got `height={height}` and `width={width}`, expected at most {MOST_PIXELS} pixels in all: use less"
            )
        return self.vae.spec.embed_dim, height // factor, width // factor

    # ---- the autoencoder --------------------------------------------------------------------------------------------

    @torch.no_grad()
    def encode_pixels(self, pixels: Tensor) -> Tensor:
        """Encode pixels (B,3,H,W) in [-1,1] to the mean of their latents (B,C,h,w), in the network's scale, float32.

        Raises ValueError as distribution does.
        """
        return self.scaled_distribution(pixels)[0]

    @torch.no_grad()
    def scaled_distribution(self, pixels: Tensor) -> tuple[Tensor, Tensor]:
        """Encode pixels as distribution does; return mean and standard deviation in the network's scale.

        A sample is mean + deviation * noise.
        """
        (mean, deviation), family = self.distribution(pixels), self.family
        return (mean - family.shift_factor) * family.scale_factor, deviation * family.scale_factor

    @torch.no_grad()
    def distribution(self, pixels: Tensor) -> tuple[Tensor, Tensor]:
        """Encode pixels (B,3,H,W) in [-1,1]; return mean and standard deviation (B,C,h,w), in the autoencoder's scale.

        Both are float32 on the model's device.  An encoder that overflows in half precision runs again in float32, with
        a warning.  Raises ValueError if a side is not a multiple of the factor.
        """
        factor = self.vae.spec.factor
        if pixels.shape[1] != 3 or pixels.shape[2] % factor or pixels.shape[3] % factor:
            got = tuple(pixels.shape)
            raise ValueError(f"got pixels {got}, expected (B, 3, H, W) with H and W multiples of {factor}")
        with self.phase("vae"):
            vae, dtype = self.vae, next(self.vae.parameters()).dtype
            mean, deviation = vae.encode(pixels.to(self.device, dtype))
            if not torch.isfinite(mean + deviation).all() and dtype != torch.float32:
                log.warning("the autoencoder overflows in %s: encoding in float32", str(dtype).removeprefix("torch."))
                whole = in_float32(vae, self.device)
                mean, deviation = whole.encode(pixels.to(self.device, torch.float32))
        if not torch.isfinite(mean + deviation).all():
            cause = broken_weights(self.networks) or "its pixels are not finite"
            raise ValueError(f"the image's latents are not finite: {cause}")
        return mean.float(), deviation.float()

    @torch.no_grad()
    def decode_pixels(self, latents: Tensor) -> Iterator[Tensor]:
        """Decode latents (B,C,h,w), in the network's scale, to pixels (3,H,W) in [-1,1], float32 on the CPU, in order.

        Pixels are always finite: a decoder that overflows in half precision runs again in float32, with a warning.
        Raises ValueError for latents of another shape and, naming the cause, for those that are not finite; TypeError
        for anything but a tensor.
        """
        channels = self.vae.spec.embed_dim
        if not isinstance(latents, Tensor):
            raise TypeError(f"got {type(latents).__name__} as latents, expected a tensor (B, {channels}, h, w)")
        if latents.ndim != 4 or latents.shape[1] != channels or 0 in latents.shape[2:]:
            raise ValueError(f"got latents of shape {tuple(latents.shape)}, expected (B, {channels}, h, w)")
        if not torch.isfinite(latents).all():
            half = self.dtype != torch.float32
            advice = '`dtype="fp32"` may help' if half else "the checkpoint or the settings are at fault"
            raise ValueError(f"the latents are not finite: {broken_weights(self.networks) or advice}")
        with self.phase("vae"):
            vae = self.vae
            for z in latents.to(self.device) / self.family.scale_factor + self.family.shift_factor:
                dtype = next(vae.parameters()).dtype
                vae, pixels = _decode(vae, z[None].to(dtype))
                if not torch.isfinite(pixels).all() and dtype != torch.float32:
                    log.warning(
                        "the autoencoder overflows in %s: decoding in float32", str(dtype).removeprefix("torch.")
                    )
                    vae = in_float32(vae, self.device)  # a copy: other threads may be decoding
                    vae, pixels = _decode(vae, z[None].float())
                if not torch.isfinite(pixels).all():
                    cause = broken_weights(self.networks) or "the latents are too large"
                    raise ValueError(f"the image is not finite: {cause}")
                yield pixels.clamp(-1, 1).cpu()


def _decode(vae: Autoencoder, z: Tensor) -> tuple[Autoencoder, Tensor]:
    """Decode z (1,C,h,w) to pixels (3,H,W) float32; also return the next autoencoder, tiled if memory ran out."""
    try:
        return vae, vae.decode(z)[0].float()
    except (RuntimeError, MemoryError) as error:
        if is_tiled(vae) or not out_of_memory(error):
            raise
        log.warning("out of memory: decoding in tiles, which `vae_tiling` does from the start")
    # Outside the except block, which keeps the failed attempt's tensors alive.
    vae = tiled(vae, storage_device="cpu")
    return vae, vae.decode(z)[0].float()
