"""Textual inversion: training only the vectors that a name in captions stands for.  Gal et al. 2022."""

from dataclasses import replace

import torch
from torch import Tensor, nn

from ldm_lite.checkpoint.model import Model
from ldm_lite.checkpoint.textual_inversion import CLIP
from ldm_lite.models.clip import CLIPTextEncoder


class Vectors(nn.Module):
    """The vectors (n,D) of one name, for each text encoder of width D."""

    def __init__(self, model: Model, word: str, count: int) -> None:
        """They begin as those of a word's tokens, repeated.  Raises ValueError for a word without tokens."""
        super().__init__()
        assert model.tokenizer is not None
        ids = replace(model.tokenizer, added=()).encode(word)
        if not ids:
            raise ValueError(f"got `init_word` {word!r}, wanted a word that CLIP knows, such as 'cat'")
        chosen = torch.tensor([ids[i % len(ids)] for i in range(count)])
        tables = [_table(encoder) for encoder in model.text_encoders if isinstance(encoder, CLIP)]
        self.vectors = nn.ParameterDict(
            {str(table.shape[1]): nn.Parameter(table[chosen.to(table.device)].float().clone()) for table in tables}
        )

    def known_to(self, model: Model, name: str) -> Model:
        """Return the model whose prompts know the name: changes of the vectors count at once."""
        assert model.tokenizer is not None
        first = max(encoder.spec.vocab_size for encoder in model.text_encoders if isinstance(encoder, CLIP))
        count = len(next(iter(self.vectors.values())))
        tokenizer = replace(model.tokenizer, added=((name, tuple(range(first, first + count))),))
        return replace(model, tokenizer=tokenizer, learned={int(width): each for width, each in self.vectors.items()})


def _table(encoder: nn.Module) -> Tensor:
    """Return the token embeddings (V,D) of a text encoder."""
    name = "embeddings.token_embedding" if isinstance(encoder, CLIPTextEncoder) else "token_embedding"
    return encoder.get_parameter(f"{name}.weight")


def embedding_file(vectors: nn.Module, model: Model) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return the tensors (float32, on the CPU) and the metadata of a file in the layout of kohya's."""
    assert isinstance(vectors, Vectors)
    values = [each.detach().to("cpu", torch.float32).contiguous() for each in vectors.vectors.values()]
    names = ("emb_params",) if len(values) == 1 else ("clip_l", "clip_g")
    return dict(zip(names, values, strict=True)), {"ss_sd_model_name": model.name}
