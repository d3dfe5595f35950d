"""Hires fix: a second pass on the enlarged image, as AUTOMATIC1111's web UI does it."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import esrgan
import numpy as np
import pytest
import texts
import torch
from PIL import Image
from runs import run_latents
from torch.nn import functional as F

import ldm_lite
from ldm_lite import Pipeline
from ldm_lite import txt2img as command
from ldm_lite.cli.task_options import Txt2imgOptions
from ldm_lite.core.job import run_batches
from ldm_lite.tasks.txt2img import prepare

FIRST: dict[str, Any] = {"seed": 3, "steps": 4, "sampler": "euler", "height": 32, "width": 40, "negative_prompt": "bad"}


def by_hand(pipe: Pipeline, enlarged: torch.Tensor, steps: int, strength: float) -> torch.Tensor:
    """The second pass from enlarged latents: the last `steps` of int(steps / strength), with the seed's noise."""
    plan = pipe.plan("euler", int(steps / strength), last=steps)
    noise = pipe.noise_source([3], height=8 * enlarged.shape[2], width=8 * enlarged.shape[3])()
    a, s = plan.level[0]
    cond, uncond = pipe.encode_prompt("a cat"), pipe.encode_prompt("bad")
    return pipe.denoise(a * enlarged + s * noise, cond, uncond, replace(plan, initial=1.0), pipe.family.scale)


@pytest.mark.parametrize(
    ("upscaler", "mode"),
    [
        ("Latent", {"mode": "bilinear"}),
        ("Latent (antialiased)", {"mode": "bilinear", "antialias": True}),
        ("Latent (bicubic)", {"mode": "bicubic"}),
        ("Latent (nearest-exact)", {"mode": "nearest-exact"}),
    ],
)
def test_in_the_latents(pipe: Pipeline, upscaler: str, mode: dict[str, Any]) -> None:
    first = run_latents(pipe, "a cat", **FIRST)
    options = {"hires": 1.5, "hires_strength": 0.5, "hires_steps": 3, "hires_upscaler": upscaler, **FIRST}
    states = list(pipe.stream("a cat", **options))
    [result] = pipe.txt2img("a cat", output="result", **options)
    assert result.pixels.shape == (3, 48, 56)  # 60 is no multiple of 8, and cut
    assert [state.num_steps for state in states] == [4] * 4 + [3] * 3
    enlarged = F.interpolate(first, size=(6, 7), **mode)
    torch.testing.assert_close(states[-1].latents, by_hand(pipe, enlarged, 3, 0.5), atol=1e-4, rtol=1e-4)
    assert "Size: 40x32" in result.parameters
    assert (
        f"Denoising strength: 0.5, Hires upscaler: {upscaler}, Hires upscale: 1.5, Hires steps: 3" in result.parameters
    )


@pytest.mark.parametrize("scale", [1, 7])
@pytest.mark.parametrize("second", ["euler_a", "dpmpp_2m_sde", "ddim_cfgpp"])
def test_the_second_pass_has_the_guidance_and_the_noise_of_its_own_sampler(
    pipe: Pipeline, second: str, scale: int
) -> None:
    def latents(sampler: str) -> torch.Tensor:
        arguments = {**FIRST, "sampler": sampler, "hires_sampler": second, "scale": scale, "noise": "a1111"}
        [part] = prepare(pipe, Txt2imgOptions("a cat", hires=1.5, **arguments)).parts
        [*_, last] = run_batches(replace(part.make().follow(torch.zeros(1, 4, 4, 5)), items=part.items))
        return last.latents

    wanted = latents(second)
    for sampler in ("euler", "dpmpp_2m_sde", "ddim_cfgpp"):
        assert torch.equal(latents(sampler), wanted), sampler


@pytest.mark.parametrize("upscaler", ["Lanczos", "Nearest"])
def test_in_pixels(pipe: Pipeline, upscaler: str) -> None:
    [first] = pipe.txt2img("a cat", output="result", **FIRST)
    states = list(pipe.stream("a cat", hires=2, hires_upscaler=upscaler, **FIRST))
    cut = ((first.pixels + 1) / 2 * 255).clamp(0, 255).to(torch.uint8)  # the web UI's astype(np.uint8)
    image = Image.fromarray(cut.permute(1, 2, 0).numpy()).resize((80, 64), Image.Resampling[upscaler.upper()])
    enlarged = pipe.encode(image)
    torch.testing.assert_close(states[-1].latents, by_hand(pipe, enlarged, 4, 0.7), atol=1e-3, rtol=1e-3)


@pytest.mark.slow
def test_by_an_esrgan_network(pipe: Pipeline, tmp_path: Path) -> None:
    """Enlarged by its own factor until it is large enough, then reduced."""
    grey = esrgan.weights(2) | {"conv_last.bias": torch.full((3,), 0.5)}  # around which pixels are seldom cut off
    torch.save({"params": grey}, tmp_path / "x2net.pth")
    [first] = pipe.txt2img("a cat", output="result", **FIRST)
    more = {"hires": 3, "hires_esrgan": str(tmp_path / "x2net.pth")}
    states = list(pipe.stream("a cat", **FIRST, **more))
    [result] = pipe.txt2img("a cat", output="result", **FIRST, **more)
    cut = ((first.pixels + 1) / 2 * 255).clamp(0, 255).to(torch.uint8).permute(1, 2, 0).numpy()
    enlarge = ldm_lite.Upscaler(tmp_path / "x2net.pth", device="cpu")
    image = enlarge(enlarge(Image.fromarray(cut))).resize((120, 96), Image.Resampling.LANCZOS)
    enlarged = pipe.encode(image)
    torch.testing.assert_close(states[-1].latents, by_hand(pipe, enlarged, 4, 0.7), atol=1e-3, rtol=1e-3)
    texts.save(tmp_path / "a.png", result.parameters, result.image)
    with pytest.raises(ValueError, match="was enlarged by 'x2net': give that network, `hires_esrgan=FILE`"):
        pipe.txt2img(from_png=tmp_path / "a.png")
    [again] = pipe.txt2img(from_png=tmp_path / "a.png", hires_esrgan=more["hires_esrgan"], output="result")
    assert torch.equal(again.pixels, result.pixels)


@pytest.mark.slow
def test_a_batch_and_a_sampler_of_its_own(pipe: Pipeline) -> None:
    arguments = {**FIRST, "hires": 2.0, "hires_steps": 2, "hires_sampler": "ddim"}
    together = pipe.txt2img(["a cat", "a dog"], batch_size=2, output="result", **arguments)
    for i, prompt in enumerate(["a cat", "a dog"]):
        [alone] = pipe.txt2img(prompt, output="result", **arguments | {"seed": 3 + i})
        torch.testing.assert_close(together[i].pixels, alone.pixels, atol=1e-3, rtol=0)


def test_prompts_of_its_own(pipe: Pipeline, tmp_path: Path) -> None:
    """The second pass reads them alone: it is that of a job with these prompts, from the first pass's latents."""
    arguments = {**FIRST, "hires": 2.0, "hires_steps": 3, "hires_strength": 0.5}
    prompts = {"hires_prompt": "a cat", "hires_negative_prompt": "bad", "negative_prompt": "worse"}
    states = list(pipe.stream("a dog, a house", **arguments | prompts))
    [result] = pipe.txt2img("a dog, a house", output="result", **arguments | prompts)
    enlarged = F.interpolate(states[3].latents, size=tuple(states[-1].latents.shape[2:]), mode="bilinear")
    torch.testing.assert_close(states[-1].latents, by_hand(pipe, enlarged, 3, 0.5), atol=1e-4, rtol=1e-4)
    assert result.prompt == "a dog, a house"
    assert "Hires prompt: a cat, Hires negative prompt: bad" in result.parameters
    texts.save(tmp_path / "a.png", result.parameters, result.image)
    [again] = pipe.txt2img(from_png=tmp_path / "a.png", output="result")
    assert torch.equal(again.pixels, result.pixels)
    ready = pipe.encode_prompt("a cat")
    with pytest.raises(ValueError, match="`hires_prompt` does not go with `cond`"):
        pipe.txt2img(cond=ready, hires_prompt="a dog", **arguments)


@pytest.mark.slow
def test_prompts_count_on_in_the_second_pass(pipe: Pipeline) -> None:
    """[a:b:1.5] changes in the middle of it, [a:b:0.5] before it."""
    arguments = {**FIRST, "prompt_syntax": "a1111", "hires": 2.0, "hires_steps": 4}
    same = [
        ("[a cat:a dog:1.0]", "[a cat:a dog:4]"),
        ("[a cat:a dog:9.0]", "a cat"),
        ("[a dog:a cat:-1]", "a cat"),
    ]
    for early, plain in same:
        [[first], [second]] = (pipe.txt2img(prompt, output="result", **arguments) for prompt in (early, plain))
        assert torch.equal(first.pixels, second.pixels)


@pytest.mark.slow
def test_a_picture_is_made_again(pipe: Pipeline, small_path: Path, tmp_path: Path) -> None:
    options = ["--ckpt", str(small_path), "--device", "cpu", "--seed", "3", "--steps", "3", "--H", "32", "--W", "32"]
    more = ["--hires", "2", "--hires-steps", "2", "--hires-strength", "0.6", "--hires-upscaler", "Latent (nearest)"]
    command.main(
        [*options[:4], "a cat", *options[4:], *more, "--hires-sampler", "euler", "--out", str(tmp_path / "a.png")]
    )
    command.main([*options[:4], "--from-png", str(tmp_path / "a.png"), "--out", str(tmp_path / "b.png")])
    a, b = (Image.open(tmp_path / name) for name in ("a.png", "b.png"))
    assert a.size == (64, 64)
    assert np.array_equal(np.asarray(a), np.asarray(b))
    assert a.info["parameters"] == b.info["parameters"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"hires_steps": 3}, "`hires_steps` is of a second pass: give `hires=2`"),
        ({"hires": 2, "hires_strength": 0.002}, "the last of 2000, expected at most 1000"),
        ({"hires": 2, "noise": torch.zeros(1, 4, 4, 5)}, "draws the noise of its second pass itself"),
        ({"hires": 2, "hires_sampler": "no such"}, "unknown sampler"),
    ],
)
def test_wrong_options_are_one_line(pipe: Pipeline, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        pipe.txt2img("a cat", **FIRST | options)
    assert "\n" not in str(caught.value)


def test_other_tasks_have_none(pipe: Pipeline) -> None:
    with pytest.raises(ValueError, match="`hires` is an option of txt2img"):
        pipe.img2img(None, torch.zeros(3, 32, 32), hires=2)
