"""`python -m ldm_lite` lists commands, versions and devices; `ldm-lite NAME` runs a command."""

import difflib
import importlib
import importlib.metadata
import platform
import sys
from collections.abc import Sequence

from ldm_lite.cli import console
from ldm_lite.cli.version import __version__

COMMANDS = {
    "txt2img": "text to image",
    "img2img": "image to image, by strength or by instruction",
    "inpaint": "repaint what a mask marks, or beyond the edges",
    "upscale": "images four times as large",
    "cascade": "DeepFloyd IF: text to image in stages",
    "reconstruct": "an image through an autoencoder and back",
    "verify": "check a checkpoint against published numbers",
    "batch": "images of a table of prompts, by the million",
    "serve": "an HTTP API, and a page in the browser",
    "train": "train or fine-tune",
    "export": "compile the UNet ahead of time",
    "bench": "measure speed and memory, also of other programs",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command that the arguments name, or list the commands; return the exit status."""
    name, *rest = list(sys.argv[1:] if argv is None else argv) or [""]
    if name in COMMANDS:
        folder = ".__main__" if name in ("serve", "train", "bench", "batch") else ""
        status: int = importlib.import_module(f"ldm_lite.{name}{folder}").main(rest)
        return status
    if name in ("-V", "--version"):
        print(f"ldm_lite {__version__}")
        return 0
    if name in ("", "-h", "--help"):
        return console.run(_print)
    from ldm_lite.cli.synonyms import of_command  # a table that is only read here

    near = [of_command(name)] if of_command(name) else difflib.get_close_matches(name, COMMANDS, n=1)
    hint = f"did you mean {near[0]}? " if near else ""
    print(f"error: unknown command {name!r}: {hint}expected one of {', '.join(COMMANDS)}", file=sys.stderr)
    return 2


def _print() -> None:
    print(f"ldm_lite {__version__}: latent diffusion from scratch in PyTorch 2\n\ncommands")
    for name, about in COMMANDS.items():
        print(f"  python -m ldm_lite.{name:<11} {about} (--help)")
    print(f"\nversions\n  python {platform.python_version()}")
    for name in ("torch", "numpy", "pillow", "safetensors", "tokenizers", "huggingface_hub"):
        print(f"  {name} {importlib.metadata.version(name)}")
    print("\ndevices")
    for line in _devices():
        print(f"  {line}")


def _devices() -> list[str]:
    import torch

    from ldm_lite.runtime import timing

    lines = [f"cpu: {timing.machine()}", f"     {timing.summary()}"]
    if torch.backends.mps.is_available():
        lines.append("mps: Apple GPU")
    for i in range(torch.cuda.device_count()):
        about = torch.cuda.get_device_properties(i)
        lines.append(f"cuda:{i}: {about.name}, {about.total_memory / 2**30:.0f} GiB, sm_{about.major}{about.minor}")
    return lines


if __name__ == "__main__":
    sys.exit(main())
