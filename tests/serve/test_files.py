"""A request names no file of the server: no option does, and no prompt of any model."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import random_checkpoint
import toy_zoo

from ldm_lite.cli.options import LoadOptions, names_files
from ldm_lite.cli.task_options import Img2imgOptions, InpaintOptions, Txt2imgOptions, UpscaleOptions
from ldm_lite.serve.library import Library
from ldm_lite.serve.options import ServeOptions
from ldm_lite.serve.queue import Engine

KINDS: dict[str, Any] = {
    "txt2img": Txt2imgOptions,
    "img2img": Img2imgOptions,
    "inpaint": InpaintOptions,
    "upscale": UpscaleOptions,
}
FILES = [(task, field.name) for task, kind in KINDS.items() for field in filter(names_files, dataclasses.fields(kind))]


def test_the_options_that_name_files_are_known() -> None:
    names = {name for _, name in FILES}
    assert names >= {"from_file", "from_png", "wildcards", "embedding", "control", "clip_vision", "refiner", "depth"}
    assert names >= {"image_embedding", "image_statistics", "init_img", "mask", "indir"}


@pytest.mark.parametrize(("task", "name"), FILES)
def test_no_request_gives_the_name_of_a_file(library: Library, tmp_path: Path, task: str, name: str) -> None:
    """Not even of one that exists: the folder of wildcards was a field of the page."""
    (tmp_path / "secret.txt").write_text("the secret")
    options = KINDS[task](prompt="__secret__", **{name: str(tmp_path)})
    with pytest.raises(ValueError, match=f"got `{name}` from a request, which cannot name files of the server"):
        Engine(library, ServeOptions()).submit(task, options)


@pytest.mark.parametrize("name", ["ldm_layout2img", "ldm_semantic_synthesis", "rdm768"])
def test_models_whose_prompts_are_files_are_not_served(tmp_path: Path, name: str) -> None:
    path = tmp_path / f"{name}.safetensors"
    random_checkpoint.write(path, toy_zoo.small(name))
    with pytest.raises(ValueError, match="whose prompts are file names: it cannot be served"):
        Library(LoadOptions(ckpt=path, device="cpu"), ServeOptions())
