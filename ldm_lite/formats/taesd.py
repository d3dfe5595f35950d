"""TAESD's files, whose keys are bare numbers, or in diffusers' `layers.`: as one network of encoder and decoder.

The original has two files, taesd_encoder.pth and taesd_decoder.pth; the other one is taken from the same folder.
"""

import logging
import re

from ldm_lite.checkpoint.reader import joined, open_checkpoint
from ldm_lite.core.files import Tensors

log = logging.getLogger("ldm_lite")

OTHER = {"decoder": "encoder", "encoder": "decoder"}


def whole(tensors: Tensors) -> Tensors | None:
    """Return a view with the keys `encoder.` and `decoder.`, with the other half of the network if there is one."""
    view = _named(tensors)
    half = None if view is None else _half(view)
    if view is None or half is None:
        return view
    beside = tensors.path.with_name(tensors.path.name.replace(half, OTHER[half]))
    if beside == tensors.path or not beside.is_file():
        return view
    second_half = _named(open_checkpoint(beside))
    if second_half is None or _half(second_half) != OTHER[half]:
        return view
    log.info("%s: taken together with %s", tensors.path.name, beside.name)
    places = {key: (part, key) for part in (view, second_half) for key in part}
    return joined(tensors.path, places, tensors.metadata)


def _named(tensors: Tensors) -> Tensors | None:
    """Return a view with the keys `encoder.` and `decoder.`; None for another network."""
    if {"1.weight", "19.weight"} <= tensors.shapes.keys():
        return tensors.renamed({f"decoder.{key}": key for key in tensors})
    if {"0.weight", "1.conv.0.weight"} <= tensors.shapes.keys():
        return tensors.renamed({f"encoder.{key}": key for key in tensors})
    if {"decoder.layers.0.weight", "encoder.layers.0.weight"} & tensors.shapes.keys():
        # diffusers' decoder starts after the clamp, which the original counts
        pattern = re.compile(r"^(encoder|decoder)\.layers\.(\d+)\.")
        return tensors.renamed(
            {pattern.sub(lambda m: f"{m[1]}.{int(m[2]) + (m[1] == 'decoder')}.", key): key for key in tensors}
        )
    return None


def _half(tensors: Tensors) -> str | None:
    """Which half of a network a file holds; None for both."""
    halves = {key.partition(".")[0] for key in tensors}
    return halves.pop() if len(halves) == 1 else None
