"""guidance_rescale and mimic_scale: the guided output with less contrast; that of Qwen-Image keeps its norm."""

import dataclasses
import logging
from typing import Any

from ldm_lite.core.denoise import Adjust, InputSource
from ldm_lite.diffusion.adjustments import keeping_norm, mimicking, rescaling
from ldm_lite.diffusion.guidance import check_classifier_free, mapped
from ldm_lite.tasks.features import Feature
from ldm_lite.tasks.job import Job


class Rescale(Feature):
    """Adjusts what guidance makes of the outputs."""

    def check(self, options: Any) -> Any:
        """Raises ValueError for a percentile without what it is of."""
        if options.dynamic_threshold is not None and options.mimic_scale is None:
            raise ValueError(
                "`dynamic_threshold` is the percentile of `mimic_scale`: give that too, 7 for instance, or take "
                "`guidance_rescale=0.7` in place of it"
            )
        return options

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
        if options.mimic_scale is not None:
            if not callable(job.guidance) and options.mimic_scale >= job.guidance:
                self.log(logging.WARNING, "`mimic_scale` has no effect unless it is below `scale`: take a lower one")
            percentile = 1.0 if options.dynamic_threshold is None else options.dynamic_threshold
            adjust = (*adjust, mimicking(options.mimic_scale, percentile, device))

        def wrap(source: InputSource, job: Job) -> InputSource:
            if options.mimic_scale is not None:
                check_classifier_free(job, "mimic_scale")
            return mapped(source, lambda inputs: inputs._replace(adjust=(*inputs.adjust, *adjust)))

        return dataclasses.replace(job, guiding=(*job.guiding, wrap))
