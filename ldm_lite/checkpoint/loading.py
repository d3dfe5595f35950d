"""From the path of a checkpoint to a Model: what it is, what is wrong with it, and only then its weights.

reader.py finds the networks in a file, and zoo/families.py finds its family by their shapes.  Modules that only some
files need are imported for them: LoRAs, text encoders of transformers, vocabularies in files, buffers of their own.
"""

import logging
import math
import re
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple, TypeVar

import numpy as np

from ldm_lite.checkpoint import hub
from ldm_lite.checkpoint.model import CheckpointModel
from ldm_lite.checkpoint.parts import autoencoder_spec
from ldm_lite.checkpoint.reader import (
    SGM,
    WITHOUT_WEIGHTS,
    Parts,
    errors_of,
    load_weights,
    metadata_of,
    on_meta,
    open_source,
    parts_of,
    read_weight,
)
from ldm_lite.cli.options import LoadOptions
from ldm_lite.core.files import Tensors, imported
from ldm_lite.core.networks import ema_copy, pick_device
from ldm_lite.diffusion.schedule import NoiseSchedule
from ldm_lite.models.clip import num_known
from ldm_lite.runtime.memory import physical_memory
from ldm_lite.runtime.precision import pick_dtypes, short_name
from ldm_lite.runtime.setup import check_runtime, load_device, num_parameters, prepare_networks
from ldm_lite.text.tokenizer import FixingCLIPTokenizer, OpenCLIPTokenizer, TextTokenizer
from ldm_lite.zoo.families import (
    DENOISERS,
    apply_user_metadata,
    check_complete,
    check_metadata,
    detect_family,
    with_prediction,
    with_vae,
)
from ldm_lite.zoo.family import FamilyRow, Flow, Spec, build_network, recipe_of, text_roles

log = logging.getLogger("ldm_lite")

ADAPTERS, FORMATS = "ldm_lite.adapters", "ldm_lite.formats"
PREDICTIONS = {"prediction", "modelspec.prediction_type"}  # metadata

M = TypeVar("M", bound=CheckpointModel)


def load_model(options: LoadOptions, kind: type[M], check: Callable[[M], None] | None = None) -> M:
    """Open a checkpoint and load its networks as the options say, into a Model or a subclass.

    options.ckpt is a name as open_source takes it, open Tensors, or None: the bundled model.  `check` is called before
    any weights are read, with the model while its networks are on the meta device; it must not change them, since they
    are filled afterwards.  Raises FileNotFoundError or ValueError, one line that says what to do, and the errors of
    `check`.
    """
    start = time.perf_counter()
    loras: list[Any] = []
    if options.lora:
        parse, open_lora = imported(f"{ADAPTERS}.strength:parse"), imported(f"{ADAPTERS}.lora:open_lora")
        loras = [(open_lora(source), weight) for source, weight in map(parse, options.lora)]
    if isinstance(ckpt := options.ckpt, Tensors):  # which may be loaded again: each model gets its own weights
        opened = replace(ckpt, read=lambda key: ckpt.read(key).clone())
    else:
        opened = open_source(ckpt)
    path = opened.path
    title = hub.title(path) if path.is_dir() else path.name
    device = pick_device(options.device)
    check_runtime(options, device)

    # What the file is, and which of its weights count.
    family, parts, file, metadata = recognise_file(opened, options)
    for lora, _ in loras:
        imported(f"{ADAPTERS}.lora:check_base")(lora, family)
    ema = options.ema if options.ema != "original" else "auto" if family.original_ema else "no"
    copy, weights = ema_copy(file, parts["unet"], WITHOUT_WEIGHTS), "main"
    if copy is None and ema == "yes":
        raise ValueError(f'{parts["unet"].path}: has no complete EMA copy of the UNet: use `ema="auto"`')
    if copy is not None:
        weights = "main (not the file's EMA)" if ema == "no" else "EMA (not the file's main)"
        parts["unet"] = parts["unet"] if ema == "no" else copy
    if family.with_loras is not None:
        family, parts["unet"] = family.with_loras(family, parts["unet"], [lora for lora, _ in loras])
    tokenizer, t5_tokenizer = tokenizers_of(family, parts, options)

    # What shapes do not show: the user says it, or the weights, or perhaps the file's name.
    if options.prediction is not None:
        family = with_prediction(family, options.prediction)
    elif family.predicts is not None and family.v_resolution is not None and not metadata.keys() & PREDICTIONS:
        prediction, why = family.predicts(parts["unet"])
        family = with_prediction(family, prediction)
        log.info("%s: predicts %s %s; `prediction` overrides that", title, family.prediction, why)
    for hint in family.hints:
        is_told = "family" in (metadata if hint.lacks else options.added_metadata)
        has_word = re.search(rf"(?<!\d){hint.word}(?!\d)", title.lower()) is not None  # not as part of a number
        if has_word != hint.lacks and not is_told:
            log.warning("%s: %s", title, hint.text(family.title))
            break
    told = "family" in options.added_metadata or "steps" in metadata
    names = [] if told else [(name, False) for name in names_of(title, parts["unet"].path.name, metadata)]
    names = [(name, True) for lora, _ in loras for name in lora.names] + names
    if names:
        family = with_recipe(family, names, chosen={*metadata, *(["prediction"] if options.prediction else [])})

    # The model without weights: everything else can be checked.
    networks: dict[str, Any] = {}
    for role, spec in family.specs.items():
        with errors_of(parts[role].path), on_meta():
            networks[role] = build_network(spec)
    latents_are_pixels = "vae" not in networks
    model = kind(
        name=title if path.is_dir() else path.stem,
        family=family,
        schedule=schedule_in_file(family, file, metadata, options.zero_snr),
        networks={**networks, "vae": build_network(family.vae)} if latents_are_pixels else networks,
        tokenizer=tokenizer,
        t5_tokenizer=t5_tokenizer,
        description=title,
        ema=weights.startswith("EMA"),
    )
    if embeddings := [embedding for lora, _ in loras for embedding in lora.embeddings]:
        model = imported(f"{ADAPTERS}.textual_inversion:learn")(model, embeddings, "`lora`")
    if check is not None:
        check(model)

    # The weights, each read to where it stays, and the kernels that compute with them.
    dtype = options.dtype or (family.dtype if device.type == "cuda" else None)
    dtypes = pick_dtypes(dtype, device, networks, ("vae",) if family.vae_overflows else ())
    quantises, home = options.storage is not None, load_device(options, device)
    if home.type == "cpu":
        whole = {role: part for role, part in parts.items() if quantises or not hasattr(part, "fill_blocks")}
        check_memory(networks, whole, dtypes, is_elsewhere=device.type != "cpu")
    for role, network in networks.items():
        load_weights(network, parts[role], role.replace("_", " "), home, dtypes[role], in_blocks=not quantises)
    if loras and not quantises:
        imported(f"{ADAPTERS}.lora:merge_lora")(networks, loras, removable=False)
    step, offloader = prepare_networks(networks, options, device)
    if loras and quantises:  # they are kept beside the quantised weights
        imported(f"{ADAPTERS}.lora:merge_lora")(networks, loras, offloader, removable=False)
    if latents_are_pixels:
        model.vae.to(device, dtypes["unet"])
    others = ", ".join(f"{role} {short_name(dtype)}" for role, dtype in dtypes.items() if dtype != dtypes["unet"])
    dtype_names = short_name(dtypes["unet"]) + (f" ({others})" if others else "")
    description = (
        f"{title}: {family.title}, {family.prediction} prediction, {weights} weights, "
        f"{sum(map(num_parameters, networks.values())) / 1e6:,.0f} M parameters, {dtype_names} on {device}, "
        f"loaded in {time.perf_counter() - start:.1f} s"
    )
    log.info("%s", description)
    return replace(model, description=description, offloader=offloader, run_row=step)


def check_memory(
    networks: Mapping[str, Any], parts: Mapping[str, Tensors], dtypes: Mapping[str, Any], is_elsewhere: bool = False
) -> None:
    """Raise ValueError if the networks of these parts, on the meta device, do not fit into the machine's memory.

    `is_elsewhere` = they run on a device of their own, and are loaded here to be offloaded or quantised.
    """
    memory = physical_memory()
    counts = {role: num_parameters(network) for role, network in networks.items() if role in parts}
    sizes = {role: count * dtypes[role].itemsize for role, count in counts.items()}
    needed, half = sum(sizes.values()), 2 * sum(counts.values())
    if memory is None or needed <= memory:
        return
    largest = max(sizes, key=sizes.__getitem__)
    ways = [f'`dtype="bf16"`, which takes {half / 2**30:.0f} GiB'] if half <= memory else []
    ways += ["GGUF files, whose weights stay in blocks"]
    if is_elsewhere:
        ways += ["no `offload` and `storage`, for which weights are loaded here, if the device has the memory"]
    by_role = ", ".join(f"{role} {size / 2**30:.1f}" for role, size in sizes.items() if size > needed / 20)
    raise ValueError(
        f"{parts[largest].path}: the networks take {needed / 2**30:.0f} GiB in {short_name(dtypes[largest])} "
        f"({by_role}), but this machine has {memory / 2**30:.0f} GiB of memory: use {' or '.join(ways)}"
    )


# ---- what a file is -------------------------------------------------------------------------------------------------


class Recognised(NamedTuple):
    """What a checkpoint is, with the networks that replace its own."""

    family: FamilyRow
    parts: dict[str, Tensors]  # the networks by role, without prefixes
    file: Tensors  # the whole file that the UNet is in, with EMA copy and buffers
    metadata: dict[str, str]  # of all files, and the user's


def recognise_file(opened: Tensors, options: LoadOptions) -> Recognised:
    """Find what a checkpoint is, by its keys and shapes, its metadata, and what the user says about it.

    Raises ValueError for a file without a network of its role, and for networks that are unknown, missing, or do not
    fit together.
    """
    networks, told = parts_of(opened), options.added_metadata
    file, replaced, texts = networks.file, dict[str, Tensors](), list[Tensors]()
    for name, sources in options.parts.items():
        for source in sources:
            others = parts_of(open_source(source))
            of_role = [part for role, part in others.items() if role.startswith(name)]
            if not of_role:
                raise ValueError(f"{source}: holds no {name.replace('_', ' ')}, only {', '.join(sorted(others))}")
            if name == "text_encoder":
                texts += of_role
            else:
                replaced[name] = of_role[0]
                file = others.file if name == "unet" else file
    replaced |= dict(zip(text_roles(texts), texts, strict=True))
    parts = {**networks, **replaced}

    metadata = {"prediction": "v"} if "v_pred" in file else {}
    metadata |= file.metadata
    if any(key in parts.get("unet", ()) for key in DENOISERS):
        parts = imported("ldm_lite.checkpoint.transformers:placed")(networks, replaced, {**metadata, **told})
    for role, part in parts.items():  # a network's metadata come with it from its file
        metadata |= metadata_of(role, part.metadata)
    metadata |= check_metadata(told) if told else {}

    with errors_of(file.path):
        shapes = {role: part.shapes for role, part in parts.items()}
        if "vae" in networks:
            shapes["vae"] = networks["vae"].shapes  # a replacement has to fit this one
        sgm = any(key.startswith(SGM) for key in file)
        family = detect_family(shapes, metadata, sgm)
        if told:
            fitting = family
            if "family" in told:
                untitled = {key: text for key, text in metadata.items() if key != "title"}
                fitting = detect_family(shapes, untitled, sgm)
            family = apply_user_metadata(family, fitting, told)
        check_complete(parts, family.specs, family)
        if "unet" in replaced and "vae" not in replaced and "unet" in networks:
            _check_latents(networks, family)
    if "scale_factor" not in told and ("scale_factor" in file or math.isnan(family.scale_factor)):
        family = imported(f"{FORMATS}.buffers:scaled")(family, file)
    if options.vae is not None:
        family = with_vae(family, autoencoder_spec(parts["vae"]), name=options.vae)
    return Recognised(family, parts, file, metadata)


def _check_latents(networks: Parts, family: FamilyRow) -> None:
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
            "makes other latents: use the UNet's own checkpoint, or name its autoencoder with `vae=FILE`"
        )


def names_of(title: str, unet: str, metadata: Mapping[str, str]) -> list[str]:
    """Return the names of a checkpoint: of its UNet's file, its own, and those in its metadata."""
    return [unet, title, *(metadata[key] for key in ("modelspec.title", "general.name") if key in metadata)]


def with_recipe(family: FamilyRow, names: Iterable[tuple[str, bool]], chosen: Collection[str]) -> FamilyRow:
    """Return the family with the defaults of the first recipe that one of the names has, which a message says.

    A name comes with whether it is a LoRA's; `chosen` is what the metadata or the user says: "sampler", "prediction".
    """
    for name, is_lora in names:
        recipe = recipe_of(family, name, is_lora)
        if recipe is not None and not (recipe.prediction and (PREDICTIONS & {*chosen} or family.prediction != "eps")):
            recipe = recipe if "sampler" not in chosen or is_lora else recipe._replace(sampler=None)
            family = recipe.applied(family, name)
            log.warning("%s", recipe.text(name, family))
            break
    return family


# ---- its schedule and tokenizers ------------------------------------------------------------------------------------

MERGED = 2e-3  # relative: the buffers of files merged in half precision are off by more than a rounding


def schedule_in_file(family: FamilyRow, file: Tensors, metadata: Mapping[str, str], zero_snr: bool) -> NoiseSchedule:
    """Return the family's noise schedule, or the file's own, with a warning, if its buffers differ."""
    schedule = family.noise.schedule(family.prediction)
    if isinstance(family.noise, Flow):
        if zero_snr:
            raise ValueError(f"{family.title} is a rectified flow, which has no SNR to zero: leave out `zero_snr`")
        return schedule
    schedule = replace(schedule, spacing=metadata.get("spacing"))
    usual = {"betas": family.noise.betas, "alphas_cumprod": schedule.alpha_bar}
    stored = {name: read_weight(file, name).double().numpy() for name in usual if name in file}
    is_usual = (
        values.shape == usual[name].shape and np.allclose(values, usual[name], rtol=MERGED, atol=0)
        for name, values in stored.items()
    )
    if not all(is_usual):  # perhaps rounded
        alpha_bar = imported(f"{FORMATS}.buffers:stored_schedule")(file, schedule)
        if alpha_bar is not None:
            log.warning("%s: using the noise schedule in the file, which is not %s's", file.path.name, family.title)
            schedule = replace(schedule, alpha_bar=alpha_bar)
    if family.prediction == "eps" and not schedule.alpha_bar[-1] > 0:
        raise ValueError(f'{file.path}: eps prediction is undefined at zero terminal SNR: try `prediction="v"`')
    if "ztsnr" in file or metadata.get("zero_snr") == "yes":
        log.info("%s: the file asks for zero terminal SNR", file.path.name)
        zero_snr = True
    if not zero_snr or schedule.alpha_bar[-1] == 0:
        return schedule
    with errors_of(file.path):
        return schedule.zero_terminal_snr()


TOKENIZERS: dict[str, Any] = {  # by the class of a text encoder's spec
    "CLIPTextSpec": FixingCLIPTokenizer,
    "OpenCLIPTextSpec": OpenCLIPTokenizer,
    "BERTSpec": "ldm_lite.text.bert:BERTTokenizer",
}
IN_FILES = {"T5Spec", "Qwen3Spec", "Qwen25Spec"}  # those whose vocabularies do not come with the package
BERT_WORDS = 30522


def tokenizers_of(
    family: FamilyRow, parts: Mapping[str, Tensors], options: LoadOptions
) -> tuple[TextTokenizer | None, TextTokenizer | None]:
    """Return the tokenizer of a family's text encoder, and that of its T5; None where it has none."""
    tokenizer, t5, source, vocab = tokenizer_of(family.text), None, options.tokenizer, options.t5_vocab
    if IN_FILES & {type(spec).__name__ for spec in family.text_encoders} or source is not None or vocab is not None:
        qwen, t5 = imported(f"{FORMATS}.vocabularies:tokenizers_of")(family, parts, source, vocab)
        tokenizer = tokenizer if qwen is None else qwen
    for role, spec in family.texts.items():
        if type(spec).__name__ in ("CLIPTextSpec", "OpenCLIPTextSpec") and spec.vocab_size > num_known(spec.vocab_size):
            log.warning(
                "%s: has added tokens that no prompt can produce: give their vectors with `embedding`",
                parts[role].path,
            )
    return tokenizer, t5


def tokenizer_of(spec: Spec | None) -> TextTokenizer | None:
    """Return the tokenizer of a text encoder; None if it does not read text, or its vocabulary is in files."""
    name = type(spec).__name__
    if spec is None or name not in TOKENIZERS or (name == "BERTSpec" and spec.vocab_size != BERT_WORDS):  # of boxes
        return None
    tokenizer: TextTokenizer = imported(TOKENIZERS[name])(spec.length)
    return tokenizer
