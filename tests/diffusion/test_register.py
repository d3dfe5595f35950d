"""User-defined samplers and spacings: registered as a user would, they work like the built-in ones."""

import functools
import itertools
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import registries
import torch

from ldm_lite import Pipeline
from ldm_lite.core import samplers as core_samplers
from ldm_lite.core import schedule as core_schedule
from ldm_lite.core.plan import device_rows
from ldm_lite.diffusion.names import named_plan
from ldm_lite.diffusion.plan import NOISE, NUM_REGISTERS, H, Plan, Rows, X
from ldm_lite.diffusion.samplers import SAMPLERS, register
from ldm_lite.diffusion.schedule import (
    CLEAN,
    SPACINGS,
    NoiseSchedule,
    scaled_linear_betas,
    spaced_levels,
)
from ldm_lite.diffusion.spacings import SECTIONS

SD = NoiseSchedule.from_betas(scaled_linear_betas(0.00085, 0.012), "eps")
CORE_SD = core_schedule.Schedule.from_betas(scaled_linear_betas(0.00085, 0.012), "eps")
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _registries_are_left_as_they_were() -> Iterator[None]:
    with registries.restored():
        yield


def resolved(sd: Pipeline, name: str, sampler: str, spacing: str | None = None) -> bool:
    """Whether a name makes the plan of a sampler with a spacing."""
    plan, wanted = sd.plan(name, 5), sd.plan(sampler, 5, spacing=spacing)
    return np.array_equal(plan.t, wanted.t) and np.array_equal(plan.mix, wanted.mix)


def label(sd: Pipeline, name: str) -> str:
    """How the text of a picture calls a sampler."""
    [result] = sd.txt2img("a", sampler=name, steps=1, height=32, width=32, scale=1.0, output="result")
    return result.parameters.split("Sampler: ")[1].split(",")[0].removesuffix(" (ldm_lite)")


def half_step(schedule: Any, steps: int, spacing: Any = "karras", eta: float = 0.0) -> Plan:
    """Euler with noise, as a user would write it."""
    rows, levels = Rows(schedule, h="x0"), spaced_levels(spacing, schedule, steps)
    for i, (now, after) in enumerate(pairwise(levels)):
        eps = (X - now.a * H) / now.s
        noise = np.sqrt(1 - eta**2) * eps + eta * NOISE if after.s > 0 else eps
        rows.add(i, now, after.a * H + after.s * noise)
    return rows.plan(end=levels[-1], initial=levels[0].s)


def test_register_returns_the_function_and_gives_it_names(sd: Pipeline) -> None:
    assert register(half_step) is half_step
    assert SAMPLERS["half_step"] is half_step
    assert list(SAMPLERS)[-1] == "half_step"
    for name in ("half_step", "Half step", "half-step", "k_half_step", "Half_StepScheduler"):
        assert resolved(sd, name, "half_step")
    assert resolved(sd, "half step exponential", "half_step", "exponential")
    assert label(sd, "half_step") == "Half step"
    assert label(sd, "half_step_exponential") == "Half step Exponential"
    with pytest.raises(ValueError, match="unknown sampler 'half_stp': did you mean half_step"):
        sd.plan("half_stp", 5)


def test_register_as_a_decorator_with_a_label_and_aliases(sd: Pipeline) -> None:
    @register(label="Mine 2M", aliases=["my-sampler", "MySampler"])
    def mine_2m(schedule: Any, steps: int, spacing: Any = "linspace") -> Plan:
        return half_step(schedule, steps, spacing)

    @register
    def plain(schedule: Any, steps: int, spacing: Any = "linspace") -> Plan:
        return half_step(schedule, steps, spacing)

    assert mine_2m(sd.schedule, 3).num_steps == plain(sd.schedule, 3).num_steps == 3
    for name in ("mine_2m", "Mine 2M", "my sampler", "mysampler"):
        assert resolved(sd, name, "mine_2m")
        assert label(sd, name + " Karras") == "Mine 2M Karras"
    assert resolved(sd, "plain", "plain")


def test_a_label_unlike_the_name_is_a_name_too(sd: Pipeline) -> None:
    register(half_step, label="Half of Euler")
    assert resolved(sd, label(sd, "half_step karras"), "half_step", "karras")


def test_an_entry_put_in_by_hand_works_too(sd: Pipeline) -> None:
    SAMPLERS["mine"] = half_step
    SAMPLERS["Other-One"] = functools.partial(half_step, spacing="trailing")
    assert (label(sd, "mine"), label(sd, "other_one karras")) == ("Mine", "Other-One Karras")
    assert np.array_equal(sd.plan("Mine", 5).mix, half_step(sd.schedule, 5).mix)
    assert np.array_equal(sd.plan("other one", 5).t, half_step(sd.schedule, 5, "trailing").t)
    with pytest.raises(ValueError, match="did you mean mine"):
        sd.plan("mime", 5)


def test_a_plan_gives_it_every_option(sd: Pipeline) -> None:
    register(half_step)
    assert np.array_equal(sd.plan("half_step", 6).t, sd.plan("euler karras", 6).t)
    assert np.array_equal(sd.plan("half step beta", 6).t, sd.plan("euler beta", 6).t)
    assert sd.plan("half_step", 6, eta=0.5).adds_noise.sum() == 5
    assert sd.plan("half_step", 6, last=2).num_steps == 2
    assert np.array_equal(sd.plan("half_step", 6, last=2).t, sd.plan("half_step", 6).t[-2:])
    with pytest.raises(ValueError, match=r"got churn 1\.0, but half_step has none"):
        sd.plan("half_step", 6, churn=1.0)
    with pytest.raises(ValueError, match=r"plms has none: leave it out, or use one of ddim, .*half_step"):
        sd.plan("plms", 6, eta=1.0)


def test_a_taken_name_is_refused_unless_it_is_to_be_replaced(sd: Pipeline) -> None:
    def heun(schedule: Any, steps: int, spacing: Any = "karras") -> Plan:
        return half_step(schedule, steps, spacing)

    def pndm(schedule: Any, steps: int, spacing: Any = "karras") -> Plan:
        return half_step(schedule, steps, spacing)

    original, order = SAMPLERS["heun"], list(SAMPLERS)
    with pytest.raises(
        ValueError, match="cannot register heun: the name 'heun' is taken by heun; replace=True replaces it"
    ):
        register(heun)
    assert SAMPLERS["heun"] is original
    register(heun, replace=True)
    assert SAMPLERS["heun"] is heun
    assert list(SAMPLERS) == order
    assert label(sd, "heundiscrete") == "Heun"  # its other names stay
    register(heun, label="Heun", aliases=["heundiscrete"], replace=True)
    with pytest.raises(ValueError, match="cannot register pndm: the name 'pndm' is taken by plms; replace=True"):
        register(pndm)
    register(pndm, replace=True)
    assert np.array_equal(sd.plan("pndm", 5).mix, half_step(sd.schedule, 5).mix)
    assert not resolved(sd, "plms", "pndm")
    with pytest.raises(
        ValueError, match="cannot register half_step: the name 'euler' is taken by euler; choose another"
    ):
        register(half_step, aliases=["Euler"])
    with pytest.raises(
        ValueError, match="cannot register half_step: the name 'euler_a' is taken by euler_a; choose another"
    ):
        register(half_step, label="Euler a", replace=True)
    assert "half_step" not in SAMPLERS


def no_spacing(schedule: Any, steps: int) -> Plan:
    return SAMPLERS["euler"](schedule, steps)


def required_spacing(schedule: Any, steps: int, spacing: str) -> Plan:
    return SAMPLERS["euler"](schedule, steps, spacing)


def more(schedule: Any, steps: int, order: int, spacing: str = "karras") -> Plan:
    return SAMPLERS["euler"](schedule, steps, spacing)


def anything(*args: Any, **kwargs: Any) -> Plan:
    return SAMPLERS["euler"](*args, **kwargs)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (no_spacing, r"sampler no_spacing\(schedule, steps\): got an unexpected keyword argument 'spacing'; expected"),
        (required_spacing, r"sampler required_spacing\(schedule, steps, spacing\): `spacing` has no default; expected"),
        (more, r"sampler more\(schedule, steps, order, spacing\): missing a required argument: 'order'; expected"),
        (anything, r"sampler anything\(args, kwargs\): `spacing` has no default; expected"),
    ],
)
def test_a_function_that_is_no_sampler_is_refused(sd: Pipeline, function: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        register(function)
    assert function.__name__ not in SAMPLERS
    SAMPLERS["mine"] = function
    with pytest.raises(ValueError, match=message):
        sd.plan("mine", 5)


def test_a_function_without_a_name_is_refused(sd: Pipeline) -> None:
    for nameless in (
        lambda schedule, steps, spacing="karras": half_step(schedule, steps),
        functools.partial(half_step),
    ):
        with pytest.raises(ValueError, match="this sampler has no name: write it with def"):
            register(nameless)


def test_parameters_of_its_own_keep_their_defaults(sd: Pipeline) -> None:
    @register
    def thresholded(schedule: Any, steps: int, spacing: Any = "karras", power: float = 2.0) -> Plan:
        return half_step(schedule, steps, spacing, eta=1 / power)

    assert np.array_equal(sd.plan("thresholded", 5).mix, half_step(sd.schedule, 5, eta=0.5).mix)


# ---- one table, of the core and of the package ----------------------------------------------------------------------


def test_a_sampler_of_the_core_works_in_the_package(sd: Pipeline) -> None:
    core_samplers.sampler(half_step)
    assert np.array_equal(named_plan("Half Step Karras", SD, 5).mix, half_step(SD, 5).mix)
    assert named_plan("half step", SD, 5, eta=0.5, spacing="karras:rho=5:discard").adds_noise.sum() == 4
    assert label(sd, "half_step") == "Half step"


def test_a_sampler_and_a_spacing_of_the_package_work_in_the_core() -> None:
    register(half_step)
    SPACINGS["quadratic"] = quadratic
    theirs = core_samplers.make_plan("half_step_quadratic", CORE_SD, 5, eta=0.5)
    assert np.array_equal(theirs.mix, named_plan("half_step", SD, 5, spacing=quadratic, eta=0.5).mix)


@pytest.mark.parametrize("name", SAMPLERS)
def test_every_sampler_and_spacing_take_a_schedule_of_the_core(name: str) -> None:
    for spacing in (None, *SPACINGS):
        if spacing not in ("flow", "flow_by_steps", "flow_sd3"):
            steps = sum(SECTIONS.get(spacing or "", (10,)))
            ours, theirs = (named_plan(name, schedule, steps, spacing=spacing) for schedule in (SD, CORE_SD))
            for column in ("t", "level", "h_of_out", "x0_of_out", "mix", "step", "adds_noise", "remembers", "initial"):
                assert np.array_equal(getattr(ours, column), getattr(theirs, column)), (spacing, column)


@pytest.mark.parametrize("name", ["ddim", "plms", "euler", "euler_a", "dpmpp_2m"])
def test_what_replaces_a_sampler_of_the_core_makes_its_rows(name: str) -> None:
    """As the network reads them, in float32."""
    for spacing, steps in itertools.product(("leading", "trailing", "linspace", "karras"), (1, 2, 7, 50)):
        theirs = getattr(core_samplers, name)(CORE_SD, steps, spacing)
        ours = named_plan(name, SD, steps, spacing=spacing)
        for row, wanted in zip(device_rows(ours, CPU), device_rows(theirs, CPU), strict=True):
            assert all(torch.equal(*pair) for pair in zip(row, wanted, strict=True))


# ---- spacings -------------------------------------------------------------------------------------------------------


def quadratic(schedule: Any, steps: int) -> list[Any]:
    """Timesteps evenly spaced in their square roots."""
    ts = np.linspace(np.sqrt(999), 0, steps, endpoint=False) ** 2
    return [*(schedule.between(float(t)) for t in ts), CLEAN]


def test_a_spacing_of_your_own(sd: Pipeline) -> None:
    wanted = [level.t for level in quadratic(sd.schedule, 7)[:-1]]
    assert sd.plan("heun", 7, spacing=quadratic).t[::2].tolist() == wanted
    with pytest.raises(ValueError, match="unknown spacing 'quadratic': expected one of leading"):
        sd.plan("heun", 7, spacing="quadratic")
    SPACINGS["quadratic"] = quadratic
    assert sd.plan("heun", 7, spacing="quadratic").t[::2].tolist() == wanted
    assert sd.plan("Heun Quadratic", 7).t[::2].tolist() == wanted
    assert sd.plan("ddim", 7, spacing="quadratic", last=3).t.tolist() == wanted[-3:]
    SPACINGS["Even-ly"] = SPACINGS["linspace"]
    assert resolved(sd, "dpmpp_2m even ly", "dpmpp_2m", "linspace")
    with pytest.raises(ValueError, match=r"expected one of leading, .*quadratic, Even-ly"):
        sd.plan("heun", 7, spacing="cubic")


def test_a_spacing_as_a_samplers_default(sd: Pipeline) -> None:
    @register
    def squared(schedule: Any, steps: int, spacing: Any = quadratic) -> Plan:
        return half_step(schedule, steps, spacing)

    wanted = [level.t for level in quadratic(sd.schedule, 7)[:-1]]
    assert sd.plan("squared", 7).t.tolist() == wanted
    assert sd.plan("squared", 7, last=2).t.tolist() == wanted[-2:]


# ---- from end to end ------------------------------------------------------------------------------------------------


def sample(pipe: Pipeline, sampler: str, **options: Any) -> tuple[np.ndarray[Any, Any], str]:
    """The pixels and the PNG text of an image with three steps."""
    [result] = pipe.txt2img("a red apple", steps=3, seed=1, sampler=sampler, output="result", **options)
    return result.array, result.parameters


def test_images_with_a_sampler_of_your_own(bundled: Pipeline) -> None:
    register(half_step, label="Half Step")
    SAMPLERS["mine"] = half_step
    SPACINGS["quadratic"] = quadratic
    pixels, text = sample(bundled, "Half Step Karras")
    wanted, _ = sample(bundled, "euler karras")  # the same update with eta 0
    assert abs(pixels.astype(int) - wanted).max() <= 1
    assert "Sampler: Half Step Karras," in text
    pixels, text = sample(bundled, "mine")
    assert abs(pixels.astype(int) - wanted).max() <= 1
    assert "Sampler: Mine," in text
    pixels, text = sample(bundled, "mine", spacing="quadratic")
    assert abs(pixels.astype(int) - wanted).max() > 1
    assert "Schedule type: quadratic" in text


def run(pipe: Pipeline, plan: Plan) -> torch.Tensor:
    """The last latents of a plan, without a prompt."""
    return pipe.denoise(pipe.noise(3), torch.zeros(1, 77, pipe.family.unet.context_dim), None, plan)


def test_a_plan_without_rows(bundled: Pipeline) -> None:
    """Every field of the table filled in by hand, for DDIM's update: x' = s'/s x + (a' - a s'/s) x0."""
    levels = [*(bundled.schedule.at(t) for t in (999, 600, 200)), CLEAN]
    to_x0 = np.array([bundled.schedule.coefficients("x0", level) for level in levels[:-1]])
    mix = np.zeros((3, NUM_REGISTERS, NUM_REGISTERS + 2))
    for i, (now, after) in enumerate(pairwise(levels)):
        mix[i, 0, 0] = after.s / now.s
        mix[i, 0, NUM_REGISTERS] = after.a - now.a * after.s / now.s
    plan = Plan(
        t=np.array([999.0, 600.0, 200.0]),
        level=np.array([(level.a, level.s) for level in levels[:-1]]),
        h_of_out=to_x0,
        x0_of_out=to_x0,
        mix=mix,
        step=np.arange(3),
        adds_noise=np.zeros(3, dtype=bool),
        remembers=np.zeros(3, dtype=bool),
        initial=1.0,
        end=CLEAN,
    )
    wanted = bundled.plan("ddim", 3, spacing=lambda schedule, steps: levels)
    assert torch.allclose(run(bundled, plan), run(bundled, wanted), atol=1e-4)
