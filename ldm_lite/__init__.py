"""Latent diffusion from scratch in PyTorch 2.

import ldm_lite

pipe = ldm_lite.load()                                   # the bundled model; or a checkpoint's path
pipe.txt2img("a red apple on a blue background")[0].save("apple.png")
"""

import importlib
from typing import TYPE_CHECKING

from ldm_lite.cli import threads
from ldm_lite.cli.version import __version__

if TYPE_CHECKING:
    from ldm_lite.adapters.lora import open_lora
    from ldm_lite.control.control import Control
    from ldm_lite.pipeline import Pipeline, load
    from ldm_lite.tasks.enlarge import Upscaler

__all__ = ["Control", "Pipeline", "Upscaler", "__version__", "load", "open_lora"]

_HOMES = {
    "Control": "ldm_lite.control.control",
    "Pipeline": "ldm_lite.pipeline",
    "Upscaler": "ldm_lite.tasks.enlarge",
    "load": "ldm_lite.pipeline",
    "open_lora": "ldm_lite.adapters.lora",
}


def __dir__() -> list[str]:
    return [*__all__, "diffusion"]


def __getattr__(name: str) -> object:
    """Import a public name on first use, so that `--help` and `import ldm_lite` do not import torch."""
    if name in _HOMES:
        threads.prepare()
        return getattr(importlib.import_module(_HOMES[name]), name)
    if name == "diffusion":  # ldm_lite.diffusion.samplers.register
        return importlib.import_module("ldm_lite.diffusion")
    if name[0].isupper() or name.startswith(("from_", "load_")):  # not a module: Python asks here for those too
        from ldm_lite.cli.synonyms import OF_PACKAGE, of_attribute  # tables that are only read here

        if instead := of_attribute(
            name, OF_PACKAGE
        ):  # of an AttributeError, `from ldm_lite import NAME` would drop the message
            raise ImportError(f"ldm_lite has no {name}: {instead}")
    raise AttributeError(f"module 'ldm_lite' has no attribute {name!r}")
