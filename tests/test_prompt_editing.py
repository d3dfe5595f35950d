"""Prompts that change while an image is made, and prompts of several parts: what the network reads at each call."""

from pathlib import Path
from typing import Any

import pytest
import torch
from runs import Call, guided_outputs, run_latents, unet_calls

import ldm_lite
from ldm_lite import Pipeline

SMALL = {"height": 16, "width": 16, "prompt_syntax": "a1111", "negative_prompt": "bad"}


def texts_read(pipe: Pipeline, calls: list[Call], branch: int, known: list[str]) -> list[str]:
    """Which of some texts a branch of guidance, of one image, read at each call."""
    encoded = {text: pipe.encode_prompt(text).context[0] for text in known}
    read = [[text for text, value in encoded.items() if torch.equal(value, call.context[branch])] for call in calls]
    assert all(len(texts) == 1 for texts in read)
    return [text for [text] in read]


@pytest.mark.parametrize(
    ("sampler", "prompt", "wanted"),
    [
        # The web UI compares the number of calls so far with the call of the change: one call more of the first text.
        ("euler", "a [cat:dog:0.5]", ["a cat"] * 4 + ["a dog"] * 2),
        ("euler", "a [dog:2]", ["a "] * 3 + ["a dog"] * 3),
        ("euler", "a [cat::2]", ["a cat"] * 3 + ["a "] * 3),
        ("euler", "[a cat|a dog]", ["a cat"] * 2 + ["a dog", "a cat"] * 2),
        ("heun", "a [cat:dog:0.5]", ["a cat"] * 7 + ["a dog"] * 4),  # calls, not steps
        ("dpmpp_2m", "plain a cat", ["plain a cat"] * 6),
    ],
)
def test_each_call_reads_the_text_of_its_time(pipe: Pipeline, sampler: str, prompt: str, wanted: list[str]) -> None:
    with unet_calls(pipe) as calls:
        run_latents(pipe, prompt, sampler=sampler, steps=6, **SMALL)
    assert texts_read(pipe, calls, 1, list(dict.fromkeys(wanted))) == wanted
    assert texts_read(pipe, calls, 0, ["bad"]) == ["bad"] * len(wanted)


def test_a_scale_of_the_step_is_asked_once_a_step_if_the_text_changes_within_it(pipe: Pipeline) -> None:
    steps = []

    def scale(step: int) -> float:
        steps.append(step)
        return 3.0

    pipe.txt2img("a [cat|dog]", sampler="heun", steps=4, guidance=scale, **SMALL)
    assert steps == [0, 1, 2, 3]


def test_the_negative_prompt_changes_too(pipe: Pipeline) -> None:
    with unet_calls(pipe) as calls:
        pipe.txt2img("a cat", steps=4, **SMALL | {"negative_prompt": "[bad:ugly:2] AND"})
    assert texts_read(pipe, calls, 0, ["bad AND", "ugly AND"]) == ["bad AND"] * 3 + ["ugly AND"]


def test_an_image_to_start_from_counts_from_its_first_call_on(pipe: Pipeline) -> None:
    """As in the web UI: a share is one of all steps, but the calls that the strength leaves out do not count."""
    with unet_calls(pipe) as calls:
        pipe.img2img("[cat:dog:0.5]", torch.zeros(3, 16, 16), strength=0.75, steps=8, **SMALL)
    assert texts_read(pipe, calls, 1, ["cat", "dog"]) == ["cat"] * 5 + ["dog"]


@pytest.mark.parametrize("scale", [1.0, 3.0])
def test_and_adds_the_differences_of_its_parts(pipe: Pipeline, scale: float) -> None:
    """Liu et al. 2022, and the web UI's combine_denoised: uncond + sum of weight * scale * (cond - uncond)."""
    prompt, options = "a cat :1.2 AND a dog: -0.5", {"steps": 2, "scale": scale, **SMALL}
    with unet_calls(pipe) as calls:
        pipe.txt2img(prompt, **options)
    for branch, text in enumerate(["bad", "a cat", "a dog"]):
        assert texts_read(pipe, calls, branch, ["bad", "a cat", "a dog"]) == [text] * 2
    for (bad, cat, dog), guided in guided_outputs(pipe, prompt, **options):
        wanted = bad + 1.2 * scale * (cat - bad) - 0.5 * scale * (dog - bad)
        torch.testing.assert_close(guided, wanted, rtol=1e-4, atol=1e-4)


def test_parts_of_weight_that_add_up_to_nothing_are_the_negative_prompt(pipe: Pipeline) -> None:
    larger = SMALL | {"height": 64, "width": 64}
    [result] = pipe.txt2img("a cat AND a cat :-1", steps=2, output="result", **larger)
    [negative] = pipe.txt2img("bad", steps=2, scale=1.0, output="result", **larger)
    torch.testing.assert_close(result.pixels, negative.pixels, atol=1e-4, rtol=0)


def test_no_image_depends_on_its_batch(pipe: Pipeline) -> None:
    prompts = ["[a cat|a dog]", "a cat AND a dog", "a [cat:dog:2]", "a dog :0.5", "a cat AND a dog"]
    together = pipe.txt2img(prompts, steps=2, batch_size=5, seed=7, output="result", **SMALL)
    assert [result.prompt for result in together] == prompts
    for i, result in enumerate(together):
        [alone] = pipe.txt2img(prompts[i], steps=2, batch_size=1, seed=7 + i, output="tensor", **SMALL)
        torch.testing.assert_close(result.pixels, alone, atol=1e-3, rtol=0)


@pytest.mark.parametrize(
    "options", [{"guidance_rescale": 0.5}, {"guidance": lambda cond, uncond: cond}], ids=["rescale", "function"]
)
def test_what_does_not_go_with_and_is_one_line(pipe: Pipeline, options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="with AND") as caught:
        pipe.txt2img("a AND b", steps=2, **SMALL, **options)
    assert "\n" not in str(caught.value)


def test_plain_prompts_have_no_syntax(pipe: Pipeline) -> None:
    with unet_calls(pipe) as calls:
        pipe.txt2img("[a|b] AND c :2", steps=2, height=16, width=16)
    assert texts_read(pipe, calls, 1, ["[a|b] AND c :2"]) == ["[a|b] AND c :2"] * 2


@pytest.mark.slow
def test_flows_read_the_syntax_without_weights(flow_path: Path) -> None:
    """Escapes, BREAK, editing and AND, which needs guidance; the spaces around AND do not count."""
    pipe = ldm_lite.load(flow_path, device="cpu")
    skips = {"skip_layer_scale": 0.0} if pipe.family.skip_layers else {}

    def made(prompt: str, syntax: str = "a1111", **more: Any) -> bytes:
        [image] = pipe.txt2img(prompt, prompt_syntax=syntax, height=32, width=32, steps=4, **more)
        return image.tobytes()

    assert made(r"a \(cat\)") == made("a (cat)", "plain") != made("a cat", "plain")
    assert made("a BREAK cat") == made("a cat", "plain")
    assert len({made(text) for text in ("[cat:dog:0.5]", "[cat|dog]", "cat", "dog")}) == 4
    with pytest.raises(ValueError, match=r"cannot weight parts: got 'cat' with the weight 1.2"):
        made("a (cat:1.2)")
    if pipe.family.distilled:
        with pytest.raises(ValueError, match="needs a model with classifier-free guidance"):
            made("a cat AND a dog")
    else:
        both = {made(text, scale=4.0, **skips) for text in ("a cat AND a dog", "a cat  AND  a dog", "a cat")}
        assert len(both) == 2
