"""A1111's names: for every sampler and schedule type that it offers, its levels and its result, in float64."""

import itertools
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import pytest
import torch
import toy
from plan_runner import Array, run, toy_model
from runs import run_latents, unet_calls

from ldm_lite import Pipeline
from ldm_lite.diffusion.names import resolve, written
from ldm_lite.diffusion.plan import Plan
from ldm_lite.diffusion.samplers import SAMPLERS
from ldm_lite.diffusion.schedule import SPACINGS, spaced_levels
from ldm_lite.diffusion.spacings import SECTIONS
from ldm_lite.diffusion.webui import OFFERED, SCHEDULE_TYPES, SETTINGS, from_webui, to_webui

GOLDEN = np.load(Path(__file__).parents[1] / "data" / "webui.npz")
ENDS = np.cumsum(GOLDEN["lengths"])
RUNS = {str(key): i for i, key in enumerate(GOLDEN["keys"])}
CASES = sorted({tuple(key.split("|")[:2]) for key in RUNS if not key.startswith(("DPM adaptive", "TCD", "LCM|Turbo"))})


def plan_of(sd: Pipeline, key: str, sampler: str | None = None, spacing: str | None = None) -> Plan:
    """The plan of a golden, by default of A1111's name for it."""
    name, kind, steps, *more = key.split("|")
    named = f"webui {name}" + (f" {kind}" if kind != "Automatic" else "")
    eta = float(more[0].removeprefix("eta ")) if more else None
    return sd.plan(named if sampler is None else sampler, int(steps), spacing=spacing, eta=eta)


def check(plan: Plan, key: str, prediction: Callable[[Array, float], Array]) -> None:
    """That a sampler here sees the levels of the golden, and has its result."""
    name = key.partition("|")[0]
    noises = iter(toy.noises(400))
    end = run(plan, prediction, next(noises) * plan.initial, noises)[-1].flatten()
    theirs = GOLDEN["levels"][ENDS[RUNS[key]] - GOLDEN["lengths"][RUNS[key]] : ENDS[RUNS[key]]]
    ours = plan.t if name in ("DDIM", "PLMS", "UniPC", "TCD") else plan.level[:, 1] / plan.level[:, 0]
    assert ours == pytest.approx(theirs, rel=1e-9, abs=1e-9), key
    wanted = GOLDEN["results"][RUNS[key]]
    assert end[:: len(end) // len(wanted)][: len(wanted)] == pytest.approx(wanted, rel=1e-9, abs=1e-9), key


@pytest.mark.parametrize(
    ("name", "kind"),
    [pytest.param(*case, id=": ".join(case), marks=[pytest.mark.slow] * (i % 4 > 0)) for i, case in enumerate(CASES)],
)
def test_its_names_make_its_trajectory(sd: Pipeline, name: str, kind: str) -> None:
    for key in (key for key in RUNS if key.startswith(f"{name}|{kind}|")):
        check(plan_of(sd, key), key, toy_model(None))


@pytest.mark.parametrize("key", [key for key in RUNS if key.startswith("DPM adaptive")][::5])
def test_dpm_adaptive_chooses_the_same_steps(sd: Pipeline, key: str) -> None:
    """The web UI has one step for the batch, so that it is a single latent here."""
    plan, shape, seen = plan_of(sd, key), (1, -1, *toy.SHAPE[2:]), list[float]()

    def some_calls(part: Plan, x: torch.Tensor, done: float) -> list[torch.Tensor]:
        assert 0 <= done < 1
        seen.extend(part.level[:, 1] / part.level[:, 0])
        outs: list[torch.Tensor] = []

        def model(y: Array, t: float) -> Array:
            outs.append(toy.denoiser(torch.from_numpy(y), torch.tensor([t], dtype=torch.float64)))
            return outs[-1].numpy()

        end = run(part, model, x.numpy(), iter(()))[-1]
        return [outs[0], outs[1], torch.from_numpy(end)]

    noises = (torch.from_numpy(noise).reshape(shape) for noise in toy.noises(400))
    *_, (end, done) = plan.adaptive.solve(next(noises) * plan.initial, some_calls, noises.__next__)
    assert done == 1
    assert seen == pytest.approx(GOLDEN["levels"][ENDS[RUNS[key]] - GOLDEN["lengths"][RUNS[key]] : ENDS[RUNS[key]]])
    flat, wanted = end.flatten().numpy(), GOLDEN["results"][RUNS[key]]
    assert flat[:: len(flat) // len(wanted)][: len(wanted)] == pytest.approx(wanted, rel=1e-9, abs=1e-9)


def test_all_that_it_offers_is_here() -> None:
    theirs = {key.split("|")[0] for key in RUNS} - {"TCD"}
    assert theirs | {"DDIM CFG++"} == set(OFFERED)
    assert set(GOLDEN["types"].tolist()) == {"Automatic", *SCHEDULE_TYPES}
    assert {sampler.key for sampler in OFFERED.values()} <= set(SAMPLERS)
    assert set(SCHEDULE_TYPES.values()) <= set(SPACINGS)


@pytest.mark.parametrize("key", [key for key in RUNS if key.startswith("TCD")])
def test_tcd_is_that_of_diffusers(sd: Pipeline, key: str) -> None:
    check(plan_of(sd, key, "tcd", "lcm"), key, toy_model(None))


@pytest.mark.parametrize("eta", [0.0, 0.4])
@pytest.mark.parametrize("prediction", ["eps", "v", "x0"])
def test_ddim_cfg_plus_plus(predicting: Callable[..., Pipeline], prediction: str, eta: float) -> None:
    """The guided x0, with scale / 12.5, and the unguided noise: the formula of the paper, for every prediction."""
    pipe, scale, steps = predicting(prediction), 7.0, 12
    draw, options = pipe.noise_source(3), {"sampler": "webui DDIM CFG++", "steps": steps, "eta": eta, "seed": 3}
    with unet_calls(pipe) as calls:
        last = run_latents(pipe, "a cat", negative_prompt="bad", scale=scale, **options)
    draw()
    levels, after_steps = spaced_levels("webui_ddim", pipe.schedule, steps), [*(call.x[:1] for call in calls[1:]), last]
    for (now, after), call, wanted in zip(itertools.pairwise(levels), calls, after_steps, strict=True):
        x, x0s, noises = call.x[:1], [], []
        for out in call.out.chunk(2):  # uncond, cond
            x0 = {"eps": (x - now.s * out) / now.a, "v": now.a * x - now.s * out, "x0": out}[prediction]
            x0s.append(x0)
            noises.append((x - now.a * x0) / now.s)
        sigma = eta * after.s / now.s * np.sqrt(1 - (now.a / after.a) ** 2)
        x0 = x0s[0] + scale / 12.5 * (x0s[1] - x0s[0])
        ours = after.a * x0 + np.sqrt(after.s**2 - sigma**2) * noises[0]
        ours = ours + sigma * draw() if eta else ours
        assert toy.relative_error(wanted, ours.double().numpy()) < 1e-4
    with pytest.raises(ValueError, match="use 500 steps or less"):
        pipe.txt2img("a cat", sampler="webui DDIM CFG++", steps=600)


@pytest.mark.parametrize(
    ("name", "settings", "wanted"),
    [
        ("DPM++ 2M", {}, ("dpmpp_2m", "linspace")),  # before 1.9
        ("DPM++ 2M", {"Version": "v1.8.0"}, ("dpmpp_2m", "linspace")),
        ("DPM++ 2M", {"Version": "v1.9.4"}, ("dpmpp_2m", "karras")),
        ("DPM++ 2M", {"Version": "v1.10.1-23-gabc"}, ("dpmpp_2m", "karras")),
        ("DPM++ 2M Karras", {}, ("dpmpp_2m", "karras")),
        ("DPM++ 2M SDE Heun Exponential", {}, ("dpmpp_2m_sde_heun", "exponential")),
        ("DPM2 a Karras", {"Version": "v1.6.0"}, ("dpm2_a", "karras:discard")),
        ("DPM2", {}, ("dpm2", "linspace:discard")),
        ("Restart", {"Version": "v1.6.0"}, ("restart", "karras")),
        ("Euler a", {"Schedule type": "karras"}, ("euler_a", "karras")),  # 1.6 to 1.8
        ("Euler", {"Schedule type": "SGMUniform"}, ("euler", "sgm_uniform")),
        ("Euler a", {"Schedule type": "Automatic"}, ("euler_a", "linspace")),
        ("UniPC", {"Schedule type": "Karras"}, ("unipc_bh1", "webui_unipc")),
        ("DDIM", {"Schedule type": "Beta"}, ("ddim", "webui_ddim")),
        ("Euler", {"Schedule type": "Karras", "Schedule rho": "5"}, ("euler", "karras:rho=5")),
        ("Euler", {"Schedule type": "Uniform", "Schedule rho": "5"}, ("euler", "linspace")),
        (
            "Heun",
            {"Schedule type": "KL Optimal", "Schedule min sigma": "0.1", "Schedule max sigma": "10"},
            ("heun", "kl_optimal:sigma_min=0.1:sigma_max=10"),
        ),
        ("Euler", {"Schedule type": "Beta", "Beta schedule alpha": "0.5"}, ("euler", "beta_sigma:alpha=0.5")),
        ("LMS", {"Discard penultimate sigma": "True"}, ("lms", "linspace:discard")),
    ],
)
def test_what_texts_of_all_versions_mean(name: str, settings: Mapping[str, str], wanted: tuple[str, str]) -> None:
    assert from_webui(name, settings) == wanted


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("Euler b", {}, "unknown sampler 'Euler b': expected one of DPM"),
        ("Euler", {"Schedule type": "Cubic"}, "unknown schedule type 'cubic': expected one of Uniform"),
        ("", {}, "unknown sampler ''"),
        ("LCM", {"Schedule type": "Turbo"}, "unknown schedule type 'Turbo' of LCM"),
    ],
)
def test_unknown_names(name: str, settings: Mapping[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        from_webui(name, settings)


def test_what_is_written_means_the_same_to_it() -> None:
    """Every sampler with every spacing: its text names A1111's own trajectory, or nothing that A1111 knows."""
    spacings = [name for name in SPACINGS if name not in SECTIONS]
    known = set()
    for key, spacing, more in itertools.product(SAMPLERS, spacings, ("", ":discard", ":rho=5:sigma_min=0.1:discard")):
        if "rho" in more and spacing not in ("karras", "polyexponential"):
            continue
        text = written(key, spacing + more)
        if text["Sampler"] in OFFERED:
            assert from_webui(text["Sampler"], text) == (key, spacing + more)
            known.add(text["Sampler"])
        else:
            with pytest.raises(ValueError, match="unknown sampler"):
                from_webui(text["Sampler"], text)
            assert resolve(text["Sampler"])[0] == key
            assert text["Schedule type"] == spacing + more
    assert known == set(OFFERED)
    for name, offered in OFFERED.items():
        assert written(f"webui {name}", None)["Sampler"] == name
        assert offered.key in SAMPLERS


def test_plain_names_that_mean_something_else_to_it_are_marked() -> None:
    assert written("DPM2 Karras", None) == {"Sampler": "DPM2 (ldm_lite)", "Schedule type": "karras"}
    assert written("DPM2 karras:discard", None) == {"Sampler": "DPM2", "Schedule type": "Karras"}
    assert written("webui DPM2 Karras", None) == {"Sampler": "DPM2", "Schedule type": "Karras"}
    assert written("ddim", None) == {"Sampler": "DDIM (ldm_lite)", "Schedule type": "leading"}
    assert written("unipc", None) == {"Sampler": "UniPC (ldm_lite)", "Schedule type": "linspace"}
    assert written("LCM", None) == {"Sampler": "LCM (ldm_lite)", "Schedule type": "lcm"}
    assert written("Euler Beta", None) == {"Sampler": "Euler (ldm_lite)", "Schedule type": "beta"}
    assert written("DPM++ 2M", None) == {"Sampler": "DPM++ 2M", "Schedule type": "Uniform"}
    assert written("deis karras", None) == {"Sampler": "DEIS Karras"}
    assert to_webui("euler", "ays_sdxl") is None
    assert written("euler", spaced_levels)["Schedule type"] == "spaced_levels"


SENSELESS = "karras:rho=0 karras:rho=x karras:rho=nan karras:rho=1e-9 karras:sigma_min=-1 karras:sigma_min=20 karras:"
SENSELESS += " karras:beta=1 karras:what karras:steps=3 linspace:rho=3 nothing:discard beta_sigma:alpha=-1"
SENSELESS += " beta_sigma:alpha=1e9"


@pytest.mark.parametrize("spacing", SENSELESS.split())
def test_settings_that_make_no_sense_are_one_line(sd: Pipeline, spacing: str) -> None:
    with pytest.raises(ValueError, match=r"expected|settings"):
        spaced_levels(spacing, sd.schedule, 10)


def test_discard_leaves_out_the_last_but_one_of_one_more(sd: Pipeline) -> None:
    for steps in (1, 2, 20, 999):
        whole = spaced_levels("karras", sd.schedule, steps + 1)
        assert spaced_levels("karras:discard", sd.schedule, steps) == [*whole[:-2], whole[-1]]
    assert {setting for setting, _ in SETTINGS.values()} == {"rho", "sigma_min", "sigma_max", "alpha", "beta"}
