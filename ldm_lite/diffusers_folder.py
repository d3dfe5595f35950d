"""Folders in which diffusers saves a pipeline, or one network of it, as one checkpoint in the original's layout."""

import json
import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from ldm_lite.checkpoint import Checkpoint, joined, open_checkpoint, prefix, split

log = logging.getLogger("ldm_lite")

ROLES = ("unet", "vae", "text_encoder", "text_encoder_2")
UNREAD = ("safety_checker", "image_encoder", "depth_estimator", "image_normalizer")  # beside those, with weights
STEMS = ("diffusion_pytorch_model", "model", "pytorch_model")
ENDINGS = (".safetensors", ".fp16.safetensors", ".bin", ".fp16.bin")  # the first that is there is read


def open_source(path: Path) -> Checkpoint:
    """Open a checkpoint: a file, or a folder of diffusers, of a whole pipeline or of one network.

    What the folder of a pipeline says of its prediction is in the metadata.  Raises ValueError, one line, for a folder
    without weights, with a part of them, or of a pipeline that has no UNet.
    """
    if not path.is_dir():
        return open_checkpoint(path)
    roles = [role for role in ROLES if (path / role).is_dir()]
    if not roles:
        return _network(path)
    if "unet" not in roles:
        raise ValueError(f"{path}: is a pipeline without a UNet ({', '.join(roles)}): no latent diffusion model")
    return _pipeline(path, roles)


def _pipeline(folder: Path, roles: Sequence[str]) -> Checkpoint:
    if unread := [name for name in UNREAD if (folder / name).is_dir()]:
        log.info("%s: not read of it: %s", folder.name, ", ".join(unread))
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

    def read(key: str) -> Tensor:
        checkpoint, stored = places[key]
        return checkpoint.read(stored)

    return Checkpoint(folder, shapes, about, read)


def _network(folder: Path) -> Checkpoint:
    """The weights in the folder of one network, in one file or several."""
    names = [f"{stem}{ending}" for ending in ENDINGS for stem in STEMS]
    found = next((folder / name for name in names if (folder / name).is_file()), None)
    index = next(iter(sorted(folder.glob("*.index*.json"))), None)
    if found is not None:
        checkpoint = open_checkpoint(found)
    elif index is not None:
        files = [folder / name for name in sorted(set(_json(index).get("weight_map", {}).values()))]
        if lacks := [file.name for file in files if not file.is_file()]:
            raise ValueError(f"{folder}: lacks {', '.join(lacks)}, which {index.name} names: download it whole")
        checkpoint = joined([open_checkpoint(file) for file in files])
    else:
        raise ValueError(
            f"{folder}: is a folder without weights, wanted a checkpoint, or a folder of diffusers, whose networks lie "
            f"in {STEMS[0]}.safetensors and the like"
        )
    act = _json(folder / "config.json").get("hidden_act")
    return replace(checkpoint, path=folder, metadata={"hidden_act": act} if act is not None else {})


def _json(path: Path) -> dict[str, Any]:
    """What a file of JSON holds; nothing if it is not there.  Raises ValueError if it is damaged."""
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path}: is no JSON ({error}): download it again") from error
    return content if isinstance(content, dict) else {}
