"""Chroma1 in miniature: what it alone has, beside test_shared.py."""

from pathlib import Path
from typing import Any

import pytest
import torch
import toy
import toy_chroma
from toy_families import load, warnings_in
from toy_flow import save, under, weights

from ldm_lite import Pipeline

TOYS = toy_chroma


def test_padding_is_not_read_and_texts_of_one_length_need_no_mask(pipe: Pipeline) -> None:
    x, t, context, y = toy_chroma.inputs()
    out = pipe.unet(x, t, context, y)
    context[1, y[1] :] = 7.0
    assert torch.equal(pipe.unet(x, t, context, y), out)
    whole = pipe.unet(x, t, context, torch.tensor([[9], [9]]))
    for attention in ("vanilla", "sdpa"):
        pipe.use_attention(attention)
        assert toy.relative_error(pipe.unet(x, t, context, y, full=torch.ones(2)), whole.numpy()) < 1e-5


# ---- text -----------------------------------------------------------------------------------------------------------


def test_a_text_ends_with_one_padding(pipe: Pipeline) -> None:
    text = pipe.encode_prompt([*toy_chroma.PROMPTS, ""])
    assert text.y is not None
    assert text.y.tolist() == [[15], [9], [2]]  # tokens, the end, and one padding


# ---- files ----------------------------------------------------------------------------------------------------------


def test_a_network_with_comfyuis_names(files: dict[str, Any], folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    values = weights(toy_chroma.small())["unet"]
    renamed = {key.replace(".scale", ".weight"): value for key, value in values.items()}
    loaded = load(files, ckpt=save(folder / "renamed.safetensors", under("model.diffusion_model.", renamed)))
    assert warnings_in(caplog) == []
    assert (loaded.family.conditioner, loaded.family.steps, loaded.family.scale) == ("chroma", 40, 3.0)
    assert all(torch.equal(value, values[key]) for key, value in loaded.unet.state_dict().items())


def test_flash_is_told_by_its_name_and_the_metadata(
    files: dict[str, Any], folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    unet = save(folder / "Chroma1-HD-Flash.safetensors", weights(toy_chroma.small())["unet"])
    flash = load(files, ckpt=unet).family
    assert (flash.steps, flash.scale, flash.sampler) == (8, 1.0, "heun")
    assert "by its name, as lodestones/Chroma1-Flash: 8 steps of heun at scale 1" in caplog.text
    caplog.clear()
    flash = load(files, ckpt=unet, metadata={"family": "chroma_flash"}).family
    assert (flash.steps, flash.scale, flash.sampler) == (8, 1.0, "heun")
    assert warnings_in(caplog) == []


def test_what_does_not_belong_to_it_is_refused(files: dict[str, Any], folder: Path, pipe: Pipeline) -> None:
    with pytest.raises(ValueError, match="has no CLIP"):
        pipe.txt2img("a", clip_skip=2)
    radiance = save(
        folder / "r.safetensors",
        {"distilled_guidance_layer.in_proj.weight": torch.ones(1), "nerf_blocks.0.a": torch.ones(1)},
    )
    with pytest.raises(ValueError, match="is Chroma1-Radiance"):
        load(files, ckpt=radiance)
