"""The settings of a job as a picture's text names them."""

import dataclasses
from typing import Any

from ldm_lite.checkpoint.model import Model
from ldm_lite.cli.task_options import HiresOptions, Txt2imgOptions
from ldm_lite.cli.version import __version__
from ldm_lite.diffusion.names import resolve, written
from ldm_lite.diffusion.plan import Plan
from ldm_lite.diffusion.webui import calls_per_step
from ldm_lite.runtime.compile import is_compiled
from ldm_lite.runtime.seamless import AXES, seamless
from ldm_lite.text.schedule import Calls
from ldm_lite.zoo.family import SkipLayers


def sampler_of(model: Model, options: Txt2imgOptions) -> str:
    """Return the sampler of the options, or the family's."""
    return model.family.sampler if options.sampler is None else options.sampler


def check_hires(options: Txt2imgOptions) -> None:
    """Raises ValueError for a second pass in other tasks than txt2img, and for its options without it."""
    if options.hires is not None and type(options) is not Txt2imgOptions:
        raise ValueError("`hires` is an option of txt2img: leave it out")
    changed = [each.name for each in dataclasses.fields(HiresOptions) if getattr(options, each.name) != each.default]
    if options.hires is None and changed:
        raise ValueError(f"`{changed[0]}` is of a second pass: give `hires=2`, how many times the image is enlarged")
    if options.hires_sampler is not None:
        resolve(options.hires_sampler)


def with_seamless(model: Model, options: Txt2imgOptions) -> Model:
    """Return the model that makes the images of the options: with circular convolutions for `seamless`.

    Raises ValueError for another axis than AXES, and for what it does not go with.
    """
    if options.seamless is None:
        return model
    if options.seamless not in AXES:
        raise ValueError(f"got `seamless` {options.seamless!r}, wanted one of {', '.join(AXES)}")
    for name in ("compat", "refiner"):
        if getattr(options, name):
            raise ValueError(f"`seamless` does not go with `{name}`: leave one of them out")
    if model.offloader is not None or is_compiled(model.step):
        raise ValueError("`seamless` runs other convolutions: leave out `offload`, `storage`, `compile` and `compiled`")
    unet, vae = (seamless(network, options.seamless) for network in (model.unet, model.vae))
    return dataclasses.replace(model, unet=unet, vae=vae)


def calls_of(model: Model, options: Txt2imgOptions, plan: Plan | None) -> Calls:
    """Return the calls of the network that prompts count: as in A1111 those of all steps, whatever the strength."""
    if plan is None or options.plan is not None:
        return Calls(1 if plan is None else len(plan.t))
    steps = model.family.steps if options.steps is None else options.steps
    key = resolve(sampler_of(model, options))[0]
    each = calls_per_step(key) or max(1, round(len(plan.t) / plan.num_steps))
    return Calls(steps * each)


def skip_of(model: Model, options: Txt2imgOptions) -> SkipLayers | None:
    """Return the family's skip-layer guidance, with the options' scale.  Raises ValueError if it has none."""
    skip = model.family.skip_layers
    if options.skip_layer_scale is None:
        return skip
    if skip is None:
        raise ValueError(f"{model.family.title} has no skip-layer guidance: leave out `skip_layer_scale`")
    return dataclasses.replace(skip, scale=options.skip_layer_scale) if options.skip_layer_scale else None


def settings_of(
    model: Model,
    options: Txt2imgOptions,
    plan: Plan | None,
    refiner: tuple[Model, int] | None,
    image_scale: float | None,
) -> dict[str, object]:
    """Return the settings of a whole job for its pictures' text, by their names there.

    refiner is the loaded one and its first step; image_scale is that of three-way guidance.
    """
    scale = model.family.scale if options.scale is None else options.scale
    scale = scale if options.guidance is None else options.guidance
    settings: dict[str, object] = {
        "Steps": _steps_written(model, options, plan),
        "Sampler": "custom plan",
        "CFG scale": "a function" if callable(options.guidance) else scale,
        "Model": model.name,
        "Image CFG scale": image_scale,
        "Control": " ".join(map(str, options.control)) or None,
    }
    for each in dataclasses.fields(options):
        value = getattr(options, each.name)
        if (name := each.metadata["png"]) is not None and value != each.default:
            settings[name] = _as_text(each.name, value)
    if options.plan is None:
        spacing = "original" if options.compat else _spacing_of(model, options)
        settings |= written(sampler_of(model, options), spacing, not model.schedule.is_flow)
        if settings["Sampler"] in ("DDIM", "DDIM CFG++") and "Eta" in settings:
            settings["Eta DDIM"] = settings.pop("Eta")  # its name in A1111
    if refiner is not None:
        settings |= {"Refiner": refiner[0].name, "Refiner from step": refiner[1] + 1}
    return settings | {"Version": f"ldm_lite {__version__}"}


def _spacing_of(model: Model, options: Txt2imgOptions) -> Any:
    """The spacing of the options, or that of a rectified flow, which replaces the sampler's own."""
    named = resolve(sampler_of(model, options))[1]
    return (
        model.schedule.spacing
        if options.spacing is None and named is None and model.schedule.is_flow
        else options.spacing
    )


def _steps_written(model: Model, options: Txt2imgOptions, plan: Plan | None) -> int:
    """The steps that were asked for, which some of A1111's timesteps do not have; of an image's, those that ran."""
    if plan is None or options.plan is not None or type(options) is not Txt2imgOptions:
        return 0 if plan is None else plan.num_steps
    return model.family.steps if options.steps is None else options.steps


def _as_text(name: str, value: Any) -> object:
    """Format an option's value for a PNG's text."""
    if name == "seamless" and value == "xy":
        return True  # A1111's only one
    if not isinstance(value, tuple):
        return value
    return f"{value[0]},{value[1]}" if name == "crop_top_left" else f"{value[0]}x{value[1]}"
