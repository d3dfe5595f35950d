"""A training run, from its options to its checkpoint."""

import contextlib
import copy
import dataclasses
import functools
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from ldm_lite import Pipeline
from ldm_lite.cli.options import LoadOptions
from ldm_lite.cli.writing import locked, write_whole
from ldm_lite.networks import has_fast_bf16
from ldm_lite.train import distributed, outputs
from ldm_lite.train.config import CONFIG, as_toml, with_config
from ldm_lite.train.ema import using
from ldm_lite.train.encoded import EncodedDataset
from ldm_lite.train.examples import Dataset
from ldm_lite.train.loggers import open_logger
from ldm_lite.train.lora import AttachedLoRA, LoRA
from ldm_lite.train.losses import ConsistencyLoss, DiffusionLoss, Loss, Prior, checkpoint_activations
from ldm_lite.train.options import TrainOptions, check
from ldm_lite.train.setup import (
    check_encoded,
    encoded,
    held_out,
    make_loss,
    make_model,
    no_caption,
    open_dataset,
    side_of,
    text_encoders,
    trained_networks,
)
from ldm_lite.train.state import STATE
from ldm_lite.train.trainer import TrainConfig, Trainer
from ldm_lite.train.validation import Validation

log = logging.getLogger("ldm_lite")


def train(
    options: TrainOptions, load: LoadOptions, on_step: Callable[[int, float | None], None] = lambda step, loss: None
) -> Path:
    """Start or continue a training run and return the path of its checkpoint.

    on_step gets the number of steps done and, now and then, their mean loss.  Raises ValueError, one line, for unusable
    options, data or models, and if the loss is not finite.
    """
    options, load = with_config(options, load)
    check(options, load)
    distributed.init()
    if distributed.rank() > 0:
        log.setLevel(logging.WARNING)
        on_step = lambda step, loss: None  # noqa: E731
    with run_folder(options) as folder:
        if distributed.rank() == 0:
            write_whole(folder / CONFIG, as_toml(options, load))
        _train(options, load, on_step)
    return outputs.checkpoint_path(options)


@contextlib.contextmanager
def run_folder(options: TrainOptions) -> Iterator[Path]:
    """Within the block no other run trains in the options' folder, which is made if it is missing.

    Raises ValueError if one does, or if the folder holds a run that is not to be continued.
    """
    folder = Path(options.out)
    folder.mkdir(parents=True, exist_ok=True)
    alone = locked(folder / "lock", "wait for it, or choose another `out`")
    with alone if distributed.rank() == 0 else contextlib.nullcontext():
        if os.path.lexists(folder / STATE) and not options.resume:
            raise ValueError(f"{folder}: already holds a run: continue it with `resume=True`, or choose another `out`")
        yield folder


class Data(NamedTuple):
    """The data of a run, latents where they are finite."""

    train: Dataset
    prior: Dataset | None  # images of the class
    validation: Dataset | None
    encoded: bool  # beforehand: no step uses the autoencoder
    empty: Mapping[str, Tensor] | None  # with the text: no step uses the text encoders


def _train(options: TrainOptions, load: LoadOptions, on_step: Callable[[int, float | None], None]) -> None:
    torch.manual_seed(options.seed)
    model = make_model(options, load)
    model = replace(model, family=replace(model.family, resolution=side_of(options, model)))
    for network in model.networks.values():
        network.requires_grad_(False).eval()
    data = _data(options, model)
    loss = make_loss(options, model, data.empty)
    if options.stage == "embedding" and isinstance(loss, DiffusionLoss):
        model = loss.model  # whose prompts know the name
    released = ["vae"] * data.encoded + list(text_encoders(model)) * (data.empty is not None)
    for role in released:
        getattr(model, role).to("meta")  # no step uses it
    with contextlib.ExitStack() as stack:
        attached = None
        if isinstance(lora := loss.networks.get("lora"), LoRA):
            attached = stack.enter_context(lora.attach(trained_networks(options, model)))
        if isinstance(loss, DiffusionLoss):
            loss.prior = _prior(options, model, attached)
        if not options.shard:  # which takes contiguous weights only
            lay_out([*loss.networks.values(), *model.networks.values()])
        trainer = make_trainer(options, loss)
        if options.compile_network:
            whole = options.lora_rank is None and options.stage != "embedding"
            for network in loss.networks.values() if whole else [model.unet]:
                network.compile()
        if isinstance(loss, ConsistencyLoss) and attached is not None:
            loss.base, loss.average = attached.off, functools.partial(using, loss.networks, trainer.ema)
        if data.validation is not None and isinstance(loss, DiffusionLoss):
            every = options.validate_every or options.save_every
            trainer.validation = Validation(loss, data.validation, options.batch, every)
        if options.checkpointing:  # after the trainer has copied the networks for the EMA
            for network in (model.unet, *model.text_encoders, *loss.networks.values()):
                stack.enter_context(checkpoint_activations(network))

        def save(step: int) -> None:
            average = {role: tree_map(distributed.gather, net.state_dict()) for role, net in trainer.ema.items()}
            if distributed.rank() == 0:
                fresh = make_model(options, replace(load, device="cpu")) if released or options.shard else model
                ema = dict(trainer.ema)
                for role in average if options.shard else ():
                    ema[role] = getattr(fresh, role)
                    ema[role].load_state_dict(average[role])
                    ema[role].to(model.device)
                whole = {role: getattr(fresh, role).to(model.device) for role in released}
                hint = data.train.example(0).hint if options.stage == "control" else None
                outputs.save(options, replace(model, **whole), trainer, ema, hint)

        trainer.fit(data.train, on_step, save, data.prior)


def _data(options: TrainOptions, model: Pipeline) -> Data:
    """Open and encode the data of a run."""
    dataset = open_dataset(options, model, options.data)
    reads_text = "text_encoder" not in trained_networks(options, model) and options.stage != "embedding"
    images = (options.class_data, options.class_prompt, options.validation if options.share is None else None)

    def latents(dataset: Dataset, name: str) -> Dataset:
        if isinstance(dataset, EncodedDataset):
            check_encoded(options, model, dataset, reads_text)
        elif dataset.shards is not None:
            return encoded(options, dataset, model.vae, name)
        return dataset

    train = latents(dataset, "latents")
    prior = validation = None
    if options.class_data is not None:
        prior = latents(open_dataset(options, model, options.class_data), "latents-class")
    if options.share is not None:
        train, validation = held_out(options, train, options.share)
    elif options.validation is not None:
        validation = latents(open_dataset(options, model, options.validation), "latents-validation")
        if validation.shards is None:
            raise ValueError("`validation` needs finite data: give a folder of images")
    empty = None
    if isinstance(dataset, EncodedDataset) and reads_text and not any(images):
        empty = no_caption(model, dataset)
    return Data(train, prior, validation, isinstance(dataset, EncodedDataset), empty)


def _prior(options: TrainOptions, model: Pipeline, attached: AttachedLoRA | None) -> Prior | None:
    """Return what the model should keep of what it knew, as the options say."""
    if options.class_data is None and options.class_prompt is None:
        return None
    caption = options.class_prompt if options.class_data is None else None
    frozen = model
    if caption is not None and attached is None:  # all of the network changes
        copies: dict[str, Any] = {role: copy.deepcopy(net) for role, net in trained_networks(options, model).items()}
        frozen = replace(model, **{role: net.requires_grad_(False) for role, net in copies.items()})

    @contextlib.contextmanager
    def base() -> Iterator[Pipeline]:
        with contextlib.nullcontext() if attached is None else attached.off():
            yield frozen

    return Prior(options.prior_weight, caption, base)


def make_trainer(options: TrainOptions, loss: Loss) -> Trainer:
    """Return a trainer of a loss's networks, at the run's current step.  Raises as Trainer does."""
    device = next(p for network in loss.networks.values() for p in network.parameters()).device
    trainer = Trainer(loss, _config(options, device), Path(options.out))
    if options.resume and os.path.lexists(trainer.folder / STATE):
        trainer.resume()
        log.info("continuing at step %d", trainer.step)
    elif options.resume:
        log.info("%s: holds no state to continue from, a new run begins", trainer.folder)
    if distributed.rank() == 0:
        trainer.log.loggers = [
            open_logger(name, trainer.folder, dataclasses.asdict(options), trainer.step) for name in options.log_to
        ]
    return trainer


def lay_out(networks: Iterable[nn.Module]) -> None:
    """Give weights of convolutions the layout of the feature maps; frozen ones too, or each pass reorders them."""
    for weight in {p for network in networks for p in network.parameters()}:
        if weight.ndim == 4 and weight.is_floating_point():
            weight.data = weight.data.contiguous(memory_format=torch.channels_last)


def _config(options: TrainOptions, device: torch.device) -> TrainConfig:
    return TrainConfig(
        steps=options.steps,
        batch=options.batch,
        accumulate=options.accumulate,
        lr=options.lr,
        warmup=options.warmup,
        weight_decay=options.weight_decay,
        ema_decay=options.ema_decay,
        ema_lengths=options.ema_lengths,
        optimizer=options.optimizer,
        clip=options.clip,
        seed=options.seed,
        minutes=options.minutes,
        save_every=options.save_every,
        workers=options.workers,
        bf16=has_fast_bf16(device),
        shard=options.shard,
    )
