"""What an autoencoder keeps of an image: `python -m ldm_lite.reconstruct photo.png --ckpt kl-f8.ckpt`.

Encodes and decodes an image with the autoencoder of any checkpoint, or with an autoencoder's own file (KL, VQ, TAESD),
saves the result, and prints its peak signal-to-noise ratio.
"""

from ldm_lite.commands import main_of

main = main_of("reconstruct", __doc__, __name__)
