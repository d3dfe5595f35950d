"""The UNet against the originals' and diffusers' (the goldens), and its contract."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import toy
from random_checkpoint import SMALL
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter

from ldm_lite.models.unet import AttentionBlock, LDMUNet, LDMUNetSpec

DATA = Path(__file__).parents[1] / "data"
GOLDEN = np.load(DATA / "networks.npz")
PREFIX = "model.diffusion_model."


def shapes_of(spec: LDMUNetSpec) -> dict[str, tuple[int, ...]]:
    with torch.device("meta"):
        return {key: tuple(value.shape) for key, value in LDMUNet(spec).state_dict().items()}


# ---- against the originals ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", toy.UNETS)
def test_equals_the_original(name: str) -> None:
    x, context, y = toy.unet_inputs(toy.UNETS[name])
    out = toy.network(toy.UNETS[name])(x, toy.T, context, y)
    assert toy.relative_error(out, GOLDEN[f"unet.{name}"]) < 1e-5


@pytest.mark.parametrize(
    ("golden", "spec", "prefix", "timesteps", "size"),
    [
        ("unet_fractional.sd1", toy.SD1, "", toy.T_FRACTIONAL, {}),  # CompVis
        ("unet_odd.sd1", toy.SD1, PREFIX, toy.T, {"h": 9, "w": 7}),  # diffusers
        ("small.unet", SMALL.unet, PREFIX, toy.T, {}),  # diffusers
    ],
)
def test_equals_others(golden: str, spec: LDMUNetSpec, prefix: str, timesteps: Tensor, size: dict[str, int]) -> None:
    x, context, _ = toy.unet_inputs(spec, **size)
    assert toy.relative_error(toy.fill(LDMUNet(spec), prefix)(x, timesteps, context), GOLDEN[golden]) < 1e-5


def test_rows_of_qkv_are_ordered_head_by_head() -> None:
    channels, heads = 64, 4
    width = channels // heads
    block = toy.fill(AttentionBlock(channels, heads))
    x = toy.normal(0, 2, channels, 3, 5)

    rows = torch.einsum("oc,bcn->bon", block.qkv.weight[:, :, 0], block.norm(x).flatten(2)) + block.qkv.bias[:, None]
    outs = []
    for head in range(heads):
        q, k, v = rows[:, 3 * width * head : 3 * width * (head + 1)].split(width, dim=1)  # (B, D, N)
        weights = torch.softmax(torch.einsum("bdn,bdm->bnm", q, k) * width**-0.5, dim=-1)
        outs.append(torch.einsum("bnm,bdm->bdn", weights, v))
    out = torch.einsum("oc,bcn->bon", block.proj_out.weight[:, :, 0], torch.cat(outs, dim=1))
    wanted = x + (out + block.proj_out.bias[:, None]).view_as(x)
    torch.testing.assert_close(block(x), wanted, rtol=1e-5, atol=1e-5)


# ---- every released UNet --------------------------------------------------------------------------------------------


def test_a_different_number_of_blocks_a_level_is_inferred() -> None:
    for name in ("sd1", "ldm_lsun_churches256"):
        spec = replace(toy.UNETS[name], num_res_blocks=(1, 2, 3))
        assert LDMUNetSpec.from_shapes(shapes_of(spec)) == replace(spec, num_heads=None, head_dim=None)


class Mean(nn.Module):
    """A fork's attention."""

    def forward(self, x: Tensor, context: Tensor) -> Tensor:
        return x + context.mean((1, 2))[:, None, None]


@pytest.mark.parametrize("kind", ["module", "block", "layer"])
def test_a_replaced_layer_is_called_with_the_features_and_the_text(kind: str) -> None:
    """An attention, a transformer block, or a whole transformer."""
    unet, (x, context, _) = toy.network(SMALL.unet), toy.unet_inputs(SMALL.unet)
    plain = unet(x, toy.T, context)
    transformer: Any = unet.get_submodule("middle_block.1")
    if kind == "module":
        transformer.transformer_blocks[0].attn2 = Mean()
    elif kind == "block":
        transformer.transformer_blocks[0] = Mean()
    else:
        transformer.forward = lambda x, context: x + context.mean((1, 2))[:, None, None, None]
    assert not torch.allclose(unet(x, toy.T, context), plain, rtol=1e-3)


def test_further_channels_join_the_latents() -> None:
    spec = replace(toy.SD1, in_channels=9)
    unet, (x, context, _) = toy.fill(LDMUNet(spec)), toy.unet_inputs(spec)
    wanted = unet(x, toy.T, context)
    assert torch.equal(unet(x[:, :4], toy.T, context, concat=x[:, 4:]), wanted)


# ---- the contract ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("h", "w"), [(1, 1), (1, 6), (2, 3), (5, 5), (7, 9), (16, 8)])
def test_any_latent_size(h: int, w: int) -> None:
    x, context, _ = toy.unet_inputs(SMALL.unet, h=h, w=w)
    out = toy.network(SMALL.unet)(x, toy.T, context)
    assert out.shape == x.shape
    assert torch.isfinite(out).all()


@pytest.mark.parametrize("name", toy.UNETS)
@pytest.mark.thin(3)
def test_odd_sizes_work_for_every_kind(name: str) -> None:
    spec = toy.UNETS[name]
    x, context, y = toy.unet_inputs(spec, h=9, w=7)
    out = toy.network(spec)(x, toy.T, context, y)
    assert out.shape == (2, spec.out_channels, 9, 7)
    assert torch.isfinite(out).all()


@pytest.mark.parametrize("name", ["sd1", "x4", "ldm_lsun_churches256"])
def test_images_of_a_batch_are_independent(name: str) -> None:
    x, context, y = toy.unet_inputs(toy.UNETS[name])
    network = toy.network(toy.UNETS[name])
    both = network(x, toy.T, context, y)
    for i in range(2):
        conditioning = [None if value is None else value[i : i + 1] for value in (context, y)]
        torch.testing.assert_close(
            network(x[i : i + 1], toy.T[i : i + 1], *conditioning), both[i : i + 1], rtol=1e-4, atol=1e-5
        )


@pytest.mark.parametrize("name", toy.UNETS)
@pytest.mark.thin(4)
def test_reads_no_value_back_from_the_device(name: str) -> None:
    """On the meta device there are no values: .item(), or a branch on a tensor, raises."""
    spec = toy.UNETS[name]
    inputs = [None if value is None else value.to("meta") for value in toy.unet_inputs(spec)]
    with torch.device("meta"):
        network = LDMUNet(spec)
    assert network(inputs[0], toy.T.to("meta"), *inputs[1:]).shape == (2, spec.out_channels, 8, 12)


COMPILED = {
    "small": replace(  # with everything: SDXL's vector and a guidance scale
        toy.DIFFUSERS_UNETS["lcm_sdxl"],
        channel_mult=(1, 2),
        num_res_blocks=(1, 1),
        transformer_depth=(0, 1),
        cross_only=(False, False),
        middle_depth=1,
    ),
    **{  # labels; no text; linear projections: with two levels, since each layer is traced
        name: replace(
            spec,
            channel_mult=spec.channel_mult[:2],
            num_res_blocks=(1, 1),
            transformer_depth=spec.transformer_depth[-2:],
            cross_only=spec.cross_only[-2:],
        )
        for name, spec in toy.UNETS.items()
        if name in ("x4", "ldm_lsun_churches256", "sdxl_base")
    },
}


@pytest.mark.slow
@pytest.mark.usefixtures("compiles_once")
@pytest.mark.parametrize("name", COMPILED)
def test_compiles_to_one_graph_for_all_steps(name: str) -> None:
    spec = COMPILED[name]
    network, counter = toy.network(spec), CompileCounter()
    compiled = torch.compile(network, fullgraph=True, backend=counter)
    x, context, y = toy.unet_inputs(spec)
    for t in (toy.T, toy.T_FRACTIONAL, torch.tensor([0.0, 0.0])):
        torch.testing.assert_close(compiled(x, t, context, y), network(x, t, context, y))
        x, context = x + 1, None if context is None else 2 * context
        y = -y if spec.guidance_dim else y  # of another guidance scale
    assert counter.frame_count == 1


@pytest.mark.slow
@pytest.mark.usefixtures("compiles_once")
def test_compiles_through_autograd() -> None:
    spec = replace(SMALL.unet, transformer_depth=(0, 0))  # a transformer in the middle
    network = toy.network(spec)
    compiled = torch.compile(network, fullgraph=True, backend="aot_eager")
    x, context, _ = toy.unet_inputs(spec)
    for t in (toy.T, toy.T_FRACTIONAL):
        torch.testing.assert_close(compiled(x, t, context), network(x, t, context), rtol=1e-4, atol=1e-5)
