"""Goldens of trained kinds of LoRA: their files read by LyCORIS, and a layer's output and gradients computed by it.

    python tests/goldens/make_kinds_goldens.py

Needs lycoris-lora (4.1.3 was used), torch and numpy.  Writes tests/data/kinds.npz; tests/train/test_kinds.py rebuilds
weights and inputs from the same seeds.
"""

from pathlib import Path

import numpy as np
import torch
from lycoris.modules.locon import LoConModule
from lycoris.modules.loha import LohaModule
from lycoris.modules.lokr import LokrModule

MODULES = {"lora": LoConModule, "dora": LoConModule, "loha": LohaModule, "lokr": LokrModule, "lokr_full": LokrModule}
RANK, ALPHA, OUT, IN = 2, 3.0, 24, 36


def normal(seed: int, *shape: int) -> torch.Tensor:
    """Unit noise, float64."""
    return torch.from_numpy(np.random.Generator(np.random.PCG64(seed)).standard_normal(shape))


def main() -> None:
    """Write the goldens."""
    by_name = {}
    for kind, module in MODULES.items():
        for shape in ("linear", "conv"):
            layer = torch.nn.Linear(IN, OUT) if shape == "linear" else torch.nn.Conv2d(IN, OUT, 1)
            layer.double()
            layer.weight.data = normal(1, *layer.weight.shape)
            layer.bias.data = normal(2, OUT)
            rank = 20 if kind == "lokr_full" else RANK
            net = module("it", layer, 1.0, rank, ALPHA, weight_decompose=kind == "dora").double()
            for i, key in enumerate(sorted(key for key, _ in net.named_parameters())):
                parameter = net.get_parameter(key)
                parameter.data = normal(10 + i, *parameter.shape)
                by_name[f"{kind}.{shape}.shape.{key}"] = np.array(parameter.shape)
            net.apply_to()
            x = normal(3, 4, IN) if shape == "linear" else normal(3, 2, IN, 3, 2)
            out = layer(x)
            (out * normal(4, *out.shape)).sum().backward()
            by_name[f"{kind}.{shape}.out"] = out.detach().numpy()
            for key, parameter in net.named_parameters():
                by_name[f"{kind}.{shape}.grad.{key}"] = parameter.grad.numpy()
    np.savez_compressed(Path(__file__).parents[1] / "data" / "kinds.npz", **by_name)


if __name__ == "__main__":
    main()
