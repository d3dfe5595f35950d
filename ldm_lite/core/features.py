"""Features: what changes a run from outside, and the table of their options."""

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar

from ldm_lite.core.files import imported
from ldm_lite.core.job import Events, Job, run
from ldm_lite.core.model import Model
from ldm_lite.core.options import Options
from ldm_lite.core.tasks import prepare

# The order in which features are applied, whatever the order of the call or of imports; in a stage, that of FEATURES.
STAGES = (
    "model",  # another model, other options
    "text",  # what the prompts become
    "scale",  # which branches of guidance run in a call, and with which scale
    "inside",  # the inside of the network
    "around",  # what is around it
    "guidance",  # how the outputs of the branches are mixed and adjusted
    "run",  # noise, latents, pixels, events
)


@dataclass(frozen=True)
class Feature:
    """A frozen dataclass with options of its own, which changes a run in one or more of these places."""

    stage: ClassVar[str] = "run"  # one of STAGES
    excludes: ClassVar[tuple[str, ...]] = ()  # names of options that it does not go with

    def change_options(self, model: Model, options: Options) -> tuple[Model, Options]:
        """Return the model and the options, before they become a job."""
        return model, options

    def change_job(self, job: Job) -> Job:
        """Return the job with some of its slots replaced; job.changing_inputs changes what calls of the network read.

        Raises ValueError, one line, for what does not fit the job.
        """
        return job

    def change_events(self, events: Events) -> Events:
        """Return the events of a run: states, and the latents of batches."""
        return events


# Option -> a Feature, or its name "module:Class", which is imported when the option is used.
FEATURES: dict[str, Any] = {}


def register_feature(kind: type[Feature]) -> type[Feature]:
    """Add the options of a Feature to FEATURES: a decorator, which also makes it a frozen dataclass.

    A feature of the same name is replaced.  Raises ValueError for an option that another one or every task has.
    """
    kind = kind if "__dataclass_fields__" in vars(kind) else dataclass(frozen=True)(kind)
    if not (issubclass(kind, Feature) and kind.stage in STAGES and fields(kind)):
        raise ValueError(f"{kind.__name__}: expected a Feature with options, and a stage of {', '.join(STAGES)}")
    owners = {field.name: "Options" for field in fields(Options)}
    owners |= {name: getattr(known, "__qualname__", known).rpartition(":")[2] for name, known in FEATURES.items()}
    for name in (field.name for field in fields(kind)):
        if owners.get(name, kind.__qualname__) != kind.__qualname__:
            raise ValueError(f"the option `{name}` of {kind.__name__} is one of {owners[name]}: give it another name")
        FEATURES[name] = kind
    return kind


def read(arguments: Mapping[str, Any]) -> tuple[Options, list[Feature]]:
    """Turn keyword arguments into options and features, in the order of their stages.

    Raises TypeError, with the nearest name, for an unknown one, and ValueError for options that exclude each other.
    """
    names = [field.name for field in fields(Options)]
    for name in arguments:
        if name not in names and name not in FEATURES:
            near = difflib.get_close_matches(name, [*names, *FEATURES], n=1)
            hint = f"did you mean {near[0]}? " if near else ""
            raise TypeError(f"no argument {name!r}: {hint}expected some of {', '.join([*names, *FEATURES])}")
    options = Options(**{name: value for name, value in arguments.items() if name in names})
    grouped: dict[Any, dict[str, Any]] = {}
    for name in FEATURES:
        if name in arguments:
            grouped.setdefault(FEATURES[name], {})[name] = arguments[name]
    features: list[Feature] = [imported(kind)(**values) for kind, values in grouped.items()]
    for feature, values in zip(features, grouped.values(), strict=True):
        if clashes := set(feature.excludes) & arguments.keys():
            raise ValueError(f"`{next(iter(values))}` does not go with `{min(clashes)}`: leave one of them out")
    return options, sorted(features, key=lambda feature: STAGES.index(feature.stage))


def begin(model: Model, options: Options, features: Sequence[Feature] = ()) -> Events:
    """Run options with features, and yield the events.  Raises ValueError for options that do not fit."""
    for feature in features:
        model, options = feature.change_options(model, options)
    job = prepare(model, options)
    for feature in features:
        job = feature.change_job(job)
    events = run(job)
    for feature in features:
        events = feature.change_events(events)
    return events
