"""Pipelines are saved as files that load() makes the same pipelines of, or not at all."""

import logging
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import random_checkpoint
import torch
import toy_zoo
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import ldm_lite
from ldm_lite import Pipeline
from ldm_lite.core.files import open_tensors
from ldm_lite.core.networks import split as core_split
from ldm_lite.runtime.seamless import seamless

SIZE: dict[str, Any] = {"steps": 2, "width": 64, "height": 64, "output": "tensor"}


def assert_same(ours: Pipeline, expected: Pipeline, **size: Any) -> None:
    """The weights have the same bits, but lie at other addresses, by which kernels may round otherwise."""
    images = [pipe.txt2img("a cat", **{**SIZE, **size})[0] for pipe in (ours, expected)]
    torch.testing.assert_close(*images, rtol=0, atol=1e-3)


def check(pipe: Pipeline, path: Path, **options: Any) -> Pipeline:
    """Save it, load it again, and compare all weights and an image."""
    pipe.save(path)
    again = ldm_lite.load(path, device="cpu", **options)
    for role, network in pipe.networks.items():
        values = again.networks[role].state_dict()
        assert values.keys() == network.state_dict().keys()
        for key, value in network.state_dict().items():
            assert value.dtype == values[key].dtype
            assert torch.equal(value.cpu(), values[key]), key
    assert replace(again.family, predicts=None) == replace(pipe.family, predicts=None)
    assert np.array_equal(again.schedule.alpha_bar, pipe.schedule.alpha_bar)
    assert again.schedule.prediction == pipe.schedule.prediction
    if pipe.family.task == "txt2img" and pipe.tokenizer is not None:
        assert_same(again, pipe)
    return again


@pytest.mark.parametrize("name", ["sd2", "sd_turbo", "sdxl_base", "sdxl_refiner"])
def test_families(name: str, tmp_path: Path) -> None:
    random_checkpoint.write(tmp_path / "source.safetensors", random_checkpoint.small(name))
    pipe = ldm_lite.load(tmp_path / "source.safetensors", device="cpu")
    check(pipe, tmp_path / "a.safetensors")
    source, saved = load_file(tmp_path / "source.safetensors"), load_file(tmp_path / "a.safetensors")
    assert saved.keys() - {"betas", "alphas_cumprod"} <= source.keys()


@pytest.mark.parametrize("name", ["ldm_celeba_ffhq_beds256", "x4", "ldm_cin256_v2", "ldm_text2img256"])
def test_other_families(name: str, tmp_path: Path) -> None:
    random_checkpoint.write(tmp_path / "source.safetensors", toy_zoo.small(name))
    check(ldm_lite.load(tmp_path / "source.safetensors", device="cpu"), tmp_path / "a.safetensors")


@pytest.mark.parametrize("prediction", ["eps", "v"])
@pytest.mark.parametrize("zero_snr", [False, True])
def test_what_the_user_told_of_it(small_path: Path, tmp_path: Path, prediction: str, zero_snr: bool) -> None:
    if prediction == "v" or not zero_snr:
        pipe = ldm_lite.load(small_path, device="cpu", prediction=prediction, zero_snr=zero_snr)
        check(replace(pipe, schedule=replace(pipe.schedule, spacing="trailing")), tmp_path / "a.safetensors")


def test_flow_families(flow_path: Path, tmp_path: Path) -> None:
    for vocabulary in flow_path.parent.iterdir():
        if vocabulary.suffix != ".safetensors" and vocabulary.is_file():
            shutil.copy(vocabulary, tmp_path)
    pipe = ldm_lite.load(flow_path, device="cpu")
    pipe.save(tmp_path / "a.safetensors")
    again = ldm_lite.load(tmp_path / "a.safetensors", device="cpu")
    assert_same(again, pipe, width=32, height=32)


def test_the_file_is_in_the_original_layout(pipe: Pipeline, tmp_path: Path) -> None:
    pipe.save(tmp_path / "a.safetensors")
    parts = core_split(open_tensors(tmp_path / "a.safetensors"))
    assert parts.keys() == {"unet", "vae", "clip"}
    with safe_open(tmp_path / "a.safetensors", "pt") as file:
        assert file.metadata()["prediction"] == "eps"


@pytest.mark.parametrize("options", [{"dtype": "bf16"}, {"dtype": "fp16"}, {"offload": "sequential"}])
def test_dtypes_and_offloading(small_path: Path, tmp_path: Path, options: dict[str, Any]) -> None:
    pipe = ldm_lite.load(small_path, device="cpu", **options)
    pipe.save(tmp_path / "a.safetensors")
    again = ldm_lite.load(tmp_path / "a.safetensors", device="cpu", **options)
    assert_same(again, pipe)
    if "dtype" in options:
        assert {value.dtype for key, value in load_file(tmp_path / "a.safetensors").items() if "." in key} == {
            pipe.dtype
        }


@pytest.mark.usefixtures("own_kernels")
@pytest.mark.parametrize(
    "options", [{}, {"vae_tiling": True}, {"attention": "mha"}, {"attention": "fastest"}, {"offload": "model"}]
)
def test_ways_to_run_it(small_path: Path, tmp_path: Path, options: dict[str, Any]) -> None:
    pipe = ldm_lite.load(small_path, device="cpu", **options)
    pipe.txt2img("a cat", **SIZE)
    check(pipe, tmp_path / "a.safetensors", **options)


def test_changes(small: Pipeline, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    shapes = {name: layer.weight.shape for name, layer in small.unet.named_modules() if name.endswith("to_q")}
    lora = {}
    for name, (rows, columns) in shapes.items():
        lora[f"lora_unet_{name.replace('.', '_')}.lora_down.weight"] = torch.randn(4, columns)
        lora[f"lora_unet_{name.replace('.', '_')}.lora_up.weight"] = torch.randn(rows, 4)
    save_file(lora, tmp_path / "lora.safetensors")
    plain = small.txt2img("a cat", **SIZE)[0]
    with small.lora(tmp_path / "lora.safetensors", 0.8):
        again = check(small, tmp_path / "a.safetensors")
        assert not torch.equal(again.txt2img("a cat", **SIZE)[0], plain)
    with torch.no_grad():
        small.vae.decoder.conv_out.weight.mul_(0.5)
    check(small, tmp_path / "a.safetensors")  # in place of the first
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith("a.")] == ["a.safetensors"]
    betas = np.linspace(0.001, 0.02, 1000)
    other_small = replace(small, schedule=replace(small.schedule, alpha_bar=np.cumprod(1 - betas)))
    check(other_small, tmp_path / "b.safetensors")
    caplog.set_level(logging.WARNING)


REFUSED: dict[str, tuple[Callable[[Path], Pipeline], str]] = {
    "int8": (
        lambda path: ldm_lite.load(path, device="cpu", storage="int8"),
        "weights in int8: load .* without `storage`",
    ),
    "hooks": (
        lambda path: _changed(path, lambda unet: unet.out[2].register_forward_hook(print)),
        "out.2: it has hooks",
    ),
    "attention": (
        lambda path: _changed(path, lambda unet: ldm_lite.runtime.attention.use(unet, lambda q, k, v: v)),
        "attention of your own.*use_attention",
    ),
    "layer": (
        lambda path: _changed(path, lambda unet: setattr(unet.out, "1", torch.nn.ReLU())),
        "out.1: it is a ReLU, where load\\(\\) would make a SiLU",
    ),
    "more": (
        lambda path: _changed(path, lambda unet: unet.add_module("more", torch.nn.Linear(2, 2))),
        "would make nothing",
    ),
    "seamless": (lambda path: _with(path, unet=lambda unet: seamless(unet, "x")), "another forward"),
    "family": (lambda path: _family(path, scale_factor=0.5, threshold=(0.9, 1.0)), "the family's threshold"),
}


def _changed(path: Path, change: Callable[[Any], Any]) -> Pipeline:
    pipe = ldm_lite.load(path, device="cpu")
    change(pipe.unet)
    return pipe


def _with(path: Path, unet: Callable[[Any], Any]) -> Pipeline:
    pipe = ldm_lite.load(path, device="cpu")
    return pipe.with_networks(unet=unet(pipe.unet))


def _family(path: Path, **values: Any) -> Pipeline:
    pipe = ldm_lite.load(path, device="cpu")
    return replace(pipe, family=replace(pipe.family, **values))


@pytest.mark.parametrize("what", REFUSED)
def test_what_a_file_cannot_hold(what: str, small_path: Path, tmp_path: Path) -> None:
    make, message = REFUSED[what]
    with pytest.raises(ValueError, match=message) as error:
        make(small_path).save(tmp_path / "a.safetensors")
    assert "\n" not in str(error.value)
    assert not list(tmp_path.iterdir())


def test_names(pipe: Pipeline, tmp_path: Path) -> None:
    for name, message in (("a.ckpt", "ends in .safetensors"), ("a", "ends in .safetensors")):
        with pytest.raises(ValueError, match=message):
            pipe.save(tmp_path / name)
    (tmp_path / "b.safetensors").mkdir()
    with pytest.raises(ValueError, match="is a folder"):
        pipe.save(tmp_path / "b.safetensors")
    with pytest.raises(FileNotFoundError, match="there is no folder"):
        pipe.save(tmp_path / "none" / "a.safetensors")
