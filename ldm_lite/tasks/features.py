"""Which features a task's options use: those of ldm_lite/features, imported when needed, and the user's own.

Besides the methods of the core's Feature, one may have: add_cost (see cost.py); check_files(), which raises for files
that are not there, before a model is loaded; with_networks(options, networks), which keeps the networks that it loads
in a dictionary, for runs that follow.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any, TypeVar

from ldm_lite.checkpoint.model import CheckpointModel
from ldm_lite.cli.declared import declared, differ, with_values
from ldm_lite.cli.options import changed
from ldm_lite.cli.task_options import Txt2imgOptions
from ldm_lite.core.features import STAGES, Feature, check_together
from ldm_lite.core.files import imported

TaskOptions = TypeVar("TaskOptions", bound=Txt2imgOptions)


def used(options: Txt2imgOptions) -> Iterator[Feature]:
    """Yield the features that options use, unchecked."""
    for known in declared():
        if known.is_used(options):
            yield with_values(imported(known.place), options)
    yield from options.features


# ---- before a model is loaded ---------------------------------------------------------------------------------------


def check_features(options: TaskOptions) -> tuple[TaskOptions, list[Feature]]:
    """Return the options as the features that they use read them, and these features.

    Raises ValueError for options that are wrong whatever the model, or exclude each other; OSError for files.
    """
    defaults = {row.name: row.default for row in dataclasses.fields(options)}

    def is_set(name: str) -> bool:
        if name in defaults:
            return differ(getattr(options, name), defaults[name])
        users = (feature for feature in options.features if hasattr(feature, name))
        return any(differ(getattr(feature, name), getattr(type(feature), name)) for feature in users)

    features: list[Feature] = []
    for known in sorted(declared(), key=lambda known: STAGES.index(known.stage)):
        if known.is_used(options):  # as the features before it leave them
            feature = with_values(imported(known.place), options)
            check_together(feature, is_set, options.task)
            options = feature.check(options)
            features.append(feature)
    for feature in map(dataclasses.replace, options.features):  # made anew: they remember one run
        check_together(feature, is_set, options.task)
        options = feature.check(options)
        features.append(feature)
    return options, features


def check_files(options: Txt2imgOptions) -> None:
    """Check the files that features name.  Raises ValueError, OSError."""
    for feature in used(options):
        if hasattr(feature, "check_files"):
            feature.check_files()


def without_loading(options: TaskOptions) -> TaskOptions:
    """Return options without those of features that load networks, and without options that only these use."""
    names = {row.name for feature in used(options) if feature.loads for row in dataclasses.fields(feature)}
    rows = dataclasses.fields(options)  # a model that an option loads is among those that `used_by` names
    names |= {row.name for row in rows if names & {*(row.metadata.get("used_by") or ())}}
    defaults: dict[str, object] = {row.name: row.default for row in rows if row.name in names}
    return changed(options, **defaults, features=tuple(feature for feature in options.features if not feature.loads))


def with_networks(options: TaskOptions, networks: dict[str, Any]) -> TaskOptions:
    """Return options whose features keep the networks that they load in a dictionary, for runs that follow."""
    for feature in used(options):
        if hasattr(feature, "with_networks"):
            options = feature.with_networks(options, networks)
    return options


# ---- with a model ---------------------------------------------------------------------------------------------------


def change_options(
    model: CheckpointModel, options: TaskOptions, features: list[Feature]
) -> tuple[CheckpointModel, TaskOptions, list[Feature]]:
    """Return model and options as the features change them, and these features with those that the family brings.

    They are in the order of application: by stage; within one, the package's by the names of their files, then the
    user's.
    """
    in_use = {_place(feature) for feature in features}
    for known in declared():
        if known.place not in in_use and known.is_of_family(model.family):
            features = [*features, with_values(imported(known.place), options)]
    places = [known.place for known in declared()]

    def order(feature: Feature) -> tuple[int, int]:
        place = _place(feature)
        return STAGES.index(feature.stage), places.index(place) if place in places else len(places)

    features = sorted(features, key=order)
    for feature in features:
        model, options = feature.change_options(model, options)
    return model, options, features


def _place(feature: Feature) -> str:
    return f"{type(feature).__module__}:{type(feature).__qualname__}"
