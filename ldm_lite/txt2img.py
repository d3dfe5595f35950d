"""Text to image: `python -m ldm_lite.txt2img "a red apple"`.

Takes the flags of the original scripts/txt2img.py, so that a command line written for it runs unchanged.
"""

from ldm_lite.commands import main_of

main = main_of("txt2img", __doc__, __name__)
