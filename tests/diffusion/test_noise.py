"""Whose noise a seed means: the numbers of other programs, the order they draw them in, variation seeds."""

import logging
from pathlib import Path

import numpy as np
import pytest
import torch

import ldm_lite
from ldm_lite.diffusion.noise import CudaNoise, NoiseSource, cuda_normal, slerp
from ldm_lite.pipeline import Pipeline

GOLDENS = np.load(Path(__file__).parents[1] / "data" / "noise.npz")
PROMPT, NEGATIVE = "a red apple, highly detailed", "blurry"  # of make_noise_goldens.py
SHAPE = (4, 8, 8)


@pytest.fixture(scope="module")
def pipe(small_path: Path) -> Pipeline:
    return ldm_lite.load(small_path, device="cpu")


def test_the_numbers_of_a_cuda_generator() -> None:
    # torch.randn((3, 4)) of seed 0 on a GPU, as the documentation of the web UI's rng_philox.py shows them
    published = [-0.92466259, -0.42534415, -2.6438457, 0.14518388, -0.12086647, -0.57972564]
    published += [-0.62285122, -0.32838709, -1.07454231, -0.36314407, -1.67105067, 2.26550497]
    np.testing.assert_allclose(cuda_normal(0, 0, 12), published, rtol=0, atol=3e-7)


def test_philox_equals_the_published_test_vectors() -> None:
    """numpy's Philox is 4x64; for 4x32 the authors' kat_vectors are compared, through the inverse of Box-Muller."""
    # Random123, tests/kat_vectors: philox4x32 10, counter and key zero: 6627e8d5 e169c58d bc57ac4c 9b00dbd8
    u, v = (np.array([0x6627E8D5, 0xE169C58D]) + 0.5) / 2**32
    assert cuda_normal(0, 0, 1)[0] == pytest.approx(np.sqrt(-2 * np.log(u)) * np.sin(2 * np.pi * v), abs=1e-7)


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
    source = NoiseSource("a1111", delta=31337, strength=0.2)
    draw = source.draws([7, 7], [3, 4], SHAPE)
    first, second = draw(), draw()
    for row, variation in enumerate((3, 4)):
        one = torch.from_numpy(cuda_normal(7, 0, 256)).view(1, *SHAPE)
        other = torch.from_numpy(cuda_normal(variation, 0, 256)).view(1, *SHAPE)
        assert torch.equal(first[row], slerp(one, other, 0.2)[0])
        assert torch.equal(second[row].flatten(), torch.from_numpy(cuda_normal(7 + 31337, 0, 256)))
    plain = NoiseSource("a1111").draws([7], [0], SHAPE)
    assert torch.equal(plain().flatten(), torch.from_numpy(cuda_normal(7, 0, 256)))
    assert torch.equal(plain().flatten(), torch.from_numpy(cuda_normal(7, 1, 256)))


def test_comfy_draws_a_batch_first_on_the_cpu_then_on_the_gpu() -> None:
    draw = NoiseSource("comfy").draws([9, 10], [0, 0], SHAPE)
    assert torch.equal(draw(), torch.randn(2, *SHAPE, generator=torch.Generator().manual_seed(9)))
    for call in range(2):
        assert torch.equal(draw().flatten(), torch.from_numpy(cuda_normal(9, call, 512)))


def test_images_of_a_seed_equal_diffusers(pipe: Pipeline) -> None:
    options = {"negative_prompt": NEGATIVE, "scale": 5.0, "batch_size": 2, "seed": 7, "noise": "diffusers"}
    made = pipe.txt2img(PROMPT, sampler="euler_a", spacing="linspace", steps=4, output="tensor", **options)
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
    for name, images in (("txt2img", made), ("img2img", again)):
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
    assert [each.seed for each in results] == [7, 7]
    for each, variation in zip(results, (20, 21), strict=True):
        assert f"Variation seed: {variation}, RNG: CPU" in each.parameters
        assert "Variation seed strength: 0.1" in each.parameters
        alone = pipe.txt2img(
            "a", variation_seed=variation, variation_strength=0.1, batch_size=1, output="numpy", **run
        )[0]
        assert np.abs(alone.astype(int) - each.array).max() <= 1
    assert not np.array_equal(results[0].array, results[1].array)
    whole = pipe.txt2img("a", variation_seed=20, variation_strength=1.0, output="numpy", **run)[0]
    other = pipe.txt2img("a", output="numpy", **{**run, "seed": 20})[0]
    assert np.abs(whole.astype(int) - other).max() <= 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"noise": "dice"}, "got `noise` 'dice', wanted one of own, a1111, diffusers, comfy"),
        ({"noise": 3}, "got int as `noise`, wanted a tensor"),
        ({"variation_seed": 3}, "belong together"),
        ({"variation_strength": 0.3}, "belong together"),
        ({"variation_seed": 3, "variation_strength": 1.5}, "wanted 0 to 1"),
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


def test_brownian_noise_of_other_programs_is_named(pipe: Pipeline, caplog: pytest.LogCaptureFixture) -> None:
    pipe.txt2img("a", steps=2, sampler="dpmpp_2m_sde", noise="a1111")
    (line,) = (record.getMessage() for record in caplog.records if record.levelno == logging.WARNING)
    assert line == "dpmpp_2m_sde: other programs draw its noise from a Brownian tree, so only the first is theirs"
