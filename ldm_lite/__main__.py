"""`python -m ldm_lite`: the commands, the versions of what matters, and the devices."""

import importlib.metadata
import platform
import sys

import ldm_lite
from ldm_lite.cli import console

COMMANDS = {
    "txt2img": "text to image",
    "img2img": "a picture to another, by strength or by instruction",
    "inpaint": "repaint what a mask says, or beyond the edges",
    "upscale": "pictures four times as large",
    "cascade": "DeepFloyd IF: text to image in stages",
    "reconstruct": "a picture through an autoencoder and back",
    "samplers": "compare samplers: a table and a picture",
    "train": "train or fine-tune",
    "export": "compile the UNet ahead of time",
    "bench": "measure: speed, memory, against peers",
}


def main() -> int:
    """Print what there is -> exit status."""
    return console.run(_print)


def _print() -> None:
    print(f"ldm_lite {ldm_lite.__version__}: latent diffusion from scratch in PyTorch 2\n\ncommands")
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

    lines = [f"cpu: {platform.processor() or platform.machine()}, {torch.get_num_threads()} threads"]
    if torch.backends.mps.is_available():
        lines.append("mps: Apple GPU")
    for i in range(torch.cuda.device_count()):
        about = torch.cuda.get_device_properties(i)
        lines.append(f"cuda:{i}: {about.name}, {about.total_memory / 2**30:.0f} GiB, sm_{about.major}{about.minor}")
    return lines


if __name__ == "__main__":
    sys.exit(main())
