"""Make tests/data/redux.npz: FLUX.1 Redux by diffusers and transformers, in miniature: tokens, and a run with them.

    pip install diffusers transformers
    PYTHONPATH=tests/fixtures python tests/goldens/make_redux_goldens.py

The image encoder and the two linears have the weights of toy_flow.redux(); the transformer is toy_flow's flux_dev with
those of make_transformer_goldens.py.
"""

import diffusers
import numpy as np
import torch
import toy
import toy_flow
import transformers
from make_transformer_goldens import flux_pipeline, pack, unpack
from making import DATA, made_with, write
from PIL import Image
from torch import Tensor
from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil


def tokens() -> Tensor:
    """The tokens (1,16,32) of toy's photo, which is not square, by the pipeline before FLUX.1's."""
    spec, redux = toy_flow.SIGLIP, toy_flow.REDUX
    config = transformers.SiglipVisionConfig(
        hidden_size=spec.width,
        intermediate_size=spec.mlp_width,
        num_hidden_layers=spec.layers,
        num_attention_heads=spec.heads,
        image_size=spec.size,
        patch_size=spec.patch,
        vision_use_head=False,
    )
    encoder = transformers.SiglipVisionModel(config)
    keys = {key.removeprefix("vision_model."): key for key in encoder.state_dict()}
    weights = toy_flow.siglip()
    assert keys.keys() == weights.keys()
    encoder.load_state_dict({keys[key]: value for key, value in weights.items()})
    embedder = diffusers.pipelines.flux.modeling_flux.ReduxImageEncoder(redux.width, redux.context_dim)
    embedder.load_state_dict(toy_flow.redux())
    processor = SiglipImageProcessorPil(size={"height": spec.size, "width": spec.size})
    pipe = diffusers.FluxPriorReduxPipeline(encoder.eval(), processor, embedder.eval())
    states = pipe.encode_image(Image.fromarray(toy.photo(48, 72)), torch.device("cpu"), 1)
    return pipe.image_embedder(states).image_embeds


def run(image: Tensor) -> Tensor:
    """The last latents (2,4,6,10) of a run of FLUX.1 dev that reads the tokens after the text."""
    spec = toy_flow.FLUX
    pipe = flux_pipeline(diffusers.FluxPipeline, spec)
    pipe.set_progress_bar_config(disable=True)
    x, _, context, y = toy_flow.run_inputs(spec)
    latents = pipe(
        prompt_embeds=torch.cat([context, image.expand(len(context), -1, -1)], dim=1),
        pooled_prompt_embeds=y,
        latents=pack(x),
        height=8 * x.shape[2],
        width=8 * x.shape[3],
        num_inference_steps=toy_flow.STEPS,
        guidance_scale=toy_flow.SCALE,
        output_type="latent",
    ).images
    return unpack(latents, x)


def main() -> None:
    """Make both."""
    about = made_with((torch, np, diffusers, transformers))
    with torch.no_grad():
        image = tokens()
        write(DATA / "redux.npz", {"tokens": image, "run": run(image)}, torch.float32, about)


if __name__ == "__main__":
    main()
