"""Make tests/data/bundled.npz: what diffusers and transformers compute with the weights of the bundled model.

    pip install diffusers transformers
    PYTHONPATH=tests/fixtures:scripts python tests/goldens/make_bundled_goldens.py

To be run again whenever the bundled model changes.  Everything is in float32; runs have guidance.
"""

import sys
from pathlib import Path

import diffusers
import numpy as np
import peers
import torch
import transformers
from render_emoji import render
from torch import Tensor

import ldm_lite
from ldm_lite.checkpoint.reader import open_checkpoint, parts_of
from ldm_lite.core import files

PATH = Path(__file__).resolve().parents[1] / "data" / "bundled.npz"
PROMPTS = ("a red apple on a blue background", "a cat on a yellow background")
TIMESTEPS = (981, 501, 1)
RUNS = (("ddim", 20, 2.5), ("ddim", 50, 5.0))


def scenes() -> Tensor:
    """Two images (2,3,128,128) in [-1,1] that the autoencoder knows."""
    images = [np.array(render(emoji, colour, 128)) for emoji, colour in (("🍎", "blue"), ("🐱", "yellow"))]
    return torch.from_numpy(np.stack(images)).permute(0, 3, 1, 2).float() / 127.5 - 1


@torch.no_grad()
def main() -> None:
    """Write the file."""
    family = ldm_lite.load(device="cpu").family
    file = parts_of(open_checkpoint(files.bundled())).file
    weights = {key: file.read(key).float() for key in file.shapes}
    tokenizer = ldm_lite.load(device="cpu").tokenizer  # has goldens of its own
    text, unet, vae = (build(family, weights) for build in (peers.text_encoder, peers.unet, peers.vae))
    ids, empty = tokenizer(list(PROMPTS)), tokenizer([""] * len(PROMPTS))
    context, uncond = (text(tokens).last_hidden_state for tokens in (ids, empty))
    noise = torch.randn(len(PROMPTS), family.unet.in_channels, 16, 16, generator=torch.Generator().manual_seed(0))
    arrays: dict[str, Tensor] = {"context": context, "uncond": uncond, "noise": noise, "image": scenes()}
    for t in TIMESTEPS:
        arrays[f"unet_{t}"] = unet(noise, torch.full((len(PROMPTS),), t), context).sample
    for name, steps, scale in RUNS:
        scheduler = peers.schedulers(family)[name]()
        arrays[f"{name}_{steps}_{scale}"] = peers.sample(unet, scheduler, noise, context, uncond, steps, scale)
    arrays["pixels"] = vae.decode(arrays["ddim_20_2.5"] / family.scale_factor).sample
    posterior = vae.encode(arrays["image"]).latent_dist
    arrays["moments"] = torch.cat([posterior.mean, posterior.logvar], dim=1)
    made_by = f"diffusers {diffusers.__version__}, transformers {transformers.__version__}, torch {torch.__version__}"
    np.savez_compressed(PATH, prompts=np.array(PROMPTS), made_by=made_by, **{k: v.numpy() for k, v in arrays.items()})
    print(f"{PATH}: {PATH.stat().st_size} bytes")


if __name__ == "__main__":
    sys.exit(main())
