"""Lets a text encoder read emoji as it reads their names: `train_emoji.py characters`.

CLIP's tokenizer cuts half of the emoji into two or more tokens, which many share, and sums of the embeddings of such
tokens do not tell emoji apart.  So the first layer's MLP gets further neurons.  Each responds to one emoji alone, or to
the end of a text after it, and adds what is missing from the hidden state that the usual name has there.  On
all other tokens they are silent, so other prompts keep their hidden states, but for roundings.
"""

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import torch
from emoji_words import SELECTED, other_names, reworded
from render_emoji import COLOURED, COLOURS, FLAT, PLAIN, SOLID, VOCABULARY, caption, styled_caption
from torch import Tensor, nn
from torch.nn import functional as F

from ldm_lite.core.tokenizer import END
from ldm_lite.models.clip import CLIPTextModel

TOKENS = 16  # of a text that are read here: later ones see no emoji that these do not
EACH = 18  # captions of every emoji
BATCH, PLAIN_BATCH = 96, 32  # texts of a step with emoji, and without
LR_NEURONS, LR_ROWS = 5e-2, 1e-2
THRESHOLD, GAIN = 1.2, 3.0  # of the neurons: off the boundary, and steep, so that they are silent or linear
RIDGE = 3.0

Align = Callable[[list[int], list[int]], list[int]]


def forms() -> dict[str, str]:
    """Return the emoji, also as other programs write them (U+FE0F), and the usual names."""
    known = {entry.character: entry.names[0] for entry in VOCABULARY if entry.names[0] in other_names()}
    return known | {f"{character}\ufe0f": known[character] for character in SELECTED if character in known}


def captions_of(character: str, name: str, rng: np.random.Generator) -> list[tuple[str, str]]:
    """Return captions of one emoji, each as "a 🦊 on teal" and as "a fox on teal"."""
    pairs = []
    for _ in range(EACH):
        templates = PLAIN if rng.random() < 0.4 else COLOURED
        template = templates[int(rng.integers(len(templates)))]
        colour = "white" if templates is PLAIN else [*COLOURS][int(rng.integers(len(COLOURS)))]
        texts = [caption(template, word, colour) for word in (character, name)]
        if rng.random() < 0.4:
            texts[0] = texts[0].replace(f"a {character}", character)
        if rng.random() < 0.5:
            seed, style = int(rng.integers(2**30)), (FLAT, SOLID)[int(rng.integers(2))]
            texts = [styled_caption(np.random.default_rng(seed), text, style) for text in texts]
        pairs.append((texts[0], texts[1]))
    return pairs


def first_layer(encoder: CLIPTextModel, ids: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
    """Token ids (B,T) -> the hidden states (B,T,D) before the first layer's MLP, and what the MLP reads of them."""
    layer = encoder.encoder["layers"][0]  # type: ignore[index]
    x = table[ids] + encoder.embeddings.position_embedding.weight[: ids.shape[1]]
    x = x + layer.self_attn(layer.layer_norm1(x))
    return x, layer.layer_norm2(x)


def numbered(ids: Tensor, numbers: dict[tuple[int, ...], int]) -> Tensor:
    """Token ids (B,T) -> (B,T): at the last token of an emoji its number, at an end after it as many further, or -1."""
    neurons = torch.full_like(ids, -1)
    for row, tokens in enumerate(ids.tolist()):
        for place in range(1, len(tokens)):
            for first in range(max(1, place - 3), place + 1):
                number = numbers.get(tuple(tokens[first : place + 1]))
                if number is not None:
                    neurons[row, place] = number
                    if place + 1 < len(tokens) and tokens[place + 1] == END:
                        neurons[row, place + 1] = number + len(numbers)
                    break
    return neurons


def with_characters(
    encoder: CLIPTextModel,
    tokenizer: Callable[[Sequence[str]], Tensor],
    captions: Sequence[str],
    align: Align,
    steps: int,
    seed: int,
) -> CLIPTextModel:
    """Return a text encoder that reads emoji of several tokens too, whose rows begin anew; it knows their names.

    captions have usual names; align(ids, others) tells where the token of `others` is that stands for each of ids.
    """
    rng = np.random.default_rng([seed, 0xC4A])
    torch.manual_seed(seed)
    several = {form: name for form, name in forms().items() if len(_tokens(tokenizer, form)) > 1}
    numbers = {tuple(_tokens(tokenizer, form)): number for number, form in enumerate(several)}
    tokens = torch.tensor(sorted({token for ids in numbers for token in ids}))
    pairs = [(text, usual) for usual in captions if (text := reworded(usual, rng)) != usual]
    pairs += [pair for form, name in several.items() for pair in captions_of(form, name, rng)]
    ids, usual_ids, plain = tokenizer([a for a, _ in pairs]), tokenizer([b for _, b in pairs]), tokenizer(captions)
    places = torch.tensor([align(*rows) for rows in zip(ids.tolist(), usual_ids.tolist(), strict=True)])
    ids, places, plain = ids[:, :TOKENS], places[:, :TOKENS], plain[:, :TOKENS]
    number_at, count = numbered(ids, numbers), 2 * len(numbers)
    table, weight, bias = fit_neurons(encoder, (ids, number_at, plain), tokens, count, steps)
    encoder = copy.deepcopy(encoder)
    with torch.no_grad():
        states = [_after_first(encoder, part) for part in usual_ids.split(256)]
        usual = torch.cat(states).take_along_dim(places[:, :, None], 1)
        encoder.embeddings.token_embedding.weight.copy_(table)
        at = number_at >= 0
        missing = (usual - torch.cat([_after_first(encoder, part) for part in ids.split(256)]))[at]
        read = torch.cat([first_layer(encoder, part, table)[1] for part in ids.split(256)])[at]
        return widened(encoder, GAIN * weight, GAIN * (bias - THRESHOLD), read, missing)


def _tokens(tokenizer: Callable[[Sequence[str]], Tensor], text: str) -> list[int]:
    row: list[int] = tokenizer([text])[0].tolist()
    return row[1 : row.index(END)]


def _after_first(encoder: CLIPTextModel, ids: Tensor) -> Tensor:
    states: Tensor = encoder.encoder["layers"][0](encoder.embeddings(ids))  # type: ignore[index]
    return states


def fit_neurons(
    encoder: CLIPTextModel, texts: tuple[Tensor, Tensor, Tensor], tokens: Tensor, count: int, steps: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Train rows of tokens, and neurons that tell emoji apart: return the table, weights (N,D) and biases (N,)."""
    ids, number_at, plain = texts
    former = encoder.embeddings.token_embedding.weight.detach()
    rows = nn.Parameter(F.normalize(torch.randn(len(tokens), former.shape[1]), dim=1) * 1.2)
    weight, bias = nn.Parameter(0.02 * torch.randn(count, former.shape[1])), nn.Parameter(torch.full((count,), -4.0))
    rates = (LR_NEURONS, LR_NEURONS, LR_ROWS)
    groups = [{"params": [p], "lr": lr} for p, lr in zip((weight, bias, rows), rates, strict=True)]
    optimiser = torch.optim.Adam(groups, betas=(0.9, 0.99))
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimiser, list(rates), steps + 1, pct_start=0.1, cycle_momentum=False
    )
    for step in range(1, steps + 1):
        chosen, others = torch.randint(len(ids), (BATCH,)), torch.randint(len(plain), (PLAIN_BATCH,))
        numbers = torch.cat([number_at[chosen], torch.full_like(plain[others], -1)])
        table = former.index_copy(0, tokens, rows)
        response = first_layer(encoder, torch.cat([ids[chosen], plain[others]]), table)[1] @ weight.T + bias
        at = numbers >= 0
        at_its_neuron = response[at].gather(1, numbers[at][:, None])
        wrong = F.softplus(response + 1)
        at_emoji = wrong[at].scatter(1, numbers[at][:, None], 0.0).sum(1).mean()
        loss = 20 * F.softplus(2 - at_its_neuron).mean() + at_emoji + 20 * wrong[~at].sum(1).mean()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        schedule.step()
        if step % 50 == 0:
            right = (response[at].argmax(1) == numbers[at]).float().mean()
            print(f"step {step} of {steps}, loss {loss.item():.3f}, {right:.1%} told apart", flush=True)
    return former.index_copy(0, tokens, rows.detach()), weight.detach(), bias.detach()


def widened(encoder: CLIPTextModel, weight: Tensor, bias: Tensor, read: Tensor, missing: Tensor) -> CLIPTextModel:
    """Add neurons to the first layer, whose outputs for what they read (M,D) are what is missing (M,D): least squares.

    The other layers get as many neurons that do nothing: a CLIP has one width of MLPs.
    """
    state, count, before = encoder.state_dict(), len(weight), encoder.spec.mlp_width
    layer = encoder.encoder["layers"][0]  # type: ignore[index]
    activity = layer.mlp.activation(F.linear(read, weight, bias))
    output = torch.linalg.solve(activity.T @ activity + RIDGE * torch.eye(count), activity.T @ missing)
    wide = CLIPTextModel(replace(encoder.spec, mlp_width=before + count))
    for key, values in wide.state_dict().items():
        former = state[key]
        if values.shape != former.shape:
            values.zero_()
            values[tuple(slice(size) for size in former.shape)] = former
            state[key] = values
    first = "encoder.layers.0.mlp."
    state[f"{first}fc1.weight"][before:], state[f"{first}fc1.bias"][before:] = weight, bias
    state[f"{first}fc2.weight"][:, before:] = output.T
    wide.load_state_dict(state)
    return wide
