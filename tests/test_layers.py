"""The import rules of docs/architecture.md, and what modules below the commands must not do."""

import ast
import importlib
import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "ldm_lite"
# Folders and files directly under ldm_lite, in layers: each may import from the layers below it, and from itself.
LAYERS = [
    {"core"},
    {"models", "diffusion", "text", "cli", "image", "image_headers"},
    {"zoo", "runtime"},
    {"checkpoint"},
    {"conditioning"},
    {"formats", "families"},
    {"adapters"},
    {"generate", "control"},
    {"tasks"},
    {"features"},
    {"pipeline"},
    {"toolkit", "networks"},
    {"train"},
    {"batch", "bench", "serve"},
    {"commands"},
    {"txt2img", "img2img", "inpaint", "upscale", "cascade", "reconstruct", "export", "verify"},
    {"__init__", "__main__"},
]
# Within a layer.
ALSO = {("generate", "control"), ("zoo", "runtime"), ("image", "cli"), ("text", "cli")}
ALSO |= {("image", "image_headers"), ("text", "image_headers")}
# The main parts of commands.
PRINTING = {
    *("tasks.command", "tasks.export", "tasks.reconstruct", "tasks.verify"),
    *("train.__main__", "train.averages"),
    "batch.__main__",
    *("core.__main__", "core.words"),
}
COMMANDS = {
    "txt2img",
    "img2img",
    "inpaint",
    "upscale",
    "cascade",
    "reconstruct",
    "export",
    "verify",
    "__main__",
}
BLOCKS = {"models.unet": {"models.adm"}, "models.unet_if": {"models.adm", "models.unet"}}
BLOCKS |= {"models.chroma": {"models.flux"}, "models.flux2": {"models.flux"}}
BLOCKS |= {"models.controlnet": {"models.unet"}}
BLOCKS |= {"models.ip_adapter": {"models.clip_vision", "models.unet"}}
BLOCKS |= {"models.clip_vision": {"models.clip"}, "models.redux": {"models.clip_vision"}}
BLOCKS |= {"models.qwen25_vl": {"models.clip_vision", "models.qwen3"}}
BLOCKS |= {"models.open_clip": {"models.clip"}, "models.style_adapter": {"models.open_clip"}}
FILES = sorted(PACKAGE.rglob("*.py"))


def module(path: Path) -> str:
    return ".".join(path.relative_to(PACKAGE).with_suffix("").parts)


def imports(path: Path) -> set[str]:
    """Modules of ldm_lite that a file imports anywhere, without "ldm_lite."."""
    modules = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "ldm_lite":
            base = node.module.removeprefix("ldm_lite").lstrip(".")
            for alias in node.names:
                inner = f"{base}.{alias.name}".lstrip(".")
                is_module = (PACKAGE / Path(*inner.split("."))).with_suffix(".py").exists() or (
                    PACKAGE / Path(*inner.split("."))
                ).is_dir()
                modules.add(inner if is_module else base)
        elif isinstance(node, ast.Import):
            modules |= {
                alias.name.removeprefix("ldm_lite").lstrip(".") for alias in node.names if "ldm_lite" in alias.name
            }
    return {name for name in modules if name}


def layer(name: str) -> int:
    return next(i for i, names in enumerate(LAYERS) if name in names)


@pytest.mark.parametrize("path", FILES, ids=module)
def test_imports_go_one_way(path: Path) -> None:
    name = module(path)
    package = name.split(".")[0]
    for imported in imports(path):
        target = imported.split(".")[0]
        if target == package or name == "__init__":
            continue
        below = layer(target) < layer(package) or (package, target) in ALSO or imported == "__init__"
        assert below, f"{name} must not import {imported}"
    if name.startswith("models."):
        # a network may be made of another's blocks
        shared = {"core.layers", "core.unet", "core.vae", "core.clip", "models.ops"}
        assert imports(path) <= shared | BLOCKS.get(name, set())


def test_there_are_no_import_circles() -> None:
    """Inside folders too, and not by an import inside a function either."""
    graph = {module(path): imports(path) for path in FILES}
    while leaves := [name for name, targets in graph.items() if not targets & graph.keys()]:
        for name in leaves:
            del graph[name]
    assert not graph, "these import each other, or what does"


def test_every_folder_has_a_layer() -> None:
    for path in FILES:
        layer(module(path).split(".")[0])


@pytest.mark.parametrize("path", FILES, ids=module)
def test_no_printing_environment_or_flags_below_the_commands(path: Path) -> None:
    name = module(path)
    if name.split(".")[0] in COMMANDS | {"cli", "bench"} or name in PRINTING:
        return
    source = path.read_text().replace("torch.backends.mps.is_available", "")  # a question, which sets nothing
    for node in ast.walk(ast.parse(source)):
        assert not (isinstance(node, ast.Call) and getattr(node.func, "id", None) == "print"), f"{name} prints"
    if name != "train.distributed" and name.split(".")[0] != "runtime":
        for forbidden in ("os.environ", "sys.argv", "torch.backends", "torch._inductor", "set_default_dtype"):
            assert forbidden not in source, f"{name} touches {forbidden}"


TOOLS = ("train", "batch", "serve", "bench")
FACADE = ("toolkit", "networks")
OPEN_TO_TOOLS = ("cli", "image", "core", *FACADE)  # besides the public names of ldm_lite
BESIDE_THE_FACADE = {
    # What training learns and what it leaves alone are layers: it tells kinds of networks apart.
    "train": {"models", "runtime.patching"},
    # `--encode` writes what training reads.
    "batch": {"train"},
    # Tables of names (samplers, spacings, A1111's), the text of pictures, and X/Y plots: small interfaces of their own.
    # It lists textual inversions with their shapes, and its health says whether a step is being compiled.
    "serve": {"checkpoint.reader", "diffusion", "runtime.compile", "tasks.picture_text", "tasks.xy", "text.parameters"},
    # It names kernels and devices, counts a sampler's calls, and makes checkpoints of every family with random weights.
    "bench": {"checkpoint.reader", "diffusion.names", "runtime", "zoo"},
}


def is_within(name: str, places: Iterable[str]) -> bool:
    return any(f"{name}.".startswith(f"{place}.") for place in places)


@pytest.mark.parametrize("path", [path for path in FILES if module(path).split(".")[0] in TOOLS], ids=module)
def test_tools_use_the_facade(path: Path) -> None:
    tool = module(path).split(".")[0]
    allowed = {tool, *OPEN_TO_TOOLS, *BESIDE_THE_FACADE[tool]}
    assert not [name for name in imports(path) if not is_within(name, allowed)]


def test_no_exception_to_the_facade_is_left_over() -> None:
    for tool, places in BESIDE_THE_FACADE.items():
        used = {name for path in FILES if module(path).split(".")[0] == tool for name in imports(path)}
        assert not [place for place in places if not any(is_within(name, [place]) for name in used)]


def test_the_facade_is_narrow_and_in_the_documentation() -> None:
    names = [name for facade in FACADE for name in importlib.import_module(f"ldm_lite.{facade}").__all__]
    assert len(names) <= 34
    documented = (ROOT / "docs/architecture.md").read_text()
    assert not [name for name in names if f"`{name}`" not in documented]
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module in [f"ldm_lite.{facade}" for facade in FACADE]:
                assert {alias.name for alias in node.names} <= set(names), module(path)


CORE = sorted((PACKAGE / "core").rglob("*.py"))
# What the core does not know: families, formats, adapters and features by name.
RINGS = (
    *("lora", "gguf", "flux", "sdxl", "sd2", "sd3", "kontext", "z_image", "deepfloyd", "upscaler", "controlnet"),
    *("taesd", "diffusers_folder", "open_clip", "t5", "qwen", "hires", "refiner", "compat", "seamless", "deep_cache"),
    *("freeu", "wildcards", "regions", "a1111", "webui", "offload", "quantis", "quantiz", "triton", "winograd"),
    *("inversion", "ip_adapter", "masked_area", "from_png", "turbo", "sd_turbo"),
)


def test_the_core_is_a_few_files() -> None:
    assert len(CORE) <= 25


@pytest.mark.parametrize("path", CORE, ids=module)
def test_the_core_stands_alone(path: Path) -> None:
    assert all(name.split(".")[0] == "core" for name in imports(path))
    words = set(re.findall(r"[a-z0-9_]+", path.read_text().lower()))
    assert not [name for name in RINGS if any(name in word for word in words)]


@pytest.mark.parametrize("path", FILES, ids=module)
def test_public_names_have_docstrings(path: Path) -> None:
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and not node.name.startswith("_"):
            if "overload" in map(ast.unparse, node.decorator_list):
                continue
            assert ast.get_docstring(node), f"{module(path)}.{node.name} has no docstring"


FORBIDDEN = ("diffusers", "transformers", "einops", "omegaconf", "pytorch_lightning", "torchvision", "scipy")


def run(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, cwd=ROOT).stdout


def test_tasks_and_features_name_their_types() -> None:
    paths = [*(PACKAGE / "tasks").glob("*.py"), *(PACKAGE / "features").glob("*.py")]
    lines = [line for path in paths for line in path.read_text().splitlines() if not line.startswith("from ")]
    assert sum(bool(re.search(r"\bAny\b", line)) for line in lines) <= 40


@pytest.mark.slow
def test_importing_touches_nothing() -> None:
    """`import ldm_lite` and --help do not import torch; nothing imports the peers, nor initialises CUDA."""
    assert run("import sys, ldm_lite, ldm_lite.txt2img; print('torch' in sys.modules)").strip() == "False"
    code = f"""
import os, sys
before = dict(os.environ)
import ldm_lite, ldm_lite.txt2img, torch
pipe = ldm_lite.load(device="cpu")
from ldm_lite import generate
print([m for m in {(*FORBIDDEN, "torch._dynamo")} if m in sys.modules])
print(torch.cuda.is_initialized(), before == dict(os.environ))
"""
    assert run(code).split() == ["[]", "False", "True"]


ORIGINAL = "prompt outdir skip_grid skip_save ddim_steps plms fixed_code ddim_eta n_iter H W C f n_samples n_rows scale"
ORIGINAL += " from-file config ckpt seed precision dpm_solver"


@pytest.mark.parametrize(
    ("command", "more"),
    [
        ("txt2img", "laion400m"),
        ("img2img", "init-img strength input output edit cfg-text cfg-image image-scale exact-steps resize"),
        ("inpaint", "indir mask init-img strength extend feather no-paste invert-mask"),
    ],
)
def test_help_is_fast_and_complete(command: str, more: str) -> None:
    code = (
        f"import sys, ldm_lite.{command} as c\n"
        "try: c.main(['--help-all'])\n"
        "except SystemExit as e: print(e.code, 'torch' in sys.modules)"
    )
    text = run(code)
    assert text.strip().endswith("0 False")
    original = f"{ORIGINAL} {more}"
    for name in [*original.split(), "compat", "batch-size", "negative-prompt", "sampler", "device", "dtype", "out"]:
        assert f"--{name}" in text or f"--{name.replace('_', '-')}" in text


def public_names(tree: ast.Module) -> set[str]:
    """The names without an underscore that a module defines at its top level."""
    names = set()
    for node in tree.body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            names.add(node.name)
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names |= {target.id for target in targets if isinstance(target, ast.Name)}
    return {name for name in names if not name.startswith("_")}


def test_names_that_stand_in_both_the_core_and_the_package_are_in_the_documentation_with_a_reason() -> None:
    core, package = set[str](), set[str]()
    for path in (ROOT / "ldm_lite").rglob("*.py"):
        names = core if "core" in path.relative_to(ROOT).parts else package
        names |= public_names(ast.parse(path.read_text(encoding="utf-8")))
    table = (ROOT / "docs/architecture.md").read_text().split("## Names in core and package")[1].split("\n## ")[0]
    listed = {
        name
        for row in table.splitlines()
        if row.startswith("| `")
        for name in re.findall("`(\\w+)`", row.split("|")[1])
    }
    assert core & package == listed
    assert len(listed) <= 15
