"""reference: images that the network reads besides the noised one, and edits or combines by the prompt.

The family says how they are fitted.
"""

import dataclasses
from dataclasses import dataclass
from typing import Any, ClassVar

from ldm_lite.checkpoint.model import CheckpointModel
from ldm_lite.cli.options import changed
from ldm_lite.cli.task_options import ImageOptions, Txt2imgOptions
from ldm_lite.core.features import Feature, option
from ldm_lite.image import to_pixels
from ldm_lite.tasks.cost import Cost
from ldm_lite.tasks.image_inputs import open_source, side_unit, sources
from ldm_lite.tasks.job import PromptEncoder, TaskJob


@dataclass(frozen=True)
class References(Feature):
    """Adds the latents of the references to the inputs of every guidance branch, and shows them to the text encoder."""

    stage: ClassVar = "text"
    topic: ClassVar = "control"
    reference: tuple[Any, ...] = option(
        (),
        "image that editing models read with the prompt, to change it or to combine several; repeatable",
        metavar="FILE",
    )

    def add_cost(self, cost: Cost) -> Cost:
        """Return a cost with the images."""
        return dataclasses.replace(cost, references=cost.references + len(self.reference))

    def change_options(self, model: CheckpointModel, options: Txt2imgOptions) -> tuple[CheckpointModel, Txt2imgOptions]:
        """Read the images; the size of one of them is the default of text to image.

        Raises ValueError, OSError for anything but an image, for more than the network reads, and if it reads none.
        """
        rule = model.family.references
        if rule is None:
            raise ValueError(f"{model.family.title} reads no reference images: leave out `reference`")
        sees = any(getattr(spec, "vision", None) is not None for spec in model.family.text_encoders)
        if sees and (options.cond is not None or options.uncond is not None):
            raise ValueError("got `reference`, and `cond` or `uncond`, whose text has not seen it: give prompts")
        files = sources(self.reference, "reference")
        options = changed(options, reference=tuple(files))  # not the folders: keys of images name the files
        opened = [open_source(source).image for source in files]
        if rule.most is not None and len(opened) > rule.most:
            reads = f"{model.family.title} reads {rule.most}"
            raise ValueError(f"got {len(opened)} reference images, but {reads}: leave some out")
        images = [rule.fit(image, side_unit(model)) for image in opened]
        self.state.update(opened=opened, images=images)
        if not isinstance(options, ImageOptions) and options.height is options.width is None:
            width, height = images[rule.sized_by].size
            options = dataclasses.replace(options, width=width, height=height)
        return model, options

    def change_job(self, job: TaskJob) -> TaskJob:
        """Add the latents, each (1,C,h,w) of any size."""
        pixels = [to_pixels(image)[None] for image in self.state["images"]]
        encoded = self.once(
            "latents", lambda _: [job.model.encode_pixels(image).to(job.model.dtype) for image in pixels]
        )
        latents = {f"reference_{i}": latent for i, latent in enumerate(encoded, 1)}
        texts = self.once(job.texts, self._seeing)
        return dataclasses.replace(job, channels={**job.channels, **latents}, texts=texts)

    def _seeing(self, texts: PromptEncoder) -> PromptEncoder:
        """Return an encoder of texts with the images."""
        seen = changed(texts.options, reference=tuple(self.state["opened"]))
        return dataclasses.replace(texts, options=seen)
