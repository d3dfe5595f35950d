"""Make tests/data/chroma.npz: what the original Chroma1, diffusers' pipeline and PEFT compute.

    pip install diffusers transformers peft sentencepiece einops
    git clone https://github.com/lodestone-rock/flow
    PYTHONPATH=tests/fixtures python tests/goldens/make_chroma_goldens.py --originals .

The networks are the original's and diffusers' own classes in toy_chroma's sizes, in float32, with weights that
diffusers' keys decide, which are stored with their shapes; with a LoRA it is float64.  The whole run is diffusers'
ChromaPipeline from prompts to pixels, with guidance.  It gives the mask of the text to the network as numbers, which
PyTorch adds to the scores, in place of truth values, which hide the padding: here it is given those, as in the
original.  One block has the released width; of its output every 48th channel is stored.
"""

import importlib
from pathlib import Path
from typing import Any, cast
from unittest import mock

import diffusers
import torch
import toy
import toy_chroma
import transformers
from diffusers.models.transformers import transformer_chroma
from diffusers.models.transformers.transformer_flux import FluxPosEmbed
from family_goldens import autoencoder, in_original_layout, main, shapes_of, with_lora
from make_transformer_goldens import ids, pack, unpack
from making import Arrays, repository
from random_checkpoint import random_tensor
from sentencepiece import SentencePieceProcessor
from torch import Tensor, nn
from torch.nn import functional as F

from ldm_lite.models.chroma import CHROMA
from ldm_lite.models.flux import SingleStreamBlock

SPEC, T5 = toy_chroma.SPEC, toy_chroma.T5
SIZES: dict[str, Any] = {
    "in_channels": 4 * SPEC.in_channels,
    "num_layers": SPEC.depth,
    "num_single_layers": SPEC.single_depth,
    "attention_head_dim": SPEC.width // SPEC.heads,
    "num_attention_heads": SPEC.heads,
    "joint_attention_dim": SPEC.context_dim,
    "axes_dims_rope": SPEC.axes,
    "approximator_num_channels": SPEC.sinusoids,
    "approximator_hidden_dim": SPEC.approximator_width,
    "approximator_layers": SPEC.approximator_depth,
}


def run(network: nn.Module, dtype: torch.dtype = torch.float32) -> Tensor:
    """What diffusers' transformer makes of toy_chroma's inputs, (2,4,6,10)."""
    x, t, context, y = toy_chroma.inputs()
    image_ids, text_ids = ids(x, context)
    mask = F.pad(torch.arange(context.shape[1]) < y, (0, len(image_ids)), value=True)
    tokens = pack(x).to(dtype)
    more = {"img_ids": image_ids, "txt_ids": text_ids, "attention_mask": mask, "return_dict": False}
    return unpack(network(tokens, context.to(dtype), t.to(dtype), **more)[0], x)


def original(originals: Path, stored: dict[str, Tensor]) -> Arrays:
    """The original's transformer with diffusers' weights; its mask is made for one image."""
    packages = ("src", "src.models", "src.models.chroma", "src.models.chroma.module")
    with repository(originals / "flow", packages):
        model = importlib.import_module("src.models.chroma.model")
        params = model.ChromaParams(
            in_channels=4 * SPEC.in_channels,
            context_in_dim=SPEC.context_dim,
            hidden_size=SPEC.width,
            mlp_ratio=SPEC.mlp_width / SPEC.width,
            num_heads=SPEC.heads,
            depth=SPEC.depth,
            depth_single_blocks=SPEC.single_depth,
            axes_dim=list(SPEC.axes),
            theta=10000,
            qkv_bias=True,
            guidance_embed=True,
            approximator_in_dim=SPEC.sinusoids,
            approximator_depth=SPEC.approximator_depth,
            approximator_hidden_size=SPEC.approximator_width,
            _use_compiled=False,
        )
        network = model.Chroma(params)
        network.load_state_dict(in_original_layout(stored), strict=True)
        x, t, context, y = toy_chroma.inputs()
        outs = []
        for i in range(2):
            row = slice(i, i + 1)
            image_ids, text_ids = ids(x[row], context[row])
            words = (torch.arange(context.shape[1]) < y[row] - 1).float()  # it adds the padding
            args = pack(x[row]), image_ids[None], context[row], text_ids[None], words, t[row], torch.zeros(1)
            outs.append(unpack(network.eval()(*args), x[row]))
        return {"original": torch.cat(outs)}


def pipeline() -> Any:
    """diffusers' pipeline."""
    t5 = transformers.T5Config(
        vocab_size=T5.vocab_size,
        d_model=T5.width,
        d_kv=T5.head_dim,
        d_ff=T5.mlp_width,
        num_layers=T5.layers,
        num_heads=T5.heads,
        feed_forward_proj="gated-gelu",
        relative_attention_num_buckets=T5.buckets,
    )
    text_encoder = toy.fill(transformers.T5EncoderModel(t5), "text_encoder.")
    text_encoder.shared.weight.copy_(random_tensor("text_encoder.shared.weight", (T5.vocab_size, T5.width)))  # tied
    return diffusers.ChromaPipeline(
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True),
        vae=autoencoder(),
        text_encoder=text_encoder,
        tokenizer=Tokenizer(),
        transformer=toy.fill(diffusers.ChromaTransformer2DModel(**SIZES), "transformer."),
    )


class Tokenizer:
    """SentencePiece's tokens and an end, padded: transformers 5 does not read a spiece.model."""

    pieces = SentencePieceProcessor(model_file=str(toy_chroma.SPIECE))

    def tokenize(self, prompt: str) -> list[str]:
        """Return no words of textual inversion."""
        return []

    def __call__(self, prompts: list[str], max_length: int, **_: Any) -> Any:
        """Return ids and mask (B,max_length)."""
        rows = [[*self.pieces.encode(prompt)[: max_length - 1], 1] for prompt in prompts]
        token_ids = torch.tensor([row + [0] * (max_length - len(row)) for row in rows])
        mask = torch.tensor([[1] * len(row) + [0] * (max_length - len(row)) for row in rows])
        return transformers.BatchEncoding({"input_ids": token_ids, "attention_mask": mask})


def of_diffusers() -> tuple[Arrays, dict[str, Any], dict[str, Tensor]]:
    """diffusers' transformer and whole runs, with a LoRA too; the shapes by key of its networks; and its weights."""
    pipe = pipeline()
    shapes = shapes_of(pipe)
    stored = dict(pipe.transformer.state_dict())
    arrays: Arrays = {"diffusers": run(pipe.transformer)}
    whole = diffusers.ChromaPipeline._prepare_attention_mask

    def as_truth(*args: Any, **more: Any) -> Any:
        mask = whole(*args, **more)
        return None if mask is None else mask.bool()

    for name, scale in (("plain", 0.0), ("guided", toy_chroma.GUIDANCE)):
        more = {"num_inference_steps": toy_chroma.STEPS, "guidance_scale": scale, "height": 32, "width": 48}
        more |= {"negative_prompt": [toy_chroma.NEGATIVE] * 2, "latents": pack(toy.normal(1, 2, 4, 4, 6))}
        with mock.patch.object(diffusers.ChromaPipeline, "_prepare_attention_mask", as_truth):
            arrays[f"run.{name}"] = pipe(list(toy_chroma.PROMPTS), output_type="pt", **more).images
    arrays |= with_lora(pipe, shapes, run)
    return arrays, shapes, stored


def wide_block() -> Arrays:
    """diffusers' single block at the released width, with the weights of ours."""
    block = transformer_chroma.ChromaSingleTransformerBlock(CHROMA.width, CHROMA.heads, 128)
    with torch.device("meta"):
        ours = SingleStreamBlock(CHROMA)
        ours.modulation.lin = cast(Any, nn.Identity())
    ours = toy.fill(ours.to_empty(device="cpu")).state_dict()
    values = {"proj_out": "linear2", "attn.norm_q": "norm.query_norm", "attn.norm_k": "norm.key_norm"}
    state = {
        f"{theirs}.weight": ours.get(f"{name}.weight", ours.get(f"{name}.scale")) for theirs, name in values.items()
    }
    state["proj_out.bias"] = ours["linear2.bias"]
    for last in ("weight", "bias"):
        parts = torch.split(ours[f"linear1.{last}"], [CHROMA.width] * 3 + [CHROMA.mlp_width])
        names = ("attn.to_q", "attn.to_k", "attn.to_v", "proj_mlp")
        state |= {f"{name}.{last}": part for name, part in zip(names, parts, strict=True)}
    block.load_state_dict(state, strict=True)
    x, mods = toy.normal(1, 1, 12, CHROMA.width), toy.normal(2, 1, 3, CHROMA.width)
    places = torch.cat([torch.zeros(4, 3), torch.cartesian_prod(torch.zeros(1), torch.arange(2.0), torch.arange(4.0))])
    return {"wide": block(x, mods, FluxPosEmbed(10000, list(CHROMA.axes))(places))[..., ::48].contiguous()}


def make(originals: Path) -> tuple[Arrays, dict[str, Any]]:
    """All arrays, and the shapes."""
    arrays, shapes, stored = of_diffusers()
    return arrays | original(originals, stored) | wide_block(), shapes


if __name__ == "__main__":
    main("chroma", "flow", __doc__, make)
