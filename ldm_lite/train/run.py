"""A training run, from its options to its checkpoint."""

import contextlib
import logging
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from torch.utils._pytree import tree_map

from ldm_lite.checkpoint.model import Model
from ldm_lite.cli.options import LoadOptions
from ldm_lite.runtime.precision import has_fast_bf16
from ldm_lite.train import distributed, outputs
from ldm_lite.train.config import CONFIG, as_toml, with_config
from ldm_lite.train.data import write_atomically
from ldm_lite.train.encoded import EncodedDataset
from ldm_lite.train.lora import LoRA
from ldm_lite.train.losses import Loss, checkpoint_activations
from ldm_lite.train.norm import use_fast_backward
from ldm_lite.train.options import TrainOptions, check
from ldm_lite.train.setup import (
    check_encoded,
    encoded,
    make_loss,
    make_model,
    open_dataset,
    trained_networks,
    with_measured_scale,
)
from ldm_lite.train.state import STATE, locked
from ldm_lite.train.trainer import TrainConfig, Trainer

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
    folder = Path(options.out)
    folder.mkdir(parents=True, exist_ok=True)
    with locked(folder) if distributed.rank() == 0 else contextlib.nullcontext():
        if os.path.lexists(folder / STATE) and not options.resume:
            raise ValueError(f"{folder}: already holds a run: continue it with `resume=True`, or choose another `out`")
        if distributed.rank() == 0:
            text = as_toml(options, load)
            write_atomically(folder / CONFIG, lambda path: path.write_text(text, encoding="utf-8"))
        _train(options, load, on_step)
    return outputs.checkpoint_path(options)


def _train(options: TrainOptions, load: LoadOptions, on_step: Callable[[int, float | None], None]) -> None:
    torch.manual_seed(options.seed)
    model = make_model(options, load)
    dataset = given = open_dataset(options, model.family.resolution)
    empty = None
    if options.stage == "diffusion":
        model.vae.requires_grad_(False).eval()
        # A flow's several encoders read the captions in every step, also where embeddings are at hand.
        reads_text = "text_encoder" not in trained_networks(options, model) and not model.schedule.is_flow
        if isinstance(dataset, EncodedDataset):
            check_encoded(options, model, dataset, reads_text)
            empty = dataset.empty() if reads_text else None
        if options.preset is not None:
            model = with_measured_scale(model, dataset, options.seed)
        if dataset.shards is not None and not isinstance(dataset, EncodedDataset):
            dataset = encoded(options, dataset, model.vae)
    elif isinstance(dataset, EncodedDataset):
        raise ValueError(f"{options.data}: holds latents: an autoencoder is trained on images")
    loss = make_loss(options, model, empty)
    released = ["vae", *["text_encoder"] * (empty is not None)] if isinstance(given, EncodedDataset) else []
    for role in released:
        getattr(model, role).to("meta")  # no step uses it
    with contextlib.ExitStack() as stack:
        if isinstance(lora := loss.networks.get("lora"), LoRA):
            stack.enter_context(lora.attach(trained_networks(options, model)))
        trainer = _trainer(options, model, loss)
        if options.checkpointing:  # after the trainer has copied the networks for the EMA
            stack.enter_context(checkpoint_activations(model.unet))

        def save(step: int) -> None:
            average = {role: tree_map(distributed.whole, net.state_dict()) for role, net in trainer.ema.items()}
            if distributed.rank() == 0:
                fresh = make_model(options, replace(load, device="cpu")) if released or options.shard else model
                ema = dict(trainer.ema)
                for role in average if options.shard else ():
                    ema[role] = getattr(fresh, role)
                    ema[role].load_state_dict(average[role])
                    ema[role].to(model.device)
                whole = {role: getattr(fresh, role).to(model.device) for role in released}
                outputs.save(options, replace(model, **whole), trainer, ema)

        trainer.fit(dataset, on_step, save)


def _trainer(options: TrainOptions, model: Model, loss: Loss) -> Trainer:
    """Return a trainer at the run's current step, with networks set up for training."""
    networks = loss.networks.values()
    if not options.shard:  # which takes contiguous weights only
        for weight in (p for network in networks for p in network.parameters() if p.ndim == 4):
            weight.data = weight.data.contiguous(memory_format=torch.channels_last)
    trainer = Trainer(loss, _config(options, model.device), Path(options.out))
    if options.resume and os.path.lexists(trainer.folder / STATE):
        trainer.resume()
        log.info("continuing at step %d", trainer.step)
    elif options.resume:
        log.info("%s: holds no state to continue from, a new run begins", trainer.folder)
    if model.device.type == "cpu":
        for network in networks:
            use_fast_backward(network)
    if options.compile_network:
        for network in networks if options.lora_rank is None else [model.unet]:
            network.compile()
    return trainer


def _config(options: TrainOptions, device: torch.device) -> TrainConfig:
    return TrainConfig(
        steps=options.steps,
        batch=options.batch,
        accumulate=options.accumulate,
        lr=options.lr,
        warmup=options.warmup,
        weight_decay=options.weight_decay,
        ema_decay=options.ema_decay,
        clip=options.clip,
        seed=options.seed,
        minutes=options.minutes,
        save_every=options.save_every,
        workers=options.workers,
        bf16=has_fast_bf16(device),
        shard=options.shard,
    )
