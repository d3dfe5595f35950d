"""Compare img2img, inpaint and InstructPix2Pix runs with diffusers' pipelines at full Stable Diffusion size.

    python tests/fixtures/random_checkpoint.py sd1.safetensors  # --family sd1_inpaint or instruct_pix2pix for those
    python scripts/check_pictures.py sd1.safetensors  # --size 256 --steps 10

Prints the relative error |ours - theirs| / |theirs| of the last latents in float32; exits 1 if one exceeds 1e-4.
`pip install diffusers transformers`; 9 GB of memory.
"""

import argparse
import sys
import time
from pathlib import Path

import torch
import toy
from make_picture_goldens import from_diffusers
from PIL import Image
from safetensors.torch import load_file

import ldm_lite
from ldm_lite.cli.task_options import Img2imgOptions as Options
from ldm_lite.cli.task_options import InpaintOptions as InpaintOptions
from ldm_lite.tasks.img2img import img2img
from ldm_lite.tasks.inpaint import inpaint

# The runs of a checkpoint, by its task: strengths that leave diffusers' order of noise as ours.
RUNS = {
    "txt2img": {"img2img": 0.6, "inpaint": 0.9},
    "inpaint": {"inpaint": 1.0},
    "instruct": {"img2img": 1.0},
}


def main() -> int:
    """The command line -> exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", type=Path, help="a .safetensors checkpoint of Stable Diffusion 1.x")
    parser.add_argument("--size", type=int, default=256, help="pixels a side")
    parser.add_argument("--steps", type=int, default=10)
    args = parser.parse_args()
    pipe, failed = ldm_lite.load(args.path, device="cpu", dtype="fp32"), False
    print(pipe.description, flush=True)
    picture, mask = toy.waves(args.size), toy.mask(args.size)
    context, uncond = toy.embeddings(pipe.family.unet.context_dim)
    for command, strength in RUNS[pipe.family.task].items():
        run, start = toy.PictureRun(pipe.family.task, command, strength, steps=args.steps), time.perf_counter()
        theirs = from_diffusers(run, pipe.family, load_file(args.path), args.size)
        latents = []
        given = {"context": context, "uncond": uncond, "pictures": [Image.fromarray(picture)]}
        given["on_step"] = lambda step, num_steps, x, latents=latents: latents.append(x)
        settings = {"steps": run.steps, "scale": 5.0, "strength": strength, "sampler": "ddim"}
        if command == "inpaint":
            list(inpaint(pipe, InpaintOptions(**settings), masks=[Image.fromarray(mask)], **given))
        else:
            list(img2img(pipe, Options(**settings), **given))
        ours = latents[-1]
        if command == "inpaint" and pipe.family.task == "txt2img":  # where it is kept, diffusers' last step takes it
            repainted = torch.from_numpy(mask[4::8, 4::8] > 0)
            ours, theirs = ours[:, :, repainted], theirs[:, :, repainted]
        error = float((ours - theirs).norm() / theirs.norm())
        seconds = time.perf_counter() - start
        print(f"{args.steps} steps of {command:8} {error:.2e}  (limit 1e-04)  {seconds:.0f} s", flush=True)
        failed |= not error <= 1e-4
    return failed


if __name__ == "__main__":
    with torch.no_grad():
        sys.exit(main())
