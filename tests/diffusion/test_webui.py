"""A1111's names: for every sampler and schedule type that it offers, its levels and its result, in float64."""

import itertools
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import pytest
import torch
import toy
from plan_runner import run, toy_model

from ldm_lite.diffusion.guidance import cfg_plus_plus
from ldm_lite.diffusion.names import make_plan, resolve, written
from ldm_lite.diffusion.plan import Plan
from ldm_lite.diffusion.samplers import SAMPLERS
from ldm_lite.diffusion.schedule import SPACINGS, Array, Schedule, levels_of, scaled_linear_betas
from ldm_lite.diffusion.spacings import SECTIONS
from ldm_lite.diffusion.webui import OFFERED, SETTINGS, TYPES, from_webui, to_webui

SD = Schedule.from_betas(scaled_linear_betas(0.00085, 0.012), "eps")
GOLDEN = np.load(Path(__file__).parents[1] / "data" / "webui.npz")
ENDS = np.cumsum(GOLDEN["lengths"])
RUNS = {str(key): i for i, key in enumerate(GOLDEN["keys"])}
CASES = sorted({tuple(key.split("|")[:2]) for key in RUNS if not key.startswith(("DPM adaptive", "TCD", "LCM|Turbo"))})


def check(sampler: str, spacing: str, key: str, prediction: Callable[[Array, float], Array]) -> None:
    """That a sampler here sees the levels of the golden, and has its result."""
    name, _, steps, *more = key.split("|")
    eta = float(more[0].removeprefix("eta ")) if more else None
    plan = make_plan(sampler, SD, int(steps), spacing=spacing, eta=eta)
    noises = iter(toy.noises(400))
    end = run(plan, prediction, next(noises) * plan.initial, noises)[-1].flatten()
    theirs = GOLDEN["levels"][ENDS[RUNS[key]] - GOLDEN["lengths"][RUNS[key]] : ENDS[RUNS[key]]]
    ours = plan.t if name in ("DDIM", "PLMS", "UniPC", "TCD") else plan.level[:, 1] / plan.level[:, 0]
    assert ours == pytest.approx(theirs, rel=1e-9, abs=1e-9), key
    wanted = GOLDEN["results"][RUNS[key]]
    assert end[:: len(end) // len(wanted)][: len(wanted)] == pytest.approx(wanted, rel=1e-9, abs=1e-9), key


@pytest.mark.parametrize(
    ("name", "kind"),
    [pytest.param(*each, id=": ".join(each), marks=[pytest.mark.slow] * (i % 4 > 0)) for i, each in enumerate(CASES)],
)
def test_its_names_make_its_trajectory(name: str, kind: str) -> None:
    sampler, spacing = from_webui(name, {"Schedule type": kind})
    for key in (key for key in RUNS if key.startswith(f"{name}|{kind}|")):
        check(sampler, spacing, key, toy_model(None))
    if kind != "Automatic":  # by name
        assert resolve(f"webui {name} {kind}") == (sampler, spacing)


@pytest.mark.parametrize("key", [key for key in RUNS if key.startswith("DPM adaptive")][::5])
def test_dpm_adaptive_chooses_the_same_steps(key: str) -> None:
    """The web UI has one step for the batch, so that it is a single latent here."""
    name, kind, steps = key.split("|")
    sampler, spacing = from_webui(name, {"Schedule type": kind})
    plan, shape, seen = make_plan(sampler, SD, int(steps), spacing=spacing), (1, -1, *toy.SHAPE[2:]), list[float]()

    def some_calls(part: Plan, x: torch.Tensor, done: float) -> list[torch.Tensor]:
        assert 0 <= done < 1
        seen.extend(part.level[:, 1] / part.level[:, 0])
        outs: list[torch.Tensor] = []

        def model(y: Array, t: float) -> Array:
            outs.append(toy.denoiser(torch.from_numpy(y), torch.tensor([t], dtype=torch.float64)))
            return outs[-1].numpy()

        end = run(part, model, x.numpy(), iter(()))[-1]
        return [outs[0], outs[1], torch.from_numpy(end)]

    noises = (torch.from_numpy(each).reshape(shape) for each in toy.noises(400))
    *_, (end, done) = plan.adaptive.solve(next(noises) * plan.initial, some_calls, noises.__next__)
    assert done == 1
    assert seen == pytest.approx(GOLDEN["levels"][ENDS[RUNS[key]] - GOLDEN["lengths"][RUNS[key]] : ENDS[RUNS[key]]])
    flat, wanted = end.flatten().numpy(), GOLDEN["results"][RUNS[key]]
    assert flat[:: len(flat) // len(wanted)][: len(wanted)] == pytest.approx(wanted, rel=1e-9, abs=1e-9)


def test_all_that_it_offers_is_here() -> None:
    theirs = {key.split("|")[0] for key in RUNS} - {"TCD"}
    assert theirs | {"DDIM CFG++"} == set(OFFERED)
    assert set(GOLDEN["types"].tolist()) == {"Automatic", *TYPES}
    assert {each.key for each in OFFERED.values()} <= set(SAMPLERS)
    assert set(TYPES.values()) <= set(SPACINGS)


@pytest.mark.parametrize("key", [key for key in RUNS if key.startswith("TCD")])
def test_tcd_is_that_of_diffusers(key: str) -> None:
    check("tcd", "lcm", key, toy_model(None))


@pytest.mark.parametrize("eta", [0.0, 0.4])
@pytest.mark.parametrize("prediction", ["eps", "v", "x0"])
def test_ddim_cfg_plus_plus(prediction: str, eta: float) -> None:
    """The guided x0, with scale / 12.5, and the unguided noise: the formula of the paper, for every prediction."""
    schedule, scale = Schedule(SD.alpha_bar, prediction), 7.0  # type: ignore[arg-type]
    plan = make_plan("webui DDIM CFG++", schedule, 12, eta=eta)
    guidance, contexts = cfg_plus_plus(plan, scale), [torch.from_numpy(each) for each in toy.contexts()]
    noises = toy.noises(30)

    def eps(x: Array, t: float) -> tuple[Array, Array]:
        ts = torch.full((len(x),), t, dtype=torch.float64)
        uncond, cond = (toy.denoiser(torch.from_numpy(x), ts, each).numpy() for each in contexts)
        return uncond, cond

    x, levels = noises[0], levels_of("webui_ddim", SD, 12)
    for now, after, noise in zip(levels, levels[1:], noises[1:], strict=False):
        uncond, cond = eps(x, now.t)
        x0 = (x - now.s * (uncond + scale / 12.5 * (cond - uncond))) / now.a
        sigma = eta * after.s / now.s * np.sqrt(1 - (now.a / after.a) ** 2)
        x = after.a * x0 + np.sqrt(after.s**2 - sigma**2) * uncond + sigma * noise

    steps = iter(range(plan.num_steps))

    def model(y: Array, t: float) -> Array:
        level, step = SD.at(round(t)), next(steps)
        outs = []
        for e in eps(y, t):
            x0 = (y - level.s * e) / level.a
            outs.append({"eps": e, "v": level.a * e - level.s * x0, "x0": x0}[prediction])
        return outs[0] + guidance(step) * (outs[1] - outs[0])

    assert toy.relative_error(run(plan, model, noises[0], iter(noises[1:]))[-1], x) < 1e-10
    with pytest.raises(ValueError, match="take 500 steps or less"):
        cfg_plus_plus(make_plan("webui DDIM CFG++", schedule, 600), scale)


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
        ("Euler b", {}, "unknown sampler 'Euler b': wanted one of DPM"),
        ("Euler", {"Schedule type": "Cubic"}, "unknown schedule type 'cubic': wanted one of Uniform"),
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
    assert written("euler", levels_of)["Schedule type"] == "levels_of"


SENSELESS = "karras:rho=0 karras:rho=x karras:rho=nan karras:rho=1e-9 karras:sigma_min=-1 karras:sigma_min=20 karras:"
SENSELESS += " karras:beta=1 karras:what karras:steps=3 linspace:rho=3 nothing:discard beta_sigma:alpha=-1"
SENSELESS += " beta_sigma:alpha=1e9"


@pytest.mark.parametrize("spacing", SENSELESS.split())
def test_settings_that_make_no_sense_are_one_line(spacing: str) -> None:
    with pytest.raises(ValueError, match=r"wanted|settings"):
        levels_of(spacing, SD, 10)


def test_discard_leaves_out_the_last_but_one_of_one_more() -> None:
    for steps in (1, 2, 20, 999):
        whole = levels_of("karras", SD, steps + 1)
        assert levels_of("karras:discard", SD, steps) == [*whole[:-2], whole[-1]]
    assert {setting for setting, _ in SETTINGS.values()} == {"rho", "sigma_min", "sigma_max", "alpha", "beta"}
