"""seamless: images whose opposite edges fit together."""

import dataclasses
import logging
from typing import Any

from ldm_lite.runtime.compile import is_compiled
from ldm_lite.runtime.seamless import AXES, seamless
from ldm_lite.tasks.features import Feature
from ldm_lite.tasks.job import Job

log = logging.getLogger("ldm_lite")


class Seamless(Feature):
    """Gives UNet and autoencoder circular convolutions."""

    def check(self, options: Any) -> Any:
        """Raises ValueError for another axis than AXES, and for what it does not go with."""
        if options.seamless not in AXES:
            raise ValueError(f"got `seamless` {options.seamless!r}, expected one of {', '.join(AXES)}")
        for name in ("compat", "refiner"):
            if getattr(options, name):
                raise ValueError(f"`seamless` does not go with `{name}`: leave one of them out")
        return options

    def change_options(self, model: Any, options: Any) -> tuple[Any, Any]:
        """Replace the model.  Raises ValueError for networks whose convolutions are fixed."""
        if model.offloader is not None or is_compiled(model.step):
            raise ValueError(
                "`seamless` runs other convolutions: leave out `offload`, `storage`, `compile` and `compiled`"
            )
        if model.family.is_small:
            log.warning("%s is too small a model for `seamless`: images are distorted, use a larger model", model.name)
        unet, vae = (seamless(network, options.seamless) for network in (model.unet, model.vae))
        return model.with_networks(unet=unet, vae=vae), options

    def change_job(self, job: Job) -> Job:
        """Name both axes as A1111 does, which has no other tiling."""
        if job.options.seamless != "xy":
            return job
        return dataclasses.replace(job, settings={**job.settings, "Tiling": True})
