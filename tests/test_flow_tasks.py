"""FLUX.1 and Stable Diffusion 3 in miniature: every task, by the commands, from files."""

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import compare_samplers
import numpy as np
import pytest
import texts
import torch
import toy
import toy_flow
from flow_files import of_diffusers
from PIL import Image
from runs import decoded_latents, run_latents, unet_calls
from safetensors.torch import load_file
from torch import nn
from toy_families import pixels

import ldm_lite
from ldm_lite import Pipeline, txt2img
from ldm_lite.diffusion.guidance import Conditioning
from ldm_lite.tasks.img2img import KONTEXT, kontext_size
from ldm_lite.train import __main__ as train
from ldm_lite.train.batches import Batch, Draws
from ldm_lite.train.losses import DiffusionLoss

DATA = Path(__file__).parent / "data"
GOLDEN = np.load(DATA / "flow.npz")
KONTEXT_GOLDEN = np.load(DATA / "kontext.npz")
SOME = ("flux_dev", "sd35_medium")
NAMES = (*SOME, "flux_fill", "flux_control")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file of each family, all in one, an image and a mask."""
    folder = tmp_path_factory.mktemp("flow")
    for name in NAMES:
        toy_flow.write(folder, name)
    grey = np.add.outer(np.arange(32), np.arange(48)).astype(np.uint8)
    Image.fromarray(np.stack([grey, 2 * grey, 255 - grey], axis=-1)).save(folder / "image.png")
    mask = Image.new("L", (48, 32))
    mask.paste(255, (16, 8, 40, 24))
    mask.save(folder / "mask.png")
    return folder


@pytest.fixture(scope="module")
def pipes(folder: Path) -> dict[str, Pipeline]:
    return {name: ldm_lite.load(folder / f"{name}.safetensors", device="cpu") for name in NAMES}


def skipping(pipe: Pipeline, end: float) -> Pipeline:
    """The pipeline with toy_flow.SKIP's skip-layer guidance up to a share of the steps."""
    skip = {"layers": tuple(toy_flow.SKIP["layers"]), "scale": toy_flow.SKIP["scale"], "start": toy_flow.SKIP["start"]}
    return replace(pipe, family=replace(pipe.family, skip_layers=replace(pipe.family.skip_layers, **skip, end=end)))


# ---- tasks ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SOME)
def test_the_commands_make_the_images_of_the_functions(
    name: str, folder: Path, pipes: dict[str, Pipeline], tmp_path: Path
) -> None:
    """With the text of their PNG; a job from this text makes the same image again."""
    out = tmp_path / "out.png"
    size = ("--H", "32", "--W", "48", "--steps", "2", "--ckpt", str(folder / f"{name}.safetensors"), "--device", "cpu")
    assert txt2img.main(["a cat", *size, "--sampler", "heun", "--out", str(out)]) == 0
    ours = pipes[name].txt2img("a cat", height=32, width=48, steps=2, sampler="heun")
    assert np.array_equal(pixels(ours)[0], pixels([Image.open(out)])[0])
    text = texts.load(out).info["parameters"]
    assert f"Steps: 2, Sampler: Heun (ldm_lite), Schedule type: {pipes[name].schedule.spacing}, CFG scale:" in text
    again = pipes[name].txt2img(from_png=out)
    assert np.array_equal(pixels(again), pixels(ours))


@pytest.mark.parametrize("name", SOME)
def test_an_image_does_not_depend_on_its_batch(name: str, pipes: dict[str, Pipeline]) -> None:
    size = {"height": 32, "width": 48, "steps": 2}
    both = pixels(pipes[name].txt2img(["a cat", "a red apple"], batch_size=2, **size))
    alone = pixels(pipes[name].txt2img("a red apple", seed=43, **size))
    assert np.abs(both[1] - alone[0]).max() <= 2
    assert np.abs(both[0] - both[1]).max() > 2


@pytest.mark.parametrize("name", SOME)
def test_img2img_starts_on_the_line_between_image_and_noise(
    name: str, pipes: dict[str, Pipeline], folder: Path
) -> None:
    """x = (1 - s) x0 + s eps, at the level of the first step that runs, with the shift of this size."""
    pipe = pipes[name]
    with unet_calls(pipe) as calls:
        pipe.img2img("a", folder / "image.png", strength=0.5, steps=4)
    plan = pipe.sized((4, 4, 6)).plan(pipe.family.sampler, 4, last=2)
    a, s = plan.level[0].tolist()
    assert a + s == pytest.approx(1)
    start = a * pipe.encode(folder / "image.png") + s * pipe.noise(42, height=32, width=48)
    assert toy.relative_error(calls[0].x[:1], start.numpy()) < 1e-3
    assert len(calls) == 2


@pytest.mark.parametrize("name", SOME)
def test_inpainting_keeps_the_rest(name: str, pipes: dict[str, Pipeline], folder: Path) -> None:
    """What is kept has the noise of every level, (1 - s) x0 + s eps, and none at the end."""
    pipe, files = pipes[name], (folder / "image.png", folder / "mask.png")
    with unet_calls(pipe) as calls, decoded_latents(pipe) as latents:
        inpainted = pixels(pipe.inpaint("a", *files, steps=3))
    kept = pixels([Image.open(folder / "image.png")])
    outside = np.ones((32, 48), dtype=bool)
    outside[8:24, 16:40] = False
    assert np.array_equal(inpainted[:, outside], kept[:, outside])
    assert not np.array_equal(inpainted, kept)
    mean, plan = pipe.encode(folder / "image.png"), pipe.sized((4, 4, 6)).plan(pipe.family.sampler, 3)
    a, s = plan.level[1].tolist()
    level = a * mean + s * pipe.noise(42, height=32, width=48)
    assert torch.allclose(calls[1].x[:1, :, 0], level[:, :, 0], atol=1e-3)
    assert torch.allclose(latents[0][:, :, 0], mean[:, :, 0], atol=1e-3)


def test_fill_reads_the_masked_image_and_the_mask(pipes: dict[str, Pipeline], folder: Path) -> None:
    pipe = pipes["flux_fill"]
    with unet_calls(pipe) as calls:
        pipe.inpaint("a", folder / "image.png", mask=folder / "mask.png", steps=1)
    x = calls[0].x
    assert x.shape == (1, 4 + 4 + 64, 4, 6)
    hole = torch.from_numpy(np.asarray(Image.open(folder / "mask.png")) / 255).float()
    image = torch.from_numpy(np.array(Image.open(folder / "image.png"))).permute(2, 0, 1) / 127.5 - 1
    mean, _ = pipe.vae.encode((image * (1 - hole))[None])
    wanted = pipe.family.scale_factor * (mean - pipe.family.shift_factor)
    assert toy.relative_error(x[:, 4:8], wanted.numpy()) < 1e-3
    cells = hole.reshape(4, 8, 6, 8).permute(1, 3, 0, 2).reshape(64, 4, 6)
    assert torch.equal(x[0, 8:], cells)


def test_depth_and_canny_read_the_latents_of_a_picture(pipes: dict[str, Pipeline], folder: Path) -> None:
    pipe = pipes["flux_control"]
    with unet_calls(pipe) as calls:
        pipe.txt2img("a", depth=folder / "image.png", height=32, width=48, steps=1)
    assert toy.relative_error(calls[0].x[:, 4:], pipe.encode(folder / "image.png").numpy()) < 1e-3
    with pytest.raises(ValueError, match="expects one: `depth=FILE`"):
        pipe.txt2img("a", steps=1)


def test_kontext_reads_the_latents_of_the_image_that_it_edits(
    folder: Path, pipes: dict[str, Pipeline], caplog: pytest.LogCaptureFixture
) -> None:
    """Which weights do not tell: the metadata do, and a file's name is a hint.  Without an image it is dev."""
    about: dict[str, Any] = {"device": "cpu", "metadata": {"family": "flux_kontext"}}
    pipe = ldm_lite.load(folder / "flux_dev.safetensors", **about)
    with unet_calls(pipe) as calls:
        [image] = pipe.img2img("make it red", folder / "image.png", height=32, width=48, steps=2)
    mean = pipe.encode(folder / "image.png").numpy()
    assert image.size == (48, 32)
    assert [tuple(call.x.shape) for call in calls] == [(1, 8, 4, 6)] * 2
    assert all(toy.relative_error(call.x[:, 4:], mean) < 1e-3 for call in calls)
    options = {"height": 32, "width": 48, "steps": 1, "output": "tensor"}
    assert torch.equal(pipe.txt2img("a", **options)[0], pipes["flux_dev"].txt2img("a", **options)[0])
    with pytest.raises(ValueError, match=r"inpaint cannot use: run python -m ldm_lite.img2img"):
        pipe.inpaint("a", folder / "image.png", folder / "mask.png")
    shutil.copy(folder / "flux_dev.safetensors", folder / "flux1-kontext-dev.safetensors")
    assert ldm_lite.load(folder / "flux1-kontext-dev.safetensors", device="cpu").family.task == "txt2img"
    assert "if it is that, add `metadata=family=flux_kontext`" in caplog.text


@pytest.mark.parametrize(
    ("size", "wanted"), [((48, 32), (1248, 832)), ((500, 500), (1024, 1024)), ((9, 90), (672, 1568))]
)
def test_kontext_knows_some_sizes(size: tuple[int, int], wanted: tuple[int, int]) -> None:
    assert kontext_size(size) == wanted
    assert set(KONTEXT) == set(map(tuple, KONTEXT_GOLDEN["sizes"].tolist()))


def test_the_scale_is_what_dev_reads(pipes: dict[str, Pipeline]) -> None:
    pipe, seen = pipes["flux_dev"], []
    hook = pipe.unet.register_forward_pre_hook(lambda _, args, more: seen.append(more["guidance"]), with_kwargs=True)
    pipe.txt2img("a", height=32, width=32, steps=1, scale=7.0)
    pipe.txt2img("a", height=32, width=32, steps=1)
    hook.remove()
    assert [scale.tolist() for scale in seen] == [[7.0], [2.5]]
    with pytest.raises(ValueError, match="give a number"):
        pipe.txt2img("a", steps=1, guidance=lambda step: 3.0)


def test_skip_layer_guidance_runs_in_a_part_of_the_steps(pipes: dict[str, Pipeline]) -> None:
    pipe, size = skipping(pipes["sd35_medium"], end=0.5), {"height": 32, "width": 32, "steps": 4}
    with unet_calls(pipe) as calls:
        on = pipe.txt2img("a", **size)
    assert [len(call.x) for call in calls] == [2, 3, 2, 2]
    off = pipe.txt2img("a", skip_layer_scale=0, **size)
    assert not np.array_equal(pixels(on), pixels(off))
    with pytest.raises(ValueError, match="has no skip-layer guidance"):
        pipes["flux_dev"].txt2img("a", skip_layer_scale=1.0)


@pytest.mark.parametrize(
    ("program", "sampler", "warned"),
    [
        ("a1111", "dpmpp_sde", True),
        ("comfy", "dpmpp_2m_sde", True),
        ("comfy", "euler", False),
        ("own", "dpmpp_sde", False),
    ],
)
def test_other_programs_noise_of_stochastic_samplers_is_another_here(
    program: str, sampler: str, warned: bool, pipes: dict[str, Pipeline], caplog: pytest.LogCaptureFixture
) -> None:
    pipes["flux_dev"].txt2img("a", noise=program, sampler=sampler, height=32, width=32, steps=1)
    assert (f"{sampler}: other programs draw its noise differently" in caplog.text) is warned


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sampler": "plms"}, "PLMS is not defined for rectified flow"),
        ({"spacing": "ays"}, "not for rectified flow"),
        ({"compat": True}, "`compat` is for scripts of Stable Diffusion 1 and 2"),
        ({"prompt": "a (cat)", "prompt_syntax": "a1111"}, "cannot weight parts: got 'cat' with the weight 1.1"),
        ({"clip_skip": 2}, "only CLIP's pooled output"),
        ({"height": 40}, "multiples of 16"),
        ({"spacing": "flow:shift=0"}, "expected a number above 0"),
    ],
)
def test_what_makes_no_sense_is_refused(options: dict[str, Any], message: str, pipes: dict[str, Pipeline]) -> None:
    with pytest.raises(ValueError, match=message):
        pipes["flux_dev"].txt2img(**{"prompt": "a", **options})


# ---- how networks run -----------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("name", SOME)
@pytest.mark.parametrize(
    "options", [{"offload": "model"}, {"offload": "sequential"}, {"storage": "int8"}, {"storage": "fp8"}], ids=str
)
def test_offload_and_storage(name: str, options: dict[str, str], folder: Path, pipes: dict[str, Pipeline]) -> None:
    size = {"height": 32, "width": 32, "steps": 2}
    pipe = ldm_lite.load(folder / f"{name}.safetensors", device="cpu", **options)
    difference = np.abs(pixels(pipe.txt2img("a", **size)) - pixels(pipes[name].txt2img("a", **size)))
    assert difference.max() <= (0 if "offload" in options else 60)


@pytest.mark.slow
@pytest.mark.parametrize("name", SOME)
def test_compiled_steps(name: str, folder: Path, pipes: dict[str, Pipeline]) -> None:
    size = {"height": 32, "width": 32, "steps": 2}
    pipe = ldm_lite.load(folder / f"{name}.safetensors", device="cpu", compile="step")
    assert np.abs(pixels(pipe.txt2img("a", **size)) - pixels(pipes[name].txt2img("a", **size))).max() <= 2


@pytest.mark.slow
def test_the_samplers_command_compares_those_of_flows(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names = "euler,heun,dpmpp_2m,dpmpp_2m_sd3,unipc"
    ckpt = (
        "--ckpt",
        str(folder / "flux_dev.safetensors"),
        "--device",
        "cpu",
        "--spacing",
        "flow",
        "--spacings",
        "flow",
    )
    arguments = ("--samplers", names, "--steps", "2,8", "--reference", "20", "--out", str(tmp_path / "chart.png"))
    assert compare_samplers.main([*ckpt, *arguments]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[1:6]] == names.split(",")
    errors = {line.split()[0]: [float(error) for error in line.split()[4:6]] for line in lines[1:6]}
    assert all(few > many for few, many in errors.values())


# ---- training -------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("name", SOME)
def test_a_lora_learns_the_velocity(name: str, folder: Path, tmp_path: Path, pipes: dict[str, Pipeline]) -> None:
    """The loss is that of eps - x0 at shifted logit-normal levels; the file is kohya's and merges into the network."""
    (tmp_path / "data").mkdir()
    shutil.copy(folder / "image.png", tmp_path / "data" / "a.png")
    (tmp_path / "data" / "a.txt").write_text("a cat")
    arguments = ["--data", str(tmp_path / "data"), "--out", str(tmp_path / "out"), "--lora-rank", "2", "--steps", "2"]
    arguments += ["--batch-size", "1", "--data-workers", "0", "--samples", "a", "--lr", "0.01"]
    assert train.main([*arguments, "--ckpt", str(folder / f"{name}.safetensors"), "--device", "cpu"]) == 0
    first = "double_blocks_0_img_attn_qkv" if "flux" in name else "joint_blocks_0_x_block_attn_qkv"
    assert f"lora_unet_{first}.lora_down.weight" in load_file(tmp_path / "out" / "lora.safetensors")
    pipe = ldm_lite.load(
        folder / f"{name}.safetensors", device="cpu", lora=(f"{tmp_path / 'out' / 'lora.safetensors'}:50",)
    )
    size = {"height": 32, "width": 32, "steps": 1}
    assert not np.array_equal(pixels(pipe.txt2img("a", **size)), pixels(pipes[name].txt2img("a", **size)))


@pytest.mark.parametrize(
    ("options", "message"), [([], "only a LoRA"), (["--lora-rank", "2", "--min-snr", "5"], "leave out")]
)
def test_training_that_makes_no_sense_is_refused(
    options: Any, message: str, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "data").mkdir()
    shutil.copy(folder / "image.png", tmp_path / "data" / "a.png")
    (tmp_path / "data" / "a.txt").write_text("a cat")
    arguments = ["--data", str(tmp_path / "data"), "--out", str(tmp_path / "out"), "--steps", "1", "--device", "cpu"]
    assert train.main([*arguments, *options, "--ckpt", str(folder / "flux_dev.safetensors")]) == 2
    assert message in capsys.readouterr().err


def test_the_loss_of_a_perfect_network_is_0(pipes: dict[str, Pipeline]) -> None:
    """A network that knows the image gives (x - x0) / s = eps - x0 at every level."""
    pipe = pipes["sd35_medium"]
    moments = torch.cat([toy.normal(1, 2, 4, 4, 4), torch.full((2, 4, 4, 4), -60.0)], dim=1)
    x0 = pipe.family.scale_factor * (moments[:, :4] - pipe.family.shift_factor)
    seen: list[float] = []

    class Perfect(nn.Linear):
        def forward(self, x: Any, t: Any = None, context: Any = None, y: Any = None) -> Any:
            seen.extend((t / 1000).tolist())
            return (x - x0) / (t / 1000)[:, None, None, None]

    loss = DiffusionLoss(pipe.with_networks(unet=Perfect(1, 1)), {})
    values = [
        float(loss(Batch(moments, ["a", "b"], None, (2 * i, 2 * i + 1)), Draws(0, (2 * i, 2 * i + 1))))
        for i in range(20)
    ]
    assert max(values) < 1e-6
    assert len(set(seen)) == len(seen)
    assert np.mean(seen) > 0.6  # shifted by 3 from a logit-normal, whose mean is 0.5


# ---- whole runs -----------------------------------------------------------------------------------------------------


def sized(path: Path, **options: Any) -> Pipeline:
    """The pipeline for the goldens' latents of 6 x 10."""
    return ldm_lite.load(path, device="cpu", **options).sized((4, 6, 10))


def test_a_run_of_kontext_is_that_of_diffusers(tmp_path: Path) -> None:
    parts = toy_flow.save(tmp_path / "dev.safetensors", of_diffusers("flux_dev"))
    path = toy_flow.write(tmp_path, "flux_dev")
    pipe = sized(path, unet=parts, metadata={"family": "flux_kontext"})
    x, _, context, y = toy_flow.run_inputs(pipe.family.unet)
    cond = Conditioning(context, y, toy_flow.reference(pipe.family.unet))
    latents = pipe.denoise(x, cond, None, pipe.plan("euler", toy_flow.STEPS), toy_flow.SCALE)
    assert toy.relative_error(latents, KONTEXT_GOLDEN["run"]) < 2e-5


@pytest.mark.parametrize("run", [key.removeprefix("run.") for key in GOLDEN.files if key.startswith("run.")])
def test_whole_runs_are_those_of_the_originals(run: str, tmp_path: Path) -> None:
    name, *kind = run.split(".")
    pipe = sized(toy_flow.write(tmp_path, name, golden=True))
    spec = pipe.family.unet
    x, concat, context, y = toy_flow.run_inputs(spec)
    cond, uncond, scale = Conditioning(context, y, concat), None, toy_flow.SCALE
    if name.startswith("flux"):
        scale = toy_flow.SCALE if pipe.family.distilled else 1.0
    else:
        context, y = toy_flow.negative(spec)
        uncond = Conditioning(context, y)
    if kind == ["skip"]:
        inputs = {"cond": cond, "uncond": uncond, "noise": x, "height": 48, "width": 80, "batch_size": 2}
        pipe = skipping(pipe, toy_flow.SKIP["end"])
        latents = run_latents(pipe, sampler="euler", steps=toy_flow.STEPS, scale=scale, **inputs)
    else:
        sampler = "dpmpp_2m_sd3" if kind == ["dpmpp_2m"] else "euler"
        latents = pipe.denoise(x, cond, uncond, pipe.plan(sampler, toy_flow.STEPS), scale)
    assert toy.relative_error(latents, GOLDEN[f"run.{run}"]) < 2e-5
