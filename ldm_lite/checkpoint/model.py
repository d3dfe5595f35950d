"""Pipeline: the networks, tokenizer and schedule of one checkpoint; load() makes it."""

import logging
import math
import os
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ldm_lite.checkpoint import hub
from ldm_lite.checkpoint import lora as adapters
from ldm_lite.checkpoint.diffusers_folder import open_source
from ldm_lite.checkpoint.reader import (
    SGM,
    Checkpoint,
    Component,
    ema_copy,
    join,
    load_weights,
    on_meta,
    open_checkpoint,
    split,
)
from ldm_lite.diffusion.schedule import Schedule
from ldm_lite.diffusion.step import denoise_step
from ldm_lite.models.bert import BERTSpec
from ldm_lite.models.clip import CLIPTextSpec
from ldm_lite.models.open_clip import OpenCLIPTextSpec
from ldm_lite.models.pixels import Pixels, PixelSpec
from ldm_lite.models.t5 import T5Encoder
from ldm_lite.models.taesd import TAESD, TAESDSpec
from ldm_lite.models.unet import UNet
from ldm_lite.models.vae_kl import AutoencoderKL, VAESpec
from ldm_lite.models.vae_vq import VQModel, VQSpec
from ldm_lite.runtime.compile import Step
from ldm_lite.runtime.offload import Placement
from ldm_lite.runtime.precision import pick_device, pick_dtype, pick_dtypes, short_name
from ldm_lite.runtime.tiling import tiled
from ldm_lite.runtime.tuning import tune
from ldm_lite.text.tokenizer import BERTTokenizer, CLIPTokenizer, TextTokenizer
from ldm_lite.zoo.detection import (
    check_complete,
    check_metadata,
    detect_family,
    detect_prediction,
    metadata_prediction,
    parse_prediction,
    turbo_variant,
    with_prediction,
    with_vae,
)
from ldm_lite.zoo.families import Family
from ldm_lite.zoo.inference import infer_t5, infer_vae
from ldm_lite.zoo.networks import BERT_LARGE, EncoderSpec, build

log = logging.getLogger("ldm_lite")

Autoencoder = AutoencoderKL | VQModel | TAESD | Pixels


@dataclass(frozen=True)
class Pipeline:
    """Everything of one checkpoint that turns a prompt into an image.  Immutable: threads may share it.

    Latents are in the UNet's scale: the autoencoder's times family.scale_factor.
    """

    name: str  # of the file, without its extension
    family: Family
    schedule: Schedule
    unet: UNet
    vae: Autoencoder
    text_encoder: nn.Module | None  # what reads prompts (or classes, or boxes), if anything does
    text_encoder_2: nn.Module | None
    tokenizer: TextTokenizer | None
    description: str  # what was loaded, from where, in one line
    placement: Placement | None = None  # None: the networks are on the device all the time, in the type they compute in
    step: Step = denoise_step  # how a row of a plan is run: as it stands, or compiled
    learned: Mapping[int, Tensor] = field(default_factory=dict)  # vectors beyond the vocabulary, (V,D) by their width D

    @property
    def networks(self) -> dict[str, nn.Module]:
        """The networks by their roles."""
        return {role: getattr(self, role) for role in self.family.networks}

    @property
    def device(self) -> torch.device:
        """Where the networks compute."""
        if self.placement is not None:
            return self.placement.device
        return next(self.unet.parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        """What the UNet computes in."""
        if self.placement is not None:
            return self.placement.dtypes["unet"]
        return next(self.unet.parameters()).dtype

    def phase(self, *roles: str) -> AbstractContextManager[None]:
        """In this block the networks of these roles are where they compute; what computes with them enters it."""
        return nullcontext() if self.placement is None else self.placement.phase(*roles)

    def latent_shape(self, height: int, width: int) -> tuple[int, int, int]:
        """Image size in pixels -> shape (C,h,w) of its latent.  Raises ValueError if a side is no multiple of 8 (f)."""
        f = self.vae.spec.factor
        if height <= 0 or width <= 0 or height % f or width % f:
            legal = [max(f, round(side / f) * f) for side in (height, width)]
            raise ValueError(f"got H {height} and W {width}, wanted multiples of {f}: take {legal[0]} and {legal[1]}")
        return self.vae.spec.embed_dim, height // f, width // f


def tokenizer_of(spec: EncoderSpec | None) -> TextTokenizer | None:
    """What makes the tokens that a text encoder reads; None if it reads no text."""
    if isinstance(spec, CLIPTextSpec):
        return CLIPTokenizer(spec.length)
    if isinstance(spec, OpenCLIPTextSpec):
        return CLIPTokenizer(spec.length, pad_id=0)
    if isinstance(spec, BERTSpec) and spec.vocab_size == BERT_LARGE.vocab_size:  # else it reads boxes
        return BERTTokenizer(spec.length)
    return None


def load(
    source: str | os.PathLike[str] | Checkpoint | None = None,
    *,
    device: str | torch.device | None = None,
    dtype: str | torch.dtype | None = None,
    ema: str = "auto",
    prediction: str | None = None,
    parts: Mapping[str, str | os.PathLike[str]] | None = None,
    lora: Sequence[str] = (),
    metadata: Mapping[str, str] | None = None,
    zero_snr: bool = False,
    tuning: Mapping[str, Any] | None = None,
) -> Pipeline:
    """Open a checkpoint: its name as open_source takes it, an open one, or None: the bundled model.

    dtype is one for all networks, or "fp16,vae=fp32" with others for some by their roles.
    ema is "auto" (if the file has a complete EMA copy), "yes" or "no"; prediction overrides eps or v.  parts names
    other files (bare or whole) that a network is taken from instead, by its role: "unet", "vae", "text_encoder" (for
    both of two).  lora names LoRA files, "FILE" or "FILE:WEIGHT", that are merged into the weights.  metadata adds to
    the file's; zero_snr shifts the schedule to zero terminal SNR (done unasked for files with the marker "ztsnr").
    tuning is how it runs: "attention" (a name of runtime.attention), "compile" (a tier of runtime.compile), "compiled"
    (a package of ldm_lite.export), "matmul_precision" ("high" for TF32), "offload" ("model" or "sequential"), "storage"
    ("fp8" or "int8"), "vae_tiling" (True).
    Raises FileNotFoundError or ValueError, one line that says what to do.
    """
    start = time.perf_counter()
    loras = [adapters.parse(text) for text in lora]
    checkpoint = source if isinstance(source, Checkpoint) else open_source(source)
    path, title = checkpoint.path, hub.title(checkpoint.path)
    torch_device = pick_device(device)
    own = split(checkpoint)
    components = own | _others(parts or {})
    main = (components.get("unet") or next(iter(components.values()))).checkpoint
    marker = {"prediction": "v"} if "v_pred" in main.shapes else {}
    about = {**marker, **main.metadata, **check_metadata(metadata or {})}
    try:
        # By its own autoencoder: another one must fit.
        known_by = components | {role: own[role] for role in ("vae",) if role in own}
        sgm = any(key.startswith(SGM) for key in main.shapes)
        family = detect_family({role: component.shapes for role, component in known_by.items()}, about, sgm)
        check_complete(components, family.networks)
        _check_latents(own, parts or {}, family)
    except ValueError as error:
        raise ValueError(f"{main.path}: {error}") from error
    family = _scaled(family, main, about)
    if parts and "vae" in parts:
        family = with_vae(family, autoencoder_spec(components["vae"]), name=str(parts["vae"]))
    components["unet"], weights = _with_ema(components["unet"], ema)
    tuning = {} if tuning is None else tuning
    dtypes = pick_dtypes(dtype, torch_device, family.networks, ("vae",) if family.vae_overflows else ())
    networks = _networks(family, components, _home(tuning, torch_device), dtypes)
    family = _predicting(family, prediction, about, networks["unet"], title)
    schedule = _schedule(family, main, zero_snr)
    adapters.Merged(networks, [(adapters.open_lora(file), weight) for file, weight in loras], removable=False)
    step, placement = _tune(networks, tuning, torch_device)
    parameters = sum(p.numel() for network in networks.values() for p in network.parameters())
    description = (
        f"{title}: {family.title}, {family.prediction} prediction, {weights} weights, {parameters / 1e6:,.0f} M "
        f"parameters, {_words(dtypes)} on {torch_device}, loaded in {time.perf_counter() - start:.1f} s"
    )
    log.info("%s", description)
    if "turbo" in title.lower() and "family" not in (metadata or {}) and (turbo := turbo_variant(family)) is not None:
        log.warning("its name says Turbo, which its weights do not tell: if it is, add --metadata family=%s", turbo)
    networks = _without_weights(family, torch_device, dtypes["unet"]) | networks
    return Pipeline(
        name=title if path.is_dir() else path.stem,
        family=family,
        schedule=schedule,
        tokenizer=tokenizer_of(family.text),
        description=description,
        placement=placement,
        step=step,
        **networks,
    )


def _predicting(family: Family, prediction: str | None, about: Mapping[str, str], unet: UNet, title: str) -> Family:
    """The family's variant with the prediction that is asked for, stated by the file, or read off the weights."""
    if prediction is not None:
        return with_prediction(family, parse_prediction(prediction))
    if family.v_resolution is not None and metadata_prediction(about) is None:
        family, why = detect_prediction(family, unet)
        log.info("%s: predicts %s %s; --prediction overrules that", title, family.prediction, why)
    return family


def _networks(
    family: Family, components: Mapping[str, Component], device: torch.device, dtypes: Mapping[str, torch.dtype]
) -> dict[str, Any]:
    """The family's networks by role, with their weights."""
    with on_meta():
        networks: dict[str, Any] = {role: build(spec) for role, spec in family.networks.items()}
    for role, network in networks.items():
        load_weights(network, components[role], role.replace("_", " "), device, dtypes[role])
    return networks


def _words(dtypes: Mapping[str, torch.dtype]) -> str:
    """The UNet's dtype, and of others those that differ: "fp16 (vae fp32)"."""
    unet = dtypes["unet"]
    others = ", ".join(f"{role} {short_name(dtype)}" for role, dtype in dtypes.items() if dtype != unet)
    return short_name(unet) + (f" ({others})" if others else "")


def _without_weights(family: Family, device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
    """What stands where a family has no network."""
    none: dict[str, Any] = {"text_encoder": None, "text_encoder_2": None}
    return none | ({"vae": Pixels(family.vae).to(device, dtype)} if isinstance(family.vae, PixelSpec) else {})


def _home(tuning: Mapping[str, Any], device: torch.device) -> torch.device:
    """Where weights are read to: what is offloaded or stored in 8 bits must not all be on the device even once."""
    return torch.device("cpu") if tuning.get("offload") or tuning.get("storage") else device


def _tune(networks: dict[str, Any], tuning: Mapping[str, Any], device: torch.device) -> tuple[Step, Placement | None]:
    """Set the networks up as load's tuning says, in place -> the UNet's step, and who moves them."""
    settings = dict(tuning)
    offload, storage = (settings.pop(name, None) for name in ("offload", "storage"))
    if settings.pop("vae_tiling", False):
        networks["vae"] = tiled(networks["vae"])
    compiles = "compiled" in settings or settings.get("compile", "off") != "off"
    if compiles and (offload or storage):
        raise ValueError(
            "compiled code needs its weights where they are: leave out --compile(d), or --offload and --storage"
        )
    step = tune(networks, **settings)
    if offload is None and storage is None:
        return step, None
    return step, Placement(networks, device, offload=offload, storage=storage)


def load_autoencoder(
    source: str | os.PathLike[str] | None = None,
    *,
    device: str | torch.device | None = None,
    dtype: str | torch.dtype | None = None,
) -> Autoencoder:
    """The autoencoder of a checkpoint, or of a file of its own: KL, VQ or TAESD.

    Raises FileNotFoundError or ValueError, one line that says what to do.
    """
    torch_device, component = pick_device(device), open_autoencoder(source)
    with on_meta():
        network: Any = build(autoencoder_spec(component))
    load_weights(network, component, "vae", torch_device, pick_dtype(dtype, torch_device))
    tune({"vae": network}, matmul_precision=torch.get_float32_matmul_precision())  # as the process has it
    return network


def open_autoencoder(source: str | os.PathLike[str] | None) -> Component:
    """The weights of that autoencoder.  Raises as load_autoencoder does."""
    checkpoint = open_source(source)
    components = split(checkpoint)
    if "vae" not in components:
        raise ValueError(f"{checkpoint.path}: holds no autoencoder, only {', '.join(components)}")
    return components["vae"]


def autoencoder_spec(component: Component) -> VAESpec | VQSpec | TAESDSpec:
    """What its shapes say that an autoencoder is.  Raises ValueError if it lacks what all of them have."""
    try:
        return infer_vae(component.shapes)
    except KeyError as error:
        path, key = component.checkpoint.path, error.args[0]
        raise ValueError(f"{path}: holds an autoencoder that is none of those known here: it has no {key}") from error


def load_t5(paths: Sequence[Path], device: torch.device, dtype: torch.dtype) -> T5Encoder:
    """A T5 v1.1 encoder, which may lie in several files.  Raises ValueError if they do not hold one."""
    checkpoint = join([open_checkpoint(path) for path in paths])
    probe = "encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
    if not {probe, "shared.weight"} <= checkpoint.shapes.keys():
        raise ValueError(f"{paths[0]}: holds no T5 encoder; one that is in several files wants all of them")
    component = split(checkpoint)["text_encoder"]
    with on_meta():
        encoder = T5Encoder(infer_t5(component.shapes))
    load_weights(encoder, component, "T5", device, dtype)
    return encoder


def _others(sources: Mapping[str, str | os.PathLike[str]]) -> dict[str, Component]:
    """The weights that other files are to give, by role.  Raises ValueError for a file that has none of that role."""
    components: dict[str, Component] = {}
    for name, source in sources.items():
        given = split(open_source(source))
        if name not in given:
            raise ValueError(f"{source}: holds no {name.replace('_', ' ')}, only {', '.join(sorted(given))}")
        components |= {role: component for role, component in given.items() if role in (name, f"{name}_2")}
    return components


def _check_latents(own: Mapping[str, Component], parts: Mapping[str, object], family: Family) -> None:
    """Raises ValueError if a family's UNet is put beside another's autoencoder, whose latents are scaled otherwise.

    own are the networks of the checkpoint itself.
    """
    if "unet" not in parts or "vae" in parts or "unet" not in own:
        return
    checkpoint = own["unet"].checkpoint
    sgm = any(key.startswith(SGM) for key in checkpoint.shapes)
    try:
        theirs = detect_family({role: each.shapes for role, each in own.items()}, checkpoint.metadata, sgm)
    except ValueError:  # an unknown model
        return
    if theirs.scale_factor != family.scale_factor and not math.isnan(theirs.scale_factor + family.scale_factor):
        raise ValueError(
            f"is a UNet of {family.title}, and {checkpoint.path} a checkpoint of {theirs.title}, whose autoencoder "
            "makes other latents: take a checkpoint that the UNet is of, or name its autoencoder with --vae"
        )


def _scaled(family: Family, checkpoint: Checkpoint, about: Mapping[str, str]) -> Family:
    """The family with the scale factor that its file holds, if it does: it was measured where training began."""
    if "scale_factor" in checkpoint.shapes:
        return replace(family, scale_factor=float(checkpoint.read("scale_factor")))
    if not math.isnan(family.scale_factor):
        return family
    if "scale_factor" not in about:
        raise ValueError(
            f"{checkpoint.path}: lacks `scale_factor`, which no other file of {family.title} tells: take the original "
            "file, or give it with --metadata scale_factor=X"
        )
    return replace(family, scale_factor=float(about["scale_factor"]))


def _schedule(family: Family, checkpoint: Checkpoint, zero_snr: bool) -> Schedule:
    """The family's noise schedule, or the file's own where its `betas` buffer differs; that is said."""
    betas = family.noise.betas
    if "betas" in checkpoint.shapes:
        stored = checkpoint.read("betas").double().numpy()
        # Half-precision merges have rounded this buffer too.
        if stored.shape != betas.shape or not np.allclose(stored, betas, rtol=2e-3, atol=0):
            log.warning("%s: takes the noise schedule from the file, not %s's", checkpoint.path.name, family.title)
            betas = stored
    schedule = Schedule.from_betas(betas, family.prediction)
    if family.prediction == "eps" and not schedule.alpha_bar[-1] > 0:
        raise ValueError(f"{checkpoint.path}: eps prediction is undefined at zero terminal SNR: try --prediction v")
    if "ztsnr" in checkpoint.shapes:
        log.info("%s: asks for zero terminal SNR", checkpoint.path.name)
        zero_snr = True
    return schedule.zero_terminal_snr() if zero_snr else schedule


def _with_ema(unet: Component, ema: str) -> tuple[Component, str]:
    """The UNet's weights to load and what to call them, by the choice "auto", "yes" or "no"."""
    if ema not in ("auto", "yes", "no"):
        raise ValueError(f"got ema {ema!r}, wanted auto, yes or no")
    copy = ema_copy(unet)
    if copy is None:
        if ema == "yes":
            raise ValueError(f"{unet.checkpoint.path}: has no complete EMA copy of the UNet: take --ema auto")
        return unet, "main"
    if ema == "no":
        return unet, "main (not the file's EMA)"
    return copy, "EMA (not the file's main)"
