"""Noise schedules, samplers as plans, guidance and the denoising step, on top of the core's.

Importing it adds all samplers and spacings to the core's tables.
"""

from ldm_lite.diffusion import adaptive as adaptive
from ldm_lite.diffusion import dpmpp as dpmpp
from ldm_lite.diffusion import samplers as samplers
from ldm_lite.diffusion import spacings as spacings
