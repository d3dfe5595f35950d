"""What the makers of goldens of Chroma, FLUX.2, Qwen-Image and Z-Image share: networks, PEFT's LoRA, the command."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import peft
import torch
import toy
import toy_z_image
import transformers
from making import DATA, Arrays, folder_of_originals, made_with, write
from peft import LoraConfig, get_peft_model_state_dict, set_peft_model_state_dict
from random_checkpoint import random_tensor
from torch import Tensor, nn

from ldm_lite.formats.diffusers_layout import original_layout
from ldm_lite.runtime.memory import MappedPages


def autoencoder() -> Any:
    """diffusers' autoencoder of 4 channels."""
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
    return toy.fill(vae, "vae.")


def qwen3(spec: Any, **more: Any) -> Any:
    """transformers' Qwen3."""
    config = transformers.Qwen3Config(
        vocab_size=spec.vocab_size,
        hidden_size=spec.width,
        intermediate_size=spec.mlp_width,
        num_hidden_layers=spec.layers,
        num_attention_heads=spec.heads,
        num_key_value_heads=spec.kv_heads,
        head_dim=spec.head_dim,
        rms_norm_eps=1e-6,
        rope_theta=1e6,
        **more,
    )
    return toy.fill(transformers.Qwen3Model(config), "text_encoder.")


def tokenizer(file: Path) -> Any:
    """transformers' tokenizer of a tokenizer.json, with Qwen3's template."""
    return transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(file), pad_token="<|endoftext|>", chat_template=toy_z_image.TEMPLATE
    )


def shapes_of(pipe: Any) -> dict[str, Any]:
    """The shapes of a pipeline's networks by key."""
    return {
        name: {key: list(value.shape) for key, value in getattr(pipe, name).state_dict().items()}
        for name in ("transformer", "text_encoder", "vae")
    }


def with_lora(
    pipe: Any, shapes: dict[str, Any], run: Callable[[Any, torch.dtype], Tensor], rank: int = 3, alpha: int = 6
) -> Arrays:
    """What the transformer computes in float64 with PEFT's LoRA of every linear layer, whose shapes are added."""
    names = [name for name, module in pipe.transformer.named_modules() if isinstance(module, nn.Linear)]
    pipe.transformer.add_adapter(LoraConfig(r=rank, lora_alpha=alpha, target_modules=names))
    keys = get_peft_model_state_dict(pipe.transformer)
    lora = {key: random_tensor(f"lora.{key}", tuple(value.shape)) for key, value in keys.items()}
    set_peft_model_state_dict(pipe.transformer, lora)
    shapes["lora"] = {f"transformer.{key}": list(value.shape) for key, value in lora.items()}
    return {"lora": run(pipe.transformer.double(), torch.float64).float()}


def in_original_layout(stored: dict[str, Tensor]) -> dict[str, Tensor]:
    """diffusers' weights under the makers' keys."""
    layout = original_layout({key: tuple(value.shape) for key, value in stored.items()})
    assert layout is not None
    return {key: tensor.read(stored.__getitem__, MappedPages()) for key, tensor in layout.items()}


def main(name: str, repository: str, about: str | None, make: Callable[[Path], tuple[Arrays, dict[str, Any]]]) -> None:
    """The command line: make(folder of the repositories) returns the arrays of tests/data/NAME.npz and the shapes."""
    originals = folder_of_originals(about)
    with torch.no_grad():
        arrays, shapes = make(originals)
    versions = made_with((torch, diffusers, peft, transformers), originals, [repository])
    write(DATA / f"{name}.npz", arrays, torch.float32, versions, shapes=np.array(json.dumps(shapes)))
