"""Make the README's pictures with the bundled model: `python scripts/make_readme_pictures.py`.

docs/img2img.png and docs/inpaint.png are what the README's commands make of docs/circle.png and docs/mask.png, beside
what they are made of.
"""

from pathlib import Path

from PIL import Image

import ldm_lite
from ldm_lite.image import grid
from ldm_lite.img2img import Options, img2img
from ldm_lite.inpaint import Options as InpaintOptions
from ldm_lite.inpaint import inpaint

DOCS = Path(__file__).parent.parent / "docs"


def main() -> None:
    """Write them."""
    pipe = ldm_lite.load(device="cpu")
    circle, mask = (Image.open(DOCS / name) for name in ("circle.png", "mask.png"))
    options = Options(prompt="a red apple on a blue background", strength=0.6)
    [apple] = img2img(pipe, options, pictures=[circle])
    grid([circle, apple.image], columns=2).save(DOCS / "img2img.png")
    [half] = inpaint(pipe, InpaintOptions(prompt="a red apple on a yellow background"), pictures=[circle], masks=[mask])
    grid([circle, mask.convert("RGB"), half.image], columns=3).save(DOCS / "inpaint.png")


if __name__ == "__main__":
    main()
