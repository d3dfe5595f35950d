"""Noise schedules, samplers as plans, guidance and the denoising step.  The import registers all samplers."""

from ldm_lite.diffusion import samplers as samplers
