"""Make tests/data/gguf.npz: blocks of every format of GGUF, and what they are worth by ggml's own Python package.

    pip install gguf
    python tests/goldens/make_gguf_goldens.py

Blocks are random bytes, with sensible float16 scales.  The values are those of gguf.quants.dequantize.
"""

from importlib.metadata import version
from pathlib import Path

import gguf
import numpy as np
from gguf.quants import dequantize

OUT = Path(__file__).resolve().parents[1] / "data" / "gguf.npz"
SCALES = {  # where a block has float16 scales
    **{"Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "Q8_0": (0,), "IQ4_NL": (0,), "IQ4_XS": (0,)},
    **{"Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "BF16": ()},
}


def main() -> None:
    """Write the goldens."""
    arrays = {}
    for name, places in SCALES.items():
        kind = gguf.GGMLQuantizationType[name]
        values, size = gguf.GGML_QUANT_SIZES[kind]
        random = np.random.Generator(np.random.PCG64(len(arrays)))
        blocks = random.integers(0, 256, (2 if values == 256 else 8, size), dtype=np.uint8)
        for place in places:
            scale = random.uniform(-0.02, 0.02, len(blocks)).astype(np.float16)
            blocks[:, place : place + 2] = scale.view(np.uint8).reshape(-1, 2)
        if name == "BF16":
            blocks = np.ascontiguousarray(
                random.standard_normal(8).astype(np.float32).view(np.uint8).reshape(8, 4)[:, 2:]
            )
        arrays[f"{name}/bytes"] = blocks
        arrays[f"{name}/values"] = dequantize(blocks, kind).astype(np.float32).reshape(len(blocks), values)
    np.savez_compressed(OUT, made_with=np.array(f"gguf {version('gguf')}"), **arrays)
    print(f"{OUT}: {len(SCALES)} formats, {OUT.stat().st_size} bytes")


if __name__ == "__main__":
    main()
