"""guidance_rescale and dynamic_threshold: the guided output with less contrast; that of Qwen-Image keeps its norm."""

import dataclasses
import logging
import math

from ldm_lite.core.denoise import Adjust, InputSource
from ldm_lite.diffusion.adjustments import keeping_norm, rescaling, thresholding
from ldm_lite.diffusion.guidance import mapped
from ldm_lite.tasks.features import Feature
from ldm_lite.tasks.job import Job


class Rescale(Feature):
    """Adjusts what guidance makes of the outputs."""

    def change_job(self, job: Job) -> Job:
        """Raises ValueError for prompts of several parts."""
        options, device = job.options, job.model.device
        if options.guidance_rescale and job.guidance == 1:
            self.log(logging.WARNING, "`guidance_rescale` has no effect without guidance: take a `scale` other than 1")
        adjust: tuple[Adjust, ...] = ()
        if (patch := job.model.family.norm_patch) is not None:
            adjust = (keeping_norm(patch),)
        if options.guidance_rescale:
            job.refuse_parts("takes no `guidance_rescale`: leave it out")
            adjust = (*adjust, rescaling(options.guidance_rescale, device))
        if options.dynamic_threshold is not None:
            adjust = (*adjust, thresholding(options.dynamic_threshold, math.inf, device))

        def wrap(source: InputSource, job: Job) -> InputSource:
            return mapped(source, lambda inputs: inputs._replace(adjust=(*inputs.adjust, *adjust)))

        return dataclasses.replace(job, guiding=(*job.guiding, wrap))
