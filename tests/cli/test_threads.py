"""What commands and `ldm_lite.load` set for PyTorch's threads, in processes that have not loaded it yet."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

NAMES = ("GOMP_SPINCOUNT", "KMP_BLOCKTIME", "OMP_WAIT_POLICY", "KMP_LIBRARY", "OMP_NUM_THREADS", "MKL_NUM_THREADS")
PLAIN = {name: value for name, value in os.environ.items() if name not in NAMES}
SPIN = {"GOMP_SPINCOUNT": "1000", "KMP_BLOCKTIME": "0"}
CODE = """
import json, os, pathlib, sys
os.sched_getaffinity = lambda process: range(8)
from ldm_lite.cli.threads import settings
for case in json.load(sys.stdin):
    print(json.dumps(settings(case["environment"], *map(pathlib.Path, case["paths"]))))
assert "torch" not in sys.modules
"""


def settings(*cases: tuple[dict[str, str], Path]) -> list[dict[str, str]]:
    """What is set in each of these environments, with the control groups that a folder has, on eight cores."""
    inputs = [{"environment": case, "paths": [str(folder), str(folder / "memberships")]} for case, folder in cases]
    command = [sys.executable, "-c", CODE]
    done = subprocess.run(command, input=json.dumps(inputs), env=PLAIN, capture_output=True, text=True, check=True)
    return list(map(json.loads, done.stdout.splitlines()))


def test_what_the_user_has_set_stays(tmp_path: Path) -> None:
    values = ("GOMP_SPINCOUNT", "5"), ("OMP_WAIT_POLICY", "active"), ("KMP_BLOCKTIME", "1"), ("KMP_LIBRARY", "serial")
    assert settings(({}, tmp_path), *(({name: value}, tmp_path) for name, value in values)) == [SPIN, {}, {}, {}, {}]


@pytest.mark.parametrize(
    ("files", "threads"),
    [
        ({"memberships": "0::/\n", "cpu.max": "150000 100000\n"}, "2"),  # a container
        ({"memberships": "0::/\n", "cpu.max": "50000 100000\n"}, "1"),
        ({"memberships": "0::/\n", "cpu.max": "max 100000\n"}, None),
        ({"memberships": "0::/\n", "cpu.max": "800000 100000\n"}, None),  # as many as there are
        ({"memberships": "0::/a/b\n", "a/cpu.max": "300000 100000\n", "a/b/cpu.max": "max 100000\n"}, "3"),
        ({"memberships": "1:cpuset:/c\n", "cpuset/c/cpu.cfs_quota_us": "100000\n"}, None),
        ({"memberships": "4:cpu,cpuacct:/a\n0::/\n", "cpu,cpuacct/a/cpu.cfs_quota_us": "250000\n"}, "3"),
        ({"memberships": "4:cpu:/not-here\n", "cpu/cpu.cfs_quota_us": "100000\n"}, "1"),
        ({"memberships": "4:cpu:/\n", "cpu/cpu.cfs_quota_us": "-1\n"}, None),
        ({}, None),
    ],
)
def test_a_share_of_the_cores_limits_the_threads(files: dict[str, str], threads: str | None, tmp_path: Path) -> None:
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        if path.name == "cpu.cfs_quota_us":
            path.with_name("cpu.cfs_period_us").write_text("100000\n")
    users = {"OMP_NUM_THREADS": "5"}, {"MKL_NUM_THREADS": "5"}
    expected = SPIN if threads is None else {**SPIN, "OMP_NUM_THREADS": threads}
    assert settings(({}, tmp_path), *((user, tmp_path) for user in users)) == [expected, SPIN, SPIN]


@pytest.mark.parametrize("start", ["-m ldm_lite", "-c import ldm_lite; ldm_lite.load"])
@pytest.mark.parametrize(("user", "spins"), [({}, "'1000'"), ({"OMP_WAIT_POLICY": "passive"}, "'0'")])
def test_the_library_of_threads_reads_it(start: str, user: dict[str, str], spins: str) -> None:
    """It prints what it has read when torch loads it."""
    environment = {**PLAIN, **user, "OMP_DISPLAY_ENV": "verbose"}
    done = subprocess.run([sys.executable, *start.split(" ", 1)], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    if "GOMP_SPINCOUNT" not in done.stderr:
        pytest.skip("this build of torch has another library of threads than GNU's")
    assert f"GOMP_SPINCOUNT = {spins}" in done.stderr


def test_in_a_process_that_has_loaded_torch_nothing_is_set() -> None:
    code = "import os, torch, ldm_lite; before = dict(os.environ); ldm_lite.load; assert before == dict(os.environ)"
    subprocess.run([sys.executable, "-c", code], env=PLAIN, check=True)
