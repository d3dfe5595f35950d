"""On a bare machine nothing is found that pip has not installed, and what is run by its path fails."""

import subprocess
import sys
from pathlib import Path

import pytest

CODE = """
import shutil, subprocess, sys
bash = shutil.which("bash")
import machine
machine.strip()
subprocess.run([sys.executable, "-c", "import shutil; assert shutil.which('bash') is None"], check=True)
assert not any(find() for find in machine.THINGS.values())
try:
    subprocess.run([bash, "-c", "exit"])
except BaseException as error:
    print(error)
"""


@pytest.mark.needs("bash")
def test_a_bare_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    tests = Path(__file__).parent
    monkeypatch.setenv("PYTHONPATH", f"{tests / 'fixtures'}:{tests.parent / 'scripts'}")
    monkeypatch.setenv("LDM_LITE_TEST_BARE", "1")
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True)
    assert done.stdout.endswith("/bash is run, which pip has not installed: mark the test as one that needs it\n"), done
