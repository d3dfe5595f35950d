"""Enlarge images four times: `python -m ldm_lite.upscale "a white cat" --init-img cat.png --ckpt x4-upscaler.ckpt`.

Takes Stable Diffusion's x4 upscaler, which reads a prompt and the noise level of the image, latent diffusion's
super-resolution model (bsr_sr), which reads the image alone, and ESRGAN's networks (RealESRGAN_x4plus.pth), which take
no steps.  Large images go tile by tile.
"""

from ldm_lite.commands import main_of

main = main_of("upscale", __doc__, __name__)
