"""ControlNets and T2I-Adapters in a pipeline: their files, what users write, and whole runs against diffusers."""

import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import toy
from PIL import Image
from random_checkpoint import SMALL
from runs import run_latents, unet_calls
from safetensors.torch import save_file
from steps import controlled_output
from torch import Tensor
from torch._dynamo.testing import CompileCounter

import ldm_lite
from ldm_lite import Control, Pipeline
from ldm_lite.control import loading
from ldm_lite.control.apply import ActiveControls
from ldm_lite.control.control import parse
from ldm_lite.control.loading import load_controls
from ldm_lite.models.controlnet import ControlNet
from ldm_lite.models.t2i_adapter import T2IAdapter
from ldm_lite.runtime.attention import layers, use, vanilla
from ldm_lite.runtime.compile import CompiledStep
from ldm_lite.txt2img import main

GOLDEN = np.load(Path(__file__).parents[1] / "data" / "control.npz")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A photo, and networks of every kind of file."""
    path = tmp_path_factory.mktemp("control")
    Image.fromarray(toy.photo()).save(path / "photo.png")
    weights = toy.control(SMALL.unet)
    with_prefix = {f"control_model.{key}": value for key, value in weights.items()}
    save_file(with_prefix, path / "net.safetensors")
    torch.save(weights, path / "bare.pth")
    save_file(toy.adapter(), path / "adapter.safetensors")
    return path


def spec(folder: Path, rest: str = "", net: str = "net.safetensors") -> str:
    return f"{folder / net}:{folder / 'photo.png'}{rest}"


# ---- what users write -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("a.pth:b.png", Control("a.pth", "b.png")),
        ("a.pth:b.png:0.5", Control("a.pth", "b.png", weight=0.5)),
        ("a.pth:b.png:-1", Control("a.pth", "b.png", weight=-1)),
        ("a.pth:b.png:.5:0.1-0.6", Control("a.pth", "b.png", weight=0.5, start=0.1, end=0.6)),
        ("a.pth:b.png:guess:0-0.5", Control("a.pth", "b.png", guess=True, end=0.5)),
        ("a.pth:b.png:pool:2", Control("a.pth", "b.png", pool=True, weight=2)),
        (r"C:\nets\a.pth:D:\b.png:1", Control(r"C:\nets\a.pth", r"D:\b.png")),
    ],
)
def test_a_control_is_read(text: str, wanted: Control) -> None:
    assert parse([text]) == [wanted]


@pytest.mark.parametrize("text", ["a.pth", "a.pth:", ":b.png", "a.pth:b.png:c.png", "a.pth:b.png:0.6-0.2", "a:b:0-1.5"])
def test_text_that_is_not_a_control_is_refused(pipe: Pipeline, text: str) -> None:
    with pytest.raises(ValueError, match="got control"):
        pipe.txt2img("a cat", control=[text])


def test_preprocessing_is_for_all_or_for_each() -> None:
    two = ["a:b", "c:d"]
    assert [control.preprocess for control in parse(two, "canny")] == ["canny", "canny"]
    assert [control.preprocess for control in parse(two, "canny:50:100,none")] == ["canny:50:100", "none"]


def test_preprocessing_that_does_not_exist_or_fit_is_refused(pipe: Pipeline) -> None:
    for wrong, message in (("cany", "got `preprocess` 'cany', expected none, canny"), ("none,none,none", "got 3 ways")):
        with pytest.raises(ValueError, match=message):
            pipe.txt2img("a cat", control=["a:b", "c:d"], preprocess=wrong)
    with pytest.raises(ValueError, match="`preprocess` is of a control"):
        pipe.txt2img("a cat", preprocess="canny")


# ---- images ---------------------------------------------------------------------------------------------------------


def test_an_image_is_cut_to_size_and_lies_in_0_to_1(folder: Path) -> None:
    pixels = Control("", str(folder / "photo.png")).pixels((96, 64))
    assert pixels.shape == (1, 3, 64, 96)
    assert 0 <= pixels.min() < 0.1 < 0.9 < pixels.max() <= 1


def test_what_is_transparent_is_the_hole_of_inpainting(folder: Path) -> None:
    alpha = np.full((64, 64, 1), 255, np.uint8)
    alpha[:, :20] = 0
    Image.fromarray(np.concatenate([toy.photo(), alpha], axis=2)).save(folder / "hole.png")
    pixels = Control("", str(folder / "hole.png"), preprocess="inpaint").pixels((64, 64))
    assert (pixels[..., :20] == -1).all()
    assert (pixels[..., 20:] >= 0).all()
    with pytest.raises(ValueError, match="has no transparent part"):
        Control("", str(folder / "photo.png"), preprocess="inpaint").pixels((64, 64))


def test_the_size_follows_the_image(pipe: Pipeline, folder: Path) -> None:
    """Its short side is the model's, here 64 pixels, and both are multiples of 64."""
    wide = Control(folder / "net.safetensors", Image.new("RGB", (600, 400)))
    assert pipe.txt2img("a cat", control=[wide], steps=1)[0].size == (128, 64)


# ---- runs -----------------------------------------------------------------------------------------------------------


def run(pipe: Pipeline, controls: list[str], preprocess: str | None = None, steps: int = 10) -> Tensor:
    """The last latents of a guided run of DDIM."""
    cond, uncond = (toy.normal(seed, 1, 5, 64) for seed in (13, 12))
    arguments = {"cond": cond, "uncond": uncond, "noise": toy.normal(11, 1, 4, 8, 8), "height": 64, "width": 64}
    return run_latents(
        pipe, sampler="ddim", steps=steps, scale=7.5, control=controls, preprocess=preprocess, **arguments
    )


@pytest.mark.parametrize(
    ("name", "rest", "net"),
    [
        ("plain", "", "net.safetensors"),
        ("plain", ":1:0-1", "bare.pth"),
        ("half", ":0.8:0-0.5", "net.safetensors"),
        ("guess", ":guess", "net.safetensors"),
    ],
)
def test_a_run_equals_diffusers(pipe: Pipeline, folder: Path, name: str, rest: str, net: str) -> None:
    last = run(pipe, [spec(folder, rest, net)], "canny")
    assert toy.relative_error(last, GOLDEN[f"steered.{name}"]) < 1e-5


def test_a_difference_is_added_to_the_checkpoints_own_unet(pipe: Pipeline, folder: Path) -> None:
    base, weights = pipe.unet.state_dict(), toy.control(SMALL.unet)
    deltas = {key: value - base[key] if key in base else value for key, value in weights.items()}
    assert any(key in base for key in weights)
    torch.save({**deltas, "difference": torch.tensor(1.0)}, folder / "difference.pth")
    whole, difference = (run(pipe, [spec(folder, net=net)], steps=2) for net in ("net.safetensors", "difference.pth"))
    torch.testing.assert_close(difference, whole, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "tuning",
    [{"offload": "model"}, {"offload": "sequential"}, {"storage": "int8"}, {"offload": "model", "storage": "int8"}],
)
def test_controls_work_with_weights_that_are_kept_elsewhere(
    small_path: Path, pipe: Pipeline, folder: Path, tuning: dict[str, str]
) -> None:
    """Also a file of differences, which are from the weights as they compute."""
    weights, base = toy.control(SMALL.unet), pipe.unet.state_dict()
    torch.save(
        {
            **{key: value - base[key] if key in base else value for key, value in weights.items()},
            "difference": torch.ones(()),
        },
        folder / "kept.pth",
    )
    kept = ldm_lite.load(small_path, device="cpu", **tuning)
    tolerance = 0.05 if "storage" in tuning else 1e-6
    nets = [spec(folder, net="kept.pth"), spec(folder, net="adapter.safetensors")]
    assert toy.relative_error(run(kept, nets, steps=2), run(pipe, nets, steps=2).numpy()) < 2 * tolerance


def test_a_full_file_is_a_checkpoint_and_a_control(pipe: Pipeline, small_path: Path, folder: Path) -> None:
    """As the first release's files are: all of Stable Diffusion 1.5, and the ControlNet."""
    from safetensors import safe_open

    with safe_open(small_path, "pt") as file:
        weights = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 (not a dict)
        about = file.metadata()
    full = folder / "full.safetensors"
    save_file(weights | {f"control_model.{k}": v for k, v in toy.control(SMALL.unet).items()}, full, metadata=about)
    both = run(ldm_lite.load(full, device="cpu"), [spec(folder, net="full.safetensors")], steps=2)
    assert torch.equal(both, run(pipe, [spec(folder)], steps=2))


def test_a_net_has_the_attention_of_its_unet(small_path: Path, folder: Path) -> None:
    plain = run(ldm_lite.load(small_path, device="cpu"), [spec(folder)], steps=2)
    for name in ("vanilla", "mha"):
        pipe = ldm_lite.load(small_path, device="cpu", attention=name)
        [control] = load_controls(pipe, parse([spec(folder)]))
        net_layers = layers(control.network).values()
        assert all(
            layer.attention is vanilla if name == "vanilla" else "forward" in vars(layer) for layer in net_layers
        )
        torch.testing.assert_close(run(pipe, [spec(folder)], steps=2), plain, rtol=1e-3, atol=1e-3)


def test_pooling_leaves_the_position_out_and_the_negative_branch_alone(pipe: Pipeline, folder: Path) -> None:
    network = load_controls(pipe, parse([spec(folder)]))[0].network
    assert isinstance(network, ControlNet)
    x, context = toy.normal(1, 2, 4, 8, 8), toy.normal(2, 2, 5, 64)
    hint = network.embed_hint(Control("", str(folder / "photo.png")).pixels((64, 64)))
    added = tuple(residual.mean(dim=(2, 3), keepdim=True) for residual in network(x, toy.T, context, hint))
    wanted = torch.cat(
        [
            pipe.unet(x[:1], toy.T[:1], context[:1]),
            pipe.unet(x[1:], toy.T[1:], context[1:], residuals=tuple(residual[1:] for residual in added)),
        ]
    )
    plan = pipe.plan("ddim", 10)
    active = ActiveControls(pipe, load_controls(pipe, parse([spec(folder, ":pool")])), plan, (64, 64))
    torch.testing.assert_close(controlled_output(active, pipe.unet, x, toy.T, context), wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("rest", [":guess", ":pool"])
def test_every_part_of_a_prompt_is_controlled(pipe: Pipeline, folder: Path, rest: str) -> None:
    """In the modes that leave the negative prompt alone; two halves of a prompt are the prompt."""
    common = {"steps": 3, "height": 64, "width": 64, "scale": 7.5, "control": [spec(folder, rest)], "seed": 1}
    common |= {"prompt_syntax": "a1111", "sampler": "ddim"}
    whole = run_latents(pipe, "a cat", **common)
    halves = run_latents(pipe, "a cat :0.5 AND a cat :0.5", **common)
    torch.testing.assert_close(halves, whole, rtol=1e-3, atol=1e-3)
    regions = run_latents(pipe, "a cat AND a cat", regions="0,0,1,0.5; 0,0.5,1,1", **common)
    torch.testing.assert_close(regions, whole, rtol=1e-3, atol=1e-3)


def test_several_controls_add_up(pipe: Pipeline, folder: Path) -> None:
    half = spec(folder, ":0.5")
    torch.testing.assert_close(
        run(pipe, [half, half], steps=2), run(pipe, [spec(folder)], steps=2), rtol=1e-4, atol=1e-4
    )


def test_an_adapter_steers_and_adds_to_a_net(pipe: Pipeline, folder: Path) -> None:
    adapter = spec(folder, net="adapter.safetensors")
    active = ActiveControls(pipe, load_controls(pipe, parse([adapter])), pipe.plan("ddim", 2), (64, 64))
    x, context = toy.normal(1, 2, 4, 8, 8), toy.normal(2, 2, 5, 64)
    network = toy.fill(T2IAdapter(toy.SMALL_ADAPTER))
    features = network.place(network(Control("", str(folder / "photo.png")).pixels((64, 64))), (1, 1))
    wanted = pipe.unet(x, toy.T, context, features=features)
    torch.testing.assert_close(controlled_output(active, pipe.unet, x, toy.T, context), wanted)
    assert toy.relative_error(wanted, pipe.unet(x, toy.T, context).numpy()) > 0.01
    both = run(pipe, [adapter, spec(folder)], steps=2)
    assert toy.relative_error(both, run(pipe, [spec(folder)], steps=2).numpy()) > 0.01


def test_outside_of_its_steps_a_control_is_not_run(pipe: Pipeline, folder: Path) -> None:
    with unet_calls(pipe) as calls:
        run(pipe, [spec(folder, ":0.3-0.6")])
    plain = [torch.allclose(pipe.unet(call.x, call.t, call.context), call.out, atol=1e-3) for call in calls]
    assert plain == [True] * 3 + [False] * 3 + [True] * 4


def test_img2img_and_inpaint_are_steered_too(picture_pipes: dict[str, Pipeline], folder: Path) -> None:
    """Also where the UNet reads more channels than the ControlNet."""
    photo, mask = Image.fromarray(toy.photo()), Image.new("L", (64, 64), 255)
    for task, images in (("img2img", (photo,)), ("inpaint", (photo, mask))):
        pipe = picture_pipes["txt2img" if task == "img2img" else "inpaint"]
        [plain], [steered] = (
            getattr(pipe, task)("a cat", *images, steps=2, control=controls, output="numpy")
            for controls in ((), (spec(folder),))
        )
        assert not np.array_equal(plain, steered)


@pytest.mark.slow
@pytest.mark.usefixtures("fresh_compiler")
def test_a_whole_job_is_two_graphs(pipe: Pipeline, folder: Path) -> None:
    """Two nets and an adapter, each with steps of its own, are one, and the UNet alone is the other."""
    counter = CompileCounter()
    compiled = replace(pipe, run_row=CompiledStep("step", pipe.unet, counter))  # type: ignore[arg-type]
    nets = [spec(folder, ":0.8:0.2-0.6:guess"), spec(folder, ":0.4-0.8"), spec(folder, ":0-0.5", "adapter.safetensors")]
    torch.testing.assert_close(run(compiled, nets), run(pipe, nets), rtol=1e-3, atol=1e-3)
    assert counter.frame_count == 2


@pytest.mark.slow
@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.needs("C++ compiler")
def test_inductor_compiles_a_step_with_controls(pipe: Pipeline, folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    compiled = replace(pipe, run_row=CompiledStep("step", pipe.unet, "inductor"))
    torch.testing.assert_close(run(compiled, [spec(folder)]), run(pipe, [spec(folder)]), rtol=1e-3, atol=1e-3)
    assert "failed" not in caplog.text


# ---- what does not fit ----------------------------------------------------------------------------------------------


def test_files_without_a_control_or_for_another_unet_are_refused(
    pipe: Pipeline, folder: Path, small_path: Path
) -> None:
    with pytest.raises(ValueError, match="no ControlNet, T2I-Adapter or IP-Adapter, only unet, vae, text_encoder"):
        pipe.txt2img("a cat", control=[f"{small_path}:{folder / 'photo.png'}"])
    torch.save(toy.control(replace(SMALL.unet, context_dim=48)), folder / "other.pth")
    with pytest.raises(ValueError, match=r"is for UNets with context 48 .*, but that of small SD1 has 64"):
        pipe.txt2img("a cat", control=[spec(folder, net="other.pth")])


def test_a_control_given_as_the_checkpoint_is_named(folder: Path) -> None:
    with pytest.raises(ValueError, match="`control="):
        ldm_lite.load(folder / "net.safetensors", device="cpu")
    with pytest.raises(ValueError, match="`control="):
        ldm_lite.load(folder / "adapter.safetensors", device="cpu")


# ---- the command ----------------------------------------------------------------------------------------------------


def test_the_function_and_the_command_take_controls(
    pipe: Pipeline, folder: Path, small_path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    control = {"control": (spec(folder, ":0.7"),), "preprocess": "canny"}
    [result], [plain] = (pipe.txt2img("a cat", steps=2, output="result", **options) for options in (control, {}))
    assert not np.array_equal(result.array, plain.array)
    assert "Control preprocess: canny" in result.parameters
    arguments = [
        "a cat",
        "--ckpt",
        str(small_path),
        "--steps",
        "2",
        "--device",
        "cpu",
        "--out",
        str(tmp_path / "a.png"),
    ]
    status = main([*arguments, "--control", spec(folder, ":0.7"), "--preprocess", "canny"])
    assert status == 0, capsys.readouterr().err
    assert np.array_equal(np.asarray(Image.open(tmp_path / "a.png")), result.array)


def test_a_file_is_read_once_for_jobs_that_follow_each_other(
    pipe: Pipeline, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So a CUDA graph, which is for addresses of weights, serves them all; a changed file is read again."""
    files, read = list[str](), loading._read

    def noted(model: Any, source: Any) -> Any:
        files.append(Path(source).name)
        return read(model, source)

    monkeypatch.setattr(loading, "_read", noted)
    net, second = folder / "once.safetensors", folder / "other.safetensors"
    for path in (net, second):
        shutil.copy(folder / "net.safetensors", path)

    def run(*paths: Path) -> Any:
        return load_controls(pipe, parse(tuple(f"{path}:{folder / 'photo.png'}" for path in paths)))[0].network

    first = run(net)
    assert run(net) is run(net, second) is first
    assert files == ["once.safetensors", "other.safetensors"]
    os.utime(net, (1, 1))
    assert run(net) is not first
    assert run(second) is not run(net)
    assert files == [
        "once.safetensors",
        "other.safetensors",
        "once.safetensors",
        "other.safetensors",
        "once.safetensors",
    ]
    use(pipe.unet, "vanilla")
    try:
        assert {layer.attention for layer in layers(run(net)).values()} == {vanilla}
    finally:
        use(pipe.unet, "sdpa")
