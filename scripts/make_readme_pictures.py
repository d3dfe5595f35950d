"""Make images of the documentation with the bundled model: `python scripts/make_readme_pictures.py`.

docs/grid.png is one image for each prompt of PROMPTS.  docs/img2img.png and docs/inpaint.png show the two tasks
with docs/circle.png and docs/mask.png, inputs first. Those of PLOTS are made by the commands beside them in
docs/images.md.
"""

import shlex
import tempfile
from pathlib import Path

from PIL import Image

import ldm_lite
from ldm_lite import img2img, txt2img
from ldm_lite.image import grid

DOCS = Path(__file__).parent.parent / "docs"
PROMPTS = """a red apple on a blue background | a rocket, 3d | a cat and a dog on a yellow background
three strawberries | a panda on a pink background, 3d | a purple sailboat on a lime background
a fox on a gradient from purple to pink | a small star on a navy background | a snowman above a christmas tree
two penguins on an orange background | a red heart, 3d | an octopus on a cyan background
a hamburger to the left of french fries, 3d | a sunflower on a teal background
a house, background from blue to orange | a huge robot on a gray background, 3d
a guitar on a green background | a dolphin on a lavender background, 3d"""
PLOTS = {  # a picture, and the arguments that make it
    "scale.png": 'txt2img "a panda on a pink background" --x scale=1,2.5,6 --y steps=5,20 --seed 7',
    "sampler.png": 'txt2img "a rocket, 3d" --x sampler=ddim,euler_a,dpmpp_2m --y steps=4,12 --seed 7',
    "strength.png": (
        'img2img "a red apple on a blue background" --init-img docs/circle.png --x strength=0.3,0.5,0.7,0.9'
    ),
    "sizes.png": 'txt2img "a red apple on a blue background" --x width=96,128,160,192 --seed 7',
}


def main() -> None:
    """Write them."""
    pipe = ldm_lite.load(device="cpu")
    prompts = [prompt.strip() for line in PROMPTS.splitlines() for prompt in line.split("|")]
    grid(pipe.txt2img(prompts, seed=7, batch_size=6), columns=9).save(DOCS / "grid.png", optimize=True)
    circle, mask = (Image.open(DOCS / name) for name in ("circle.png", "mask.png"))
    [apple] = pipe.img2img("a red apple on a blue background", circle, strength=0.6)
    grid([circle, apple], columns=2).save(DOCS / "img2img.png")
    [half] = pipe.inpaint("a red apple on a yellow background", circle, mask)
    grid([circle, mask.convert("RGB"), half], columns=3).save(DOCS / "inpaint.png")
    for name, line in PLOTS.items():
        command, *arguments = shlex.split(line.replace("docs/", f"{DOCS}/"))
        with tempfile.TemporaryDirectory() as folder:
            {"txt2img": txt2img, "img2img": img2img}[command].main([*arguments, "--device", "cpu", "--out", folder])
            with Image.open(Path(folder) / "grid-0000.png") as image:
                image.convert("RGB").save(DOCS / name, optimize=True)


if __name__ == "__main__":
    main()
