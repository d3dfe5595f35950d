"""The loop: noise by seed, batches equal to single runs, threads, shapes that do not fit, results always finite."""

import contextlib
import gc
import resource
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from PIL import Image
from random_checkpoint import SMALL, write
from runs import SAMPLERS, run_latents
from torch import Tensor, nn
from waiting import at_once

import ldm_lite
from ldm_lite import Pipeline
from ldm_lite.core.denoise import Branch, InputSource
from ldm_lite.diffusion.guidance import Conditioning, classifier_free
from ldm_lite.generate import check_conditioning, denoise
from ldm_lite.runtime import tiling

PROMPTS = ["a red apple", "a cat on yellow", "rocket", "a fox face on a green background"]
SHAPE = (16, 16, 16)
NOTHING = torch.zeros(1, 77, 112)  # as conditioning
ALONE = classifier_free(Conditioning(NOTHING), None, 1.0)


def run(pipe: Pipeline, sampler: str, prompts: list[str], seeds: list[int], steps: int = 6) -> Tensor:
    return run_latents(pipe, prompts, sampler=sampler, seed=seeds, steps=steps, scale=2.5)


def test_noise_depends_on_the_seed_alone(bundled: Pipeline) -> None:
    together, later = bundled.noise_source([5, 6, 7, 8]), bundled.noise_source(7)
    for _ in range(3):
        assert torch.equal(together()[2], later()[0])


@pytest.mark.parametrize("sampler", ["ddim", "euler_a"])
def test_a_batch_equals_single_runs(bundled: Pipeline, sampler: str) -> None:
    """The noise bit for bit, the latents to what another order of float32 sums changes."""
    batch = run(bundled, sampler, PROMPTS, [1, 2, 3, 4])
    for i, prompt in enumerate(PROMPTS):
        single = run(bundled, sampler, [prompt], [1 + i])[0]
        assert (batch[i] - single).norm() / single.norm() < 1e-4


def test_two_threads_equal_serial_runs(bundled: Pipeline) -> None:
    jobs = [partial(run, bundled, name, [text], [3]) for name, text in (("euler_a", "a red apple"), ("plms", "rocket"))]
    assert all(map(torch.equal, at_once(*jobs), [job() for job in jobs]))


@pytest.mark.parametrize("sampler", [name for name in SAMPLERS if name != "dpm_adaptive"])
@pytest.mark.thin(4)
def test_steps_are_counted_as_the_user_counts(bundled: Pipeline, sampler: str) -> None:
    states = list(bundled.stream("rocket", sampler=sampler, steps=3, scale=1.0, seed=0))
    assert [(state.step, state.num_steps) for state in states] == [(1, 3), (2, 3), (3, 3)]


def test_scale_1_is_no_guidance(bundled: Pipeline) -> None:
    calls = []
    hook = bundled.unet.register_forward_pre_hook(lambda module, inputs: calls.append(len(inputs[0])))
    try:
        rocket, cat = bundled.encode_prompt("rocket"), bundled.encode_prompt("cat")
        plan, noise = bundled.plan("ddim", 2), bundled.noise(0)
        plain = bundled.denoise(noise, rocket, None, plan, 7.5)
        unguided = bundled.denoise(noise, rocket, cat, plan, 1.0)
        guided = bundled.denoise(noise, rocket, cat, plan, 2.0)
    finally:
        hook.remove()
    assert calls == [1, 1, 1, 1, 2, 2]
    assert torch.equal(plain, unguided)
    assert not torch.equal(plain, guided)


def test_what_runs_in_the_unet_s_place_gets_all_that_it_reads(bundled: Pipeline) -> None:
    seen = []

    class Other(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.unet = bundled.unet

        def forward(self, x: Tensor, t: Tensor, context: Tensor) -> Tensor:
            seen.append((tuple(t.shape), tuple(context.shape)))
            return self.unet(x, t, context)

    plan, noise, network = bundled.plan("ddim", 3), torch.zeros(1, *SHAPE), Other()

    def wrap(source: InputSource) -> InputSource:
        return lambda call: source(call)._replace(network=network)

    denoise(bundled, noise, ALONE, plan, wrap=wrap)
    bundled.with_networks(unet=network).denoise(noise, NOTHING, None, plan)
    assert seen == [((1,), (1, 77, 112))] * 6


def test_a_text_of_another_length_is_read_in_its_step(bundled: Pipeline) -> None:
    """As a style adapter makes it, in some of the steps."""
    plan, noise, seen = bundled.plan("ddim", 3), bundled.noise(1), []
    longer = (Branch({"context": torch.cat([NOTHING, torch.ones(1, 4, 112)], dim=1)}),)

    def wrap(source: InputSource) -> InputSource:
        return lambda call: source(call)._replace(branches=longer) if call.step == 1 else source(call)

    hook = bundled.unet.register_forward_pre_hook(
        lambda module, args, named: seen.append(named["context"].shape[1]), with_kwargs=True
    )
    latents = denoise(bundled, noise, ALONE, plan, wrap=wrap)
    hook.remove()
    assert seen == [77, 81, 77]
    assert not torch.equal(latents, denoise(bundled, noise, ALONE, plan))


def test_a_replaced_attention_of_two_arguments_runs_in_every_step(bundled: Pipeline) -> None:
    """A fork's own layer."""
    seen = []

    class Own(nn.Module):
        def __init__(self, layer: nn.Module) -> None:
            super().__init__()
            self.layer = layer

        def forward(self, x: Tensor, context: Tensor) -> Tensor:
            seen.append(tuple(context.shape))
            return self.layer(x, context)

    block: Any = bundled.unet.get_submodule("output_blocks.3.1.transformer_blocks.0")
    wanted = run(bundled, "ddim", ["a red apple"], [1], 4)
    with mock.patch.dict(block._modules, attn2=Own(block.attn2)):
        latents = run(bundled, "ddim", ["a red apple"], [1], 4)
    assert torch.equal(latents, wanted)
    assert seen == [(2, 40, 112)] * 4


def test_three_branches_are_the_weighted_sum_of_their_predictions(bundled: Pipeline) -> None:
    options: dict[str, Any] = {"sampler": "ddim", "steps": 1, "seed": 0, "scale": 1.0, "prompt_syntax": "a1111"}
    guided = run_latents(bundled, "rocket :0.5 AND cat :2", **options)  # of the empty prompt, the rest: 1 - 0.5 - 2
    alone = [run_latents(bundled, prompt, **options) for prompt in ("", "rocket", "cat")]
    # one DDIM step is linear in the prediction
    torch.testing.assert_close(guided, -1.5 * alone[0] + 0.5 * alone[1] + 2.0 * alone[2], rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize(
    ("noise", "context", "uncond", "message"),
    [
        ((1, 4, 8, 8), (1, 77, 112), None, r"got noise of shape \(1, 4, 8, 8\), expected \(B, 16, h, w\)"),
        ((1, 16, 8, 8), (2, 77, 112), None, r"got conditioning of shape \(2, 77, 112\) for 1 images, expected 1"),
        ((1, 16, 8, 8), (1, 77, 768), None, r"context: got one of shape \(1, 77, 768\), expected \(1, T, 112\)"),
        (
            (1, 16, 8, 8),
            (1, 77, 112),
            (1, 5, 112),
            r"context of shapes \(1, 5, 112\) and \(1, 77, 112\), expected the same",
        ),
    ],
)
def test_shapes_that_do_not_fit(
    bundled: Pipeline, noise: tuple[int, ...], context: tuple[int, ...], uncond: tuple[int, ...] | None, message: str
) -> None:
    empty = None if uncond is None else torch.zeros(uncond)
    with pytest.raises(ValueError, match=message):
        bundled.denoise(torch.zeros(noise), torch.zeros(context), empty, bundled.plan("ddim", 2), 2.0)


def test_inputs_that_the_network_does_not_have(bundled: Pipeline) -> None:
    plan, cond = bundled.plan("ddim", 2), bundled.encode_prompt("rocket")
    for conditioning, message in (
        (Conditioning(y=torch.zeros(1, 8)), "context: got none, expected"),
        (Conditioning(cond.context, torch.zeros(1, 8)), r"y: got one of shape \(1, 8\), expected none"),
        (Conditioning(cond.context, concat=torch.zeros(1, 1, 8, 8)), r"expected \(B, 15, h, w\)"),
    ):
        with pytest.raises(ValueError, match=message):
            bundled.denoise(torch.zeros(1, *SHAPE), conditioning, None, plan)


def test_the_class_or_the_vector_has_the_network_s_shape(bundled: Pipeline) -> None:
    """y is a class for each image, a vector with the width of what the network reads, or nothing."""
    cases = (
        ({"num_classes": 10}, (2,), (2, 8)),
        ({"vector_dim": 8}, (2, 8), (2, 16)),
        ({"guidance_dim": 8}, (2, 8), (2,)),
        ({"vector_dim": 8, "guidance_dim": 4}, (2, 12), (2, 8)),
        ({}, None, (2,)),
    )
    context = torch.zeros(2, 77, 112)
    for sizes, fitting, unfitting in cases:
        model = replace(bundled, family=replace(bundled.family, unet=replace(bundled.family.unet, **sizes)))
        for shape in (fitting, unfitting):
            y = None if shape is None else torch.zeros(shape)
            wrong = shape == unfitting
            with pytest.raises(ValueError, match="y: got") if wrong else contextlib.nullcontext():
                check_conditioning(model, (2, *SHAPE), Conditioning(context, y))


def test_a_text_encoder_of_another_width_is_an_error(tmp_path: Path, small_path: Path) -> None:
    [text] = SMALL.text_encoders
    narrow = tmp_path / "narrow.safetensors"
    write(narrow, replace(SMALL, text_encoders=(replace(text, width=32, mlp_width=128),)))
    pipe = ldm_lite.load(small_path, text_encoder=str(narrow), device="cpu")
    with pytest.raises(ValueError, match=r"context: got one of shape \(1, 77, 32\), expected \(1, T, 64\)"):
        pipe.txt2img("rocket", steps=1)


def test_a_stochastic_sampler_needs_noise(bundled: Pipeline) -> None:
    plan = bundled.plan("euler_a", 2)
    with pytest.raises(ValueError, match="this sampler adds noise at every step: pass `draw`"):
        bundled.denoise(torch.zeros(1, *SHAPE), NOTHING, None, plan)


def test_an_inpainting_checkpoint_is_refused(bundled: Pipeline) -> None:
    family = bundled.family
    pipe = replace(bundled, family=replace(family, task="inpaint", unet=replace(family.unet, in_channels=33)))
    plan = pipe.plan("ddim", 2)
    with pytest.raises(ValueError, match="reads an image besides the text"):
        pipe.denoise(torch.zeros(1, *SHAPE), NOTHING, None, plan)


def test_latents_that_are_not_finite_are_an_error(bundled: Pipeline) -> None:
    latents = torch.zeros(1, *SHAPE)
    latents[0, 0, 0, 0] = float("nan")
    with pytest.raises(ValueError, match="the latents are not finite"):
        bundled.decode(latents, output="tensor")[0]


@pytest.mark.slow
def test_a_decoder_that_overflows_is_run_again_in_float32(caplog: pytest.LogCaptureFixture) -> None:
    pipe = ldm_lite.load(device="cpu", dtype="fp16")
    latents = run(ldm_lite.load(device="cpu"), "ddim", ["rocket"], [0])
    want = pipe.decode(latents, output="tensor")[0]
    # The same function, with a value in the middle that float16 cannot hold.
    with torch.no_grad():
        pipe.vae.decoder.conv_in.weight.mul_(4096)
        pipe.vae.decoder.conv_in.bias.mul_(4096)
        pipe.vae.decoder.mid.block_1.conv2.weight.mul_(4096)
        pipe.vae.decoder.mid.block_1.conv2.bias.mul_(4096)
    got = pipe.decode(latents * 2, output="tensor")[0]
    assert torch.isfinite(got).all()
    assert got.shape == want.shape
    assert "the autoencoder overflows in float16: decoding in float32" in caplog.text
    assert pipe.vae.decoder.conv_in.weight.dtype == torch.float16


def test_decoding_goes_on_in_tiles_when_memory_runs_out(
    bundled: Pipeline, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    latents = torch.randn(2, *bundled.latent_shape(64, 64), generator=torch.Generator().manual_seed(0))
    wanted = bundled.decode(latents, output="tensor")

    def fails(self: object, x: torch.Tensor) -> torch.Tensor:
        raise torch.OutOfMemoryError("out of memory")

    monkeypatch.delitem(vars(bundled.vae.decoder), "forward", raising=False)  # as on a GPU
    monkeypatch.setattr(type(bundled.vae.decoder), "forward", fails)
    monkeypatch.setattr(tiling, "STRIP", 2**14)
    got = bundled.decode(latents, output="tensor")
    assert all((a - b).abs().max() < 1e-4 for a, b in zip(got, wanted, strict=True))
    assert [record.getMessage() for record in caplog.records] == [
        "out of memory: decoding in tiles, which `vae_tiling` does from the start"
    ]


def test_another_error_in_decoding_is_not_taken_for_it(bundled: Pipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(self: object, x: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("another reason")

    monkeypatch.delitem(vars(bundled.vae.decoder), "forward", raising=False)  # as on a GPU
    monkeypatch.setattr(type(bundled.vae.decoder), "forward", fails)
    with pytest.raises(RuntimeError, match="another reason"):
        bundled.decode(torch.zeros(1, *bundled.latent_shape(64, 64)), output="tensor")


@pytest.mark.slow
def test_memory_stays_flat_over_many_prompts(bundled: Pipeline, tmp_path: Path) -> None:
    """Nothing is kept of an image: not its embeddings, beyond the last 64, nor its latents."""
    (tmp_path / "prompts.txt").write_text("".join(f"a cat and {i} dogs\n" for i in range(80)))
    options = {"from_file": str(tmp_path / "prompts.txt"), "steps": 1, "scale": 1.0, "height": 16, "width": 16}
    tensors, sizes = [], []
    for i, _ in enumerate(bundled.stream(**options)):
        if i in (72, 78):
            gc.collect()
            tensors.append(sum(issubclass(type(thing), Tensor) for thing in gc.get_objects()))
            sizes.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
    assert tensors[0] == tensors[1]
    assert sizes[1] - sizes[0] < 4096  # KiB


@pytest.mark.slow
def test_dpm_adaptive_has_steps_of_its_own_for_every_image(small_path: Path) -> None:
    """An image does not depend on its batch; the steps that are reported go up to the number asked for."""
    pipe = ldm_lite.load(small_path, device="cpu")
    states: list[int] = []
    options = {"sampler": "DPM adaptive", "steps": 6, "seed": 3, "output": "tensor", "scale": 2.0}
    both = pipe.txt2img(["a cat", "a dog"], batch_size=2, **options)
    alone = [pipe.txt2img(prompt, **(options | {"seed": 3 + k}))[0] for k, prompt in enumerate(("a cat", "a dog"))]
    for batched, single in zip(both, alone, strict=True):
        torch.testing.assert_close(batched, single, atol=1e-4, rtol=0)
    for state in pipe.stream("a cat", sampler="DPM adaptive", steps=6):
        assert state.x0.shape == state.latents.shape
        states.append(state.step)
    assert states == sorted(states)
    assert (states[0], states[-1], both[0].shape) == (1, 6, (3, 64, 64))
    [image] = pipe.img2img("a cat", Image.new("RGB", (64, 64)), strength=0.4, steps=10, sampler="DPM adaptive")
    assert image.size == (64, 64)
    with pytest.raises(ValueError, match="no fixed steps for a mask or a refiner"):
        pipe.txt2img("a cat", sampler="DPM adaptive", steps=3, refiner=pipe)
