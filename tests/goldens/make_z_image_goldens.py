"""Make tests/data/z_image.npz: what the original Z-Image, diffusers' pipeline and transformers' Qwen3 compute.

    pip install diffusers transformers peft
    git clone https://github.com/Tongyi-MAI/Z-Image
    PYTHONPATH=tests/fixtures python tests/goldens/make_z_image_goldens.py --originals .

The networks are the originals' own classes in toy_z_image's sizes, in float32, with weights that their keys decide,
which are stored with their shapes.  With a LoRA it is float64: its random weights make rounding twenty times as large,
and differently on every CPU.  The whole run is diffusers' ZImagePipeline from prompts to pixels, with guidance.
"""

import importlib
import tempfile
from pathlib import Path
from typing import Any

import diffusers
import torch
import toy
import toy_z_image
from family_goldens import autoencoder, main, qwen3, shapes_of, tokenizer, with_lora
from making import Arrays, repository
from torch import nn

SPEC, QWEN3 = toy_z_image.SPEC, toy_z_image.QWEN3
SIZES: dict[str, Any] = {
    "in_channels": SPEC.in_channels,
    "dim": SPEC.width,
    "n_layers": SPEC.depth,
    "n_refiner_layers": SPEC.refiner_depth,
    "n_heads": SPEC.heads,
    "n_kv_heads": SPEC.heads,
    "cap_feat_dim": SPEC.context_dim,
    "axes_dims": list(SPEC.axes),
}


def run(network: nn.Module, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """What a transformer of these classes makes of toy_z_image's inputs, (2,4,6,10)."""
    x, t, context, y = toy_z_image.inputs()
    x, t, context = x.to(dtype), t.to(dtype), context.to(dtype)
    captions = [embedding[:count] for embedding, count in zip(context, y.flatten().tolist(), strict=True)]
    out = network([latent[:, None] for latent in x], t, captions)
    return torch.stack(list(out[0]))[:, :, 0]


def original(originals: Path) -> Arrays:
    """The original's transformer, on captions of different lengths."""
    with repository(originals / "Z-Image" / "src", ("zimage", "utils")):
        module = importlib.import_module("zimage.transformer")
        network = module.ZImageTransformer2DModel(**SIZES, axes_lens=[1536, 512, 512])
        return {"original": run(toy.fill(network, "transformer."))}


def pipeline(folder: Path) -> Any:
    """diffusers' pipeline."""
    return diffusers.ZImagePipeline(
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0),
        vae=autoencoder(),
        text_encoder=qwen3(QWEN3, tie_word_embeddings=True),
        tokenizer=tokenizer(toy_z_image.write_tokenizer(folder)),
        transformer=toy.fill(diffusers.ZImageTransformer2DModel(**SIZES), "transformer."),
    )


def of_diffusers() -> tuple[Arrays, dict[str, Any]]:
    """diffusers' transformer and whole runs, with a LoRA too; and the shapes by key of its networks."""
    with tempfile.TemporaryDirectory() as folder:
        pipe = pipeline(Path(folder))
    shapes = shapes_of(pipe)
    arrays: Arrays = {"diffusers": run(pipe.transformer)}
    ids, mask = toy_z_image.token_ids()
    hidden = pipe.text_encoder(input_ids=ids, attention_mask=mask.long(), output_hidden_states=True).hidden_states
    arrays["qwen3"] = hidden[-2] * mask[:, :, None]
    texts = (*toy_z_image.PROMPTS, *toy_z_image.TEXTS)
    arrays["ids"] = torch.tensor([token for text in texts for token in _ids(pipe.tokenizer, text)]).float()
    for name, scale in (("plain", 0.0), ("guided", toy_z_image.GUIDANCE)):
        more = {"num_inference_steps": toy_z_image.STEPS, "guidance_scale": scale, "height": 32, "width": 48}
        more["negative_prompt"] = [toy_z_image.NEGATIVE] * 2
        out = pipe(list(toy_z_image.PROMPTS), latents=toy.normal(1, 2, 4, 4, 6), output_type="pt", **more)
        arrays[f"run.{name}"] = out.images
    arrays |= with_lora(pipe, shapes, run)
    return arrays, shapes


def _ids(tokenizer: Any, prompt: str) -> list[int]:
    message = [{"role": "user", "content": prompt}]
    text = tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True, enable_thinking=True)
    ids: list[int] = tokenizer(text).input_ids
    return [*ids, -1]


def make(originals: Path) -> tuple[Arrays, dict[str, Any]]:
    """All arrays, and the shapes."""
    arrays, shapes = of_diffusers()
    return arrays | original(originals), shapes


if __name__ == "__main__":
    main("z_image", "Z-Image", __doc__, make)
