"""Write ldm_lite/cli/arguments.pyi: the options as TypedDicts, for editors and type checkers.

    python scripts/make_arguments.py

Pipeline's methods take options by name, which are declared once, as dataclasses.  A type checker reads no dataclass as
keyword arguments, so this writes the same fields in the form that it does read.  A test compares.
"""

import dataclasses
import inspect
import os
from pathlib import Path
from typing import Any, get_origin

from ldm_lite.cli.options import LoadOptions, RuntimeOptions, names_files
from ldm_lite.cli.task_options import (
    ConditioningOptions,
    Img2imgOptions,
    InpaintOptions,
    Txt2imgOptions,
    UpscaleOptions,
)

PATH = Path(__file__).parents[1] / "ldm_lite" / "cli" / "arguments.pyi"
HEAD = '''"""What load and the methods of Pipeline take by name.  Made of the options by scripts/make_arguments.py."""

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypeAlias, TypedDict

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from ldm_lite.core.denoise import State
from ldm_lite.core.plan import Plan
from ldm_lite.tasks.results import Result

Prompt: TypeAlias = str | Sequence[str] | None
Pil: TypeAlias = Literal["pil"]  # the values of `output`, and what they return
Images: TypeAlias = list[Image.Image]
Numpy: TypeAlias = Literal["numpy"]
Arrays: TypeAlias = list[NDArray[np.uint8]]
AsTensor: TypeAlias = Literal["tensor"]
Tensors: TypeAlias = list[Tensor]
Whole: TypeAlias = Literal["result"]
Results: TypeAlias = list[Result]

class Run(TypedDict, total=False):
    progress: bool
    on_step: Callable[[State], object]
'''
POSITIONAL = {"prompt", "init_img", "mask", "ckpt", "device", "dtype"}  # arguments of the methods themselves
SPECIAL = {
    "attention": "str | Callable[[Tensor, Tensor, Tensor], Tensor] | None",
    "spacing": "str | Callable[..., Any] | None",
    "guidance": "float | Callable[..., Any] | None",
    "plan": "Plan | None",
    "hires_upscaler": "str",
}


NAMES: dict[type, str] = {  # of the TypedDicts
    RuntimeOptions: "Runtime",
    LoadOptions: "Load",
    ConditioningOptions: "Conditioned",
    Txt2imgOptions: "Txt2img",
    Img2imgOptions: "Img2img",
    InpaintOptions: "Fill",
    UpscaleOptions: "Enlarge",
}
BASES: dict[type, type | None] = {
    RuntimeOptions: None,
    LoadOptions: RuntimeOptions,
    ConditioningOptions: None,
    **{Txt2imgOptions: ConditioningOptions, Img2imgOptions: Txt2imgOptions},
    **{InpaintOptions: Txt2imgOptions, UpscaleOptions: Txt2imgOptions},
}


def written(field: dataclasses.Field[Any]) -> str:
    """The type of what Python accepts for an option."""
    kind = field.type
    if field.name == "metadata":
        return "Mapping[str, str] | Sequence[str]"
    if get_origin(kind) is tuple:
        return "Any" if "Any" in str(kind) else "str | os.PathLike[str] | Sequence[str | os.PathLike[str]]"
    if field.name in SPECIAL:
        return SPECIAL[field.name]
    text = inspect.formatannotation(kind).replace("collections.abc.", "").replace("typing.", "")
    if field.metadata["parse"] is not None and "tuple" in text:  # or its text
        return text.replace(" | None", " | str | None")
    if field.metadata["choices"] is not None:
        names = ", ".join(f'"{name}"' for name in field.metadata["choices"])
        return text.replace("str", f"Literal[{names}]")
    return text.replace("str", "str | os.PathLike[str]") if names_files(field) else text


def classes() -> str:
    """The text of the file."""
    texts, known = [HEAD], dict[str, set[str]]()
    for kind, base in BASES.items():
        fields = [field for field in dataclasses.fields(kind) if field.name not in POSITIONAL]
        bases = [] if base is None else [NAMES[base]]
        bases += ["Run"] if kind is Txt2imgOptions else []
        inherited = set() if base is None else known[base.__name__]
        lines = [f"    {field.name}: {written(field)}\n" for field in fields if field.name not in inherited]
        known[kind.__name__] = {field.name for field in fields}
        heads = ", ".join([*(bases or ["TypedDict"]), "total=False"])
        texts.append(f"class {NAMES[kind]}({heads}):\n" + "".join(lines))
    return "\n".join(texts)


if __name__ == "__main__":
    PATH.write_text(classes(), encoding="utf-8")
    print(os.path.relpath(PATH))
