"""Read folders saved by diffusers, of a whole pipeline or one network, as one checkpoint in the original layout."""

import logging
import os
import re
from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ldm_lite.checkpoint import hub
from ldm_lite.checkpoint.reader import (
    NETWORK_KINDS,
    errors_of,
    joined,
    metadata_of,
    open_checkpoint,
    parts_of,
    places_in,
    prefix,
)
from ldm_lite.cli.files import read_object
from ldm_lite.core.files import Tensors
from ldm_lite.formats.diffusers_config import check_pipeline, check_tokenizer, read_network
from ldm_lite.formats.diffusers_schedulers import read_scheduler
from ldm_lite.formats.vocabularies import T5_VOCABS
from ldm_lite.zoo.families import FAMILY_ROWS
from ldm_lite.zoo.family import Folder

log = logging.getLogger("ldm_lite")

MOST_SHARDS = 1000
CHECKPOINTS = (".safetensors", ".ckpt", ".gguf", ".pth", ".pt")
MOST_NAMED = 10  # files of a folder, in a message
ROLES = ("unet", "transformer", "vae", "text_encoder", "text_encoder_2", "text_encoder_3")
# Of a pipeline beside its networks.  Anything else in model_index.json is ignored, and a message says so.
BESIDE = (
    *("scheduler", "low_res_scheduler", "image_noising_scheduler", "feature_extractor"),
    *("tokenizer", "tokenizer_2", "tokenizer_3"),
)
TOKENIZER = ("special_tokens_map.json", "tokenizer_config.json")
# Keys of text encoders that read plain text, those other than CLIP.
PLAIN_TEXTS = {
    place + kind.probe for kind in NETWORK_KINDS if kind.spec and "CLIP" not in kind.spec for place in kind.prefixes
}
IGNORED = ("safety_checker", "image_encoder", "depth_estimator", "image_normalizer")
# Of files with weights, and of indices of their shards.
_WEIGHTS = re.compile(r"(diffusion_pytorch_model|model|pytorch_model)(\.fp16)?\.(safetensors|bin)")
INDEX = re.compile(r"[\w.-]*\.index[\w.-]*\.json")
PLAIN = re.compile(r"[\w-]+(\.safetensors|\.bin)?(\.index\.json)?")


def open_folder(folder: Path) -> Tensors:
    """Open a folder of a whole pipeline or of one network, as one file.

    The metadata of a pipeline hold the prediction type and the scheduler.  Raises ValueError, one line, for a folder
    without weights, with only a part of them, or of a pipeline without a UNet.
    """
    roles = [role for role in ROLES if (folder / role).is_dir()]
    if not roles:
        return _open_network(folder)
    if not {"unet", "transformer"} & set(roles):
        raise ValueError(f"{folder}: is a pipeline without a UNet ({', '.join(roles)}), not a latent diffusion model")
    return _open_pipeline(folder, roles)


def download(repository: str) -> Path:
    """Download the needed files of a diffusers repository to the hub's cache; return its folder there."""
    names = hub.files(repository)
    folders = [f"{role}/" for role in ROLES if any(name.startswith(f"{role}/") for name in names)] or [""]
    about = ["model_index.json", "scheduler/scheduler_config.json", *(f"{folder}config.json" for folder in folders)]
    about += [f"{folder}/{file}" for folder in ("tokenizer", "tokenizer_2") for file in TOKENIZER]
    about += [f"{folder}/{file}" for folder in ("tokenizer_2", "tokenizer_3") for file in T5_VOCABS]
    if "unet/" not in folders:  # of Qwen, or of a T5 that is alone
        about += [f"tokenizer/{file}" for file in (*T5_VOCABS, "vocab.json", "merges.txt")]
    wanted = [name for name in about if name in names]
    for folder in folders:
        inside = [name.removeprefix(folder) for name in names if name.startswith(folder)]
        if (file := _weights(inside)) is not None:
            wanted.append(folder + file)
            if file.endswith(".json"):
                shards = _shards(hub.download(repository, folder + file))
                wanted += [folder + name for name in sorted(set(shards.values()))]
        else:
            files = ", ".join(f"{repository}/{name}" for name in names if name.endswith((".safetensors", ".ckpt")))
            instead = f"use one of its files: {files}" if files else "it has no weights that ldm_lite reads"
            raise ValueError(f"{repository}: is not a diffusers folder on the hub; {instead}")
    paths = [hub.download(repository, name) for name in wanted]
    root = paths[-1].parents[wanted[-1].count("/")]
    log.info("%s: at %s", repository, root)
    return root


def _open_pipeline(folder: Path, roles: Sequence[str]) -> Tensors:
    title, index = hub.title(folder), _read_json(folder / "model_index.json")
    listed = [name for name, kind in index.items() if isinstance(kind, list) and kind[:1] not in ([None], [])]
    present = {*listed, *(path.name for path in folder.iterdir() if path.is_dir() and path.name in IGNORED)}
    if ignored := sorted(present - {*roles, *BESIDE}):
        log.info("%s: ignored %s", title, ", ".join(ignored))
    module = check_pipeline(title, index, roles)
    scheduler = _read_json(folder / "scheduler" / "scheduler_config.json")
    metadata = read_scheduler(f"{title}/scheduler", scheduler, roles)
    metadata["pipeline"] = f"{title}, {index.get('_name_or_path')}"  # its names
    of_folder = None if module is None else FAMILY_ROWS[module.rows[0]].of_folder
    if of_folder is not None:
        denoiser = _read_json(folder / ("transformer" if "transformer" in roles else "unet") / "config.json")
        with errors_of(title):
            row = of_folder(Folder(str(index["_class_name"]), index, denoiser, scheduler))
        metadata |= {} if row is None else {"family": row}
    places: dict[str, tuple[Tensors, str]] = {}
    texts = iter(("text_encoder", "text_encoder_2", "text_encoder_3"))  # SDXL's refiner has only the base's second one
    linear = False  # Stable Diffusion 2's UNet, or XL's, whose projections are linears
    for name in roles:
        role, network = next(texts) if name.startswith("text_encoder") else name, _open_network(folder / name)
        role = "unet" if name == "transformer" else role
        if name == "unet":
            linear = any(key.endswith(".proj_in.weight") and len(s) == 2 for key, s in network.shapes.items())
        if name.startswith("text_encoder") and not PLAIN_TEXTS & network.shapes.keys():
            open_clip = name == "text_encoder_2" or (linear and "text_encoder_2" not in roles)
            network = _text_encoder(folder, name, network, open_clip)
        parts = parts_of(network)
        part = parts.get("text_encoder" if name.startswith("text_encoder") else role)
        if part is None:
            raise ValueError(f"{folder / name}: holds no {name.replace('_', ' ')}, only {', '.join(parts)}")
        before = prefix(role, part.shapes, sgm="text_encoder_2" in roles and "unet" in roles)
        places |= {before + key: (part, key) for key in part}
        second = {key.replace("text_", "text_2_"): value for key, value in network.metadata.items()}
        metadata |= metadata_of(role, second if role == "text_encoder_2" else network.metadata)
    return joined(folder, places, metadata)


def _text_encoder(folder: Path, name: str, network: Tensors, open_clip: bool) -> Tensors:
    """Return a pipeline's text encoder, marked as OpenCLIP or not.  Raises ValueError for another tokenizer."""
    act, beside = network.metadata.get("hidden_act"), folder / name.replace("text_encoder", "tokenizer")
    if open_clip and act not in (None, "gelu"):
        raise ValueError(f"{network.path}: its hidden_act {act!r} is not supported in OpenCLIP: expected 'gelu'")
    files = [_read_json(beside / file) for file in TOKENIZER]
    positions = (shape[0] for key, shape in network.shapes.items() if key.endswith("position_embedding.weight"))
    check_tokenizer(f"{hub.title(folder)}/{beside.name}", files, open_clip, next(positions, None))
    metadata = {**network.metadata, "open_clip": str(open_clip)}
    if open_clip and name == "text_encoder":  # Stable Diffusion 2's: diffusers stores only the layers that it uses
        metadata["text_skip"] = "0"
    return replace(network, metadata=metadata)


def _open_network(folder: Path) -> Tensors:
    """Open the weights in the folder of one network, in one file or in shards."""
    names = sorted(path.name for path in folder.iterdir() if not path.is_dir())
    file = _weights(names)
    if file is None:
        if checkpoints := [name for name in names if name.lower().endswith(CHECKPOINTS)]:
            some = ", ".join(checkpoints[:MOST_NAMED]) + (", ..." if len(checkpoints) > MOST_NAMED else "")
            raise ValueError(f"{folder}: is not a diffusers folder; use one of its files: {some}")
        raise ValueError(
            f"{folder}: is a folder without weights, expected a checkpoint, or a diffusers folder with weights in "
            "diffusion_pytorch_model.safetensors or the like"
        )
    checkpoint = _open_shards(folder, file) if file.endswith(".json") else open_checkpoint(folder / file)
    metadata = read_network(str(folder), _read_json(folder / "config.json"), checkpoint.shapes)
    return replace(checkpoint, path=folder, metadata=metadata)


def _weights(names: Collection[str]) -> str | None:
    """Return the weights file, or the index of shards, among the file names of one network's folder.

    Safetensors come first, then full precision, then fp16, then other variants, then one file.
    """

    def rank(name: str) -> tuple[bool, int, bool, str]:
        variant = 0 if PLAIN.fullmatch(name) else 1 if "fp16" in name else 2
        return ".safetensors" not in name, variant, name.endswith(".json"), name

    return min((name for name in names if _WEIGHTS.fullmatch(name) or INDEX.fullmatch(name)), key=rank, default=None)


def _open_shards(folder: Path, index: str) -> Tensors:
    """Open the files that an index lists.  Raises ValueError unless its tensors are in the files that it names."""
    shards = _shards(folder / index)
    files = {name: folder / name for name in sorted(set(shards.values()))}
    if missing := [name for name, file in files.items() if not file.is_file()]:
        raise ValueError(f"{folder}: lacks {', '.join(missing)}, which {index} names: download the whole folder")
    parts = {name: open_checkpoint(file) for name, file in files.items()}
    if absent := [key for key, name in shards.items() if key not in parts[name].shapes]:
        raise ValueError(f"{folder}: {index} names {absent[0]} in {shards[absent[0]]}, which lacks it")
    return joined(folder, places_in(parts.values()), next(iter(parts.values())).metadata)


def _shards(index: Path) -> dict[str, str]:
    """Return the file that an index lists for each key.  Raises ValueError unless all are names of files beside it."""
    shards = _read_json(index).get("weight_map")
    if not isinstance(shards, dict) or not shards:
        raise ValueError(f"{index}: has no weight_map, which names the files of all tensors: download it again")
    for name in shards.values():
        if (
            not isinstance(name, str)
            or not re.fullmatch(r"[^/\\:]+", name)
            or name in (".", "..")
            or not name.isprintable()
        ):
            raise ValueError(f"{index}: names {name!r}, expected names of files in the same folder")
    if len(set(shards.values())) > MOST_SHARDS:
        raise ValueError(f"{index}: names more than {MOST_SHARDS} files")
    return shards


def _read_json(path: Path) -> dict[str, Any]:
    """Read an object from a JSON file; {} if there is no file.  Raises ValueError if it is damaged."""
    return read_object(path) if os.path.lexists(path) else {}
