"""Prompts in A1111's syntax: chunks of tokens with weights, and the weights' effect on a text encoder's output.

Shape letters: B prompts, K chunks of T tokens each, D width of the context.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from ldm_lite.text.prompt import STOP, parse
from ldm_lite.text.tokenizer import TextTokenizer, check_length

MAX_CARRIED = 20  # tokens after the last comma that may move to the next chunk
MOST_CHUNKS = 100


def filled(tokenizer: TextTokenizer, texts: Sequence[str], num_chunks: int) -> tuple[Tensor, Tensor]:
    """Return token ids (B*K,T) int64 and weights (B*K,T) float32 of B prompts, in num_chunks chunks each or more.

    Raises ValueError for text that the tokenizer refuses, and for more than MOST_CHUNKS.
    """
    divided = [divide(tokenizer, text) for text in texts]
    num_chunks = max(num_chunks, *map(len, divided))
    ids, weights = list[list[int]](), list[list[float]]()
    for chunk in (chunk for chunks in divided for chunk in chunks + [[]] * (num_chunks - len(chunks))):
        padding = tokenizer.room - len(chunk)
        row = [*tokenizer.before, *(token for token, _ in chunk), *tokenizer.after]
        ids.append(row + [tokenizer.pad_id] * padding)
        row_weights = [*[1.0] * len(tokenizer.before), *(weight for _, weight in chunk)]
        weights.append(row_weights + [1.0] * (tokenizer.length - len(row_weights)))
    return torch.tensor(ids, device="cpu"), torch.tensor(weights, dtype=torch.float32, device="cpu")


def divide(tokenizer: TextTokenizer, text: str) -> list[list[tuple[int, float]]]:
    """Divide a prompt in A1111's syntax into chunks of tokens with their weights.

    A full chunk ends at its last comma if that is among its last 20 tokens.  The vectors of an embedding stay together:
    where they do not fit, a chunk starts with them.
    """
    check_length(text)
    room, comma = tokenizer.room, tokenizer.encode(",")[0]
    full: list[list[tuple[int, float]]] = [[]]
    for piece in parse(text):
        if piece is STOP:
            full.append([])
            continue
        for tokens, _ in tokenizer.units(tokenizer.clean(piece[0])):
            if len(chunk := full[-1]) == room:
                last = max((i for i, (token, _) in enumerate(chunk) if token == comma), default=-1)
                moves = tokens != (comma,) and last >= 0 and room - last <= MAX_CARRIED
                full.append(chunk[last + 1 :] if moves else [])
                del chunk[last + 1 if moves else room :]
            if len(full[-1]) + len(tokens) > room:  # an embedding that does not fit
                full.append([])
            full[-1] += [(token, piece[1]) for token in tokens]
    if not full[-1] and len(full) > 1:
        full.pop()  # nothing came after the last BREAK
    if len(full) > MOST_CHUNKS:
        raise ValueError(f"got a prompt of {len(full)} chunks of {room} tokens, expected at most {MOST_CHUNKS}")
    return full


def with_token_weights(context: Tensor, weights: Tensor) -> Tensor:
    """Multiply contexts (n,T,D) by their tokens' weights (n,T), then restore the mean of each."""
    if bool((weights == 1).all()):
        return context
    scaled = context.float() * weights.to(context.device)[:, :, None]
    mean, new = (x.float().mean(dim=(1, 2), keepdim=True) for x in (context, scaled))
    return (scaled * (mean / new)).to(context.dtype)
