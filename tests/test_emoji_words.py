"""Other words for emoji are of one emoji each, and captions keep their meaning with them."""

import re

import numpy as np
import pytest
from emoji_words import kinds_of, other_names, reworded, word_list
from render_emoji import vocabulary


def test_every_other_name_is_of_one_emoji_that_the_model_draws() -> None:
    assert {entry.names[0] for entry in vocabulary(440)} == set(other_names())
    names = [name for names in other_names().values() for name in names]
    assert len(names) == len(set(names))
    of_all = {name for entry in vocabulary(440) for name in entry.names}
    assert not of_all & set(names)
    assert set(kinds_of()) <= set(other_names())
    assert not {word for words in kinds_of().values() for word in words} & {*names, *of_all}


CASES = {  # a caption, and what all that it may become match
    "a cat on a red background": r"(an? )?(\S+|big cat|kitten face) on a red background",
    "two cats, 3d": r"(🐱 ?🐱|((two |some |a couple of |a few )?[a-z]+( faces)?|two 🐱)), 3d",
    "three slices of pizza": r"🍕 ?🍕 ?🍕|three .+|(some |several |a few )?[a-z ]+",
    "a green car": r"(a )?green .+",
    "an umbrella to the left of grapes": r"(an? )?\S+ to the left of .+",
    "nothing of the vocabulary": r"nothing of the vocabulary",
}


@pytest.mark.parametrize("caption", CASES)
def test_captions_are_reworded(caption: str) -> None:
    rng = np.random.default_rng(0)
    texts = [reworded(caption, rng) for _ in range(200)]
    assert all(re.fullmatch(CASES[caption], text) for text in texts), texts
    assert caption in texts
    assert (len(set(texts)) > 5) == ("nothing" not in caption)


def test_the_list_has_what_is_learned_alone() -> None:
    learned = {"red apple", "apple", "appel", "🍎", "fruit", "white", "on", "apples"}
    lines = word_list(learned.__contains__).splitlines()
    assert lines == ["🍎 red apple, apple, appel, apples", "any of several: fruit", "colours: white", "besides: on"]
    assert word_list((learned - {"🍎"}).__contains__).splitlines()[0] == "red apple, apple, apples", "not the others"
