"""The names of samplers, and the messages of named_plan for arguments that it cannot use."""

import inspect
from typing import Any

import numpy as np
import pytest

from ldm_lite import Pipeline
from ldm_lite.core.schedule import CLEAN
from ldm_lite.diffusion.names import ALIASES, LABELS, OURS, label, resolve
from ldm_lite.diffusion.plan import Plan
from ldm_lite.diffusion.samplers import SAMPLERS
from ldm_lite.diffusion.schedule import SPACINGS


def same(plan: Plan, wanted: Plan) -> bool:
    """Whether two plans are one table."""
    return np.array_equal(plan.t, wanted.t) and np.array_equal(plan.mix, wanted.mix)


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("ddim", ("ddim", None)),
        ("DDIM", ("ddim", None)),
        ("plms", ("plms", None)),
        ("pndm", ("plms", None)),
        ("k_euler", ("euler", None)),
        ("Euler", ("euler", None)),
        ("Euler a", ("euler_a", None)),
        ("euler-ancestral", ("euler_a", None)),
        (" k_euler_a ", ("euler_a", None)),
        ("Euler a Karras", ("euler_a", "karras")),
        ("DPM++ 2M", ("dpmpp_2m", None)),
        ("DPM++ 2M Karras", ("dpmpp_2m", "karras")),
        ("dpm++ 2m karras", ("dpmpp_2m", "karras")),
        ("dpmpp_2m_karras", ("dpmpp_2m", "karras")),
        ("sample_dpmpp_2m_sde", ("dpmpp_2m_sde", None)),
        ("sample_dpm_2_ancestral", ("dpm2_a", None)),
        ("sample_euler_ancestral", ("euler_a", None)),
        ("DPM++ 2M SDE Karras", ("dpmpp_2m_sde", "karras")),
        ("DPM++ 3M SDE Exponential", ("dpmpp_3m_sde", "exponential")),
        ("DPM++ SDE Exponential", ("dpmpp_sde", "exponential")),
        ("DPM++ 2S a Karras", ("dpmpp_2s_a", "karras")),
        ("DPM2 a", ("dpm2_a", None)),
        ("Euler SGM Uniform", ("euler", "sgm_uniform")),
        ("Euler Beta", ("euler", "beta")),
        ("Euler Trailing", ("euler", "trailing")),
        ("DDIM linspace", ("ddim", "linspace")),
        ("ddpm smart27", ("ddpm", "smart27")),
        ("uni_pc", ("unipc", None)),
        ("DPMSolver++", ("dpmpp_2m", None)),
        ("DDIMScheduler", ("ddim", None)),
        ("DDPMScheduler", ("ddpm", None)),
        ("PNDMScheduler", ("plms", None)),
        ("LCMScheduler", ("lcm", None)),
        ("EulerDiscreteScheduler", ("euler", None)),
        ("EulerAncestralDiscreteScheduler", ("euler_a", None)),
        ("HeunDiscreteScheduler", ("heun", None)),
        ("KDPM2DiscreteScheduler", ("dpm2", None)),
        ("KDPM2AncestralDiscreteScheduler", ("dpm2_a", None)),
        ("LMSDiscreteScheduler", ("lms", None)),
        ("DPMSolverMultistepScheduler", ("dpmpp_2m", None)),
        ("DPMSolverSDEScheduler", ("dpmpp_sde", None)),
        ("UniPCMultistepScheduler", ("unipc", None)),
        ("DEISMultistepScheduler", ("deis", None)),
    ],
)
def test_names(sd: Pipeline, name: str, wanted: tuple[str, str | None]) -> None:
    sampler, spacing = wanted
    steps = 27 if spacing == "smart27" else 10
    assert same(sd.plan(name, steps), sd.plan(sampler, steps, spacing=spacing))


def test_every_alias_and_label_names_a_sampler() -> None:
    assert set(ALIASES.values()) <= set(SAMPLERS)
    assert not set(ALIASES) & set(SAMPLERS)
    assert set(LABELS) == set(SAMPLERS)
    for key in SAMPLERS:
        for suffix, spacing in (("", None), *(("_" + name, name) for name in SPACINGS)):
            assert resolve(label(key + suffix)) == (key, spacing)
            assert resolve(LABELS[key] + suffix.replace("_", " ")) == (key, spacing)
            assert resolve("k_" + key + suffix) == resolve("sample_" + key + suffix) == (key, spacing)
            assert resolve(label(key + suffix) + OURS) == (key, spacing)
    for alias, key in ALIASES.items():
        assert resolve(alias) == resolve(alias.upper()) == (key, None)
        assert resolve(alias + " Karras") == (key, "karras")
    assert label("k_dpmpp_2m karras") == "DPM++ 2M Karras"


@pytest.mark.parametrize(
    ("name", "near"),
    [("dpmpp_3m", "dpmpp_2m or dpmpp_3m_sde"), ("eulr", "euler"), ("DDIMM", "ddim"), ("dpmpp_2m_sd", "dpmpp_2m_sde")],
)
def test_an_unknown_name_lists_the_nearest(sd: Pipeline, name: str, near: str) -> None:
    with pytest.raises(ValueError, match=f"unknown sampler '{name}': did you mean {near}") as error:
        sd.plan(name, 10)
    assert ", ".join(SAMPLERS) in str(error.value)


def test_the_nearest_name_may_have_a_spacing(sd: Pipeline) -> None:
    with pytest.raises(ValueError, match=r"did you mean DPM\+\+ 2M Karras or "):
        sd.plan("DPM++ 2M Karas", 10)


def test_settings_behind_a_sampler_are_those_of_its_own_spacing(sd: Pipeline) -> None:
    assert resolve("heun:discard") == ("heun", "linspace:discard")
    assert sd.plan("heun:discard", 5).t.tolist() == sd.plan("heun", 5, spacing="linspace:discard").t.tolist()
    assert sd.plan("heun:discard", 5).t.tolist() != sd.plan("heun", 5).t.tolist()
    for name in ("euler:rho=5", "ddim:eta=1", "euler:"):
        with pytest.raises(ValueError, match=r"rho|eta|expected"):
            sd.plan(name, 5)


def test_an_unknown_setting_of_a_spacing_lists_its_own(sd: Pipeline) -> None:
    with pytest.raises(ValueError, match=r"its settings are discard, sigma_min=, sigma_max=, rho=$"):
        sd.plan("euler karras:pho=5", 5)


def test_a_name_like_nothing_lists_all(sd: Pipeline) -> None:
    with pytest.raises(ValueError, match=r"unknown sampler '###': expected one of ddim, plms, euler, .*ddpm, "):
        sd.plan("###", 10)


def test_the_named_spacing_is_used_unless_another_is_given(sd: Pipeline) -> None:
    karras = sd.plan("DPM++ 2M Karras", 10)
    assert np.array_equal(karras.t, sd.plan("dpmpp_2m", 10, spacing="karras").t)
    linspace = sd.plan("DPM++ 2M Karras", 10, spacing="linspace")
    assert np.array_equal(linspace.t, sd.plan("dpmpp_2m", 10).t)
    assert not np.array_equal(linspace.t, karras.t)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"steps": 0}, "got `steps` 0, expected 1 to 1000"),
        ({"steps": 1001}, "got `steps` 1001, expected 1 to 1000"),
        ({"spacing": "cubic"}, "unknown spacing 'cubic': expected one of leading"),
        ({"name": "plms", "eta": 0.5}, "got eta 0.5, but plms has none: leave it out, or use one of ddim, euler_a"),
        ({"eta": 1.5}, "got `eta` 1.5, expected 0 to 1"),
        ({"eta": float("nan")}, "got `eta` nan, expected 0 to 1"),
        ({"churn": 2.0}, "got churn 2.0, but ddim has none: leave it out, or use one of euler, heun, dpm2"),
        ({"name": "euler", "churn": 11.0}, "got churn 11.0, expected 0 to 10"),
        (
            {"spacing": lambda schedule, steps: [schedule.at(900)]},
            "expected it to return two or more Levels, the noisiest first",
        ),
        ({"spacing": lambda schedule, steps: list(range(11))}, "expected it to return two or more Levels"),
        ({"spacing": lambda schedule, steps: [CLEAN, schedule.at(9)]}, "expected it to return two or more Levels"),
    ],
)
def test_a_plan_says_what_it_wants(sd: Pipeline, arguments: dict[str, Any], message: str) -> None:
    options = {"name": "ddim", "steps": 10, **arguments}
    with pytest.raises(ValueError, match=message):
        sd.plan(options.pop("name"), **options)


def test_eta_0_is_allowed_everywhere(sd: Pipeline) -> None:
    assert np.array_equal(sd.plan("plms", 10, eta=0.0).mix, sd.plan("plms", 10).mix)
    for name in (name for name, sampler in SAMPLERS.items() if "eta" in inspect.signature(sampler).parameters):
        assert not sd.plan(name, 10, eta=0.0).adds_noise.any()
    for stochastic, deterministic in (("euler_a", "euler"), ("dpm2_a", "dpm2"), ("dpmpp_2m_sde", "dpmpp_2m")):
        assert np.allclose(sd.plan(stochastic, 10, eta=0.0).mix, sd.plan(deterministic, 10).mix)


@pytest.mark.parametrize("sampler", ["euler", "heun", "dpmpp_sde"])
def test_quantised_timesteps_are_the_nearest_in_log_sigma(sd: Pipeline, sampler: str) -> None:
    plain, whole = (sd.plan(sampler, 12, spacing=f"karras{setting}") for setting in ("", ":quantised"))
    sigmas = np.sqrt(
        (1 - sd.schedule.alpha_bar) / sd.schedule.alpha_bar
    )  # k-diffusion's CompVisDenoiser(quantize=True)
    for (a, s), t, rounded in zip(plain.level, plain.t, whole.t, strict=True):
        assert rounded == np.argmin(np.abs(np.log(s / a) - np.log(sigmas)))
        assert abs(rounded - t) <= 0.75
    assert np.array_equal(plain.mix, whole.mix)
    assert not np.array_equal(plain.t, whole.t)
    options = {"sampler": sampler, "spacing": "karras:quantised", "steps": 1, "height": 32, "width": 32}
    [result] = sd.txt2img("a", output="result", **options)
    assert "Schedule type: karras:quantised" in result.parameters.replace('"', "")
