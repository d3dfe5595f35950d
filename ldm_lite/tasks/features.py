"""Features: what changes a run, one file of ldm_lite/features each, imported when one of its options is given.

A feature of a task's options changes a run in up to three places: the options, the model, the job.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

from ldm_lite.core import features as core
from ldm_lite.core.files import imported

log = logging.getLogger("ldm_lite")
T = TypeVar("T")
U = TypeVar("U")


class Feature:
    """What changes a run; made anew for each, so that it may remember something in it."""

    is_last = False  # of those around the network: applied after the features of others

    def __init__(self) -> None:
        self._said: set[str] = set()
        self._made: dict[int, tuple[Any, Any]] = {}

    def log(self, level: int, message: str) -> None:
        """Log a message once in a run, however many images start from an input of their own."""
        if message not in self._said:
            self._said.add(message)
            log.log(level, message)

    def once(self, value: T, change: Callable[[T], U]) -> U:
        """Return what `change` makes of a value, once in a run: an encoder of prompts keeps what it has encoded."""
        if id(value) not in self._made:
            self._made[id(value)] = value, change(value)  # the value too, whose id would be another's without it
        changed: U = self._made[id(value)][1]
        return changed

    def check(self, options: Any) -> Any:
        """Return the options, perhaps changed.  Raises ValueError for those that are wrong whatever the model."""
        return options

    def change_options(self, model: Any, options: Any) -> tuple[Any, Any]:
        """Return the model and the options, before they become a job."""
        return model, options

    def change_job(self, job: Any) -> Any:
        """Return a job with some of its slots replaced: called once for each input image, and for a second pass.

        Raises ValueError, one line, for what does not fit the job.
        """
        return job

    def change_events(self, events: Any) -> Any:
        """Return the events of a run: states, and the latents of batches."""
        return events


class Entry(NamedTuple):
    """When a feature is used."""

    options: tuple[str, ...]  # if one of these is not its default
    family: str = ""  # or if the family has this
    tasks: tuple[str, ...] = ()  # or if the family's task is one of these


# In the order of application: options, model, noise, guidance, inside the network, around it.
FEATURES = {
    "ldm_lite.features.from_png:FromPng": Entry(("from_png",)),
    "ldm_lite.features.from_file:FromFile": Entry(("from_file",)),
    "ldm_lite.features.templates:Templates": Entry(("dynamic", "wildcards")),
    "ldm_lite.features.compat:Compat": Entry(("compat",)),
    "ldm_lite.features.embedding:Embedding": Entry(("embedding",)),
    "ldm_lite.features.noise:Noise": Entry(
        ("noise", "ensd", "variation_seed", "variation_strength", "fixed_code", "brownian")
    ),
    "ldm_lite.features.edited_texts:EditedPrompts": Entry(("prompt_syntax", "regions")),
    "ldm_lite.features.regions:Regions": Entry(("regions",)),
    "ldm_lite.features.depth:Depth": Entry(("depth",), tasks=("depth", "control_image")),
    "ldm_lite.features.references:References": Entry(("reference",)),
    "ldm_lite.features.guidance_schedule:GuidanceSchedule": Entry(("guidance_schedule",)),
    "ldm_lite.features.rescale:Rescale": Entry(
        ("guidance_rescale", "mimic_scale", "dynamic_threshold"), family="norm_patch"
    ),
    "ldm_lite.features.apg:AdaptiveProjectedGuidance": Entry(("apg",)),
    "ldm_lite.features.guidance_interval:GuidanceInterval": Entry(("guidance_interval",)),
    "ldm_lite.features.skip_layers:SkipLayerGuidance": Entry(("skip_layer_scale",), family="skip_layers"),
    "ldm_lite.features.control:Controls": Entry(("control", "preprocess", "clip_vision")),
    "ldm_lite.features.seamless:Seamless": Entry(("seamless",)),
    "ldm_lite.features.shortcuts:Shortcuts": Entry(("deep_cache", "gate_step", "freeu")),
    "ldm_lite.features.refiner:Refiner": Entry(("refiner", "refiner_start")),
    "ldm_lite.features.family_inputs:FamilyInputs": Entry(
        (
            *("original_size", "crop_top_left", "target_size", "aesthetic_score", "negative_aesthetic_score"),
            *("image_embedding", "noise_level", "image_statistics"),
        )
    ),
    "ldm_lite.features.hires:Hires": Entry(
        (
            *("hires", "hires_strength", "hires_steps", "hires_upscaler", "hires_esrgan", "hires_sampler"),
            *("hires_prompt", "hires_negative_prompt"),
        )
    ),
}


def check_features(options: Any) -> tuple[Any, list[Feature]]:
    """Return the options as the features that they use read them, and these features.  Raises ValueError."""
    defaults = {option.name: option.default for option in dataclasses.fields(options)}
    features: list[Feature] = []
    for name, entry in FEATURES.items():
        if any(_differ(getattr(options, option), defaults[option]) for option in entry.options if option in defaults):
            feature: Feature = imported(name)()
            options = feature.check(options)
            features.append(feature)
    return options, features


def changed(
    model: Any, options: Any, features: list[Feature], further: Sequence[core.Feature] = ()
) -> tuple[Any, Any, list[Any]]:
    """Return model and options as the features change them, and the features in the order of application.

    The family may bring some; `further` ones are the user's, of the core's register_feature.
    """
    in_use: list[Feature] = []
    by_name = {f"{type(feature).__module__}:{type(feature).__qualname__}": feature for feature in features}
    for name, entry in FEATURES.items():
        is_of_family = entry.family and getattr(model.family, entry.family) is not None
        if name in by_name or is_of_family or model.family.task in entry.tasks:
            in_use.append(by_name.get(name) or imported(name)())
    early, late = ([feature for feature in in_use if feature.is_last == is_last] for is_last in (False, True))
    ordered: list[Any] = [*early, *further, *late]
    for feature in ordered:
        model, options = feature.change_options(model, options)
    return model, options, ordered


def _differ(value: Any, default: Any) -> bool:
    """Whether a value is not an option's default; it may be a tensor, which is compared to nothing."""
    return value is not default and not (isinstance(value, (bool, int, float, str, tuple)) and value == default)
