"""Noise schedules, samplers as plans, guidance and the denoising step.

The import registers all samplers and spacings.
"""

from ldm_lite.diffusion import adaptive as adaptive
from ldm_lite.diffusion import distilled as distilled
from ldm_lite.diffusion import dpmpp as dpmpp
from ldm_lite.diffusion import flow as flow
from ldm_lite.diffusion import samplers as samplers
from ldm_lite.diffusion import spacings as spacings
