"""The Python API: what goes in and comes out, its parts, and errors in Python's terms."""

import math
import re
import subprocess
import sys
from collections.abc import Callable
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
from ldm_lite import Pipeline
from ldm_lite.diffusion.guidance import Conditioning


@pytest.fixture(scope="module")
def pipe(small_path: Path) -> Pipeline:
    return ldm_lite.load(small_path, device=torch.device("cpu"), dtype=torch.float32)


def pixels(pipe: Pipeline, *args: object, **options: object) -> list[torch.Tensor]:
    return pipe.txt2img(*args, steps=2, output="tensor", **options)  # type: ignore[arg-type]


def denoised(pipe: Pipeline, noise: torch.Tensor) -> torch.Tensor:
    return pipe.denoise(noise, pipe.encode_prompt("a"), None, pipe.plan("ddim", 1))


def test_prompts_and_seeds_in_lists_are_single_runs(pipe: Pipeline) -> None:
    """In any batch, bit for bit where shapes are alike: batches of one."""
    both = pixels(pipe, ["a cat", "a dog in a house"], seed=[3, 9])
    assert torch.equal(both[0], pixels(pipe, "a cat", seed=3)[0])
    assert torch.equal(both[1], pixels(pipe, "a dog in a house", seed=9)[0])
    together = pixels(pipe, ["a cat", "a dog in a house"], seed=[3, 9], batch_size=2)
    for single, batched in zip(both, together, strict=True):
        torch.testing.assert_close(single, batched, rtol=1e-4, atol=1e-4)


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
    images = [pipe.img2img("a cat", kind, steps=2, output="tensor")[0] for kind in kinds]
    assert all(torch.equal(image, images[0]) for image in images)
    many = pipe.img2img("a cat", [array, array[:, ::-1]], steps=2, output="tensor", seed=[42, 42])
    assert torch.equal(many[0], images[0])
    assert not torch.equal(many[1], images[0])
    mask = np.zeros(array.shape[:2], np.uint8)
    mask[:32] = 255
    painted = [
        pipe.inpaint("a cat", array, kind, steps=2, output="tensor")[0] for kind in (mask, Image.fromarray(mask))
    ]
    assert torch.equal(*painted)


def test_the_parts_make_what_txt2img_makes(pipe: Pipeline) -> None:
    cond, uncond, plan = pipe.encode_prompt("a cat"), pipe.encode_prompt(""), pipe.plan("ddim", 2)
    noise = pipe.noise(seed=[5, 6], height=64, width=64)
    latents = pipe.denoise(noise, cond, uncond, plan, scale=pipe.family.scale)
    assert torch.equal(latents, pipe.denoise(noise, cond, uncond, plan)), "which is the default"
    by_parts = pipe.decode(latents, output="tensor")
    whole = pixels(pipe, "a cat", negative_prompt="", seed=5, batch_size=2)
    pixels_of_image = pixels(pipe, cond=cond.context.expand(2, -1, -1), uncond=uncond, noise=noise, batch_size=2)
    for parts, from_text, from_tensors in zip(by_parts, whole, pixels_of_image, strict=True):
        torch.testing.assert_close(parts, from_text, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(from_text, from_tensors, rtol=1e-4, atol=1e-4)


def test_an_image_of_given_noise_has_no_seed_in_its_text(pipe: Pipeline) -> None:
    cond, noise = pipe.encode_prompt("a cat"), pipe.noise(seed=5, height=64, width=64)
    for inputs, has_seed in (({"cond": cond, "noise": noise}, False), ({"cond": cond}, True)):
        [result] = pipe.txt2img(height=64, width=64, steps=1, output="result", **inputs)
        assert ("Seed: " in result.parameters) == has_seed


def test_ready_conditioning_of_sdxl_keeps_its_vector(tmp_path: Path) -> None:
    path = tmp_path / "sdxl.safetensors"
    random_checkpoint.write(path, random_checkpoint.small("sdxl_base"))
    pipe = ldm_lite.load(path, device="cpu")
    side = pipe.family.resolution
    cond, uncond = (pipe.encode_prompt(text, negative=text == "", size=(side, side)) for text in ("a cat", ""))
    assert cond.y is not None
    pixels_of_image = pixels(pipe, cond=cond, uncond=uncond)
    assert torch.equal(pixels_of_image[0], pixels(pipe, "a cat", negative_prompt="")[0])
    shifted = Conditioning(cond.context, cond.y + 1)
    assert not torch.equal(pixels_of_image[0], pixels(pipe, cond=shifted, uncond=uncond)[0])
    with pytest.raises(ValueError, match="y: got none, expected one of shape"):
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
    first = pixels(pipe, "a cat", control=[control])
    (tmp_path / "net.safetensors").unlink()
    again = pixels(pipe, "a cat", control=control)
    pixels_of_image = pixels(pipe, "a cat", control=[control.with_image(toy.photo()[::-1].copy())])
    assert torch.equal(first[0], again[0])
    assert not torch.equal(first[0], pixels_of_image[0])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"steps": 0}, "got `steps` 0, expected 1 to 1000"),
        ({"seed": [1, 2]}, "got 2 seeds for 1 images, expected one, or one for each"),
        ({"sampler": "nothing"}, "unknown sampler 'nothing'"),
        ({"output": "jpeg"}, "got `output` 'jpeg', expected one of pil, numpy, tensor, result"),
        ({"noise": torch.zeros(1, 4, 9, 9)}, r"got `noise` of shape \(1, 4, 9, 9\), expected \(1, 4, 8, 8\)"),
        ({"refiner_start": 0.5}, "`refiner_start` needs a refiner: give one with `refiner=FILE`"),
        ({"original_size": (64, 64)}, "does not use: leave out `original_size`"),
        ({"prompt": []}, "got an empty list of prompts"),
        ({"control": ["a:b:c"]}, "got control 'a:b:c'"),
        ({"prompt_syntax": "A1111"}, "got `prompt_syntax` 'A1111': use a1111"),
        ({"sampler": ""}, "got `sampler` '', an empty text: give a value, or leave it out"),
        ({"refiner": ""}, "got `refiner` '', an empty text"),
        ({"guidance": math.nan}, "got `guidance` nan, expected a finite number or a function"),
        ({"guidance": 10**400}, "got `guidance` 1.*, expected a finite number or a function"),
        ({"cond": torch.tensor(2.0)}, r"got conditioning of shape \(\), expected one row for each prompt"),
        ({"height": 2**16, "width": 2**16}, "got `height=65536` and `width=65536`, expected at most 67108864 pixels"),
    ],
)
def test_errors_name_the_argument_in_python_s_terms(pipe: Pipeline, options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message) as error:
        pipe.txt2img(**{"prompt": "a cat", **options})  # type: ignore[arg-type]
    assert not re.search(r"(^|\s)--\w", str(error.value))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"steps": "2"}, "got `steps` '2', expected a whole number"),
        ({"steps": 2.5}, "got `steps` 2.5, expected a whole number"),
        ({"seed": None}, "got `seed` None, expected a whole number or a list of them"),
        ({"seed": [1.5]}, "got `seed` 1.5, expected a whole number"),
        ({"scale": "7"}, "got `scale` '7', expected a number"),
        ({"compat": "no"}, "got `compat` 'no', expected True or False"),
        ({"prompt": 5}, "got `prompt` 5, expected a text or a list of them"),
        ({"prompt": ["a", None]}, "got `prompt` None, expected a text"),
        ({"negative_prompt": ["a", 5]}, "got `negative_prompt` 5, expected a text"),
        ({"sampler": 3}, "got `sampler` 3, expected a text"),
        ({"control": 5}, "got int as `control`, expected a Control or FILE:IMAGE"),
        ({"plan": 5}, "got int as `plan`, expected a Plan"),
        ({"noise": np.zeros((1, 4, 8, 8))}, "got ndarray as `noise`, expected a tensor"),
        ({"cond": "a cat"}, "got str as conditioning, expected what encode_prompt makes, or a tensor"),
        ({"guidance": "7"}, "got `guidance` '7', expected a number or a function"),
        ({"guidance": [7, 8]}, r"got `guidance` \[7, 8\], expected a number or a function"),
        ({"guidance": torch.ones(2)}, "got `guidance` tensor.*, expected a number or a function"),
        ({"compat": torch.ones(2)}, "got `compat` tensor.*, expected True or False"),
        ({"compat": np.array([])}, "got `compat` array.*, expected True or False"),
        ({"sampler": print}, "got `sampler` <built-in function print>, expected a text"),
        ({"regions": print}, "got `regions` <built-in function print>, expected a text"),
        ({"refiner": 5}, "got 5 as a checkpoint, expected a path"),
        ({"from_png": 5}, "got 5 as a file, expected its path"),
    ],
)
def test_values_of_another_type_are_a_type_error(pipe: Pipeline, options: dict[str, object], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        pipe.txt2img(**{"prompt": "a cat", **options})  # type: ignore[arg-type]


def test_numbers_of_numpy_and_torch_are_python_s(pipe: Pipeline) -> None:
    image = pixels(pipe, "a cat", seed=3)[0]
    for seed in (np.int64(3), torch.tensor(3), np.array([3]), range(3, 4)):
        assert torch.equal(pixels(pipe, (text for text in ["a cat"]), seed=seed)[0], image)
        assert torch.equal(pipe.noise(seed, 64, 64), pipe.noise([3], 64, 64))
    assert pipe.encode_prompt(text for text in ["a cat", "a dog"]).context.shape[0] == 2  # type: ignore[arg-type, union-attr]


def test_sizes_come_as_numbers_and_are_checked(pipe: Pipeline, tmp_path: Path) -> None:
    random_checkpoint.write(tmp_path / "sdxl.safetensors", random_checkpoint.small("sdxl_base"))
    sdxl = ldm_lite.load(tmp_path / "sdxl.safetensors", device="cpu")
    [result] = sdxl.txt2img("a cat", original_size=[64, 32], steps=1, output="result")
    assert "Original size: 64x32" in result.parameters
    for wrong in (3, (0, 64), (1, 2, 3)):
        with pytest.raises(ValueError, match=r"got `original_size` .*, expected HxW"):
            pipe.txt2img("a cat", original_size=wrong)


@pytest.mark.parametrize("wrong", [lambda c, u: 3.0, lambda c, u: c[:, :1], lambda c, u: None])
def test_a_guidance_function_must_keep_the_shape(pipe: Pipeline, wrong: object) -> None:
    with pytest.raises(ValueError, match=r"from the `guidance` function, expected \(1, 4, 8, 8\)"):
        pixels(pipe, "a cat", guidance=wrong)


def test_a_guidance_schedule_may_have_more_arguments_by_default(pipe: Pipeline) -> None:
    late = pixels(pipe, "a cat", guidance=lambda step, scale=3.0: scale)
    assert torch.equal(late[0], pixels(pipe, "a cat", guidance=3.0)[0])
    cond = pipe.encode_prompt("a cat")
    with pytest.raises(ValueError, match="got a `guidance` function, but no conditioning of the negative prompt"):
        pipe.denoise(pipe.noise(), cond, None, pipe.plan("ddim", 1), guidance=lambda cond, uncond: cond)
    with pytest.raises(ValueError, match="got `guidance` and `scale`, which it replaces"):
        pipe.denoise(pipe.noise(), cond, cond, pipe.plan("ddim", 1), 2.0, guidance=lambda step: 2.0)
    with pytest.raises(TypeError, match="got a function as `scale`, which is a number: give it as `guidance`"):
        pipe.denoise(pipe.noise(), cond, cond, pipe.plan("ddim", 1), lambda step: 2.0)


def test_a_plan_of_another_network_or_beside_a_sampler_is_refused(
    pipe: Pipeline, predicting: Callable[..., Pipeline]
) -> None:
    assert pipe.family.prediction == "eps"
    plan = predicting("v").plan("ddim", 2)
    with pytest.raises(ValueError, match=r"this plan is for another network: .* predicts eps"):
        pipe.txt2img("a cat", plan=plan)
    with pytest.raises(ValueError, match="got `plan` and `steps`, which it replaces"):
        pipe.txt2img("a cat", plan=pipe.plan("ddim", 2), steps=3)


def test_parts_that_do_not_fit_are_errors_of_one_line(pipe: Pipeline) -> None:
    cond, uncond, plan = pipe.encode_prompt(["a cat", "a dog"]), pipe.encode_prompt(""), pipe.plan("euler_a", 2)
    noise = pipe.noise([1, 2, 3])
    with pytest.raises(ValueError, match=r"got conditioning of shape \(2, .* for 3 images, expected 1 or 3"):
        pipe.denoise(noise, cond, uncond, plan)
    with pytest.raises(ValueError, match=r"got noise of shape .* from `draw`, expected"):
        pipe.denoise(noise[:2], cond, uncond, plan, draw=lambda: noise)
    with pytest.raises(ValueError, match="got images of 64x64 and 64x32 pixels, expected one or more of one size"):
        pipe.encode([toy.photo(), toy.photo()[:32]])
    with pytest.raises(ValueError, match="no prompt: give a text"):
        pipe.encode_prompt([])
    with pytest.raises(ValueError, match="does not use: leave out `original_size`"):
        pipe.encode_prompt("a cat", original_size=(64, 64))
    with pytest.raises(TypeError, match="got attention 3, expected a name or a function"):
        pipe.use_attention(3)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda pipe: denoised(pipe, pipe.noise()[0]), r"got noise of shape \(4, 8, 8\), expected \(B, 4, h, w\)"),
        (lambda pipe: denoised(pipe, pipe.noise()[:0]), r"got noise of shape \(0, 4, 8, 8\), expected"),
        (lambda pipe: pipe.decode(pipe.noise()[0]), r"got latents of shape \(4, 8, 8\), expected \(B, 4, h, w\)"),
        (lambda pipe: pipe.decode(pipe.noise()[..., :0]), r"got latents of shape \(1, 4, 8, 0\), expected"),
        (lambda pipe: pipe.decode(pipe.noise().numpy()), "got ndarray as latents, expected a tensor"),
        (lambda pipe: pipe.decode(None), "got NoneType as latents, expected a tensor"),
        (lambda pipe: pipe.noise(1, 10**6, 10**6), "got `height` 1000000, expected 1 to 65536"),
        (lambda pipe: pipe.noise(1, 2**16, 2**16), "expected at most 67108864 pixels in all"),
        (lambda pipe: pipe.noise(1, 64.0, 64), "got `height` 64.0, expected a whole number"),
        (lambda pipe: pipe.plan("ddim", "5"), "got `steps` '5', expected a whole number"),
        (lambda pipe: pipe.plan(5, 5), "got `sampler` 5, expected a text"),
        (lambda pipe: pipe.plan("ddim", 5, spacing=5), "got `spacing` 5, expected a text"),
        (lambda pipe: pipe.plan("ddim", 5, eta="1"), "got `eta` '1', expected a number"),
        (lambda pipe: pipe.plan("ddim", 5, last=1.5), "got last 1.5, expected a whole number"),
        (lambda pipe: pipe.encode_prompt("a", clip_skip="1"), "got `clip_skip` '1', expected a whole number"),
        (lambda pipe: pipe.encode_prompt("a", size="64"), r"got `size` '64', expected \(height, width\) in pixels"),
        (
            lambda pipe: pipe.encode_prompt("a", sintax="a1111"),
            "has no argument 'sintax': it takes negative, size",
        ),
        (lambda pipe: pipe.img2img("a", ""), "got `init_img` '', an empty text"),
        (lambda pipe: pipe.img2img("a", "a\0b"), "is not a valid file name"),
        (lambda pipe: ldm_lite.load(5), "got 5 as a checkpoint, expected a path"),
        (lambda pipe: ldm_lite.load(vae=""), "got `vae` '', an empty text"),
    ],
)
def test_a_wrong_argument_of_a_part_is_named(pipe: Pipeline, call: Callable[[Pipeline], object], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        call(pipe)


def test_a_stream_of_wrong_options_fails_at_once(pipe: Pipeline) -> None:
    with pytest.raises(ValueError, match="got `steps` 0"):
        pipe.stream("a cat", steps=0)


def test_a_control_says_all_of_itself() -> None:
    control = ldm_lite.Control("net", toy.photo(), weight=0.8, end=0.7, guess=True)
    assert str(control) == "net:image:0.8:0-0.7:guess"
    for wrong in ({"weight": float("nan")}, {"start": "0"}, {"preprocess": "canny:.:."}):
        with pytest.raises(ValueError, match="got `"):
            ldm_lite.Control("net", "image", **wrong)  # type: ignore[arg-type]


def test_options_are_checked_before_the_refiner_is_loaded(pipe: Pipeline) -> None:
    with pytest.raises(ValueError, match="no prompt: give one"):
        pipe.txt2img(refiner="no-such-file")


def test_an_argument_is_not_given_twice(pipe: Pipeline) -> None:
    with pytest.raises(TypeError, match=r"img2img\(\) got 'image' and 'init_img', which are the same"):
        pipe.img2img("a cat", toy.photo(), init_img=toy.photo())
    with pytest.raises(TypeError, match=r"img2img\(\) got 'image' and 'input', which are the same"):
        pipe.img2img("a cat", toy.photo(), input=toy.photo())  # type: ignore[call-arg]


def test_the_first_argument_of_load_has_other_names(small_path: Path) -> None:
    assert ldm_lite.load(ckpt=small_path, device="cpu").name == small_path.stem  # type: ignore[call-arg]
    with pytest.raises(TypeError, match=r"load\(\) got 'source' and 'ckpt', which are the same"):
        ldm_lite.load(small_path, ckpt=small_path, device="cpu")  # type: ignore[call-arg]


def test_load_refuses_what_it_cannot_use(small_path: Path) -> None:
    for options in ({"dtype": 16}, {"lora": [("a", 0.5)]}, {"attention": 3}, {"zero_snr": "no"}):
        with pytest.raises(TypeError, match="got `"):
            ldm_lite.load(small_path, device="cpu", **options)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="got `matmul_precision` 'low', expected one of highest, high, medium"):
        ldm_lite.load(small_path, device="cpu", matmul_precision="low")  # type: ignore[arg-type]
    with pytest.raises(FileNotFoundError, match="none"):
        ldm_lite.load(small_path, device="cpu", lora=Path("none.safetensors"))


def test_an_unknown_argument_is_named_with_the_nearest(pipe: Pipeline) -> None:
    with pytest.raises(TypeError, match=r"txt2img\(\) has no argument 'stepps': did you mean `steps`\?"):
        pipe.txt2img("a cat", stepps=3)
    with pytest.raises(TypeError, match=r"load\(\) has no argument 'ofload': did you mean `offload`\?"):
        ldm_lite.load(ofload="model")
    with pytest.raises(ValueError, match="as an image, expected a path, PIL, an array"):
        pipe.img2img("a cat", 3.5)


def test_samplers_are_registered_after_a_plain_import() -> None:
    code = "import ldm_lite, sys; print('torch' in sys.modules); ldm_lite.diffusion.samplers.register"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout.strip() == "False"


def test_load_takes_metadata_and_paths_as_python_has_them(small_path: Path) -> None:
    pipe = ldm_lite.load(small_path, device="cpu", vae=small_path, metadata={"prediction": "v"})
    assert pipe.family.prediction == "v"
    assert isinstance(pipe, Pipeline)
