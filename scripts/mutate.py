"""Change the package in one place, many times, and see whether a test fails each time.

    python scripts/mutate.py --count 40 --seed 20261128
    python scripts/mutate.py --core --count 60           # a fork of the core, by its own tests

A mutant is a comparison, an operator, a number, a condition or a statement that is changed in a copy of the package,
anywhere in it.  The test files that have most words in common with the place run until the first failure, in a process
that has imported torch.  Then the test that failed runs on the unchanged copy: only if it passes there the mutant
counts as noticed, and else the test is left out and named.  Prints a line for each mutant, and the share that was
noticed.  Some of those that are left compute the same as before, as only a reader can tell.
"""

import argparse
import ast
import itertools
import math
import os
import random
import re
import resource
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import fork

ROOT = Path(__file__).parents[1]
MOST_FILES = 8  # of tests, for a mutant
TIMES = itertools.count(10**9)  # of changed files, each another, by which Python tells that its bytecode is old
OPERATORS = {
    **{ast.Lt: ("<", "<="), ast.LtE: ("<=", "<"), ast.Gt: (">", ">="), ast.GtE: (">=", ">")},
    **{ast.Eq: ("==", "!="), ast.NotEq: ("!=", "=="), ast.Is: ("is", "is not"), ast.IsNot: ("is not", "is")},
    **{ast.In: ("in", "not in"), ast.NotIn: ("not in", "in"), ast.And: ("and", "or"), ast.Or: ("or", "and")},
    **{ast.Add: ("+", "-"), ast.Sub: ("-", "+"), ast.Mult: ("*", "/"), ast.Div: ("/", "*"), ast.FloorDiv: ("//", "*")},
}
Change = tuple[int, int, str]  # start and end in the text as bytes, and what is put there


def changes_of(source: bytes) -> Iterator[Change]:
    """Every change of one place, but in annotations, messages, logging and text, and in what a GPU alone can run."""
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
        if any("triton.jit" in ast.unparse(decorator) for decorator in getattr(node, "decorator_list", ())):
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


class Tests:
    """The test files of a folder, by the words in them."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        texts = {
            path.relative_to(folder): path.read_text(encoding="utf-8") for path in folder.glob("tests/**/test_*.py")
        }
        self._texts, self._words = texts, {path: words_of(text) for path, text in texts.items()}
        counts = Counter(word for words in self._words.values() for word in words)
        self._weights = {word: math.log(len(texts) / count) for word, count in counts.items()}

    def near(self, file: Path, line: int) -> list[str]:
        """The files that have most in common with a line of the package, the nearest first.

        What counts are rare words of the functions and classes around it, or that use the constant there, and names
        that its file defines; an import of the file, or of one that imports it; and the file's name.
        """
        source = (self._folder / file).read_text(encoding="utf-8")
        tree = ast.parse(source)
        constants = {
            name.id.strip("_")
            for node in tree.body
            if isinstance(node, ast.Assign | ast.AnnAssign) and node.lineno <= line <= (node.end_lineno or line)
            for name in ast.walk(node)
            if isinstance(name, ast.Name) and isinstance(name.ctx, ast.Store)
        }
        defined, around = set[str](), constants
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                defined.add(node.name.strip("_"))
                inside = (
                    set() if isinstance(node, ast.ClassDef) else words_of(ast.get_source_segment(source, node) or "")
                )
                if node.lineno <= line <= (node.end_lineno or line) or inside & constants:
                    around = around | {node.name.strip("_")} | inside
            elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                defined.add(node.target.id)
        imports = self._imports_of(file)
        importers = [self._imports_of(path) for path, text in self._package(file).items() if imports.search(text)]
        name = {*file.stem.strip("_").split("_")}
        scores = {}
        for path, words in self._words.items():
            text = self._texts[path]
            in_common = sum(self._weights[word] for word in [*(around & words), *(defined & words)])
            score = 16 * in_common / math.sqrt(len(words))  # a long file has words of everything
            score += 8 if imports.search(text) else 4 * any(pattern.search(text) for pattern in importers)
            score += 24 * len(name & {*path.stem.split("_")}) / len(name)
            scores[path.as_posix()] = score + 4 * (path.parent.name == file.parent.name)
        return sorted(scores, key=lambda path: (-scores[path], path))[:MOST_FILES]

    def _package(self, file: Path) -> dict[Path, str]:
        """The texts of the package that a file is of."""
        paths = (self._folder / file.parts[0]).rglob("*.py")
        return {path.relative_to(self._folder): path.read_text(encoding="utf-8") for path in paths}

    @staticmethod
    def _imports_of(file: Path) -> re.Pattern[str]:
        """A pattern of statements that import a file."""
        module = r"\.".join(file.with_suffix("").parts)
        package, _, name = module.rpartition(r"\.")
        return re.compile(rf"from {module} import|import {module}\b|from {package} import [^\n]*\b{name}\b")


def words_of(text: str) -> set[str]:
    """The words of a program, without underscores around them."""
    return {word.strip("_") for word in re.findall(r"[A-Za-z_]\w{2,}", text)}


class _Report:
    """A plugin of pytest that writes the name of each failed test to a file."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(f"{report.nodeid}\n")

    pytest_collectreport = pytest_runtest_logreport


def first_failure(folder: Path, tests: Sequence[str], seconds: int, without: Sequence[str] = ()) -> str | None:
    """Run tests; return the first that fails, "" if none does, or None if seconds of the processor are not enough."""
    failures = folder / "failures.txt"
    failures.write_text("", encoding="utf-8")
    child = os.fork()
    if child == 0:
        import pytest

        resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
        os.chdir(folder)
        sys.path.insert(0, str(folder))
        nothing = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nothing, 1)
        os.dup2(nothing, 2)
        deselected = [f"--deselect={name}" for name in without]
        arguments = ["-x", "-q", "-p", "no:cacheprovider", "--timeout=120", *deselected, *tests]
        os._exit(int(pytest.main(arguments, [_Report(failures)])))
    status = os.waitpid(child, 0)[1]
    failed = failures.read_text(encoding="utf-8").splitlines()
    if os.WIFSIGNALED(status) and not failed:
        return None
    nothing_wrong = (0, 5)  # 5: all are deselected, or need what is not here
    return failed[0] if failed else "" if os.waitstatus_to_exitcode(status) in nothing_wrong else tests[0]


def judge(folder: Path, file: Path, mutant: bytes, tests: Sequence[str], seconds: int, broken: list[str]) -> str:
    """Return "noticed", "lives" or "unfinished"; tests that fail on the unchanged copy too are added to broken."""
    path = folder / file
    source, time_ns = path.read_bytes(), path.stat().st_mtime_ns
    while True:
        path.write_bytes(mutant)
        os.utime(path, (next(TIMES),) * 2)
        try:
            failed = first_failure(folder, tests, seconds, broken)
        finally:
            path.write_bytes(source)
            os.utime(path, ns=(time_ns, time_ns))
        if not failed:
            return "unfinished" if failed is None else "lives"
        if first_failure(folder, [failed], seconds) == "":
            return "noticed"
        broken.append(failed)


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
        if options.core:  # in the whole package, others take the place of the core's samplers and spacings
            fork.fork(folder, "forked")
        else:
            listing = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]  # new files too
            for file in subprocess.check_output(listing, cwd=ROOT, text=True).splitlines():
                (folder / file).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(ROOT / file, folder / file)
        package = folder / ("forked" if options.core else "ldm_lite")
        files = sorted(package.rglob("*.py"))
        places = [(file.relative_to(folder), change) for file in files for change in changes_of(file.read_bytes())]
        mutants = random.Random(options.seed).sample(places, options.count)
        os.environ["PYTHONPATH"] = name
        tests, outcomes, broken = Tests(folder), list[str](), list[str]()
        for number, (path, (start, end, text)) in enumerate(mutants):
            if options.only is not None and number not in options.only:
                continue
            source = (folder / path).read_bytes()
            line = source[:start].count(b"\n") + 1
            changed = source[:start] + text.encode() + source[end:]
            outcomes.append(judge(folder, path, changed, tests.near(path, line), options.seconds, broken))
            print(
                f"{number} {outcomes[-1]} {path}:{line} {source[start:end].decode()!r} -> {text!r}"
                f"  in {source.splitlines()[line - 1].decode().strip()}",
                flush=True,
            )
        share = outcomes.count("noticed") / max(1, len(outcomes))
        print(f"{outcomes.count('noticed')} of {len(outcomes)} were noticed: {share:.0%}")
        if outcomes.count("unfinished"):
            print(f"{outcomes.count('unfinished')} were not finished in {options.seconds} s")
        for test in broken:
            print(f"left out, since it fails on the unchanged copy too: {test}")


if __name__ == "__main__":
    main()
