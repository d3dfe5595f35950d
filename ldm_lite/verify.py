"""Check a checkpoint against published numbers: `python -m ldm_lite.verify --ckpt v1-4.ckpt`.

Runs the recipes of diffusers' own tests for this family of checkpoints, from fixed latents that need no download, in
float32, and prints expected values, values got, and the difference.  It passes if all vectors of one checkpoint agree.
"""

from ldm_lite.commands import main_of

main = main_of("verify", __doc__, __name__)
