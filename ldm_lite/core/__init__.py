"""Stable Diffusion from scratch, in one small package.  load().txt2img("a red apple")[0].save("apple.png")"""

from ldm_lite.core.features import FEATURES, Feature, register_feature
from ldm_lite.core.pipeline import Pipeline, load
from ldm_lite.core.samplers import SAMPLERS, sampler

__all__ = ["FEATURES", "SAMPLERS", "Feature", "Pipeline", "load", "register_feature", "sampler"]
