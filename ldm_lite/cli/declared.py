"""The options that features declare, read from their files without importing them, so that no torch is loaded.

Only the heads of the classes in a file of ldm_lite/features run, up to the first method: `NAME: TYPE = option(...)`
and `NAME: ClassVar = ...`, with the names of core/declare.py and the file's own constants.  Those parts of a row
that are functions of its file (declare.OF_CLASS) are known once the feature is imported, when its option is given.
"""

import ast
import functools
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import Field, dataclass, field, fields
from pathlib import Path
from typing import Any, ClassVar

from ldm_lite.core import declare

FOLDER = Path(__file__).parents[1] / "features"
# A tenth of a file, so that parsing takes no time: constants, and classes up to their first method.
_HEADS = re.compile(r"^(?:[A-Z_]+ = .*\n(?:[ )\]}].*\n)*|class .*\n(?:(?!    def |    @)(?: .*)?\n)*)", re.MULTILINE)


@dataclass(frozen=True)
class Declared:
    """A feature, as read from the head of its class; the first five are those of core.features.Feature."""

    stage: str
    topic: str
    tasks: tuple[str, ...]
    uses: tuple[str, ...]
    brought_by: tuple[str, ...]
    place: str  # "module:Class", to be imported
    rows: dict[str, tuple[Any, Field[Any]]]  # option -> its type and row

    def is_of_family(self, family: Any) -> bool:
        """Whether a family brings it: the field that `brought_by` names is not None, or has the value after "="."""
        conditions = (condition.partition("=") for condition in self.brought_by)
        return any(
            getattr(family, name) == value if equals else getattr(family, name) is not None
            for name, equals, value in conditions
        )


@functools.cache
def declared() -> tuple[Declared, ...]:
    """The features of the package, by the names of their files."""
    texts = ((path.stem, path.read_text(encoding="utf-8")) for path in sorted(FOLDER.glob("*.py")))
    return tuple(feature for name, text in texts for feature in read_heads(text, f"ldm_lite.features.{name}"))


def read_heads(text: str, module: str) -> Iterator[Declared]:
    """Yield the features of a file's text.  Raises NameError for a row that needs the file's imports."""
    names: dict[str, Any] = {**vars(declare), "Any": Any, "ClassVar": ClassVar}
    for node in ast.parse("".join(_HEADS.findall(text))).body:
        if isinstance(node, ast.Assign) and not any(
            isinstance(part, (ast.Name, ast.Call)) for part in ast.walk(node.value)
        ):
            _run([node], names)
        if isinstance(node, ast.ClassDef) and any(getattr(base, "id", "") == "Feature" for base in node.bases):
            statements = [statement for statement in node.body if isinstance(statement, ast.AnnAssign)]
            for call in (statement.value for statement in statements if isinstance(statement.value, ast.Call)):
                call.keywords = [word for word in call.keywords if word.arg not in declare.OF_CLASS]
            head = _run(statements, {**names, "__annotations__": {}})
            kinds = head["__annotations__"]
            rows = {name: (kinds[name], row) for name, row in head.items() if isinstance(row, Field)}
            facts = {name: head.get(name, ()) for name in ("tasks", "uses", "brought_by")}
            topic = head.get("topic", node.name.lower())
            yield Declared(head.get("stage", "run"), topic, **facts, place=f"{module}:{node.name}", rows=rows)


def _run(statements: Sequence[ast.stmt], names: dict[str, Any]) -> dict[str, Any]:
    """Run statements in a namespace, and return it."""
    exec(compile(ast.Module(list(statements), []), "<head of a feature>", "exec"), names)
    return names


def with_rows(kind: type) -> type:
    """Give a class of options the rows of the features of its topic: a decorator, below @dataclass."""
    for feature in declared():
        if feature.topic == kind.__name__.removesuffix("Options").lower():
            for name, (annotation, row) in feature.rows.items():
                kind.__annotations__[name] = annotation
                setattr(kind, name, field(default=row.default, metadata=row.metadata))
    return kind


def option_rows(kind: type) -> dict[str, tuple[Field[Any], type]]:
    """Return the options of a task's class by name, each with its class: this one, or a feature of the user's own.

    Raises ValueError, one line, for a feature whose option has the name of another one.
    """
    rows = {row.name: (row, kind) for row in fields(kind)}
    for name, feature in registered().items():
        if name in rows:
            raise ValueError(f"the option `{name}` of {feature.__name__} is one of ldm_lite's: give it another name")
        rows |= {row.name: (row, feature) for row in fields(feature) if row.name == name}
    return rows


def registered() -> dict[str, Any]:
    """Return the user's own features by their options, from core.features if that is imported already."""
    features = sys.modules.get("ldm_lite.core.features")
    return {} if features is None else features.FEATURES


def import_features(files: Sequence[str | Path], kind: type) -> list[Any]:
    """Import Python files, and return the user's own features that they register.

    Raises ValueError, one line, for a file that fails, and for an option with the name of one of a task's class.
    """
    if not files:
        return []
    from ldm_lite.core.features import FEATURES, import_file  # which imports torch, as the files do

    for file in files:
        import_file(Path(file).expanduser())
    option_rows(kind)
    return list(dict.fromkeys(FEATURES.values()))


def with_values(kind: Any, options: Any) -> Any:
    """Return a feature of a class, with the values that options have for its rows."""
    return kind(**{row.name: getattr(options, row.name) for row in fields(kind) if hasattr(options, row.name)})


def in_use(options: Any) -> set[str]:
    """Return the names of the options that are not at their defaults, also of features of the user's own."""
    parts = (options, *options.features)
    return {row.name for part in parts for row in fields(part) if differ(getattr(part, row.name), row.default)}


def differ(value: Any, default: Any) -> bool:
    """Whether a value is not an option's default; a tensor never is."""
    return value is not default and not (isinstance(value, (bool, int, float, str, tuple)) and value == default)
