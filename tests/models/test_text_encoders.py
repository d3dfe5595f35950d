"""OpenCLIP, LDM's BERT and T5 against the originals (the goldens)."""

import gzip
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import toy
from torch import nn

from ldm_lite.models.open_clip import OPEN_CLIP_H
from ldm_lite.models.t5 import relative_buckets

DATA = Path(__file__).parents[1] / "data"
GOLDEN = np.load(DATA / "text.npz")
MANIFESTS = json.loads(gzip.decompress((DATA / "manifests.json.gz").read_bytes()))


# ---- OpenCLIP -------------------------------------------------------------------------------------------------------

IDS = toy.padded_ids(toy.OPEN_CLIP.vocab_size, toy.OPEN_CLIP.length)


def open_clip(**changes: object) -> nn.Module:
    return toy.network(replace(toy.OPEN_CLIP, **changes))


def test_equals_the_embedder_of_stable_diffusion_2() -> None:
    assert toy.relative_error(open_clip()(IDS), GOLDEN["open_clip.sd2"]) < 1e-5


def test_equals_the_embedder_of_sdxl() -> None:
    context, pooled = open_clip(norm=False).context_and_pooled(IDS)
    assert toy.relative_error(context, GOLDEN["open_clip.sdxl"]) < 1e-5
    assert toy.relative_error(pooled, GOLDEN["open_clip.pooled"]) < 1e-5
    assert torch.equal(open_clip(norm=False)(IDS), context)


def test_the_goldens_tell_the_norms_layers_and_transposes_apart() -> None:
    """Traps 1 and 3: the last layer, no norm (or the norm), and W^T are all far away."""
    sd2, sdxl, pooled = (GOLDEN[f"open_clip.{name}"] for name in ("sd2", "sdxl", "pooled"))
    assert toy.relative_error(sdxl, sd2) > 0.1
    assert toy.relative_error(open_clip(skip=0)(IDS), sd2) > 0.1
    assert toy.relative_error(open_clip(skip=0, norm=False)(IDS), sdxl) > 0.1
    transposed = open_clip(norm=False)
    transposed.text_projection = nn.Parameter(transposed.text_projection.T, requires_grad=False)
    assert toy.relative_error(transposed.context_and_pooled(IDS)[1], pooled) > 0.1


def test_the_pooled_output_is_read_at_the_first_end_whatever_the_padding_and_added_tokens() -> None:
    network = open_clip(norm=False)
    _, pooled = network.context_and_pooled(IDS)
    with_ends = IDS.where(IDS != 0, toy.OPEN_CLIP.end_id)
    assert torch.allclose(network.context_and_pooled(with_ends)[1], pooled, atol=1e-6)
    rows = torch.cat([network.token_embedding.weight, torch.ones(1, toy.OPEN_CLIP.width)])
    network.token_embedding = nn.Embedding.from_pretrained(rows)
    learned = IDS.clone()
    learned[:, 1] = toy.OPEN_CLIP.end_id + 1  # a token of textual inversion: larger than the end, and no end
    copy = learned.clone()
    copy[:, 3] = 7
    assert not torch.allclose(network.context_and_pooled(learned)[1], network.context_and_pooled(copy)[1], atol=1e-2)


def test_clip_skip_counts_from_the_layer_it_was_trained_with() -> None:
    network, one_less = open_clip(), open_clip(skip=2)
    assert torch.equal(network(IDS, 2), one_less(IDS))
    with pytest.raises(ValueError, match="got clip skip 3, expected 1 to 2"):
        network(IDS, 3)


def test_it_needs_no_text_projection_for_a_context() -> None:
    network = open_clip(projection=False)
    assert "text_projection" not in network.state_dict()
    assert toy.relative_error(network(IDS), GOLDEN["open_clip.sd2"]) < 1e-5


def test_converted_files_lack_the_layer_that_nothing_reads() -> None:
    shapes = {key: tuple(shape) for key, shape in MANIFESTS["text_openclip_h14"]["shapes"].items()}
    lost = {key: shape for key, shape in shapes.items() if ".23." not in key and key != "text_projection"}
    assert OPEN_CLIP_H.fitted(lost) == replace(OPEN_CLIP_H, layers=23, skip=0, projection=False)


# ---- BERT -----------------------------------------------------------------------------------------------------------


def test_equals_the_transformer_of_latent_diffusion() -> None:
    ids = toy.padded_ids(toy.BERT.vocab_size, toy.BERT.length)
    assert toy.relative_error(toy.network(toy.BERT)(ids), GOLDEN["bert"]) < 1e-5


def test_bert_reads_in_both_directions_and_its_padding() -> None:
    ids = toy.padded_ids(toy.BERT.vocab_size, toy.BERT.length)
    network = toy.network(toy.BERT)
    changed = ids.clone()
    changed[0, -1] = 5
    assert (network(changed) - network(ids))[0].abs().amax(dim=1).min() > 1e-5


# ---- T5 -------------------------------------------------------------------------------------------------------------

T5_IDS = toy.padded_ids(toy.T5.vocab_size, 20)


def test_t5_equals_transformers() -> None:
    network = toy.network(toy.T5)
    assert toy.relative_error(network(T5_IDS), GOLDEN["t5"]) < 1e-5
    assert toy.relative_error(network(T5_IDS, T5_IDS != 0), GOLDEN["t5.masked"]) < 1e-5
    assert toy.relative_error(GOLDEN["t5"], GOLDEN["t5.masked"]) > 1e-2


def test_positions_far_apart_share_a_bucket() -> None:
    buckets = relative_buckets(300, buckets=32, max_distance=128)
    assert buckets[0, :9].tolist() == [0, 17, 18, 19, 20, 21, 22, 23, 24]  # keys after the query
    assert buckets[8, :9].tolist() == [8, 7, 6, 5, 4, 3, 2, 1, 0]
    assert (buckets[0, 128:] == 31).all()
    assert (buckets[299, :171] == 15).all()


def test_t5_stays_finite_in_half_precision_where_its_feed_forward_overflows() -> None:
    network = toy.network(toy.T5)
    for block in network.encoder.block:
        for name in ("wi_0", "wi_1", "wo"):
            getattr(block.layer[1].DenseReluDense, name).weight.mul_(60)
    wanted = network(T5_IDS)
    network.half()
    dense = network.encoder.block[0].layer[1].DenseReluDense
    x = network.encoder.block[0].layer[1].layer_norm(network.shared(T5_IDS).float())
    plain = dense.wo(torch.nn.functional.gelu(dense.wi_0(x), approximate="tanh") * dense.wi_1(x))
    assert not torch.isfinite(plain).all()
    assert network(T5_IDS).dtype == torch.float16
    assert toy.relative_error(network(T5_IDS), wanted) < 5e-3
