"""A training run, from its options to its files: the model, the data, the loss, the trainer, and saving."""

import contextlib
import copy
import functools
import hashlib
import importlib.util
import itertools
import logging
import math
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from ldm_lite import Pipeline
from ldm_lite.cli.options import LoadOptions
from ldm_lite.cli.writing import locked, replacing, write_whole
from ldm_lite.core.vae import AutoencoderKL
from ldm_lite.image import grid
from ldm_lite.models.unet import LDMUNet
from ldm_lite.networks import (
    checkpoint_content,
    control_with,
    digest,
    has_fast_bf16,
    token_tables,
    unread_parameters,
)
from ldm_lite.toolkit import load_model, short_name
from ldm_lite.train import distributed
from ldm_lite.train.additions import (
    AttachedLoRA,
    Content,
    LoRA,
    Vectors,
    control_file,
    embedding_file,
    kohya_file,
    load_lora,
    new_control,
)
from ldm_lite.train.data import first_captions
from ldm_lite.train.encoded import INDEX, Data, close_files, open_all
from ldm_lite.train.losses import (
    ConsistencyLoss,
    DiffusionLoss,
    LearnedWeighting,
    Loss,
    Prior,
    Validation,
    Weighting,
    checkpoint_activations,
    of_x0,
    uniform,
)
from ldm_lite.train.options import CONFIG, PRECISIONS, TrainOptions, as_toml, check, check_here, resolved, with_config
from ldm_lite.train.state import LOG, STATE, open_logger, read_log, write_tensors
from ldm_lite.train.trainer import FOLDER as AVERAGES
from ldm_lite.train.trainer import Trainer, Weights, check_resumable, using

log = logging.getLogger("ldm_lite")

SAMPLES = 4  # per prompt
SAMPLE_STEPS = 20


def train(
    options: TrainOptions, load: LoadOptions, on_step: Callable[[int, float | None], None] = lambda step, loss: None
) -> Path:
    """Start or continue a training run and return the path of its checkpoint.

    on_step gets the number of steps done and, every 20 steps, their mean loss.  Raises ValueError, one line, for
    unusable options, data or models, and if the loss is not finite.
    """
    options, load = with_config(options, load)
    check(options, load)
    check_here(options)
    options = resolved(options)
    distributed.init()
    if distributed.rank() > 0:
        log.setLevel(logging.WARNING)
        on_step = lambda step, loss: None  # noqa: E731
    with run_folder(options) as folder, contextlib.ExitStack() as stack:
        # The model, and the data, whose latents are written once.
        stack.callback(close_files)
        model = make_model(options, load)
        precision = precision_of(load, model.device)
        inputs = inputs_of(model, load, precision)
        if options.lora_weights is not None or options.stage == "embedding":
            make_loss(options, model)  # a wrong file or word is an error before data are encoded, which may take hours
        data = open_all(
            options, model, not changes_text(options, model),
            lambda digest: check_resumable(options, inputs | {"data": digest}),
        )  # fmt: skip
        options = with_steps(options, data)
        # The trained networks, and the loss.
        stack.enter_context(room_for_steps(options, load, model, data))
        loss, attached = stack.enter_context(attached_loss(options, model, data))
        if options.stage == "embedding" and isinstance(loss, DiffusionLoss):
            model = loss.model  # its prompts know the name
        # The trainer, which copies the networks for the EMA and divides them among processes, and the steps.
        whole = {role: copy.deepcopy(network).cpu() for role, network in loss.networks.items() if options.fsdp}
        trainer = make_trainer(options, loss, precision, inputs | {"data": data.digest})
        if distributed.rank() == 0:
            write_whole(folder / CONFIG, as_toml(options, load))
        if isinstance(loss, ConsistencyLoss) and attached is not None:
            loss.base, loss.average = attached.off, functools.partial(using, loss.networks, trainer.ema)
        if data.validation is not None and isinstance(loss, DiffusionLoss):
            every = options.validate_every or options.save_every
            trainer.validation = Validation(loss, data.validation, options.batch_size, every)
        stack.enter_context(other_forwards(options, load, model, loss))
        trainer.fit(data.train, on_step, Saver(options, model, trainer, data, whole), data.prior)
    return checkpoint_path(options)


def inputs_of(model: Pipeline, load: LoadOptions, precision: torch.dtype | None) -> dict[str, str]:
    """Return what identifies a run's model, and how it computes, by option: a resumed run must have the same."""
    schedule = model.schedule.prediction, model.schedule.alpha_bar.tobytes(), model.family.scale_factor
    base = hashlib.sha256(repr((digest(*model.networks.values()), schedule)).encode()).hexdigest()[:32]
    return {"dtype": f"{short_name(model.dtype)}, {precision}", "storage": str(load.storage), "ckpt": base}


def changes_text(options: TrainOptions, model: Pipeline) -> bool:
    """Return whether the text encoders' output for a caption changes in the run."""
    return "text_encoder" in trained_networks(options, model) or options.stage == "embedding"


def with_steps(options: TrainOptions, data: Data) -> TrainOptions:
    """Return the options with steps in place of epochs.  Raises ValueError for epochs of data without an end."""
    if options.epochs is None:
        return options
    if data.train.shards is None:
        raise ValueError("`epochs` needs finite data: give `scenes`, or `steps` in place of it")
    steps = math.ceil(options.epochs * sum(data.train.shards) / (options.batch_size * options.accumulate))
    return replace(options, steps=steps, epochs=None)


@contextlib.contextmanager
def room_for_steps(options: TrainOptions, load: LoadOptions, model: Pipeline, data: Data) -> Iterator[None]:
    """Within the block the device holds everything that steps use.

    With an offloader the rest waits on the CPU, with `offload` also the text encoders for their turn.
    """
    waits_its_turn = load.offload is not None and not changes_text(options, model)
    texts = [] if data.empty is not None or waits_its_turn else list(text_encoders(model))
    staying = ["unet", *texts, *["vae"] * (not data.encoded and load.offload is None)]
    with model.phase(*staying):
        if model.offloader is not None:
            unused = [] if load.offload else [role for role in model.networks if role not in staying]
            model.offloader.release(*staying, *unused * (distributed.rank() > 0))
            for role in unused * (distributed.rank() > 0):  # this process draws no samples
                model.networks[role].to("meta")
        yield


@contextlib.contextmanager
def attached_loss(
    options: TrainOptions, model: Pipeline, data: Data
) -> Iterator[tuple[Loss, AttachedLoRA | None]]:  # fmt: skip
    """Yield the loss, with the trained networks; a LoRA is attached to the model within the block."""
    loss, attached = make_loss(options, model, data.empty), None
    with contextlib.ExitStack() as stack:
        if isinstance(lora := loss.networks.get("lora"), LoRA):
            attached = stack.enter_context(lora.attach(trained_networks(options, model)))
        if isinstance(loss, DiffusionLoss):
            loss.prior = _prior(options, loss.model if options.stage == "embedding" else model, attached)
        yield loss, attached


@contextlib.contextmanager
def other_forwards(options: TrainOptions, load: LoadOptions, model: Pipeline, loss: Loss) -> Iterator[None]:
    """Within the block networks are compiled, read weights by block, and recompute activations, by the options."""
    if options.compile_network:
        is_whole = options.lora_rank is None and options.stage != "embedding"
        for network in loss.networks.values() if is_whole else [model.unet]:
            network.compile()
    is_moved = load.offload == "sequential" or load.storage is not None
    if is_moved and model.offloader is not None:
        model.offloader.differentiable(model.unet)
    with contextlib.ExitStack() as stack:
        if options.checkpointing or is_moved:
            for network in (model.unet, *model.text_encoders, *loss.networks.values()):
                stack.enter_context(checkpoint_activations(network))
        yield


@contextlib.contextmanager
def run_folder(options: TrainOptions) -> Iterator[Path]:
    """Within the block no other run trains in the options' folder, which is made if it is missing.

    Raises ValueError if one does, or if the folder holds a run and `resume` is not set.
    """
    folder = Path(options.out)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"{folder}: cannot be a run's folder ({error.strerror}): choose another `out`") from error
    alone = locked(folder / "lock", "wait for it, or choose another `out`")
    with alone if distributed.rank() == 0 else contextlib.nullcontext():
        if os.path.lexists(folder / STATE) and not options.resume:
            raise ValueError(f"{folder}: already holds a run: continue it with `resume=True`, or choose another `out`")
        yield folder


# ---- the model ------------------------------------------------------------------------------------------------------


def make_model(options: TrainOptions, load: LoadOptions) -> Pipeline:
    """Return the model to start from: frozen, and of the run's resolution.

    Trained networks are in float32, others on a GPU by default in half precision, except the autoencoder.  Networks
    that no step uses stay on the CPU, if the data are encoded already.  Raises ValueError, one line, if it cannot be
    trained here, or its latents cannot have that resolution.
    """
    device = torch.device(load.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    frozen = load.dtype or ("fp32" if device.type != "cuda" else "bf16" if has_fast_bf16(device) else "fp16")
    is_encoded = options.data is not None and (Path(options.data) / INDEX).exists()
    if options.stage == "diffusion" and options.lora_rank is None:
        dtype = "fp32" if options.train_text or is_encoded else f"{frozen},unet=fp32,vae=fp32"
    elif options.stage == "embedding" or is_encoded:  # text encoders are compared with those that encoded
        dtype = f"fp32,unet={frozen}"
    else:
        dtype = f"{frozen},vae=fp32"
    offload = load.offload or ("model" if is_encoded and device.type != "cpu" else None)
    # No CUDA graph: samples are drawn with weights that change, or other networks.
    model = load_model(replace(load, dtype=dtype, offload=offload, compile="off"))
    check_model(options, model)
    for network in model.networks.values():
        network.requires_grad_(False).eval()
    side = options.resolution or model.family.resolution
    model.latent_shape(side, side)
    return replace(model, family=replace(model.family, resolution=side))


def precision_of(load: LoadOptions, device: torch.device) -> torch.dtype | None:
    """Return autocast's dtype in steps; None: float32."""
    if load.dtype is not None:
        precision: torch.dtype = getattr(torch, PRECISIONS[load.dtype])
        return None if precision == torch.float32 else precision
    if has_fast_bf16(device):
        return torch.bfloat16
    return torch.float16 if device.type == "cuda" else None


def check_model(options: TrainOptions, model: Pipeline) -> None:
    """Raise ValueError, one line, if this model cannot be trained here."""
    family, title = model.family, model.family.title
    if not isinstance(model.vae, AutoencoderKL):
        raise ValueError(f"{title}: has no KL autoencoder, the only kind that can be trained with here")
    if options.lcm and (model.schedule.is_flow or family.unet.guidance_dim is not None):
        raise ValueError(f"{title}: `lcm` distils Stable Diffusion 1, 2 and XL only: leave it out")
    if model.schedule.is_flow and family.task == "txt2img":  # transformers with several text encoders
        if options.lora_rank is None or options.lora_text:
            raise ValueError(f"{title}: only a LoRA of its transformer can be trained here: give `lora_rank=16`")
        fixed = options.min_snr is not None or options.weighting in ("snr", "debiased")
        if fixed or options.tokens is not None:
            raise ValueError(f"{title}: leave out `min_snr`, `weighting` and `tokens`, which are for CLIP and betas")
        return
    if options.flow_shift is not None or options.flow_sampling != "logit_normal":
        raise ValueError(f"{title}: leave out `flow_shift` and `flow_sampling`, which are for rectified flows")
    if family.unet.guidance_dim is not None and options.lora_rank is None and options.stage == "diffusion":
        raise ValueError(f"{title}: is distilled: train a LoRA of it, or the model it was distilled from")
    if options.stage == "control" and not isinstance(model.unet, LDMUNet):
        raise ValueError(f"{title}: has no UNet that a ControlNet could steer")
    encoders: tuple[Any, ...] = model.text_encoders
    reads_text = family.task == "txt2img" and family.conditioner in ("clip", "sdxl")
    if not reads_text or len(token_tables(model)) < len(encoders):
        raise ValueError(f"{title}: only text-to-image models with CLIP text encoders can be trained here")
    length = min(encoder.spec.length for encoder in encoders)
    if options.tokens is not None and (options.tokens > length or len(encoders) > 1):
        raise ValueError(f"got `tokens` {options.tokens}, expected 2 to {length}, the length of a single text encoder")


def text_encoders(model: Pipeline) -> dict[str, nn.Module]:
    """Return a model's text encoders by role."""
    return {role: network for role, network in model.networks.items() if role not in ("unet", "vae")}


def trained_networks(options: TrainOptions, model: Pipeline) -> dict[str, nn.Module]:
    """Return the networks of a diffusion model that are trained, or changed by a LoRA, by role."""
    if options.stage in ("embedding", "control"):
        return {}
    with_text = options.lora_text if options.lora_rank is not None else options.train_text
    return {"unet": model.unet} | (text_encoders(model) if with_text else {})


# ---- what is trained, and how ---------------------------------------------------------------------------------------


def make_loss(options: TrainOptions, model: Pipeline, empty: Mapping[str, Tensor] | None = None) -> Loss:
    """Return the loss with the networks to train: the diffusion model, or the new ones.

    `empty` holds the embeddings of no caption, if the data hold all captions' embeddings.  A LoRA is not attached yet.
    """
    if options.tokens is not None:
        assert model.tokenizer is not None
        model = replace(model, tokenizer=replace(model.tokenizer, length=options.tokens))
    networks, control = trained_networks(options, model), None
    if options.stage == "embedding":
        vectors = Vectors(model, options.init_word, options.vectors)
        model, networks = vectors.known_to(model, str(options.token)), {"embedding": vectors}
    elif options.stage == "control":
        control = new_control(model, options.seed)
        networks = {"control": control}
    elif options.lora_rank is not None:
        shape = options.lora_kind, options.lokr_factor, options.lora_conv, options.lora_dropout
        lora = LoRA(networks, options.lora_rank, options.lora_alpha, *shape, options.seed)
        if options.lora_weights is not None:
            load_lora(lora, Path(options.lora_weights))
        networks = {"lora": lora.to(model.device)}
    else:
        for network in networks.values():
            network.requires_grad_(True)
            for parameter in unread_parameters(network):  # they would have no gradient
                parameter.requires_grad_(False)
    weighting: Weighting = uniform
    if options.weighting == "learned":
        networks["weighting"] = weighting = LearnedWeighting().to(model.device)
    elif options.weighting is not None or options.min_snr is not None:
        weighting = of_x0(options.weighting or "min_snr", model.schedule.prediction, options.min_snr or 5.0)
    if options.lcm:
        return ConsistencyLoss(model, networks, empty=empty, guidance=options.lcm_guidance)
    return DiffusionLoss(
        model, networks, options.caption_dropout, weighting, empty, None, control, options.noise_offset,
        (options.min_timestep, options.max_timestep), options.flow_sampling, options.flow_shift,
    )  # fmt: skip


def _prior(options: TrainOptions, model: Pipeline, attached: AttachedLoRA | None) -> Prior | None:
    """Return what the model should not forget, as the options say."""
    if options.class_data is None and options.class_prompt is None:
        return None
    caption = options.class_prompt if options.class_data is None else None
    frozen = model
    if caption is not None and attached is None:  # all of the network changes
        copies: dict[str, Any] = {role: copy.deepcopy(net) for role, net in trained_networks(options, model).items()}
        frozen = model.with_networks(**{role: net.requires_grad_(False) for role, net in copies.items()})

    @contextlib.contextmanager
    def base() -> Iterator[Pipeline]:
        with contextlib.nullcontext() if attached is None else attached.off():
            yield frozen

    return Prior(options.prior_weight, caption, base)


def make_trainer(
    options: TrainOptions, loss: Loss, precision: torch.dtype | None, inputs: Mapping[str, str] = MappingProxyType({})
) -> Trainer:
    """Return a trainer of a loss's networks, at the run's current step.  Raises as Trainer does."""
    trainer = Trainer(loss, options, Path(options.out), precision, inputs)
    if options.resume and os.path.lexists(trainer.folder / STATE):
        trainer.resume()
        log.info("continuing at step %d", trainer.step)
    elif options.resume:
        log.info("%s: holds no state to continue from, a new run begins", trainer.folder)
    if distributed.rank() == 0:
        if trainer.step == 0:
            set_aside(trainer.folder, checkpoint_path(options))
        about = asdict(options)
        trainer.log.loggers = [open_logger(name, trainer.folder, about, trainer.step) for name in options.log_to]
    return trainer


# ---- the files besides the state and the log ------------------------------------------------------------------------


class Saver:
    """Write what follows the state: the checkpoint, averages, the plot and samples.  All processes call it."""

    def __init__(
        self, options: TrainOptions, model: Pipeline, trainer: Trainer, data: Data, whole: Mapping[str, nn.Module]
    ) -> None:
        """`whole` are copies on the CPU of the networks that are divided among processes."""
        self.options, self.model, self.trainer, self.whole = options, model, trainer, whole
        self.prompts = options.samples.split("|") if options.samples else first_captions(data.train)
        self.hint = data.train.example(0).hint if options.stage == "control" else None

    def __call__(self, step: int) -> None:
        """Write them.  Raises OSError."""
        options, trainer, folder = self.options, self.trainer, self.trainer.folder
        average = {role: tree_map(distributed.gather, net.state_dict()) for role, net in trainer.ema.items()}
        if distributed.rank() > 0:
            return
        ema = dict(trainer.ema)
        for role, network in self.whole.items():
            network.load_state_dict(average[role])
            ema[role] = network.to(self.model.device)
        path = checkpoint_path(options)
        write_checkpoint(path, self.model, ema, step)
        if options.keep:
            with replacing(path.with_stem(f"{path.stem}-{step:07}")) as part:
                shutil.copyfile(path, part)
            for older in sorted(folder.glob(f"{path.stem}-*{path.suffix}"))[: -options.keep]:
                older.unlink()
        if trainer.averages is not None:
            trainer.averages.store(folder, step)
        plot_losses(folder)
        every = options.save_every if options.sample_every is None else options.sample_every
        is_due = every and (step % every == 0 or step == trainer.steps) and not samples_path(trainer).exists()
        if is_due:  # after a resume only if the run ended between the state and its samples
            sample(options, self.model, trainer, ema, self.prompts, self.hint)
        for network in self.whole.values():
            network.cpu()


def checkpoint_path(options: TrainOptions) -> Path:
    """Return the path of the checkpoint that a run writes."""
    kind = "lora" if options.lora_rank is not None else {"diffusion": "model"}.get(options.stage, options.stage)
    return Path(options.out) / f"{kind}.safetensors"


def set_aside(folder: Path, checkpoint: Path) -> None:
    """Move away the log, samples and averages of a run that left no state, so that a new one does not continue them."""
    kept = f"{checkpoint.stem}-*{checkpoint.suffix}"
    patterns = LOG, "samples-*.png", kept, AVERAGES, "tensorboard", "wandb.id"
    if left := [path for pattern in patterns for path in sorted(folder.glob(pattern))]:
        numbers = itertools.count(1)
        aside = next(path for number in numbers if not os.path.lexists(path := folder / f"earlier-{number}"))
        aside.mkdir()
        for path in left:
            path.rename(aside / path.name)
        log.info("%s: holds what a run without a state left, which is in %s now", folder, aside)


def sample(
    options: TrainOptions, model: Pipeline, trainer: Trainer, ema: Mapping[str, nn.Module], prompts: Sequence[str],
    hint: Tensor | None = None,
) -> None:  # fmt: skip
    """Draw a grid of samples with the EMA weights, by network: a row for each prompt, always from the same noise.

    hint (3,H,W) uint8 is the image that a ControlNet reads for all of them.  If that fails, as for lack of memory, a
    warning says so.
    """
    how: dict[str, Any] = {"sampler": "dpmpp_2m", "steps": SAMPLE_STEPS}
    if options.lcm:
        how = {"sampler": "lcm", "steps": 4, "scale": 1.0}
    if hint is not None:
        how |= {"height": hint.shape[1], "width": hint.shape[2]}
        how["control"] = [control_with(model, ema["control"], hint.float() / 127.5 - 1)]
    with_ema: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
    if ema.keys() & {"lora", "embedding"}:  # these change the model's networks
        with_ema = using(trainer.loss.networks, ema)
    else:
        model = _with_networks(model, ema)
    try:
        with with_ema, trainer.autocast():
            how |= {"seed": [*range(SAMPLES)] * len(prompts), "batch_size": 1 if model.offloader else SAMPLES}
            images = model.txt2img([prompt for prompt in prompts for _ in range(SAMPLES)], **how)
        with replacing(samples_path(trainer)) as part:
            grid(images, columns=SAMPLES).save(part, format="PNG")
    except Exception as error:  # of any kind: the run matters more
        why = (str(error).splitlines() or [type(error).__name__])[0]
        log.warning(
            "step %d has no samples (%.200s): the run continues; `sample_every=0` skips them", trainer.step, why
        )


def samples_path(trainer: Trainer) -> Path:
    """Return the path of the samples of the trainer's step."""
    return trainer.folder / f"samples-{trainer.step:07}.png"


def write_checkpoint(path: Path, model: Pipeline, networks: Mapping[str, nn.Module], step: int) -> None:
    """Write the file of a run after a step, with the weights of networks that it trained, by name."""
    contents = {"embedding": embedding_file, "control": control_file, "lora": kohya_file}
    name = next((name for name in contents if name in networks), None)
    tensors, metadata = checkpoint(model, networks) if name is None else contents[name](networks[name], model)
    write_tensors(path, tensors, metadata | {"step": str(step)})


def checkpoint(model: Pipeline, networks: Mapping[str, nn.Module]) -> Content:
    """Return tensors (float16) and metadata of a checkpoint in the original layout, with these networks by role."""
    whole = _with_networks(model, networks)
    return checkpoint_content(model, {role: whole.networks[role].state_dict() for role in model.family.specs})


def _with_networks(model: Pipeline, networks: Mapping[str, nn.Module]) -> Pipeline:
    return model.with_networks(**{role: net for role, net in networks.items() if role in model.family.specs})


def write_average(folder: Path, average: tuple[Weights, int], out: Path) -> None:
    """Write the file of a run with the weights of an average after a step.  Raises as a run does."""
    options, load = with_config(TrainOptions(config=os.fspath(folder / CONFIG), out=os.fspath(folder)), LoadOptions())
    model = make_model(options, replace(load, device="cpu"))
    networks, (weights, step) = make_loss(options, model).networks, average
    for name, network in networks.items():
        for key, parameter in network.named_parameters():
            parameter.data = weights[f"{name}.{key}"]
    write_checkpoint(out, model, networks, step)


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
