"""Textual inversion: training only the vectors that a name in captions stands for.  Gal et al. 2022."""

from dataclasses import replace

import torch
from torch import Tensor, nn

from ldm_lite import Pipeline
from ldm_lite.networks import token_tables


class Vectors(nn.Module):
    """The vectors (n,D) of one name, for each text encoder of width D."""

    def __init__(self, model: Pipeline, word: str, count: int) -> None:
        """They begin as those of a word's tokens, repeated.  Raises ValueError for a word without tokens."""
        super().__init__()
        assert model.tokenizer is not None
        ids = replace(model.tokenizer, added=()).encode(word)
        if not ids:
            raise ValueError(f"got `init_word` {word!r}, wanted a word that CLIP knows, such as 'cat'")
        chosen = torch.tensor([ids[i % len(ids)] for i in range(count)])
        self.vectors = nn.ParameterDict(
            {
                str(table.shape[1]): nn.Parameter(table[chosen.to(table.device)].float().clone())
                for table in token_tables(model)
            }
        )

    def known_to(self, model: Pipeline, name: str) -> Pipeline:
        """Return the model whose prompts know the name: changes of the vectors count at once."""
        assert model.tokenizer is not None
        first = max(map(len, token_tables(model)))
        count = len(next(iter(self.vectors.values())))
        tokenizer = replace(model.tokenizer, added=((name, tuple(range(first, first + count))),))
        return replace(model, tokenizer=tokenizer, learned={int(width): rows for width, rows in self.vectors.items()})


def embedding_file(vectors: nn.Module, model: Pipeline) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return the tensors (float32, on the CPU) and the metadata of a file in the layout of kohya's."""
    assert isinstance(vectors, Vectors)
    values = [rows.detach().to("cpu", torch.float32).contiguous() for rows in vectors.vectors.values()]
    names = ("emb_params",) if len(values) == 1 else ("clip_l", "clip_g")
    return dict(zip(names, values, strict=True)), {"ss_sd_model_name": model.name}
