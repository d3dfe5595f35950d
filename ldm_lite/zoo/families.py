"""The families by name, and the one of a checkpoint: by its networks' keys and shapes, never by its file name.

Each file of families/ has the rows of some, and is imported when one of them is looked up.  Missing files are left
out: any of them can be deleted except sd1, from which the others are derived.  What shapes do not show (head counts,
prediction type, scale factor) comes from the row, or from the file's metadata if no row matches.
"""

import json
import logging
import math
import re
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch

from ldm_lite.cli.files import parse_json
from ldm_lite.core.family import PREFIX
from ldm_lite.core.files import imported
from ldm_lite.core.layers import Shapes
from ldm_lite.core.networks import WithoutInit
from ldm_lite.core.vae import VAESpec
from ldm_lite.diffusion.schedule import NoiseSchedule
from ldm_lite.models.clip import ACTIVATIONS
from ldm_lite.models.unet import LDMUNetSpec
from ldm_lite.zoo.family import COSINE, CURVES, IN_THE_FILE, FamilyRow, Flow, Preserving, Spec, build_network, scale_of

log = logging.getLogger("ldm_lite")


class Module(NamedTuple):
    """A file of families/, and what identifies it: everything about its models outside of it and models/."""

    rows: tuple[str, ...]  # their names
    contexts: tuple[int | None, ...] = ()  # widths of their UNets' contexts; None: no context
    key: str = ""  # a key of its network, if that is not a UNet of latent diffusion
    diffusers: str = ""  # the same of its files in the format of diffusers, if it has other keys there
    vae: str = ""  # a key of its autoencoder, if no other family has it
    pipelines: str = ""  # a pattern of the names of its diffusers pipelines, without their task


# A file is of the first module that has a row with its networks, or whose key it has.
MODULES = {
    "sd1": Module(("sd1",), contexts=(768,), pipelines="StableDiffusion"),
    "sd1_variants": Module(
        ("sd1_inpaint", "instruct_pix2pix", "lcm"), contexts=(768,), pipelines="LatentConsistencyModel"
    ),
    "sd2": Module(
        ("sd2", "sd_turbo", "sd2_inpaint", "sd2_depth", "sd2_unclip_h", "sd2_unclip_l"),
        contexts=(1024,),
        pipelines="StableUnCLIP",
    ),
    "sdxl": Module(
        ("sdxl_base", "sdxl_turbo", "sdxl_inpaint", "lcm_sdxl", "sdxl_refiner"),
        contexts=(2048, 1280),
        pipelines="StableDiffusionXL",
    ),
    "ldm": Module(
        (
            *("ldm_celeba_ffhq_beds256", "ldm_lsun_churches256", "ldm_text2img_large", "ldm_text2img256"),
            *("ldm_cin256_v2", "ldm_cin256", "ldm_layout2img", "ldm_semantic_synthesis", "rdm768"),
            *("ldm_inpainting_big", "ldm_bsr_sr"),
        ),
        contexts=(None, 512, 640, 768, 1280),
    ),
    "upscaler": Module(("x4",), contexts=(1024,)),
    "chroma": Module(
        ("chroma", "chroma_flash"),
        key="distilled_guidance_layer.in_proj.weight",
        diffusers="distilled_guidance_layer.layers.0.linear_1.weight",
        pipelines="Chroma",
    ),
    "flux2": Module(
        ("flux2_klein", "flux2_klein_base"),
        key="double_stream_modulation_img.lin.weight",
        diffusers="single_transformer_blocks.0.attn.to_qkv_mlp_proj.weight",
        vae="bn.running_mean",
        pipelines="Flux2Klein",
    ),
    "flux": Module(  # after those that have its key
        ("flux_dev", "flux_schnell", "flux_kontext", "flux_fill", "flux_control", "flux_canny"),
        key="double_blocks.0.img_attn.norm.key_norm.scale",
        diffusers="single_transformer_blocks.0.proj_mlp.weight",
        pipelines="Flux(Kontext)?",
    ),
    "sd3": Module(
        ("sd3_medium", "sd35_medium", "sd35_large", "sd35_large_turbo"),
        key="joint_blocks.0.context_block.attn.qkv.weight",
        diffusers="pos_embed.proj.weight",
        pipelines="StableDiffusion3",
    ),
    "z_image": Module(
        ("z_image_turbo", "z_image"),
        key="cap_pad_token",
        diffusers="layers.0.attention.to_q.weight",
        pipelines="ZImage",
    ),
    "qwen_image": Module(
        ("qwen_image", "qwen_image_edit", "qwen_image_edit_2509", "qwen_image_edit_2511"),
        key="txt_norm.weight",
        vae="decoder.norm_out.gamma",
        pipelines="QwenImage(Edit(Plus)?|Layered)?",
    ),
    "deepfloyd": Module(("if_I", "if_II"), key="encoder_pooling.1.positional_embedding"),
}


@dataclass(frozen=True, eq=False)
class Families(Mapping[str, FamilyRow]):
    """The rows by name."""

    modules: Mapping[str, Module]  # by the names of their files

    def __getitem__(self, name: str) -> FamilyRow:
        for file, module in self.modules.items():
            if name in module.rows:
                return imported(f"ldm_lite.families.{file}:ROWS")[name]
        raise KeyError(name)

    def __iter__(self) -> Iterator[str]:
        return (name for module in self.modules.values() for name in module.rows)

    def __len__(self) -> int:
        return sum(len(module.rows) for module in self.modules.values())


FAMILY_ROWS = Families({name: module for name, module in MODULES.items() if find_spec(f"ldm_lite.families.{name}")})
# A key of a network other than LDMUNet -> (its shapes, metadata) -> its row, with its sizes.
DENOISERS = {module.key: f"ldm_lite.families.{name}:row" for name, module in FAMILY_ROWS.modules.items() if module.key}


# ---- which family a file is of ---------------------------------------------------------------------------------------


def detect_family(shapes: Mapping[str, Shapes], metadata: Mapping[str, str], sgm: bool = False) -> FamilyRow:
    """Return the family of a file, from the shapes of its networks by role (keys without prefixes) and its metadata.

    `sgm` = the file's text encoders have the key names of generative-models.  If a UNet matches no row, complete
    metadata describe it instead.  Raises ValueError, one line, for an unknown or distilled network and for
    contradictory metadata.
    """
    if metadata.get("family", "sd1") not in FAMILY_ROWS:
        raise ValueError(
            f"the metadata name the family {metadata['family']!r}, expected one of {', '.join(FAMILY_ROWS)}"
        )
    if "unet" not in shapes:
        check_complete(shapes, FAMILY_ROWS["sd1"].specs)
    if any(key in shapes["unet"] for key in DENOISERS):
        row = imported("ldm_lite.checkpoint.transformers:fitted")(shapes, metadata)
        return with_metadata(row, metadata) if row.text_encoders else row
    unet = LDMUNetSpec.from_shapes(shapes["unet"])
    if rows := _rows_with(unet):
        row = rows.get(metadata.get("family", "")) or _guessed(rows, metadata, sgm)
        if "ln_final.weight" in shapes.get("text_encoder", {}):
            row = _fit_open_clip(row, shapes["text_encoder"])
        family = with_metadata(row, metadata)
    elif unet.context_dim is not None and unet.middle_depth == 0:
        raise ValueError(
            "this UNet has no attention in its middle block: it is distilled (SSD-1B, Segmind-Vega, BK-SDM or the "
            "like), which is not supported"
        )
    else:
        family = with_metadata(_described(unet, shapes, metadata), metadata)
    return _retrained(family, metadata)


def _rows_with(unet: LDMUNetSpec) -> dict[str, FamilyRow]:
    """Return the rows with this UNet by name, of the first module that has some.

    Modules whose UNets read a context of another width are not imported.
    """
    for name, module in FAMILY_ROWS.modules.items():
        if unet.context_dim in module.contexts:
            rows: Mapping[str, FamilyRow] = imported(f"ldm_lite.families.{name}:ROWS")
            if same := {name: row for name, row in rows.items() if _as_inferred(row.unet) == unet}:
                return same
    return {}


def _guessed(rows: Mapping[str, FamilyRow], metadata: Mapping[str, str], sgm: bool) -> FamilyRow:
    """Choose among rows with the same UNet by other signs in the file, and log the choice if it is a guess.

    A scheduler, which any pipeline may have, is not a sign of a distilled model without its size or its name.
    """
    usual = next(iter(rows))
    name = next((name for name, row in rows.items() if row.sgm == sgm), usual)
    reason = "the names of its text encoder's keys"
    for hint in rows[name].hints:
        like, size = rows[hint.family], int(metadata.get("sample_size", 0)) * rows[name].vae.factor
        if metadata.get("scheduler") == like.scheduler:
            has_size = size == like.resolution != rows[name].resolution
            if has_size or hint.word in metadata.get("pipeline", "").lower():
                name, reason = hint.family, f"its scheduler and its {'size' if has_size else 'name'}"
            else:
                log.info("its scheduler is that of %s: if it is, add `metadata=family=%s`", like.title, hint.family)
    if name != usual:
        log.info("taken for %s by %s; otherwise add `metadata=family=%s`", rows[name].title, reason, usual)
    return rows[name]


def _fit_open_clip(family: FamilyRow, text: Shapes) -> FamilyRow:
    """Fit a row to a file whose OpenCLIP lacks the layers and the projection that the family does not use."""
    row: Any = family.text
    if family.conditioner == "clip" and hasattr(row, "projection"):
        spec = row.fitted(text)
        if spec.layers - spec.skip == row.layers - row.skip:
            fitting = replace(row, layers=spec.layers, skip=spec.skip, projection=spec.projection)
            return replace(family, text_encoders=(fitting, *family.text_encoders[1:]))
    return family


def _as_inferred(spec: Spec) -> Spec:
    """Return a row's spec without the number of heads, as inferred from shapes, which do not show it."""
    return replace(spec, num_heads=None, head_dim=None) if type(spec) is LDMUNetSpec else spec


MERGED: dict[str, Any] = {"steps": 4, "scale": 1.5}  # of a model with a distilled one merged into it


def _retrained(family: FamilyRow, metadata: Mapping[str, str]) -> FamilyRow:
    """Return the family of networks that were trained further: for another prediction, resolution or scheduler."""
    stated = family.resolution if "resolution" in metadata else None
    if (prediction := metadata.get("prediction", metadata.get("modelspec.prediction_type"))) is not None:
        family = with_prediction(family, prediction)
    if stated is not None:
        family = replace(family, resolution=stated)
    if "sample_size" in metadata and "resolution" not in metadata:
        size = int(metadata["sample_size"]) * family.vae.factor
        family = replace(family, resolution=size, v_resolution=None if family.v_resolution is None else size)
    if metadata.get("sampler") in ("lcm", "tcd") and not family.distilled:
        family = replace(family, **MERGED)
        log.info("taken for a distilled model by its scheduler: %(steps)d steps at scale %(scale)g", MERGED)
    return family


def _described(unet: LDMUNetSpec, shapes: Mapping[str, Shapes], metadata: Mapping[str, str]) -> FamilyRow:
    """Return the family of networks that no row has; the metadata supply the rest.

    If the metadata name a row as "family", it supplies the missing values.  Raises ValueError naming the nearest UNet
    if they are incomplete.
    """
    told = {*metadata, *(key for fact in METADATA_FACTS if fact.name in metadata for key in fact.gives)}
    told |= {"beta_start", "beta_end"} if metadata.get("beta_schedule") == COSINE else set()
    missing = [fact.name for fact in METADATA_FACTS if fact.required and fact.name not in told]
    if missing and "family" not in metadata:
        name, key = nearest_unet(unet, shapes["unet"])
        raise ValueError(
            f"unknown UNet: the nearest is {name}, from which it differs at {key}; to load it, its metadata (or "
            f"`metadata=KEY=VALUE`) must give {', '.join(missing)}"
        )
    row = FAMILY_ROWS[metadata.get("family", "sd1")]
    if not isinstance(row.unet, LDMUNetSpec):
        raise ValueError(f"the metadata name the family {metadata['family']!r}, but this is a UNet")
    check_complete(shapes, row.specs)
    return replace(
        row,
        title=row.title if "family" in metadata else "unnamed model",
        unet=replace(unet, num_heads=row.unet.num_heads, head_dim=row.unet.head_dim),
        vae=infer_vae(shapes["vae"]),
        text_encoders=tuple(like.fitted(shapes[role]) for role, like in row.texts.items()),
    )


def nearest_unet(spec: LDMUNetSpec, shapes: Shapes) -> tuple[str, str]:
    """Return the name of the known UNet with most values of `spec`, and the first key whose shape differs from it."""
    unets = {name: row.unet for name, row in FAMILY_ROWS.items() if type(row.unet) is LDMUNetSpec}

    def likeness(name: str) -> int:
        return sum(vars(spec)[key] == value for key, value in vars(_as_inferred(unets[name])).items())

    name = max(unets, key=likeness)
    with torch.device("meta"), WithoutInit():
        known = {key: tuple(value.shape) for key, value in build_network(unets[name]).state_dict().items()}
    differing = (key for key in known if shapes.get(key) != known[key])
    return name, next(differing, next((key for key in shapes if key not in known), "nothing"))


AUTOENCODERS = {  # a key of an autoencoder of no family -> the class of its spec
    "encoder.1.conv.0.weight": "ldm_lite.models.taesd:TAESDSpec",
    "decoder.1.weight": "ldm_lite.models.taesd:TAESDSpec",
    "quantize.embedding.weight": "ldm_lite.models.vae_vq:VQSpec",
}


def infer_vae(shapes: Shapes) -> Spec:
    """Return the spec of an autoencoder whose weights have these shapes.  Raises ValueError if they make no sense."""
    kind: Any = next((imported(kind) for key, kind in AUTOENCODERS.items() if key in shapes), VAESpec)
    if (module := with_autoencoder_in(shapes)) is not None:
        kind = type(FAMILY_ROWS[module.rows[0]].vae)
    return kind.from_shapes(shapes)


def with_autoencoder_in(shapes: Container[str]) -> Module | None:
    """Return the family of which a file holds an autoencoder that only it has, or None."""
    return next((module for module in FAMILY_ROWS.modules.values() if module.vae and module.vae in shapes), None)


CONTROLS = {  # roles of what needs a checkpoint beside it
    "control": "a ControlNet",
    "adapter": "a T2I-Adapter",
    "style": "a style adapter",
    "ip_adapter": "an IP-Adapter",
    "redux": "FLUX.1 Redux",
}


def check_complete(roles: Collection[str], required: Iterable[str], row: FamilyRow | None = None) -> None:
    """Raise ValueError if one of the required roles of networks was not found.

    With the row of a released family it names the files that supply them.
    """
    if len(roles) == 1 and (what := CONTROLS.get(next(iter(roles)))):
        raise ValueError(f"is {what}, to be used with a checkpoint: `control=FILE:IMAGE`")
    if missing := [role for role in required if role not in roles]:
        options = " and ".join(dict.fromkeys(f"`{re.sub('_[0-9]+$', '', role)}=FILE`" for role in missing))
        files = "" if row is None else imported("ldm_lite.checkpoint.transformers:suppliers")(row, missing)
        raise ValueError(f"holds only {', '.join(roles)}: give the missing networks with {options}{files}")


# ---- variants of a family --------------------------------------------------------------------------------------------

PREDICTIONS = {"epsilon": "eps", "v_prediction": "v", "sample": "x0", "eps": "eps", "v": "v", "x0": "x0"}


def with_prediction(family: FamilyRow, name: str) -> FamilyRow:
    """Return the family's variant with a prediction type: eps, v, x0, or diffusers' names for them.

    Raises ValueError for other names, and for a rectified flow, which has only one prediction type.
    """
    if isinstance(family.noise, Flow):
        raise ValueError(f"{family.title} is a rectified flow, which has one prediction: leave out `prediction`")
    prediction: Any = PREDICTIONS.get(str(name))
    if prediction is None:
        raise ValueError(f"unknown prediction type {name!r}: expected eps, v or x0")
    resolution = family.v_resolution if prediction == "v" and family.v_resolution is not None else family.resolution
    return replace(family, prediction=prediction, resolution=resolution, v_resolution=None)


def with_vae(family: FamilyRow, vae: Spec, name: str) -> FamilyRow:
    """Return the family with another autoencoder, from the file `name`.

    The scale and the shift of the latents stay, since autoencoder files do not store them, unless it is TAESD.
    Raises ValueError if the latents have other channels or another size, or only one of both has quant_conv.
    """
    usual = family.vae
    if (vae.embed_dim, vae.factor) != (usual.embed_dim, usual.factor):
        raise ValueError(
            f"{name}: does not fit: its latents have {vae.embed_dim} channels at 1/{vae.factor} of the size, but "
            f"{family.title} needs {usual.embed_dim} at 1/{usual.factor}"
        )
    if hasattr(usual, "quant") and hasattr(vae, "quant") and usual.quant != vae.quant:
        got, wanted = ("no", "one") if usual.quant else ("a", "none")
        raise ValueError(f"{name}: does not fit: it has {got} quant_conv, but {family.title}'s autoencoder {wanted}")
    return replace(family, vae=vae, **scale_of(vae))


# ---- what metadata say about a family --------------------------------------------------------------------------------


class Fact(NamedTuple):
    """Something that metadata say about a family: a file's, the user's, or the configuration of a diffusers folder."""

    name: str
    field: str = ""  # of Family, if it is the value of one
    kind: Callable[[str], object] = str
    of_unets: bool = False  # whether only a latent diffusion UNet has it
    required: bool = False  # of a UNet that no row has
    gives: tuple[str, ...] = ()  # the required facts that it replaces
    in_folders: bool = False  # whether only the configuration of a diffusers folder has it


METADATA_FACTS = (
    Fact("family"),
    Fact("title", "title"),
    Fact("prediction", of_unets=True, required=True),
    Fact("modelspec.prediction_type", of_unets=True, gives=("prediction",)),
    Fact("scaling_factor", "scale_factor", float, gives=("scale_factor",), in_folders=True),
    Fact("scale_factor", "scale_factor", float, required=True),  # after scaling_factor, which it overrides
    Fact("shift_factor", "shift_factor", float),
    Fact("resolution", "resolution", int, required=True),
    Fact("sample_size", gives=("resolution",), in_folders=True),  # of the latents
    Fact("words", "words"),
    Fact("steps", "steps", int),
    Fact("guidance", "scale", float),
    Fact("sampler", "sampler", in_folders=True),
    Fact("unet_num_heads", of_unets=True, required=True),
    Fact("unet_head_dim", of_unets=True, gives=("unet_num_heads",)),
    Fact("text_num_heads", required=True),
    Fact("text_activation", required=True),
    Fact("text_skip"),
    Fact("text_2_num_heads"),
    Fact("text_2_activation"),
    Fact("beta_start", of_unets=True, required=True),
    Fact("beta_end", of_unets=True, required=True),
    Fact("beta_schedule", of_unets=True),
    Fact("trained_betas", of_unets=True, gives=("beta_start", "beta_end")),
    Fact("num_timesteps", of_unets=True),
    *(Fact(name, in_folders=True) for name in ("spacing", "scheduler", "zero_snr", "pipeline")),
    *(Fact(name, in_folders=True) for name in ("flow_shifts", "flow_settings")),
    *(Fact(name, in_folders=True) for name in ("global_pool_conditions", "vision_num_heads")),
)
METADATA_KEYS = [fact.name for fact in METADATA_FACTS if not fact.in_folders]
FROM_FOLDERS = [fact.name for fact in METADATA_FACTS if fact.in_folders]


def check_metadata(metadata: Mapping[str, str]) -> Mapping[str, str]:
    """Check and return metadata from the user.  Raises ValueError for an unknown key."""
    if unknown := [name for name in metadata if name not in METADATA_KEYS]:
        raise ValueError(f"got `metadata` {unknown[0]}, expected one of {', '.join(METADATA_KEYS)}")
    return metadata


def stored_facts(metadata: Mapping[str, str]) -> dict[str, str]:
    """Return a file's metadata without entries under our names from other programs.

    Ours have a prefix, which is removed.  Without it they count if the file names a known family and has
    describe()'s other entries, as files of `train` and `export` do.
    """
    ours = {name.removeprefix(PREFIX): text for name, text in metadata.items() if name.startswith(PREFIX)}
    signed = metadata.keys() >= {"title", "steps", "guidance"} and metadata.get("family") in FAMILY_ROWS
    dropped = {*FROM_FOLDERS, *(() if signed else METADATA_KEYS)}
    if metadata.get("modelspec.prediction_type") in PREDICTIONS:  # a standard's name
        dropped -= {"modelspec.prediction_type"}
    others = {name: text for name, text in metadata.items() if name not in dropped}
    return others | {name: text for name, text in ours.items() if name in (*METADATA_KEYS, "sampler", "spacing")}


def apply_user_metadata(family: FamilyRow, fitting: FamilyRow, told: Mapping[str, str]) -> FamilyRow:
    """Return a family with the user's metadata, even where the row of a known UNet has other values.

    `fitting` is the file's family by the user's `family` alone.  Raises ValueError if that is another one, and for
    metadata that this family does not use.
    """
    if (name := told.get("family")) is not None and fitting.title != FAMILY_ROWS[name].title:
        raise ValueError(f"got `metadata` family={name}, whose networks differ from this file's: leave it out")
    is_unet = isinstance(family.unet, LDMUNetSpec)
    has_facts = is_unet or bool(family.text_encoders)
    general = {fact.name for fact in METADATA_FACTS if fact.field or fact.name == "family"}
    used = general if has_facts else set()
    used |= {fact.name for fact in METADATA_FACTS if fact.of_unets and is_unet}
    used |= {name for name, *_ in facts_of_texts(family)}
    if unused := sorted(told.keys() - used):
        raise ValueError(f"got `metadata` {unused[0]}, which {family.title} does not use: leave it out")
    return with_metadata(family, told)


def with_metadata(row: FamilyRow, metadata: Mapping[str, str]) -> FamilyRow:
    """Return a row with the values in metadata.  Raises ValueError for impossible ones."""
    try:
        values: dict[str, Any] = {
            fact.field: fact.kind(metadata[fact.name])
            for fact in METADATA_FACTS
            if fact.field and fact.name in metadata
        }
        texts = row.texts
        for name, role, field, kind in facts_of_texts(row):
            if name in metadata:
                texts[role] = replace(texts[role], **{field: kind(metadata[name])})
        family = replace(row, text_encoders=tuple(texts.values()), **values)
        if isinstance(row.unet, LDMUNetSpec):
            family = replace(
                family, unet=_unet_from_metadata(row.unet, metadata), noise=_noise_from_metadata(row.noise, metadata)
            )
        elif isinstance(row.noise, Flow) and "flow_shifts" in metadata:
            family = replace(family, noise=_flow_from_metadata(row.noise, metadata))
        _check(family)
    except ValueError as error:
        raise ValueError(f"the metadata does not describe a model: {error}") from error
    return family


def facts_of_texts(family: FamilyRow) -> Iterator[tuple[str, str, str, type]]:
    """Yield what metadata give of text encoders: the name, the encoder's role, the field of its spec, and its type."""
    for role, spec in family.texts.items():
        if hasattr(spec, "skip"):  # CLIP's and OpenCLIP's
            name = role.replace("_encoder", "")  # "text", "text_2", ...
            yield f"{name}_num_heads", role, "heads", int
            if hasattr(spec, "activation"):
                yield f"{name}_activation", role, "activation", str
            else:
                yield f"{name}_skip", role, "skip", int


def _unet_from_metadata(unet: LDMUNetSpec, metadata: Mapping[str, str]) -> LDMUNetSpec:
    """Return a UNet's spec with the number of heads, or else the width of one, that metadata give."""
    if "unet_num_heads" in metadata:
        return replace(unet, num_heads=int(metadata["unet_num_heads"]), head_dim=None)
    if "unet_head_dim" in metadata:
        return replace(unet, num_heads=None, head_dim=int(metadata["unet_head_dim"]))
    return unet


def _noise_from_metadata(noise: object, metadata: Mapping[str, str]) -> Preserving:
    """Return the noise process that metadata give; the row's, or Stable Diffusion 1's, for what they leave out."""
    sd1: Any = FAMILY_ROWS["sd1"].noise
    like = noise if isinstance(noise, Preserving) else sd1
    curve = metadata.get("beta_schedule", like.curve)
    if (number := metadata.get("num_timesteps", "1000")) != "1000":
        raise ValueError(f"its num_timesteps cannot be {number}: expected 1000")
    if "trained_betas" in metadata:
        betas = parse_json(metadata["trained_betas"], "its trained_betas")
        numbers = isinstance(betas, list) and all(type(beta) in (int, float) for beta in betas)
        if not numbers or len(betas) != 1000:
            raise ValueError("its trained_betas are not 1000 numbers")
        return Preserving(values=tuple(map(float, betas)))
    if curve == COSINE:
        return Preserving(curve=COSINE)
    if curve not in CURVES:
        raise ValueError(f"its beta_schedule cannot be {curve}: expected {', '.join(CURVES[:2])} or {COSINE}")
    like = sd1 if like.curve == COSINE else like  # a cosine has neither a start nor an end
    start, end = metadata.get("beta_start", like.start), metadata.get("beta_end", like.end)
    return Preserving(float(start), float(end), curve)


def _flow_from_metadata(flow: Flow, metadata: Mapping[str, str]) -> Flow:
    """Return the rectified flow of a diffusers folder: one shift, or its logarithms at 256 and 4096 tokens."""
    shifts, spacing = json.loads(metadata["flow_shifts"]), flow.spacing.partition(":")[0]
    if len(shifts) == 1:
        spacing = "flow" if spacing == "flow_by_steps" else spacing  # whose shift is by size and steps
        flow = replace(flow, shift=shifts[0], by_size=None)
    elif spacing != "flow_by_steps":
        flow = replace(flow, by_size=(shifts[0], shifts[1]))
    return replace(flow, spacing=spacing + metadata.get("flow_settings", ""))


Check = tuple[str, object, bool, str]  # name, value, whether it is valid, valid values


def _check(family: FamilyRow) -> None:
    """Raise ValueError for numbers that no model can have."""
    factor = family.vae.factor * family.unet.patch
    is_scale = 0 < family.scale_factor < math.inf or family.scale_factor is IN_THE_FILE
    is_whole = family.resolution > 0 and family.resolution % factor == 0
    checks: list[Check] = [
        ("scale_factor", family.scale_factor, is_scale, "more than 0"),
        ("shift_factor", family.shift_factor, math.isfinite(family.shift_factor), "a finite number"),
        ("resolution", family.resolution, is_whole, f"a multiple of {factor}"),
        ("steps", family.steps, 1 <= family.steps <= 1000, "1 to 1000"),
        ("guidance", family.scale, math.isfinite(family.scale), "a finite number"),
    ]
    for role, text in family.texts.items():
        checks += _checks_of_text(role.replace("_encoder", ""), text)
    if isinstance(noise := family.noise, Preserving):
        if noise.values is not None:
            NoiseSchedule.from_betas(noise.betas, family.prediction)
        elif noise.curve != COSINE:
            rises = 0 < noise.start <= noise.end < 1
            checks.append(("beta_start", noise.start, rises, "0 < beta_start <= beta_end < 1"))
    if isinstance(family.unet, LDMUNetSpec):
        checks += _checks_of_heads(family.unet)
    for name, value, is_valid, wanted in checks:
        if not is_valid:
            raise ValueError(f"its {name} cannot be {value}: expected {wanted}")


def _checks_of_text(name: str, text: Any) -> Iterator[Check]:
    if hasattr(text, "skip"):  # CLIP's and OpenCLIP's
        divides = text.heads > 0 and text.width % text.heads == 0
        yield f"{name}_num_heads", text.heads, divides, f"a divisor of {text.width}"
        yield f"{name}_skip", text.skip, 0 <= text.skip < text.layers, f"0 to {text.layers - 1}"
    if hasattr(text, "activation"):
        is_known, known = text.activation in ACTIVATIONS, ", ".join(ACTIVATIONS)
        yield f"{name}_activation", text.activation, is_known, f"one of {known}"


def _checks_of_heads(unet: LDMUNetSpec) -> Iterator[Check]:
    depths = (*unet.transformer_depth, unet.middle_depth)
    widths = [unet.model_channels * mult for mult in (*unet.channel_mult, unet.channel_mult[-1])]
    for name, heads in (("unet_num_heads", unet.num_heads), ("unet_head_dim", unet.head_dim)):
        for width in (width for width, depth in zip(widths, depths, strict=True) if depth):
            divides = heads is None or (heads > 0 and width % heads == 0)
            yield name, heads, divides, f"a divisor of {width}"


def describe(family: FamilyRow) -> dict[str, str]:
    """Return the metadata with which detect_family() recognises a family that matches no row."""
    rows = [name for name, row in FAMILY_ROWS.items() if _kind(row) == _kind(family)]
    values = vars(family)
    about: dict[str, object] = {
        "family": max(
            rows, key=lambda name: sum(value == values[key] for key, value in vars(FAMILY_ROWS[name]).items())
        ),
        "title": family.title,
        "prediction": family.prediction,
        "scale_factor": family.scale_factor,
        "shift_factor": family.shift_factor or None,
        "resolution": family.resolution,
        "steps": family.steps,
        "guidance": family.scale,
    }
    if isinstance(unet := family.unet, LDMUNetSpec) and isinstance(noise := family.noise, Preserving):
        about |= {"unet_num_heads": unet.num_heads, "unet_head_dim": unet.head_dim, "num_timesteps": 1000}
        about |= {"beta_schedule": noise.curve} if noise.values is None else {"trained_betas": json.dumps(noise.values)}
        if noise.values is None and noise.curve != COSINE:
            about |= {"beta_start": noise.start, "beta_end": noise.end}
    for name, role, field, _ in facts_of_texts(family):
        value = getattr(family.texts[role], field)
        if field != "skip" or value == 0:  # otherwise the number of layers shows it
            about[name] = value
    return {key: str(value) for key, value in about.items() if value not in (None, IN_THE_FILE)}


def _kind(family: FamilyRow) -> tuple[object, ...]:
    return family.conditioner, family.task, family.sgm, type(family.text)
