"""Models go through pickles, files of torch, deep copies and other processes: the same images, each weight once."""

import copy
import io
import multiprocessing
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import esrgan
import numpy as np
import pytest
import torch
import toy
from numpy.typing import NDArray
from safetensors.torch import save_file
from torch import Tensor

import ldm_lite
from ldm_lite import Pipeline
from ldm_lite.core.layers import sdpa
from ldm_lite.runtime import attention, joined
from ldm_lite.runtime.compile import CompiledStep
from ldm_lite.runtime.patching import twin
from ldm_lite.runtime.seamless import axes_of, seamless
from ldm_lite.toolkit import with_exact_batches

pytestmark = pytest.mark.usefixtures("own_kernels")

WAYS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"dtype": "bf16"},
    "plain kernels": {"kernels": "plain"},
    "int8": {"storage": "int8"},
    "fp8": {"storage": "fp8"},
    "offloaded": {"offload": "model"},
    "sequential": {"offload": "sequential"},
    "sequential int8": {"offload": "sequential", "storage": "int8"},
    "offloaded fp8, bf16": {"offload": "model", "storage": "fp8", "dtype": "bf16"},
    "tiles": {"vae_tiling": True},
    "sliced": {"attention": "sliced:4"},
    "mha": {"attention": "mha"},
    "fastest": {"attention": "fastest"},
}


def shot(pipe: Pipeline, **options: Any) -> NDArray[np.uint8]:
    [array] = pipe.txt2img("a red apple", steps=2, seed=1, width=32, height=32, output="numpy", **options)
    return array


def assert_same(ours: NDArray[np.uint8], expected: NDArray[np.uint8]) -> None:
    """Kernels may round otherwise where weights lie at other addresses."""
    assert np.abs(ours.astype(int) - expected).max() <= 1


def by_pickle(value: Any) -> Any:
    return pickle.loads(pickle.dumps(value))


def by_torch(value: Any) -> Any:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


CARRIERS: dict[str, Callable[[Any], Any]] = {"pickle": by_pickle, "torch": by_torch, "deepcopy": copy.deepcopy}


def num_bytes(pipe: Pipeline) -> int:
    networks = pipe.networks.values()
    return sum(tensor.nbytes for network in networks for tensor in (*network.parameters(), *network.buffers()))


@pytest.mark.thin(4)
@pytest.mark.parametrize("carrier", CARRIERS)
@pytest.mark.parametrize("way", WAYS)
def test_the_same_images(small_path: Path, way: str, carrier: str) -> None:
    pipe = ldm_lite.load(small_path, device="cpu", **WAYS[way])
    expected = shot(pipe)
    again = CARRIERS[carrier](pipe)
    assert_same(shot(again), expected)
    assert_same(shot(pipe), expected)
    twice = CARRIERS[carrier](again)
    assert_same(shot(twice), expected)
    assert (again.device, again.dtype, repr(again)) == (pipe.device, pipe.dtype, repr(pipe))


@pytest.mark.parametrize("way", WAYS)
def test_every_weight_is_in_it_once(small_path: Path, way: str) -> None:
    pipe = ldm_lite.load(small_path, device="cpu", **WAYS[way])
    size, weights = len(pickle.dumps(pipe)), num_bytes(pipe)
    assert weights < size < 1.25 * weights + 2**21


def test_copies_have_weights_of_their_own(small_path: Path) -> None:
    for options in ({}, {"storage": "int8"}, {"offload": "sequential"}):
        pipe = ldm_lite.load(small_path, device="cpu", **options)
        expected = shot(pipe)
        for carry in CARRIERS.values():
            for parameter in carry(pipe).unet.parameters():
                parameter.data.zero_()
        assert_same(shot(pipe), expected)


def test_memory_that_is_shared(small: Pipeline) -> None:
    """On a GPU q, k and v share one tensor: pickles have it once, and keep it joined."""
    joined.use(small.unet)
    layers = list(joined.joined_layers(small.unet))
    assert layers
    expected, again = shot(small), by_pickle(small)
    assert len(pickle.dumps(small)) < 1.25 * num_bytes(small) + 2**21
    assert all(joined.is_joined(layer) for layer in joined.joined_layers(again.unet))
    assert len(list(joined.joined_layers(again.unet))) == len(layers)
    assert_same(shot(again), expected)


def test_patches_are_still_what_they_were(small: Pipeline) -> None:
    circular = small.with_networks(vae=seamless(small.vae, "x"), unet=seamless(small.unet, "x"))
    expected = shot(circular)
    for carry in CARRIERS.values():
        again = carry(circular)
        assert axes_of(again.unet) == "x"
        assert axes_of(again.vae) == "x"
        assert_same(shot(again), expected)
    exact = with_exact_batches(small)
    assert exact is not None
    assert_same(shot(by_pickle(exact)), shot(exact))


def test_compiled_steps_are_compiled_anew(small: Pipeline) -> None:
    step = CompiledStep("regional", small.unet, "eager")
    again = by_pickle(small.with_networks()).run_row
    assert again is small.run_row
    carried = by_pickle((small, step))
    assert carried[1]._network is carried[0].unet
    assert carried[1].tier == "regional"


def mine(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention with a name."""
    return sdpa(q, k, v * 0.5)


def test_attention_of_your_own(small: Pipeline, tmp_path: Path) -> None:
    small.use_attention(mine, "*attn2")
    assert_same(shot(by_pickle(small)), shot(small))
    small.use_attention(lambda q, k, v: mine(q, k, v))
    assert_same(shot(copy.deepcopy(small)), shot(small))
    message = r"^cannot pickle the unet: .*attn1\.attention, <function .*lambda.*: .*functions must have a name[^\n]*$"
    with pytest.raises(pickle.PicklingError, match=message), open(tmp_path / "a.pkl", "wb") as file:
        pickle.dump([small], file)
    assert (tmp_path / "a.pkl").stat().st_size == 0
    with pytest.raises(pickle.PicklingError, match=message):
        torch.save(small, io.BytesIO())
    small.use_attention("sdpa")
    assert_same(shot(by_pickle(small)), shot(small))
    with attention.record(small.unet) as maps:
        by_pickle(small)
    assert not any(maps.values())


def test_what_computes_is_refused(small_path: Path) -> None:
    pipe = ldm_lite.load(small_path, device="cpu", offload="model")
    with pipe.phase("unet"), pytest.raises(pickle.PicklingError, match=r"the offloader.*its networks are computing"):
        pickle.dumps(pipe)
    assert_same(shot(by_pickle(pipe)), shot(pipe))
    stored = ldm_lite.load(small_path, device="cpu", storage="int8")
    with pytest.raises(pickle.PicklingError, match="cannot pickle the unet: its weights move"):
        pickle.dumps(stored.with_networks(unet=twin(stored.unet)))


def test_networks_alone(small_path: Path) -> None:
    x, t, context = torch.randn(1, 4, 8, 8), torch.tensor([5.0]), torch.randn(1, 77, 64)
    pipe = ldm_lite.load(small_path, device="cpu", offload="sequential")
    context = context.expand(1, 77, 64)[..., : pipe.encode_prompt("a").context.shape[-1]]
    with torch.no_grad():
        torch.testing.assert_close(by_pickle(pipe.unet)(x, t, context), pipe.unet(x, t, context))
    stored = ldm_lite.load(small_path, device="cpu", storage="int8")
    for carry in CARRIERS.values():
        with (
            pytest.raises(RuntimeError, match="lacks the scales of its 8-bit weights: copy the pipeline"),
            torch.no_grad(),
        ):
            carry(stored.unet)(x, t, context)


def test_loras_come_along(small_path: Path, tmp_path: Path) -> None:
    for options in ({}, {"storage": "int8"}):
        pipe = ldm_lite.load(small_path, device="cpu", **options)
        plain = shot(pipe)
        shapes = {name: tuple(layer.weight.shape) for name, layer in pipe.unet.named_modules() if name.endswith("to_q")}
        weights: dict[str, Tensor] = {}
        for name, (rows, columns) in shapes.items():
            weights[f"lora_unet_{name.replace('.', '_')}.lora_down.weight"] = torch.randn(4, columns)
            weights[f"lora_unet_{name.replace('.', '_')}.lora_up.weight"] = torch.randn(rows, 4)
        save_file(weights, tmp_path / "a.safetensors")
        lora = by_pickle(ldm_lite.open_lora(tmp_path / "a.safetensors"))
        merged = pipe.lora(lora, 0.7)
        expected = shot(pipe)
        assert not np.array_equal(expected, plain)
        for carry in CARRIERS.values():
            copied, copied_merged = carry((pipe, merged))
            assert_same(shot(copied), expected)
            copied_merged.remove()
            assert_same(shot(copied), plain)
        assert_same(shot(pipe), expected)
        merged.remove()
        assert_same(shot(pipe), plain)


def test_what_runs_take_and_give(small: Pipeline) -> None:
    [result] = small.txt2img("a cat", steps=2, width=32, height=32, output="result")
    cond, plan = small.encode_prompt("a cat"), small.plan("euler_a", 3)
    adaptive = small.plan("dpm_adaptive", 3)
    for carry in CARRIERS.values():
        again = carry(result)
        assert (again.parameters, again.seed, again.prompt) == (result.parameters, result.seed, result.prompt)
        assert np.array_equal(np.asarray(again.image), np.asarray(result.image))
        assert torch.equal(carry(cond).context, cond.context)
        assert np.array_equal(carry(plan).level, plan.level)
        assert type(carry(adaptive)) is type(adaptive)
        noise = small.noise(height=32, width=32)
        latents = [
            small.denoise(noise, c, None, p, draw=small.noise_source(height=32, width=32))
            for c, p in ((cond, plan), (carry(cond), carry(plan)))
        ]
        assert torch.equal(*latents)


def _in_child(pipe: Pipeline) -> NDArray[np.uint8]:
    return shot(pipe)


@pytest.mark.slow
@pytest.mark.parametrize("way", ["fp32", "sequential int8"])
def test_another_process(small_path: Path, way: str) -> None:
    pipe = ldm_lite.load(small_path, device="cpu", **WAYS[way])
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        [image] = pool.map(_in_child, [pipe])
    assert_same(image, shot(pipe))


def test_cloudpickle(small_path: Path) -> None:
    cloudpickle = pytest.importorskip("cloudpickle")
    pipe = ldm_lite.load(small_path, device="cpu", storage="int8")
    assert_same(shot(pickle.loads(cloudpickle.dumps(pipe))), shot(pipe))


def test_every_family(flow_path: Path) -> None:
    pipe = ldm_lite.load(flow_path, device="cpu")
    options: dict[str, Any] = {"steps": 1, "width": 32, "height": 32, "output": "numpy"}
    for carry in CARRIERS.values():
        assert_same(carry(pipe).txt2img("a cat", **options)[0], pipe.txt2img("a cat", **options)[0])


def test_controls_and_upscalers(small: Pipeline, tmp_path: Path) -> None:
    save_file(toy.control(small.unet.spec), tmp_path / "control.safetensors")
    torch.save({"params": esrgan.weights(2)}, tmp_path / "small.pth")
    control = ldm_lite.Control(tmp_path / "control.safetensors", toy.photo(32, 32), weight=0.7)
    expected = shot(small, control=[control])
    upscaler = ldm_lite.Upscaler(tmp_path / "small.pth", device="cpu")
    for carry in CARRIERS.values():
        assert_same(shot(small, control=[carry(control)]), expected)
        pipe, copied = carry((small, control))
        assert_same(shot(pipe, control=[copied]), expected)
        assert carry(upscaler)(toy.photo(16, 16)).tobytes() == upscaler(toy.photo(16, 16)).tobytes()
