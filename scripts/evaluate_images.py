"""Measure images: Fréchet inception distance, precision and recall against others, and CLIP score against captions.

    python scripts/evaluate_images.py images/ --reference photos/ --clip openai/clip-vit-base-patch16

Needs the extra [evaluate]: torch-fidelity and torchmetrics compute them, with weights of networks that they download.
"""

import importlib
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ldm_lite.cli import console, flags
from ldm_lite.cli.options import CheckedOptions
from ldm_lite.cli.version import pip_install
from ldm_lite.core.declare import option


@dataclass(frozen=True)
class EvaluateOptions(CheckedOptions):
    """What to measure."""

    images: str | None = option(None, "folder of images", positional=True)
    reference: str | None = option(
        None, "folder of real images: for FID, precision and recall (thousands on both sides: FID of few is biased)"
    )
    inception: str | None = option(
        None,
        "weights of Inception v3, weights-inception-2015-12-05-6726825d.pth (default: torch-fidelity downloads it)",
    )
    clip: str | None = option(
        None, "CLIP score with this model of Hugging Face: a folder, or a name such as openai/clip-vit-base-patch16"
    )
    batch_size: int = option(32, "images at a time", within=(1, 4096))
    neighbours: int = option(3, "neighbours of precision and recall", within=(1, 100))
    device: str = option("cpu", "cuda or cpu", choices=("cpu", "cuda"))
    debug: bool = option(False, "show the traceback of an error")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status."""
    (options,), _ = flags.parse(argv, "scripts/evaluate_images.py", (__doc__ or "").splitlines()[0], (EvaluateOptions,))
    return console.run(lambda: print(json.dumps(evaluate(options), indent=1)), (options,))


def evaluate(options: EvaluateOptions) -> dict[str, float]:
    """Return what is measured, by name.  Raises ValueError, one line, for unusable folders or a missing package."""
    if options.images is None or (options.reference is None and options.clip is None):
        raise ValueError("expected a folder of images, and `reference=FOLDER` or `clip=MODEL`")
    folders = [Path(folder) for folder in (options.images, options.reference) if folder is not None]
    for folder in folders:
        if not folder.is_dir():
            raise ValueError(f"{folder}: is not a folder, expected one of images")
    metrics: dict[str, float] = {}
    if options.reference is not None:
        # Heusel et al. 2017 (FID); Kynkäänniemi et al. 2019 (precision and recall), in features of Inception v3.
        fidelity = _imported("torch_fidelity")
        images, reference = (_images(folder, options.neighbours + 1) for folder in folders)
        # A batch is of one size, and the network scales each image to its own.
        from ldm_lite.image import read_image

        sizes = {read_image(path, lambda image: image.size) for path in (*images, *reference)}
        values: dict[str, Any] = fidelity.calculate_metrics(
            input1=_dataset(images),
            input2=_dataset(reference),
            fid=True,
            prc=True,
            prc_neighborhood=options.neighbours,
            feature_extractor="inception-v3-compat",  # of precision and recall too, whose own default is VGG-16
            feature_layer_prc="2048",
            feature_extractor_weights_path=options.inception,
            batch_size=options.batch_size if len(sizes) == 1 else 1,
            cuda=options.device == "cuda",
            cache=False,
            save_cpu_ram=True,  # no worker processes
            verbose=False,
        )
        names = {"fid": "frechet_inception_distance", "precision": "precision", "recall": "recall"}
        metrics |= {name: float(values[key]) for name, key in names.items()}
    if options.clip is not None:
        metrics["clip_score"] = _clip_score(options, folders[0])
    return metrics


def _dataset(paths: Sequence[Path]) -> Any:
    """Images as torch-fidelity takes them: it reads few formats itself."""
    from torch.utils.data import Dataset

    from ldm_lite.image import read_rgb
    from ldm_lite.train.data import to_tensor

    class Images(Dataset[Any]):
        def __len__(self) -> int:
            return len(paths)

        def __getitem__(self, index: int) -> Any:
            return to_tensor(read_rgb(paths[index]))

    return Images()


def _imported(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ValueError(f"{name.split('.')[0]} is missing: {pip_install('evaluate')}") from error
    except RuntimeError as error:  # of torchvision, which it imports
        raise ValueError(
            f"{name.split('.')[0]} does not run here ({error}): install the torchvision that belongs to this torch"
        ) from error


def _clip_score(options: EvaluateOptions, folder: Path) -> float:
    """Hessel et al. 2021, of 100: images and their captions, NAME.txt beside each or the prompt in a PNG's text."""
    torch, metric = _imported("torch"), _imported("torchmetrics.multimodal").CLIPScore(options.clip).to(options.device)
    from ldm_lite.image import read_rgb

    paths = _images(folder, 1)
    for first in range(0, len(paths), options.batch_size):
        batch = paths[first : first + options.batch_size]
        values = [torch.from_numpy(_imported("numpy").array(read_rgb(path))).permute(2, 0, 1) for path in batch]
        metric.update([value.to(options.device) for value in values], [_caption(path) for path in batch])
    return float(metric.compute())


def _images(folder: Path, least: int) -> list[Path]:
    from ldm_lite.image import list_images

    if len(paths := list_images(folder)) < least:
        raise ValueError(f"{folder}: holds {len(paths)} images, expected {least} or more")
    return paths


def _caption(path: Path) -> str:
    from ldm_lite.cli.files import read_text
    from ldm_lite.text.parameters import read_parameters

    if path.with_suffix(".txt").is_file():
        return read_text(path.with_suffix(".txt")).strip()
    try:
        return read_parameters(path).prompt
    except ValueError as error:
        raise ValueError(f"{error}; for a CLIP score it needs a caption, also as {path.stem}.txt beside it") from error


if __name__ == "__main__":
    sys.exit(main())
