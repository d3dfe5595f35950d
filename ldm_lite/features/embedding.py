"""embedding: textual inversions, which prompts use by name."""

from dataclasses import dataclass
from typing import Any, ClassVar

from ldm_lite.adapters.textual_inversion import with_embeddings
from ldm_lite.core.features import Feature, option


@dataclass(frozen=True)
class Embedding(Feature):
    """Gives the text encoders further tokens."""

    stage: ClassVar = "text"
    topic: ClassVar = "prompts"
    embedding: tuple[str, ...] = option(
        (), "textual inversion file, used in prompts by name; repeatable", metavar="[NAME=]FILE"
    )

    def change_options(self, model: Any, options: Any) -> tuple[Any, Any]:
        """Raises ValueError, OSError for files that hold none, or do not fit the model."""
        return with_embeddings(model, self.embedding), options
