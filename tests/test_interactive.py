"""In a notebook and in an editor: what is shown of objects, progress, signatures, and functions of the user's own."""

import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import pytest
import torch
import toy_flow
import tqdm.auto

import ldm_lite
from ldm_lite import Pipeline, txt2img
from ldm_lite.core.denoise import State
from ldm_lite.tasks.job import Task

ROOT = Path(__file__).parents[1]
WARN_OF_SIZE = Task.warn_of_size


@pytest.fixture
def flux(tmp_path: Path) -> Pipeline:
    return ldm_lite.load(toy_flow.write(tmp_path, "flux_dev"), device="cpu")


# ---- what is shown --------------------------------------------------------------------------------------------------


def test_objects_are_shown_in_one_short_line(pipe: Pipeline) -> None:
    [state] = pipe.stream("a", steps=1)
    [result] = pipe.txt2img("a", steps=1, output="result")
    shown = {"pipe": repr(pipe), "plan": repr(pipe.plan("heun", 20)), "adaptive": repr(pipe.plan("dpm_adaptive", 20))}
    shown |= {"state": repr(state), "cond": repr(pipe.encode_prompt("a")), "core": repr(ldm_lite.core.load())}
    for name, text in shown.items():
        assert len(text) < 300, name
        assert "\n" not in text
    assert shown["pipe"].startswith("Pipeline(small.safetensors: ")
    assert re.search(r"fp32 on cpu; by default \d+ steps of \w+ at scale [\d.]+, \d+ px\)$", shown["pipe"])
    assert shown["plan"] == "Plan(20 steps, 39 calls of the network)"
    assert shown["state"] == "State(step=1, num_steps=1)"
    assert shown["cond"] == "Conditioning(context (1, 77, 64))"
    assert "tensor(" not in repr(result)


def test_dir_shows_the_public_names() -> None:
    assert dir(ldm_lite) == sorted([*ldm_lite.__all__, "diffusion"])
    for name in dir(ldm_lite):
        getattr(ldm_lite, name)


# ---- progress -------------------------------------------------------------------------------------------------------


def test_progress_is_a_bar_and_on_step_a_function(pipe: Pipeline, capsys: pytest.CaptureFixture[str]) -> None:
    states: list[State] = []
    with mock.patch.object(tqdm.auto, "tqdm", wraps=tqdm.auto.tqdm) as bar:
        pipe.txt2img("a", steps=3, progress=True, on_step=states.append)
        pipe.txt2img("a", steps=3)
    assert bar.call_count == 1  # the notebook's in a notebook
    assert "3/3" in capsys.readouterr().err
    assert [(state.step, state.num_steps) for state in states] == [(1, 3), (2, 3), (3, 3)]
    image = pipe.decode(states[-1].latents)[0]
    pipe.img2img("a", image, steps=2, strength=1.0, on_step=states.append)
    pipe.inpaint("a", image, image, steps=2, on_step=states.append)
    assert len(states) == 7
    cond, noise = pipe.encode_prompt("a"), pipe.noise(1)
    pipe.denoise(noise, cond, None, pipe.plan("ddim", 2), on_step=states.append)
    assert len(states) == 9


def test_a_stream_decodes_only_what_is_asked_for(pipe: Pipeline) -> None:
    with mock.patch.object(type(pipe.vae), "decode", autospec=True, side_effect=type(pipe.vae).decode) as decode:
        states = list(pipe.stream(["a", "b"], steps=2, hires=2))
        assert decode.call_count == 0
        pipe.decode(states[-1].x0)
    assert decode.call_count == 1
    assert [state.step for state in states] == 2 * [1, 2, 1, 2]
    assert states[-1].latents.shape[-1] == 2 * states[0].latents.shape[-1]


# ---- functions of the user's own ------------------------------------------------------------------------------------


def test_a_guidance_function_may_take_the_step(pipe: Pipeline) -> None:
    seen: list[int] = []

    def stepwise(cond: torch.Tensor, uncond: torch.Tensor, step: int) -> torch.Tensor:
        seen.append(step)
        return uncond + (2.0 + step) * (cond - uncond)

    def by_default(cond: torch.Tensor, uncond: torch.Tensor, step: int = -1) -> torch.Tensor:
        return stepwise(cond, uncond, step)

    [wanted] = pipe.txt2img("a", steps=3, guidance=lambda step: 2.0 + step, output="tensor")
    for function in (stepwise, by_default, lambda *all_of_them: stepwise(*all_of_them)):
        seen.clear()
        if function in (stepwise, by_default):
            [got] = pipe.txt2img("a", steps=3, guidance=function, output="tensor")
            assert seen == [0, 1, 2]
            torch.testing.assert_close(got, wanted, rtol=1e-3, atol=1e-3)
    cond, uncond, plan = pipe.encode_prompt("a"), pipe.encode_prompt(""), pipe.plan("ddim", 3)
    a, b = (pipe.denoise(pipe.noise(1), cond, uncond, plan, guidance=f) for f in (stepwise, lambda step: 2.0 + step))
    torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    "options", [{}, {"sampler": "heun"}, {"guidance_interval": "0.1-1"}, {"sampler": "dpmpp_sde", "noise": "a1111"}]
)
def test_a_function_of_the_step_runs_once_a_step(pipe: Pipeline, options: dict[str, Any]) -> None:
    steps: list[int] = []

    def guidance(step: int) -> float:
        steps.append(step)
        return 4.0

    pipe.txt2img("a", steps=4, guidance=guidance, **options)
    assert steps == [0, 1, 2, 3]


def test_attention_is_replaced_in_chosen_layers(small_path: Path) -> None:
    loaded, calls = ldm_lite.load(small_path, device="cpu"), list[tuple[int, int]]()
    wanted = loaded.txt2img("a", steps=1, output="tensor")[0]

    def counted(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        calls.append((q.shape[2], k.shape[2]))
        return torch.nn.functional.scaled_dot_product_attention(q, k, v)

    loaded.use_attention(counted, "*attn2")
    torch.testing.assert_close(loaded.txt2img("a", steps=1, output="tensor")[0], wanted, rtol=1e-3, atol=1e-3)
    tokens = loaded.encode_prompt("a")["context"].shape[1]
    assert calls
    assert {keys for _, keys in calls} == {tokens}
    calls.clear()
    loaded.use_attention("sdpa", "*attn2")
    loaded.txt2img("a", steps=1)
    assert not calls
    with pytest.raises(ValueError, match=r"no attention layer matches '\*attn9': they are input_blocks"):
        loaded.use_attention(counted, "*attn9")


def test_the_last_half_of_attention_maps_is_cond_s(pipe: Pipeline) -> None:
    """As its docstring says: with guidance [uncond, cond], without cond alone."""

    def maps(prompt: str, **options: Any) -> torch.Tensor:
        with pipe.attention_maps("*attn2") as by_layer:
            pipe.txt2img(prompt, steps=1, seed=1, **options)
        return next(iter(by_layer.values()))[0]

    both = maps("a cat", negative_prompt="a rocket", scale=4)
    torch.testing.assert_close(both[:1], maps("a rocket", scale=1))
    torch.testing.assert_close(both[-1:], maps("a cat", scale=1))


# ---- sizes ----------------------------------------------------------------------------------------------------------


def test_a_plan_is_that_of_the_size(flux: Pipeline) -> None:
    """FLUX.1 [dev] shifts its noise levels by the number of tokens."""
    for height, width in ((64, 64), (256, 512)):
        plan = flux.plan(steps=4, height=height, width=width)
        size: dict[str, Any] = {"height": height, "width": width, "output": "tensor"}
        by_plan = flux.txt2img("a", plan=plan, **size)[0]
        assert torch.equal(by_plan, flux.txt2img("a", steps=4, **size)[0])
    small, large = (flux.plan(steps=4, height=side, width=side).level.tolist() for side in (64, 512))
    assert small != large
    assert flux.sized((4, 64, 64)).plan(steps=4).level.tolist() == large
    with pytest.raises(ValueError, match="expected multiples of 16"):
        flux.plan(steps=4, height=72)


def test_an_image_is_padded_to_what_the_network_takes(flux: Pipeline, pipe: Pipeline) -> None:
    image = torch.zeros(3, 40, 56)
    assert flux.encode(image).shape[2:] == (6, 8)
    assert pipe.encode(image).shape[2:] == (5, 7)


# ---- signatures -----------------------------------------------------------------------------------------------------


def make_arguments() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_arguments", ROOT / "scripts" / "make_arguments.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_arguments_are_those_of_the_options() -> None:
    script = make_arguments()
    assert script.PATH.read_text(encoding="utf-8") == script.classes(), "run scripts/make_arguments.py"


SCRIPT = """
import ldm_lite
from ldm_lite.core.denoise import State

def show(state: State) -> None: ...

pipe = ldm_lite.load(dtype="fp16", lora=["a.safetensors:0.5"], vae="b.safetensors", metadata={"family": "sd1"})
image = pipe.txt2img("a cat", steps=10, sampler="euler", seed=[1, 2], progress=True, on_step=show)[0]
image.save("a.png")
array = pipe.img2img("a", image, strength=0.5, resize="fit", output="numpy")[0]
array.shape
tensor = pipe.inpaint("a", image, image, feather=4, output="tensor")[0]
tensor.clamp(-1, 1)
result = pipe.upscale(image, noise_level=20, output="result")[0]
result.seed
pipe.use_attention(lambda q, k, v: v, "*attn2")
pipe.plan("euler", 20, spacing="karras", height=64).num_steps
for state in pipe.stream("a", steps=3):
    state.x0.mean()
"""
WRONG = {
    'pipe.txt2img("a", stpes=10)': 'Unexpected keyword argument "stpes"',
    'pipe.txt2img("a", steps="ten")': "No overload variant",
    'pipe.img2img("a", image, resize="squash")': "No overload variant",
    'array.save("a.png")': 'has no attribute "save"',
    "result.image.pixels": 'has no attribute "pixels"',
    'ldm_lite.load(offlaod="model")': 'Unexpected keyword argument "offlaod"',
    'pipe.txt2img("a", output="jpeg")': "No overload variant",
    'pipe.plan("euler", 20, etta=1.0)': 'Unexpected keyword argument "etta"',
}


@pytest.mark.slow
def test_mypy_sees_options_and_what_an_output_is(tmp_path: Path) -> None:
    pytest.importorskip("mypy")
    file = tmp_path / "script.py"
    file.write_text(SCRIPT + "\n".join(WRONG) + "\n")
    command = [sys.executable, "-m", "mypy", "--strict", "--cache-dir", str(ROOT / ".mypy_cache"), str(file)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    first = len(SCRIPT.splitlines()) + 1
    lines = [line for line in done.stdout.splitlines() if "script.py:" in line and ": error: " in line]
    assert sorted({int(line.split(":")[1]) for line in lines}) == [*range(first, first + len(WRONG))], lines
    for number, (call, wanted) in enumerate(WRONG.items(), first):
        assert any(wanted in line for line in lines if f"script.py:{number}:" in line), f"{call}: {lines}"


# ---- options that have no effect ------------------------------------------------------------------------------------


def test_what_has_no_effect_is_said(pipe: Pipeline, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(ValueError, match="got `fixed_code` and a list of seeds"):
        pipe.txt2img("a", steps=1, batch_size=2, seed=[1, 2], fixed_code=True)
    caplog.clear()
    pipe.txt2img("a", steps=1, guidance_rescale=0.5)
    assert not caplog.messages
    pipe.txt2img("a", steps=1, guidance_rescale=0.5, scale=1)
    assert caplog.messages == ["`guidance_rescale` has no effect without guidance: use a `scale` other than 1"]


def test_a_grid_is_of_a_hundred_images_at_most_for_compat_too(
    small_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It needs all of them in memory."""
    argv = ["a", "--compat", "--n_iter", "1", "--n_samples", "2", "--steps", "2", "--H", "64", "--W", "64"]
    for most, grids in ((2, 1), (1, 0)):
        monkeypatch.setattr("ldm_lite.tasks.command.MOST_IN_GRID", most)
        out = tmp_path / str(most)
        assert txt2img.main([*argv, "--ckpt", str(small_path), "--device", "cpu", "--out", str(out)]) == 0
        assert (len([*out.glob("grid*")]), len([*(out / "samples").iterdir()])) == (grids, 2)


@pytest.fixture
def sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """What conftest.py silences."""
    monkeypatch.setattr(Task, "warn_of_size", WARN_OF_SIZE)


@pytest.mark.parametrize(
    ("options", "warns"),
    [
        *(({}, False), ({"hires": 2}, True), ({"hires": 1.5}, True), ({"seamless": "x"}, False)),
        *(({"width": 128}, True), ({"width": 96}, True), ({"height": 32}, True), ({"height": 72}, False)),
    ],
)
def test_the_small_model_says_once_what_it_was_trained_on(
    pipe: Pipeline, options: dict[str, Any], warns: bool, caplog: pytest.LogCaptureFixture, sizes: None
) -> None:
    pipe.txt2img(["a", "b"], steps=2, **options)
    messages = [record.getMessage() for record in caplog.records if "was trained at" in record.getMessage()]
    assert messages == warns * [
        "small was trained at 64 x 64 pixels, and other sizes are distorted: use that size, or a larger model"
    ]
    assert sum("too small a model for `seamless`" in message for message in caplog.messages) == ("seamless" in options)


def test_an_extended_image_of_the_small_model_is_warned_of_once(
    pipe: Pipeline, caplog: pytest.LogCaptureFixture, sizes: None
) -> None:
    pipe.inpaint("a", 2 * [torch.zeros(3, 64, 64)], extend="left=64", steps=1)
    assert len([message for message in caplog.messages if "other sizes are distorted" in message]) == 1
    caplog.clear()
    pipe.img2img("a", torch.zeros(3, 64, 64), steps=1)
    assert not [message for message in caplog.messages if "was trained at" in message]
