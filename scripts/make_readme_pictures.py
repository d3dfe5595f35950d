"""Make images of the documentation with the bundled model: `python scripts/make_readme_pictures.py`.

docs/grid.png is one image for each prompt of PROMPTS.  docs/img2img.png and docs/inpaint.png are what the two tasks
make of docs/circle.png and docs/mask.png, beside what they start from.
"""

from pathlib import Path

from PIL import Image

import ldm_lite
from ldm_lite.image import grid

DOCS = Path(__file__).parent.parent / "docs"
PROMPTS = """a red apple on a blue background | a rocket on a yellow background | a cat on a green background
a red heart | a fox face on a green background | a snowman on a blue background | a sunflower on a purple background
a penguin on an orange background | a dolphin | a pizza on a white background | a house on a blue background
a strawberry on a green background | a lion on an orange background | a guitar on a white background | a butterfly
a cactus on a yellow background | a robot on a blue background | a panda on a red background"""


def main() -> None:
    """Write them."""
    pipe = ldm_lite.load(device="cpu")
    prompts = [prompt.strip() for line in PROMPTS.splitlines() for prompt in line.split("|")]
    grid(pipe.txt2img(prompts, seed=7, batch_size=6, steps=25), columns=9).save(DOCS / "grid.png", optimize=True)
    circle, mask = (Image.open(DOCS / name) for name in ("circle.png", "mask.png"))
    [apple] = pipe.img2img("a red apple on a blue background", circle, strength=0.6)
    grid([circle, apple], columns=2).save(DOCS / "img2img.png")
    [half] = pipe.inpaint("a red apple on a yellow background", circle, mask)
    grid([circle, mask.convert("RGB"), half], columns=3).save(DOCS / "inpaint.png")


if __name__ == "__main__":
    main()
