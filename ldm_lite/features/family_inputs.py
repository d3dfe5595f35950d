"""What some families read besides the prompt: sizes and scores (SDXL), the embedding of an image (unCLIP)."""

from dataclasses import dataclass
from typing import ClassVar

from ldm_lite.checkpoint.model import CheckpointModel
from ldm_lite.cli.task_options import Txt2imgOptions
from ldm_lite.conditioning.inputs import with_files
from ldm_lite.conditioning.prompts import check_used
from ldm_lite.core.features import Feature


@dataclass(frozen=True)
class FamilyInputs(Feature):
    """Reads the files of these options."""

    stage: ClassVar = "run"  # after a refiner, which may use them too
    uses: ClassVar = (
        *("original_size", "crop_top_left", "target_size", "aesthetic_score", "negative_aesthetic_score"),
        *("image_embedding", "noise_level", "image_statistics"),
    )

    def check(self, options: Txt2imgOptions) -> Txt2imgOptions:
        """Raises ValueError for options that need a missing one."""
        is_noise_of_image = options.task == "upscale"  # there noise_level is the image's
        if options.noise_level and options.image_embedding is None and not is_noise_of_image:
            raise ValueError("`noise_level` needs an image embedding: give one with `image_embedding=FILE`")
        return options

    def change_options(self, model: CheckpointModel, options: Txt2imgOptions) -> tuple[CheckpointModel, Txt2imgOptions]:
        """Read files.  Raises ValueError if neither the model nor its refiner uses an option."""
        options = with_files(options)
        check_used([model, *(value for value in vars(options).values() if isinstance(value, CheckpointModel))], options)
        return model, options
