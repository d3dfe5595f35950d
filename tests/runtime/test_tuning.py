"""What load does to the networks it has loaded."""

import logging
from pathlib import Path

import pytest
import torch

import ldm_lite
from ldm_lite.cli import LoadOptions
from ldm_lite.runtime.attention import layers, vanilla


def functions(network: torch.nn.Module) -> set[object]:
    return {layer.attention for layer in layers(network).values()}


def test_the_attention_is_that_of_the_flag(small_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    arguments = LoadOptions(ckpt=str(small_path), device="cpu", attention="vanilla").arguments()
    pipe = ldm_lite.load(**arguments)
    assert functions(pipe.unet) == functions(pipe.vae) == {vanilla}
    with caplog.at_level(logging.INFO, "ldm_lite"):
        pipe = ldm_lite.load(small_path, device="cpu", tuning={"attention": "mha"})
    assert "vae keeps attention sdpa: attention 'mha' needs" in caplog.text
    for name, message in (("cudnn", "not available on cpu in fp32"), ("fast", "unknown attention")):
        with pytest.raises(ValueError, match=message):
            ldm_lite.load(small_path, device="cpu", tuning={"attention": name})


def test_without_the_flag_load_has_its_own_default() -> None:
    assert LoadOptions().arguments()["tuning"] == {}
