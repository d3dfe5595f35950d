"""Make tests/data/lycoris.npz: random adapters of LyCORIS's kinds, and what their layers compute.

python tests/goldens/make_lycoris_goldens.py        # pip install lycoris-lora peft
"""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from lycoris.modules.boft import ButterflyOFTModule
from lycoris.modules.diag_oft import DiagOFTModule
from lycoris.modules.glora import GLoRAModule
from lycoris.modules.ia3 import IA3Module
from lycoris.modules.locon import LoConModule
from lycoris.modules.loha import LohaModule
from lycoris.modules.lokr import LokrModule
from torch import nn

KINDS: dict[str, tuple[Any, dict[str, Any]]] = {
    "loha": (LohaModule, {"lora_dim": 3, "alpha": 2}),
    "loha_tucker": (LohaModule, {"lora_dim": 3, "alpha": 2, "use_tucker": True}),
    "lokr": (LokrModule, {"lora_dim": 2, "alpha": 1, "factor": 2}),
    "lokr_tucker": (LokrModule, {"lora_dim": 2, "alpha": 1, "factor": 2, "use_tucker": True}),
    "lokr_both": (LokrModule, {"lora_dim": 1, "alpha": 0.5, "decompose_both": True, "factor": 4}),
    "lokr_full": (LokrModule, {"lora_dim": 100, "alpha": 1, "factor": 2}),
    "glora": (GLoRAModule, {"lora_dim": 3, "alpha": 2}),
    "oft": (DiagOFTModule, {"lora_dim": 4}),
    "oft_limited": (DiagOFTModule, {"lora_dim": 4, "constraint": 0.01, "rescaled": True}),
    "boft": (ButterflyOFTModule, {"lora_dim": 4}),
    "boft_rescaled": (ButterflyOFTModule, {"lora_dim": 4, "rescaled": True}),
    "ia3": (IA3Module, {}),
    "ia3_input": (IA3Module, {"train_on_input": True}),
    "dora": (LoConModule, {"lora_dim": 3, "alpha": 2, "weight_decompose": True, "wd_on_out": True}),
    "dora_columns": (LoConModule, {"lora_dim": 3, "alpha": 2, "weight_decompose": True, "wd_on_out": False}),
    "doha": (LohaModule, {"lora_dim": 3, "alpha": 2, "weight_decompose": True, "wd_on_out": True}),
    "dokr": (LokrModule, {"lora_dim": 2, "alpha": 1, "factor": 2, "weight_decompose": True, "wd_on_out": True}),
}


def main() -> None:
    """Write the file."""
    torch.manual_seed(0)
    by_name: dict[str, np.ndarray] = {}
    layers = {"linear": nn.Linear(12, 16, bias=False), "conv": nn.Conv2d(12, 16, 3, padding=1, bias=False)}
    inputs = {"linear": torch.randn(5, 12), "conv": torch.randn(1, 12, 4, 3)}
    for where, layer in layers.items():
        by_name[f"{where}/weight"] = layer.weight.detach().numpy()
        by_name[f"{where}/x"] = inputs[where].numpy()
        for kind, (module, options) in KINDS.items():
            if where == "linear" and "tucker" in kind:
                continue
            adapter = module("name", layer, multiplier=1.0, **options)
            with torch.no_grad():
                for name, parameter in adapter.named_parameters():
                    if not name.startswith("org") and name != "scalar":
                        parameter.copy_(parameter + 0.3 * torch.randn_like(parameter))
                adapter.eval()
                by_name[f"{where}/{kind}/y"] = adapter(inputs[where]).numpy()
                for name, value in adapter.state_dict().items():
                    if name != "scalar" and not name.startswith("org"):
                        by_name[f"{where}/{kind}/{name}"] = value.numpy()
    np.savez_compressed(Path(__file__).parents[1] / "data" / "lycoris.npz", **by_name)
    print("\n".join(f"{name} {value.shape}" for name, value in by_name.items()))


if __name__ == "__main__":
    main()
