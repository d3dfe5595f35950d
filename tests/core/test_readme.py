"""The README is true: its commands run, its files exist, and its changes of a few lines do what they say."""

import importlib
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from in_float64 import order
from PIL import Image
from references import error

import ldm_lite.core
from ldm_lite.core import SAMPLERS, Pipeline, load
from ldm_lite.core.denoise import Branch, Call, Inputs, Outputs
from ldm_lite.core.features import FEATURES, Feature
from ldm_lite.core.job import Item, Job
from ldm_lite.core.layers import Place
from ldm_lite.core.samplers import make_plan
from ldm_lite.core.schedule import Schedule, scaled_linear_betas

PACKAGE = Path(ldm_lite.core.__file__).parent
README = next(
    path for path in (Path(__file__).parents[1] / "README.md", PACKAGE / "README.md") if path.exists()
).read_text(encoding="utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
START, SAMPLER, PLAN, ATTENTION, GUIDANCE, THRESHOLD, PERTURBED, PROMPT_TO_PROMPT, AWAY, PREVIEWS, TRAINING = BLOCKS


@pytest.fixture
def block(tables: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], dict[str, Any]]:
    """Runs a block in an empty folder and returns its names."""
    monkeypatch.chdir(tmp_path)

    def run(code: str) -> dict[str, Any]:
        names: dict[str, Any] = {}
        exec(code, names)
        return names

    return run


def test_blocks_are_short() -> None:
    for code in BLOCKS:
        assert len(code.splitlines()) <= 23
        assert max(map(len, code.splitlines())) <= 120
    assert len([line for line in START.splitlines() if line]) <= 6


def test_every_file_and_name_exists() -> None:
    table = README[README.index("## Files") : README.index("## Ten changes")]
    named = set(re.findall(r"`(\w+\.py)`", table))
    assert named == {path.name for path in PACKAGE.glob("*.py")} - {"__init__.py"}
    way = README[README.index("How a prompt becomes pixels") : README.index("A table cannot express")]
    for owner, name in re.findall(r"(?<!\w)(\w+)\.([a-z]\w*)", way):
        kind = {"Pipeline": Pipeline, "Job": Job}.get(owner)
        module = importlib.import_module(f"{ldm_lite.core.__name__}.{owner}") if kind is None else None
        assert name in dir(module or kind) or name in Job.__annotations__, (owner, name)
    rows = README[README.index("## To change") : README.index("## To see what")]
    for owner, name in re.findall(r"`(\w+)\.([A-Za-z_]\w*)", rows):
        kind: Any = {"pipe": Pipeline, "job": Job, "inputs": Inputs, "outputs": Outputs, "item": Item}.get(owner)
        if kind is not None:
            assert name in {*dir(kind), *getattr(kind, "__dataclass_fields__", ())}, (owner, name)
        elif (PACKAGE / f"{owner}.py").exists():
            assert hasattr(importlib.import_module(f"{ldm_lite.core.__name__}.{owner}"), name), (owner, name)
    for name in re.findall(r"`(\w+)`", rows):  # slots of a job, methods of a feature, what guidance is told
        known = {*Job.__annotations__, *dir(Feature), *dir(Outputs), *dir(Branch), "outputs", "residuals", "Branch"}
        known |= {*dir(Call), *dir(Place)}
        assert name in known, name


def test_the_first_lines(block: Callable[[str], dict[str, Any]]) -> None:
    block(START.replace("steps=20", "steps=2"))
    with Image.open("apple.png") as image:
        assert image.size == (128, 128)


def test_a_sampler(block: Callable[[str], dict[str, Any]], pipe: Pipeline) -> None:
    block(SAMPLER)
    schedule = Schedule.from_betas(scaled_linear_betas(0.00085, 0.012), "eps")
    assert order(lambda steps: SAMPLERS["midpoint"](schedule, steps), schedule) > 1.7
    assert make_plan("Midpoint trailing", pipe.schedule, 4).num_steps == 4
    like = pipe.txt2img("a red apple on a blue background", sampler="dpmpp_2m_karras", steps=10)[0]
    assert 0 < error(np.asarray(Image.open("apple.png")), np.asarray(like)) < 0.15


def test_a_plan(block: Callable[[str], dict[str, Any]], pipe: Pipeline) -> None:
    """Euler's method is DDIM's update, which starts from unit noise."""
    names = block(PLAN)
    noise, cond = pipe.noise(), pipe.encode_prompt("a red apple")
    latents, like = (
        pipe.denoise(noise, cond, None, plan)
        for plan in (
            names["rows"].plan(end=names["CLEAN"], initial=1.0),
            make_plan("ddim", pipe.schedule, 4, spacing=lambda schedule, steps: names["levels"]),
        )
    )
    assert error(latents, like) < 1e-5


def test_attention(block: Callable[[str], dict[str, Any]], pipe: Pipeline) -> None:
    names = block(ATTENTION)
    noise, context, t = pipe.noise(), pipe.encode_prompt("a red apple")["context"], torch.tensor([500])
    out = names["pipe"].unet(noise, t, context)
    assert error(out, pipe.unet(noise, t, context)) > 1e-3
    with torch.no_grad():  # the same by hand: queries of the cross-attention layers times 1.5
        by_hand = load(device="cpu")
        for name, layer in by_hand.unet.named_modules():
            if name.endswith("attn2"):
                layer.to_q.weight *= 1.5
    assert error(out, by_hand.unet(noise, t, context)) < 1e-5


def test_guidance(block: Callable[[str], dict[str, Any]], pipe: Pipeline) -> None:
    """A step of DDIM from v, written out."""
    block(GUIDANCE)
    noise, t = pipe.noise(), torch.tensor([1.0])
    with torch.no_grad():
        uncond, cond = (pipe.unet(noise, t, pipe.encode_prompt(text)["context"]) for text in ("", "a cat"))
    st = (cond * uncond).sum() / (uncond * uncond).sum()
    guided = st * uncond + 4 * (cond - st * uncond)
    [(a, s), (end_a, end_s)] = [(level.a, level.s) for level in (pipe.schedule.at(1), pipe.schedule.at(0))]
    wanted = end_a * (a * noise - s * guided) + end_s * (s * noise + a * guided)
    arguments: dict[str, Any] = {"prompt": "a cat", "steps": 1, "scale": 4}
    [state] = pipe.stream(**arguments, zero_steps=0)
    assert error(state.latents, wanted) < 1e-5
    [state] = pipe.stream(**arguments, zero_steps=1)
    assert error(state.latents, (end_a * a + end_s * s) * noise) < 1e-5
    arguments["scale"] = 1  # a single branch, which it leaves as it is
    [plain], [state] = pipe.stream(**arguments), pipe.stream(**arguments, zero_steps=0)
    assert error(state.latents, plain.latents) < 1e-6


def test_dynamic_thresholding(block: Callable[[str], dict[str, Any]], pipe: Pipeline) -> None:
    block(THRESHOLD)
    plain, states = (
        list(pipe.stream("a cat", steps=3, scale=8, **options)) for options in ({}, {"limit": 1.5, "percentile": 0.9})
    )
    x0 = plain[0].x0
    s = x0.abs().quantile(0.9).clamp(min=1.5)
    assert s > 1.5
    assert error(states[0].x0, x0.clamp(-s, s) * 1.5 / s) < 1e-4
    assert all(state.x0.abs().max() <= 1.5 + 1e-4 for state in states)
    assert {"limit", "percentile"} <= FEATURES.keys()


def test_perturbed_attention(block: Callable[[str], dict[str, Any]], pipe: Pipeline) -> None:
    """Ahn et al. 2024, eq. 16, with classifier-free guidance and without: a step of DDIM from v, by three calls."""
    block(PERTURBED)
    noise, t = pipe.noise(), torch.tensor([1.0])
    identity = pipe.with_attention(lambda q, k, v: v, "output_blocks.1.*attn1")
    context = pipe.encode_prompt("a cat")["context"]
    with torch.no_grad():
        uncond, cond = (pipe.unet(noise, t, text) for text in (pipe.encode_prompt("")["context"], context))
        perturbed = identity.unet(noise, t, context)
    assert error(perturbed, cond) > 1e-3
    [(a, s), (end_a, end_s)] = [(level.a, level.s) for level in (pipe.schedule.at(1), pipe.schedule.at(0))]
    for scale, guided in (
        (4, uncond + 4 * (cond - uncond) + 1.5 * (cond - perturbed)),
        (1, cond + 1.5 * (cond - perturbed)),
    ):
        wanted = end_a * (a * noise - s * guided) + end_s * (s * noise + a * guided)
        [state] = pipe.stream("a cat", steps=1, scale=scale, pag_scale=1.5)
        assert error(state.latents, wanted) < 1e-5
    batch = pipe.stream("a cat", steps=1, batch_size=2, pag_scale=1.5)
    assert next(batch).latents.shape[0] == 2


def test_prompt_to_prompt(block: Callable[[str], dict[str, Any]], pipe: Pipeline) -> None:
    """The same by two runs, as the authors do it: the maps of the first are put into the second."""
    block(PROMPT_TO_PROMPT)
    recorded, replayed = list[Any](), 0

    def record(q: Any, k: Any, v: Any) -> Any:
        recorded.append((q @ k.mT / q.shape[-1] ** 0.5).softmax(dim=-1))
        return recorded[-1] @ v

    def replay(q: Any, k: Any, v: Any) -> Any:
        nonlocal replayed
        maps, replayed = recorded[replayed], replayed + 1
        return (maps if replayed <= len(recorded) // 2 else (q @ k.mT / q.shape[-1] ** 0.5).softmax(dim=-1)) @ v

    options: dict[str, Any] = {"steps": 4, "sampler": "euler"}
    *_, first = pipe.with_attention(record).stream("a red apple", seed=7, **options)
    *_, second = pipe.with_attention(replay).stream("a green pear", seed=7, **options)
    prompts = ["a red apple", "a green pear"]
    *_, both = pipe.stream(prompts, seed=[7, 7], batch_size=2, same_layout=0.5, **options)
    assert error(both.latents[:1], first.latents) < 1e-4
    assert error(both.latents[1:], second.latents) < 1e-4
    *_, alone = pipe.stream("a green pear", seed=7, **options)
    assert error(alone.latents, second.latents) > 0.1
    assert error(second.latents, first.latents) < error(alone.latents, first.latents)


def test_one_more_prompt_as_a_branch(block: Callable[[str], dict[str, Any]], pipe: Pipeline) -> None:
    """With guidance and without: a step of DDIM from v, by three calls."""
    block(AWAY)
    noise, t = pipe.noise(), torch.tensor([1.0])
    with torch.no_grad():
        uncond, cond, away = (
            pipe.unet(noise, t, pipe.encode_prompt(text)["context"]) for text in ("", "a cat", "a dog")
        )
    [(a, s), (end_a, end_s)] = [(level.a, level.s) for level in (pipe.schedule.at(1), pipe.schedule.at(0))]
    for scale, guided in (
        (4, uncond + 4 * (cond - uncond) - 2 * (away - uncond)),
        (1, cond - 0.5 * (away - cond)),
    ):
        wanted = end_a * (a * noise - s * guided) + end_s * (s * noise + a * guided)
        [state] = pipe.stream("a cat", steps=1, scale=scale, away_from="a dog")
        assert error(state.latents, wanted) < 1e-5


def test_previews_and_maps(block: Callable[[str], dict[str, Any]]) -> None:
    names = block(PREVIEWS)
    assert len(names["maps"]) == 8
    torch.testing.assert_close(names["maps"][0].sum(dim=-1), torch.ones(1, 256))
    places = np.asarray(Image.open("attention.png").resize((16, 16)), dtype=float)
    border = np.concatenate([places[0], places[-1], places[:, 0], places[:, -1]])
    assert places[6:10, 6:10].mean() > 5 * border.mean()  # the apple is in the middle
    first, late, last = (np.asarray(Image.open(f"step-{step}.png"), dtype=float) for step in (1, 6, 8))
    assert error(late, last) < 0.5 * error(first, last)


def test_training(block: Callable[[str], dict[str, Any]], pipe: Pipeline) -> None:
    torch.manual_seed(0)
    names = block(TRAINING)
    saved, trained = load("mine.safetensors", device="cpu"), names["pipe"]
    for key, value in trained.unet.state_dict().items():
        assert torch.equal(saved.unet.state_dict()[key], value.cpu())
    x0, cond = names["x0"].cpu(), pipe.encode_prompt("my apple")
    eps = torch.randn(4, *x0.shape[1:], generator=torch.manual_seed(1))
    t = torch.tensor([900, 700, 500, 300])
    noised, target = (f(x0.expand(4, -1, -1, -1), eps, t) for f in (pipe.schedule.noised, pipe.schedule.target))
    with torch.no_grad():
        before, after = (
            float((model.unet(noised, t, cond["context"].expand(4, -1, -1)) - target).square().mean())
            for model in (pipe, saved)
        )
    assert after < 0.9 * before
