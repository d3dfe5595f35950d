"""embedding: textual inversions, which prompts use by name."""

from dataclasses import dataclass
from typing import ClassVar

from ldm_lite.adapters.textual_inversion import with_embeddings
from ldm_lite.checkpoint.model import CheckpointModel
from ldm_lite.cli.task_options import Txt2imgOptions
from ldm_lite.core.features import Feature, option


@dataclass(frozen=True)
class Embedding(Feature):
    """Gives the text encoders further tokens."""

    stage: ClassVar = "text"
    topic: ClassVar = "prompts"
    embedding: tuple[str, ...] = option(
        (), "textual inversion file, used in prompts by name; repeatable", metavar="[NAME=]FILE"
    )

    def change_options(self, model: CheckpointModel, options: Txt2imgOptions) -> tuple[CheckpointModel, Txt2imgOptions]:
        """Raises ValueError, OSError for files that hold none, or do not fit the model."""
        return with_embeddings(model, self.embedding), options
