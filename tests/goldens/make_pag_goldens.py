"""Make tests/data/pag.npz: perturbed-attention guidance by diffusers on the bundled model's weights.

    pip install diffusers
    python tests/goldens/make_pag_goldens.py

To be run again whenever the bundled model changes.  Ten steps of DDIM in float32, with and without guidance: its
attention processor and mixing, our noise and texts.
"""

import types
from pathlib import Path

import numpy as np
import torch
from diffusers import DDIMScheduler, UNet2DConditionModel
from diffusers.loaders.single_file_utils import convert_ldm_unet_checkpoint
from diffusers.models.attention_processor import PAGCFGIdentitySelfAttnProcessor2_0
from diffusers.pipelines.pag.pag_utils import PAGMixin

import ldm_lite

PATH = Path(__file__).resolve().parents[1] / "data" / "pag.npz"
STEPS, SEED, PAG_SCALE = 10, 3, 3.0


@torch.no_grad()
def main() -> None:
    """Write the file."""
    pipe = ldm_lite.load(kernels="plain", dtype="fp32", device="cpu")
    unet = UNet2DConditionModel(
        sample_size=16,
        in_channels=16,
        out_channels=16,
        block_out_channels=(96, 192),
        layers_per_block=1,
        down_block_types=("CrossAttnDownBlock2D",) * 2,
        up_block_types=("CrossAttnUpBlock2D",) * 2,
        attention_head_dim=4,
        cross_attention_dim=112,
    ).eval()
    state = {f"model.diffusion_model.{key}": value for key, value in pipe.unet.state_dict().items()}
    unet.load_state_dict(convert_ldm_unet_checkpoint(state, dict(unet.config)))
    perturbed = {name for name in unet.attn_processors if "mid_block" in name and "attn1" in name}
    changed = {name: PAGCFGIdentitySelfAttnProcessor2_0() for name in perturbed}
    unet.set_attn_processor(unet.attn_processors | changed)
    betas = 1 - pipe.schedule.alpha_bar / [1, *pipe.schedule.alpha_bar[:-1]]
    rules = {"clip_sample": False, "set_alpha_to_one": False, "steps_offset": 1}
    scheduler = DDIMScheduler(trained_betas=betas, prediction_type="v_prediction", **rules)
    mix = types.SimpleNamespace(do_pag_adaptive_scaling=False, pag_scale=PAG_SCALE)
    mix._get_pag_scale = types.MethodType(PAGMixin._get_pag_scale, mix)
    cond = pipe.encode_prompt("a red apple")["context"]
    uncond = pipe.encode_prompt("", negative=True)["context"]
    latents = {}
    for scale in (2.5, 1.0):
        scheduler.set_timesteps(STEPS)
        x = pipe.noise(SEED)
        for t in scheduler.timesteps:
            out = unet(torch.cat([x] * 3), t, torch.cat([uncond, cond, cond])).sample
            out = out if scale != 1 else out[1:]
            out = PAGMixin._apply_perturbed_attention_guidance(mix, out, scale != 1, scale, t)
            x = scheduler.step(out, t, x).prev_sample
        latents[f"scale {scale:g}"] = x.numpy()
    np.savez_compressed(PATH, **latents)


if __name__ == "__main__":
    main()
