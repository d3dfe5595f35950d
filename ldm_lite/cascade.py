"""DeepFloyd IF: `python -m ldm_lite.cascade "a red apple" --t5 ... --stage-1 ... --stage-2 ...`.

T5 reads the prompt; the stages make images of 64, 256 and (with Stable Diffusion's upscaler) 1024 pixels.  Each stage
is loaded in its turn.
"""

from ldm_lite.commands import main_of

main = main_of("cascade", __doc__, __name__)
