"""Hires fix: a second pass on the enlarged image, as AUTOMATIC1111's web UI does it."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from PIL.PngImagePlugin import PngInfo
from torch.nn import functional as F

import ldm_lite
from ldm_lite import txt2img as command
from ldm_lite.cli.task_options import Img2imgOptions
from ldm_lite.cli.task_options import Txt2imgOptions as Options
from ldm_lite.conditioning.prompts import encode_prompts
from ldm_lite.diffusion.guidance import classifier_free
from ldm_lite.diffusion.names import make_plan
from ldm_lite.generate import denoise, encode
from ldm_lite.image import to_pixels
from ldm_lite.models.rrdb import RRDBNet, RRDBSpec
from ldm_lite.pipeline import Pipeline
from ldm_lite.tasks.img2img import img2img
from ldm_lite.tasks.txt2img import txt2img

FIRST: dict[str, Any] = {"seed": 3, "steps": 4, "sampler": "euler", "height": 32, "width": 40, "negative_prompt": "bad"}


@pytest.fixture(scope="module")
def pipe(small_path: Path) -> Pipeline:
    return ldm_lite.load(small_path, device="cpu")


def by_hand(pipe: Pipeline, enlarged: torch.Tensor, steps: int, strength: float) -> torch.Tensor:
    """The second pass from enlarged latents: the last `steps` of int(steps / strength), with the seed's noise."""
    plan = make_plan("euler", pipe.schedule, int(steps / strength), last=steps)
    noise = pipe.noise_source([3], height=8 * enlarged.shape[2], width=8 * enlarged.shape[3])()
    a, s = plan.level[0]
    branches = classifier_free(encode_prompts(pipe, ["a cat"]), encode_prompts(pipe, ["bad"]), pipe.family.scale)
    return denoise(pipe, a * enlarged + s * noise, branches, replace(plan, initial=1.0))


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
    first: list[torch.Tensor] = []
    list(txt2img(pipe, Options("a cat", **FIRST), on_step=lambda state: first.append(state.latents)))
    options = Options("a cat", hires=1.5, hires_strength=0.5, hires_steps=3, hires_upscaler=upscaler, **FIRST)
    states: list[Any] = []
    [result] = txt2img(pipe, options, on_step=states.append)
    assert result.pixels.shape == (3, 48, 56)  # 60 is no multiple of 8, and cut
    assert [state.num_steps for state in states] == [4] * 4 + [3] * 3
    enlarged = F.interpolate(first[-1], size=(6, 7), **mode)
    torch.testing.assert_close(states[-1].latents, by_hand(pipe, enlarged, 3, 0.5), atol=1e-4, rtol=1e-4)
    assert "Size: 40x32" in result.parameters
    assert (
        f"Denoising strength: 0.5, Hires upscaler: {upscaler}, Hires upscale: 1.5, Hires steps: 3" in result.parameters
    )


@pytest.mark.parametrize("upscaler", ["Lanczos", "Nearest"])
def test_in_pixels(pipe: Pipeline, upscaler: str) -> None:
    [first] = txt2img(pipe, Options("a cat", **FIRST))
    states: list[Any] = []
    list(txt2img(pipe, Options("a cat", hires=2, hires_upscaler=upscaler, **FIRST), on_step=states.append))
    cut = ((first.pixels + 1) / 2 * 255).clamp(0, 255).to(torch.uint8)  # the web UI's astype(np.uint8)
    image = Image.fromarray(cut.permute(1, 2, 0).numpy()).resize((80, 64), Image.Resampling[upscaler.upper()])
    enlarged, _ = encode(pipe, to_pixels(image)[None])
    torch.testing.assert_close(states[-1].latents, by_hand(pipe, enlarged, 4, 0.7), atol=1e-3, rtol=1e-3)


@pytest.mark.slow
def test_by_an_esrgan_network(pipe: Pipeline, tmp_path: Path) -> None:
    """Enlarged by its own factor until it is large enough, then reduced."""
    torch.manual_seed(1)
    torch.save({"params": RRDBNet(RRDBSpec(fold=2, width=8, grown=4, blocks=1)).state_dict()}, tmp_path / "x2net.pth")
    [first] = txt2img(pipe, Options("a cat", **FIRST))
    states: list[Any] = []
    more = {"hires": 3, "hires_esrgan": str(tmp_path / "x2net.pth")}
    [result] = txt2img(pipe, Options("a cat", **FIRST, **more), on_step=states.append)
    cut = ((first.pixels + 1) / 2 * 255).clamp(0, 255).to(torch.uint8).permute(1, 2, 0).numpy()
    enlarge = ldm_lite.Upscaler(tmp_path / "x2net.pth", device="cpu")
    image = enlarge(enlarge(Image.fromarray(cut))).resize((120, 96), Image.Resampling.LANCZOS)
    enlarged, _ = encode(pipe, to_pixels(image)[None])
    torch.testing.assert_close(states[-1].latents, by_hand(pipe, enlarged, 4, 0.7), atol=1e-3, rtol=1e-3)
    result.image.save(tmp_path / "a.png", pnginfo=png_text(result.parameters))
    with pytest.raises(ValueError, match="was enlarged by 'x2net': give that network, `hires_esrgan=FILE`"):
        list(txt2img(pipe, Options(from_png=tmp_path / "a.png")))
    [again] = txt2img(pipe, Options(from_png=tmp_path / "a.png", hires_esrgan=more["hires_esrgan"]))
    assert torch.equal(again.pixels, result.pixels)


def png_text(text: str) -> PngInfo:
    info = PngInfo()
    info.add_text("parameters", text)
    return info


@pytest.mark.slow
def test_a_batch_and_a_sampler_of_its_own(pipe: Pipeline) -> None:
    given = {**FIRST, "hires": 2.0, "hires_steps": 2, "hires_sampler": "ddim"}
    together = list(txt2img(pipe, Options(["a cat", "a dog"], batch_size=2, **given)))
    for i, prompt in enumerate(["a cat", "a dog"]):
        [alone] = txt2img(pipe, Options(prompt, **given | {"seed": 3 + i}))
        torch.testing.assert_close(together[i].pixels, alone.pixels, atol=1e-3, rtol=0)


def test_prompts_of_its_own(pipe: Pipeline, tmp_path: Path) -> None:
    """The second pass reads them alone: it is that of a job with these prompts, from the first pass's latents."""
    given = {**FIRST, "hires": 2.0, "hires_steps": 3, "hires_strength": 0.5}
    own = {"hires_prompt": "a cat", "hires_negative_prompt": "bad", "negative_prompt": "worse"}
    states: list[Any] = []
    [made] = txt2img(pipe, Options("a dog, a house", **given | own), on_step=states.append)
    enlarged = F.interpolate(states[3].latents, size=tuple(states[-1].latents.shape[2:]), mode="bilinear")
    torch.testing.assert_close(states[-1].latents, by_hand(pipe, enlarged, 3, 0.5), atol=1e-4, rtol=1e-4)
    assert made.prompt == "a dog, a house"
    assert "Hires prompt: a cat, Hires negative prompt: bad" in made.parameters
    made.image.save(tmp_path / "a.png", pnginfo=png_text(made.parameters))
    [again] = txt2img(pipe, Options(from_png=tmp_path / "a.png"))
    assert torch.equal(again.pixels, made.pixels)
    ready = encode_prompts(pipe, ["a cat"])
    with pytest.raises(ValueError, match="got `cond`, which is for both passes, and `hires_prompt`"):
        list(txt2img(pipe, Options(cond=ready, **given, hires_prompt="a dog")))


@pytest.mark.slow
def test_prompts_count_on_in_the_second_pass(pipe: Pipeline) -> None:
    """[a:b:1.5] changes in the middle of it, [a:b:0.5] before it."""
    given = {**FIRST, "prompt_syntax": "a1111", "hires": 2.0, "hires_steps": 4}
    same = [
        ("[a cat:a dog:1.0]", "[a cat:a dog:4]"),
        ("[a cat:a dog:9.0]", "a cat"),
        ("[a dog:a cat:-1]", "a cat"),
    ]
    for one, other in same:
        [[first], [second]] = (list(txt2img(pipe, Options(prompt, **given))) for prompt in (one, other))
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
        ({"hires": 2, "hires_strength": 0.002}, "the last of 2000, wanted at most 1000"),
        ({"hires": 2, "noise": torch.zeros(1, 4, 4, 5)}, "draws the noise of its second pass itself"),
        ({"hires": 2, "hires_sampler": "no such"}, "unknown sampler"),
    ],
)
def test_wrong_options_are_one_line(pipe: Pipeline, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        list(txt2img(pipe, Options("a cat", **FIRST | options)))
    assert "\n" not in str(caught.value)


def test_other_tasks_have_none(pipe: Pipeline) -> None:
    with pytest.raises(ValueError, match="`hires` is an option of txt2img"):
        list(img2img(pipe, Img2imgOptions("a", init_img=(torch.zeros(3, 32, 32),), hires=2)))
