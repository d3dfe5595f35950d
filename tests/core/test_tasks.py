"""Text to image, image to image and inpainting: against diffusers' runs, and what must hold of every image."""

import copy
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from references import SAMPLERS, arrays, error
from torch import Tensor

from ldm_lite.core import Pipeline, load
from ldm_lite.core.denoise import State, run_row
from ldm_lite.core.networks import pick_device
from ldm_lite.core.schedule import Schedule

GOLDEN = arrays("bundled.npz")
FAST: dict[str, Any] = {"steps": 2, "sampler": "euler"}


def pixels(pipe: Pipeline, **options: Any) -> Tensor:
    """The results of a task (B,3,H,W)."""
    return torch.stack([result.pixels for result in pipe.results(**options)])


def background(image: Image.Image) -> tuple[int, ...]:
    """The mean colour of the upper left corner."""
    return tuple(np.asarray(image)[:6, :6].mean(axis=(0, 1)).astype(int))


# ---- text to image --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("steps", "scale"), [(20, 2.5), pytest.param(50, 5.0, marks=pytest.mark.slow)])
def test_whole_runs_are_those_of_diffusers(pipe: Pipeline, steps: int, scale: float) -> None:
    noise = torch.from_numpy(GOLDEN["noise"])
    cond, uncond = pipe.encode_prompt(GOLDEN["prompts"].tolist()), pipe.encode_prompt("")
    latents = pipe.denoise(noise, cond, uncond, pipe.plan("ddim", steps), scale)
    assert error(latents, GOLDEN[f"ddim_{steps}_{scale}"]) < 1e-4


def test_the_image_is_what_the_prompt_says(apple: Image.Image, pipe: Pipeline) -> None:
    assert apple.size == (128, 128)
    red, green, blue = background(apple)
    assert blue > max(red, green) + 60
    centre = np.asarray(apple)[52:80, 52:80].reshape(-1, 3).mean(axis=0)
    assert centre[0] > centre[1] + 60
    assert centre[0] > centre[2] + 60
    red, green, blue = background(pipe.txt2img("a red apple on a green background", steps=8)[0])
    assert green > max(red, blue) + 30


def test_tasks_do_what_their_parts_do(pipe: Pipeline) -> None:
    latents = pipe.denoise(
        pipe.noise(7), pipe.encode_prompt("a cat"), pipe.encode_prompt("blue"), pipe.plan("euler", 3), scale=4.0
    )
    image = pipe.txt2img("a cat", negative_prompt="blue", sampler="euler", steps=3, scale=4.0, seed=7)[0]
    assert pipe.decode(latents)[0].tobytes() == image.tobytes()
    options = {"seed": 7, "plan": pipe.plan("euler", 3)}
    assert pipe.txt2img("a cat", negative_prompt="blue", scale=4.0, **options)[0].tobytes() == image.tobytes()


def test_an_image_does_not_depend_on_its_batch(pipe: Pipeline) -> None:
    alone = [pixels(pipe, prompt="a cat", seed=seed, sampler="euler_a", steps=2)[0] for seed in (5, 6)]
    together = pixels(pipe, prompt="a cat", seed=5, batch_size=2, sampler="euler_a", steps=2)
    several = pixels(pipe, prompt=["a dog", "a cat", "a cat"], seed=[1, 6, 5], batch_size=2, sampler="euler_a", steps=2)
    for image, others in zip(alone, ((together[0], several[2]), (together[1], several[1])), strict=True):
        for batched in others:  # kernels for other batch sizes round differently
            torch.testing.assert_close(batched, image, rtol=0, atol=2e-4)
    assert not torch.allclose(alone[0], alone[1], atol=0.05)
    assert torch.equal(pixels(pipe, prompt="a cat", seed=5, sampler="euler_a", steps=2)[0], alone[0])


def test_noise_is_that_of_torch_s_generator_for_each_seed(pipe: Pipeline) -> None:
    wanted = [torch.randn(16, 16, 16, generator=torch.Generator().manual_seed(seed)) for seed in (3, 9)]
    assert torch.equal(pipe.noise([3, 9]), torch.stack(wanted))
    assert pipe.noise(3, height=80, width=48).shape == (1, 16, 10, 6)


def test_a_scale_of_1_runs_the_prompt_alone(pipe: Pipeline) -> None:
    sizes: list[int] = []

    def counting(*arguments: Any) -> Tensor:
        sizes.append(len(arguments[4].positive))
        return run_row(*arguments)

    counted = replace(pipe, run_row=counting)
    plain = pixels(counted, prompt="a cat", scale=1, **FAST)
    assert sizes == [1, 1]
    assert torch.equal(plain, pixels(pipe, prompt="a cat", negative_prompt="a dog", scale=1, **FAST))
    cond = pipe.encode_prompt("a cat")
    latents = pipe.denoise(pipe.noise(), cond, None, pipe.plan("euler", 2))
    assert torch.equal(torch.stack(list(pipe.decode_pixels(latents))), plain)


def test_sizes(pipe: Pipeline) -> None:
    assert pipe.txt2img("a cat", width=96, height=40, **FAST)[0].size == (96, 40)
    with pytest.raises(ValueError, match="got height 128 and width 65, expected multiples of 8"):
        pipe.txt2img("a cat", width=65, **FAST)
    with pytest.raises(ValueError, match=r"got height 65536 .*, at most 67108864 px"):
        pipe.txt2img("a cat", width=2**16, height=2**16, **FAST)  # before the system kills the process


def test_states_show_each_step_and_end_at_the_image(pipe: Pipeline) -> None:
    states = list(pipe.stream("a cat", sampler="dpmpp_2m", steps=4))
    assert [(state.step, state.num_steps) for state in states] == [(step, 4) for step in (1, 2, 3, 4)]
    image = pipe.txt2img("a cat", sampler="dpmpp_2m", steps=4)[0]
    assert pipe.decode(states[-1].latents)[0].tobytes() == image.tobytes()
    torch.testing.assert_close(states[-1].x0, states[-1].latents, rtol=1e-4, atol=1e-4)
    away = [float((state.x0 - states[-1].latents).norm()) for state in states]
    assert away == sorted(away, reverse=True)  # previews approach the image
    first = next(iter(pipe.stream("a cat", sampler="dpmpp_2m", steps=4)))  # leaving the loop stops it
    assert torch.equal(first.latents, states[0].latents)


@pytest.mark.parametrize("name", SAMPLERS)
def test_every_sampler_makes_the_image(pipe: Pipeline, name: str) -> None:
    red, green, blue = background(pipe.txt2img("a red apple on a blue background", sampler=name, steps=10)[0])
    assert blue > max(red, green) + 60


def test_noise_of_a_sampler_must_be_given_to_denoise(pipe: Pipeline) -> None:
    with pytest.raises(ValueError, match="this sampler adds noise at every step: pass `draw=`"):
        pipe.denoise(pipe.noise(), pipe.encode_prompt("a"), None, pipe.plan("euler_a", 2))


def test_parts_have_the_family_s_scale(pipe: Pipeline) -> None:
    noise, plan = pipe.noise(), pipe.plan("euler", 2)
    cond, uncond = pipe.encode_prompt("a cat"), pipe.encode_prompt("")
    plain = pipe.denoise(noise, cond, uncond, plan)
    assert torch.equal(plain, pipe.denoise(noise, cond, uncond, plan, scale=pipe.family.scale))
    assert pipe.decode(plain)[0].tobytes() == pipe.txt2img("a cat", sampler="euler", steps=2)[0].tobytes()


def test_seeds_of_parts(pipe: Pipeline) -> None:
    for seed in (np.int64(3), [3], np.array([3]), (np.int32(3),)):
        assert torch.equal(pipe.noise(seed), pipe.noise(3))  # type: ignore[arg-type]


def test_errors_of_parts_are_one_line(small: Pipeline, apple: Image.Image) -> None:
    noise, cond, plan = small.noise(1), small.encode_prompt("a"), small.plan("ddim", 2)
    two, latents = small.encode_prompt(["a", "b"]), torch.zeros(1, 4, 2, 2)
    cases: list[tuple[Any, str]] = [
        (lambda: small.noise(0.5), r"got seed=0.5, expected a whole number, or a list of them"),  # type: ignore[arg-type]
        (lambda: small.noise("7"), r"got seed='7', expected a whole number"),  # type: ignore[arg-type]
        (lambda: small.noise([]), r"got seed=\[\], expected a whole number"),
        (lambda: small.noise(1, height=0), "got height 0 and width 64"),
        (lambda: small.plan("ddim", True), "got True steps, expected 1 to 1000"),
        (lambda: small.plan("ddim", 2.5), "got 2.5 steps, expected 1 to 1000"),  # type: ignore[arg-type]
        (lambda: small.plan("ddim", 4, last=0), "got the last 0 of 4 steps, expected 1 to 4"),
        (lambda: small.txt2img("a", steps=True), "steps"),
        (
            lambda: small.denoise(noise[0], cond, None, plan),
            r"got noise of shape \(4, 8, 8\), expected a tensor \(B, 4,",
        ),
        (lambda: small.denoise(noise, cond, None, "ddim"), "got str as a plan, expected what pipe.plan"),  # type: ignore[arg-type]
        (
            lambda: small.denoise(noise, two, None, plan),
            "got context of 2 prompts for 1 images, expected one or as many",
        ),
        (lambda: small.decode(latents[0]), r"got latents of shape \(4, 2, 2\), expected a tensor \(B, 4, h, w\)"),
        (lambda: small.decode(latents[:, :3]), r"got latents of shape \(1, 3, 2, 2\)"),
        (lambda: small.decode(apple), r"got latents of the type Image, expected a tensor \(B, 4, h, w\)"),  # type: ignore[arg-type]
        (lambda: small.encode([]), r"got images of sizes \[\], expected one or more"),
        (lambda: small.encode([apple, apple.resize((64, 32))]), r"got images of sizes \[\(64, 32\), \(128, 128\)\]"),
        (lambda: small.encode(latents), "got Tensor as an image"),
        (lambda: small.encode_prompt(5), "got prompt=5, expected a text, or a list of texts"),  # type: ignore[arg-type]
        (lambda: small.encode_prompt(["a", None]), "expected a text, or a list of texts"),  # type: ignore[list-item]
        (lambda: small.encode_prompt([]), r"got prompt=\[\], expected a text"),
        (lambda: load(device="abacus"), "the device 'abacus' is not available"),
        (lambda: load(device="meta"), "the device 'meta' is not available"),
        (lambda: load(dtype=torch.int8), "got dtype torch.int8, expected one of fp32, fp16, bf16"),
        (lambda: load(dtype=16), "got dtype 16, expected one of"),  # type: ignore[arg-type]
    ]
    for part, message in cases:
        with pytest.raises((ValueError, TypeError), match=message) as raised:
            part()
        assert "\n" not in str(raised.value)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there_is_one_line() -> None:
    with pytest.raises(ValueError, match=r"the device 'cuda' is not available .*: leave it out, or use cpu") as raised:
        load(device="cuda")
    assert "\n" not in str(raised.value)


def test_the_device_is_a_gpu_if_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    for cuda, mps, name in ((True, True, "cuda"), (False, True, "mps"), (False, False, "cpu")):
        monkeypatch.setattr(torch.cuda, "is_available", lambda cuda=cuda: cuda)
        monkeypatch.setattr(torch.backends.mps, "is_available", lambda mps=mps: mps)
        assert pick_device(None) == torch.device(name)


# ---- image to image -------------------------------------------------------------------------------------------------


def test_strength_0_only_encodes_and_decodes(pipe: Pipeline, apple: Image.Image) -> None:
    image = pipe.img2img("a cat", apple, strength=0)[0]
    assert image.tobytes() == pipe.decode(pipe.encode(apple))[0].tobytes()


def test_strength_1_is_text_to_image(pipe: Pipeline, apple: Image.Image) -> None:
    image = pipe.img2img("a cat", apple, strength=1, **FAST)[0]
    assert image.tobytes() == pipe.txt2img("a cat", **FAST)[0].tobytes()


def test_strength_is_the_share_of_steps_from_the_noised_image(pipe: Pipeline, apple: Image.Image) -> None:
    states = list(pipe.stream("a cat", image=apple, strength=0.5, steps=6, sampler="euler", seed=3))
    assert [state.num_steps for state in states] == [3, 3, 3]
    plan = pipe.plan("euler", 6, last=3)
    a, s = plan.level[0]
    init = pipe.encode(apple)
    assert error(states[0].before, a * init + s * pipe.noise(3)) < 1e-5
    near, far = (pipe.img2img("a cat", apple, strength=strength, steps=6)[0] for strength in (0.2, 0.9))
    assert error(np.asarray(near), np.asarray(apple)) < error(np.asarray(far), np.asarray(apple))


def test_images_come_in_several_forms_and_sizes(pipe: Pipeline, apple: Image.Image, tmp_path: Any) -> None:
    apple.save(tmp_path / "apple.png")
    tensor = torch.from_numpy(np.array(apple)).permute(2, 0, 1) / 127.5 - 1
    images = [pipe.encode(source) for source in (apple, tmp_path / "apple.png", np.asarray(apple), tensor)]
    assert all(torch.equal(image, images[0]) for image in images)
    odd = pipe.img2img("a cat", apple.resize((90, 61)), **FAST)[0]
    assert odd.size == (90, 61)
    assert pipe.img2img("a cat", apple, width=32, **FAST)[0].size == (32, 32)
    wide = apple.resize((90, 60))
    assert pipe.img2img("a cat", wide, height=32, **FAST)[0].size == (48, 32)
    assert pipe.img2img("a cat", wide, width=24, **FAST)[0].size == (24, 16)


def test_large_images_are_reduced_with_a_message(
    pipe: Pipeline, apple: Image.Image, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        assert pipe.img2img("a cat", apple.resize((300, 200)), strength=0.4, **FAST)[0].size == (256, 171)
    assert "reduced to twice the model's size" in caplog.text


# ---- inpainting -----------------------------------------------------------------------------------------------------


@pytest.fixture
def right_half() -> Image.Image:
    mask = Image.new("L", (128, 128))
    mask.paste(255, (64, 0, 128, 128))
    return mask


@pytest.mark.parametrize(("sampler", "strength"), [("ddim", 1.0), ("euler_a", 0.7), ("plms", 1.0)])
def test_what_the_mask_keeps_is_kept_exactly(
    pipe: Pipeline, apple: Image.Image, right_half: Image.Image, sampler: str, strength: float
) -> None:
    image = pipe.inpaint("a rocket", apple, right_half, sampler=sampler, strength=strength, steps=4)[0]
    kept, painted = np.asarray(image), np.asarray(apple)
    assert np.array_equal(kept[:, :64], painted[:, :64])
    assert error(kept[:, 64:], painted[:, 64:]) > 0.05


def test_the_hole_has_the_decoded_pixels(pipe: Pipeline, apple: Image.Image, right_half: Image.Image) -> None:
    last = list(pipe.stream("a cat", image=apple, mask=right_half, sampler="euler", steps=2))[-1].latents
    decoded = np.asarray(pipe.decode(last)[0], dtype=float)
    image = np.asarray(pipe.inpaint("a cat", apple, right_half, sampler="euler", steps=2)[0], dtype=float)
    assert np.abs(image[:, 64:] - decoded[:, 64:]).max() <= 1


def test_the_network_sees_the_noised_image_where_it_is_kept(
    pipe: Pipeline, apple: Image.Image, right_half: Image.Image
) -> None:
    init, noise, plan = pipe.encode(apple), pipe.noise(42), pipe.plan("euler", 4)
    states: list[State] = list(pipe.stream("a cat", image=apple, mask=right_half, sampler="euler", steps=4))
    for state, (a, s) in zip(states[1:], plan.level[1:], strict=True):
        assert error(state.before[..., :8], (a * init + s * noise)[..., :8]) < 1e-5
        assert error(state.before[..., 8:], (a * init + s * noise)[..., 8:]) > 0.05
    assert torch.equal(states[0].before, noise * plan.initial)  # the first call begins with noise alone
    assert torch.equal(states[-1].latents[..., :8], init[..., :8])
    assert torch.equal(states[0].x0[..., :8], init[..., :8])


def test_errors_of_tasks_are_one_line(pipe: Pipeline, apple: Image.Image) -> None:
    black = Image.new("L", (128, 128))
    cases: list[tuple[dict[str, Any], str]] = [
        ({"image": apple, "mask": black}, "nothing to repaint, the mask is black"),
        ({"mask": black}, "got a mask, but no image to repaint"),
        ({"image": apple, "strength": 1.5}, "got `strength` 1.5, expected 0 to 1"),
        ({"image": 3}, "got int as an image, expected a path, PIL, an array or a tensor"),
        ({"batch_size": 0}, "got `batch_size` 0, expected 1 to 4096"),
        ({"prompt": []}, "got an empty list of prompts"),
        ({"prompt": ["a", "b"], "seed": [1]}, "got 1 seeds for 2 images"),
        ({"plan": pipe.plan(), "steps": 5}, "got a `plan`, which replaces sampler, spacing, steps and eta"),
        ({"plan": pipe.plan(), "image": apple}, "and a `strength` that leaves some of its steps out"),
        ({"sampler": "none"}, "unknown sampler 'none'"),
        ({"strength": 0.5}, "got a strength, but no image"),
        ({"width": 0}, "got `width` 0, expected 1 to 65536"),
        ({"steps": 2.5}, "got `steps` 2.5, expected a whole number"),
        ({"steps": "8"}, "got `steps` '8', expected a whole number"),
        ({"scale": float("nan")}, "got `scale` nan, expected a finite number"),
        ({"batch_size": None}, "got `batch_size` None, expected a whole number"),
        ({"prompt": None}, "got `prompt` None, expected a text or a list of them"),
        ({"prompt": ["a", 5]}, "got `prompt` 5, expected a text"),
        ({"negative_prompt": ["a"]}, "got `negative_prompt` \\['a'\\], expected a text"),
        ({"seed": "1"}, "got `seed` '1', expected a whole number"),
        ({"seed": [0.5]}, "got `seed` 0.5, expected a whole number"),
    ]
    for options, message in cases:
        with pytest.raises((ValueError, TypeError), match=message) as raised:
            list(pipe.results(**{"prompt": "a cat", **options}))
        assert "\n" not in str(raised.value)


def test_a_plan_for_another_network_is_refused(pipe: Pipeline) -> None:
    other_pipe = replace(pipe, schedule=Schedule(pipe.schedule.alpha_bar, "eps"))
    with pytest.raises(ValueError, match="this plan is for another network: make one with the schedule of emoji"):
        pipe.txt2img("a cat", plan=other_pipe.plan("ddim", 3))
    with pytest.raises(ValueError, match="this plan is for another network: make one with the schedule of emoji"):
        pipe.denoise(pipe.noise(), pipe.encode_prompt("a cat"), None, other_pipe.plan("ddim", 3))


def test_an_image_that_is_missing_is_no_other_task(pipe: Pipeline, apple: Image.Image) -> None:
    with pytest.raises(ValueError, match="got no image to start from"):
        pipe.img2img("a cat", None)
    with pytest.raises(ValueError, match="got no mask"):
        pipe.inpaint("a cat", apple, None)


def test_numbers_of_numpy(small: Pipeline) -> None:
    wanted = next(small.stream(["a", "b"], seed=[3, 4], steps=1, width=16, height=16)).latents
    for seed in (np.int64(3), np.array([3, 4]), np.arange(3, 5)):
        arguments: dict[str, Any] = {"seed": seed, "steps": np.int32(1), "width": np.int64(16), "height": 16}
        assert torch.equal(next(small.stream(["a", "b"], **arguments)).latents, wanted)


def test_a_file_keeps_what_images_are_made_by(small: Pipeline, tmp_path: Path) -> None:
    """The prediction and the levels of the schedule, and the sampler."""
    schedule = Schedule(small.schedule.alpha_bar**1.5, "v")
    changed = replace(small, schedule=schedule, family=replace(small.family, sampler="euler"))
    changed.save(tmp_path / "changed.safetensors")
    again = load(tmp_path / "changed.safetensors", device="cpu")
    assert (again.schedule.prediction, again.family.sampler) == ("v", "euler")
    like, reloaded = (next(model.stream("a cat", steps=1)).latents for model in (changed, again))
    assert torch.equal(like, reloaded)


# ---- precision and the compiled step --------------------------------------------------------------------------------


def test_latents_that_are_not_finite_are_an_error_and_no_black_image(small: Pipeline) -> None:
    with pytest.raises(ValueError, match="the latents are not finite: the weights are damaged, or too coarse"):
        small.decode(torch.full((1, 4, 2, 2), torch.nan))


def test_an_autoencoder_that_overflows_decodes_in_float32(small: Pipeline, caplog: pytest.LogCaptureFixture) -> None:
    vae = copy.deepcopy(small.vae)
    vae.decoder.conv_in.weight.data *= 1e5  # the norms after it take it back
    vae.decoder.conv_in.bias.data *= 1e5
    latents = small.noise(1, 32, 32)
    wanted = small.with_networks(vae=vae).decode(latents)[0]
    half = small.with_networks(vae=copy.deepcopy(vae).half())
    assert error(np.asarray(half.decode(latents)[0]), np.asarray(wanted)) < 0.02
    assert "the autoencoder overflows in float16: decoding in float32" in caplog.text
    assert next(half.vae.parameters()).dtype == torch.float16  # the model is as it was


def test_half_precision_makes_nearly_the_same_image(apple: Image.Image) -> None:
    image = load(device="cpu", dtype="bf16").txt2img("a red apple on a blue background", steps=8)[0]
    assert error(np.asarray(image), np.asarray(apple)) < 0.05


@pytest.mark.slow
@pytest.mark.parametrize("sampler", ["ddim", "euler_a"])
def test_the_compiled_step_makes_nearly_the_same_latents(pipe: Pipeline, sampler: str) -> None:
    compiled = load(device="cpu", compile=True)
    options: dict[str, Any] = {"prompt": "a cat", "sampler": sampler, "steps": 3}
    for ours, plain in zip(compiled.stream(**options), pipe.stream(**options), strict=True):
        assert error(ours.latents, plain.latents) < 1e-4
