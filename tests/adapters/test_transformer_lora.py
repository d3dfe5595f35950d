"""LoRAs of FLUX.1 and Stable Diffusion 3: PEFT's and Black Forest Labs' results (the goldens), and kohya's names."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
import toy
import toy_flow
from flow_files import SPIECE, of_diffusers
from random_checkpoint import metadata, random_tensor
from torch import Tensor, nn
from toy_flow import all_in_one, save, under, weights

import ldm_lite
from ldm_lite.adapters.lora import merge_lora
from ldm_lite.checkpoint.reader import load_weights, on_meta, open_checkpoint, parts_of
from ldm_lite.zoo.families import FAMILY_ROWS
from ldm_lite.zoo.family import build_network

GOLDEN = np.load(Path(__file__).parents[1] / "data" / "transformers.npz")
BOTH = pytest.mark.parametrize("name", ["flux_dev", "sd35_medium"])
CPU = torch.device("cpu")


def values(shapes: dict[str, list[int]], prefix: str = "transformer.") -> dict[str, Tensor]:
    """The weights of a golden's LoRA."""
    return {key: random_tensor(f"lora.{key.removeprefix(prefix)}", tuple(shape)) for key, shape in shapes.items()}


def output(network: nn.Module, name: str) -> Tensor:
    x, t, context, y = toy_flow.inputs(toy_flow.TRANSFORMERS[name])
    return network(x, t, context, y, **toy_flow.more(toy_flow.TRANSFORMERS[name]))


@BOTH
def test_a_lora_on_every_linear_of_diffusers_network(name: str, tmp_path: Path) -> None:
    """Rows of fused layers, and swapped halves: what PEFT computes on diffusers' network; removed bit for bit."""
    component = parts_of(open_checkpoint(save(tmp_path / "d.safetensors", of_diffusers(name))))["unet"]
    with on_meta():
        network = build_network(toy_flow.TRANSFORMERS[name])
    load_weights(network, component, "transformer", CPU, torch.float32)
    before = {key: value.clone() for key, value in network.state_dict().items()}
    shapes = json.loads(str(GOLDEN["shapes"]))[f"lora.{name}"]
    lora = values(shapes) | {
        key.replace("lora_A.weight", "alpha"): torch.tensor(6.0) for key in shapes if "lora_A" in key
    }
    merged = merge_lora({"unet": network}, [(ldm_lite.open_lora(save(tmp_path / "l.safetensors", lora)), 1.0)])
    assert toy.relative_error(output(network, name), GOLDEN[f"lora.{name}"]) < 1e-4  # large weights multiply rounding
    merged.remove()
    assert all(torch.equal(value, before[key]) for key, value in network.state_dict().items())


def test_the_control_lora_of_black_forest_labs(tmp_path: Path) -> None:
    """Its network reads an image, its norms are overwritten whatever the weight, and it has biases."""
    family = toy_flow.small("flux_dev")
    parts = weights(family)
    dev = save(tmp_path / "f.safetensors", all_in_one(family, parts), metadata(family))
    shapes = json.loads(bytes(GOLDEN["control_lora.shapes"].astype(np.uint8)))
    lora = save(tmp_path / "flux1-depth-dev-lora.safetensors", values(shapes))
    with_weights = parts | {"unet": toy.network(family.unet).state_dict()}  # the golden's base
    save(dev, all_in_one(family, with_weights), metadata(family))
    pipe = ldm_lite.load(dev, lora=f"{lora}:0.85", device="cpu", t5_vocab=SPIECE)
    assert pipe.family.unet == toy_flow.TRANSFORMERS["flux_control"]
    assert (pipe.family.task, pipe.family.scale) == (
        FAMILY_ROWS["flux_control"].task,
        FAMILY_ROWS["flux_control"].scale,
    )
    assert toy.relative_error(output(pipe.unet, "flux_control"), GOLDEN["control_lora"]) < 1e-5
    quantised = ldm_lite.load(dev, lora=f"{lora}:0.85", device="cpu", t5_vocab=SPIECE, storage="int8")
    with quantised.phase("unet"):
        error = toy.relative_error(output(quantised.unet, "flux_control"), GOLDEN["control_lora"])
    assert 1e-4 < error < 0.02


def pairs(network: nn.Module, prefix: str, rank: int = 2) -> dict[str, Tensor]:
    """A LoRA in kohya's format for every linear of a network, alpha half the rank."""
    by_name = {}
    for name, module in network.named_modules():
        if isinstance(module, nn.Linear):
            key = prefix + name.replace(".", "_")
            by_name[f"{key}.lora_down.weight"] = toy.normal(len(by_name), rank, module.in_features)
            by_name[f"{key}.lora_up.weight"] = toy.normal(len(by_name), module.out_features, rank)
            by_name[f"{key}.alpha"] = torch.tensor(rank / 2)
    return by_name


def test_one_for_another_model_is_refused(tmp_path: Path) -> None:
    network = toy.network(toy_flow.FLUX)
    wide = {"double_blocks.0.img_attn.proj.lora_A.weight": torch.ones(2, 99), "x": torch.ones(1)}
    wide |= {"double_blocks.0.img_attn.proj.lora_B.weight": torch.ones(64, 2)}
    for lora, match in ((wide, "is for another model"), (under("lora_unet_a_", pairs(network, "")), "none of its")):
        with pytest.raises(ValueError, match=match):
            merge_lora({"unet": network}, [(ldm_lite.open_lora(save(tmp_path / "l.safetensors", lora)), 1.0)])
