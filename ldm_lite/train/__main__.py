"""Train a latent diffusion model: `python -m ldm_lite.train --stage autoencoder`, then `--stage diffusion --vae ...`.

From nothing (--preset) or from a checkpoint (--ckpt), on a folder of captioned images (--data) or on what a Python
file draws (--renderer).  Writes checkpoints in the original layout, whose main weights are the averages.
"""

import contextlib
import json
import logging
import math
import sys
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ldm_lite
from ldm_lite.cli import console, flags
from ldm_lite.cli.options import FINITE, MOST, CheckedOptions, LoadOptions, option
from ldm_lite.cli.progress import TrainingBar

if TYPE_CHECKING:
    from PIL.Image import Image
    from torch import Tensor, nn

    from ldm_lite.models.vae_kl import AutoencoderKL
    from ldm_lite.pipeline import Pipeline
    from ldm_lite.train.data import Source
    from ldm_lite.train.loop import Run
    from ldm_lite.train.tasks import Task

log = logging.getLogger("ldm_lite")


@dataclass(frozen=True)
class Options(CheckedOptions):
    """What to train, on what, and how."""

    stage: str = option("diffusion", "what is trained", choices=("autoencoder", "diffusion"))
    preset: str | None = option(None, "a small model to train from nothing: emoji64, emoji128")
    data: str | None = option(None, "folder of images with captions: NAME.txt beside each, or a .jsonl")
    renderer: str | None = option(None, "Python file whose scenes(resolution, ...) draws captioned images")
    renderer_options: str = option("{}", "arguments of scenes(), as JSON")
    scenes: int | None = option(
        None, "draw so many scenes once, and keep their latents (default: always new ones)", within=(1, MOST)
    )
    out: str = option("outputs/train", "folder of the run")
    resume: bool = option(False, "go on with the run in that folder")
    steps: int = option(10_000, "optimiser steps of the whole run", within=(1, MOST))
    minutes: float | None = option(None, "stop after so many minutes; --resume goes on", within=(0, MOST))
    batch: int = option(64, "images at a time", within=(1, 2**16))
    accumulate: int = option(1, "batches to an optimiser step", within=(1, MOST))
    lr: float = option(1e-3, "learning rate, after a warm-up and before a cosine down to 0", within=(0, math.inf))
    warmup: int = option(200, "steps of the warm-up", within=(0, MOST))
    weight_decay: float = option(0.01, "AdamW's weight decay", within=(0, math.inf))
    average: float = option(
        0.999, "share of the running average of the weights kept at every step", "--ema-decay", within=(0, 1)
    )
    clip: float = option(1.0, "most norm of the gradient", within=(1e-9, math.inf))
    freeze_encoder: bool = option(False, "of an autoencoder, train the decoder alone: latents stay what they are")
    freeze_text: bool = option(False, "leave the text encoder as it is")
    lora_rank: int | None = option(
        None, "train a LoRA of this rank beside frozen weights (16 is usual)", "--network_dim", within=(1, 4096)
    )
    lora_alpha: float | None = option(
        None, "its factors count alpha / rank (default: the rank)", "--network_alpha", within=FINITE
    )
    lora_text: bool = option(False, "a LoRA of the text encoder too")
    caption_dropout: float = option(0.1, "share of captions left empty, for guidance", within=(0, 1))
    min_snr: float | None = option(None, "min-SNR weighting with this gamma (5 is usual)", within=(1e-9, math.inf))
    tokens: int | None = option(
        None, "tokens of a caption (default: all that the text encoder takes)", within=(2, MOST)
    )
    seed: int = option(0, "of weights, noise and order", within=(0, 2**31 - 1))  # seed * 2^32 + step is one of torch's
    save_every: int = option(1000, "steps between checkpoints", within=(1, MOST))
    samples: str = option(
        "a red apple on a blue background|rocket|cat|red heart", "prompts of the sample grid, | between"
    )
    workers: int = option(2, "processes that draw or read images", within=(0, 1024))
    compile_network: bool = option(False, "compile the network that is trained")
    checkpointing: bool = option(False, "recompute activations in the backward pass, to save memory")
    debug: bool = option(False, "show the traceback of an error")


def train(
    options: Options, load: LoadOptions, on_step: "Callable[[int, float | None], None]" = lambda step, loss: None
) -> Path:
    """Run, or go on with, a training run -> the path of its checkpoint.  Raises ValueError, one line.

    on_step gets the number of steps done, and now and then their mean loss.
    """
    import torch

    from ldm_lite.runtime.precision import has_fast_bf16
    from ldm_lite.train import distributed as ranks
    from ldm_lite.train.loop import STATE, Recipe, Run
    from ldm_lite.train.norm import use_fast_backward
    from ldm_lite.train.tasks import checkpoint_activations

    _check(options, load)
    ranks.join()
    folder = Path(options.out)
    if (folder / STATE).exists() and not options.resume:
        raise ValueError(f"{folder}: holds a run already: go on with --resume, or take another --out")
    torch.manual_seed(options.seed)
    pipe = _start(options, load)
    source = _source(options, pipe.family.resolution)
    folder.mkdir(parents=True, exist_ok=True)
    pipe, task, source = _task(options, pipe, source)
    for weight in (p for network in task.networks.values() for p in network.parameters() if p.ndim == 4):
        weight.data = weight.data.contiguous(memory_format=torch.channels_last)
    recipe = Recipe(
        steps=options.steps,
        batch=options.batch,
        accumulate=options.accumulate,
        lr=options.lr,
        warmup=options.warmup,
        weight_decay=options.weight_decay,
        ema=options.average,
        clip=options.clip,
        seed=options.seed,
        minutes=options.minutes,
        save_every=options.save_every,
        workers=options.workers,
        bf16=has_fast_bf16(pipe.device),
    )
    run = Run(task, recipe, folder)
    if options.resume and (folder / STATE).exists():
        run.resume()
        log.info("going on at step %d", run.step)
    for network in task.networks.values() if pipe.device.type == "cpu" else ():
        use_fast_backward(network)
    if options.checkpointing:  # after Run has copied the networks for their averages
        checkpoint_activations(pipe.unet)
    if options.compile_network:
        for network in task.networks.values() if options.lora_rank is None else [pipe.unet]:
            network.compile()
    run.fit(source, on_step=on_step, on_save=lambda step: _save(options, pipe, run))
    return _path(options)


def _check(options: Options, load: LoadOptions) -> None:
    """Raises ValueError for what would not be heeded."""
    for name in ("offload", "storage", "compile", "compiled"):
        if getattr(load, name) not in (None, "off"):
            instead = ", or take --compile-network" if name == "compile" else ""
            raise ValueError(f"train has no --{name}: leave it out{instead}")
    if load.dtype not in (None, "fp32", "float32"):
        raise ValueError(f"got dtype {load.dtype}, but weights are trained in float32: leave it out")
    if options.preset is not None and (load.ckpt is not None or load.lora):
        raise ValueError("--preset is a new model: leave out --ckpt and --lora, or it")


def _path(options: Options) -> Path:
    return Path(options.out) / ("model.safetensors" if options.lora_rank is None else "lora.safetensors")


def _source(options: Options, resolution: int) -> "Source":
    from ldm_lite.train.data import Drawn, open_folder, open_renderer

    if (options.data is None) == (options.renderer is None):
        raise ValueError("wanted either --data FOLDER or --renderer FILE.py")
    if options.data is not None:
        return open_folder(Path(options.data), resolution)
    try:
        arguments = json.loads(options.renderer_options)
    except json.JSONDecodeError as error:
        raise ValueError(f"got renderer options {options.renderer_options!r}, wanted JSON: {error}") from error
    drawn = open_renderer(Path(str(options.renderer)), resolution, arguments)
    return Drawn(drawn.draw, options.scenes)


def _start(options: Options, load: LoadOptions) -> "Pipeline":
    """The networks to begin with, float32: a checkpoint's, or a preset's with fresh weights (and --vae's)."""
    import torch

    from ldm_lite.checkpoint import model as pipeline
    from ldm_lite.checkpoint import reader as checkpoint
    from ldm_lite.diffusion.schedule import Schedule
    from ldm_lite.models.clip import CLIPTextEncoder, CLIPTextSpec
    from ldm_lite.models.unet import UNet
    from ldm_lite.models.vae_kl import AutoencoderKL, VAESpec
    from ldm_lite.runtime.precision import pick_device
    from ldm_lite.text.tokenizer import CLIPTokenizer
    from ldm_lite.train.presets import PRESETS, initialise, initialise_text
    from ldm_lite.zoo.detection import parse_prediction

    if options.preset is None:
        return ldm_lite.load(**{**load.arguments(), "dtype": "fp32"})
    if options.preset not in PRESETS:
        raise ValueError(f"unknown preset {options.preset!r}: wanted one of {', '.join(PRESETS)}")
    device, family = pick_device(load.device), PRESETS[options.preset]
    if load.prediction is not None:
        family = replace(family, prediction=parse_prediction(load.prediction))
    found = None
    if load.vae is not None:
        found = pipeline.open_autoencoder(load.vae)
        family = replace(family, vae=pipeline.autoencoder_spec(found))
    elif options.stage == "diffusion":
        raise ValueError(
            "a new diffusion model needs an autoencoder: train one with --stage autoencoder, and name it with --vae"
        )
    if type(family.vae) is not VAESpec:
        raise ValueError(f"{load.vae}: is no KL autoencoder, the only kind that models are trained with here")
    assert isinstance(family.text, CLIPTextSpec)
    with torch.device(device):
        unet, vae, text = UNet(family.unet), AutoencoderKL(family.vae), CLIPTextEncoder(family.text)
    initialise(unet)
    initialise_text(text)
    if found is not None:
        checkpoint.load_weights(vae, found, "vae", device, torch.float32)
    schedule = Schedule.from_betas(family.noise.betas, family.prediction)
    tokenizer = CLIPTokenizer(text.spec.length)
    about = f"{family.title}, fresh weights"
    return pipeline.Pipeline("model", family, schedule, unet, vae, text, None, tokenizer, about)


def _task(options: Options, pipe: "Pipeline", source: Any) -> "tuple[Pipeline, Task, Source]":
    """What is trained; the pipeline with its measured scale factor; and the source, encoded if it comes to an end."""
    import torch

    from ldm_lite.models.clip import CLIPTextEncoder
    from ldm_lite.models.vae_kl import AutoencoderKL
    from ldm_lite.train.data import order
    from ldm_lite.train.tasks import AutoencoderTask, DiffusionTask, measure_scale

    if options.lora_rank is not None and (options.stage == "autoencoder" or options.preset is not None):
        raise ValueError("a LoRA is of the diffusion stage of a checkpoint: leave out --stage and --preset")
    vae = pipe.vae
    if not isinstance(vae, AutoencoderKL):
        raise ValueError(f"{pipe.family.title} has no KL autoencoder, the only kind that models are trained with here")
    if options.stage == "autoencoder":
        return pipe, AutoencoderTask(vae, not options.freeze_encoder), source
    text = pipe.text_encoder
    alone = pipe.family.task == "txt2img" and pipe.family.conditioner == "clip"
    if pipe.family.unet.guidance_dim is not None:
        raise ValueError(f"{pipe.family.title}: is distilled; what is trained here is the model it was distilled from")
    if not alone or not isinstance(text, CLIPTextEncoder):
        raise ValueError(f"{pipe.family.title}: only models of text alone, read by one CLIP-L, are trained here")
    if options.tokens is not None and options.tokens > text.spec.length:
        raise ValueError(f"got tokens {options.tokens}, wanted 2 to {text.spec.length}, the text encoder's")
    vae.requires_grad_(False).eval()
    if options.preset is not None:
        pixels = torch.stack(
            [source.example(i)[0] for i in order(source, options.seed, 0, min(512, source.size or 512))]
        )
        pipe = replace(pipe, family=replace(pipe.family, scale_factor=measure_scale(vae, pixels)))
        log.info("scale factor %.4f", pipe.family.scale_factor)
    if source.size is not None:
        source = _encoded(options, source, vae)
    task = DiffusionTask(
        pipe.unet,
        text,
        vae,
        pipe.schedule,
        pipe.family.scale_factor,
        _trained(options, pipe),
        caption_dropout=options.caption_dropout,
        min_snr=options.min_snr,
        tokens=text.spec.length if options.tokens is None else options.tokens,
    )
    return pipe, task, source


def _encoded(options: Options, source: Any, vae: "AutoencoderKL") -> "Source":
    """A source that ends as latents: those kept in the run's folder, if they are of the same images and autoencoder."""
    from ldm_lite.train import distributed as ranks
    from ldm_lite.train.data import Encoded, encode

    path = Path(options.out) / "latents.pt"
    encoder = [*vae.encoder.parameters(), *vae.quant_conv.parameters()]
    weights = float(sum(p.double().abs().sum() for p in encoder))
    code = "" if options.renderer is None else zlib.crc32(Path(options.renderer).read_bytes())
    key = f"{options.data} {options.renderer} {code} {options.renderer_options} {source.size} {weights}"
    if ranks.own() == 0 and Encoded.read(path, key) is None:
        log.info("encoding %d images", source.size)
        encode(source, vae, options.batch, options.workers).write(path, key)
    ranks.wait()
    kept = Encoded.read(path, key)
    assert kept is not None
    return kept


def _trained(options: Options, pipe: "Pipeline") -> "dict[str, nn.Module]":
    """What a diffusion run trains: whole networks, or a LoRA of them."""
    from ldm_lite.train.lora import LowRank

    text = options.lora_text if options.lora_rank is not None else not options.freeze_text
    networks: dict[str, nn.Module] = {"unet": pipe.unet}
    if text:
        assert pipe.text_encoder is not None
        networks["text_encoder"] = pipe.text_encoder
    if options.lora_rank is None:
        return networks
    return {"lora": LowRank(networks, options.lora_rank, options.lora_alpha)}


def _save(options: Options, pipe: "Pipeline", run: "Run") -> None:
    """Write the checkpoint with the averages as its weights, and a grid of samples beside it."""
    from safetensors.torch import save_file

    from ldm_lite.train import lora
    from ldm_lite.train.data import write_whole

    tensors, about = _whole(options, pipe, run) if options.lora_rank is None else lora.file(pipe, run.average["lora"])
    write_whole(_path(options), lambda path: save_file(tensors, path, metadata=about | {"step": str(run.step)}))
    if options.stage == "diffusion":
        with _averaged(pipe, run) as average:
            sheet = _samples(average, options.samples.split("|"))
        write_whole(run.folder / f"samples-{run.step:07}.png", lambda path: sheet.save(path, format="PNG"))
    _plot(run.folder)


@contextlib.contextmanager
def _averaged(pipe: "Pipeline", run: "Run") -> "Iterator[Pipeline]":
    """The pipeline with the averages in place of what is trained."""
    from ldm_lite.train.lora import LowRank

    if isinstance(lora := run.task.networks.get("lora"), LowRank):
        with lora.using(run.average["lora"]):
            yield pipe
    else:
        yield replace(pipe, **run.average)  # type: ignore[arg-type]


def _whole(options: Options, pipe: "Pipeline", run: "Run") -> "tuple[dict[str, Tensor], dict[str, str]]":
    """The tensors and the metadata of a checkpoint in the original layout."""
    import torch

    from ldm_lite.checkpoint.reader import prefix
    from ldm_lite.zoo.detection import describe

    kept = ["vae"] if options.stage == "autoencoder" else ["unet", "vae", "text_encoder"]
    with _averaged(pipe, run) as average:
        weights = {name: getattr(average, name).state_dict() for name in kept}
    tensors = {
        prefix(name, values) + key: value.to("cpu", torch.float16).contiguous()
        for name, values in weights.items()
        for key, value in values.items()
    }
    if options.preset is not None and "text_encoder" in run.average:
        table = prefix("text_encoder", weights["text_encoder"]) + "embeddings.token_embedding.weight"
        tensors[table][run.untrained_tokens()] = 0  # what no caption has used says nothing, and zeros compress
    if options.stage == "autoencoder":
        return tensors, {}
    tensors["betas"] = torch.from_numpy(pipe.schedule.betas).float()  # the family's, or the first checkpoint's own
    return tensors, describe(pipe.family)


def _plot(folder: Path) -> None:
    """The losses of a run as loss.png beside their log, where there is matplotlib."""
    import importlib.util

    from ldm_lite.train.data import write_whole
    from ldm_lite.train.loop import LOG

    log = folder / LOG
    if importlib.util.find_spec("matplotlib") is None or not log.exists():  # before the first of its lines
        return
    from matplotlib.figure import Figure

    rows = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()]
    figure = Figure(figsize=(8, 4), layout="constrained")
    axes = figure.subplots()
    axes.semilogy([row["step"] for row in rows], [row["loss"] for row in rows])
    axes.set(xlabel="step", ylabel="loss")
    axes.grid(alpha=0.3)
    write_whole(folder / "loss.png", lambda path: figure.savefig(path, format="png"))


def _samples(pipe: "Pipeline", prompts: list[str], each: int = 4) -> "Image":
    """A row of images for each prompt, always from the same noise."""
    from ldm_lite import generate
    from ldm_lite.conditioning.prompts import encode_prompts
    from ldm_lite.diffusion.guidance import classifier_free
    from ldm_lite.diffusion.names import make_plan
    from ldm_lite.image import grid, to_pil

    plan = make_plan("dpmpp_2m", pipe.schedule, 20)
    noise = generate.SeededNoise(range(each), pipe.latent_shape(pipe.family.resolution, pipe.family.resolution))()
    uncond = encode_prompts(pipe, [""] * each)
    images = []
    for prompt in prompts:
        branches = classifier_free(encode_prompts(pipe, [prompt] * each), uncond, pipe.family.scale)
        latents = generate.denoise(pipe, noise, branches, plan)
        images += [to_pil(pixels) for pixels in generate.decode(pipe, latents)]
    return grid(images, columns=each)


def main(argv: Sequence[str] | None = None) -> int:
    """The command line -> its exit status."""
    (options, load), _ = flags.parse(argv, "train", __doc__.splitlines()[0], (Options, LoadOptions))
    return console.run(lambda: print(train(options, load, TrainingBar(options.steps))), (options, load))


if __name__ == "__main__":
    sys.exit(main())
