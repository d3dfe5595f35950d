"""The Python API: what goes in and comes out, its parts, and errors in Python's terms."""

import re
import subprocess
import sys
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import random_checkpoint
import torch
import toy
from PIL import Image
from safetensors.torch import save_file

import ldm_lite
from ldm_lite.control import loading
from ldm_lite.diffusion.guidance import Conditioning
from ldm_lite.pipeline import Pipeline


@pytest.fixture(scope="module")
def pipe(small_path: Path) -> Pipeline:
    return ldm_lite.load(small_path, device=torch.device("cpu"), dtype=torch.float32)


def pixels(pipe: Pipeline, *args: object, **options: object) -> list[torch.Tensor]:
    return pipe.txt2img(*args, steps=2, output="tensor", **options)  # type: ignore[arg-type]


def test_prompts_and_seeds_in_lists_are_single_runs(pipe: Pipeline) -> None:
    """In any batch, bit for bit where shapes are alike: batches of one."""
    both = pixels(pipe, ["a cat", "a dog in a house"], seed=[3, 9])
    assert torch.equal(both[0], pixels(pipe, "a cat", seed=3)[0])
    assert torch.equal(both[1], pixels(pipe, "a dog in a house", seed=9)[0])
    together = pixels(pipe, ["a cat", "a dog in a house"], seed=[3, 9], batch_size=2)
    for one, other in zip(both, together, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


def test_images_come_out_in_four_kinds(pipe: Pipeline) -> None:
    [tensor], [array], [image], [result] = (
        pipe.txt2img("a cat", steps=2, output=kind) for kind in ("tensor", "numpy", "pil", "result")
    )
    assert tensor.shape == (3, 64, 64)
    assert np.array_equal(array, np.asarray(image))
    assert np.array_equal(array, result.array)
    assert image.info["parameters"] == result.parameters
    assert "Seed: 42" in result.parameters


def test_images_go_in_as_path_pil_numpy_and_tensor(pipe: Pipeline, tmp_path: Path) -> None:
    array = toy.photo()
    Image.fromarray(array).save(tmp_path / "photo.png")
    tensor = torch.from_numpy(array.copy()).permute(2, 0, 1) / 127.5 - 1
    kinds = [tmp_path / "photo.png", Image.fromarray(array), array, array / 255.0, tensor, tensor[None]]
    made = [pipe.img2img("a cat", kind, steps=2, output="tensor")[0] for kind in kinds]
    assert all(torch.equal(each, made[0]) for each in made)
    many = pipe.img2img("a cat", [array, array[:, ::-1]], steps=2, output="tensor", seed=[42, 42])
    assert torch.equal(many[0], made[0])
    assert not torch.equal(many[1], made[0])
    mask = np.zeros(array.shape[:2], np.uint8)
    mask[:32] = 255
    painted = [
        pipe.inpaint("a cat", array, kind, steps=2, output="tensor")[0] for kind in (mask, Image.fromarray(mask))
    ]
    assert torch.equal(*painted)


def test_the_parts_make_what_txt2img_makes(pipe: Pipeline) -> None:
    cond, uncond, plan = pipe.encode_prompt("a cat"), pipe.encode_prompt(""), pipe.plan("ddim", 2)
    noise = pipe.noise(seed=[5, 6], height=64, width=64)
    latents = pipe.denoise(noise, cond, uncond, plan, guidance=pipe.family.scale)
    by_parts = pipe.decode(latents, output="tensor")
    whole = pixels(pipe, "a cat", negative_prompt="", seed=5, batch_size=2)
    given = pixels(pipe, cond=Conditioning(cond.context.expand(2, -1, -1)), uncond=uncond, noise=noise, batch_size=2)
    for parts, one, other in zip(by_parts, whole, given, strict=True):
        torch.testing.assert_close(parts, one, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


def test_ready_conditioning_of_sdxl_keeps_its_vector(tmp_path: Path) -> None:
    path = tmp_path / "sdxl.safetensors"
    random_checkpoint.write(path, random_checkpoint.small("sdxl_base"))
    pipe = ldm_lite.load(path, device="cpu")
    side = pipe.family.resolution
    cond, uncond = (pipe.encode_prompt(text, negative=text == "", size=(side, side)) for text in ("a cat", ""))
    assert cond.y is not None
    given = pixels(pipe, cond=cond, uncond=uncond)
    assert torch.equal(given[0], pixels(pipe, "a cat", negative_prompt="")[0])
    other = cond._replace(y=cond.y + 1)
    assert not torch.equal(given[0], pixels(pipe, cond=other, uncond=uncond)[0])
    with pytest.raises(ValueError, match="y: got none, wanted one of shape"):
        pixels(pipe, cond=cond.context, uncond=uncond.context)


def test_leaving_the_stream_stops_it(pipe: Pipeline) -> None:
    with mock.patch.object(type(pipe.unet), "forward", autospec=True, side_effect=type(pipe.unet).forward) as forward:
        for state in pipe.stream("a cat", steps=10):
            assert state.latents.shape == state.x0.shape
            if state.step == 3:
                break
    assert forward.call_count == 3


def test_a_guidance_function_sees_the_raw_outputs(pipe: Pipeline) -> None:
    seen = []

    def alone(cond: torch.Tensor, uncond: torch.Tensor) -> torch.Tensor:
        seen.append((cond.shape, uncond.shape))
        return cond

    assert torch.equal(pixels(pipe, "a cat", guidance=alone)[0], pixels(pipe, "a cat", guidance=alone)[0])
    assert seen[0] == ((1, 4, 8, 8), (1, 4, 8, 8))
    torch.testing.assert_close(
        pixels(pipe, "a cat", guidance=alone)[0], pixels(pipe, "a cat", scale=1)[0], rtol=1e-3, atol=1e-3
    )
    assert "CFG scale: a function" in pipe.txt2img("a cat", steps=1, guidance=alone, output="result")[0].parameters


def test_a_control_is_loaded_once_and_used_often(pipe: Pipeline, tmp_path: Path) -> None:
    save_file(toy.control(pipe.unet.spec), tmp_path / "net.safetensors")
    control = ldm_lite.Control(tmp_path / "net.safetensors", toy.photo(), weight=0.8, end=0.7)
    with mock.patch.object(loading, "open_source", side_effect=loading.open_source) as opened:
        first = pixels(pipe, "a cat", control=[control])
        again = pixels(pipe, "a cat", control=control)
        other = pixels(pipe, "a cat", control=[control.with_image(toy.photo()[::-1].copy())])
    assert opened.call_count == 1
    assert torch.equal(first[0], again[0])
    assert not torch.equal(first[0], other[0])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"steps": 0}, "got `steps` 0, wanted 1 to 1000"),
        ({"seed": [1, 2]}, "got 2 seeds for 1 images, wanted one, or one for each"),
        ({"sampler": "nothing"}, "unknown sampler 'nothing'"),
        ({"output": "jpeg"}, "got `output` 'jpeg', wanted one of pil, numpy, tensor, result"),
        ({"noise": torch.zeros(1, 4, 9, 9)}, r"got `noise` of shape \(1, 4, 9, 9\), wanted \(1, 4, 8, 8\)"),
        ({"refiner_start": 0.5}, "`refiner_start` needs a refiner: give one with `refiner=FILE`"),
        ({"original_size": (64, 64)}, "does not use: leave out `original_size`"),
        ({"prompt": []}, "got an empty list of prompts"),
        ({"control": ["a:b:c"]}, "got control 'a:b:c'"),
    ],
)
def test_errors_name_the_argument_in_python_s_terms(pipe: Pipeline, options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message) as error:
        pipe.txt2img(**{"prompt": "a cat", **options})  # type: ignore[arg-type]
    assert not re.search(r"(^|\s)--\w", str(error.value))


def test_an_unknown_argument_is_named_with_the_nearest(pipe: Pipeline) -> None:
    with pytest.raises(TypeError, match=r"txt2img\(\) has no argument 'stepps': did you mean steps\?"):
        pipe.txt2img("a cat", stepps=3)
    with pytest.raises(TypeError, match=r"load\(\) has no argument 'ofload': did you mean offload\?"):
        ldm_lite.load(ofload="model")
    with pytest.raises(ValueError, match="as an image, wanted a path, PIL, an array"):
        pipe.img2img("a cat", 3.5)


def test_samplers_are_registered_after_a_plain_import() -> None:
    code = "import ldm_lite, sys; ldm_lite.diffusion.samplers.register; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout.strip() == "False"


def test_load_takes_metadata_and_paths_as_python_has_them(small_path: Path) -> None:
    pipe = ldm_lite.load(small_path, device="cpu", vae=small_path, metadata={"prediction": "v"})
    assert pipe.family.prediction == "v"
    assert isinstance(pipe, Pipeline)
