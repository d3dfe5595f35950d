"""Latent diffusion from scratch in PyTorch 2.

import ldm_lite
from ldm_lite.txt2img import Options, txt2img

pipe = ldm_lite.load()
for result in txt2img(pipe, Options(prompt="a red apple on a blue background")):
    result.image.save("apple.png")
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ldm_lite.checkpoint.model import Pipeline, load

__version__ = "0.1.0"
__all__ = ["Pipeline", "__version__", "load"]


def __getattr__(name: str) -> object:
    """load and Pipeline, imported when first asked for: `--help` and `import ldm_lite` do without torch."""
    if name in ("Pipeline", "load"):
        from ldm_lite.checkpoint import model as pipeline

        return getattr(pipeline, name)
    raise AttributeError(f"module 'ldm_lite' has no attribute {name!r}")
