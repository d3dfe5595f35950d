"""control, preprocess, clip_vision: ControlNets, T2I-, IP- and style adapters, Redux."""

import dataclasses
import functools
import os
from dataclasses import dataclass
from typing import Any, ClassVar

from ldm_lite.checkpoint.hub import check_there
from ldm_lite.checkpoint.model import CheckpointModel
from ldm_lite.cli.options import changed
from ldm_lite.cli.task_options import Txt2imgOptions
from ldm_lite.control.apply import ActiveControls
from ldm_lite.control.control import Control, natural_size, parse
from ldm_lite.control.loading import LoadedControl, load_controls
from ldm_lite.core.denoise import InputSource
from ldm_lite.core.features import Feature, option
from ldm_lite.image import read_image
from ldm_lite.models.controlnet import ControlNet
from ldm_lite.models.t2i_adapter import T2IAdapter
from ldm_lite.runtime.seamless import axes_of, seamless
from ldm_lite.tasks.cost import Cost
from ldm_lite.tasks.job import TaskJob


@dataclass(frozen=True)
class Controls(Feature):
    """Adds the controls' networks to the UNet."""

    stage: ClassVar = "inside"
    topic: ClassVar = "control"
    loads: ClassVar = True
    part_of: ClassVar = ("control", "is of a control: give one with `control=FILE:IMAGE`")
    control: tuple[Any, ...] = option(
        (),
        "ControlNet, T2I-Adapter, IP-Adapter or Redux with its image, FILE:IMAGE[:WEIGHT][:START-END][:guess][:pool]; "
        "START, END: fractions of the steps; guess: without the negative prompt; pool: for shuffle; repeatable",
        common=True,
        metavar="FILE:IMAGE",
        png="Control",
        written=lambda controls: " ".join(map(str, controls)),
    )
    preprocess: str | None = option(
        None,
        "compute the maps of --control: canny, canny:LOW:HIGH or inpaint; one for all, or one for each: canny,none",
        png="Control preprocess",
    )
    clip_vision: str | None = option(
        None,
        "image encoder: CLIP's for style adapters (ViT-L/14) and IP-Adapters (ViT-H, bigG), SigLIP's for FLUX.1 Redux",
        metavar="FILE",
    )

    @functools.cached_property
    def controls(self) -> list[Control]:
        """The controls of the texts.  Raises ValueError for text that is not a control."""
        return parse(self.control, self.preprocess) if self.control or self.preprocess is not None else []

    def check(self, options: Txt2imgOptions) -> Txt2imgOptions:
        """Raises ValueError for text that is not a control."""
        _ = self.controls
        return options

    def check_files(self) -> None:
        """Raises ValueError, OSError for files that are not there, and images that cannot be read."""
        for control in self.controls:
            check_there(control.source)
            if isinstance(control.image, (str, os.PathLike)):
                read_image(control.image, lambda image: None)
        if self.clip_vision is not None:
            check_there(self.clip_vision)

    def add_cost(self, cost: Cost) -> Cost:
        """Return a cost with the networks."""
        return dataclasses.replace(cost, controls=cost.controls + len(self.control))

    def with_networks(self, options: Txt2imgOptions, networks: dict[str, Any]) -> Txt2imgOptions:
        """Return options whose controls keep their networks in a dictionary, by file, for runs that follow."""
        controls = [
            dataclasses.replace(control, networks=networks.setdefault(str(control.source), control.networks))
            for control in self.controls
        ]
        return changed(options, control=tuple(controls), preprocess=None)

    def change_options(self, model: CheckpointModel, options: Txt2imgOptions) -> tuple[CheckpointModel, Txt2imgOptions]:
        """Load the networks; a text to image has the size of the first control's image, unless another is given."""
        is_sized = options.height is not None or options.width is not None
        if self.controls and not is_sized and options.task == "txt2img":
            width, height = natural_size(self.controls[0], model.family.resolution)
            options = dataclasses.replace(options, width=width, height=height)
        self.state["loaded"] = load_controls(model, self.controls, self.clip_vision)
        return model, options

    def change_job(self, job: TaskJob) -> TaskJob:
        """Prepare the controls for images of the job's size, once."""
        if not self.state["loaded"] or job.plan is None:
            return job
        factor, (_, h, w) = job.model.vae.spec.factor, job.shape
        loaded = [self._as_unet(control, job) for control in self.state["loaded"]]
        active = ActiveControls(job.model, loaded, job.plan, (factor * w, factor * h))

        def wrap(source: InputSource, job: TaskJob) -> InputSource:
            return active.wrapped(source)

        return dataclasses.replace(job, wrappers=(*job.wrappers, wrap))

    def _as_unet(self, loaded: LoadedControl, job: TaskJob) -> LoadedControl:
        """Return a control whose network is seamless if the job's UNet is; the plain UNet's is loaded once."""
        axes = axes_of(job.model.unet)
        if axes is None or not isinstance(loaded.network, ControlNet | T2IAdapter):
            return loaded
        return dataclasses.replace(loaded, network=seamless(loaded.network, axes))
