"""Offloading and quantisation: weights are on the device while they compute, and results are the same.

Copies to the device are clones here, so that the device's and the stored weights differ in memory on a CPU too.
"""

import contextlib
import copy
import gc
import threading
import weakref
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import toy
from PIL import Image
from random_checkpoint import SMALL
from safetensors.torch import save_file
from torch import Tensor, nn
from waiting import at_once

import ldm_lite
from ldm_lite import Pipeline
from ldm_lite.checkpoint.reader import on_meta
from ldm_lite.control.control import parse
from ldm_lite.control.loading import load_controls
from ldm_lite.runtime import offload
from ldm_lite.runtime.offload import _blocks
from ldm_lite.runtime.quantization import STORAGES, Quantized, dequantize, quantize
from ldm_lite.zoo.families import FAMILY_ROWS
from ldm_lite.zoo.family import build_network


class Device:
    """Counts the numbers in the tensors on the pretended device."""

    def __init__(self) -> None:
        self.now = self.peak = 0
        self.shapes: list[tuple[int, ...]] = []  # of all that came
        self.lock = threading.RLock()

    def dequantize(self, kept: Quantized, device: torch.device) -> Tensor:
        value = dequantize(kept, device).clone()
        with self.lock:
            self.shapes.append(tuple(value.shape))
            self.now += value.numel()
            self.peak = max(self.peak, self.now)
        weakref.finalize(value.untyped_storage(), self._freed, value.numel())
        return value

    def _freed(self, count: int) -> None:
        with self.lock:
            self.now -= count


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    device = Device()
    monkeypatch.setattr(offload, "dequantize", device.dequantize)
    return device


def load(path: Path, **tuning: object) -> Pipeline:
    return ldm_lite.load(path, device="cpu", **tuning)


def image(pipe: Pipeline) -> Tensor:
    [result] = pipe.txt2img("a red apple", steps=2, output="result")
    return result.pixels


def size(network: nn.Module) -> int:
    return sum(tensor.numel() for tensor in network.state_dict().values())


@pytest.mark.parametrize("mode", ["model", "sequential"])
def test_the_image_is_the_same_and_the_device_is_empty_after_it(small_path: Path, device: Device, mode: str) -> None:
    wanted = image(load(small_path))
    pipe = load(small_path, offload=mode)
    assert torch.equal(image(pipe), wanted)
    assert device.now == 0
    assert pipe.device == torch.device("cpu")
    assert pipe.dtype == torch.float32
    networks = (pipe.unet, pipe.vae, pipe.text_encoder)
    if mode == "model":
        assert device.peak == max(map(size, networks)), "more than one network at a time"
    else:
        largest = max(size(block) for network in networks for block in _blocks(network))
        assert device.peak == largest, "more than one block at a time"


def test_the_text_of_a_whole_job_is_embedded_first(small_path: Path, device: Device, tmp_path: Path) -> None:
    (tmp_path / "prompts.txt").write_text("cat\ndog\napple\n")
    options = {"from_file": str(tmp_path / "prompts.txt"), "steps": 1, "output": "tensor"}
    pipe = load(small_path, offload="model")
    results = pipe.txt2img(**options)
    assert device.shapes.count(tuple(pipe.text_encoder.embeddings.token_embedding.weight.shape)) == 1
    for result, wanted in zip(results, load(small_path).txt2img(**options), strict=True):
        # Not bit for bit: a matrix product of more rows may add them up in another order.
        torch.testing.assert_close(result, wanted, rtol=1e-4, atol=1e-4)
    assert (results[0] - results[1]).abs().max() > 1e-2


def test_what_is_needed_next_is_fetched_ahead() -> None:
    """On a GPU; the order of the blocks is learned in the first forward."""

    def block(size: int) -> Any:
        return Mock(size=size)

    order, groups = offload._Order(), [block(offload.AHEAD) for _ in range(3)]
    assert [order.after(group) for group in groups] == [[], [], []]
    assert [order.after(group) for group in groups] == [[groups[1]], [groups[2]], [groups[0]]]
    small, last = block(offload.AHEAD // 2), groups[2]
    order, blocks = offload._Order(), [groups[0], small, last]  # as in a ControlNet, with 1x1 convolutions in between
    for group in blocks:
        order.after(group)
    assert [order.after(group) for group in blocks] == [[small, last], [last], [groups[0]]]
    order, blocks = offload._Order(), [block(1) for _ in range(3)]
    for group in (*blocks, *blocks):
        assert len(order.after(group)) <= 2, "what computes, or was found, is found again"


def test_what_was_fetched_ahead_and_not_used_is_dropped_after_the_phase(
    small_path: Path, device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the first blocks of a next step, and the table of the tokens, would stay."""

    def prefetch(group: Any) -> None:
        if group._users == 0 and group._ready is None:
            group._ready = group._restore()  # as on a GPU, but without a stream

    monkeypatch.setattr(offload._Group, "prefetch", prefetch)
    pipe = load(small_path, offload="sequential")
    assert torch.equal(image(pipe), image(load(small_path)))
    assert device.now == 0


@pytest.mark.parametrize("name", [None, *STORAGES])
def test_copies_ahead_of_time_wait_for_what_their_memory_was_before(
    monkeypatch: pytest.MonkeyPatch, name: str | None
) -> None:
    """On a GPU: they are allocated on the computing stream, so they wait for its queue, and it waits for them."""
    cpu, events = torch.device("cpu"), list[str]()
    main = SimpleNamespace(wait_event=lambda event: events.append(f"main waits for {event}"))
    stream = SimpleNamespace(
        wait_stream=lambda awaited: events.append("the copy waits" if awaited is main else "?"),
        record_event=lambda: events.append("copied") or "copied",
    )
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: main)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    monkeypatch.setattr(Tensor, "record_stream", lambda self, user: events.append("kept") if user is stream else None)
    layer = nn.Conv2d(4, 4, 3).half().requires_grad_(False).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    kept = {tensor: quantize(tensor.data, name) for tensor in layer.parameters()}
    wanted = [dequantize(stored, cpu) for stored in kept.values()]
    group = offload._Group(kept, cpu, stream)
    group.prefetch()
    assert events == ["the copy waits", "copied"]
    with group:
        assert events[2:] == ["main waits for copied"]
        for (tensor, stored), value in zip(kept.items(), wanted, strict=True):
            assert torch.equal(tensor, value)
            assert tensor.dtype == torch.float16
            assert tensor.stride() == value.stride()
            assert tensor.data_ptr() != stored.values.data_ptr()
    assert all(tensor.data_ptr() == stored.values.data_ptr() for tensor, stored in kept.items())
    assert "kept" not in events
    group.prefetch()  # a network that goes before it is needed again
    del group
    assert events[-2:] == ["kept", "kept"]


def test_every_thread_waits_for_the_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU: the second user of a block may compute on another stream than the one that brought it."""
    events: list[str] = []
    streams = {name: SimpleNamespace(name=name, wait_event=lambda event, n=name: events.append(n)) for name in "ab"}
    current = ["a"]
    side = SimpleNamespace(wait_stream=lambda awaited: None, record_event=lambda: "copied")
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: streams[current[0]])
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    monkeypatch.setattr(Tensor, "record_stream", lambda self, user: events.append(f"kept for {user.name}"))
    layer = nn.Linear(8, 8, bias=False).requires_grad_(False)
    group = offload._Group({layer.weight: quantize(layer.weight.data, None)}, torch.device("cpu"), side)
    with group:
        current[0] = "b"
        with group:
            assert events == ["a", "kept for a", "b", "kept for b"]


def test_tensors_in_pinned_memory_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    pieces = pretended_pinning(monkeypatch)
    convolution = nn.Conv2d(4, 6, 3).half().to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    weights = [convolution.weight.data, torch.arange(3), torch.ones(5)[None], torch.empty(0)]
    copies = [copy for _, copy in sorted(offload.in_pinned_memory(weights), key=lambda pair: pair[0])]
    assert len(pieces) == 1
    for value, weight in zip(copies, weights, strict=True):
        assert torch.equal(value, weight)
        assert (value.dtype, value.stride()) == (weight.dtype, weight.stride())
    copies[0].zero_()
    assert torch.equal(copies[1], weights[1])
    assert weights[0].any()


def pretended_pinning(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Have torch.empty take plain memory for pinned memory; return the list of how many bytes torch would pin."""
    pieces, empty = list[int](), torch.empty

    def pretended(*shape: Any, pin_memory: bool = False, **how: Any) -> Tensor:
        tensor = empty(*shape, **how)
        if pin_memory:
            pieces.append(1 << (tensor.nbytes - 1).bit_length())  # CachingHostAllocator
        return tensor

    monkeypatch.setattr(torch, "empty", pretended)
    return pieces


@pytest.mark.parametrize("name", ["sd1", "sdxl_base", "flux_dev", "qwen_image"])
def test_hardly_more_is_pinned_than_the_weights(name: str) -> None:
    for spec in FAMILY_ROWS[name].specs.values():
        with on_meta():
            network = build_network(spec).half()
        sizes = [tensor.nbytes for tensor in offload._tensors(network)]
        pinned = [size for size, _ in offload.packed(sizes)]
        assert all(size.bit_count() == 1 for size in pinned)
        assert sum(sizes) <= sum(pinned) <= 1.1 * sum(sizes)


@pytest.mark.parametrize("storage", [None, "int8"])
@pytest.mark.parametrize("mode", ["model", "sequential"])
def test_offloaded_networks_are_pinned_once(mode: str, storage: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Values in 8 bits that a phase moves are in the memory that their blocks know."""
    pieces = pretended_pinning(monkeypatch)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: None)
    network = toy.network(SMALL.unet).requires_grad_(False)
    before = {name: value.clone() for name, value in network.state_dict().items()}
    offloader = offload.Offloader({"unet": network}, torch.device("cuda"), offload=mode, storage=storage)
    homes = {tensor: group.kept[tensor] for tensor, group in offloader._groups.items()}
    bytes_of = {
        value.untyped_storage().data_ptr(): 0 for home in homes.values() for value in home[:2] if value is not None
    }
    assert len(bytes_of) == len(pieces)
    kept = [value for name, p in network.named_parameters() for value in offloader.kept(p)[:2] if value is not None]
    assert sum(pieces) <= 1.1 * sum(value.nbytes for value in kept)
    for name, value in network.named_parameters():
        restored = dequantize(offloader.kept(value), torch.device("cpu"))
        torch.testing.assert_close(restored, before[name], rtol=0, atol=0 if storage is None else 0.05)


@pytest.mark.parametrize("name", [None, *STORAGES])
def test_a_prefetched_copy_is_not_used_after_writing(monkeypatch: pytest.MonkeyPatch, name: str | None) -> None:
    cpu, kept_for = torch.device("cpu"), list[object]()
    main = SimpleNamespace(wait_event=lambda event: None)
    stream = SimpleNamespace(wait_stream=lambda awaited: None, record_event=lambda: "copied")
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: main)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    monkeypatch.setattr(Tensor, "record_stream", lambda self, user: kept_for.append(user))
    layer = nn.Linear(8, 8, bias=False).requires_grad_(False)
    offloader = offload.Offloader({}, cpu, storage=name)
    group = offload._Group({layer.weight: quantize(layer.weight.data, name)}, cpu, stream)
    offloader._groups[layer.weight] = group
    fresh = toy.normal(0, 8, 8)
    group.prefetch()
    if name is None:
        offloader.write(layer.weight, fresh)
    else:
        with offloader.changing(layer.weight) as kept:
            kept.changes.append(lambda weight: weight.copy_(fresh))
    assert kept_for == [stream], "the memory is used again before the copy has ended"
    with group:
        assert torch.equal(layer.weight, fresh)


@pytest.mark.parametrize("storage", [None, "int8"])
@pytest.mark.parametrize("mode", ["model", "sequential"])
def test_writing_while_a_network_computes(small_path: Path, device: Device, mode: str, storage: str | None) -> None:
    """Both the copy on the device and the kept weight change, and the latter stays in its memory."""
    pipe = load(small_path, offload=mode, storage=storage)
    assert pipe.offloader is not None
    block = pipe.unet.middle_block[0]
    weight = block.in_layers[2].weight
    fresh = toy.normal(0, *weight.shape)
    home, seen = weight.data_ptr(), list[Tensor]()

    def hook(module: nn.Module, args: object) -> None:
        if storage is None:
            pipe.offloader.write(weight, fresh)
        else:
            with pipe.offloader.changing(weight) as kept:
                kept.changes.append(lambda value: value.copy_(fresh))
        seen.append(weight.clone())

    x, context, _ = toy.unet_inputs(pipe.family.unet)
    handle = block.in_layers[2].register_forward_pre_hook(hook)
    with pipe.phase("unet"):
        first = pipe.unet(x, toy.T, context)
        handle.remove()
        assert torch.equal(pipe.unet(x, toy.T, context), first)
    assert torch.equal(seen[0], fresh)
    assert torch.equal(pipe.offloader.read(weight, torch.device("cpu")), fresh)
    assert weight.data_ptr() == home
    with pipe.phase("unet"):
        assert torch.equal(pipe.unet(x, toy.T, context), first)


@pytest.mark.slow
def test_controls_come_block_by_block_too(small_path: Path, device: Device, tmp_path: Path) -> None:
    """ControlNets, also those of differences, and T2I-Adapters; two threads may use them; the job frees them."""
    weights, base = toy.control(SMALL.unet), load(small_path).unet.state_dict()
    save_file(weights, tmp_path / "net.safetensors")
    deltas = {key: value - base[key] if key in base else value for key, value in weights.items()}
    save_file({**deltas, "difference": torch.ones(1)}, tmp_path / "difference.safetensors")
    save_file(toy.adapter(), tmp_path / "adapter.safetensors")
    Image.fromarray(toy.photo()).save(tmp_path / "photo.png")
    names = ("net.safetensors", "difference.safetensors", "adapter.safetensors")
    controls = tuple(f"{tmp_path / name}:{tmp_path / 'photo.png'}:0.5" for name in names)
    options = {"steps": 2, "control": controls, "output": "tensor"}
    [wanted], pipe = load(small_path).txt2img("a red apple", **options), load(small_path, offload="sequential")
    device.peak = 0
    [result] = pipe.txt2img("a red apple", **options)
    torch.testing.assert_close(result, wanted, rtol=1e-4, atol=1e-4)  # differences are rounded
    assert device.shapes.count((16, 3, 3, 3)) == 2  # the control images are encoded once a job
    nets = [control.network for control in load_controls(pipe, parse(controls))]
    assert all(sum(map(size, _blocks(net))) == size(net) for net in nets), "a weight is outside of all blocks"
    assert device.now == 0
    assert device.peak == max(size(block) for net in (*pipe.networks.values(), *nets) for block in _blocks(net))
    for [threaded] in at_once(*[lambda: pipe.txt2img("a red apple", **options)] * 2):
        assert torch.equal(threaded, result)
    storages = [weakref.ref(value.untyped_storage()) for net in nets for value in net.state_dict().values()]
    del nets
    gc.collect()
    assert device.now == 0
    assert all(ref() is None for ref in storages)


@pytest.mark.parametrize("name", list(STORAGES))
@pytest.mark.parametrize("mode", [None, "model", "sequential"])
def test_eight_bits(small_path: Path, device: Device, name: str, mode: str | None) -> None:
    """Weights take a quarter of their memory in float32, except the autoencoder's, and the result is close.

    Random weights do not forgive: a trained model's error is smaller, and in docs/performance.md.
    """
    plain = load(small_path)
    pipe = load(small_path, storage=name, offload=mode)
    kept = sum(value.nbytes for value in pipe.unet.state_dict().values())
    assert kept < 0.27 * sum(value.nbytes for value in plain.unet.state_dict().values())
    assert all(value.dtype == torch.float32 for value in pipe.vae.state_dict().values())
    x, context, _ = toy.unet_inputs(pipe.family.unet)
    with pipe.phase("unet"):
        error = toy.relative_error(pipe.unet(x, toy.T, context), plain.unet(x, toy.T, context).double().numpy())
    assert 1e-4 < error < {"int8": 0.04, "fp8": 0.15}[name]
    assert pipe.dtype == torch.float32
    assert torch.isfinite(image(pipe)).all()
    if mode is not None:
        assert device.now == 0


@pytest.mark.parametrize(("name", "steps"), [("int8", 254), ("fp8", 16)])
def test_the_error_of_a_weight_is_that_of_its_type(name: str, steps: int) -> None:
    weight = toy.normal(0, 8, 64) * torch.logspace(-3, 3, 8)[:, None]
    error = dequantize(quantize(weight, name), weight.device) - weight
    largest = weight.abs().amax(dim=1, keepdim=True)
    assert (error.abs() <= 1.01 * (largest / steps if name == "int8" else weight.abs() / steps + largest / 2**17)).all()
    # In a file that is mapped, tensors lie beside each other: what is kept as it is must not keep all of them.
    norm = toy.normal(2, 8)[1]
    values, scale, dtype, _ = quantize(norm, name)
    assert torch.equal(values, norm)
    assert (scale, dtype) == (None, norm.dtype)
    assert quantize(torch.arange(8).view(2, 4), name).scale is None, "whole numbers stay"
    assert values.untyped_storage().nbytes() == norm.nbytes < norm.untyped_storage().nbytes()


def test_two_threads(small_path: Path, device: Device) -> None:
    wanted = image(load(small_path))
    for tuning in ({"offload": "model"}, {"offload": "sequential"}, {"storage": "int8", "offload": "model"}):
        pipe = load(small_path, **tuning)
        if "storage" in tuning:
            wanted = image(pipe)
        assert all(torch.equal(result, wanted) for result in at_once(*[partial(image, pipe)] * 2))
        assert device.now == 0


def test_an_error_leaves_nothing_on_the_device(small_path: Path, device: Device) -> None:
    for mode in ("model", "sequential"):
        pipe = load(small_path, offload=mode)
        with pytest.raises(RuntimeError), pipe.phase("unet"):
            pipe.unet(torch.zeros(1, 4, 8, 8), torch.zeros(1), torch.zeros(1, 3, 7))
        assert device.now == 0


def test_a_copy_in_float32_has_weights_of_its_own(small_path: Path, device: Device) -> None:
    """Decoding needs one when half precision overflows."""
    for mode in ("model", "sequential"):
        pipe = load(small_path, offload=mode, vae_tiling=True)
        z = toy.normal(0, 1, 4, 8, 8)
        [wanted] = pipe.decode(z, output="tensor")
        whole = copy.deepcopy(pipe.vae).double()
        pixels = whole.decode(z.double() / pipe.family.scale_factor)
        assert toy.relative_error(pixels[0].clamp(-1, 1), wanted.double().numpy()) < 1e-5


@pytest.mark.slow
def test_a_deleted_pipeline_returns_its_memory(small_path: Path) -> None:
    for tuning in ({}, {"offload": "model"}, {"offload": "sequential"}, {"storage": "int8"}, {"vae_tiling": True}):
        pipe = load(small_path, **tuning)
        image(pipe)
        storages = [weakref.ref(value.untyped_storage()) for value in pipe.unet.state_dict().values()]
        networks = [weakref.ref(network) for network in pipe.networks.values()]
        assert any(ref() is not None for ref in networks)
        del pipe
        gc.collect()
        assert all(ref() is None for ref in (*networks, *storages)), tuning


def test_unknown_names() -> None:
    networks = {"unet": nn.Linear(2, 2)}
    for names in ({"offload": "disk", "storage": None}, {"offload": None, "storage": "fp4"}):
        with pytest.raises(ValueError, match=r"unknown (offload 'disk'|storage 'fp4'): expected one of"):
            offload.Offloader(networks, torch.device("cpu"), **names)
    assert STORAGES.keys() == {"fp8", "int8"}
