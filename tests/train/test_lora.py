"""LoRA training: only the LoRA changes, its file is kohya's, it can be removed, and runs resume exactly."""

import contextlib
import copy
import json
from pathlib import Path

import numpy as np
import pytest
import torch
import toy
from PIL import Image
from safetensors import safe_open
from torch import Tensor, nn
from training import load_options, options, train

import ldm_lite
from ldm_lite import Pipeline
from ldm_lite.image import grid, to_pil
from ldm_lite.runtime.patching import is_unmodified
from ldm_lite.train import run
from ldm_lite.train.additions import LoRA

GOLDEN = dict(np.load(Path(__file__).parents[1] / "data" / "lora.npz"))


def test_only_the_lora_has_gradients(small_path: Path) -> None:
    pipe = ldm_lite.load(small_path, device="cpu")
    x, context, _ = toy.unet_inputs(pipe.family.unet)
    before = pipe.unet(x, toy.T, context)
    lora = LoRA({"unet": pipe.unet}, rank=2, alpha=1.0)
    lora.attach({"unet": pipe.unet})
    assert torch.equal(pipe.unet(x, toy.T, context), before), "a new LoRA changes nothing"
    for _ in range(2):  # in the first step only the ups have one, as they are zero
        pipe.unet(x, toy.T, context).square().mean().backward()
        with torch.no_grad():
            for parameter in lora.parameters():
                assert parameter.grad is not None
                parameter -= 0.1 * parameter.grad
    assert all(parameter.grad.abs().sum() > 0 for parameter in lora.parameters())
    assert all(parameter.grad is None for parameter in pipe.unet.parameters())


def _networks(pipe: Pipeline) -> dict[str, nn.Module]:
    assert pipe.text_encoder is not None
    return {"unet": pipe.unet, "text_encoder": pipe.text_encoder}


def test_a_removed_lora_leaves_the_networks_as_they_were(small_path: Path) -> None:
    """Bit-equal output, no hooks, and parameters that were trainable are so again; a deep copy works by itself."""
    pipe = ldm_lite.load(small_path, device="cpu")
    networks = _networks(pipe)
    x, context, _ = toy.unet_inputs(pipe.family.unet)
    ids = torch.arange(154).view(2, 77)
    pipe.unet.out[2].requires_grad_(True)
    trainable = [p.requires_grad for network in networks.values() for p in network.parameters()]

    def run() -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            return pipe.unet(x, toy.T, context), networks["text_encoder"](ids)

    before = run()
    lora = LoRA(networks, rank=2)
    for parameter in lora.parameters():
        nn.init.normal_(parameter)
    with lora.attach(networks):
        with_lora = run()
        assert not any(torch.equal(a, b) for a, b in zip(with_lora, before, strict=True))
        assert not any(p.requires_grad for network in networks.values() for p in network.parameters())
        assert not is_unmodified(pipe.unet)
    assert all(torch.equal(a, b) for a, b in zip(run(), before, strict=True))
    for network in networks.values():
        assert is_unmodified(network)
        assert not any(module._forward_hooks for module in network.modules())
    assert [p.requires_grad for network in networks.values() for p in network.parameters()] == trainable

    attached = copy.deepcopy(lora).attach(networks)
    assert all(torch.equal(a, b) for a, b in zip(run(), with_lora, strict=True))
    attached.remove()
    attached.remove()  # a second time does nothing
    assert all(torch.equal(a, b) for a, b in zip(run(), before, strict=True))
    with pytest.raises(ValueError, match="was made for networks with other layers"):
        lora.attach({"unet": pipe.unet})
    assert is_unmodified(pipe.unet)


@pytest.mark.parametrize("lr", [1e-3, 1e36])
def test_training_removes_its_lora(
    tmp_path: Path, folder: Path, small_path: Path, monkeypatch: pytest.MonkeyPatch, lr: float
) -> None:
    """Also if it ends with an error, as with the second learning rate."""
    pipe = ldm_lite.load(small_path, device="cpu")
    monkeypatch.setattr(run, "load_model", lambda *args: pipe)
    run_options = options(folder, tmp_path, steps=1, lora_rank=2, lora_text=True, checkpointing=True, lr=lr, warmup=0)
    seen = list[bool]()
    with pytest.raises(ValueError, match="the loss is") if lr > 1 else contextlib.nullcontext():
        train(run_options, load_options(small_path), lambda step, loss: seen.append(is_unmodified(pipe.unet)))
    assert seen
    assert not any(seen), "the LoRA was attached while training"
    assert all(is_unmodified(network) for network in _networks(pipe).values())


def test_the_file_is_kohyas_and_gives_the_same_images(
    tmp_path: Path, folder: Path, small_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "SAMPLES", 4)
    monkeypatch.setattr(run, "SAMPLE_STEPS", 20)
    # In bfloat16 the frozen weights are rounded, and the run's own samples differ by more than a file's float16.
    monkeypatch.setattr(run, "has_fast_bf16", lambda device: False)
    extra = {"lora_rank": 4, "lora_alpha": 3.0, "lora_text": True, "save_every": 9, "lr": 1e-2}
    path = train(options(folder, tmp_path, **extra), load_options(small_path))
    with safe_open(path, "pt") as file:
        shapes = {key: file.get_slice(key).get_shape() for key in file.keys()}  # noqa: SIM118
        about = file.metadata()
    convolutions = ("resnets", "downsamplers", "upsamplers")  # kohya's own of the goldens has them too
    wanted = json.loads(str(GOLDEN["shapes"])) | {key: [] for key in json.loads(str(GOLDEN["alphas"]))}
    wanted = {k: v for k, v in wanted.items() if not any(c in k for c in convolutions)}
    assert shapes == wanted
    assert about["ss_network_dim"] == "4"
    assert about["ss_network_alpha"] == "3"
    assert about["ss_base_model_version"] == "sd_v1"
    assert about["step"] == "4"

    pipe = ldm_lite.load(small_path, device="cpu")
    before = pipe.unet.state_dict()["middle_block.1.transformer_blocks.0.attn1.to_q.weight"].clone()
    pipe.lora(path, 1.0)
    assert not torch.equal(before, pipe.unet.state_dict()["middle_block.1.transformer_blocks.0.attn1.to_q.weight"])
    noise = pipe.noise(range(4), height=64, width=64)
    cond, uncond = (pipe.encode_prompt([prompt] * 4) for prompt in ("picture 1", ""))
    plan = pipe.plan("dpmpp_2m", 20)
    latents = pipe.denoise(noise, cond, uncond, plan, pipe.family.scale)
    ours = grid([to_pil(pixels) for pixels in pipe.decode(latents, output="tensor")], columns=4)
    sheet = Image.open(tmp_path / "samples-0000004.png")  # from float32 averages; the file is float16
    assert np.abs(np.asarray(ours, dtype=int) - np.asarray(sheet, dtype=int)).mean() < 0.5


def test_a_rank_below_1_is_refused(tmp_path: Path, folder: Path, small_path: Path) -> None:
    with pytest.raises(ValueError, match="got a LoRA rank of 0, expected 1 or more"):
        LoRA({}, rank=0)
    with pytest.raises(ValueError, match=r"got `?lora_rank`? 0, expected 1 to 4096"):
        train(options(folder, tmp_path / "a", lora_rank=0), load_options(small_path))
