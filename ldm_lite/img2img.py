"""Image to image: `python -m ldm_lite.img2img "a red apple" --init-img sketch.png`.

Takes the flags of the original scripts/img2img.py and of InstructPix2Pix's edit_cli.py.  With an InstructPix2Pix
checkpoint the prompt says what to change.
"""

from ldm_lite.commands import main_of

main = main_of("img2img", __doc__, __name__)
