"""Whose noise a seed means: the numbers of other programs, the order they draw them in, variation seeds."""

import itertools
from collections.abc import Callable
from pathlib import Path

import numpy as np
import plan_runner
import pytest
import torch
import toy
from runs import unet_calls

from ldm_lite import Pipeline
from ldm_lite.diffusion.names import named_plan
from ldm_lite.diffusion.noise import BrownianTree, CudaNoise, Draw, cuda_normal, slerp
from ldm_lite.diffusion.plan import Plan
from ldm_lite.diffusion.schedule import NoiseSchedule
from ldm_lite.diffusion.spacings import at_sigmas
from ldm_lite.features.noise import brownian_noise, draws

GOLDENS = np.load(Path(__file__).parents[1] / "data" / "noise.npz")
PROMPT, NEGATIVE = "a red apple, highly detailed", "blurry"  # of make_noise_goldens.py
SHAPE = (4, 8, 8)


def first_noise(pipe: Pipeline, **options: object) -> torch.Tensor:
    """The latents (1,4,8,8) that a run of DDIM begins with, which are unit noise."""
    with unet_calls(pipe) as calls:
        pipe.txt2img("a", sampler="ddim", steps=1, scale=1.0, **options)
    return calls[0].x


def test_the_numbers_of_a_cuda_generator(pipe: Pipeline) -> None:
    # torch.randn((3, 4)) of seed 0 on a GPU, as the documentation of the web UI's rng_philox.py shows them
    published = [-0.92466259, -0.42534415, -2.6438457, 0.14518388, -0.12086647, -0.57972564]
    published += [-0.62285122, -0.32838709, -1.07454231, -0.36314407, -1.67105067, 2.26550497]
    noise = first_noise(pipe, noise="a1111", seed=0).flatten()[:12]
    np.testing.assert_allclose(noise.numpy(), published, rtol=0, atol=3e-7)


def test_philox_equals_the_published_test_vectors(pipe: Pipeline) -> None:
    """numpy's Philox is 4x64; for 4x32 the authors' kat_vectors are compared, through the inverse of Box-Muller."""
    # Random123, tests/kat_vectors: philox4x32 10, counter and key zero: 6627e8d5 e169c58d bc57ac4c 9b00dbd8
    u, v = (np.array([0x6627E8D5, 0xE169C58D]) + 0.5) / 2**32
    wanted = np.sqrt(-2 * np.log(u)) * np.sin(2 * np.pi * v)
    assert first_noise(pipe, noise="a1111", seed=0)[0, 0, 0, 0] == pytest.approx(wanted, abs=3e-7)


def test_cuda_noise_is_normal_and_moves_on() -> None:
    draw = CudaNoise([5, 2**62 + 3], (4, 64, 64))
    first, second = draw(), draw()
    assert first.shape == (2, 4, 64, 64)
    assert first.dtype == torch.float32
    assert abs(float(first.mean())) < 0.02
    assert abs(float(first.std()) - 1) < 0.02
    for a, b in ((first[0], first[1]), (first, second)):
        assert abs(float((a * b).mean())) < 0.02
    assert torch.equal(CudaNoise([5], (4, 64, 64))()[0], first[0])


def test_noise_of_ones_own_leaves_what_is_drawn_later(pipe: Pipeline) -> None:
    run = {"sampler": "euler_a", "steps": 2, "seed": 7, "output": "numpy"}
    [wanted], [image] = pipe.txt2img("a", **run), pipe.txt2img("a", noise=pipe.noise(7), **run)
    assert np.array_equal(image, wanted)


def test_slerp_turns_columns() -> None:
    torch.manual_seed(0)
    a, b = torch.randn(1, 2, 5, 3, dtype=torch.float64), torch.randn(1, 2, 5, 3, dtype=torch.float64)
    mixed = slerp(a, b, 0.3)
    for channel in range(2):
        for column in range(3):
            x, y = a[0, channel, :, column].numpy(), b[0, channel, :, column].numpy()
            angle = np.arccos(x @ y / np.linalg.norm(x) / np.linalg.norm(y))
            wanted = (np.sin(0.7 * angle) * x + np.sin(0.3 * angle) * y) / np.sin(angle)
            np.testing.assert_allclose(mixed[0, channel, :, column].numpy(), wanted, atol=1e-12)
    assert torch.equal(slerp(a, a, 0.3), a * 0.7 + a * 0.3)


def test_the_web_ui_draws_each_image_from_its_own_seeds() -> None:
    draw = draws("a1111", 31337, 0.2, [7, 7], [3, 4], SHAPE)
    first, second = draw(), draw()
    for row, variation in enumerate((3, 4)):
        base = torch.from_numpy(cuda_normal(7, 0, 256)).view(1, *SHAPE)
        varied = torch.from_numpy(cuda_normal(variation, 0, 256)).view(1, *SHAPE)
        assert torch.equal(first[row], slerp(base, varied, 0.2)[0])
        assert torch.equal(second[row].flatten(), torch.from_numpy(cuda_normal(7 + 31337, 0, 256)))
    last = draws("own", 1, 0.0, [2**64 - 1], [0], SHAPE)
    assert not torch.equal(last(), second := last())
    assert torch.equal(second[0], cpu_normal(0)), "seeds go on from 0"
    plain = draws("a1111", 0, 0.0, [7], [0], SHAPE)
    assert torch.equal(plain().flatten(), torch.from_numpy(cuda_normal(7, 0, 256)))
    assert torch.equal(plain().flatten(), torch.from_numpy(cuda_normal(7, 1, 256)))


def test_comfy_draws_a_batch_first_on_the_cpu_then_on_the_gpu() -> None:
    draw = draws("comfy", 0, 0.0, [9, 10], [0, 0], SHAPE)
    assert torch.equal(draw(), torch.randn(2, *SHAPE, generator=torch.Generator().manual_seed(9)))
    for call in range(2):
        assert torch.equal(draw().flatten(), torch.from_numpy(cuda_normal(9, call, 512)))


def test_images_of_a_seed_equal_diffusers(pipe: Pipeline) -> None:
    options = {"negative_prompt": NEGATIVE, "scale": 5.0, "batch_size": 2, "seed": 7, "noise": "diffusers"}
    result = pipe.txt2img(PROMPT, sampler="euler_a", spacing="linspace", steps=4, output="tensor", **options)
    again = pipe.img2img(
        PROMPT,
        GOLDENS["image"],
        sampler="euler_a",
        spacing="linspace",
        steps=8,
        strength=0.5,
        output="tensor",
        **options,
    )
    for name, images in (("txt2img", result), ("img2img", again)):
        ours = (torch.stack(images) / 2 + 0.5).clamp(0, 1).permute(0, 2, 3, 1)[:, ::4, ::4]
        np.testing.assert_allclose(ours.numpy(), GOLDENS[name], atol=5e-5)


def test_one_image_with_our_noise_is_diffusers_too_and_a_batch_is_not(pipe: Pipeline) -> None:
    run = {"sampler": "euler_a", "steps": 2, "seed": 7, "output": "numpy"}
    first, second = pipe.txt2img("a", batch_size=2, **run)
    ours, theirs = pipe.txt2img("a", **run)[0], pipe.txt2img("a", noise="diffusers", **run)[0]
    assert np.array_equal(ours, theirs)
    assert not np.array_equal(second, pipe.txt2img("a", batch_size=2, noise="diffusers", **run)[1])
    assert np.abs(first.astype(int) - ours).max() <= 1


def test_variations_share_a_seed(pipe: Pipeline) -> None:
    run = {"sampler": "euler", "steps": 2, "seed": 7}
    results = pipe.txt2img("a", batch_size=2, variation_seed=20, variation_strength=0.1, output="result", **run)
    assert [result.seed for result in results] == [7, 7]
    for varied, variation in zip(results, (20, 21), strict=True):
        assert f"Variation seed: {variation}, RNG: CPU" in varied.parameters
        assert "Variation seed strength: 0.1" in varied.parameters
        alone = pipe.txt2img(
            "a", variation_seed=variation, variation_strength=0.1, batch_size=1, output="numpy", **run
        )[0]
        assert np.abs(alone.astype(int) - varied.array).max() <= 1
    assert not np.array_equal(results[0].array, results[1].array)
    whole = pipe.txt2img("a", variation_seed=20, variation_strength=1.0, output="numpy", **run)[0]
    result = pipe.txt2img("a", output="numpy", **{**run, "seed": 20})[0]
    assert np.abs(whole.astype(int) - result).max() <= 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"noise": "dice"}, "got `noise` 'dice', expected one of own, a1111, diffusers, comfy"),
        ({"noise": 3}, "got int as `noise`, expected a tensor"),
        ({"variation_seed": 3}, "belong together"),
        ({"variation_strength": 0.3}, "belong together"),
        ({"variation_seed": 3, "variation_strength": 1.5}, "expected 0 to 1"),
        ({"noise": "comfy", "ensd": 1}, "comfy has no variation seeds and no ENSD"),
        ({"noise": "a1111", "compat": True}, "leave other noise out, or `compat`"),
    ],
)
def test_wrong_options_are_one_line(options: dict[str, object], message: str, pipe: Pipeline) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        pipe.txt2img("a", steps=2, **options)


def test_inpainting_refuses_the_noise_of_programs_that_draw_more(pipe: Pipeline) -> None:
    image, mask = np.zeros((64, 64, 3), np.uint8), np.zeros((64, 64), np.uint8)
    with pytest.raises(ValueError, match="`noise=diffusers` is for txt2img and img2img"):
        pipe.inpaint("a", image, mask, noise="diffusers")


TRICKS = np.load(Path(__file__).parents[1] / "data" / "tricks.npz")
SEEDS = [5, 123456789012]  # of make_trick_goldens.py


def cpu_normal(seed: int) -> torch.Tensor:
    return torch.randn(4, 8, 8, generator=torch.Generator().manual_seed(seed))


def test_a_brownian_tree_equals_torchsde() -> None:
    sigmas = [float(sigma) for sigma in TRICKS["sigmas"]]
    trees = [BrownianTree(sigmas[-2], sigmas[0], seed, cpu_normal) for seed in SEEDS]
    for k, i in enumerate((0, 3, 6)):
        ours = -torch.stack([tree(sigmas[i + 1], sigmas[i]) for tree in trees]) / (sigmas[i] - sigmas[i + 1]) ** 0.5
        np.testing.assert_allclose(ours.numpy(), TRICKS["increments"][k], rtol=1e-6, atol=1e-6)
    # queries in another order, of parts and of wholes, are of the same motion
    tree = BrownianTree(sigmas[-2], sigmas[0], 5, cpu_normal)
    whole, parts = tree(0.5, 9.0), tree(0.5, 3.0) + tree(3.0, 9.0)
    torch.testing.assert_close(whole, parts, rtol=0, atol=1e-5)
    assert torch.equal(whole, BrownianTree(sigmas[-2], sigmas[0], 5, cpu_normal)(0.5, 9.0))
    assert not tree(20.0, 30.0).any()


def curved(pipe: Pipeline, sampler: str, levels: np.ndarray, draw: Callable[[Plan], Draw]) -> np.ndarray:
    """What a sampler makes of x0 = tanh(y / (1 + sigma^2)) at some levels, from the goldens' noise."""
    plan = pipe.plan(sampler, len(levels) - 1, spacing=lambda *_: at_sigmas(pipe.schedule, levels[:-1]))
    return run_curved(plan, draw(plan))


def run_curved(plan: Plan, noises: Draw) -> np.ndarray:
    """The same by a plan."""
    calls = iter(plan.level)

    def model(x: np.ndarray, t: float) -> np.ndarray:  # predicts eps
        a, s = next(calls)
        return (x - a * np.tanh(x / a / (1 + (s / a) ** 2))) / s

    drawn = (noises().double().numpy() for _ in range(len(plan.t)))
    start = toy.normal(4, 2, 4, 8, 8).double().numpy() * plan.initial
    return plan_runner.run(plan, model, start, drawn)[-1]


@pytest.mark.parametrize("sampler", ["dpmpp_sde", "dpmpp_2m_sde", "dpmpp_3m_sde"])
def test_samplers_with_a_brownian_tree_equal_k_diffusion(sampler: str, pipe: Pipeline) -> None:
    sigmas = TRICKS["sigmas"].astype(float)
    latents = curved(pipe, sampler, sigmas, lambda plan: brownian_noise("own", SEEDS, SHAPE, plan))
    # both start at 14.6: ours from a variance-preserving latent of unit variance
    assert toy.relative_error(latents, TRICKS[sampler]) < 1e-5


@pytest.mark.parametrize(
    ("sampler", "spacing", "steps"),
    [("dpmpp_2m_sde", "linspace", 30), ("dpmpp_3m_sde", "karras", 20), ("dpmpp_sde", "exponential", 10)],
)
def test_times_of_a_motion_are_k_diffusion_s_to_the_last_bit(
    sampler: str, spacing: str, steps: int, pipe: Pipeline
) -> None:
    """One unit of float32 in a sigma is worth up to 0.03 in an image; CPUs' exponentials differ by 1e-4."""
    plan = pipe.plan(sampler, steps, spacing=spacing)
    latents = run_curved(plan, brownian_noise("own", SEEDS, SHAPE, plan))
    assert np.abs(latents - TRICKS[f"{sampler}.{spacing}"]).max() < 1e-3


def test_times_of_every_spacing_are_float32_sigmas(pipe: Pipeline) -> None:
    for spacing in ("simple", "normal", "sgm_uniform", "beta", "beta_sigma", "kl_optimal", "polyexponential:rho=2"):
        plan, last = (pipe.plan("dpmpp_2m_sde", 9, spacing=spacing, last=last) for last in (None, 4))
        sigmas = plan.level[:, 1] / plan.level[:, 0]
        assert np.abs(plan.times[:-1] / sigmas - 1).max() < 1e-4
        assert np.array_equal(plan.times, plan.times.astype(np.float32))
        assert np.array_equal(plan.times[-5:], last.times), "of an image that starts later"
    endless = NoiseSchedule.from_betas(pipe.schedule.betas, "v").zero_terminal_snr()
    for sampler, spacing in itertools.product(("dpmpp_sde", "dpmpp_2m_sde"), ("linspace", "karras", "simple")):
        plan = named_plan(sampler, endless, 6, spacing=spacing)
        assert torch.isfinite(brownian_noise("own", SEEDS, SHAPE, plan)()).all()
        assert plan.motion[1] == plan.times[0] == 4096


@pytest.mark.slow
@pytest.mark.parametrize("sampler", ["dpmpp_sde", "dpmpp_2m_sde", "dpmpp_3m_sde"])
def test_more_steps_come_nearer_with_a_brownian_tree_only(sampler: str, pipe: Pipeline) -> None:
    def at(steps: int, brownian: bool) -> np.ndarray:
        levels = np.append(np.geomspace(14.6, 0.03, steps), 0)
        independent = draws("own", 0, 0.0, SEEDS, [0, 0], SHAPE)
        return curved(
            pipe, sampler, levels, lambda plan: brownian_noise("own", SEEDS, SHAPE, plan) if brownian else independent
        )

    for brownian in (True, False):
        runs = [at(steps, brownian) for steps in (8, 32, 128)]
        errors = [np.linalg.norm(run - runs[-1]) for run in runs[:-1]]
        assert (errors[0] > 1.5 * errors[1]) == brownian


@pytest.mark.parametrize("program", ["own", "a1111", "comfy"])
def test_each_program_has_its_own_brownian_motions(program: str, pipe: Pipeline) -> None:
    plan = pipe.plan("dpmpp_2m_sde", 3, spacing="karras")
    draw = brownian_noise(program, SEEDS, SHAPE, plan)
    first = draw()
    high, low, least = (float(np.float32(time)) for time in plan.times[:3])
    np.testing.assert_allclose([high, low, least], plan.level[:, 1] / plan.level[:, 0], rtol=1e-4)
    if program == "comfy":  # one for the batch, of the first seed
        whole = lambda seed: torch.randn(2, *SHAPE, generator=torch.Generator().manual_seed(seed))  # noqa: E731
        wanted = BrownianTree(least, high, SEEDS[0], whole)(low, high)
    else:
        normal = (
            cpu_normal if program == "own" else lambda seed: torch.from_numpy(cuda_normal(seed, 0, 256)).view(SHAPE)
        )
        wanted = torch.stack([BrownianTree(least, high, seed, normal)(low, high) for seed in SEEDS])
    torch.testing.assert_close(first, -wanted / (high - low) ** 0.5)
    assert abs(float(first.std()) - 1) < 0.15


@pytest.mark.slow
def test_other_programs_and_the_option_draw_from_a_tree(pipe: Pipeline) -> None:
    run = {"sampler": "dpmpp_2m_sde", "steps": 3, "seed": 7, "output": "numpy"}
    plain, tree = pipe.txt2img("a", **run)[0], pipe.txt2img("a", brownian=True, **run)[0]
    assert not np.array_equal(plain, tree)
    batch = pipe.txt2img("a", brownian=True, batch_size=2, **(run | {"seed": 6}))
    assert np.abs(batch[1].astype(int) - tree).max() <= 1
    (text,) = pipe.txt2img("a", brownian=True, **(run | {"output": "result"}))
    assert "Brownian tree: True" in text.parameters
    again = pipe.txt2img(from_png=text.image, output="numpy")[0]
    assert np.array_equal(again, tree)
    theirs = pipe.txt2img("a", noise="a1111", **run)[0]
    assert not np.array_equal(theirs, pipe.txt2img("a", noise="a1111", **(run | {"sampler": "dpmpp_2m"}))[0])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sampler": "euler_a"}, "`brownian` is for dpmpp_sde, dpmpp_2m_sde, .* not euler_a"),
        ({"sampler": "dpmpp_sde", "noise": "diffusers"}, "diffusers draws no noise from a Brownian tree"),
    ],
)
def test_a_tree_where_there_is_none_is_refused(options: dict[str, str], message: str, pipe: Pipeline) -> None:
    with pytest.raises(ValueError, match=message):
        pipe.txt2img("a", steps=2, brownian=True, **options)
