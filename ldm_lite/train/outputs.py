"""The files of a run besides its state and log: the checkpoint, grids of samples, and a plot of the loss."""

import contextlib
import importlib.util
import os
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from PIL import Image
from torch import Tensor, nn

from ldm_lite import Pipeline
from ldm_lite.cli.options import LoadOptions
from ldm_lite.cli.writing import replacing
from ldm_lite.image import grid
from ldm_lite.networks import checkpoint_content, control_with
from ldm_lite.train.config import CONFIG, with_config
from ldm_lite.train.control import control_file
from ldm_lite.train.ema import Weights, using
from ldm_lite.train.embedding import embedding_file
from ldm_lite.train.files import write_tensors
from ldm_lite.train.lora import kohya_file
from ldm_lite.train.options import TrainOptions
from ldm_lite.train.setup import make_loss, make_model
from ldm_lite.train.state import LOG, read_log
from ldm_lite.train.trainer import Trainer

SAMPLES = 4  # per prompt
SAMPLE_STEPS = 20


def checkpoint_path(options: TrainOptions) -> Path:
    """Return the path of the checkpoint that a run writes."""
    kind = options.stage if options.stage in ("embedding", "control") else "model"
    kind = kind if options.lora_rank is None else "lora"
    return Path(options.out) / f"{kind}.safetensors"


def save(
    options: TrainOptions, model: Pipeline, trainer: Trainer, ema: Mapping[str, nn.Module], hint: Tensor | None = None
) -> None:
    """Write the checkpoint with the EMA weights, by network, a grid of samples, and a plot of the loss.

    hint (3,H,W) uint8 is the image that a ControlNet reads for all samples.
    """
    _store(checkpoint_path(options), _content(options, model, ema), trainer.step)
    if trainer.averages is not None:
        trainer.averages.store(trainer.folder, trainer.step)
    with _with_ema(model, trainer, ema) as averaged:
        sheet = _sample_grid(averaged, options, ema.get("control"), hint)
    with replacing(trainer.folder / f"samples-{trainer.step:07}.png") as part:
        sheet.save(part, format="PNG")
    plot_losses(trainer.folder)


Content = tuple[dict[str, Tensor], dict[str, str]]  # tensors and metadata


def _content(options: TrainOptions, model: Pipeline, networks: Mapping[str, nn.Module]) -> Content:
    """Return the content of the file of a run, with the weights of networks that it trained, by name."""
    if options.stage == "embedding":
        return embedding_file(networks["embedding"], model)
    if options.stage == "control":
        return control_file(networks["control"])
    if options.lora_rank is not None:
        return kohya_file(networks["lora"], model)
    return checkpoint(model, networks)


def _store(path: Path, content: Content, step: int) -> None:
    tensors, metadata = content
    metadata["step"] = str(step)
    write_tensors(path, tensors, metadata)


def write_average(folder: Path, average: tuple[Weights, int], out: Path) -> None:
    """Write the file of a run with the weights of an average after a step.  Raises as a run does."""
    options, load = with_config(TrainOptions(config=os.fspath(folder / CONFIG), out=os.fspath(folder)), LoadOptions())
    model = make_model(options, replace(load, device="cpu"))
    networks, (weights, step) = make_loss(options, model).networks, average
    for name, network in networks.items():
        for key, parameter in network.named_parameters():
            parameter.data = weights[f"{name}.{key}"]
    _store(out, _content(options, model, networks), step)


@contextlib.contextmanager
def _with_ema(model: Pipeline, trainer: Trainer, ema: Mapping[str, nn.Module]) -> Iterator[Pipeline]:
    """Yield the model with the EMA in place of the trained weights."""
    if trainer.loss.networks.keys() & {"lora", "embedding"}:
        with using(trainer.loss.networks, ema):
            yield model
    else:
        yield _replaced(model, ema)


def _replaced(model: Pipeline, networks: Mapping[str, nn.Module]) -> Pipeline:
    return replace(model, **{role: net for role, net in networks.items() if role in model.family.networks})  # type: ignore[arg-type]


def checkpoint(model: Pipeline, networks: Mapping[str, nn.Module]) -> Content:
    """Return tensors (float16) and metadata of a checkpoint in the original layout, with these networks by role."""
    whole = _replaced(model, networks)
    return checkpoint_content(model, {role: getattr(whole, role).state_dict() for role in model.family.networks})


def _sample_grid(
    model: Pipeline, options: TrainOptions, control: nn.Module | None = None, hint: Tensor | None = None
) -> Image.Image:
    """Draw a row of images for each prompt, from the same noise at every checkpoint, after the hint if there is one."""
    prompts = options.samples.split("|")
    how: dict[str, Any] = {"sampler": "dpmpp_2m", "steps": SAMPLE_STEPS}
    if options.lcm:
        how = {"sampler": "lcm", "steps": 4, "scale": 1.0}
    if control is not None and hint is not None:
        how |= {"height": hint.shape[1], "width": hint.shape[2]}
        how["control"] = [control_with(model, control, hint.float() / 127.5 - 1)]
    images = model.txt2img(
        [prompt for prompt in prompts for _ in range(SAMPLES)],
        seed=[*range(SAMPLES)] * len(prompts),
        batch_size=SAMPLES,
        **how,
    )
    return grid(images, columns=SAMPLES)


def plot_losses(folder: Path) -> None:
    """Plot the losses of the log as loss.png, if matplotlib is installed."""
    path = folder / LOG
    if importlib.util.find_spec("matplotlib") is None or not path.exists():  # no loss is logged yet
        return
    from matplotlib.figure import Figure

    rows = read_log(path)
    figure = Figure(figsize=(8, 4), layout="constrained")
    axes = figure.subplots()
    for kind, style in (("loss", {"alpha": 0.5}), ("validation", {"marker": "o", "markersize": 3})):
        if points := [(row["step"], row[kind]) for row in rows if kind in row]:
            axes.semilogy(*zip(*points, strict=True), label=kind, **style)
    axes.legend()
    axes.set(xlabel="step", ylabel="loss")
    axes.grid(alpha=0.3)
    with replacing(folder / "loss.png") as part:
        figure.savefig(part, format="png")
