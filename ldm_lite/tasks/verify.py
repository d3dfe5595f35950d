"""Published test vectors: what diffusers' own tests expect of released checkpoints, pixel by pixel.

Source: the slow and nightly tests of github.com/huggingface/diffusers, commit 58eb52c, under tests/pipelines.  They run
in float32 from fixed latents, and compare a corner of the blue channel in [0,1], or a whole image that is stored.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ldm_lite.checkpoint.hub import download
from ldm_lite.checkpoint.loading import load_model
from ldm_lite.checkpoint.model import CheckpointModel
from ldm_lite.cli.command_options import VerifyOptions
from ldm_lite.cli.options import LoadOptions
from ldm_lite.cli.task_options import Txt2imgOptions
from ldm_lite.diffusion.names import named_plan
from ldm_lite.diffusion.schedule import CLEAN, Level, NoiseSchedule, Spacing
from ldm_lite.tasks.txt2img import txt2img
from ldm_lite.zoo.families import FAMILY_ROWS

ARRAYS = "diffusers/test-arrays"  # a data set on the hub, with whole images
HORSE = "a photograph of an astronaut riding a horse"
SQUIRREL = "A painting of a squirrel eating a burger"


@dataclass(frozen=True)
class Vector:
    """A run and what is known about its image."""

    checkpoint: str  # as people call it; the file alone does not show whether it is 1.4 or 1.5
    family: str  # a key of FAMILY_ROWS
    sampler: str
    steps: int
    expected: tuple[float, ...] | str  # nine values of blue in [0,1], 3x3 in rows; or a file of ARRAYS
    limit: float  # of the largest difference, in the test that it is from
    source: str
    prompt: str = HORSE
    scale: float = 7.5
    prediction: str = "eps"
    side: int = 64  # of the latents
    corner: int = -3  # first row and column of the nine values
    seeded: bool = False  # the noise is torch's of seed 0, not numpy's
    spacing: Spacing | None = None

    @property
    def title(self) -> str:
        """Checkpoint, sampler and steps."""
        return f"{self.checkpoint}, {self.sampler}, {self.steps} step{'s' * (self.steps > 1)}"


@dataclass(frozen=True, eq=False)
class Check:
    """A vector and a model's result."""

    vector: Vector
    expected: NDArray[np.float64]  # (9,), or (H,W,3)
    got: NDArray[np.float64]  # of the same shape

    @property
    def difference(self) -> float:
        """The largest difference, in [0,1]; infinite if the shapes differ."""
        if self.expected.shape != self.got.shape:
            return float("inf")
        return float(np.abs(self.expected - self.got).max())

    @property
    def passes(self) -> bool:
        """Whether it is within the limit of the test."""
        return self.difference <= self.vector.limit

    def __str__(self) -> str:
        lines = [self.vector.title]
        if self.expected.ndim == 1:
            rows = (("expected", self.expected), ("got", self.got))
            lines += [f"  {name:10}" + " ".join(f"{value:.5f}" for value in values) for name, values in rows]
        else:
            lines.append(f"  expected  the image {self.vector.expected}")
        verdict = "pass" if self.passes else "DIFFERS"
        lines.append(f"  difference {self.difference:.1e}, limit {self.vector.limit:.0e}: {verdict}")
        return "\n".join([*lines, f"  source    {self.vector.source}"])


def from_0(schedule: NoiseSchedule, steps: int) -> list[Level]:
    """Timesteps (steps - 1) * (1000 // steps), ..., 0, then clean: diffusers' DDIM with its own defaults."""
    ratio = len(schedule.alpha_bar) // steps
    return [*(schedule.at(ratio * i) for i in reversed(range(steps))), CLEAN]


SD, SD2 = "stable_diffusion/test_stable_diffusion.py", "stable_diffusion_2/test_stable_diffusion.py"
WHOLE = "stable_diffusion_text2img/stable_diffusion_"
SD2_V = "stable_diffusion_2/test_stable_diffusion_v_pred.py"
LDM = "latent_diffusion/test_latent_diffusion.py"
LCM = "latent_consistency_models/test_latent_consistency_models.py"


def _nine(text: str) -> tuple[float, ...]:
    return tuple(float(value) for value in text.split())


def _of(checkpoint: str, family: str, *runs: tuple[str, int, Any, float, str], **same: Any) -> list[Vector]:
    """The vectors of a checkpoint, from sampler, steps, expected values, limit and source of each run."""
    return [Vector(checkpoint, family, *run, **same) for run in runs]


# Assumed: the repository's stored configuration has diffusers' defaults, so its last step is that of timestep 0.
_LARGE: dict[str, Any] = {"prompt": SQUIRREL, "scale": 6.0, "side": 32, "spacing": from_0}
_V: dict[str, Any] = {"prompt": SQUIRREL, "prediction": "v", "side": 96, "corner": 253, "seeded": True}
VECTORS = (
    *_of(
        *("Stable Diffusion 1.4", "sd1"),
        ("ddim", 3, _nine(".38019 .28647 .27321 .40377 .38290 .35446 .39218 .38165 .42239"), 1e-4, f"{SD}:677"),
        ("plms", 3, _nine(".5740 .4784 .3162 .6358 .5831 .5505 .5082 .5631 .5575"), 3e-3, f"{SD}:664"),
        ("lms", 3, _nine(".10542 .09620 .07332 .09015 .09382 .07597 .08496 .07806 .06455"), 3e-3, f"{SD}:691"),
        *((name, 50, f"{WHOLE}1_4_{name}.npy", 1e-3, f"{SD}:1056") for name in ("ddim", "lms", "euler")),
        ("plms", 50, f"{WHOLE}1_4_pndm.npy", 1e-3, f"{SD}:1056"),
    ),
    *_of(
        *("Stable Diffusion 1.1", "sd1"),
        ("plms", 3, _nine(".4363 .4355 .3667 .4066 .3970 .3866 .4394 .4356 .4059"), 3e-3, f"{SD}:637"),
    ),
    *_of("Stable Diffusion 1.5", "sd1", ("plms", 50, f"{WHOLE}1_5_pndm.npy", 1e-3, f"{SD}:1056")),
    *_of(
        *("LDM text2img-large", "ldm_text2img_large"),
        ("ddim", 3, _nine(".51825 .52850 .52543 .54258 .52304 .52569 .54363 .55276 .56878"), 1e-3, f"{LDM}:151"),
        ("ddim", 50, "ldm_text2img/ldm_large_256_ddim.npy", 1e-3, f"{LDM}:nightly"),
        **_LARGE,
    ),
    *_of(
        *("Stable Diffusion 2 base", "sd2"),
        ("plms", 3, _nine(".49493 .47896 .40798 .54214 .53212 .48202 .47656 .46329 .48506"), 7e-3, f"{SD2}:351"),
    ),
    *_of(
        *("Stable Diffusion 2 (768, v)", "sd2"),
        ("ddim", 20, _nine(".1868 .1922 .1527 .1921 .1908 .1624 .1779 .1652 .1734"), 1e-2, f"{SD2_V}:280"),
        **_V,
    ),
    *_of(
        *("LCM Dreamshaper v7", "lcm"),
        ("lcm", 1, _nine(".1025 .0911 .0984 .0981 .0901 .0918 .1055 .0940 .0730"), 1e-3, f"{LCM}:246"),
    ),
)


def vectors_for(model: CheckpointModel, whole: bool) -> list[Vector]:
    """Return the vectors of a model's family, with whole images or without.

    Raises ValueError if there are none, with the checkpoints that have some.
    """
    title, prediction = model.family.title, model.schedule.prediction
    vectors = [v for v in VECTORS if FAMILY_ROWS[v.family].title == title and v.prediction == prediction]
    if not vectors:
        known = ", ".join(dict.fromkeys(vector.checkpoint for vector in VECTORS))
        raise ValueError(f"no test vectors are published for {title} with {prediction} prediction, only for: {known}")
    return [vector for vector in vectors if whole or not isinstance(vector.expected, str)]


def check(model: CheckpointModel, vector: Vector, read: Callable[[str], NDArray[np.float64]]) -> Check:
    """Run a vector's recipe and compare; `read` returns a stored image (H,W,3) in [0,1] by its file's name."""
    expected = read(vector.expected) if isinstance(vector.expected, str) else np.array(vector.expected)
    shape = (1, model.family.unet.out_channels, vector.side, vector.side)
    noise = (
        torch.randn(shape, generator=torch.Generator().manual_seed(0))
        if vector.seeded
        else torch.from_numpy(np.random.RandomState(0).standard_normal(shape)).float()
    )
    factor = model.vae.spec.factor
    options = Txt2imgOptions(
        prompt=vector.prompt,
        plan=named_plan(vector.sampler, model.schedule, vector.steps, spacing=vector.spacing),
        scale=vector.scale,
        noise=noise,
        seed=0,
        height=vector.side * factor,
        width=vector.side * factor,
    )
    (result,) = txt2img(model, options)
    image = np.asarray((result.pixels.double() / 2 + 0.5).clamp(0, 1).permute(1, 2, 0))
    if isinstance(vector.expected, str):
        return Check(vector, expected, image)
    rows = slice(vector.corner, vector.corner + 3 or None)
    return Check(vector, expected, image[rows, rows, 2].ravel())


def stored_image(source: str, name: str) -> NDArray[np.float64]:
    """Return a stored image, from a folder or, if the source is "hub", from the Hugging Face hub.

    Raises FileNotFoundError or ValueError with what to do.
    """
    if source == "hub":
        path = download(ARRAYS, name, kind="dataset")
    else:
        folder = Path(source).expanduser()
        path = next((path for path in (folder / name, folder / Path(name).name) if path.is_file()), folder / name)
        if not path.is_file():
            raise FileNotFoundError(f"{path}: no such file: it is in the data set {ARRAYS}; or give `whole=hub`")
    try:
        image = np.load(path, allow_pickle=False)
    except (ValueError, EOFError) as error:
        raise ValueError(f"{path}: not an array in numpy's format: {error}") from error
    if image.ndim != 3 or image.shape[2] != 3 or image.dtype.kind != "f":
        raise ValueError(f"{path}: holds {image.dtype} {image.shape}, expected an image (H,W,3) of floats in [0,1]")
    return np.asarray(image, dtype=np.float64)


def verdict(checks: Sequence[Check], name: str) -> str:
    """Name the checkpoint whose vectors all pass.  Raises ValueError if there is none."""
    by_checkpoint: dict[str, list[bool]] = {}
    for done in checks:
        by_checkpoint.setdefault(done.vector.checkpoint, []).append(done.passes)
    for checkpoint, passes in by_checkpoint.items():
        if all(passes):
            return f"{name} is {checkpoint}: all {len(passes)} published test vectors agree"
    raise ValueError(f"{name} agrees with the published test vectors of none of these: {', '.join(by_checkpoint)}")


def verify_model(options: VerifyOptions, load: LoadOptions) -> None:
    """Load in float32 unless told otherwise, run every vector, print the comparison and the verdict."""
    model = load_model(replace(load, dtype=load.dtype or "fp32"), CheckpointModel)
    vectors = vectors_for(model, options.whole is not None)
    chosen = [vector for vector in vectors if options.only is None or options.only in vector.checkpoint]
    if not chosen:
        known = ", ".join(dict.fromkeys(vector.checkpoint for vector in vectors))
        raise ValueError(f"got `only` {options.only!r}, expected a part of one of: {known}")
    checks = []
    for vector in chosen:
        checks.append(check(model, vector, lambda name: stored_image(options.whole or "hub", name)))
        print(f"{checks[-1]}\n", flush=True)
    print(verdict(checks, model.name))
