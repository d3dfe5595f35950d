"""Make tests/data/flux2.npz: what the original FLUX.2, diffusers' pipeline for [klein] and PEFT compute.

    pip install diffusers transformers peft einops
    git clone https://github.com/black-forest-labs/flux2
    PYTHONPATH=tests/fixtures python tests/goldens/make_flux2_goldens.py --originals .

The networks are the original's and diffusers' own classes in toy_flux2's sizes, in float32, with weights that
diffusers' keys decide, which are stored with their shapes; with a LoRA it is float64.  The original's code for [dev]
reads a guidance scale, whose weights are 0 here.  Whole runs are diffusers' Flux2KleinPipeline from prompts and
reference images to pixels, with guidance.  One block has the released width; every 48th channel of what it makes is
stored.
"""

import importlib
import tempfile
from pathlib import Path
from typing import Any

import diffusers
import torch
import toy
import toy_flux2
from diffusers.models.transformers import transformer_flux2
from family_goldens import in_original_layout, main, qwen3, shapes_of, tokenizer, with_lora
from making import Arrays, repository
from torch import Tensor, nn

from ldm_lite.models.flux import SingleStreamBlock
from ldm_lite.models.flux2 import KLEIN

SPEC, QWEN3 = toy_flux2.SPEC, toy_flux2.QWEN3
SIZES: dict[str, Any] = {
    "in_channels": SPEC.in_channels,
    "num_layers": SPEC.depth,
    "num_single_layers": SPEC.single_depth,
    "attention_head_dim": SPEC.width // SPEC.heads,
    "num_attention_heads": SPEC.heads,
    "joint_attention_dim": SPEC.context_dim,
    "mlp_ratio": SPEC.mlp_width / SPEC.width,
    "axes_dims_rope": SPEC.axes,
    "guidance_embeds": False,
}


def places(images: list[Tensor], num_text: int) -> tuple[Tensor, Tensor]:
    """The positions (N,4) of the tokens of the noised image and its references, and of the text (T,4)."""
    text = torch.zeros(num_text, 4)
    text[:, 3] = torch.arange(num_text)
    ids = [
        torch.cartesian_prod(torch.tensor([10 * i]), torch.arange(h), torch.arange(w), torch.arange(1)).float()
        for i, (h, w) in enumerate(image.shape[2:] for image in images)
    ]
    return torch.cat(ids), text


def tokens_of(images: list[Tensor]) -> Tensor:
    return torch.cat([image.flatten(2) for image in images], dim=2).transpose(1, 2)


def run(network: Any, with_references: bool, dtype: torch.dtype = torch.float32) -> Tensor:
    """What a transformer of diffusers or the original makes of toy_flux2's inputs, (2,16,3,5)."""
    x, t, context = toy_flux2.inputs()
    images = [x, *(toy_flux2.references().values() if with_references else ())]
    image_ids, text_ids = places(images, context.shape[1])
    tokens, context, t = (tensor.to(dtype) for tensor in (tokens_of(images), context, t))
    if isinstance(network, diffusers.Flux2Transformer2DModel):
        out = network(tokens, context, t, image_ids, text_ids, return_dict=False)[0]
    else:
        both = (coordinates.expand(2, -1, -1) for coordinates in (image_ids, text_ids))
        image_ids, text_ids = both
        out = network(tokens, image_ids, t, context, text_ids, torch.ones(2))
    return out[:, : x[0, 0].numel()].transpose(1, 2).unflatten(2, x.shape[2:])


def original(originals: Path, transformer: dict[str, Tensor], vae: dict[str, Tensor]) -> Arrays:
    """The original's networks with diffusers' weights."""
    with repository(originals / "flux2" / "src", ("flux2",)):
        model, autoencoder = (importlib.import_module(f"flux2.{name}") for name in ("model", "autoencoder"))
        params = model.Flux2Params(
            in_channels=SPEC.in_channels,
            context_in_dim=SPEC.context_dim,
            hidden_size=SPEC.width,
            num_heads=SPEC.heads,
            depth=SPEC.depth,
            depth_single_blocks=SPEC.single_depth,
            axes_dim=list(SPEC.axes),
            mlp_ratio=SPEC.mlp_width / SPEC.width,
        )
        network = model.Flux2(params).eval()
        nothing = {
            key: torch.zeros_like(value) for key, value in network.guidance_in.state_dict(prefix="guidance_in.").items()
        }
        network.load_state_dict(in_original_layout(transformer) | nothing, strict=True)
        sizes = autoencoder.AutoEncoderParams(ch=32, ch_mult=[1, 1, 1, 1], num_res_blocks=1, z_channels=4)
        ae = autoencoder.AutoEncoder(sizes).eval()
        ae.load_state_dict(toy_flux2.original_vae(in_original_layout(vae)), strict=True)
        pixels = torch.from_numpy(toy.photo(32, 48)).permute(2, 0, 1)[None].float() / 127.5 - 1
        arrays: Arrays = {"original": run(network, False), "original.references": run(network, True)}
        return arrays | {"encoded": ae.encode(pixels), "decoded": ae.decode(toy.normal(1, 1, 16, 2, 3))}


def pipeline(folder: Path) -> Any:
    """diffusers' pipeline."""
    vae = diffusers.AutoencoderKLFlux2(
        block_out_channels=(32,) * 4, layers_per_block=1, latent_channels=4, norm_num_groups=32
    )
    return diffusers.Flux2KleinPipeline(
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0, use_dynamic_shifting=True),
        vae=toy.fill(vae, "vae."),
        text_encoder=qwen3(QWEN3),
        tokenizer=tokenizer(toy_flux2.write_tokenizer(folder)),
        transformer=toy.fill(diffusers.Flux2Transformer2DModel(**SIZES), "transformer."),
    )


def of_diffusers() -> tuple[Arrays, dict[str, Any], Any]:
    """diffusers' networks and whole runs, with a LoRA too; the shapes by key of its networks; and its pipeline."""
    with tempfile.TemporaryDirectory() as folder:
        pipe = pipeline(Path(folder))
    shapes = shapes_of(pipe)
    arrays: Arrays = {"diffusers": run(pipe.transformer, False), "diffusers.references": run(pipe.transformer, True)}
    prompts = list(toy_flux2.PROMPTS)
    arrays["text"] = pipe.encode_prompt(prompts)[0][:, ::16].contiguous()
    for name, scale, images in (
        ("plain", 1.0, None),
        ("guided", toy_flux2.GUIDANCE, None),
        ("edited", toy_flux2.GUIDANCE, toy_flux2.pictures()),
    ):
        more = {"num_inference_steps": toy_flux2.STEPS, "guidance_scale": scale, "height": 32, "width": 48}
        more |= {"latents": toy.normal(1, 2, 16, 2, 3), "image": images}
        arrays[f"run.{name}"] = pipe(prompt=prompts, output_type="pt", **more).images
    return arrays, shapes, pipe


def wide_block() -> Arrays:
    """diffusers' single block at the released width, with the weights of ours."""
    block = transformer_flux2.Flux2SingleTransformerBlock(KLEIN.width, KLEIN.heads, 128, mlp_ratio=3.0)
    with torch.device("meta"):
        ours: Any = SingleStreamBlock(KLEIN)
        ours.modulation.lin = nn.Identity()
    values = toy.fill(ours.to_empty(device="cpu")).state_dict()
    names = {"linear1.weight": "attn.to_qkv_mlp_proj.weight", "linear2.weight": "attn.to_out.weight"}
    names |= {"norm.query_norm.scale": "attn.norm_q.weight", "norm.key_norm.scale": "attn.norm_k.weight"}
    block.load_state_dict({names[key]: value for key, value in values.items()}, strict=True)
    x, mods = toy.normal(1, 1, 12, KLEIN.width), toy.normal(2, 1, 3, KLEIN.width)
    image_ids, text_ids = places([torch.zeros(1, 1, 2, 4)], 4)
    rotation = transformer_flux2.Flux2PosEmbed(theta=2000, axes_dim=list(KLEIN.axes))(torch.cat([text_ids, image_ids]))
    out = block(x, None, mods.flatten(1)[:, None], rotation)
    return {"wide": out[..., ::48].contiguous()}


def make(originals: Path) -> tuple[Arrays, dict[str, Any]]:
    """All arrays, and the shapes."""
    arrays, shapes, pipe = of_diffusers()
    arrays |= original(originals, dict(pipe.transformer.state_dict()), dict(pipe.vae.state_dict()))
    return arrays | with_lora(pipe, shapes, lambda network, dtype: run(network, False, dtype)) | wide_block(), shapes


if __name__ == "__main__":
    main("flux2", "flux2", __doc__, make)
