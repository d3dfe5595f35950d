"""Compare ControlNets with diffusers' at full size, with random weights: those of make_diffusers_goldens.CONTROLS.

    python scripts/check_control_size.py sd15 sd21 sdxl_mid sdxl_small    # sdxl too: 11 GB of memory, 5 of disk

Each is saved as diffusers saves it, as a folder, and loaded as --control loads it.  Prints the largest relative error
|ours - theirs| / |theirs| of what is added to the UNet, in float32 at 128 pixels; exits 1 if one exceeds 1e-5.
`pip install diffusers transformers`.
"""

import argparse
import sys
import tempfile
from types import SimpleNamespace
from typing import Any

import torch
import toy
from make_diffusers_goldens import CONTROLS, controlnet
from torch import Tensor

from ldm_lite.checkpoint.reader import on_meta
from ldm_lite.control.control import Request, load_controls
from ldm_lite.models.ops import timestep_embedding
from ldm_lite.models.unet import UNet
from ldm_lite.zoo.families import FAMILIES


def error(name: str) -> float:
    """The largest of a net's relative errors."""
    family = FAMILIES[{"sd15": "sd1", "sd21": "sd2"}.get(name, "sdxl_base")]
    theirs = controlnet(CONTROLS[name]).eval()
    for parameter in theirs.parameters():
        if not parameter.any():  # as the convolutions that a new one ends with
            parameter.normal_(std=0.02)
    with on_meta():
        unet = UNet(family.unet)
    pipe: Any = SimpleNamespace(
        unet=unet, family=family, device=torch.device("cpu"), dtype=torch.float32, offloader=None
    )
    x, context, _ = toy.unet_inputs(family.unet, h=16, w=16)
    sizes, pooled = torch.tensor([[128.0, 128, 0, 0, 128, 128]] * 2), toy.normal(3, 2, 1280)
    y = torch.cat([pooled, timestep_embedding(sizes.flatten(), 256).view(2, -1)], dim=1)
    picture = toy.picture(h=128, w=128)
    given = {"text_embeds": pooled, "time_ids": sizes}
    down, middle = theirs(x, toy.T, context, picture.expand(2, -1, -1, -1), added_cond_kwargs=given, return_dict=False)
    with tempfile.TemporaryDirectory() as folder:
        theirs.save_pretrained(folder)
        del theirs
        [control] = load_controls(pipe, [Request(folder, "")])
        net: Any = control.network
        ours: tuple[Tensor, ...] = net(x, toy.T, context, net.embed_hint(picture), y)
        return max(toy.relative_error(a, b.numpy()) for a, b in zip(ours, [*down, middle], strict=True))


@torch.no_grad()
def main() -> int:
    """The command line -> exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="+", choices=CONTROLS)
    torch.manual_seed(0)
    errors = []
    for name in parser.parse_args().names:
        errors.append(error(name))
        print(f"{name:12} {errors[-1]:.1e}  (limit 1e-05)", flush=True)
    return int(max(errors) > 1e-5)


if __name__ == "__main__":
    sys.exit(main())
