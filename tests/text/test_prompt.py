"""Prompt syntax: A1111's rules, its chunks, and contexts of equal length."""

import dataclasses

import pytest
import torch
from runs import text_ids, unet_calls

from ldm_lite import Pipeline
from ldm_lite.conditioning.weights import with_token_weights
from ldm_lite.text.prompt import parse

SOT, EOT = 49406, 49407  # the ids of CLIP's start and end of a text


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        ("", [("", 1.0)]),
        ("plain text", [("plain text", 1.0)]),
        ("an (important) word", [("an ", 1.0), ("important", 1.1), (" word", 1.0)]),
        ("a [little] less", [("a ", 1.0), ("little", 1 / 1.1), (" less", 1.0)]),
        ("((very))", [("very", 1.21)]),
        ("(this:1.5) (that: .5 )", [("this", 1.5), (" ", 1.0), ("that", 0.5)]),
        ("((nested:1.3) too)", [("nested", 1.43), (" too", 1.1)]),
        ("(never closed", [("never closed", 1.1)]),
        ("never opened) :1.2)", [("never opened) :1.2)", 1.0)]),
        (r"\(literal\] \\", [("(literal] \\", 1.0)]),
        ("time: 12:30", [("time: 12:30", 1.0)]),
        ("(a [b) c]", [("a ", 1.1), ("b", 1.0), (" c", 1 / 1.1)]),
        ("one BREAK two", [("one", 1.0), ("BREAK", -1.0), ("two", 1.0)]),
        ("(one BREAK two:1.5)", [("one", 1.5), ("BREAK", -1.0), ("two", 1.5)]),
        ("BREAKBEAT BREAKBREAK", [("BREAKBEAT BREAKBREAK", 1.0)]),
        ("B\\REAK (a\\BREAK BREAK)", [("BREAK ", 1.0), ("a", 1.1), ("BREAK", -1.0), ("BREAK", -1.0)]),
        ("BREAKFAST aBREAK", [("BREAKFAST aBREAK", 1.0)]),
    ],
)
def test_parse(text: str, pieces: list[tuple[str, float]]) -> None:
    got = parse(text)
    assert [piece for piece, _ in got] == [piece for piece, _ in pieces]
    assert [weight for _, weight in got] == pytest.approx([weight for _, weight in pieces])


def test_plain_text_is_plain_text(sd: Pipeline) -> None:
    text = "a (red:1.4) [apple] BREAK \\("
    assert torch.equal(text_ids(sd, text), sd.tokenizer([text]))
    assert torch.equal(sd.encode_prompt(text).context, sd.text_encoder(sd.tokenizer([text]), 1))
    assert text_ids(sd, "word " * 200).shape == (1, 77)


def test_one_chunk_without_weights_is_the_plain_one(sd: Pipeline) -> None:
    for text in ("", "a red apple", "word " * 75):
        assert torch.equal(text_ids(sd, text, prompt_syntax="a1111"), sd.tokenizer([text]))


def test_weights_stand_beside_their_tokens(sd: Pipeline) -> None:
    text = "a (red:1.4) apple"
    assert text_ids(sd, text, prompt_syntax="a1111")[0, :5].tolist() == [SOT, *sd.tokenizer.encode("a red apple"), EOT]
    ratio = sd.encode_prompt(text, prompt_syntax="a1111").context[0] / sd.encode_prompt("a red apple").context[0]
    weights = ratio.median(dim=1).values
    assert (weights / weights[0]).tolist() == pytest.approx([1.0, 1.0, 1.4, *[1.0] * 74], rel=1e-4)


def test_long_prompts_take_chunks(sd: Pipeline) -> None:
    ids = text_ids(sd, "word " * 180, prompt_syntax="a1111")
    assert ids.shape == (3, 77)
    [word] = sd.tokenizer.encode("word")
    assert (ids == word).sum(dim=1).tolist() == [75, 75, 30]
    assert (ids[:, 0] == SOT).all()
    assert (ids[:, 76] == EOT).all()


@pytest.mark.parametrize(("before", "first"), [(70, 71), (55, 56), (54, 75), (74, 75)])
def test_a_chunk_ends_after_a_comma_near_its_end(sd: Pipeline, before: int, first: int) -> None:
    """The comma is token `before`; a chunk holds 75, and a comma counts if it is among the last 20 of them."""
    ids = text_ids(sd, "word " * before + ", " + "more " * 60, prompt_syntax="a1111")
    lengths = [int((row != EOT).sum()) - 1 for row in ids]
    assert lengths == [first, before + 61 - first]


def test_break_begins_a_chunk(sd: Pipeline) -> None:
    ids = text_ids(sd, "one BREAK two BREAK", prompt_syntax="a1111")
    assert ids.tolist() == sd.tokenizer(["one", "two"]).tolist()


def test_other_padding(sd: Pipeline) -> None:
    padded = dataclasses.replace(sd, tokenizer=dataclasses.replace(sd.tokenizer, pad_id=0))
    ids = text_ids(padded, "(one)", prompt_syntax="a1111")
    assert ids[0, 2:].tolist() == [EOT, *[0] * 74]


def test_weighted_keeps_the_mean() -> None:
    context = torch.randn(2, 77, 16, generator=torch.Generator().manual_seed(0)) + 0.3
    weights = torch.ones(2, 77)
    weights[0, 3] = 2.0
    got = with_token_weights(context, weights)
    assert got.mean(dim=(1, 2)) == pytest.approx(context.mean(dim=(1, 2)))
    assert torch.allclose(got[1], context[1])
    ratio = (got[0] / context[0]).mean(dim=1)
    assert ratio[3] / ratio[0] == pytest.approx(2.0)
    assert with_token_weights(context, torch.ones(2, 77)) is context


def test_contexts_of_a_job_are_alike(bundled: Pipeline) -> None:
    length = bundled.tokenizer.length
    long = "word " * (length + 10)
    assert bundled.encode_prompt(["short", long]).context.shape == (2, length, 112)
    with unet_calls(bundled) as calls:
        bundled.txt2img(["short", long], batch_size=2, steps=1, scale=1.0, prompt_syntax="a1111")
    context = calls[0].context
    assert context.shape == (2, 2 * length, 112)
    assert torch.allclose(context[0, :length], bundled.encode_prompt("short").context[0], atol=1e-5)
    assert torch.allclose(context[0, length:], bundled.encode_prompt("").context[0], atol=1e-5)
    assert torch.allclose(context[1:], bundled.encode_prompt(long, prompt_syntax="a1111").context, atol=1e-5)


def test_clip_skip_is_the_norm_of_an_earlier_layer(bundled: Pipeline) -> None:
    encoder, ids = bundled.text_encoder, bundled.tokenizer(["a red apple"])
    x = encoder.embeddings(ids)
    outputs = []
    for layer in encoder.encoder.layers:
        x = layer(x)
        outputs.append(x)
    for skip in (1, 2, 3):
        want = encoder.final_layer_norm(outputs[-skip])
        assert torch.equal(bundled.encode_prompt("a red apple", clip_skip=skip).context, want)
    for skip, message in ((0, "got `clip_skip` 0, expected 1 to"), (4, "got clip skip 4, expected 1 to 3")):
        with pytest.raises(ValueError, match=message):
            bundled.encode_prompt("a red apple", clip_skip=skip)


def test_an_unknown_syntax(bundled: Pipeline) -> None:
    with pytest.raises(ValueError, match="got `prompt_syntax` 'x', expected one of plain, a1111"):
        bundled.encode_prompt("a", prompt_syntax="x")
