"""Prompts of regions, against the arithmetic of ComfyUI's masks."""

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import random_checkpoint
import texts
import torch
from runs import guided_outputs
from torch import Tensor

import ldm_lite
from ldm_lite import Pipeline
from ldm_lite.features.regions import read_regions, shares

SMALL: dict[str, Any] = {"height": 32, "width": 64, "steps": 2}


def comfy(outs: Tensor, boxes: list[tuple[int, int, int, int]], strengths: list[float], scale: float) -> Tensor:
    """What comfy/samplers.py makes of the outputs (P+1,B,C,h,w), the first of the negative prompt."""
    cond, count = torch.zeros_like(outs[0]), torch.ones_like(outs[0]) * 1e-37
    for out, (left, top, right, bottom), strength in zip(outs[1:], boxes, strengths, strict=True):
        mult = torch.zeros_like(out)
        mult[:, :, top:bottom, left:right] = strength
        cond += out * mult
        count += mult
    cond /= count
    return outs[0] + (cond - outs[0]) * scale


@pytest.mark.parametrize(
    ("prompt", "regions", "boxes", "strengths"),
    [
        ("a cat AND a dog", "0,0,0.5,1; 0.5,0,1,1", [(0, 0, 4, 4), (4, 0, 8, 4)], [1, 1]),
        ("a field AND a cat :2 AND a dog :0.5", "all; 0,0.25,0.5,1; 0.375,0,1,0.5",
         [(0, 0, 8, 4), (0, 1, 4, 4), (3, 0, 8, 2)], [1, 2, 0.5]),
        ("a field AND a cat", "all; 0.1,0.1,0.4,0.9", [(0, 0, 8, 4), (1, 0, 3, 4)], [1, 1]),
    ],
)  # fmt: skip
@pytest.mark.parametrize("scale", [5.0, 1.0])
def test_outputs_are_averaged_as_in_comfyui(
    pipe: Pipeline, prompt: str, regions: str, boxes: list[Any], strengths: list[float], scale: float
) -> None:
    options = {"regions": regions, "scale": scale, "batch_size": 2, **SMALL}
    for outs, guided in guided_outputs(pipe, prompt, **options):
        assert len(outs) == len(boxes) + (scale != 1)  # without guidance the negative prompt is not computed
        whole = outs if scale != 1 else torch.cat([outs[:1], outs])
        torch.testing.assert_close(guided, comfy(whole, boxes, strengths, scale), rtol=2e-5, atol=2e-5)


def test_a_prompt_everywhere_is_the_prompt(pipe: Pipeline) -> None:
    [alone] = pipe.txt2img("a cat", seed=3, output="result", **SMALL)
    for regions in ("all; all", "0,0,0.5,1; 0.5,0,1,1"):
        [result] = pipe.txt2img("a cat AND a cat", regions=regions, seed=3, output="result", **SMALL)
        torch.testing.assert_close(result.pixels, alone.pixels, atol=1e-3, rtol=0)
    [everywhere] = pipe.txt2img("a cat", regions="all", seed=3, output="result", **SMALL)
    assert torch.equal(everywhere.pixels, alone.pixels)


@pytest.mark.parametrize("is_refined", [True, False])
def test_a_refiner_or_its_base_may_read_the_scale(pipe: Pipeline, tmp_path: Path, is_refined: bool) -> None:
    """A Latent Consistency Model does, and the other does not: each part of the run has what its network takes."""
    random_checkpoint.write(tmp_path / "lcm.safetensors", random_checkpoint.LCM)
    models = pipe, ldm_lite.load(tmp_path / "lcm.safetensors", device="cpu")
    base, refiner = models if is_refined else models[::-1]
    options = {"regions": "0,0,0.5,1; 0.5,0,1,1", "sampler": "ddim", **SMALL, "steps": 4}
    [result] = base.txt2img("a cat AND a dog", refiner=refiner, refiner_start=0.5, output="result", **options)
    [alone] = base.txt2img("a cat AND a dog", output="result", **options)
    assert not torch.equal(result.pixels, alone.pixels)


def test_steps_without_guidance_have_all_regions(pipe: Pipeline) -> None:
    """Also without regions: AND of two prompts and no guidance is their sum less the negative prompt."""
    for regions, boxes in (("0,0,0.5,1; 0.5,0,1,1", [(0, 0, 4, 4), (4, 0, 8, 4)]), (None, None)):
        options = {"regions": regions, "guidance_interval": "0.5-", "scale": 5.0, "prompt_syntax": "a1111", **SMALL}
        outs, guided = guided_outputs(pipe, "a cat AND a dog", **options)[0]
        if boxes is None:
            wanted = outs[1] + outs[2] - outs[0]
        else:
            wanted = comfy(torch.cat([outs[:1], outs]), boxes, [1, 1], 1.0)
        torch.testing.assert_close(guided, wanted, rtol=2e-5, atol=2e-5)


def test_the_other_tasks_and_passes(pipe: Pipeline) -> None:
    """An image's region follows its own prompt; hires fix has larger regions."""
    image = torch.zeros(3, 32, 64)
    by_name = {}
    for subject in ("a dog", "a rocket"):
        options = {"regions": "0,0,0.5,1; 0.5,0,1,1", "output": "tensor", **SMALL}
        [by_name[subject]] = pipe.img2img(f"a cat AND {subject}", image, **options)
    assert not torch.equal(by_name["a dog"], by_name["a rocket"])
    [hires] = pipe.txt2img("a cat AND a dog", regions="0,0,0.5,1; 0.5,0,1,1", hires=2, output="result", **SMALL)
    assert hires.pixels.shape == (3, 64, 128)
    assert "Regions: " in hires.parameters


def test_networks_of_flows(flow_path: Path) -> None:
    """FLUX.1 dev has its guidance distilled into it: its regions need no negative prompt."""
    pipe = ldm_lite.load(flow_path, device="cpu")
    skips = pipe.family.skip_layers is not None
    side: dict[str, Any] = {"height": 64, "width": 64, "steps": 2} | ({"skip_layer_scale": 0.0} if skips else {})
    [alone] = pipe.txt2img("a cat", output="result", **side)
    [result] = pipe.txt2img("a cat AND a cat", regions="0,0,0.5,1; 0.5,0,1,1", output="result", **side)
    torch.testing.assert_close(result.pixels, alone.pixels, atol=2e-3, rtol=0)


def test_a_picture_is_made_again_from_its_text(pipe: Pipeline, tmp_path: Path) -> None:
    [result] = pipe.txt2img("a cat AND a dog", regions="0,0,0.5,1; 0.5,0,1,1", output="result", **SMALL)
    path = texts.save(tmp_path / "made.png", result.parameters, result.image)
    [again] = pipe.txt2img(from_png=path, output="result")
    assert np.array_equal(again.array, result.array)


def test_a_second_pass_has_prompts_of_its_own(pipe: Pipeline) -> None:
    halves = {"regions": "0,0,0.5,1; 0.5,0,1,1", "hires": 2.0, "hires_steps": 2, "output": "tensor", **SMALL}
    [same] = pipe.txt2img("a cat AND a dog", **halves)
    [again] = pipe.txt2img("a cat AND a dog", hires_prompt="a cat AND a dog", **halves)
    [another] = pipe.txt2img("a cat AND a dog", hires_prompt="a house AND a tree", **halves)
    assert np.array_equal(same, again)
    assert not np.allclose(same, another, atol=1e-3)


@pytest.mark.parametrize(
    ("prompt", "regions", "message"),
    [
        ("a AND b", "0,0,0.5,1", "got 1 `regions`, but the prompt has 2 parts: give one for each"),
        ("a", "all; all", "got 2 `regions`, but the prompt has 1 part: give"),
        ("a AND b", "0,0,0.5,1; 0.6,0,1,1", "leave part of the image out"),
        ("a", "0,0,0.5,1", "leave part of the image out"),
        ("a AND b", "all; 0.9,0,0.91,1", "holds none of 8 x 4 positions"),
        ("a AND b :-1", "all; all", "expected more than 0"),
        ("a AND b", "all; 0.5,0,0.4,1", "got a region '0.5,0,0.4,1'"),
        ("a AND b", "all; 0,0,nan,1", "got a region"),
        ("a AND b", "all;", "got a region ''"),
        ("a AND b", "all; 0,0,1", "got a region '0,0,1'"),
    ],
)
def test_wrong_regions_are_one_line(pipe: Pipeline, prompt: str, regions: str, message: str) -> None:
    with pytest.raises(ValueError, match=r"region|weight") as caught:
        pipe.txt2img(prompt, regions=regions, **SMALL)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_shares_add_up_for_any_box_and_size() -> None:
    """Boxes that meet share no position and leave none out, whatever the size."""
    for width in (1, 2, 3, 7, 64):
        for edge in ("0.3", "0.5", "0.701"):
            boxes = read_regions(f"0,0,{edge},1; {edge},0,1,1; all")
            try:
                fractions = shares(boxes, (1.0, 1.0, 1.0), (2, width))
            except ValueError:
                assert width < 4  # no position in one of them
                continue
            assert torch.allclose(fractions.sum(dim=0), torch.ones(1, 2, width))
            assert set(fractions.flatten().tolist()) == {0.0, 0.5}


def test_one_part_needs_no_negative_prompt(pipe: Pipeline, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "ldm_lite"):
        [result] = pipe.txt2img("a cat", regions="all", scale=1.0, output="result", **SMALL)
    assert torch.isfinite(result.pixels).all()
    assert not caplog.records
