"""Features: what changes a run from outside, and the table of their options."""

import difflib
import functools
import logging
import sys
import traceback
import types
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from ldm_lite.core.declare import check_values, option
from ldm_lite.core.files import imported
from ldm_lite.core.job import Events, run_batches
from ldm_lite.core.model import Model
from ldm_lite.core.options import Options
from ldm_lite.core.tasks import make_job

__all__ = ["FEATURES", "STAGES", "Feature", "events_of", "import_file", "option", "read_arguments", "register_feature"]
log = logging.getLogger("ldm_lite")
T = TypeVar("T")

# The order in which features are applied, whatever the order of the call or of imports; in a stage, that of FEATURES.
STAGES = (
    "settings",  # where the options come from
    "prompts",  # where the prompts come from
    "model",  # another model, other options
    "text",  # what the prompts become
    "scale",  # how strong guidance is in a call
    "branches",  # which branches of guidance run in it
    "inside",  # the inside of the network
    "around",  # the network as a whole: calls that are skipped, another network in some of them
    "guidance",  # how the outputs of the branches are mixed and adjusted
    "run",  # noise, latents, pixels, events
    "again",  # a second run, which begins with the results of the first
)


@dataclass(frozen=True)
class Feature:
    """A frozen dataclass with options, which changes a run in one or more of these places."""

    stage: ClassVar[str] = "run"  # one of STAGES
    excludes: ClassVar[tuple[str, ...]] = ()  # names of options that it does not go with
    part_of: ClassVar[tuple[str, str]] = ("", "")  # the option without which the others mean nothing, and why
    # For packages around this one: nothing here sets these, or reads them, except `tasks` in check_together.
    topic: ClassVar[str] = ""  # of --help, where its options stand; its own name if empty
    tasks: ClassVar[tuple[str, ...]] = ()  # tasks that have these options; all if empty
    uses: ClassVar[tuple[str, ...]] = ()  # options of every task that bring it, too
    brought_by: ClassVar[tuple[str, ...]] = ()  # what a family has that brings it: "NAME", not None, or "NAME=VALUE"
    loads: ClassVar[bool] = False  # it loads networks, so it cannot be tried before weights are read

    def check(self, options: Any) -> Any:
        """Return the options, perhaps changed, before a model is loaded; their ranges and choices are checked already.

        Raises ValueError for options that are wrong whatever the model, OSError for files.
        """
        return options

    def change_options(self, model: Any, options: Any) -> tuple[Any, Any]:
        """Return the model and the options, before they become a job."""
        return model, options

    def change_job(self, job: Any) -> Any:
        """Return the Job with some of its slots replaced; job.changing_inputs changes what calls of the network read.

        Raises ValueError, one line, for options that do not fit the job.
        """
        return job

    def change_events(self, events: Any) -> Any:
        """Return the events of a run: states, and the latents of batches."""
        return events

    # ---- for features that read texts, or remember something ----

    def __post_init__(self) -> None:
        check_values(self)
        for field in fields(self):
            self.reading(field.name)

    def reading(self, name: str) -> Any:
        """Return an option's value as parsed by its row's `reads`, once; None for an option that is not given."""
        row, value = type(self).__dataclass_fields__[name], getattr(self, name)
        reads = row.metadata.get("reads")
        if reads is None or value is None:
            return value
        return self.once(name, lambda _: reads(value))

    @functools.cached_property
    def state(self) -> dict[Any, Any]:
        """Its state; a feature is an object of one run."""
        return {}

    def once(self, key: Any, change: Callable[[Any], T]) -> T:
        """Return change(key), called once in a run; key is a name, or an object, which counts by identity."""
        place = key if isinstance(key, str) else id(key)
        if place not in self.state:
            self.state[place] = key, change(key)  # the key stays alive, so that no other object gets its id
        result: T = self.state[place][1]
        return result

    def log(self, level: int, message: str) -> None:
        """Log a message once in a run, however many images start from an input of their own."""
        self.once(message, lambda _: log.log(level, message))


# Option -> a Feature, or its name "module:Class", which is imported when the option is used.
FEATURES: dict[str, Any] = {}


def register_feature(feature: type[Feature]) -> type[Feature]:
    """Add the options of a Feature to FEATURES: a decorator, which also makes it a frozen dataclass.

    A feature of the same name is replaced.  Raises ValueError for an option that another one or every task has.
    """
    if "__dataclass_fields__" not in vars(feature):
        feature = dataclass(frozen=True)(feature)
    title, qualified = feature.__name__, feature.__qualname__
    names = [field.name for field in fields(feature)]
    if not (issubclass(feature, Feature) and feature.stage in STAGES and names):
        raise ValueError(f"{title}: expected a Feature with options, and a stage of {', '.join(STAGES)}")
    owners = {field.name: "Options" for field in fields(Options)}  # option -> the name of its class
    for name, known in FEATURES.items():
        owners[name] = getattr(known, "__qualname__", known).rpartition(":")[2]  # it may not be imported yet
    for name in names:
        if owners.get(name, qualified) != qualified:
            raise ValueError(f"the option `{name}` of {title} is one of {owners[name]}: give it another name")
    for name, owner in owners.items():
        if owner == qualified:
            del FEATURES[name]
    FEATURES.update(dict.fromkeys(names, feature))
    return feature


ORIGIN = "ldm_lite.core"  # how files of features name this package, in a fork too


def import_file(path: Path) -> None:
    """Run a Python file of the user's, such as one that registers a feature.

    Raises ValueError, one line, for a file that cannot be read or run.
    """
    module = types.ModuleType(f"file_{path.stem}")
    sys.modules[module.__name__] = module  # where dataclasses look for it
    try:
        text = path.read_text(encoding="utf-8").replace(ORIGIN, str(__package__))
        exec(compile(text, str(path), "exec", dont_inherit=True), vars(module))
    except Exception as error:
        lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
        place = f", line {lines[-1]}" if lines else ""
        raise ValueError(f"{path}{place}: {type(error).__name__}: {error}") from error


def check_together(feature: Feature, in_use: Container[str], task: str = "") -> None:
    """Check a feature against the options that are in use, by its class and its rows.

    Raises ValueError, one line.
    """
    rows = [row for row in fields(feature) if row.name in in_use]
    if rows and task and feature.tasks and task not in feature.tasks:
        raise ValueError(f"`{rows[0].name}` is an option of {' and '.join(feature.tasks)}: leave it out")
    whole, reason = feature.part_of
    for row in rows:
        if whole and whole not in in_use:
            raise ValueError(f"`{row.name}` {reason}")
        for name in (*feature.excludes, *row.metadata.get("excludes", ())):
            if name in in_use:
                raise ValueError(f"`{row.name}` does not go with `{name}`: leave one of them out")


def changed_job(feature: Feature, job: Any) -> Any:
    """Return the job as a feature changes it; log the options that have no effect in it."""
    for row in fields(feature):
        tell = row.metadata.get("no_effect")
        if tell is not None and getattr(feature, row.name) != row.default and (why := tell(job)):
            feature.log(logging.WARNING, f"`{row.name}` has no effect {why}")
    return feature.change_job(job)


def features_of(arguments: Mapping[str, Any]) -> list[Feature]:
    """Return the features whose options are among arguments, unchecked, in the order in which they were registered."""
    grouped: dict[Any, dict[str, Any]] = {}
    for name, feature in FEATURES.items():
        if name in arguments:
            grouped.setdefault(feature, {})[name] = arguments[name]
    return [imported(feature)(**values) for feature, values in grouped.items()]


def read_arguments(arguments: Mapping[str, Any]) -> tuple[Options, list[Feature]]:
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
    features = features_of(arguments)
    for feature in features:
        check_together(feature, arguments)
        options = feature.check(options)
    return options, sorted(features, key=lambda feature: STAGES.index(feature.stage))


def events_of(model: Model, options: Options, features: Sequence[Feature] = ()) -> Events:
    """Run options with features, and yield the events.  Raises ValueError for options that do not fit."""
    for feature in features:
        model, options = feature.change_options(model, options)
    job = make_job(model, options)
    for feature in features:
        job = changed_job(feature, job)
    events = run_batches(job)
    for feature in features:
        events = feature.change_events(events)
    return events
