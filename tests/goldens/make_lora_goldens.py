"""Make tests/data/lora.npz: results of kohya's and diffusers' own code for a LoRA file.

    pip install diffusers transformers peft
    git clone https://github.com/kohya-ss/sd-scripts
    PYTHONPATH=tests/fixtures:scripts python tests/goldens/make_lora_goldens.py --sd-scripts sd-scripts

kohya's LoRANetwork is put on diffusers' UNet and transformers' text encoder with random_checkpoint.SMALL's weights, and
filled with random factors; nothing of it is copied.  What it computes, and what diffusers computes after
load_lora_weights and fuse_lora of the same file, is kept, and so are kohya's names of all modules of
Stable Diffusion 1.x and of SDXL's text encoders.  Of Stable Diffusion 2 and SDXL, what the text encoders compute.
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path
from types import ModuleType
from unittest import mock

import diffusers
import numpy as np
import peers
import peft
import torch
import toy
import transformers
from make_family_goldens import sdxl_pipeline
from peft.utils import get_peft_model_state_dict
from random_checkpoint import SMALL, random_tensor, small, state_dict
from safetensors.torch import load_file, save_file
from torch import nn

from ldm_lite.families.sd1 import SD1
from ldm_lite.families.sdxl import SDXL
from ldm_lite.text.tokenizer import FixingCLIPTokenizer
from ldm_lite.zoo.family import FamilyRow

OUT = Path(__file__).resolve().parents[1] / "data" / "lora.npz"
SCALE, STEPS, GUIDANCE = 0.7, 4, 5.0
PROMPTS = ["", "a red apple"]


def kohya(sd_scripts: Path) -> ModuleType:
    """Its module networks.lora, without the parts of its library that only SDXL and logging need."""
    sys.path.insert(0, str(sd_scripts))
    for name in ("library", "library.utils", "library.sdxl_original_unet"):
        sys.modules[name] = mock.MagicMock()
    from networks import lora

    return lora


class OldTextModel(nn.Module):
    """transformers' encoder where the releases that kohya's code was written for have it."""

    def __init__(self, text: nn.Module) -> None:
        super().__init__()
        self.text_model = getattr(text, "text_model", text)


def network(lora: ModuleType, unet: nn.Module, text: nn.Module) -> nn.Module:
    """kohya's LoRA of all linears and convolutions, of rank 4 and 2, in both networks."""
    adapter = lora.LoRANetwork(
        OldTextModel(text), unet, SCALE, lora_dim=4, alpha=3, conv_lora_dim=2, conv_alpha=1, varbose=False
    )
    lora.LoRANetwork.UNET_TARGET_REPLACE_MODULE = ["Transformer2DModel"]  # its constructor adds to this list in place
    adapter.apply_to(text, unet, apply_text_encoder=True, apply_unet=True)
    return adapter


def on_meta(family: FamilyRow) -> tuple[nn.Module, nn.Module]:
    """diffusers' and transformers' networks without weights."""
    with torch.device("meta"):
        unet = diffusers.UNet2DConditionModel(cross_attention_dim=768, attention_head_dim=8)
        text = transformers.CLIPTextModel(
            transformers.CLIPTextConfig(
                hidden_size=family.text.width, num_hidden_layers=family.text.layers, intermediate_size=3072
            )
        )
    return unet, text


def named(lora: ModuleType, texts: list[nn.Module]) -> nn.Module:
    """kohya's LoRA of text encoders alone, of rank 4, its factors random; put on them."""
    wrapped = [OldTextModel(text) for text in texts]
    text = wrapped if len(wrapped) > 1 else wrapped[0]
    adapter = lora.LoRANetwork(text, nn.Module(), SCALE, lora_dim=4, alpha=3, varbose=False)
    adapter.apply_to(text, nn.Module(), apply_text_encoder=True, apply_unet=False)
    values = adapter.state_dict()
    adapter.load_state_dict({key: random_tensor(key, v.shape) if v.ndim else v for key, v in values.items()})
    return adapter


def encoders(lora: ModuleType) -> dict[str, object]:
    """OpenCLIP with kohya's LoRA on it: context of Stable Diffusion 2, contexts and pooled output of SDXL.

    diffusers, with the same file, must agree, and tells how it names the modules itself.
    """
    arrays: dict[str, object] = {}
    ids = FixingCLIPTokenizer(pad_id=0)(PROMPTS)
    sd2 = small("sd2")
    text = peers.text_encoder(sd2, dict(state_dict(sd2)))
    adapter = named(lora, [text])
    arrays["sd2.shapes"] = json.dumps({key: list(value.shape) for key, value in adapter.state_dict().items()})
    arrays["sd2.context"] = text(ids).last_hidden_state[:, ::11].numpy()

    sdxl = small("sdxl_base")
    weights = dict(state_dict(sdxl))
    texts = [peers.text_encoder(sdxl, weights), peers.text_encoder_2(sdxl, weights)]
    values = named(lora, texts).state_dict()
    arrays["sdxl.shapes"] = json.dumps({key: list(value.shape) for key, value in values.items()})

    def outputs(texts: list[nn.Module]) -> dict[str, np.ndarray]:
        first, second = (text(ids, output_hidden_states=True) for text in texts)
        hidden = torch.cat([first.hidden_states[-2], second.hidden_states[-2]], dim=2)
        return {"sdxl.context": hidden[:, ::11].numpy(), "sdxl.pooled": second.text_embeds.numpy()}

    arrays |= outputs(texts)
    pipe = sdxl_pipeline(sdxl, weights, None, None)
    texts = [pipe.text_encoder, pipe.text_encoder_2]
    with tempfile.TemporaryDirectory() as folder:
        save_file(values, Path(folder) / "lora.safetensors")
        pipe.load_lora_weights(folder, weight_name="lora.safetensors")
        parts = [get_peft_model_state_dict(text, adapter_name="default_0") for text in texts]
        pipe.save_lora_weights(folder, text_encoder_lora_layers=parts[0], text_encoder_2_lora_layers=parts[1])
        written = load_file(Path(folder) / "pytorch_lora_weights.safetensors")
    same = {value.numpy().tobytes(): key for key, value in values.items()}
    arrays["sdxl.peft"] = json.dumps({key: same[value.numpy().tobytes()] for key, value in written.items()})
    pipe.fuse_lora(lora_scale=SCALE)
    pipe.unload_lora_weights()
    for name, value in outputs(texts).items():
        assert toy.relative_error(torch.from_numpy(value), arrays[name]) < 1e-5, f"{name}: kohya and diffusers differ"

    with torch.device("meta"):
        full = [
            transformers.CLIPTextModel(
                transformers.CLIPTextConfig(
                    hidden_size=spec.width, num_hidden_layers=spec.layers, intermediate_size=spec.mlp_width
                )
            )
            for spec in SDXL.text_encoders
        ]
    wrapped = [OldTextModel(text) for text in full]
    shapes = lora.LoRANetwork(wrapped, nn.Module(), SCALE, lora_dim=4, alpha=3, varbose=False)
    for text_encoder_lora in shapes.text_encoder_loras:
        shapes.add_module(text_encoder_lora.lora_name, text_encoder_lora)
    arrays["sdxl"] = json.dumps({key: list(value.shape) for key, value in shapes.state_dict().items()})
    return arrays


@torch.no_grad()
def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sd-scripts", type=Path, required=True)
    lora = kohya(parser.parse_args().sd_scripts)
    weights = dict(state_dict(SMALL))
    arrays: dict[str, object] = {
        "versions": json.dumps([p.__version__ for p in (diffusers, transformers, peft, torch)])
    }

    # every module of Stable Diffusion 1.x, by kohya's names
    full = network(lora, *on_meta(SD1))
    arrays["sd1"] = json.dumps({key: list(value.shape) for key, value in full.state_dict().items()})

    # kohya's own forward
    unet, text = peers.unet(SMALL, weights), peers.text_encoder(SMALL, weights)
    adapter = network(lora, unet, text)
    shapes = {key: tuple(value.shape) for key, value in adapter.state_dict().items()}
    values = {
        key: adapter.state_dict()[key] if not shape else random_tensor(key, shape) for key, shape in shapes.items()
    }
    adapter.load_state_dict(values)
    x, context, _ = toy.unet_inputs(SMALL.unet)
    ids = FixingCLIPTokenizer()(PROMPTS)
    arrays["alphas"] = json.dumps({key: float(value) for key, value in values.items() if value.ndim == 0})
    arrays["shapes"] = json.dumps({key: shape for key, shape in shapes.items() if shape})
    arrays["unet"] = unet(x, toy.T, encoder_hidden_states=context).sample.numpy()
    arrays["ids"], arrays["text"] = ids.numpy(), text(ids).last_hidden_state[:, ::5].numpy()

    # diffusers on the same file, and what PEFT calls its modules
    unet, text, vae = peers.unet(SMALL, weights), peers.text_encoder(SMALL, weights), peers.vae(SMALL, weights)
    scheduler = peers.schedulers(SMALL)["ddim"]()
    pipe = diffusers.StableDiffusionPipeline(
        vae, text, None, unet, scheduler, None, None, requires_safety_checker=False
    )
    before = {
        prefix: {key: value.clone() for key, value in model.state_dict().items()}
        for prefix, model in (("lora_unet", unet), ("lora_te_text_model", text))
    }
    with tempfile.TemporaryDirectory() as folder:
        save_file(values, Path(folder) / "lora.safetensors")
        pipe.load_lora_weights(folder, weight_name="lora.safetensors")
        parts = {"unet": get_peft_model_state_dict(unet, adapter_name="default_0")}
        parts["text_encoder"] = get_peft_model_state_dict(text, adapter_name="default_0")
        pipe.save_lora_weights(folder, parts["unet"], parts["text_encoder"])
        written = load_file(Path(folder) / "pytorch_lora_weights.safetensors")
    same = {value.numpy().tobytes(): key for key, value in values.items()}
    arrays["peft"] = json.dumps({key: same[value.numpy().tobytes()] for key, value in written.items()})
    pipe.fuse_lora(lora_scale=SCALE)
    pipe.unload_lora_weights()
    uncond, context = text(ids).last_hidden_state[:, None]
    latents = peers.sample(unet, scheduler, toy.normal(7, 1, 4, 8, 8), context, uncond, STEPS, GUIDANCE)
    arrays["latents"] = latents.numpy()
    arrays["image"] = vae.decode(latents / SMALL.scale_factor).sample[..., ::3].numpy()
    changes = {
        f"{prefix}_{key.removesuffix('.weight')}".replace(".", "_"): float((value - before[prefix][key]).norm())
        for prefix, model in (("lora_unet", unet), ("lora_te_text_model", text))
        for key, value in model.state_dict().items()
    }
    arrays["changes"] = json.dumps({name: norm for name, norm in changes.items() if norm})
    arrays |= encoders(lora)
    np.savez_compressed(OUT, **{key: np.asarray(value) for key, value in arrays.items()})
    print(OUT, OUT.stat().st_size, {key: np.asarray(value).shape for key, value in arrays.items()})


if __name__ == "__main__":
    main()
