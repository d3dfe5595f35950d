"""Make tests/data/hypernetwork.npz: outputs of diffusers' UNet whose attention reads through hypernetworks.

    pip install diffusers
    git clone https://github.com/AUTOMATIC1111/stable-diffusion-webui
    PYTHONPATH=tests/fixtures:. python tests/goldens/make_hypernetwork_goldens.py stable-diffusion-webui

Files are read and networks are computed by the web UI's Hypernetwork, which needs none of its module's imports.
"""

import importlib.util
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import diffusers
import hypernetworks
import torch
import toy
from make_goldens import DATA, Arrays, write
from random_checkpoint import SMALL, state_dict
from torch import Tensor, nn

from ldm_lite.bench import peers

STRENGTH = 0.7
NEEDED = ("ldm.util", "einops", "tqdm", "modules", "modules.textual_inversion", "modules.textual_inversion.dataset")
NEEDED += ("modules.textual_inversion.learn_schedule", "modules.textual_inversion.textual_inversion")


def original(folder: str) -> Any:
    """The web UI's module."""
    path = Path(folder) / "modules" / "hypernetworks" / "hypernetwork.py"
    spec = importlib.util.spec_from_file_location("hypernetwork", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    for name in NEEDED:
        sys.modules.setdefault(name, MagicMock())
    sys.modules["modules"].devices = SimpleNamespace(device="cpu")  # type: ignore[attr-defined]
    spec.loader.exec_module(module)
    return module


def changed(unet: nn.Module, layers: Any) -> nn.Module:
    """A UNet whose keys and values read their context through the networks of its width."""
    for module in unet.modules():
        if isinstance(module, diffusers.models.attention_processor.Attention):
            pair = layers.get(module.to_k.in_features, ())
            for network, projection in zip(pair, (module.to_k, module.to_v), strict=False):
                network.multiplier = STRENGTH
                projection.register_forward_pre_hook(lambda layer, args, network=network: (network(args[0]),))
    return unet


@torch.no_grad()
def main() -> None:
    """Write the file."""
    webui = original(sys.argv[1])
    x, context, _ = toy.unet_inputs(SMALL.unet)
    arrays: Arrays = {}
    for name, kind in hypernetworks.KINDS.items():
        with tempfile.NamedTemporaryFile(suffix=".pt") as file:
            torch.save(hypernetworks.content(kind), file.name)
            hypernetwork = webui.Hypernetwork()
            hypernetwork.load(file.name)
        for pair in hypernetwork.layers.values():
            for network in pair:
                network.eval()
        unet: Any = changed(peers.unet(SMALL, dict(state_dict(SMALL))), hypernetwork.layers)
        out: Tensor = unet(x, toy.T, encoder_hidden_states=context).sample
        arrays[name] = out
    about = f"stable-diffusion-webui, diffusers {diffusers.__version__}, torch {torch.__version__}"
    write(DATA / "hypernetwork.npz", arrays, torch.float32, about)


if __name__ == "__main__":
    main()
