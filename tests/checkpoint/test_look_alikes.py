"""Files of families that are not read are refused by name, though most of their keys are those of one that is."""

from pathlib import Path

import pytest
import torch

from ldm_lite.checkpoint.reader import parts_of
from ldm_lite.core.files import Tensors

# Some keys of diffusers' classes (0.42), of the makers' files and of ComfyUI's.
OF_FLUX = ("transformer_blocks.0.attn.to_q.weight", "single_transformer_blocks.0.proj_mlp.weight", "x_embedder.weight")
KEYS: dict[str, tuple[str, ...]] = {
    "LongCat-Image or Bria": ("time_embed.timestep_embedder.linear_1.weight", "context_embedder.weight", *OF_FLUX),
    "Bria FIBO": ("caption_projection.0.linear.weight", "time_embed.timestep_embedder.linear_1.weight", *OF_FLUX),
    "Ovis-Image": ("context_embedder_norm.weight", "timestep_embedder.linear_1.weight", *OF_FLUX),
    "HunyuanImage": ("context_embedder.token_refiner.refiner_blocks.0.norm1.weight", *OF_FLUX),
    "Kandinsky 5": ("visual_transformer_blocks.0.feed_forward.in_layer.weight", "text_embeddings.in_layer.weight"),
    "Sana": ("transformer_blocks.0.ff.conv_inverted.weight", "caption_norm.weight", "patch_embed.proj.weight"),
    "a file of Nunchaku": ("transformer_blocks.0.mlp_fc1.qweight", "transformer_blocks.0.mlp_fc1.wscales", *OF_FLUX),
}
OF_COMFYUI: dict[str, tuple[str, ...]] = {
    "Ovis-Image": ("double_blocks.0.img_attn.norm.key_norm.scale", "double_blocks.0.img_mlp.gate_proj.weight"),
    "HunyuanImage": ("double_blocks.0.img_attn_qkv.weight", "txt_in.individual_token_refiner.blocks.0.norm1.weight"),
    "Sana": ("blocks.0.mlp.inverted_conv.conv.weight", "attention_y_norm.weight"),
}


@pytest.mark.parametrize("table", [KEYS, OF_COMFYUI])
@pytest.mark.parametrize("before", ["", "model.diffusion_model."])
def test_look_alikes_are_refused_by_name(table: dict[str, tuple[str, ...]], before: str) -> None:
    for name, keys in table.items():
        file = Tensors(Path("f.safetensors"), {before + key: (4, 4) for key in keys}, lambda key: torch.zeros(4, 4))
        with pytest.raises(ValueError, match=rf"^f\.safetensors: is {name}\b") as caught:
            parts_of(file)
        assert "\n" not in str(caught.value)
