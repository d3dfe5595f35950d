"""Image to image: noise levels, which steps run, sizes, seeds, instructions, and messages."""

import os
from pathlib import Path

import numpy as np
import pytest
import random_checkpoint
import torch
import toy
from PIL import Image
from runs import SAMPLERS, decoded_latents, unet_calls

from ldm_lite import Pipeline
from ldm_lite import img2img as command

APPLE = "a red apple on a blue background"
GOLDEN = np.load(Path(__file__).parent / "data" / "pictures.npz")


@pytest.fixture(scope="module")
def circle() -> Image.Image:
    """A drawn red circle on blue, 128 x 128."""
    y, x = np.mgrid[:128, :128]
    inside = (x - 63.5) ** 2 + (y - 63.5) ** 2 < 36**2
    return Image.fromarray(np.where(inside[:, :, None], [220, 30, 30], [70, 120, 220]).astype(np.uint8))


# ---- against other implementations ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", toy.PICTURE_RUNS)
@pytest.mark.thin(3)
def test_the_last_latents_are_the_other_implementation_s(picture_pipes: dict[str, Pipeline], name: str) -> None:
    """diffusers' pipelines, and the original's samplers for --compat."""
    run, (context, uncond) = toy.PICTURE_RUNS[name], toy.embeddings()
    settings = {"steps": run.steps, "scale": 5.0, "sampler": run.sampler, "spacing": run.spacing}
    settings |= {"strength": run.strength, "cond": context, "uncond": uncond}
    if run.spacing == "original":
        settings |= {"spacing": None, "compat": True, "cond": context.expand(2, -1, -1), "batch_size": 2}
    pipe, image = picture_pipes[run.task], Image.fromarray(toy.waves())
    with decoded_latents(pipe) as latents:
        if run.command == "img2img":
            pipe.img2img(None, image, **settings)
        elif extend := ",".join(f"{side}={pixels}" for side, pixels in run.extend):
            pipe.inpaint(None, image, extend=extend, **settings)
        else:
            pipe.inpaint(None, image, Image.fromarray(toy.mask()), **settings)
    assert toy.relative_error(torch.cat(latents).numpy(), GOLDEN[name]) < 5e-5


# ---- meaning --------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_drawn_circle_becomes_an_apple_where_it_was(bundled: Pipeline, circle: Image.Image) -> None:
    """At strength 0.6: red is where the circle was, blue around it; and it is no disc any more."""
    circled = np.asarray(circle)[:, :, 0] > 200
    y, x = np.mgrid[:128, :128]
    far = (x - 63.5) ** 2 + (y - 63.5) ** 2 > 58**2
    prompt = "a red apple on a blue background"
    options = {"strength": 0.6, "steps": 20, "sampler": "dpmpp_2m", "batch_size": 4, "output": "numpy"}
    for array in bundled.img2img(prompt, circle, **options):
        red = array.argmax(axis=2) == 0
        assert red[circled].mean() > 0.8
        assert red[far].mean() < 0.1
    disc = bundled.img2img(prompt, [circle], strength=0.0, output="numpy")[0]
    assert np.abs(array.astype(int) - disc)[circled].mean() > 8


# ---- strength -------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_strength_1_is_txt2img(bundled: Pipeline, circle: Image.Image) -> None:
    """The image is forgotten: only its size is left."""
    for sampler in ("ddim", "euler_a", "dpmpp_2m karras"):
        [ours] = bundled.img2img(APPLE, [circle], strength=1.0, steps=2, sampler=sampler, output="result")
        [plain] = bundled.txt2img(APPLE, steps=2, sampler=sampler, output="result")
        assert torch.equal(ours.pixels, plain.pixels)


def test_strength_0_is_the_round_trip(bundled: Pipeline, circle: Image.Image, caplog: pytest.LogCaptureFixture) -> None:
    with unet_calls(bundled) as calls, caplog.at_level("INFO"):
        [result] = bundled.img2img(APPLE, [circle], strength=0.0, output="result")
    assert not calls
    assert "strength 0: no UNet call" in caplog.text
    assert torch.allclose(result.pixels, bundled.decode(bundled.encode(circle), output="tensor")[0], atol=1e-3)
    assert "Steps: 0" in result.parameters


def test_adaptive_steps_need_more_than_the_last_one(bundled: Pipeline, circle: Image.Image) -> None:
    """It begins at the least noise, where they end."""
    with pytest.raises(ValueError, match="no range to solve in the last step alone: use more `steps` or `strength`"):
        bundled.img2img(APPLE, [circle], strength=0.3, steps=4, sampler="dpm_adaptive")


@pytest.mark.parametrize("sampler", [name for name in SAMPLERS if name != "dpm_adaptive"])  # takes as many as it wants
@pytest.mark.thin(4)
def test_the_first_call_sees_exactly_its_level_of_noise(
    bundled: Pipeline, circle: Image.Image, sampler: str, caplog: pytest.LogCaptureFixture
) -> None:
    """And as many calls are made as is said."""
    spacing = None if sampler == "lcm" else "karras"
    options = {"strength": 0.5, "steps": 6, "sampler": sampler, "spacing": spacing, "scale": 1.0, "output": "result"}
    with unet_calls(bundled) as calls, caplog.at_level("INFO"):
        [result] = bundled.img2img(APPLE, circle, **options)
    plan = bundled.plan(sampler, 6, spacing=spacing, last=3)
    assert len(calls) == len(plan.t)
    assert f"strength 0.5: the last 3 of 6 steps, {len(plan.t)} UNet calls" in caplog.text
    a, s = plan.level[0]
    noise = torch.randn(bundled.latent_shape(128, 128), generator=torch.Generator().manual_seed(42))
    assert calls[0].t[0].item() == pytest.approx(plan.t[0], rel=1e-6)
    assert torch.allclose(calls[0].x[0], a * bundled.encode(circle)[0] + s * noise, atol=2e-3)
    assert "Denoising strength: 0.5" in result.parameters


def test_how_many_steps_are_run(picture_pipes: dict[str, Pipeline]) -> None:
    """The last of so many in all."""
    pipe, image = picture_pipes["txt2img"], Image.new("RGB", (32, 32))
    for steps, strength, exact, whole, last in (
        (50, 0.75, False, 50, 37),
        (50, 0.58, False, 50, 29),  # 0.58 * 50 is 28.999999999999996
        (50, 0.001, False, 50, 1),
        (50, 1.0, False, 50, 50),
        (50, 1.0, True, 50, 50),
        (50, 0.3, True, 167, 50),
        (20, 0.05, True, 400, 20),
        (20, 0.33, True, 61, 20),
        (20, 0.9, True, 22, 20),
    ):
        options = {"steps": steps, "strength": strength, "exact_steps": exact, "sampler": "ddim", "scale": 1.0}
        with unet_calls(pipe) as calls:
            pipe.img2img("a", image, **options)
        assert [float(call.t[0]) for call in calls] == pipe.plan("ddim", whole, last=last).t.tolist()
    with pytest.raises(ValueError, match=r"50 exact steps at strength 0\.01, .* expected at most 1000: use at most 10"):
        pipe.img2img("a", image, steps=50, strength=0.01, exact_steps=True)


def test_exact_steps(bundled: Pipeline, circle: Image.Image) -> None:
    options = {"strength": 0.4, "steps": 6, "exact_steps": True, "scale": 1.0}
    with unet_calls(bundled) as calls:
        [result] = bundled.img2img(APPLE, circle, output="result", **options)
    assert len(calls) == 6
    assert calls[0].t[0] < 500
    assert "Steps: 6" in result.parameters


def test_compat_is_refused_where_the_original_fails(bundled: Pipeline, circle: Image.Image) -> None:
    with pytest.raises(ValueError, match="the original script fails at strength 1: use less"):
        bundled.img2img(APPLE, circle, steps=4, compat=True, strength=1.0)
    with pytest.raises(ValueError, match="`compat` knows the samplers of the original script, ddim, not plms"):
        bundled.img2img(APPLE, [circle], compat=True, sampler="plms")


def test_compat_has_the_original_s_counts_and_sizes(bundled: Pipeline, circle: Image.Image) -> None:
    """2 samples, scale 5, and sides rounded down to multiples of 32."""
    options = {"steps": 4, "strength": 0.0, "compat": True, "output": "result"}
    results = bundled.img2img(APPLE, circle.resize((70, 40)), **options)
    assert [result.image.size for result in results] == [(64, 32)] * 2
    assert "CFG scale: 5.0" in results[0].parameters


# ---- images, sizes, seeds -------------------------------------------------------------------------------------------


def test_every_image_has_its_seeds_in_any_batch(bundled: Pipeline, circle: Image.Image) -> None:
    pictures = [circle, circle.rotate(90).resize((40, 48))]
    options = {"steps": 4, "sampler": "euler_a", "strength": 0.6, "output": "result"}
    many = bundled.img2img(APPLE, pictures, batch_size=2, n_iter=2, seed=10, **options)
    assert [result.seed for result in many] == list(range(10, 18))
    for number, result in ((1, many[1]), (0, many[3]), (5, many[5])):
        [single] = bundled.img2img(APPLE, pictures[number // 4], seed=result.seed, **options)
        assert (single.pixels - result.pixels).abs().max() < 1e-3


@pytest.mark.parametrize("size", [(50, 37), (8, 8), (3, 5), (65, 64)])
def test_the_result_is_as_large_as_the_image(bundled: Pipeline, circle: Image.Image, size: tuple[int, int]) -> None:
    [result] = bundled.img2img(APPLE, [circle.resize(size)], steps=2, strength=0.5, output="result")
    assert result.image.size == size
    assert f"Size: {size[0]}x{size[1]}" in result.parameters


@pytest.mark.parametrize(
    ("options", "size"),
    [
        ({"height": 32, "width": 48}, (48, 32)),
        ({"height": 32, "width": 48, "resize": "fit"}, (32, 32)),
        ({"height": 32, "width": 48, "resize": "stretch"}, (48, 32)),
        ({"height": 40}, (40, 40)),
        ({"width": 41}, (41, 41)),
    ],
)
def test_requested_sizes(
    bundled: Pipeline, circle: Image.Image, options: dict, size: tuple[int, int], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    [result] = bundled.img2img(APPLE, [circle], strength=0.0, output="result", **options)
    assert result.image.size == size
    cut = len(options) == 2
    assert ("is cropped to the shape" in caplog.text) == cut


def test_a_large_image_is_reduced_with_a_message(
    bundled: Pipeline, circle: Image.Image, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO"):
        [result] = bundled.img2img(APPLE, [circle.resize((1000, 500))], strength=0.0, output="result")
    assert result.image.size == (256, 128)
    assert "is reduced from 1000 x 500 pixels to 256 x 128, twice the model's size" in caplog.text


def test_the_posterior_is_sampled_by_seed(bundled: Pipeline, circle: Image.Image) -> None:
    options = {"strength": 0.0, "sample_posterior": True, "output": "tensor"}
    first, two, again = (bundled.img2img(APPLE, circle, seed=seed, **options)[0] for seed in (1, 2, 1))
    assert torch.equal(first, again)
    assert not torch.equal(first, two)


# ---- instructions ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("scale", "image_scale", "branches"), [(7.5, 1.5, 3), (7.5, 1.0, 2), (1.0, 1.0, 1), (1.5, 1.5, 2), (1.0, 2.0, 3)]
)
def test_guidance_by_text_and_image(
    picture_pipes: dict[str, Pipeline], scale: float, image_scale: float, branches: int
) -> None:
    """Three branches, less those of no weight; the mixture is the paper's."""
    pipe, picture = picture_pipes["instruct"], Image.fromarray(toy.waves())
    options = {"steps": 1, "sampler": "ddim", "output": "result"}
    with unet_calls(pipe) as calls, decoded_latents(pipe) as latents:
        [result] = pipe.img2img("make it red", picture, scale=scale, image_scale=image_scale, **options)
        [full] = pipe.img2img("make it red", picture, **options)
    assert [len(call.x) for call in calls] == [branches, 3]
    assert f"Image CFG scale: {image_scale}" in result.parameters
    assert "Image CFG scale: 1.5" in full.parameters
    neither, seen, both = calls[1].out.unbind()
    out = neither + image_scale * (seen - neither) + scale * (both - seen)
    plan = pipe.plan("ddim", 1)
    noise = torch.randn(4, 8, 8, generator=torch.Generator().manual_seed(42))
    registers = torch.from_numpy(plan.mix[0, 0]).float()
    assert torch.allclose(latents[0][0], registers[0] * noise + registers[-2] * out, atol=1e-3)


def test_the_image_s_latents_are_unscaled_and_absent_in_one_branch(picture_pipes: dict[str, Pipeline]) -> None:
    pipe, picture = picture_pipes["instruct"], Image.fromarray(toy.waves())
    with unet_calls(pipe) as calls:
        pipe.img2img("make it red", [picture], steps=1)
    mean = pipe.encode(picture) / pipe.family.scale_factor
    neither, seen, both = calls[0].x[:, 4:]
    assert torch.allclose(seen, mean[0], atol=1e-5)
    assert torch.equal(seen, both)
    assert not neither.any()


def test_the_size_is_that_of_the_original_script(picture_pipes: dict[str, Pipeline]) -> None:
    """By hand, from edit_cli.py: the short side is rounded up to a multiple of 64, the long one then down."""
    pipe = picture_pipes["instruct"]
    for size, resolution, wanted in (
        ((512, 512), 512, (512, 512)),
        ((1024, 768), 512, (512, 384)),
        ((1000, 600), 512, (512, 320)),
        ((600, 1000), 512, (320, 512)),
        ((1920, 1080), 512, (512, 320)),
        ((100, 90), 256, (256, 256)),
    ):
        [image] = pipe.img2img("make it red", Image.new("RGB", size), resolution=resolution, strength=0.0)
        assert image.size == wanted
    waves = Image.fromarray(toy.waves()).resize((90, 70))
    [image] = pipe.img2img("make it red", waves, steps=1, resolution=64)
    assert image.size == (64, 64)


# ---- what does not fit ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "no prompt: give one"),
        ({"prompt": "a", "strength": 1.1}, "got `strength` 1.1, expected 0 to 1"),
        ({"prompt": "a", "height": 0}, "got `height` 0, expected 1 to 65536"),
        ({"prompt": "a", "resolution": 32}, "got `resolution` 32, expected 64 to"),
        ({"prompt": "a", "resolution": 64, "width": 64}, "`resolution` sets both sides: leave out `height`"),
        ({"prompt": "a", "image_scale": 1.5}, "got `image_scale`, but .* is not InstructPix2Pix: leave it out"),
        ({"prompt": "a", "sampler": "x"}, "unknown sampler"),
    ],
)
def test_options_that_do_not_fit(bundled: Pipeline, circle: Image.Image, options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        bundled.img2img(options.pop("prompt", None), circle, **options)


def test_a_checkpoint_of_the_wrong_kind_names_the_right_command(
    bundled: Pipeline, picture_pipes: dict[str, Pipeline], circle: Image.Image
) -> None:
    with pytest.raises(ValueError, match=r"which img2img cannot use: run python -m ldm_lite\.inpaint"):
        picture_pipes["inpaint"].img2img("a", [circle])
    with pytest.raises(ValueError, match=r"which inpaint cannot use: run python -m ldm_lite\.img2img"):
        picture_pipes["instruct"].inpaint("a", [circle], [circle])
    for task, right in (("inpaint", "inpaint"), ("instruct", "img2img")):
        with pytest.raises(ValueError, match=rf"which txt2img cannot use: run python -m ldm_lite\.{right}"):
            picture_pipes[task].txt2img("a")


# ---- the command ----------------------------------------------------------------------------------------------------


def run(arguments: list[str], out: Path) -> int:
    return command.main([*arguments, "--out", os.fspath(out), "--device", "cpu"])


def test_the_original_s_command_line(tmp_path: Path, circle: Image.Image, capsys: pytest.CaptureFixture[str]) -> None:
    circle.save(tmp_path / "circle.png")
    values = "--strength 0.8 --ddim_steps 5 --n_samples 2 --n_iter 1 --scale 5.0 --seed 3"
    line = ["--init-img", os.fspath(tmp_path / "circle.png"), *values.split()]
    assert run(["--prompt", APPLE, *line, "--C", "16", "--f", "8", "--precision", "full"], tmp_path / "o") == 0
    names = sorted(path.relative_to(tmp_path / "o").as_posix() for path in (tmp_path / "o").rglob("*.png"))
    assert names == ["grid-0000.png", "samples/00000.png", "samples/00001.png"]
    with Image.open(tmp_path / "o" / "samples" / "00001.png") as image:
        assert "Seed: 4, Size: 128x128" in image.info["parameters"]
        assert "Denoising strength: 0.8, Init image: circle.png" in image.info["parameters"]
    assert "strength 0.8: the last 4 of 5 steps, 4 UNet calls" in capsys.readouterr().err


def test_folders_of_images_and_prompts(tmp_path: Path, circle: Image.Image) -> None:
    (tmp_path / "in").mkdir()
    for name, size in (("b.jpg", (40, 32)), ("a.png", (64, 64))):
        circle.resize(size).save(tmp_path / "in" / name)
    (tmp_path / "in" / "notes.txt").write_text("no picture")
    (tmp_path / "prompts.txt").write_text("a red apple\nrocket\n")
    arguments = ["--init-img", os.fspath(tmp_path / "in"), "--from-file", os.fspath(tmp_path / "prompts.txt")]
    assert run([*arguments, "--steps", "2"], tmp_path / "out") == 0
    seen = []
    for path in sorted((tmp_path / "out").rglob("*.png")):
        with Image.open(path) as image:
            seen.append((image.info["parameters"].splitlines()[0], image.size))
    assert seen == [("a red apple", (64, 64)), ("rocket", (64, 64)), ("a red apple", (40, 32)), ("rocket", (40, 32))]


def test_edit_cli_s_command_line(tmp_path: Path, circle: Image.Image, capsys: pytest.CaptureFixture[str]) -> None:
    circle.save(tmp_path / "circle.png")
    random_checkpoint.write(tmp_path / "small.safetensors", toy.PICTURE_FAMILIES["instruct"])
    files = ["--input", os.fspath(tmp_path / "circle.png"), "--output", os.fspath(tmp_path / "out.png")]
    values = "--cfg-text 7 --cfg-image 1.2 --steps 2 --device cpu"
    arguments = [*files, *values.split(), "--edit", "make it blue"]
    assert command.main([*arguments, "--ckpt", os.fspath(tmp_path / "small.safetensors")]) == 0
    with Image.open(tmp_path / "out.png") as image:
        text = image.info["parameters"]
    assert text.startswith("make it blue\nSteps: 2, Sampler: Euler a, Schedule type: Uniform, CFG scale: 7.0")
    assert "Image CFG scale: 1.2" in text
    assert command.main(arguments) == 2
    assert "is not InstructPix2Pix: leave it out" in capsys.readouterr().err


def test_mistakes_are_one_line(tmp_path: Path, circle: Image.Image, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "text.png").write_text("hello")
    (tmp_path / "empty").mkdir()
    for name, message in (
        ("none.png", "No such file"),
        ("text.png", "is not an image"),
        ("empty", "holds no images"),
    ):
        assert run([APPLE, "--init-img", os.fspath(tmp_path / name)], tmp_path / "out") == 2
        error = capsys.readouterr().err.splitlines()[-1]
        assert error.startswith("error: ")
        assert message in error
    assert run([APPLE], tmp_path / "out") == 2
    assert "no image: give one with --init-img FILE" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
