"""The networks against the originals, diffusers and transformers, and the keys of the released ones."""

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from random_sd1 import CLIP, CLIP_PREFIX, UNET, UNET_PREFIX, VAE, VAE_PREFIX, fill, normal
from references import arrays, error, manifest
from torch import Tensor, nn

from ldm_lite.core import Pipeline
from ldm_lite.core.clip import CLIPTextEncoder
from ldm_lite.core.family import SD1, recognise
from ldm_lite.core.files import Tensors
from ldm_lite.core.layers import (
    Upsample,
    attention_layers,
    checked_shape,
    count_blocks,
    explicit,
    shared_copy,
    sinusoids,
    use_attention,
)
from ldm_lite.core.networks import load_network, split
from ldm_lite.core.unet import UNet, UNetSpec
from ldm_lite.core.vae import AutoencoderKL

GOLDEN = arrays("networks.npz")
BUNDLED = arrays("bundled.npz")  # on the weights of the bundled model
# More residual blocks, and a level without attention.
LARGER = replace(UNET, channel_mult=(1, 2, 2), num_res_blocks=(2, 2, 2), transformer_depth=(1, 1, 0), context_dim=48)


def inputs(spec: UNetSpec, height: int = 8, width: int = 12) -> tuple[Tensor, Tensor]:
    """Latents (2,C,h,w) and a text (2,5,D)."""
    return normal(1, 2, spec.in_channels, height, width), normal(2, 2, 5, spec.context_dim)


# ---- against other implementations ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("golden", "spec", "prefix", "timesteps", "size"),
    [
        ("unet.sd1", LARGER, "", (981.0, 1.0), (8, 12)),  # CompVis
        ("unet_fractional.sd1", LARGER, "", (437.25, 999.0), (8, 12)),  # CompVis
        ("unet_odd.sd1", LARGER, UNET_PREFIX, (981.0, 1.0), (9, 7)),  # diffusers
        ("small.unet", UNET, UNET_PREFIX, (981.0, 1.0), (8, 12)),  # diffusers
    ],
)
def test_unet(golden: str, spec: UNetSpec, prefix: str, timesteps: tuple[float, ...], size: tuple[int, int]) -> None:
    x, context = inputs(spec, *size)
    assert error(fill(UNet(spec), prefix)(x, torch.tensor(timesteps), context), GOLDEN[golden]) < 1e-5


def test_autoencoder() -> None:
    network = fill(AutoencoderKL(VAE), VAE_PREFIX)
    mean, deviation = network.encode(normal(7, 2, 3, 32, 48))  # type: ignore[operator]
    assert error(mean, GOLDEN["small.vae.mean"]) < 1e-5
    assert error(2 * deviation.log(), GOLDEN["small.vae.logvar"]) < 1e-5
    assert error(network.decode(normal(8, 1, 4, 4, 6)), GOLDEN["small.vae.decode"]) < 1e-5  # type: ignore[operator]


def test_text_encoder() -> None:
    ids = np.random.Generator(np.random.PCG64(4)).integers(0, 49406, (2, 77))
    ids[:, 0], ids[0, 10:], ids[1, 21:] = 49406, 49407, 49407
    out = fill(CLIPTextEncoder(CLIP), CLIP_PREFIX)(torch.from_numpy(ids))
    assert error(out, GOLDEN["small.clip.quick_gelu"]) < 1e-5


def test_the_bundled_networks(pipe: Pipeline) -> None:
    noise, context = (torch.from_numpy(BUNDLED[name]) for name in ("noise", "context"))
    assert error(pipe.encode_prompt(BUNDLED["prompts"].tolist())["context"], BUNDLED["context"]) < 1e-5
    assert error(pipe.encode_prompt(["", ""])["context"], BUNDLED["uncond"]) < 1e-5
    for t in (981, 501, 1):
        assert error(pipe.unet(noise, torch.full((2,), t), context), BUNDLED[f"unet_{t}"]) < 1e-5
    mean, deviation = pipe.vae.encode(torch.from_numpy(BUNDLED["image"]))
    assert error(torch.cat([mean, 2 * deviation.log()], dim=1), BUNDLED["moments"]) < 1e-5
    latents = torch.from_numpy(BUNDLED["ddim_20_2.5"])
    assert error(torch.stack(list(pipe.decode_pixels(latents))), BUNDLED["pixels"].clip(-1, 1)) < 1e-5


# ---- the released ones ----------------------------------------------------------------------------------------------

META = torch.device("meta")
RELEASED = {  # manifest -> kind, prefix in a file
    "unet_sd1": ("unet", UNET_PREFIX),
    "vae_kl_f8_sd": ("vae", VAE_PREFIX),
    "text_clip_l": ("clip", "cond_stage_model.transformer."),
}


def without_weights(keys: Mapping[str, Sequence[int]]) -> Tensors:
    """A file of tensors of these shapes on the meta device."""
    sizes = {key: tuple(shape) for key, shape in keys.items()}
    return Tensors(Path("sd-v1-4.ckpt"), sizes, lambda key: torch.empty(sizes[key], device=META))


@pytest.mark.parametrize("name", RELEASED)
def test_released_keys_shapes_and_sizes(name: str) -> None:
    content, (kind, _) = manifest(name), RELEASED[name]
    items = [(key.removeprefix("text_model."), shape) for key, shape in content["shapes"].items()]
    random.Random(0).shuffle(items)
    file = without_weights(dict(items))
    network = load_network(kind, SD1.specs[kind], file, META, torch.float32)  # strictly
    assert network.state_dict().keys() == file.keys()
    assert sum(weight.numel() for weight in network.parameters()) == content["params"]
    spec = SD1.specs[kind]
    assert type(spec).from_shapes(file.shapes) == (replace(spec, heads=None) if hasattr(spec, "heads") else spec)


def test_a_released_file_is_recognised_by_its_shapes() -> None:
    keys = {
        prefix + key: shape for name, (_, prefix) in RELEASED.items() for key, shape in manifest(name)["shapes"].items()
    }
    assert recognise(split(without_weights(keys)), {}, {}) == SD1
    wider = {**keys, UNET_PREFIX + "input_blocks.0.0.weight": (320, 9, 3, 3)}
    with pytest.raises(ValueError, match="unknown model"):
        recognise(split(without_weights(wider)), {}, {})


@pytest.mark.parametrize(
    ("network", "spec"), [(UNet, LARGER), (UNet, UNET), (AutoencoderKL, VAE), (CLIPTextEncoder, CLIP)]
)
def test_sizes_of_miniatures_are_read_from_their_shapes(network: Any, spec: Any) -> None:
    sizes = {key: tuple(value.shape) for key, value in network(spec).state_dict().items()}
    assert type(spec).from_shapes(sizes) == (replace(spec, heads=None) if hasattr(spec, "heads") else spec)


# ---- contracts ------------------------------------------------------------------------------------------------------


def test_a_token_sees_only_what_precedes_it() -> None:
    network, ids = fill(CLIPTextEncoder(CLIP)), torch.randint(0, 49406, (1, 77), generator=torch.manual_seed(0))
    whole, changed = network(ids), network(torch.cat([ids[:, :9], ids[:, 9:] + 1], dim=1))
    torch.testing.assert_close(changed[:, :9], whole[:, :9], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(network(ids[:, :9]), whole[:, :9], rtol=1e-4, atol=1e-5)
    assert (changed[:, 9:] - whole[:, 9:]).abs().amin(dim=1).max() > 1e-2


def test_residuals_are_added_to_the_skips_and_the_middle() -> None:
    network = fill(UNet(UNET))
    x, context = inputs(UNET)
    skips: list[Tensor] = []
    for block in (*network.input_blocks, network.middle_block):  # type: ignore[union-attr]
        block.register_forward_hook(lambda module, arguments, out: skips.append(out))  # type: ignore[union-attr]
    t = torch.tensor([5.0, 5.0])
    plain = network(x, t, context)
    noise = [normal(place, *skip.shape) for place, skip in enumerate(skips)]
    assert torch.equal(network(x, t, context, [0 * tensor for tensor in noise]), plain)
    for place in range(len(noise)):
        residuals = [tensor * (i == place) for i, tensor in enumerate(noise)]
        assert error(network(x, t, context, residuals), plain) > 1e-3
    with pytest.raises(ValueError, match="zip"):
        network(x, t, context, noise[:-1])


def test_an_attention_that_writes_its_map_out_is_the_same(pipe: Pipeline) -> None:
    noise, context, t = pipe.noise([1, 2]), pipe.encode_prompt(["a cat", "a dog"])["context"], torch.tensor([500, 500])
    out = pipe.with_attention("explicit").unet(noise, t, context)
    torch.testing.assert_close(out, pipe.unet(noise, t, context), rtol=1e-4, atol=1e-5)


def test_attention_is_set_where_a_pattern_matches(pipe: Pipeline) -> None:
    shapes = list[tuple[int, int]]()

    def watched(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        shapes.append((q.shape[2], k.shape[2]))
        return explicit(q, k, v)

    layers = attention_layers(pipe.unet)
    assert len(layers) == 14
    tokens = pipe.family.specs["clip"].length
    watching = pipe.with_attention(watched, where="*attn2")
    list(watching.stream("a cat", steps=1))
    assert [keys for _, keys in shapes] == [tokens] * 7
    shapes.clear()
    list(watching.with_attention("sdpa").with_attention(watched, "middle_block*attn1").stream("a cat", steps=1))
    assert shapes == [(64, 64)]
    shapes.clear()
    list(pipe.stream("a cat", steps=1))
    assert not shapes  # the original is as it was


def test_attention_errors_are_one_line(pipe: Pipeline) -> None:
    with pytest.raises(ValueError, match="unknown attention 'flesh': expected a function, or one of sdpa, explicit"):
        pipe.with_attention("flesh")
    with pytest.raises(ValueError, match=r"no attention layer matches 'attn3': they are input_blocks\.1\.1\."):
        pipe.with_attention("sdpa", where="attn3")
    with pytest.raises(ValueError, match="unknown attention"):
        use_attention(nn.Linear(1, 1), "none")


def test_a_shared_copy_has_modules_of_its_own_and_the_same_weights() -> None:
    network = fill(UNet(UNET))
    copied = shared_copy(network)
    x, context = inputs(UNET)
    before = network(x, torch.tensor([5.0, 5.0]), context)
    storages = {value.data_ptr() for value in network.state_dict().values()}
    assert {value.data_ptr() for value in copied.state_dict().values()} == storages
    for layer in attention_layers(copied, "*attn1").values():
        layer.to_out = nn.Identity()
    copied.middle_block[0].register_forward_hook(lambda module, arguments, out: 2 * out)
    assert torch.equal(network(x, torch.tensor([5.0, 5.0]), context), before)
    assert not torch.allclose(copied(x, torch.tensor([5.0, 5.0]), context), before, atol=1e-3)


def test_norms_have_the_originals_eps() -> None:
    """1e-6 in transformers and the autoencoder, 1e-5 elsewhere: activations that are not small hide it."""
    unet, vae, clip = UNet(UNET), AutoencoderKL(VAE), CLIPTextEncoder(CLIP)
    for network in (unet, vae, clip):
        for name, layer in network.named_modules():
            if isinstance(layer, (nn.GroupNorm, nn.LayerNorm)):
                in_transformer = name.endswith(".1.norm")
                assert layer.eps == (1e-6 if network is vae or in_transformer else 1e-5), name
            if isinstance(layer, nn.GroupNorm):
                assert layer.num_groups == 32, name


def test_heads_are_required_since_weights_do_not_tell_them() -> None:
    for network, spec in ((UNet, UNET), (CLIPTextEncoder, CLIP)):
        with pytest.raises(ValueError, match=r"do not show its heads: give replace\(spec, heads=\.\.\.\)"):
            network(replace(spec, heads=None))  # type: ignore[type-var]


def test_the_timestep_is_embedded_in_float32() -> None:
    """Sinusoids of a large timestep would be coarse in half precision."""
    t = torch.tensor([999.25], dtype=torch.float64)
    expected = [math.cos(999.25), math.cos(999.25 * 10000 ** (-1 / 2)), math.sin(999.25), math.sin(9.9925)]
    assert sinusoids(t, 4).tolist()[0] == pytest.approx(expected, abs=1e-4)
    assert sinusoids(t.half(), 4).dtype == torch.float32


def test_an_upsampler_resizes_to_twice_the_size_or_a_given_one() -> None:
    layer = fill(Upsample(4))
    x = normal(3, 1, 4, 3, 5)
    assert layer(x).shape == (1, 4, 6, 10)
    assert torch.equal(layer(x), layer(x, (6, 10)))
    assert layer(x, (5, 9)).shape == (1, 4, 5, 9)


def test_sizes_that_make_no_sense_are_one_line() -> None:
    shapes = {
        "a.weight": (2, 3),
        "b.0.weight": (1,),
        "b.2.weight": (1,),
        "c.weight": (2**24 + 1, 3),
        "d.weight": (0, 3),
    }
    assert checked_shape(shapes, "a.weight", 2) == (2, 3)
    for key, message in (("x", "is missing: x"), ("c.weight", "expected 2 dimensions"), ("d.weight", "none empty")):
        with pytest.raises(ValueError, match=message):
            checked_shape(shapes, key, 2)
    with pytest.raises(ValueError, match="expected 3 dimensions"):
        checked_shape(shapes, "a.weight", 3)
    assert count_blocks(shapes, r"a\.(\d+)") == 0
    with pytest.raises(ValueError, match=r"has b\.2\.\*, and 2 such blocks"):
        count_blocks(shapes, r"b\.(\d+)\.")
    many = {f"b.{i}.weight": (1,) for i in range(101)}
    with pytest.raises(ValueError, match="at most 100"):
        count_blocks(many, r"b\.(\d+)\.")
    assert count_blocks(dict(list(many.items())[:100]), r"b\.(\d+)\.") == 100


def test_gradients_reach_every_weight() -> None:
    network = fill(UNet(UNET)).requires_grad_(True)
    x, context = inputs(UNET)
    network(x, torch.tensor([5.0, 900.0]), context).square().mean().backward()
    assert not [name for name, weight in network.named_parameters() if weight.grad is None or not weight.grad.any()]
