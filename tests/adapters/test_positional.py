"""cloneofsimo's files: numbers become the layers that the original code would have changed, embeddings are bundled."""

import os
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import ldm_lite
from ldm_lite.adapters.lora import file_names
from ldm_lite.adapters.positional import NAMES
from ldm_lite.checkpoint.reader import on_meta
from ldm_lite.zoo.families import FAMILY_ROWS
from ldm_lite.zoo.family import build_network

REAL = Path(os.environ.get("LDM_LITE_REAL_FILES", Path(__file__).parents[2].parent / "shared" / "data" / "real"))


def networks() -> dict[str, nn.Module]:
    """Those of Stable Diffusion 1.x, without memory."""
    with on_meta():
        return {role: build_network(FAMILY_ROWS["sd1"].specs[role]) for role in NAMES}


def tensors() -> dict[str, torch.Tensor]:
    """A file of rank 1 with an embedding, of the shapes that the layers of Stable Diffusion 1.x have."""
    values = {"<s1>": torch.ones(768)}
    for role, network in networks().items():
        modules = {name: module for module, names in file_names(role, network).items() for name in names}
        for number, name in enumerate(NAMES[role]):
            weight = network.get_submodule(modules[f"{role}_{name.replace('.', '_')}"]).weight
            values[f"{role}:{number}:up"] = torch.full((weight.shape[0], 1), float(number))
            values[f"{role}:{number}:down"] = torch.ones(1, weight.shape[1])
    return values


def test_numbers_are_layers_of_the_network_and_embeddings_are_bundled(tmp_path: Path) -> None:
    path = tmp_path / "first.safetensors"
    save_file(tensors(), path, {"unet": '["CrossAttention", "Attention", "GEGLU"]'})
    lora = ldm_lite.open_lora(path)
    assert len(lora.modules) == 144 + 48
    assert [embedding.name for embedding in lora.embeddings] == ["<s1>"]
    for role, network in networks().items():
        known = {name for names in file_names(role, network).values() for name in names}
        assert {name for name in lora.modules if name.startswith(f"{role}_")} <= known
    first, last = (
        "unet_down_blocks_0_attentions_0_transformer_blocks_0",
        "unet_mid_block_attentions_0_transformer_blocks_0",
    )
    for name, number in ((f"{first}_attn1_to_q", 0), (f"{first}_ff_net_0_proj", 4), (f"{last}_attn2_to_out_0", 143)):
        [change] = lora.modules[name].values()
        assert float(change.change(torch.zeros(change.shape)).mean()) == pytest.approx(number)


def test_other_layers_are_refused(tmp_path: Path) -> None:
    values = tensors()
    save_file({key: value for key, value in values.items() if ":143:" not in key}, tmp_path / "few.safetensors")
    with pytest.raises(ValueError, match=r"numbers 143 layers of the unet, expected the 144 of Stable Diffusion 1\.x"):
        ldm_lite.open_lora(tmp_path / "few.safetensors")


@pytest.mark.skipif(not REAL.is_dir(), reason="the real files are not here")
@pytest.mark.parametrize(("name", "words"), [("lora_disney", ["<s1>", "<s2>"]), ("analog_svd_rank4", [])])
def test_the_real_files_have_the_shapes_of_their_layers(name: str, words: list[str]) -> None:
    path = REAL / f"{name}.safetensors"
    lora = ldm_lite.open_lora(path)
    assert [embedding.name for embedding in lora.embeddings] == words
    assert len(lora.modules) == len([key for key in load_file(path) if re.search("up$", key)])
    for role, network in networks().items():
        modules = {spelling: module for module, names in file_names(role, network).items() for spelling in names}
        for spelling, changes in lora.modules.items():
            if spelling.startswith(f"{role}_"):
                weight = network.get_submodule(modules[spelling]).weight
                assert tuple(changes["weight"].shape)[:2] == tuple(weight.shape)[:2]
