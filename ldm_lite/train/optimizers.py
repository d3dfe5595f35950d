"""Optimisers: AdamW, and others from libraries of the extra `optimizers`."""

import importlib
from typing import Any

import torch
from torch import Tensor

PACKAGES = {"adamw8bit": ("bitsandbytes", "optim.AdamW8bit"), "prodigy": ("prodigyopt", "Prodigy")}
BETAS = (0.9, 0.99)


class _AdamW(torch.optim.AdamW):
    """AdamW for weights with channels last: PyTorch's fused kernel for a CPU copies them all in each step.

    It gets contiguous views of them.  If averages or gradients lie otherwise, it would pair their values wrongly.
    """

    def load_state_dict(self, state_dict: Any) -> None:
        """As torch's; averages take the layout of their weights, whose values were perhaps divided when stored."""
        super().load_state_dict(state_dict)
        for weight, values in self.state.items():
            for name, value in values.items():
                if value.ndim and value.stride() != weight.stride():
                    values[name] = torch.empty_like(weight).copy_(value)

    def _init_group(self, group: dict[str, Any], *lists: list[Tensor]) -> Any:
        # This fills the lists: weights, gradients, averages, step numbers.
        result = super()._init_group(group, *lists)  # type: ignore[no-untyped-call]
        last, filled = torch.channels_last, [tensors for tensors in lists if tensors]
        for i, weight in enumerate(filled[0] if filled else ()):
            if weight.ndim == 4 and weight.is_contiguous(memory_format=last):
                for tensors in filled:
                    if tensors[i].ndim:
                        tensors[i] = tensors[i].detach().contiguous(memory_format=last).permute(0, 2, 3, 1)
        return result


def make_optimizer(name: str, groups: list[dict[str, Any]], lr: float, weight_decay: float) -> torch.optim.Optimizer:
    """Return the optimiser of a name for groups of parameters.

    "adamw8bit" keeps its averages in 8 bits (Dettmers et al. 2022), "prodigy" finds the learning rate, of which `lr` is
    then a factor, usually 1 (Mishchenko and Defazio 2024).  Raises ValueError, one line, if its package is missing.
    """
    if name == "adamw":
        fused = groups[0]["params"][0].device.type in ("cuda", "cpu")
        return _AdamW(groups, lr=lr, betas=BETAS, weight_decay=weight_decay, fused=fused)
    package, path = PACKAGES[name]
    try:
        optimizer: Any = importlib.import_module(package)
    except ImportError as error:
        raise ValueError(f'`optimizer={name}` needs {package}: pip install "ldm_lite[optimizers]"') from error
    for part in path.split("."):
        optimizer = getattr(optimizer, part)
    return optimizer(groups, lr=lr, betas=BETAS, weight_decay=weight_decay)


def restore(optimizer: torch.optim.Optimizer, stored: dict[str, Any]) -> None:
    """Load an optimiser's own state, for those whose groups have state too.  Raises any exception for another's."""
    settings_of_run = [{key: group[key] for key in ("weight_decay", "betas")} for group in optimizer.param_groups]
    for values in stored["state"].values():
        for name, value in values.items():
            if isinstance(value, Tensor) and value.is_floating_point() and not bool(torch.isfinite(value).all()):
                raise ValueError(f"{name} of the optimiser is not finite")
    optimizer.load_state_dict(stored)
    for group, settings in zip(optimizer.param_groups, settings_of_run, strict=True):
        group.update(settings)
