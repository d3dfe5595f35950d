"""from_png: options from the text of a picture, of AUTOMATIC1111's web UI ("A1111") or ldm_lite."""

import logging
from dataclasses import dataclass
from typing import Any, ClassVar

from PIL import Image

from ldm_lite.checkpoint.model import CheckpointModel
from ldm_lite.cli.options import changed, given
from ldm_lite.cli.task_options import Txt2imgOptions
from ldm_lite.core.features import Feature, option
from ldm_lite.tasks.picture_text import options_of
from ldm_lite.text.parameters import read_parameters

log = logging.getLogger("ldm_lite")


@dataclass(frozen=True)
class FromPng(Feature):
    """Takes from a picture the options that were not given."""

    stage: ClassVar = "settings"
    topic: ClassVar = "prompts"
    tasks: ClassVar = ("txt2img",)
    from_png: Any = option(
        None,
        "read the prompt and the settings from the text of this picture, of AUTOMATIC1111's web UI or ldm_lite (PNG, "
        "JPEG, WebP); other options override it",
        metavar="FILE",
    )

    @property
    def name(self) -> str:
        """What messages call the picture."""
        return "the picture" if isinstance(self.from_png, Image.Image) else f"{self.from_png}"[:300]

    def check(self, options: Txt2imgOptions) -> Txt2imgOptions:
        """Return options with those that were not given taken from the picture.

        One warning names what is ignored.  Raises ValueError, with the key, for a picture without a text or with a
        wrong value; OSError.
        """
        text = self.once("text", lambda _: read_parameters(self.from_png))
        explicit = given(options) - {"from_png"}
        try:
            values, ignored = options_of(text, explicit)
        except ValueError as error:
            raise ValueError(f"{self.name}: {error}") from error
        if ignored:
            log.warning("%s: ignored settings: %s", self.name, ", ".join(setting[:60] for setting in ignored[:40]))
        unset = {option: value for option, value in values.items() if option not in explicit}
        return changed(options, **unset, from_png=None)

    def change_options(self, model: CheckpointModel, options: Txt2imgOptions) -> tuple[CheckpointModel, Txt2imgOptions]:
        """Warn if the picture is another model's."""
        settings = self.once("text", lambda _: read_parameters(self.from_png)).settings
        if (theirs := settings.get("Model")) not in (None, model.name):
            hashed = settings.get("Model hash")
            theirs = f"{theirs} ({hashed})" if hashed else theirs
            log.warning("%s: was made with %s, not %s", self.name, theirs, model.name)
        return model, options
