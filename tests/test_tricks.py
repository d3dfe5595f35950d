"""The options that save evaluations, through the tasks."""

import numpy as np
import pytest

from ldm_lite import Pipeline

RUN = {"sampler": "ddim", "steps": 5, "seed": 3, "scale": 4.0, "output": "numpy"}


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("guidance_interval", "0.2-0.6", "Guidance interval: 0.2-0.6"),
        ("guidance_schedule", "cosine", "Guidance schedule: cosine"),
        ("apg", "parallel=0:threshold=5:momentum=-0.5", "APG: parallel=0:threshold=5:momentum=-0.5"),
        ("deep_cache", "2:1", "DeepCache: 2:1"),
        ("gate_step", 2, "Gate step: 2"),
        ("freeu", "1.2,1.4,0.9,0.2", 'FreeU: "1.2,1.4,0.9,0.2"'),
    ],
)
def test_each_changes_the_image_and_its_text_makes_it_again(
    name: str, value: str | int, text: str, pipe: Pipeline
) -> None:
    (result,) = pipe.txt2img("a", **(RUN | {"output": "result", name: value}))
    assert text in result.parameters
    assert not np.array_equal(result.array, pipe.txt2img("a", **RUN)[0])
    assert np.array_equal(pipe.txt2img(from_png=result.image, output="numpy")[0], result.array)


def test_they_go_together_and_with_a_batch(pipe: Pipeline) -> None:
    tricks = {"guidance_interval": "-0.8", "deep_cache": "2", "gate_step": 3, "freeu": "1.1,1.1,0.9,0.9"}
    alone = pipe.txt2img("a", **RUN, **tricks)[0]
    batched = pipe.txt2img("a", batch_size=2, **(RUN | {"seed": 2}), **tricks)[1]
    assert np.abs(alone.astype(int) - batched).max() <= 1
    image = pipe.img2img("a", alone, strength=0.6, **(RUN | tricks))[0]
    assert image.shape == alone.shape


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"guidance_interval": "3"}, "got `guidance_interval` '3', expected START-END"),
        ({"guidance_interval": "0-0.5", "scale": 1.0}, "there is none: use a `scale` other than 1"),
        ({"guidance_schedule": "up"}, "got `guidance_schedule` 'up', expected one of linear"),
        ({"apg": "0"}, "got `apg` '0', expected parallel=0"),
        ({"apg": "parallel=0:momentum=1"}, "got `apg`"),
        ({"apg": "parallel=0", "sampler": "dpm_adaptive"}, "DPM adaptive tries steps again"),
        (
            {"apg": "parallel=0", "scale": None, "guidance": lambda cond, uncond: cond},
            "got a `guidance` function and `apg`: leave one",
        ),
        ({"deep_cache": "0"}, "got `deep_cache` '0', expected N, 1 to 1000"),
        ({"deep_cache": "2:9"}, "got branch 9, expected 0 to 2"),
        ({"freeu": "1,2"}, "got `freeu` '1,2', expected four numbers"),
        ({"gate_step": 0}, "got `gate_step` 0, expected 1 to 999"),
        ({"deep_cache": "2", "sampler": "dpm_adaptive"}, "DPM adaptive has no fixed steps"),
        ({"deep_cache": "2", "compat": True}, "`deep_cache` does not go with `compat`"),
    ],
)
def test_wrong_options_are_one_line(options: dict[str, object], message: str, pipe: Pipeline) -> None:
    with pytest.raises(ValueError, match=message):
        pipe.txt2img("a", **(RUN | options))


def test_what_has_no_effect_in_so_few_steps_is_said(pipe: Pipeline, caplog: pytest.LogCaptureFixture) -> None:
    not_reached, none = "`gate_step` 2 is not reached in 2 steps", "none of 2 steps is within `guidance_interval`"
    for options, said in (
        ({"gate_step": 2}, [not_reached]),
        ({"gate_step": 1}, []),
        ({"guidance_interval": "0.1-0.2"}, [none]),
        ({"guidance_interval": "0.5-"}, []),
    ):
        caplog.clear()
        pipe.txt2img("a", **(RUN | {"steps": 2} | options))
        assert [message for message in (not_reached, none) if message in caplog.text] == said


def test_prompts_of_several_parts_and_texts_that_change(pipe: Pipeline) -> None:
    """T-GATE has fewer rows after the gate than before, and DeepCache must not keep what it made of an earlier text."""
    run = {**RUN, "prompt_syntax": "a1111"}
    for more in ({}, {"regions": "0,0,0.5,1; 0.5,0,1,1"}):
        both = [pipe.txt2img(f"a AND {part}", **run, gate_step=2, **more)[0] for part in ("b", "c")]
        assert not np.array_equal(*both)
    plain = pipe.txt2img("[a:b:2]", **run)[0]
    assert np.array_equal(pipe.txt2img("[a:b:2]", **run, deep_cache="1")[0], plain)
    # The web UI's second step has the text of the first; from then on each has another, and all blocks run.
    short = [pipe.txt2img("[a|b]", **run, deep_cache=every)[0] for every in ("2", "3", "9")]
    assert np.array_equal(short[0], short[1])
    assert np.array_equal(short[0], short[2])
    assert not np.array_equal(short[0], pipe.txt2img("[a|b]", **run)[0])
