"""ESRGAN's own files (4x-UltraSharp.pth), by the names of BasicSR's."""

import re

from ldm_lite.core.files import Tensors


def as_basicsr(tensors: Tensors) -> Tensors:
    """Return a view with the keys of BasicSR's files."""
    blocks = max(int(match[1]) for key in tensors if (match := re.match(r"model\.1\.sub\.(\d+)\.", key)))
    names = {"0": "conv_first", f"1.sub.{blocks}": "conv_body", "3": "conv_up1", "6": "conv_up2", "8": "conv_hr"}
    names["10"] = "conv_last"
    renamed = {}
    for key in tensors:
        module, _, kind = key.removeprefix("model.").rpartition(".")
        block = re.sub(r"^1\.sub\.(\d+)\.RDB(\d)\.conv(\d)\.0$", r"body.\1.rdb\2.conv\3", module)
        renamed[f"{names.get(module, block)}.{kind}"] = key
    return tensors.renamed(renamed)
