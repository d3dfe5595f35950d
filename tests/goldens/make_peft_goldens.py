"""Make tests/data/peft.npz: results of PEFT, of diffusers with its metadata, and of LyCORIS, for adapters they write.

    pip install diffusers transformers peft lycoris-lora
    PYTHONPATH=tests/fixtures:. python tests/goldens/make_peft_goldens.py

Each adapter is put on diffusers' UNet or transformers' text encoder with random_checkpoint.SMALL's weights, and filled
with random values by the keys of the file that the library itself writes.  Kept are those keys with their shapes, the
configuration, and what the networks compute.
"""

import json
import tempfile
from pathlib import Path

import diffusers
import lycoris
import numpy as np
import peers
import peft
import torch
import toy
import transformers
from lycoris import LycorisNetwork, create_lycoris
from random_checkpoint import SMALL, state_dict
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn

from ldm_lite.text.tokenizer import FixingCLIPTokenizer

OUT = Path(__file__).resolve().parents[1] / "data" / "peft.npz"
LORA = {"r": 4, "lora_alpha": 7, "init_lora_weights": "gaussian"}
CONFIGS = {  # name -> network, configuration
    "unet": (
        "unet",
        {
            **LORA,
            "target_modules": ["to_q", "to_out.0", "proj_in", "conv1", "conv_shortcut", "conv_in", "linear_1"],
            "use_rslora": True,
            "rank_pattern": {"mid_block.attentions.0.transformer_blocks.0.attn1.to_q": 3, r"down_blocks.*\.conv1": 2},
            "alpha_pattern": {r"^conv_in": 2.5, "to_out.0": 9},
            "modules_to_save": ["conv_out"],
        },
    ),
    "text": (
        "text",
        {
            **LORA,
            "target_modules": ["q_proj", "out_proj", "fc1", "token_embedding"],
            "bias": "all",
            "fan_in_fan_out": True,
        },
    ),
    "only": ("text", {**LORA, "target_modules": ["k_proj", "fc2"], "bias": "lora_only", "layers_to_transform": [1]}),
    "biased": ("text", {**LORA, "init_lora_weights": True, "target_modules": ["v_proj", "fc1"], "lora_bias": True}),
}


def filled(values: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Random values for a file; an alpha stays."""
    return {key: toy.of_adapter(key, tuple(v.shape)) if v.ndim else v for key, v in values.items()}


def of_peft(network: nn.Module, config: peft.PeftConfig) -> tuple[nn.Module, dict[str, object]]:
    """A network with an adapter that PEFT has read from its own folder, and what is in the folder."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "adapter_model.safetensors"
        model = peft.get_peft_model(network, config)
        model.save_pretrained(folder)
        shapes = {key: list(value.shape) for key, value in load_file(file).items()}
        save_file(filled(load_file(file)), file)
        model = peft.PeftModel.from_pretrained(model.unload(), folder)
        about = json.loads((Path(folder) / "adapter_config.json").read_text())
        return model.merge_and_unload(), {"shapes": shapes, "config": about}


@torch.no_grad()
def main() -> None:
    """The command line."""
    libraries = (peft, diffusers, transformers, torch)
    versions = [library.__version__ for library in libraries]
    arrays: dict[str, object] = {"versions": json.dumps([*versions, f"lycoris {getattr(lycoris, '__version__', '')}"])}
    x, context, _ = toy.unet_inputs(SMALL.unet)
    ids = FixingCLIPTokenizer()(["", "a red apple"])
    arrays["ids"] = ids.numpy()

    def outputs(network: nn.Module) -> np.ndarray:
        if isinstance(network, diffusers.UNet2DConditionModel):
            return network(x, toy.T, encoder_hidden_states=context).sample.numpy()
        return network(ids).last_hidden_state[:, ::5].numpy()

    makers = {"unet": peers.unet, "text": peers.text_encoder}
    for name, (role, config) in CONFIGS.items():
        network, about = of_peft(makers[role](SMALL, dict(state_dict(SMALL))), peft.LoraConfig(**config))
        arrays[f"{name}.about"], arrays[name] = json.dumps(about), outputs(network)

    # diffusers, whose file holds the configuration
    network = makers["unet"](SMALL, dict(state_dict(SMALL)))
    network.add_adapter(peft.LoraConfig(**{**CONFIGS["unet"][1], "modules_to_save": None}))
    values = filled(peft.get_peft_model_state_dict(network))
    about = diffusers.training_utils._collate_lora_metadata({"unet": network})
    with tempfile.TemporaryDirectory() as folder:
        diffusers.StableDiffusionPipeline.save_lora_weights(folder, unet_lora_layers=values, **about)
        file = Path(folder) / "pytorch_lora_weights.safetensors"
        with safe_open(file, "pt") as opened:
            metadata = opened.metadata()
        fresh, written = makers["unet"](SMALL, dict(state_dict(SMALL))), load_file(file)
        fresh.load_lora_adapter(written, prefix="unet", metadata=json.loads(metadata["lora_adapter_metadata"]))
        fresh.fuse_lora()
    same = {value.numpy().tobytes(): key for key, value in values.items()}
    names = {key: [same[value.numpy().tobytes()], list(value.shape)] for key, value in written.items()}
    arrays["diffusers.about"], arrays["diffusers"] = json.dumps({"names": names, "metadata": metadata}), outputs(fresh)

    # LyCORIS: norms, biases and full differences
    for algo in ("locon", "full"):
        network = makers["unet"](SMALL, dict(state_dict(SMALL)))
        LycorisNetwork.apply_preset({"target_module": ["Transformer2DModel", "ResnetBlock2D"], "target_name": []})
        adapter = create_lycoris(network, 0.7, linear_dim=4, linear_alpha=3, algo=algo, train_norm=True, conv_dim=2)
        adapter.apply_to()
        values = filled(adapter.state_dict())
        adapter.load_state_dict(values)
        shapes = {key: list(value.shape) for key, value in values.items()}
        alphas = {key: float(value) for key, value in values.items() if not value.ndim}
        arrays[f"{algo}.about"], arrays[algo] = json.dumps({"shapes": shapes, "alphas": alphas}), outputs(network)
    np.savez_compressed(OUT, **{key: np.asarray(value) for key, value in arrays.items()})
    print(OUT, OUT.stat().st_size, {key: np.asarray(value).shape for key, value in arrays.items()})


if __name__ == "__main__":
    main()
