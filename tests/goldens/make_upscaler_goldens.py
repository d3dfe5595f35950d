"""Make tests/data/upscaler.npz: what BasicSR's RRDBNet makes of an image, in miniature, for its three factors.

    git clone https://github.com/XPixelGroup/BasicSR
    PYTHONPATH=tests/fixtures:scripts python tests/goldens/make_upscaler_goldens.py --originals .

Weights depend on their keys (toy.fill).  Only rrdbnet_arch.py is run: what it imports beside torch is replaced by what
it uses of that (a decorator, an initialisation that does not matter, nn.Sequential, pixel_unshuffle).
"""

import json
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import torch
import toy
from making import DATA, folder_of_originals, made_with
from torch import nn

SIZES = {"num_feat": 16, "num_block": 2, "num_grow_ch": 8}


def original(folder: Path) -> Any:
    """The class RRDBNet of the original file."""
    names = {"basicsr": {}, "basicsr.archs": {}, "basicsr.utils": {}}
    registry = types.SimpleNamespace(register=lambda: lambda kind: kind)
    names["basicsr.utils.registry"] = {"ARCH_REGISTRY": registry}
    names["basicsr.archs.arch_util"] = {
        "default_init_weights": lambda *args: None,
        "make_layer": lambda block, number, **sizes: nn.Sequential(*(block(**sizes) for _ in range(number))),
        "pixel_unshuffle": lambda x, scale: nn.functional.pixel_unshuffle(x, scale),
    }
    for name, content in names.items():
        module = types.ModuleType(name)
        module.__dict__.update(content)
        sys.modules[name] = module
    module = types.ModuleType("basicsr.archs.rrdbnet_arch")
    module.__package__ = "basicsr.archs"
    path = folder / "BasicSR" / "basicsr" / "archs" / "rrdbnet_arch.py"
    exec(compile(path.read_text(), str(path), "exec"), module.__dict__)
    return module.RRDBNet


def main() -> None:
    """Write the file."""
    kind, arrays = original(folder_of_originals(__doc__)), {}
    for scale in (4, 2, 1):
        network = toy.fill(kind(3, 3, scale=scale, **SIZES)).eval()
        with torch.no_grad():
            arrays[f"x{scale}"] = network(torch.sigmoid(toy.normal(31, 1, 3, 12, 8))).numpy()
        shapes = {key: list(value.shape) for key, value in network.state_dict().items()}
        arrays[f"x{scale}.shapes"] = np.array(json.dumps(shapes))
    np.savez_compressed(DATA / "upscaler.npz", made_with=np.array(made_with([torch])), **arrays)


if __name__ == "__main__":
    main()
