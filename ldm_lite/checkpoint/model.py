"""Model: the networks, tokenizer and schedule of one checkpoint; load_model() makes one."""

from __future__ import annotations

import copy
import logging
import math
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, Self, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from ldm_lite.checkpoint import hub
from ldm_lite.checkpoint.parts import autoencoder_spec, load_autoencoder
from ldm_lite.checkpoint.reader import (
    SGM,
    Parts,
    broken_weights,
    ema_copy,
    errors_of,
    load_network,
    metadata_of,
    on_meta,
    open_source,
    read_weight,
    split,
)
from ldm_lite.checkpoint.vocabularies import tokenizers_of
from ldm_lite.cli.options import LoadOptions
from ldm_lite.core.files import Tensors, imported
from ldm_lite.core.model import Model as CoreModel
from ldm_lite.diffusion.schedule import Array, Schedule
from ldm_lite.models.pixels import Pixels, PixelSpec
from ldm_lite.runtime.offload import Offloader
from ldm_lite.runtime.precision import pick_device, pick_dtypes, short_name
from ldm_lite.runtime.setup import check as check_runtime
from ldm_lite.runtime.setup import load_device, num_parameters, prepare
from ldm_lite.runtime.tiling import is_tiled, out_of_memory, tiled
from ldm_lite.text.tokenizer import TextTokenizer
from ldm_lite.zoo.families import (
    DENOISERS,
    ONLY_OF_UNKNOWN,
    as_told,
    check_complete,
    check_metadata,
    detect_family,
    with_prediction,
    with_vae,
)
from ldm_lite.zoo.family import Autoencoder, Family, build, text_roles

log = logging.getLogger("ldm_lite")

ADAPTERS = "ldm_lite.adapters"  # imported when a LoRA or a textual inversion is named
PREDICTIONS = {"prediction", "modelspec.prediction_type"}  # metadata

M = TypeVar("M", bound="Model")


@dataclass(frozen=True, eq=False, repr=False)
class Model(CoreModel):
    """The core's model, of any family.  Pipeline adds how prompts are encoded.

    Latents are in the network's scale: those of the autoencoder less family.shift_factor, times family.scale_factor.
    """

    family: Family  # type: ignore[assignment]  # with more than the core's
    schedule: Schedule
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

    @property
    def text_encoder(self) -> Any:
        """What encodes prompts (or classes, or boxes), the first of several; None without one."""
        return self.networks.get("text_encoder")

    @property
    def text_encoder_2(self) -> Any:
        """The second of several."""
        return self.networks.get("text_encoder_2")

    @property
    def text_encoders(self) -> tuple[nn.Module, ...]:
        """The text encoders, in the family's order."""
        return tuple(self.networks[role] for role in text_roles(self.family.text_encoders))

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
        """Keep the networks of these roles on the device within the block; computing with them needs it."""
        return nullcontext() if self.offloader is None else self.offloader.phase(*roles)

    def sized(self, latent_shape: tuple[int, int, int]) -> Self:
        """Return it with the noise schedule of images of a latent shape, which FLUX.1 [dev] shifts by their size."""
        patch, (_, h, w) = self.family.unet.patch, latent_shape
        return replace(self, schedule=self.schedule.sized((h // patch) * (w // patch)))

    def latent_shape(self, height: int, width: int) -> tuple[int, int, int]:
        """Return the latent shape (C,h,w) of an image, from its size in pixels.

        Raises ValueError if a side is not a multiple of what a token of the network covers: 8 for Stable Diffusion, 16
        for FLUX.1 and Stable Diffusion 3.
        """
        factor = self.vae.spec.factor
        f = factor * self.family.unet.patch
        if height <= 0 or width <= 0 or height % f or width % f:
            legal = [max(f, round(side / f) * f) for side in (height, width)]
            raise ValueError(
                f"got `height={height}` and `width={width}`, wanted multiples of {f}: take `height={legal[0]}` and "
                f"`width={legal[1]}`"
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
            raise ValueError(f"got pixels {got}, wanted (B, 3, H, W) with H and W multiples of {factor}")
        with self.phase("vae"):
            vae, dtype = self.vae, next(self.vae.parameters()).dtype
            mean, deviation = vae.encode(pixels.to(self.device, dtype))
            if not torch.isfinite(mean + deviation).all() and dtype != torch.float32:
                log.warning("the autoencoder overflows in %s: encoding in float32", str(dtype).removeprefix("torch."))
                whole = copy.deepcopy(vae).to(self.device, torch.float32)
                mean, deviation = whole.encode(pixels.to(self.device, torch.float32))
        if not torch.isfinite(mean + deviation).all():
            cause = broken_weights(self.networks) or "its pixels are not finite"
            raise ValueError(f"the image's latents are not finite: {cause}")
        return mean.float(), deviation.float()

    @torch.no_grad()
    def decode_pixels(self, latents: Tensor) -> Iterator[Tensor]:
        """Decode latents (B,C,h,w), in the network's scale, to pixels (3,H,W) in [-1,1], float32 on the CPU, in order.

        Pixels are always finite: a decoder that overflows in half precision runs again in float32, with a warning.
        Raises ValueError for latents of other channels and, naming the cause, for those that are not finite.
        """
        if latents.shape[1] != self.vae.spec.embed_dim:
            raise ValueError(f"got latents with {latents.shape[1]} channels, wanted {self.vae.spec.embed_dim}")
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
                    vae = copy.deepcopy(vae).to(self.device, torch.float32)  # a copy: other threads may be decoding
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
    vae = tiled(vae, rest="cpu")
    return vae, vae.decode(z)[0].float()


def load_model(options: LoadOptions, kind: type[M], check: Callable[[M], None] | None = None) -> M:
    """Open a checkpoint and load its networks as the options say, into a Model or a subclass.

    options.ckpt is a name as open_source takes it, open Tensors, or None: the bundled model.  `check` is called before
    any weights are read, with an outline of the model whose networks are on the meta device.  Raises FileNotFoundError
    or ValueError, one line that says what to do; what `check` raises.
    """
    start = time.perf_counter()
    loras: list[Any] = []
    if options.lora:
        parse, open_lora = imported(f"{ADAPTERS}.strength:parse"), imported(f"{ADAPTERS}.lora:open_lora")
        loras = [(open_lora(file), weight) for file, weight in map(parse, options.lora)]
    if isinstance(ckpt := options.ckpt, Tensors):  # which may be loaded again: each model has weights of its own
        file = replace(ckpt, read=lambda key: ckpt.read(key).clone())
    else:
        file = open_source(ckpt)
    path = file.path
    title = hub.title(path) if path.is_dir() else path.name
    device = pick_device(options.device)
    check_runtime(options, device)
    family, parts, main, metadata = recognise(file, options)
    parts["unet"], weights = _with_ema(main, parts["unet"], options.ema, family)
    if family.with_loras is not None:
        family, parts["unet"] = family.with_loras(family, parts["unet"], [lora for lora, _ in loras])
    tokenizer, t5_tokenizer = tokenizers_of(family, parts, options.tokenizer, options.t5_vocab)
    if options.prediction is not None:
        family = with_prediction(family, options.prediction)
    elif family.predicts is not None and family.v_resolution is not None and not metadata.keys() & PREDICTIONS:
        predicted, why = family.predicts(parts["unet"])
        family = with_prediction(family, predicted)
        log.info("%s: predicts %s %s; `prediction` overrules that", title, family.prediction, why)
    for hint in family.hints:
        is_told = "family" in (metadata if hint.lacks else options.added_metadata)
        has_word = re.search(rf"(?<!\d){hint.word}(?!\d)", title.lower()) is not None  # not as part of a number
        if has_word != hint.lacks and not is_told:
            log.warning("%s", hint.text(family.title))
            break
    model = kind(
        name=title if path.is_dir() else path.stem,
        family=family,
        schedule=_schedule(family, main, metadata, options.zero_snr),
        tokenizer=tokenizer,
        t5_tokenizer=t5_tokenizer,
        description=title,
        ema=weights.startswith("EMA"),
        networks={"vae": Pixels(family.vae)} if isinstance(family.vae, PixelSpec) else {},
    )
    embeddings = [embedding for lora, _ in loras for embedding in lora.embeddings]
    if check is not None:
        with errors_of(path), on_meta():
            outlines: dict[str, Any] = {role: build(spec) for role, spec in family.networks.items()}
        check(_with_learned(model.with_networks(**outlines), embeddings, "`lora`"))
    default = family.dtype if device.type == "cuda" else None
    dtypes = pick_dtypes(options.dtype or default, device, family.networks, ("vae",) if family.vae_overflows else ())
    storage, in_blocks = load_device(options, device), options.storage is None
    networks: dict[str, Any] = {
        role: load_network(spec, parts[role], role.replace("_", " "), storage, dtypes[role], in_blocks)
        for role, spec in family.networks.items()
    }
    if loras and options.storage is None:
        imported(f"{ADAPTERS}.lora:merge_lora")(networks, loras, removable=False)
    step, offloader = prepare(networks, options, device)
    if loras and options.storage is not None:  # kept beside the quantised weights
        imported(f"{ADAPTERS}.lora:merge_lora")(networks, loras, offloader, removable=False)
    parameters, unet_dtype = sum(map(num_parameters, networks.values())), dtypes["unet"]
    others = ", ".join(f"{role} {short_name(dtype)}" for role, dtype in dtypes.items() if dtype != unet_dtype)
    dtype_names = short_name(unet_dtype) + (f" ({others})" if others else "")
    description = (
        f"{title}: {family.title}, {family.prediction} prediction, {weights} weights, {parameters / 1e6:,.0f} M "
        f"parameters, {dtype_names} on {device}, loaded in {time.perf_counter() - start:.1f} s"
    )
    log.info("%s", description)
    if isinstance(family.vae, PixelSpec):
        networks["vae"] = Pixels(family.vae).to(device, unet_dtype)
    model = replace(model, description=description, offloader=offloader, step=step, networks=networks)
    return _with_learned(model, embeddings, "`lora`")


def with_embeddings(model: M, sources: Sequence[str | os.PathLike[str]]) -> M:
    """Return the model with textual inversions loaded, FILE or NAME=FILE; prompts use them by name.

    The networks are shared.  The log lists each name with its number of vectors.  Raises FileNotFoundError, and
    ValueError, one line, for other files, vectors of another width than the text encoders', and two of one name.
    """
    open_embeddings = imported(f"{ADAPTERS}.textual_inversion:open_embeddings")
    embeddings = [embedding for source in sources for embedding in open_embeddings(source)]
    return _with_learned(model, embeddings, "`embedding`")


def with_autoencoder(model: M, source: str | os.PathLike[str]) -> M:
    """Return the model with another autoencoder, such as TAESD for previews.

    The networks are shared.  Raises FileNotFoundError, and ValueError if its latents are not the model's.
    """
    vae = load_autoencoder(source, device=model.device, dtype=model.dtype)
    return replace(model.with_networks(vae=vae), family=with_vae(model.family, vae.spec, os.fspath(source)))


def _with_learned(model: M, embeddings: Sequence[Any], option: str) -> M:
    """Return the model with the vectors of textual inversions; itself without any."""
    if not embeddings:
        return model
    kinds = imported(f"{ADAPTERS}.textual_inversion:CLIP")
    encoders = [encoder for encoder in model.text_encoders if isinstance(encoder, kinds)]
    if model.tokenizer is None or not encoders:
        raise ValueError(
            f"{model.family.title} reads no text with CLIP, which embeddings are made for: leave out {option}"
        )
    learn = imported(f"{ADAPTERS}.textual_inversion:learn")
    tokenizer, learned = learn(embeddings, encoders, model.tokenizer, model.learned)
    return replace(model, tokenizer=tokenizer, learned=learned)


def recognise(file: Tensors, options: LoadOptions) -> tuple[Family, dict[str, Tensors], Tensors, dict[str, str]]:
    """Return a checkpoint's family, its networks (including those from other files), the UNet's file, all metadata.

    Raises ValueError for a file without a network of its role.
    """
    networks = split(file)
    main, replaced, texts = networks.file, dict[str, Tensors](), list[Tensors]()
    for name, source in ((name, source) for name, several in options.parts.items() for source in several):
        others = split(open_source(source))
        of_role = [part for role, part in others.items() if role.startswith(name)]
        if not of_role:
            raise ValueError(f"{source}: holds no {name.replace('_', ' ')}, only {', '.join(sorted(others))}")
        if name == "text_encoder":
            texts += of_role
        else:
            replaced[name] = of_role[0]
            main = others.file if name == "unet" else main
    replaced |= dict(zip(text_roles(texts), texts, strict=True))
    metadata = {"prediction": "v"} if "v_pred" in main else {}
    metadata |= main.metadata
    parts = {**networks, **replaced}
    if "unet" in parts and any(key in parts["unet"] for key in DENOISERS):
        parts = imported("ldm_lite.checkpoint.transformers:placed")(
            networks, replaced, {**metadata, **options.added_metadata}
        )
    for role, part in parts.items():
        metadata |= metadata_of(role, part.metadata)
    metadata |= check_metadata(options.added_metadata)
    with errors_of(main.path):
        # Detected with its own autoencoder; a replacement must fit that.
        known_by = parts | {role: networks[role] for role in ("vae",) if role in networks}
        sgm = any(key.startswith(SGM) for key in main)
        shapes, told = {role: part.shapes for role, part in known_by.items()}, options.added_metadata
        family = detect_family(shapes, metadata, sgm)
        if told:
            untitled = {key: text for key, text in metadata.items() if key not in ONLY_OF_UNKNOWN}
            family = as_told(family, detect_family(shapes, untitled, sgm), told)
        check_complete(parts, family.networks, family)
        if "unet" in replaced and "vae" not in replaced and "unet" in networks:
            _check_latents(networks, family)
    family = family if "scale_factor" in options.added_metadata else _scaled(family, main)
    if options.vae is not None:
        family = with_vae(family, autoencoder_spec(parts["vae"]), name=options.vae)
    return family, parts, main, metadata


def _with_ema(file: Tensors, unet: Tensors, ema: str, family: Family) -> tuple[Tensors, str]:
    """Return the UNet's weights to load from its file, and their name for the log, for `ema` as in LoadOptions."""
    if ema == "original":
        ema = "auto" if family.original_ema else "no"
    copy = ema_copy(file, unet)
    if copy is None:
        if ema == "yes":
            raise ValueError(f'{unet.path}: has no complete EMA copy of the UNet: take `ema="auto"`')
        return unet, "main"
    if ema == "no":
        return unet, "main (not the file's EMA)"
    return copy, "EMA (not the file's main)"


def _check_latents(networks: Parts, family: Family) -> None:
    """Raise ValueError if a UNet is combined with another family's autoencoder, whose latents have another scale.

    networks are those of the checkpoint itself.
    """
    sgm = any(key.startswith(SGM) for key in networks.file)
    try:
        theirs = detect_family({role: part.shapes for role, part in networks.items()}, networks.file.metadata, sgm)
    except ValueError:  # an unknown model
        return
    if theirs.scale_factor != family.scale_factor and not math.isnan(theirs.scale_factor + family.scale_factor):
        raise ValueError(
            f"is a UNet of {family.title}, and {networks.file.path} a checkpoint of {theirs.title}, whose autoencoder "
            "makes other latents: take the UNet's own checkpoint, or name its autoencoder with `vae=FILE`"
        )


# ---- buffers: the scale factor and the noise schedule, perhaps rounded to the dtype of the weights ------------------

# From coarse to fine: a buffer whose values all exist in one of these may have been rounded to it, whatever its dtype.
COARSE = (torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz)
DTYPES = (*COARSE, torch.bfloat16, torch.float16)
MERGED = 2e-3  # relative: the buffers of files merged in half precision are off by more than a rounding


def is_rounded(stored: Tensor, exact: NDArray[Any], dtype: torch.dtype, tolerance: float = 0.0) -> bool:
    """Whether a buffer holds these values (float64, of the same shape) rounded to a dtype, or within a tolerance."""
    about = torch.finfo(dtype)
    # One unit in the last place, since it may have been rounded twice, first to float16; near zero it is constant.
    unit = about.eps * np.maximum(np.abs(exact), max(about.tiny, torch.finfo(torch.float16).tiny))
    off = np.abs(stored.double().numpy() - exact)
    return bool((off <= np.maximum(unit, tolerance * np.abs(exact))).all())


def stored_schedule(file: Tensors, expected: Schedule) -> Array | None:
    """Return alpha_bar (1000,) of the noise schedule in a file if it is not the family's, rounded or not; else None.

    Of `betas` and `alphas_cumprod`, the one that differs counts.  Raises ValueError for buffers that are no schedule,
    that contradict each other, or that are too coarse.
    """
    others: list[Array] = []  # alpha_bar of betas that are not the known ones
    for name, exact in (("betas", expected.betas), ("alphas_cumprod", expected.alpha_bar)):
        if name not in file.shapes:
            continue
        where, stored = f"{file.path}: its {name}", read_weight(file, name)
        if tuple(stored.shape) != exact.shape:
            raise ValueError(f"{where} have the shape {tuple(stored.shape)}, wanted {exact.shape}")
        plain = stored.double()
        dtype = next((dtype for dtype in DTYPES if torch.equal(plain.to(dtype).double(), plain)), stored.dtype)
        values = plain.numpy()
        if any(is_rounded(stored, known, dtype, MERGED) for known in (exact, *others)):
            continue
        if dtype in COARSE:
            raise ValueError(f"{where} are not the family's, and too coarse to be used: stored in {short_name(dtype)}")
        if others:
            raise ValueError(f"{where} and betas are of two different noise schedules")
        try:
            schedule = Schedule(values, "v") if name == "alphas_cumprod" else Schedule.from_betas(values, "v")
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from error
        others.append(schedule.alpha_bar)
    return others[0] if others else None


def _scaled(family: Family, file: Tensors) -> Family:
    """Return the family with the scale factor in its file, if it has one: training measured it."""
    path, known = file.path, family.scale_factor
    if "scale_factor" in file.shapes:
        stored = read_weight(file, "scale_factor")
        value = float(stored) if stored.numel() == 1 else math.nan
        if not 0 < value < math.inf:
            raise ValueError(f"{path}: its scale_factor cannot be {value}: wanted one number above 0")
        if is_rounded(stored, np.full(stored.shape, known), stored.dtype):
            return family
        if stored.dtype in COARSE:
            raise ValueError(
                f"{path}: its scale_factor is stored in {short_name(stored.dtype)}, too coarse to be used: take the "
                "original file, or give `metadata=scale_factor=X`"
            )
        return replace(family, scale_factor=value)
    if math.isnan(known):
        raise ValueError(
            f"{path}: lacks scale_factor, which differs between files of {family.title}: take the original file, or "
            "give `metadata=scale_factor=X`"
        )
    return family


def _schedule(family: Family, file: Tensors, about: Mapping[str, str], zero_snr: bool) -> Schedule:
    """Return the family's noise schedule, or the file's own, with a warning, if its buffers differ."""
    schedule = family.noise.schedule(family.prediction)
    if schedule.is_flow:
        if zero_snr:
            raise ValueError(f"{family.title} is a rectified flow, which has no SNR to zero: leave out `zero_snr`")
        return schedule
    schedule = replace(schedule, spacing=about.get("spacing"))
    alpha_bar = stored_schedule(file, schedule)
    if alpha_bar is not None:
        log.warning("%s: using the noise schedule in the file, which is not %s's", file.path.name, family.title)
        schedule = replace(schedule, alpha_bar=alpha_bar)
    if family.prediction == "eps" and not schedule.alpha_bar[-1] > 0:
        raise ValueError(f'{file.path}: eps prediction is undefined at zero terminal SNR: try `prediction="v"`')
    if "ztsnr" in file.shapes or about.get("zero_snr") == "yes":
        log.info("%s: the file asks for zero terminal SNR", file.path.name)
        zero_snr = True
    if not zero_snr or schedule.alpha_bar[-1] == 0:
        return schedule
    try:
        return schedule.zero_terminal_snr()
    except ValueError as error:
        raise ValueError(f"{file.path}: {error}") from error
