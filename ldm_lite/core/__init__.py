"""Stable Diffusion from scratch, in one small package.  load().txt2img("a red apple")[0].save("apple.png")"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ldm_lite.core.features import FEATURES, Feature, register_feature
    from ldm_lite.core.pipeline import Pipeline, load
    from ldm_lite.core.samplers import SAMPLERS, sampler

__all__ = ["FEATURES", "SAMPLERS", "Feature", "Pipeline", "load", "register_feature", "sampler"]
_HOMES = {"Pipeline": "pipeline", "load": "pipeline", "SAMPLERS": "samplers", "sampler": "samplers"}


def __getattr__(name: str) -> Any:
    """Import a public name on first use, so that rows of options can be read without torch."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES.get(name, 'features')}"), name)
