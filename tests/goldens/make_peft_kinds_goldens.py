"""Make tests/data/peft_kinds.npz: what networks with PEFT's LoHa, LoKr, OFT, BOFT, IA3 and a DoRA of words compute.

    pip install diffusers transformers peft lycoris-lora
    PYTHONPATH=tests/fixtures:. python tests/goldens/make_peft_kinds_goldens.py

As make_peft_goldens.py.  PEFT has only one stage of BOFT's butterfly on a CPU; several are put together from its own
permutations and rotations.
"""

import json
from pathlib import Path

import numpy as np
import peers
import peft
import torch
import toy
from make_peft_goldens import of_peft
from peft.tuners.boft.layer import Linear as BOFTLinear
from random_checkpoint import SMALL, state_dict
from torch import nn

from ldm_lite.text.tokenizer import FixingCLIPTokenizer

OUT = Path(__file__).resolve().parents[1] / "data" / "peft_kinds.npz"
LINEAR = ["to_q", "to_v", "to_out.0", "linear_1"]
BOTH = [*LINEAR, "proj_in", "conv1", "conv_shortcut"]
CONFIGS = {  # name -> network, configuration
    "loha": ("unet", peft.LoHaConfig(r=3, alpha=5, target_modules=BOTH, alpha_pattern={"conv1": 2})),
    "loha_core": ("unet", peft.LoHaConfig(r=3, alpha=5, target_modules=BOTH, use_effective_conv2d=True)),
    "lokr": ("unet", peft.LoKrConfig(r=3, alpha=5, target_modules=BOTH, rank_pattern={"to_q": 2}, decompose_factor=4)),
    "lokr_core": (
        "unet",
        peft.LoKrConfig(r=2, alpha=3, target_modules=BOTH, use_effective_conv2d=True, decompose_both=True),
    ),
    "lokr_whole": ("text", peft.LoKrConfig(r=300, alpha=100, target_modules=["q_proj", "fc1"])),
    "oft": ("unet", peft.OFTConfig(oft_block_size=8, r=0, target_modules=LINEAR, use_cayley_neumann=False)),
    "oft_series": ("unet", peft.OFTConfig(oft_block_size=16, r=0, target_modules=BOTH, num_cayley_neumann_terms=3)),
    "oft_shared": ("text", peft.OFTConfig(oft_block_size=4, r=0, target_modules=["q_proj", "fc2"], block_share=True)),
    "oft_limited": ("text", peft.OFTConfig(oft_block_size=8, r=0, target_modules=["fc1"], coft=True, eps=0.5)),
    "boft": ("unet", peft.BOFTConfig(boft_block_size=8, target_modules=[*LINEAR, "conv1"], bias="boft_only")),
    "ia3": ("unet", peft.IA3Config(target_modules=BOTH, feedforward_modules=["to_out.0", "conv_shortcut"])),
    "ia3_text": ("text", peft.IA3Config(target_modules=["k_proj", "v_proj", "fc2"], feedforward_modules=["fc2"])),
    "words": ("text", peft.LoraConfig(r=3, target_modules=["token_embedding", "v_proj"], use_dora=True)),
}
STAGES, BLOCKS, SIZE, ROWS = 3, 8, 4, 6


def butterfly() -> np.ndarray:
    """A weight of ROWS x BLOCKS * SIZE after BOFT in three stages."""
    width = BLOCKS * SIZE
    layer = BOFTLinear(nn.Linear(width, ROWS), "default", peft.BOFTConfig(boft_block_size=SIZE))
    total = torch.eye(width)
    for stage, blocks in enumerate(toy.normal(1, STAGES, BLOCKS, SIZE, SIZE)):
        order = layer.block_butterfly_perm(width, BLOCKS // 2**stage, SIZE // 2, STAGES - 1)
        place = torch.eye(width)[order]  # as BOFTLayer.perm2mat
        assert torch.equal(layer.perm2mat(order), place) or torch.equal(layer.perm2mat(order), place.T)
        place = layer.perm2mat(order)
        total = place @ torch.block_diag(*layer.cayley_batch(blocks)) @ place.T @ total
    return ((total @ toy.normal(0, ROWS, width).T).T * (1 + 0.1 * toy.normal(2, ROWS, 1))).numpy()


@torch.no_grad()
def main() -> None:
    """The command line."""
    x, context, _ = toy.unet_inputs(SMALL.unet)
    ids = FixingCLIPTokenizer()(["", "a red apple"])
    arrays: dict[str, object] = {"versions": json.dumps([peft.__version__, torch.__version__]), "ids": ids.numpy()}
    makers = {"unet": peers.unet, "text": peers.text_encoder}
    for name, (role, config) in CONFIGS.items():
        network, about = of_peft(makers[role](SMALL, dict(state_dict(SMALL))), config)
        arrays[f"{name}.about"] = json.dumps(about | {"role": role})
        if role == "unet":
            arrays[name] = network(x, toy.T, encoder_hidden_states=context).sample.numpy()
        else:
            arrays[name] = network(ids).last_hidden_state[:, ::5].numpy()
    arrays["butterfly"] = butterfly()
    np.savez_compressed(OUT, **{key: np.asarray(value) for key, value in arrays.items()})
    print(OUT, OUT.stat().st_size)


if __name__ == "__main__":
    main()
