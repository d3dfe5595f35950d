"""embedding: textual inversions, which prompts use by name."""

from typing import Any

from ldm_lite.adapters.textual_inversion import with_embeddings
from ldm_lite.tasks.features import Feature


class Embedding(Feature):
    """Gives the text encoders further tokens."""

    def change_options(self, model: Any, options: Any) -> tuple[Any, Any]:
        """Raises ValueError, OSError for files that hold none, or do not fit the model."""
        return with_embeddings(model, options.embedding), options
