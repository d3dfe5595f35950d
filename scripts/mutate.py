"""Change the code in one place, a hundred times, and see whether a test that concerns the file fails each time.

    python scripts/mutate.py --count 100 --seed 0
    python scripts/mutate.py --core --count 60           # a fork of the core, by its own tests

A mutant is a comparison, an operator, a number, a condition or a statement that is changed in a copy of the package.
Its tests are those named after its file, those of its folder, and those that import it, until the first failure, in a
process that has imported torch.  Prints a line for each mutant that nothing noticed, and how many were.  Some of those
that are left compute the same as before, as only a reader can tell.
"""

import argparse
import ast
import os
import random
import re
import resource
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import fork

ROOT = Path(__file__).parents[1]
PARTS = {
    "core": 0.4,
    "tasks": 0.25,
    "train": 0.25,
    "generate.py": 0.1,
}  # of ldm_lite, and their fraction of the mutants
OTHERS = {"generate.py": ("pipeline", "img2img", "inpaint")}  # tests of other names; all in tests/ are of tasks
OPERATORS = {
    **{ast.Lt: ("<", "<="), ast.LtE: ("<=", "<"), ast.Gt: (">", ">="), ast.GtE: (">=", ">")},
    **{ast.Eq: ("==", "!="), ast.NotEq: ("!=", "=="), ast.Is: ("is", "is not"), ast.IsNot: ("is not", "is")},
    **{ast.In: ("in", "not in"), ast.NotIn: ("not in", "in"), ast.And: ("and", "or"), ast.Or: ("or", "and")},
    **{ast.Add: ("+", "-"), ast.Sub: ("-", "+"), ast.Mult: ("*", "/"), ast.Div: ("/", "*"), ast.FloorDiv: ("//", "*")},
}
Change = tuple[int, int, str]  # start and end in the text as bytes, and what is put there


def changes_of(source: bytes) -> Iterator[Change]:
    """Every change of one place, but in annotations, messages, logging and text."""
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))

    def span(node: ast.AST) -> tuple[int, int]:
        first, last = starts[node.lineno - 1], starts[node.end_lineno - 1]  # type: ignore[attr-defined]
        return first + node.col_offset, last + node.end_col_offset  # type: ignore[attr-defined]

    def operator(kind: ast.AST, left: ast.AST, right: ast.AST) -> Iterator[Change]:
        before, after = OPERATORS.get(type(kind), ("", ""))
        start, end = span(left)[1], span(right)[0]
        at = source[start:end].find(before.encode())
        if before and at >= 0:
            yield start + at, start + at + len(before), after

    def visit(node: ast.AST) -> Iterator[Change]:
        quiet = isinstance(node, ast.Expr) and ast.unparse(node).startswith(("log.", "warnings.", "print("))
        if quiet or isinstance(node, ast.Raise | ast.JoinedStr | ast.Assert | ast.Import | ast.ImportFrom):
            return
        if isinstance(node, ast.Compare) and len(node.ops) == 1:
            yield from operator(node.ops[0], node.left, node.comparators[0])
        elif isinstance(node, ast.BinOp):
            yield from operator(node.op, node.left, node.right)
        elif isinstance(node, ast.BoolOp):
            yield from operator(node.op, node.values[0], node.values[1])
        elif isinstance(node, ast.Constant) and type(node.value) in (int, float, bool):
            yield *span(node), repr(not node.value if isinstance(node.value, bool) else node.value + 1)
        elif isinstance(node, ast.If | ast.IfExp | ast.While):
            start, end = span(node.test)
            yield start, end, f"not ({source[start:end].decode()})"
        elif isinstance(node, ast.AugAssign) or (isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)):
            yield *span(node), "pass"
        for name, value in ast.iter_fields(node):
            if name not in ("annotation", "returns", "decorator_list", "bases"):
                for child in value if isinstance(value, list) else [value]:
                    if isinstance(child, ast.AST):
                        yield from visit(child)

    return visit(ast.parse(source))


def tests_of(folder: Path, file: Path, line: int, in_fork: bool) -> list[str]:
    """Those named after the file, of its folder, or that import it; first those that name what the line is part of.

    Of a fork all.
    """
    part, module = file.parts[1], ".".join(file.with_suffix("").parts)
    package, _, name = module.rpartition(".")
    tree = ast.walk(ast.parse((folder / file).read_bytes()))
    around = [
        node.name.strip("_")
        for node in tree
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.lineno <= line <= (node.end_lineno or line)
    ]
    scores = {}
    for path in sorted(folder.glob("tests/**/test_*.py")):
        text = path.read_text()
        named = file.stem.strip("_") in path.stem.removeprefix("test_").split("_")
        imports = module in text or f"from {package} import {name}" in text
        beside = in_fork or path.parent.name == ("tests" if part == "tasks" else part)
        if named or imports or beside or path.stem.removeprefix("test_") in OTHERS.get(part, ()):
            names = sum(len(re.findall(rf"\b_?{word}\b", text)) for word in around)
            scores[str(path.relative_to(folder))] = 20 * named + 5 * imports + names
    return sorted(scores, key=lambda test: -scores[test])


def outcome(folder: Path, tests: list[str], seconds: int) -> str:
    """Whether the tests notice: "noticed", "lives", or "unfinished" after these seconds of the processor."""
    child = os.fork()
    if child == 0:
        import pytest

        resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
        os.chdir(folder)
        sys.path.insert(0, str(folder))
        nothing = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nothing, 1)
        os.dup2(nothing, 2)
        os._exit(int(pytest.main(["-x", "-q", "-p", "no:cacheprovider", "--timeout=120", *tests])))
    status = os.waitpid(child, 0)[1]
    return "unfinished" if os.WIFSIGNALED(status) else "noticed" if os.waitstatus_to_exitcode(status) else "lives"


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=100, help="mutants (default: 100)")
    parser.add_argument("--seed", type=int, default=0, help="of the choice (default: 0)")
    parser.add_argument("--seconds", type=int, default=40, help="of the processor for each mutant (default: 40)")
    parser.add_argument("--core", action="store_true", help="of a fork of the core, by its tests alone")
    parser.add_argument("--only", type=int, nargs="*", help="the numbers of some mutants alone")
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    import torch  # noqa: F401  # once, for all children

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        parts = PARTS
        if options.core:  # in the whole package, others take the place of the core's samplers and spacings
            parts = {"": 1.0}
            fork.fork(folder, "forked")
        else:
            listing = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]  # new files too
            for file in subprocess.check_output(listing, cwd=ROOT, text=True).splitlines():
                (folder / file).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(ROOT / file, folder / file)
        mutants = []
        for part, fraction in parts.items():
            path = folder / ("forked" if options.core else "ldm_lite") / part
            files = [path] if path.is_file() else sorted(path.glob("*.py"))
            every = [(file.relative_to(folder), change) for file in files for change in changes_of(file.read_bytes())]
            mutants += random.Random(options.seed).sample(every, round(options.count * fraction))
        os.environ["PYTHONPATH"] = name
        outcomes = []
        for number, (file, (start, end, text)) in enumerate(mutants):
            if options.only is not None and number not in options.only:
                continue
            source = (folder / file).read_bytes()
            (folder / file).write_bytes(source[:start] + text.encode() + source[end:])
            line = source[:start].count(b"\n") + 1
            outcomes.append(outcome(folder, tests_of(folder, file, line, options.core), options.seconds))
            (folder / file).write_bytes(source)
            print(
                f"{number} {outcomes[-1]} {file}:{line} {source[start:end].decode()!r} -> {text!r}"
                f"  in {source.splitlines()[line - 1].decode().strip()}",
                flush=True,
            )
        print(f"{outcomes.count('noticed')} of {len(outcomes)} were noticed")


if __name__ == "__main__":
    main()
