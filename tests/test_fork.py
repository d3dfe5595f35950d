"""scripts/fork.py writes the core as a package of its own, whose images are those of the whole package, bit for bit."""

import ast
import os
import re
import resource
import shlex
import subprocess
import sys
import sysconfig
from importlib import metadata
from pathlib import Path
from typing import Any

import fork
import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

import ldm_lite
from ldm_lite import core

APPLE = "a red apple on a blue background"
ODD = "a \u201cred\u201d apple\u2019s &amp; \uff21 \x92 \ufb05 " + "long " * 90


# ---- the same images ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def ours() -> core.Pipeline:
    return core.load(device="cpu")


@pytest.fixture(scope="module")
def plain() -> ldm_lite.Pipeline:
    return ldm_lite.load(device="cpu", kernels="plain")


@pytest.fixture(scope="module")
def apple(plain: ldm_lite.Pipeline) -> Image.Image:
    return plain.txt2img(APPLE, steps=6)[0]


def pixels(pipe: core.Pipeline, **options: Any) -> Tensor:
    return torch.stack([result.pixels for result in pipe.results(**options)])


SAMPLERS = ("ddim", "plms", "euler", "euler_a", "dpmpp_2m")  # the core's
TEXT: dict[str, dict[str, Any]] = {
    **{name: {"prompt": "a red apple", "sampler": name, "steps": 4} for name in SAMPLERS},
    "a step": {"prompt": "a cat", "sampler": "ddim", "steps": 1},
    "a step with noise": {"prompt": "a cat", "sampler": "euler_a", "steps": 1},
    "karras": {"prompt": "a cat", "sampler": "dpmpp_2m", "spacing": "karras", "steps": 3},
    "trailing": {"prompt": "a cat", "sampler": "dpmpp_2m", "spacing": "trailing", "steps": 3},
    "eta": {"prompt": "a cat", "sampler": "ddim", "eta": 0.7, "steps": 3},
    "defaults": {"prompt": "a cat"},
    "no guidance": {"prompt": "a cat", "scale": 1, "steps": 3},
    "negative prompt": {"prompt": "a cat", "negative_prompt": "blue", "scale": 6.0, "steps": 3},
    "batches": {"prompt": ["a", "a dog", "a cat"], "batch_size": 2, "seed": [5, 9, 1], "steps": 2},
    "several of one": {"prompt": "a cat", "batch_size": 2, "seed": 3, "sampler": "euler_a", "steps": 2},
    "96 x 80": {"prompt": "a cat", "width": 96, "height": 80, "steps": 2},
    "8 x 248": {"prompt": "a cat", "width": 8, "height": 248, "steps": 1},
    "an odd text": {"prompt": ODD, "steps": 2},
}


@pytest.mark.parametrize("case", TEXT)
def test_text_to_image(case: str, ours: core.Pipeline, plain: ldm_lite.Pipeline) -> None:
    theirs = plain.txt2img(**TEXT[case], output="tensor")
    assert torch.equal(pixels(ours, **TEXT[case]), torch.stack(theirs))


@pytest.mark.parametrize("strength", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("size", [(64, 64), (90, 61), (150, 100)])
def test_image_to_image(
    strength: float, size: tuple[int, int], ours: core.Pipeline, plain: ldm_lite.Pipeline, apple: Image.Image
) -> None:
    options: dict[str, Any] = {"strength": strength, "sampler": "euler_a", "steps": 4}
    image = apple.resize(size)
    theirs = plain.img2img("a cat", image, **options, output="tensor")
    assert torch.equal(pixels(ours, prompt="a cat", image=image, **options), torch.stack(theirs))


@pytest.mark.parametrize(
    "options",
    [
        {"steps": 3},
        {"steps": 3, "sampler": "plms"},
        {"steps": 4, "sampler": "dpmpp_2m", "strength": 0.6},
        {"steps": 2, "sampler": "euler_a", "batch_size": 2},
    ],
)
def test_inpainting(options: dict[str, Any], ours: core.Pipeline, plain: ldm_lite.Pipeline, apple: Image.Image) -> None:
    mask = Image.new("L", apple.size)
    mask.paste(255, (27, 0, 64, 50))
    theirs = plain.inpaint("a rocket", apple, mask, **options, output="tensor")
    assert torch.equal(pixels(ours, prompt="a rocket", image=apple, mask=mask, **options), torch.stack(theirs))


def test_parts(ours: core.Pipeline, plain: ldm_lite.Pipeline, apple: Image.Image) -> None:
    assert torch.equal(ours.encode(apple), plain.encode(apple))
    assert torch.equal(ours.noise([1, 2]), plain.noise([1, 2]))
    latents = [
        pipe.denoise(pipe.noise(1), pipe.encode_prompt("a cat"), pipe.encode_prompt(""), pipe.plan("ddim", 3), 2.5)
        for pipe in (ours, plain)
    ]
    assert torch.equal(*latents)
    assert ours.decode(latents[0])[0].tobytes() == plain.decode(latents[0])[0].tobytes()
    previews = [[state.x0 for state in pipe.stream("a cat", steps=3, sampler="plms")] for pipe in (ours, plain)]
    assert torch.equal(*map(torch.stack, previews))


# ---- the script -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A fork named mylab."""
    folder = tmp_path_factory.mktemp("forks") / "source"
    assert fork.main([str(folder), "--name", "mylab"]) == 0
    return folder


def test_the_command_that_is_shown_installs_the_folder_and_no_package_of_that_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "my work").mkdir()
    monkeypatch.chdir(tmp_path / "my work")
    assert fork.main(["mylab", "--name", "mylab"]) == 0
    folder = str(tmp_path / "my work" / "mylab")
    assert shlex.split(capsys.readouterr().out)[:5] == ["pip", "install", folder, "&&", "python"]


def test_a_fork_names_itself(source: Path) -> None:
    assert sorted(path.name for path in source.iterdir()) == [
        *(".gitignore", "LICENSE", "README.md", "mylab", "pyproject.toml", "tests")
    ]
    texts = [path for path in source.rglob("*") if path.suffix in (".py", ".md", ".toml")]
    assert len(list(source.glob("mylab/*.py"))) == len(list(fork.CORE.glob("*.py")))
    for path in texts:
        names = set(re.findall("ldm_lite.", path.read_text(encoding="utf-8")))
        assert names <= (
            {"ldm_lite."} if path.stem in ("family", "random_sd1", "features") else set()
        )  # what is read is named as ours
    assert "from mylab.pipeline import Pipeline, load" in (source / "mylab" / "__init__.py").read_text()
    assert (source / "README.md").read_text().startswith("# mylab\n")
    assert (source / "mylab" / "weights" / "emoji.safetensors").stat().st_size > 20_000_000


def test_it_needs_what_it_imports_and_no_more(source: Path) -> None:
    """The package its dependencies, the tests pytest too."""
    line = next(line for line in (source / "pyproject.toml").read_text().splitlines() if "dependencies = " in line)
    needed = {name.partition(">")[0].replace("pillow", "PIL") for name in ast.literal_eval(line.partition(" = ")[2])}
    allowed = needed | set(sys.stdlib_module_names) | {"mylab"}
    assert fork.imports(source.glob("mylab/*.py")) - set(sys.stdlib_module_names) == needed | {"mylab"}
    helpers = {path.stem for path in source.glob("tests/*.py")}
    assert fork.imports(source.glob("tests/*.py")) <= allowed | helpers | {"pytest"}


def test_its_tests_read_the_data_that_it_has(source: Path) -> None:
    named = {name for path in source.glob("tests/*.py") for name in fork.DATA if name in path.read_text()}
    assert named == set(fork.DATA) == {path.name for path in source.glob("tests/data/*")}


@pytest.mark.parametrize("name", ["my-lab", "1lab", "class", "", "my lab", "_lab", "lab_", "na\u00efve", "a.b", "None"])
def test_a_name_must_be_that_of_a_package(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert fork.main([str(tmp_path / "new"), "--name", name]) == 1
    assert (
        capsys.readouterr().err
        == f"error: got the name {name!r}, expected letters, digits and underscores, as in mylab\n"
    )
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("name", ["json", "torch", "Torch", "PIL", "tokenizers", "pytest", "random_sd1", "ldm_lite"])
def test_a_name_must_hide_no_other_module(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert fork.main([str(tmp_path / "new"), "--name", name]) == 1
    wanted = f"error: there is a module {name} already, which the package would hide: use another name\n"
    assert capsys.readouterr().err == wanted


def test_a_folder_with_files_is_left_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes.txt").write_text("mine")
    for folder in (tmp_path / "full", tmp_path / "full" / "notes.txt"):
        assert fork.main([str(folder), "--name", "mylab"]) == 1
        assert capsys.readouterr().err == f"error: {folder} is not an empty folder: use another one\n"
    assert os.listdir(tmp_path / "full") == ["notes.txt"]
    assert fork.main([str(tmp_path / "full" / "notes.txt" / "in"), "--name", "mylab"]) == 1
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.slow
def test_a_fork_is_installed_and_tested_and_makes_the_image(source: Path, tmp_path: Path) -> None:
    """In a new environment, which sees the packages that this one has installed."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "PYTEST"))}

    def run(*command: str | Path) -> str:
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    run(sys.executable, "-m", "venv", "--without-pip", "env")
    python = tmp_path / "env" / "bin" / "python"
    packages = Path(run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip())
    paths = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
    (packages / "installed.pth").write_text("\n".join(sorted(paths)))
    # Without a setuptools that is new enough, pip downloads one.
    versions = [int(package.version.partition(".")[0]) for package in metadata.distributions(name="setuptools")]
    isolation = ["--no-build-isolation"] if max(versions, default=0) >= 77 else []
    run(python, "-m", "pip", "install", "--quiet", "--no-deps", *isolation, source)
    where = run(python, "-c", "import sys, mylab; print(mylab.__file__, 'ldm_lite' in sys.modules)")
    assert where.split() == [str(packages / "mylab" / "__init__.py"), "False"]

    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert " passed" in run(python, "-m", "pytest", "-q", source / "tests")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 60

    # A file of features that is written for ldm_lite runs in a fork as it is, with the same pixels.
    page = (Path(__file__).parents[1] / "docs" / "forking.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    (tmp_path / "pag.py").write_text(next(block for block in blocks if "class PAG" in block), encoding="utf-8")
    words = (APPLE, "--steps", "4", "--device", "cpu", "--feature", "pag.py", "--pag-scale", "3")
    run(python, "-m", "mylab", *words, "--out", "fork.png")
    run(sys.executable, "-m", "ldm_lite.txt2img", *words, "--kernels", "plain", "--out", "ring.png")
    images = [np.asarray(Image.open(tmp_path / name)).astype(int) for name in ("fork.png", "ring.png")]
    assert np.abs(images[0] - images[1]).max() <= 1

    run(python, "-m", "mylab", APPLE, "--device", "cpu")
    image = ldm_lite.load(device="cpu", kernels="plain").txt2img(APPLE)[0]
    assert np.array_equal(np.asarray(Image.open(tmp_path / "out.png")), np.asarray(image))
