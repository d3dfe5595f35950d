"""Make tests/data/z_image.npz: what the original Z-Image, diffusers' pipeline and transformers' Qwen3 compute.

    pip install diffusers transformers peft
    git clone https://github.com/Tongyi-MAI/Z-Image
    PYTHONPATH=tests/fixtures python tests/goldens/make_z_image_goldens.py --originals .

The networks are the originals' own classes in toy_z_image's sizes, in float32, with weights that their keys decide,
which are stored with their shapes.  With a LoRA it is float64: its random weights make rounding twenty times as large,
and differently on every CPU.  The whole run is diffusers' ZImagePipeline from prompts to pixels, with guidance.
"""

import argparse
import importlib
import json
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import peft
import torch
import toy
import toy_z_image
import transformers
from make_goldens import DATA, Arrays, repository, write
from peft import LoraConfig, get_peft_model_state_dict, set_peft_model_state_dict
from random_checkpoint import random_tensor
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
    captions = [each[:count] for each, count in zip(context, y.flatten().tolist(), strict=True)]
    out = network([each[:, None] for each in x], t, captions)
    return torch.stack(list(out[0]))[:, :, 0]


def original(originals: Path) -> Arrays:
    """The original's transformer, on captions of different lengths."""
    with repository(originals / "Z-Image" / "src", ("zimage", "utils")):
        module = importlib.import_module("zimage.transformer")
        network = module.ZImageTransformer2DModel(**SIZES, axes_lens=[1536, 512, 512])
        return {"original": run(toy.fill(network, "transformer."))}


def text_encoder() -> Any:
    """transformers' Qwen3."""
    config = transformers.Qwen3Config(
        vocab_size=QWEN3.vocab_size,
        hidden_size=QWEN3.width,
        intermediate_size=QWEN3.mlp_width,
        num_hidden_layers=QWEN3.layers,
        num_attention_heads=QWEN3.heads,
        num_key_value_heads=QWEN3.kv_heads,
        head_dim=QWEN3.head_dim,
        rms_norm_eps=1e-6,
        rope_theta=1e6,
        tie_word_embeddings=True,
    )
    return toy.fill(transformers.Qwen3Model(config), "text_encoder.")


def pipeline(folder: Path) -> Any:
    """diffusers' pipeline."""
    file = toy_z_image.write_tokenizer(folder)
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(file), pad_token="<|endoftext|>", chat_template=toy_z_image.TEMPLATE
    )
    vae = diffusers.AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        block_out_channels=(32,) * 4,
        layers_per_block=1,
        latent_channels=4,
        norm_num_groups=32,
        scaling_factor=0.3611,
        shift_factor=0.1159,
        use_quant_conv=False,
        use_post_quant_conv=False,
    )
    return diffusers.ZImagePipeline(
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0),
        vae=toy.fill(vae, "vae."),
        text_encoder=text_encoder(),
        tokenizer=tokenizer,
        transformer=toy.fill(diffusers.ZImageTransformer2DModel(**SIZES), "transformer."),
    )


def of_diffusers() -> tuple[Arrays, dict[str, Any]]:
    """diffusers' transformer and whole runs, with a LoRA too; and the shapes by key of its networks."""
    with tempfile.TemporaryDirectory() as folder:
        pipe = pipeline(Path(folder))
    shapes: dict[str, Any] = {
        name: {key: list(value.shape) for key, value in pipe.networks[name].state_dict().items()}
        for name in ("transformer", "text_encoder", "vae")
    }
    arrays: Arrays = {"diffusers": run(pipe.transformer)}
    ids, mask = toy_z_image.token_ids()
    hidden = pipe.text_encoder(input_ids=ids, attention_mask=mask.long(), output_hidden_states=True).hidden_states
    arrays["qwen3"] = hidden[-2] * mask[:, :, None]
    texts = (*toy_z_image.PROMPTS, *toy_z_image.TEXTS)
    arrays["ids"] = torch.tensor([each for text in texts for each in _ids(pipe.tokenizer, text)]).float()
    for name, scale in (("plain", 0.0), ("guided", toy_z_image.GUIDANCE)):
        more = {"num_inference_steps": toy_z_image.STEPS, "guidance_scale": scale, "height": 32, "width": 48}
        more["negative_prompt"] = [toy_z_image.NEGATIVE] * 2
        out = pipe(list(toy_z_image.PROMPTS), latents=toy.normal(1, 2, 4, 4, 6), output_type="pt", **more)
        arrays[f"run.{name}"] = out.images
    names = [name for name, module in pipe.transformer.named_modules() if isinstance(module, nn.Linear)]
    pipe.transformer.add_adapter(LoraConfig(r=3, lora_alpha=6, target_modules=names))
    keys = get_peft_model_state_dict(pipe.transformer)
    lora = {f"transformer.{key}": random_tensor(f"lora.{key}", tuple(value.shape)) for key, value in keys.items()}
    set_peft_model_state_dict(
        pipe.transformer, {key.removeprefix("transformer."): value for key, value in lora.items()}
    )
    shapes["lora"] = {key: list(value.shape) for key, value in lora.items()}
    arrays["lora"] = run(pipe.transformer.double(), torch.float64).float()
    return arrays, shapes


def _ids(tokenizer: Any, prompt: str) -> list[int]:
    message = [{"role": "user", "content": prompt}]
    text = tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True, enable_thinking=True)
    ids: list[int] = tokenizer(text).input_ids
    return [*ids, -1]


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--originals", type=Path, required=True, help="the folder of the cloned repository")
    originals = parser.parse_args().originals.resolve()
    with torch.no_grad():
        arrays, shapes = of_diffusers()
        arrays |= original(originals)
    git = ["git", "-C", str(originals / "Z-Image"), "rev-parse", "HEAD"]
    commit = subprocess.run(git, capture_output=True, text=True, check=True).stdout[:7]
    about = f"torch {torch.__version__}, diffusers {diffusers.__version__}, peft {peft.__version__}"
    about += f", transformers {transformers.__version__}, Z-Image {commit}"
    write(DATA / "z_image.npz", arrays, torch.float32, about, shapes=np.array(json.dumps(shapes)))


if __name__ == "__main__":
    main()
