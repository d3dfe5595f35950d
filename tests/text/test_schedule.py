"""Prompts that change over the steps, alternate, or have parts: as AUTOMATIC1111's web UI reads them."""

import json
from pathlib import Path

import pytest
import torch
from runs import run_latents

from ldm_lite import Pipeline
from ldm_lite.text.prompt import parse
from ldm_lite.text.schedule import Calls, schedule, split_at_ands

GOLDENS = json.loads((Path(__file__).parent.parent / "data" / "prompts.json").read_text())


@pytest.mark.parametrize("start", range(0, len(GOLDENS), 100))
def test_prompts_are_read_as_in_the_web_ui(start: int) -> None:
    """Parts, texts over the steps and attention, of well-formed and malformed prompts."""
    for prompt, steps, hires, parts, schedules, attention in GOLDENS[start : start + 100]:
        assert [list(part) for part in split_at_ands(prompt)] == parts, prompt
        calls = Calls(steps) if hires is None else Calls(hires, before=steps)
        for (text, _), wanted in zip(parts, schedules, strict=True):
            assert [list(span) for span in schedule(text, calls)] == wanted, (text, calls)
        if "BREAK" in prompt:  # tests/text/test_prompt.py
            continue
        pieces = [piece for piece in parse(prompt) if piece[0]] or [("", 1.0)]
        assert pieces == ([tuple(piece) for piece in attention if piece[0]] or [("", 1.0)]), prompt


def test_numbers_beyond_all_steps_and_far_beyond(sd: Pipeline) -> None:
    """The web UI fails at a number that is infinite."""
    run = {"steps": 3, "prompt_syntax": "a1111"}
    always_a, always_b = (run_latents(sd, prompt, **run) for prompt in ("[a:b:1e999]", "[a:b:-1e999]"))
    assert torch.equal(always_a, run_latents(sd, "a", **run))
    assert torch.equal(always_b, run_latents(sd, "b", **run))
    assert not torch.equal(always_a, always_b)


@pytest.mark.parametrize("prompt", ["[" * 101, "(" * 101 + "a" + ")" * 101, "[a|b]" + "word " * 3900])
def test_prompts_that_take_too_much_are_refused(sd: Pipeline, prompt: str) -> None:
    with pytest.raises(ValueError, match="got a prompt") as caught:
        sd.txt2img(prompt, steps=1000, prompt_syntax="a1111")
    assert "\n" not in str(caught.value)
