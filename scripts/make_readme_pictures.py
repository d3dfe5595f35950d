"""Make the README's pictures with the bundled model: `python scripts/make_readme_pictures.py`.

docs/apple.png is what the README's first command makes, and what the next three seeds make; docs/img2img.png and
docs/inpaint.png are what its commands make of docs/circle.png and docs/mask.png, beside what they are made of.
"""

from pathlib import Path

from PIL import Image

import ldm_lite
from ldm_lite.cli.task_options import Img2imgOptions as Options
from ldm_lite.cli.task_options import InpaintOptions as InpaintOptions
from ldm_lite.cli.task_options import Txt2imgOptions as TextOptions
from ldm_lite.image import grid
from ldm_lite.tasks.img2img import img2img
from ldm_lite.tasks.inpaint import inpaint
from ldm_lite.tasks.txt2img import txt2img

DOCS = Path(__file__).parent.parent / "docs"


def main() -> None:
    """Write them."""
    pipe = ldm_lite.load(device="cpu")
    apples = txt2img(pipe, TextOptions(prompt="a red apple on a blue background", batch_size=4))
    grid([apple.image for apple in apples], columns=4).save(DOCS / "apple.png")
    circle, mask = (Image.open(DOCS / name) for name in ("circle.png", "mask.png"))
    options = Options(prompt="a red apple on a blue background", strength=0.6)
    [apple] = img2img(pipe, options, pictures=[circle])
    grid([circle, apple.image], columns=2).save(DOCS / "img2img.png")
    [half] = inpaint(pipe, InpaintOptions(prompt="a red apple on a yellow background"), pictures=[circle], masks=[mask])
    grid([circle, mask.convert("RGB"), half.image], columns=3).save(DOCS / "inpaint.png")


if __name__ == "__main__":
    main()
