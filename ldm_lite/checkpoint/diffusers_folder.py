"""Folders in which diffusers saves a pipeline, or one network of it, as one checkpoint in the original's layout."""

import json
import logging
import os
import re
from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from ldm_lite.checkpoint import hub
from ldm_lite.checkpoint.reader import Checkpoint, joined, open_checkpoint, prefix, split

log = logging.getLogger("ldm_lite")

ROLES = ("unet", "vae", "text_encoder", "text_encoder_2")
UNREAD = ("safety_checker", "image_encoder", "depth_estimator", "image_normalizer")  # beside those, with weights
STEMS = ("diffusion_pytorch_model", "model", "pytorch_model")
TOLD = ("hidden_act", "global_pool_conditions")  # what no weights say of a network, and its configuration does
ENDINGS = (".safetensors", ".fp16.safetensors", ".bin", ".fp16.bin")  # the first that is there is read


def open_source(source: str | os.PathLike[str] | None) -> Checkpoint:
    """Open a checkpoint by its name: a file, or a folder of diffusers, of a whole pipeline or of one network.

    Either may be on the hub: "owner/repository/file", and "owner/repository" for a folder.  What the folder of a
    pipeline says of its prediction and its scheduler is in the metadata.  Raises FileNotFoundError, and ValueError, one
    line, for a folder without weights, with a part of them, or of a pipeline that has no UNet.
    """
    repository = hub.repository(source)
    path = hub.resolve(source) if repository is None else _fetched(repository)
    if not path.is_dir():
        return open_checkpoint(path)
    roles = [role for role in ROLES if (path / role).is_dir()]
    if not roles:
        return _network(path)
    if "unet" not in roles:
        raise ValueError(f"{path}: is a pipeline without a UNet ({', '.join(roles)}): no latent diffusion model")
    return _pipeline(path, roles)


def _fetched(repository: str) -> Path:
    """What is read of a repository that diffusers has saved: downloaded, where it is not yet -> the folder of it."""
    names = hub.files(repository)
    folders = [f"{role}/" for role in ROLES if any(name.startswith(f"{role}/") for name in names)] or [""]
    about = ["model_index.json", "scheduler/scheduler_config.json", *(f"{folder}config.json" for folder in folders)]
    wanted = [name for name in about if name in names]
    for folder in folders:
        inside = [name.removeprefix(folder) for name in names if name.startswith(folder)]
        file, index = _weights(inside)
        if file is None and index is not None:
            wanted.append(folder + index)
            wanted += [folder + name for name in _parts(hub.download(repository, folder + index))]
        elif file is not None:
            wanted.append(folder + file)
        else:
            files = ", ".join(f"{repository}/{name}" for name in names if name.endswith((".safetensors", ".ckpt")))
            instead = f"take one of its files: {files}" if files else "it has no weights that are read here"
            raise ValueError(f"{repository}: is no folder of diffusers on the hub; {instead}")
    places = [hub.download(repository, name) for name in wanted]
    root = places[-1].parents[wanted[-1].count("/")]
    log.info("%s: at %s", repository, root)
    return root


def _pipeline(folder: Path, roles: Sequence[str]) -> Checkpoint:
    if unread := [name for name in UNREAD if (folder / name).is_dir()]:
        log.info("%s: not read of it: %s", hub.title(folder), ", ".join(unread))
    places: dict[str, tuple[Checkpoint, str]] = {}
    texts = iter(("text_encoder", "text_encoder_2"))  # SDXL's refiner has but the one that is the base's second
    for name in roles:
        role = next(texts) if name.startswith("text_encoder") else name
        found = split(_network(folder / name))
        component = found.get("text_encoder" if name == "text_encoder_2" else name)
        if component is None:
            raise ValueError(f"{folder / name}: holds no {name.replace('_', ' ')}, only {', '.join(found)}")
        before = prefix(role, component.keys, sgm="text_encoder_2" in roles)
        places |= {before + key: (component.checkpoint, stored) for key, stored in component.keys.items()}
    shapes = {key: checkpoint.shapes[stored] for key, (checkpoint, stored) in places.items()}
    scheduler = _json(folder / "scheduler" / "scheduler_config.json")
    about = {"prediction": scheduler["prediction_type"]} if "prediction_type" in scheduler else {}
    if scheduler:
        about["scheduler"] = f"{scheduler.get('_class_name')}, {scheduler.get('timestep_spacing')}"

    def read(key: str) -> Tensor:
        checkpoint, stored = places[key]
        return checkpoint.read(stored)

    return Checkpoint(folder, shapes, about, read)


def _network(folder: Path) -> Checkpoint:
    """The weights in the folder of one network, in one file or several."""
    found, index = _weights([path.name for path in folder.iterdir() if path.is_file()])
    if found is not None:
        checkpoint = open_checkpoint(folder / found)
    elif index is not None:
        files = [folder / name for name in _parts(folder / index)]
        if lacks := [file.name for file in files if not file.is_file()]:
            raise ValueError(f"{folder}: lacks {', '.join(lacks)}, which {index} names: download it whole")
        checkpoint = joined([open_checkpoint(file) for file in files])
    else:
        raise ValueError(
            f"{folder}: is a folder without weights, wanted a checkpoint, or a folder of diffusers, whose networks lie "
            f"in {STEMS[0]}.safetensors and the like"
        )
    config = _json(folder / "config.json")
    about = {name: str(config[name]) for name in TOLD if config.get(name) is not None}
    return replace(checkpoint, path=folder, metadata=about)


def _weights(names: Collection[str]) -> tuple[str | None, str | None]:
    """Of the files of one network's folder, that which holds its weights, and that which names those that do."""
    found = (f"{stem}{ending}" for ending in ENDINGS for stem in STEMS)
    indices = sorted(
        (name for name in names if re.fullmatch(r"[^/]*\.index[^/]*\.json", name)),
        key=lambda name: (".safetensors" not in name, name),
    )
    return next((name for name in found if name in names), None), next(iter(indices), None)


def _parts(index: Path) -> list[str]:
    """The files that an index names."""
    return sorted(set(_json(index).get("weight_map", {}).values()))


def _json(path: Path) -> dict[str, Any]:
    """What a file of JSON holds; nothing if it is not there.  Raises ValueError if it is damaged."""
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path}: is no JSON ({error}): download it again") from error
    return content if isinstance(content, dict) else {}
