"""Install each extra of pyproject.toml alone, beside the wheel, and import its packages and the modules that need it.

    python scripts/check_extras.py .venv-test/wheel .venv-test/dist [EXTRA...]

The first is an environment that has the wheel, the second the wheel's folder.  Each extra gets a separate
environment, which sees the first one's packages, so that torch is installed once.
"""

import subprocess
import sys
import time
import tomllib
import venv
from pathlib import Path

ROOT = Path(__file__).parents[1]
NEEDING = {  # modules of the package that an extra is for
    "plot": ["ldm_lite.bench.report"],
    "serve": ["ldm_lite.serve.server"],
    "serve-ray": ["ldm_lite.serve.ray", "ldm_lite.serve.server"],
    "batch": ["ldm_lite.batch.table", "ldm_lite.batch.store"],
    "ray": ["ldm_lite.batch.ray_engine"],
}
IMPORT = """
import importlib, re, sys
from importlib.metadata import packages_distributions, requires
extra, *modules = sys.argv[1:]
name = lambda text: re.match(r"[\\w.-]+", text)[0].lower().replace("_", "-")
wanted = {name(line) for line in requires("ldm_lite") if re.search(rf"extra == .{extra}.$", line)}
ours = {key: {name(each) for each in dists} for key, dists in packages_distributions().items()}
modules += [key for key, dists in ours.items() if dists & wanted and key.isidentifier() and key[0] != "_"]
assert wanted <= set().union(*ours.values()), wanted
for module in modules:
    try:
        importlib.import_module(module)
    except RuntimeError as error:  # torchvision is of another build than a torch for CPUs alone: nothing of ours
        if "torchvision::nms" not in str(error.__cause__ or error):
            raise
        print(f"({module}: {error.__cause__ or error})", end=" ")
print(*sorted(modules))
"""


def main() -> None:
    """The command line."""
    wheel, dist = (Path(argument).resolve() for argument in sys.argv[1:3])
    [file] = dist.glob("*.whl")
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    [packages] = wheel.glob("lib/python*/site-packages")
    for extra in sys.argv[3:] or [extra for extra in extras if extra != "suite"]:  # the sum of others
        start, environment = time.monotonic(), wheel.parent / "extra"
        venv.create(environment, clear=True)
        [its_packages] = environment.glob("lib/python*/site-packages")
        (its_packages / "wheel.pth").write_text(f"{packages}\n")
        python = str(environment / "bin" / "python")
        install = [
            sys.executable,
            "-m",
            "pip",
            "--python",
            python,
            "install",
            "-q",
            "-c",
            str(ROOT / ".ci" / "constraints.txt"),
        ]
        subprocess.run([*install, f"{file}[{extra}]"], check=True)
        code = [python, "-c", IMPORT, extra, *NEEDING.get(extra, ())]
        modules = subprocess.run(code, cwd=wheel, check=True, stdout=subprocess.PIPE, text=True).stdout.strip()
        print(f"{extra}: {modules} ({time.monotonic() - start:.0f} s)", flush=True)


if __name__ == "__main__":
    main()
