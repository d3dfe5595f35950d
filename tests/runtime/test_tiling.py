"""The autoencoder strip by strip is the autoencoder, in less memory."""

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import toy
from random_checkpoint import SMALL
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from ldm_lite.cli.options import RuntimeOptions
from ldm_lite.core.vae import Decoder, VAESpec
from ldm_lite.models.taesd import TAESD, TAESDSpec
from ldm_lite.runtime import tiling
from ldm_lite.runtime.setup import prepare_networks
from ldm_lite.runtime.tiling import is_tiled, tiled


@pytest.fixture(autouse=True)
def _small_strips(monkeypatch: pytest.MonkeyPatch) -> None:
    """Strips of a few rows: of the finest feature maps of a (1,3,64,80) image, 1 to 3."""
    monkeypatch.setattr(tiling, "STRIP", 3 * 80 * 32)


@pytest.fixture(autouse=True)
def _no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


@pytest.mark.parametrize("rest", [None, "cpu"])
@pytest.mark.parametrize("spec", [SMALL.vae, toy.KL_F16], ids=["f8", "f16"])
def test_it_is_the_whole_image(spec: VAESpec, rest: str | None) -> None:
    """Up to rounding and without seams: encoding and decoding, with attention inside the levels and without."""
    vae = toy.network(spec)
    x = toy.normal(0, 2, 3, 8 * spec.factor, 10 * spec.factor)
    z = toy.normal(1, 2, spec.embed_dim, 8, 10)
    strips = tiled(vae, rest)
    wanted, pixels = vae.encode(x), vae.decode(z)
    for ours, theirs in (*zip(strips.encode(x), wanted, strict=True), (strips.decode(z), pixels)):
        assert (ours - theirs).abs().max() < 2e-5 * theirs.abs().max()
    assert strips.decoder.conv_out.weight is vae.decoder.conv_out.weight
    assert is_tiled(strips)
    assert not is_tiled(vae)
    assert torch.equal(vae.decode(z), pixels), "the network itself is as it was"


class AsOnGPUs(TorchDispatchMode):
    """Group norms refuse maps that are not contiguous, as torch's do on all devices but CPUs."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.native_group_norm.default:
            assert args[0].is_contiguous()
        return func(*args, **(kwargs or {}))


def test_other_devices_take_statistics_too() -> None:
    vae = toy.network(SMALL.vae).to("meta")
    x, z = torch.empty(2, 3, 64, 80, device="meta"), torch.empty(2, 4, 8, 10, device="meta")
    with AsOnGPUs():
        pixels, (mean, _) = tiled(vae, "meta").decode(z), tiled(vae).encode(x)
    assert (pixels.shape, mean.shape) == (x.shape, z.shape)


def test_half_precision_is_as_exact_as_the_whole() -> None:
    exact = toy.network(SMALL.vae)
    z = toy.normal(1, 1, 4, 8, 10)
    half = toy.network(SMALL.vae).bfloat16()
    errors = [float((vae.decode(z.bfloat16()).float() - exact.decode(z)).norm()) for vae in (half, tiled(half))]
    assert errors[1] < 1.2 * errors[0]


@pytest.mark.slow
def test_no_convolution_sees_more_than_a_strip() -> None:
    vae, largest = toy.network(SMALL.vae), {}

    def record(name: str) -> None:
        def hook(module: nn.Module, args: tuple[Tensor], output: Tensor) -> None:
            largest[name] = max(largest.get(name, 0), args[0].numel(), output.numel())

        for module in vae.decoder.up.modules():
            if isinstance(module, nn.Conv2d):
                handles.append(module.register_forward_hook(hook))

    handles: list[torch.utils.hooks.RemovableHandle] = []
    record("whole")
    z = toy.normal(1, 1, 4, 32, 32)
    vae.decode(z)
    for handle in handles:
        handle.remove()
    record("strips")
    tiled(vae).decode(z)
    # a strip, the rows beside it, and twice as high and wide after an upsampler
    assert largest["strips"] < largest["whole"] / 8


def test_an_image_of_one_strip_is_computed_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bit for bit up to the size of a strip; with one row more, up to rounding."""
    vae, channels = toy.network(SMALL.vae), SMALL.vae.channels
    x, z = toy.normal(0, 1, 3, 64, 80), toy.normal(1, 1, 4, 8, 10)
    monkeypatch.setattr(tiling, "STRIP", 64 * 80 * max(channels, vae.decoder.conv_out.in_channels))
    assert torch.equal(tiled(vae).encode(x)[0], vae.encode(x)[0])
    assert torch.equal(tiled(vae).decode(z), vae.decode(z))
    monkeypatch.setattr(tiling, "STRIP", 63 * 80 * channels)
    assert not torch.equal(tiled(vae).encode(x)[0], vae.encode(x)[0])
    assert not torch.equal(tiled(vae).decode(z), vae.decode(z))


def test_gradients_are_those_of_the_whole_image() -> None:
    vae = toy.network(SMALL.vae)
    gradients = []
    with torch.enable_grad():
        for network in (vae, tiled(vae)):
            z = toy.normal(1, 1, 4, 8, 10).requires_grad_()
            network.decode(z).square().sum().backward()  # type: ignore[no-untyped-call]
            gradients.append(z.grad)
    assert toy.relative_error(gradients[1], gradients[0].double().numpy()) < 1e-5


def test_gradients_that_nothing_needs_change_nothing() -> None:
    """Outside of no_grad too an image is decoded in the memory of strips."""
    vae, z = toy.network(SMALL.vae).requires_grad_(False), toy.normal(1, 1, 4, 8, 10)
    strips = tiled(vae).decode(z)
    assert not torch.equal(strips, vae.decode(z))
    with torch.enable_grad():
        assert torch.equal(tiled(vae).decode(z), strips)


def test_it_is_how_large_images_are_decoded_on_a_cpu_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    """Except with a replaced or hooked part, which may rely on its calls."""
    vae, runs, cpu = toy.network(SMALL.vae), list[str](), torch.device("cpu")
    for name in ("encode", "decode"):
        original = getattr(tiling.Strips, name)
        monkeypatch.setattr(
            tiling.Strips, name, lambda *args, name=name, original=original: runs.append(name) or original(*args)
        )

    def strips(of: Any) -> list[str]:
        runs.clear()
        weight = next(of.parameters())
        of.encode(torch.zeros(1, 3, 64, 80, dtype=weight.dtype))
        of.decode(torch.zeros(1, 4, 8, 10, dtype=weight.dtype))
        return list(runs)

    assert strips(vae) == []
    prepare_networks({"vae": vae}, RuntimeOptions(kernels="plain"), cpu)
    assert strips(vae) == []
    prepare_networks({"vae": vae}, RuntimeOptions(), cpu)
    assert strips(vae) == ["encode", "decode"]
    with torch.enable_grad():
        assert strips(vae) == []
    assert strips(copy.deepcopy(vae).bfloat16()) == []
    assert strips(tiled(vae, "cpu")) == ["encode", "decode"]
    block = vae.decoder.up[0].block[0]
    handle = block.register_forward_hook(lambda *args: None)
    assert strips(vae) == ["encode"]
    handle.remove()
    assert strips(vae) == ["encode", "decode"]
    original = block.forward
    block.forward = lambda x: original(x)
    assert strips(vae) == ["encode"]


def test_an_autoencoder_of_other_parts_is_left_as_it_is() -> None:
    class Other(Decoder):
        pass

    vae = TAESD(TAESDSpec(embed_dim=4, encoder=True, decoder=True))
    assert tiled(vae) is vae
    fork = toy.network(SMALL.vae)
    fork.decoder = Other(SMALL.vae)
    assert tiled(fork) is fork
