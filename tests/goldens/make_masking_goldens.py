"""Write tests/data/masking.npz: how AUTOMATIC1111's web UI inpaints "only masked", and fills what is masked.

Needs stable-diffusion-webui 1.10 and Pillow (made with 13.0):

    python tests/goldens/make_masking_goldens.py path/to/stable-diffusion-webui
"""

import ast
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from PIL import Image

OUT = Path(__file__).parent.parent / "data" / "masking.npz"
SIZES = [(64, 64), (96, 64), (40, 72), (64, 16)]


def modules(folder: Path) -> tuple[Any, Any]:
    """masking.py, and resize_image of images.py, which imports what it does not need here."""
    masking: dict[str, Any] = {}
    exec((folder / "modules" / "masking.py").read_text(), masking)
    source = (folder / "modules" / "images.py").read_text()
    [function] = [node for node in ast.parse(source).body if getattr(node, "name", "") == "resize_image"]
    images = {"Image": Image, "LANCZOS": Image.Resampling.LANCZOS, "opts": SimpleNamespace(upscaler_for_img2img=None)}
    exec(compile(ast.Module([function], []), "images.py", "exec"), images)
    return SimpleNamespace(**masking), images["resize_image"]


if __name__ == "__main__":
    masking, resize_image = modules(Path(sys.argv[1]))
    rng = np.random.default_rng(24)
    image = Image.fromarray(rng.integers(0, 255, (10, 13, 3), np.uint8)).resize((65, 50), Image.Resampling.BICUBIC)
    arrays: dict[str, Any] = {"image": np.asarray(image), "sizes": SIZES}
    boxes, areas = [], []
    for _ in range(60):
        left, top = rng.integers(0, 60), rng.integers(0, 45)
        boxes.append([left, top, rng.integers(left + 1, 66), rng.integers(top + 1, 51), rng.integers(0, 12)])
        mask = Image.new("L", image.size)
        mask.paste(255, tuple(int(edge) for edge in boxes[-1][:4]))
        region = masking.get_crop_region_v2(mask, int(boxes[-1][4]))
        areas.append([masking.expand_crop_region(region, *size, *image.size) for size in SIZES])
    mask = Image.new("L", image.size)
    mask.paste(255, (20, 12, 41, 37))
    arrays |= {"boxes": boxes, "areas": areas, "filled": np.asarray(masking.fill(image, mask))}
    for i, size in enumerate(SIZES):
        arrays[f"fitted_{i}"] = np.asarray(resize_image(2, image, *size))
        arrays[f"covering_{i}"] = np.asarray(resize_image(1, image, *size))
    np.savez_compressed(OUT, **arrays)
