"""Make tests/data/zoo.npz: what the original code of the LDM zoo and of TAESD computes.

    pip install einops omegaconf
    git clone https://github.com/CompVis/latent-diffusion && git clone https://github.com/CompVis/taming-transformers
    git clone https://github.com/madebyollin/taesd
    python scripts/make_zoo_goldens.py --originals .

The folder holds the repositories under these names, a checkout each; nothing of them is copied.  Networks are the
originals' own classes with toy.fill's weights, in float32.  Only what they need of Lightning is replaced, by torch.nn.
"""

import argparse
import importlib
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import numpy as np
import torch
import toy
from make_goldens import DATA, Arrays, repository, write
from torch import nn

REPOSITORIES = ("latent-diffusion", "taming-transformers", "taesd")

# ddconfig and the other arguments of the originals' VQModelInterface, in the sizes of toy.VQS.
VQ = {
    "double_z": False,
    "z_channels": 6,
    "resolution": 64,
    "in_channels": 3,
    "out_ch": 3,
    "ch": 32,
    "ch_mult": [1, 1, 2],
    "num_res_blocks": 1,
    "attn_resolutions": [16],
}
VQS: dict[str, dict[str, Any]] = {
    "attn": {"ddconfig": VQ, "embed_dim": 4, "n_embed": 40},
    "noattn": {"ddconfig": VQ | {"attn_resolutions": [], "attn_type": "none"}, "embed_dim": 4, "n_embed": 40},
}
NO_LOSS = {"target": "torch.nn.Identity"}


def lightning() -> dict[str, ModuleType]:
    """Stand-ins for the modules that the originals' classes import and do not need."""
    module: Any = ModuleType("pytorch_lightning")
    module.LightningModule = nn.Module
    return {"pytorch_lightning": module}


def autoencoders(originals: Path) -> Arrays:
    """VQ: latents, what is decoded from them with and without quantising, and the model alone; TAESD: both ways."""
    arrays: Arrays = {}
    x, z = toy.normal(7, 1, 3, 16, 24), toy.normal(8, 1, 4, 4, 6)
    sys.path.insert(0, str(originals / "taming-transformers"))
    with mock.patch.dict(sys.modules, lightning()), repository(originals / "latent-diffusion"):
        module = importlib.import_module("ldm.models.autoencoder")
        for name, arguments in VQS.items():
            interface = toy.fill(module.VQModelInterface(lossconfig=NO_LOSS, **arguments))
            alone = toy.fill(module.VQModel(lossconfig=NO_LOSS, **arguments))
            arrays[f"vq.{name}.encode"] = interface.encode(x)
            arrays[f"vq.{name}.decode"] = interface.decode(z)
            arrays[f"vq.{name}.decode_as_is"] = interface.decode(z, force_not_quantize=True)
            arrays[f"vq.{name}.alone"] = alone(x)[0]
    with repository(originals / "taesd"):
        module = importlib.import_module("taesd")
        encoder, decoder = toy.fill(module.Encoder(), "encoder."), toy.fill(module.Decoder(), "decoder.")
        # The original's images are in [0,1].
        arrays["taesd.encode"] = encoder((x + 1) / 2)
        arrays["taesd.decode"] = decoder(z) * 2 - 1
    return arrays


def embedders(originals: Path) -> Arrays:
    """A class, a map of labels and boxes, as the original conditioners give them on."""
    arrays: Arrays = {}
    stubs = ("clip", "kornia", "more_itertools", "more_itertools.recipes", "taming.data.image_transforms")
    with repository(originals / "latent-diffusion", stubs=stubs):
        module = importlib.import_module("ldm.modules.encoders.modules")
        embedder = toy.fill(module.ClassEmbedder(toy.CLASSES.width, toy.CLASSES.num_classes))
        arrays["classes"] = embedder({"class": torch.tensor([0, 10])})
        spec = toy.LABEL_MAP
        rescaler = toy.fill(module.SpatialRescaler(spec.halvings, in_channels=spec.num_labels, out_channels=3))
        one_hot = nn.functional.one_hot(toy.label_map(), spec.num_labels).permute(0, 3, 1, 2).float()
        arrays["label_map"] = rescaler(one_hot)
    with repository(originals / "taming-transformers", stubs=stubs):
        module = importlib.import_module("taming.data.conditional_builder.objects_bbox")
        annotation = importlib.import_module("taming.data.helper_types").Annotation
        builder = module.ObjectsBoundingBoxConditionalBuilder(
            no_object_classes=8191,
            no_max_objects=30,
            no_tokens=8192,
            encode_crop=True,
            use_group_parameter=False,
            use_additional_parameters=False,
        )
        with mock.patch("random.shuffle"):
            for number, boxes in enumerate(toy.layouts()):
                objects = [
                    annotation(*[None] * 6)._replace(category_no=label, bbox=(x, y, right - x, bottom - y))
                    for label, x, y, right, bottom in boxes
                ]
                arrays[f"layout.{number}"] = builder.build(objects).float()
    return arrays


def made_with(originals: Path) -> str:
    """Versions and commits, as JSON."""
    versions = {module.__name__: module.__version__ for module in (torch, np)}
    for name in REPOSITORIES:
        git = ["git", "-C", str(originals / name), "rev-parse", "HEAD"]
        versions[name] = subprocess.run(git, capture_output=True, text=True, check=True).stdout.strip()
    return json.dumps(versions)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--originals", type=Path, required=True, help="the folder of the cloned repositories")
    originals = parser.parse_args().originals.resolve()
    with torch.no_grad():
        write(DATA / "zoo.npz", autoencoders(originals) | embedders(originals), torch.float32, made_with(originals))


if __name__ == "__main__":
    main()
