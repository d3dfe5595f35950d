"""Inpainting: `python -m ldm_lite.inpaint "a red apple" --init-img photo.png --mask mask.png` repaints what is white.

Takes inpainting checkpoints, which see the masked image, and ordinary ones.  `--extend left=128,top=64` paints beyond
the edges; `--indir` works as in the original scripts/inpaint.py.
"""

from ldm_lite.commands import main_of

main = main_of("inpaint", __doc__, __name__)
