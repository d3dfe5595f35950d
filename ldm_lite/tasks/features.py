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
from ldm_lite.cli.declared import declared, in_use, with_values
from ldm_lite.cli.options import changed
from ldm_lite.cli.task_options import Txt2imgOptions
from ldm_lite.core.features import STAGES, Feature, check_together
from ldm_lite.core.files import imported
from ldm_lite.diffusion.names import resolve

TaskOptions = TypeVar("TaskOptions", bound=Txt2imgOptions)


def used(options: Txt2imgOptions) -> Iterator[Feature]:
    """Yield the features that options use, unchecked."""
    names = in_use(options)
    for known in declared():
        if names & {*known.rows, *known.uses}:
            yield with_values(imported(known.place), options)
    yield from options.features


# ---- before a model is loaded ---------------------------------------------------------------------------------------


def check_options(options: TaskOptions) -> tuple[TaskOptions, list[Feature]]:
    """Return the options as the features that they use read them, and these features.

    Raises ValueError for options that are wrong whatever the model, or exclude each other; OSError for files.
    """
    names, features = in_use(options), list[Feature]()
    for known in sorted(declared(), key=lambda known: STAGES.index(known.stage)):
        if names & {*known.rows, *known.uses}:
            feature = with_values(imported(known.place), options)
            check_together(feature, names, options.task)
            options = feature.check(options)
            names = in_use(options)  # as this feature leaves them
            features.append(feature)
    for feature in map(dataclasses.replace, options.features):  # made anew: they remember one run
        check_together(feature, names, options.task)
        options = feature.check(options)
        names = in_use(options)
        features.append(feature)
    if options.sampler is not None:
        resolve(options.sampler)
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
    kinds = {type(feature) for feature in features}
    for known in declared():
        if known.is_of_family(model.family) and (kind := imported(known.place)) not in kinds:
            features = [*features, with_values(kind, options)]
    features = sorted(features, key=_order)
    for feature in features:
        model, options = feature.change_options(model, options)
    return model, options, features


def _order(feature: Feature) -> tuple[int, str]:
    module = type(feature).__module__
    return STAGES.index(feature.stage), module if module.startswith("ldm_lite.features.") else "~"  # after letters
