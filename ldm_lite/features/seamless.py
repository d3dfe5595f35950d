"""seamless: images whose opposite edges fit together."""

import dataclasses
import logging
from dataclasses import dataclass
from typing import ClassVar

from ldm_lite.checkpoint.model import CheckpointModel
from ldm_lite.cli.task_options import Txt2imgOptions
from ldm_lite.core.features import Feature, option
from ldm_lite.runtime.compile import is_compiled
from ldm_lite.runtime.seamless import seamless
from ldm_lite.tasks.cost import Cost

log = logging.getLogger("ldm_lite")


@dataclass(frozen=True)
class Seamless(Feature):
    """Gives UNet and autoencoder circular convolutions."""

    stage: ClassVar = "inside"
    topic: ClassVar = "txt2img"
    excludes: ClassVar = ("compat", "refiner")
    seamless: str | None = option(
        None,
        "make images whose opposite edges fit together: x (left and right), y or xy",
        choices=("x", "y", "xy"),
        png="Tiling",
        written=lambda axes: True if axes == "xy" else axes,  # A1111 tiles only both ways
        restored={"True": "xy"},
    )

    def add_cost(self, cost: Cost) -> Cost:
        """Return a cost that says that the networks change."""
        return dataclasses.replace(cost, changes_networks="seamless")

    def change_options(self, model: CheckpointModel, options: Txt2imgOptions) -> tuple[CheckpointModel, Txt2imgOptions]:
        """Replace the model.  Raises ValueError for networks whose convolutions are fixed."""
        if model.offloader is not None or is_compiled(model.run_row):
            raise ValueError(
                "`seamless` runs other convolutions: leave out `offload`, `storage`, `compile` and `compiled`"
            )
        if model.family.is_small:
            log.warning("%s is too small a model for `seamless`: images are distorted, use a larger model", model.name)
        unet, vae = (seamless(network, self.seamless or "xy") for network in (model.unet, model.vae))
        return model.with_networks(unet=unet, vae=vae), options
