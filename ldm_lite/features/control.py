"""control, preprocess, clip_vision: ControlNets, T2I-, IP- and style adapters, Redux."""

import dataclasses
from typing import Any

from ldm_lite.cli.task_options import Txt2imgOptions
from ldm_lite.control.apply import ActiveControls
from ldm_lite.control.control import Control, natural_size, parse
from ldm_lite.control.loading import LoadedControl, load_controls
from ldm_lite.core.denoise import InputSource
from ldm_lite.models.controlnet import ControlNet
from ldm_lite.models.t2i_adapter import T2IAdapter
from ldm_lite.runtime.seamless import seamless
from ldm_lite.tasks.features import Feature
from ldm_lite.tasks.job import Job


class Controls(Feature):
    """Adds the controls' networks to the UNet."""

    controls: list[Control]
    loaded: list[LoadedControl]

    def check(self, options: Any) -> Any:
        """Raises ValueError for text that is not a control."""
        is_used = options.control or options.preprocess is not None
        self.controls = parse(options.control, options.preprocess) if is_used else []
        return options

    def change_options(self, model: Any, options: Any) -> tuple[Any, Any]:
        """Load the networks; a text to image has the size of the first control's image, unless another is given."""
        is_sized = options.height is not None or options.width is not None
        if self.controls and not is_sized and type(options) is Txt2imgOptions:
            width, height = natural_size(self.controls[0], model.family.resolution)
            options = dataclasses.replace(options, width=width, height=height)
        self.loaded = load_controls(model, self.controls, options.clip_vision)
        return model, options

    def change_job(self, job: Job) -> Job:
        """Prepare the controls for images of the job's size, once."""
        if not self.loaded or job.plan is None:
            return job
        factor, (_, h, w) = job.model.vae.spec.factor, job.shape
        loaded = [self._as_unet(control, job) for control in self.loaded]
        active = ActiveControls(job.model, loaded, job.plan, (factor * w, factor * h))

        def wrap(source: InputSource, job: Job) -> InputSource:
            return active.wrapped(source)

        return dataclasses.replace(job, wrappers=(*job.wrappers, wrap))

    def _as_unet(self, loaded: LoadedControl, job: Job) -> LoadedControl:
        """Return a control whose network is seamless as the job's UNet is; that of the plain UNet is loaded once."""
        if job.options.seamless is None or not isinstance(loaded.network, ControlNet | T2IAdapter):
            return loaded
        return dataclasses.replace(loaded, network=seamless(loaded.network, job.options.seamless))
