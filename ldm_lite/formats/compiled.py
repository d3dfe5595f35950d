"""The prefixes that torch.compile and DataParallel add to the keys of a network."""

from ldm_lite.core.files import Tensors


def plain(tensors: Tensors) -> Tensors:
    """Return a view without it."""
    return tensors.renamed({key.replace("_orig_mod.", "").removeprefix("module."): key for key in tensors})
