"""What some families read besides the prompt: sizes and scores (SDXL), the embedding of an image (unCLIP)."""

from typing import Any

from ldm_lite.checkpoint.model import Model
from ldm_lite.cli.task_options import UpscaleOptions
from ldm_lite.conditioning.inputs import with_files
from ldm_lite.conditioning.prompts import check_used
from ldm_lite.tasks.features import Feature


class FamilyInputs(Feature):
    """Reads the files of these options."""

    is_last = True

    def check(self, options: Any) -> Any:
        """Raises ValueError for options that need another."""
        is_noise_of_image = isinstance(options, UpscaleOptions)  # for which noise_level means that
        if options.noise_level and options.image_embedding is None and not is_noise_of_image:
            raise ValueError("`noise_level` needs an image embedding: give one with `image_embedding=FILE`")
        return options

    def change_options(self, model: Any, options: Any) -> tuple[Any, Any]:
        """Read files.  Raises ValueError if the model, and its refiner, use none of an option."""
        options = with_files(options)
        check_used([model, *([options.refiner] if isinstance(options.refiner, Model) else [])], options)
        return model, options
