"""Make tests/data/kontext.npz: whole runs of FLUX.1 Kontext by diffusers, in miniature, and the sizes that it prefers.

    pip install diffusers transformers
    PYTHONPATH=tests/fixtures python tests/goldens/make_kontext_goldens.py

The network is toy_flow's flux_dev with the weights of make_transformer_goldens.py; the latents of the image that is
edited are given, those of the result are stored.
"""

import diffusers
import numpy as np
import torch
import toy_flow
from diffusers.pipelines.flux.pipeline_flux_kontext import PREFERRED_KONTEXT_RESOLUTIONS
from make_transformer_goldens import flux_pipeline, pack, unpack
from making import DATA, made_with, write


def main() -> None:
    """Run the pipeline."""
    spec = toy_flow.FLUX
    pipe = flux_pipeline(diffusers.FluxKontextPipeline, spec)
    x, _, context, y = toy_flow.run_inputs(spec)
    with torch.no_grad():
        out = pipe(
            image=toy_flow.reference(spec),
            prompt_embeds=context,
            pooled_prompt_embeds=y,
            height=8 * x.shape[2],
            width=8 * x.shape[3],
            max_area=64 * x.shape[2] * x.shape[3],
            latents=pack(x),
            num_inference_steps=toy_flow.STEPS,
            guidance_scale=toy_flow.SCALE,
            output_type="latent",
        ).images
    about = made_with((torch, diffusers))
    write(
        DATA / "kontext.npz",
        {"run": unpack(out, x)},
        torch.float32,
        about,
        sizes=np.array(PREFERRED_KONTEXT_RESOLUTIONS),
    )


if __name__ == "__main__":
    main()
