"""Compile ahead of time: `python -m ldm_lite.export --out unet.pt2` writes the UNet as a package for given sizes.

`ldm_lite.load(..., compiled="unet.pt2")` and `--compiled unet.pt2` then run it without compiling anything.  The package
has no weights: it runs on those of the checkpoint that is loaded.
"""

from ldm_lite.commands import main_of

main = main_of("export", __doc__, __name__)
