"""The CLIP text encoder against transformers' (the goldens), and its pooled output."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import toy
from random_checkpoint import SMALL

from ldm_lite.models.clip import CLIPTextModel

DATA = Path(__file__).parents[1] / "data"
GOLDEN = np.load(DATA / "networks.npz")
IDS = toy.token_ids(SMALL.text.vocab_size, SMALL.text.length)


def small(activation: str) -> torch.nn.Module:
    spec = replace(SMALL.text, activation=activation)
    return toy.fill(CLIPTextModel(spec), "cond_stage_model.transformer.text_model.")


@pytest.mark.parametrize("activation", ["quick_gelu", "gelu"])
def test_equals_transformers(activation: str) -> None:
    assert toy.relative_error(small(activation)(IDS), GOLDEN[f"small.clip.{activation}"]) < 1e-5


def test_the_goldens_tell_the_activations_apart() -> None:
    assert toy.relative_error(GOLDEN["small.clip.gelu"], GOLDEN["small.clip.quick_gelu"]) > 1e-3


def test_the_pooled_output_is_read_at_the_end_token_however_many_tokens_were_added() -> None:
    """Textual inversions too follow the vocabulary that prompts reach."""
    ids = torch.tensor([[49406, 320, 49407, 49407], [49406, 2368, 49407, 49407]])
    spec = replace(SMALL.text, vocab_size=49408, length=4)
    longer = toy.fill(CLIPTextModel(replace(spec, vocab_size=49410)), "text.")
    plain = CLIPTextModel(spec)
    plain.load_state_dict(
        {key: value[:49408] if "token_emb" in key else value for key, value in longer.state_dict().items()}
    )
    pooled = longer.context_and_pooled(ids)[1]
    assert torch.equal(pooled, plain.context_and_pooled(ids)[1])
    assert not torch.allclose(pooled[0], pooled[1], atol=1e-2)
    ids[:, 1], learned = 49408, torch.ones(1, spec.width)
    assert torch.equal(longer(ids, learned=learned), plain(ids, learned=learned))


def test_the_pooled_output_may_be_projected() -> None:
    network = toy.fill(CLIPTextModel(replace(SMALL.text, projection=True)), "text.")
    context, pooled = network.context_and_pooled(IDS)
    unprojected = toy.fill(CLIPTextModel(SMALL.text), "text.").context_and_pooled(IDS)
    assert torch.equal(context, unprojected[0])
    assert torch.allclose(pooled, unprojected[1] @ network.text_projection.weight.T, atol=1e-5)
