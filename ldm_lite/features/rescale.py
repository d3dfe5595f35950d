"""guidance_rescale and mimic_scale: the guided output with less contrast; some families keep its norm."""

import dataclasses
import logging
from dataclasses import dataclass
from typing import ClassVar

from ldm_lite.cli.task_options import Txt2imgOptions
from ldm_lite.core.declare import SCALES, WHY_SCALES
from ldm_lite.core.denoise import Adjust, InputSource
from ldm_lite.core.features import Feature, option
from ldm_lite.diffusion.adjustments import keeping_norm, mimicking, rescaling
from ldm_lite.diffusion.guidance import check_classifier_free, mapped
from ldm_lite.tasks.job import TaskJob


@dataclass(frozen=True)
class Rescale(Feature):
    """Adjusts the guided output."""

    stage: ClassVar = "guidance"
    topic: ClassVar = "guidance"
    brought_by: ClassVar = ("norm_patch",)
    guidance_rescale: float = option(
        0.0,
        "guidance rescale against excess contrast, 0 to 1",
        within=(0, 1),
        png="Guidance rescale",
        no_effect=lambda job: "without guidance: use a `scale` other than 1" if job.guidance == 1 else None,
    )
    mimic_scale: float | None = option(
        None,
        "dynamic thresholding, for high scales: the contrast of this lower scale, 7 for instance (A1111's extension)",
        within=SCALES,
        reason=WHY_SCALES,
        png="Mimic scale",
    )
    dynamic_threshold: float | None = option(
        None,
        "percentile of the latents that --mimic-scale clamps to, 0 to 1 (default: 1)",
        within=(0, 1),
        png="Dynamic threshold",
    )

    def check(self, options: Txt2imgOptions) -> Txt2imgOptions:
        """Raises ValueError for `dynamic_threshold` without `mimic_scale`."""
        if self.dynamic_threshold is not None and self.mimic_scale is None:
            raise ValueError(
                "`dynamic_threshold` is the percentile of `mimic_scale`: give that too, 7 for instance, or use "
                "`guidance_rescale=0.7` in place of it"
            )
        return options

    def change_job(self, job: TaskJob) -> TaskJob:
        """Raises ValueError for prompts of several parts."""
        device = job.model.device
        adjust: tuple[Adjust, ...] = ()
        if (patch := job.model.family.norm_patch) is not None:
            adjust = (keeping_norm(patch),)
        if self.guidance_rescale:
            job.refuse_parts("takes no `guidance_rescale`: leave it out")
            adjust = (*adjust, rescaling(self.guidance_rescale, device))
        if self.mimic_scale is not None:
            if not callable(job.guidance) and self.mimic_scale >= job.guidance:
                self.log(logging.WARNING, "`mimic_scale` has no effect unless it is below `scale`: use a lower one")
            percentile = 1.0 if self.dynamic_threshold is None else self.dynamic_threshold
            adjust = (*adjust, mimicking(self.mimic_scale, percentile, device))

        def wrap(source: InputSource, job: TaskJob) -> InputSource:
            if self.mimic_scale is not None:
                check_classifier_free(job, "mimic_scale")
            return mapped(source, lambda inputs: inputs._replace(adjust=(*inputs.adjust, *adjust)))

        return dataclasses.replace(job, guiding=(*job.guiding, wrap))
