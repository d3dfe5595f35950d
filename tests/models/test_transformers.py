"""FLUX.1's and Stable Diffusion 3's transformers: the originals' outputs (the goldens), and their contract."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import toy
import toy_flow
from released import TRANSFORMERS
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter
from torch.nn import functional as F

from ldm_lite.models.flux import FluxSpec
from ldm_lite.models.mmdit import MMDiT, MMDiTSpec
from ldm_lite.models.ops import axial_rotation, rotate
from ldm_lite.models.t5 import T5_XXL
from ldm_lite.runtime import offload
from ldm_lite.runtime.attention import layers, record, use, vanilla
from ldm_lite.runtime.offload import Offloader
from ldm_lite.zoo.family import build_network

DATA = Path(__file__).parents[1] / "data"
GOLDEN = np.load(DATA / "transformers.npz")
SPECS = toy_flow.TRANSFORMERS
EVERY = pytest.mark.parametrize("name", SPECS)
CPU = torch.device("cpu")


def run(name: str, network: nn.Module | None = None, dtype: torch.dtype = torch.float32, **more: Any) -> Tensor:
    """A miniature's output for its inputs."""
    spec = SPECS[name]
    x, t, context, y = toy_flow.inputs(spec)
    network = network or toy.network(spec).to(dtype)
    return network(x.to(dtype), t, context.to(dtype), y.to(dtype), **toy_flow.more(spec), **more)


def shapes_of(spec: FluxSpec | MMDiTSpec) -> dict[str, tuple[int, ...]]:
    with torch.device("meta"):
        return {key: tuple(value.shape) for key, value in build_network(spec).state_dict().items()}


@EVERY
def test_equals_the_original(name: str) -> None:
    assert toy.relative_error(run(name), GOLDEN[name]) < 1e-5


@pytest.mark.parametrize("name", [name for name, spec in SPECS.items() if isinstance(spec, MMDiTSpec)])
@pytest.mark.thin(3)
def test_leaves_out_layers_as_the_original_does(name: str) -> None:
    skip = torch.tensor([[i == 1 for i in range(SPECS[name].depth)], [False] * SPECS[name].depth])
    out = run(name, skip=skip)  # of the first image alone
    assert toy.relative_error(out[0], GOLDEN[f"{name}.skip"][0]) < 1e-5
    assert toy.relative_error(out[1], GOLDEN[name][1]) < 1e-5


def test_a_rotation_is_one_of_each_pair_of_channels() -> None:
    """By complex numbers, as in the paper: each pair is one, times exp(i * position * theta^(-2j/d))."""
    ids = [[0, 3, 7], [2, 0, 5]]
    x = toy.normal(4, 2, 3, 3, 10).double()
    theirs = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous())  # channels 4 and 6 of the two axes
    angles = [[ids[a][n] * 100.0 ** (-2 * j / d) for a, d in ((0, 4), (1, 6)) for j in range(d // 2)] for n in range(3)]
    theirs = torch.view_as_real(theirs * torch.exp(1j * torch.tensor(angles, dtype=torch.float64))).flatten(-2)
    ours = rotate(x, axial_rotation(torch.tensor(ids), (4, 6), 100.0, torch.float64))
    assert toy.relative_error(ours, theirs.numpy()) < 1e-14


def test_a_mask_is_packed_as_the_original_does() -> None:
    """FLUX fill: "b (h ph) (w pw) -> b (ph pw) h w", then packed with the latents."""
    mask = toy.normal(5, 1, 1, 16, 24)
    channels = F.pixel_unshuffle(mask, 8)
    for row, column, of_8x8 in ((0, 0, (0, 0)), (1, 2, (3, 5)), (0, 1, (7, 7))):
        assert (
            channels[0, 8 * of_8x8[0] + of_8x8[1], row, column]
            == mask[0, 0, 8 * row + of_8x8[0], 8 * column + of_8x8[1]]
        )


@EVERY
@pytest.mark.thin(7)
def test_half_precision_is_close(name: str) -> None:
    exact = run(name, dtype=torch.float64)
    assert toy.relative_error(run(name), exact.numpy()) < 1e-5
    for dtype, limit in ((torch.bfloat16, 0.03), (torch.float16, 0.004)):
        assert toy.relative_error(run(name, dtype=dtype).double(), exact.numpy()) < limit


@pytest.mark.parametrize("name", ["flux_dev", "sd35_medium"])
@pytest.mark.thin(2)
def test_float16_does_not_become_infinite(name: str) -> None:
    network = toy.network(SPECS[name]).half()
    for key, value in network.named_parameters():
        if key.endswith(("_mlp.2.bias", "mlp.fc2.bias", "linear2.bias")):
            value.data.fill_(40000.0)
    assert run(name, network, torch.float16).isfinite().all()


@EVERY
@pytest.mark.thin(6)
def test_its_attention_is_chosen_and_recorded_by_layer(name: str) -> None:
    spec, network = SPECS[name], toy.network(SPECS[name])
    expected = run(name, network)
    tokens = 5 + 3 * 5
    with record(network) as maps:
        run(name, network)
    joint = [key for key in maps if "attn2" not in key]
    assert len(joint) == spec.depth + (spec.single_depth if isinstance(spec, FluxSpec) else 0)
    assert {tuple(maps[key][0].shape[2:]) for key in joint} == {(tokens, tokens)}
    assert len(maps) - len(joint) == (spec.dual_depth if isinstance(spec, MMDiTSpec) else 0)
    for attention in ("vanilla", "sliced:3", "math", "fastest"):
        use(network, attention)
        assert toy.relative_error(run(name, network), expected.numpy()) < 1e-5
    use(network, vanilla)
    assert {layer.attention for layer in layers(network).values()} == {vanilla}
    with pytest.raises(ValueError, match="use sdpa"):
        use(network, "mha")


@pytest.mark.parametrize("offload_", ["model", "sequential"])
@pytest.mark.parametrize("name", ["flux_dev", "sd35_medium"])
@pytest.mark.thin(4)
def test_offloads_and_stores_in_8_bits(name: str, offload_: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offload, "BLOCK", 1)  # every block is as large as a released one
    expected = run(name)
    for storage, limit in ((None, 1e-6), ("int8", 0.1), ("fp8", 0.2)):
        network = toy.network(SPECS[name])
        offloader = Offloader({"unet": network}, CPU, offload=offload_, storage=storage)
        with offloader.phase("unet"):
            assert toy.relative_error(run(name, network), expected.numpy()) < limit


def test_flux_in_int8_with_offload_fits_a_gpu_of_12_gb() -> None:
    """By count.  `offload="sequential", storage="int8"` keeps int8 in the CPU's memory; on the GPU, in bfloat16, are
    the block that computes, the next one, and what belongs to no block, besides the activations.
    """
    tokens = 4096 + 512  # of an image of 1024x1024 and its text
    spec = TRANSFORMERS["flux_dev"]
    assert isinstance(spec, FluxSpec)
    # of a single block, the widest: x, linear1's input and output, q k v as rotated in float32, attention and GELU
    activations = tokens * (2 * spec.width + 3 * spec.width + spec.mlp_width + 2 * 3 * spec.width + 2 * spec.mlp_width)
    for spec_ in (spec, T5_XXL):
        with torch.device("meta"):
            network = build_network(spec_)
        blocks = offload._blocks(network)
        sizes = sorted(sum(p.numel() for p in block.parameters()) for block in blocks)
        rest = sum(p.numel() for p in network.parameters()) - sum(sizes)
        assert rest == 0
        assert 2 * (sizes[-1] + sizes[-2] + 2 * activations) < 3.5e9
        assert sum(sizes) < 12e9  # bytes of int8 in the CPU's memory


def test_works_at_any_even_size() -> None:
    for spec in (SPECS["flux_fill"], SPECS["sd35_medium"]):
        x, t, context, y = toy_flow.inputs(spec, h=2, w=8)
        assert toy.network(spec)(x, t, context, y, **toy_flow.more(spec)).shape == (2, 4, 2, 8)


def test_an_image_larger_than_the_table_of_positions_is_refused() -> None:
    x, t, context, y = toy_flow.inputs(toy_flow.SD3, h=14)
    with pytest.raises(ValueError, match="got latents of 14 by 10, expected at most 12 by 12"):
        MMDiT(toy_flow.SD3)(x, t, context, y)


@pytest.mark.parametrize(
    ("name", "key", "shape", "message"),
    [
        (
            "flux_dev",
            "double_blocks.0.img_attn.norm.key_norm.scale",
            (100,),
            "the width is 3072, expected a multiple of 100",
        ),
        ("flux_dev", "img_in.weight", (3072, 66), "the width of an image token is 66, expected a multiple of 4"),
        ("flux_dev", "double_blocks.99999.x", (1,), "expected all from 0 on, at most 100"),
        ("sd3_medium", "x_embedder.proj.weight", (1500, 16, 2, 2), "the width is 1500, expected a multiple of 64"),
        ("sd3_medium", "pos_embed", (36864, 1536), "pos_embed has the shape"),
    ],
)
@pytest.mark.thin(3)
def test_shapes_that_make_no_sense_are_refused(name: str, key: str, shape: tuple[int, ...], message: str) -> None:
    spec = TRANSFORMERS[name]
    with pytest.raises(ValueError, match=message):
        type(spec).from_shapes({**shapes_of(spec), key: shape})


@pytest.mark.slow
@pytest.mark.usefixtures("compiles_once")
@pytest.mark.parametrize("name", ["flux_dev", "sd35_medium"])
def test_compiles_to_one_graph_for_all_steps(name: str) -> None:
    spec = replace(SPECS[name], depth=2)
    network, counter = toy.network(spec), CompileCounter()
    compiled = torch.compile(network, fullgraph=True, backend=counter)
    x, t, context, y = toy_flow.inputs(spec)
    for times in (t, t / 3):
        args, more = (x, times, context, y), toy_flow.more(spec)
        torch.testing.assert_close(compiled(*args, **more), network(*args, **more))
    assert counter.frame_count == 1
